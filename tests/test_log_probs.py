"""Log-probabilities against NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import log_probs
from specjax.decoding.log_probs import logprobs
from specjax.types import Categorical


def reference(logits, tokens, n):
    """The same figures in float64, by a stable sort."""
    logits = np.asarray(logits).astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_prob = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :n]
    index = np.maximum(tokens, 0)[..., None]
    chosen = np.take_along_axis(log_prob, index, axis=-1)
    rank = 1 + np.sum(log_prob > chosen, axis=-1)
    is_none = tokens < 0
    top = np.take_along_axis(log_prob, order, axis=-1)
    return np.where(is_none, 0, chosen[..., 0]), np.where(is_none, 0, rank), order, top


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vocab_size, n", [(7, 0), (7, 7), (1000, 5), (20011, 3)])
def test_against_float64(vocab_size, n, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(4 * rng.normal(size=(2, 3, vocab_size)), dtype)  # bfloat16 has ties
    tokens = rng.integers(-1, vocab_size, size=(2, 3)).astype(np.int32)
    found = jax.jit(partial(logprobs, n=n))(logits, tokens)
    for field, value, expected in zip(found._fields, found, reference(logits, tokens, n), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-5, err_msg=field)
    assert [value.dtype for value in found] == [jnp.float32, jnp.int32, jnp.int32, jnp.float32]


def test_worked_by_hand():
    logits = jnp.log(jnp.array([[[0.0, 0.25, 0.5, 0.25]]]))
    found = logprobs(jnp.tile(logits, (1, 5, 1)), jnp.array([[0, 1, 2, 3, -1]]), n=3)
    np.testing.assert_allclose(found.chosen[0], [-np.inf, np.log(0.25), np.log(0.5), np.log(0.25), 0], rtol=1e-6)
    np.testing.assert_array_equal(found.rank[0], [4, 2, 1, 2, 0])
    np.testing.assert_array_equal(found.top_ids[0, 0], [2, 1, 3])
    np.testing.assert_allclose(found.top[0, 0], np.log([0.5, 0.25, 0.25]), rtol=1e-6)


def test_ids_outside_the_vocabulary():
    """They rank as a token of probability 0, after the three that are possible, wherever token 0 stands."""
    logits = jnp.log(jnp.array([[[0.7, 0.2, 0.1, 0.0]]]))
    for ids, ranks, chosen in (([4, 99, 3], [4] * 3, -np.inf), ([-1, -2, -1], [0] * 3, 0)):
        found = logprobs(jnp.tile(logits, (1, 3, 1)), jnp.array([ids]))
        assert found.rank.tolist() == [ranks] and found.chosen.tolist() == [[chosen] * 3]


def test_of_a_distribution():
    """Temperature and cut shape it; temperature 0 is one-hot."""
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1]]] * 2))
    distribution = Categorical(logits, jnp.array([0.5, 0.0]), jnp.log(jnp.full((2, 1), 0.25)))
    found = logprobs(distribution, jnp.array([[1], [0]]), n=3)
    np.testing.assert_allclose(found.top[0, 0], [np.log(0.16 / 0.25), np.log(0.09 / 0.25), -np.inf], rtol=1e-5)
    np.testing.assert_allclose(found.chosen, [[np.log(0.09 / 0.25)], [0]], rtol=1e-5)
    np.testing.assert_array_equal(found.rank, [[2], [1]])


def test_record():
    buffer = log_probs.zeros(2, 4, 1)
    logits = jnp.log(jnp.array([[[0.25, 0.75]] * 3] * 2))
    tokens, slots = jnp.array([[0, 1, -1], [1, -1, -1]]), jnp.array([[1, 2, 3], [3, 4, 5]])
    buffer = log_probs.record(buffer, slots, tokens, logits)
    np.testing.assert_allclose(buffer.chosen, np.log([[1, 0.25, 0.75, 1], [1, 1, 1, 0.75]]), rtol=1e-6)
    np.testing.assert_array_equal(buffer.top_ids[..., 0], [[0, 1, 1, 0], [0, 0, 0, 1]])
    assert buffer.rank is None


def test_large_logits():
    found = logprobs(jnp.array([[[1e4, 1e4, -1e4]]]), jnp.array([[1]]), n=1)
    np.testing.assert_allclose(found.chosen, [[-np.log(2)]], rtol=1e-6)
    np.testing.assert_array_equal(found.top_ids, [[[0]]])


@pytest.mark.parametrize(
    "logits, tokens, n, message",
    [
        ((2, 5), (2,), 0, r"logits must have shape \[B, T, V\] = \(any, any, any\), got \(2, 5\)"),
        ((2, 3, 5), (2,), 0, r"tokens must have shape \[B, T\] = \(2, 3\), got \(2,\)"),
        ((2, 3, 5), (2, 3), 6, r"n must be an integer in \[0, V = 5\], got 6"),
        ((2, 3, 5), (2, 3), -1, r"n must be an integer in \[0, V = 5\], got -1"),
        ((2, 3, 5), (2, 3), 1.0, r"n must be an integer in \[0, V = 5\], got 1.0"),
        ((2, 3, 5), (2, 3), True, r"n must be an integer in \[0, V = 5\], got True"),
    ],
)
def test_errors(logits, tokens, n, message):
    with pytest.raises(ValueError, match=message):
        logprobs(jnp.zeros(logits), jnp.zeros(tokens, jnp.int32), n)


def test_dtypes_are_checked():
    with pytest.raises(ValueError, match="tokens must be of integer dtype, got float32"):
        logprobs(jnp.zeros((1, 1, 3)), jnp.zeros((1, 1)))
