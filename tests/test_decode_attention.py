"""Attention of new tokens to a cache, against float32 attention over a cache updated by a scatter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import triton_kernels

from pallas_kernels.decode_attention import decode_attention, unsupported
from specjax import SamplingParams, decode, proposers, sampling
from specjax.models.attention import attend
from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
from specjax.models.rope import rotate, rotation

CASES = {  # B, T, H, kv heads, D, S, start of each row
    "empty and full": (2, 3, 4, 2, 16, 40, [0, 37]),
    "past the end": (3, 6, 8, 2, 64, 200, [197, 199, 200]),
    "one token": (1, 1, 4, 1, 32, 300, [257]),
    "one split": (40, 2, 8, 8, 16, 70, [i % 69 for i in range(40)]),
    "blocks of several splits": (1, 2, 4, 2, 16, 3000, [2900]),
}


def operands(batch, num_tokens, heads, kv_heads, size, slots, start, dtype=jnp.bfloat16):
    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape).astype(dtype)

    new, cached = (batch, num_tokens, kv_heads, size), (batch, slots, kv_heads, size)
    query = normal(0, batch, num_tokens, heads, size)
    return query, normal(1, *new), normal(2, *new), normal(3, *cached), normal(4, *cached), jnp.array(start, jnp.int32)


def expected(query, key, value, key_cache, value_cache, start, rotation=None, window=None, scale=None, softcap=None):
    if rotation is not None:
        query, key = rotate(query, rotation), rotate(key, rotation)
    slot = start[:, None] + jnp.arange(query.shape[1])[None]
    row = jnp.arange(len(start))[:, None]
    caches = key_cache.at[row, slot].set(key, mode="drop"), value_cache.at[row, slot].set(value, mode="drop")
    distance = slot[..., None] - jnp.arange(key_cache.shape[1])[None, None]
    mask = (distance >= 0) & (distance < (window or key_cache.shape[1] + query.shape[1]))
    wide = (x.astype(jnp.float32) for x in (query, *caches))
    with jax.default_matmul_precision("highest"):
        return attend(*wide, mask[:, None], scale, softcap), *caches


def check(case, interpret, turned=False, **options):
    arrays = operands(*case)
    turns = rotation(jnp.arange(case[0])[:, None] * 7 + jnp.arange(case[1])[None], case[4], 100.0) if turned else None
    attended, *caches = jax.jit(partial(decode_attention, interpret=interpret, **options))(*arrays, turns)
    reference, *reference_caches = expected(*arrays, turns, **options)
    fits = (np.array(case[-1])[:, None] + np.arange(case[1]) < case[5])[..., None, None]
    difference = np.where(fits, np.asarray(attended, np.float32) - reference, 0)
    assert np.linalg.norm(difference) < 5e-3 * np.linalg.norm(np.where(fits, reference, 0))
    for cache, reference_cache in zip(caches, reference_caches, strict=True):
        cache, reference_cache = (np.asarray(x, np.float32) for x in (cache, reference_cache))
        rounds = turned and jax.default_backend() == "gpu"  # keys are turned elsewhere, and rounded to 8 bits anew
        np.testing.assert_allclose(cache, reference_cache, rtol=2**-7 if rounds else 0)


TURNED, WINDOW = {"turned": True, "window": 2}, {"window": 70, "scale": 0.3, "softcap": 2.0}


@pytest.mark.parametrize(
    "case, options",
    [
        ("empty and full", TURNED),
        ("past the end", WINDOW),
        ("one token", {}),
        pytest.param("one token", TURNED, marks=pytest.mark.slow),
        pytest.param("one split", {}, marks=pytest.mark.slow),
        pytest.param("one split", WINDOW, marks=pytest.mark.slow),
        pytest.param("blocks of several splits", TURNED, marks=pytest.mark.slow),
        pytest.param("blocks of several splits", {}, marks=pytest.mark.slow),
    ],
)
def test_against_reference(case, options):
    check(CASES[case], True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, TURNED, WINDOW])
@pytest.mark.parametrize("case", CASES)
def test_against_reference_on_a_gpu(case, options):
    check(CASES[case], False, **options)


def test_padding_is_not_read():
    """NaN in a slot past a row's length reaches no output."""
    query, key, value, key_cache, value_cache, start = operands(*CASES["empty and full"])
    unseen = jnp.arange(40)[None, :, None, None] >= start[:, None, None, None]
    poisoned = (jnp.where(unseen, jnp.nan, cache) for cache in (key_cache, value_cache))
    attended = decode_attention(query, key, value, *poisoned, start, interpret=True)[0]
    np.testing.assert_array_equal(
        attended, decode_attention(query, key, value, key_cache, value_cache, start, interpret=True)[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1, 6, 32, 8, 128, 640, [0]), (64, 4, 32, 8, 64, 640, [0] * 64)])
def test_lowers_for_cuda(case):
    names = [kernel.name for kernel in triton_kernels(decode_attention, *jax.eval_shape(lambda: operands(*case)))]
    assert names == ["decode_attention", "join_splits"][: 2 if case[0] == 1 else 1]


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_decoding_lowers_for_cuda(num_drafts):
    """The whole loop: the kernel in the layers of target and draft, in place of XLA's attention."""
    config = DecoderConfig(512, 64, 2, 4, 2, 16, 128, 256)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), param_shapes(config))
    model = decoder_model(config, params)
    proposer = proposers.draft_model(model, num_drafts) if num_drafts else proposers.none()
    rows = sampling.batch([SamplingParams(max_tokens=9)])
    state = decode.prefill(
        model, proposer, jnp.ones((1, 3), int), jnp.array([3]), rows, jax.random.key(0), max_length=64
    )

    def step(model, proposer, state):
        return decode.step(model, proposer, state)

    names = [kernel.name for kernel in triton_kernels(step, model, proposer, state)]
    assert names.count("decode_attention") == (3 if num_drafts else 1)  # a call of each width; layers share a function


def test_unsupported():
    arrays = operands(1, 2, 4, 2, 16, 40, [0], jnp.float32)
    assert "got float32 and float32" in unsupported(arrays[0], arrays[3])
    with pytest.raises(NotImplementedError, match="float32"):
        decode_attention(*arrays)
