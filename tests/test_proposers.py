"""Proposers and scorers by hand-worked cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, proposers, sampling, scorers, verifiers
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.sampling import SamplingParams
from specjax.types import Context, Draft

VOCAB = 61
CONFIG = DecoderConfig(VOCAB, 32, 2, 4, 2, 8, 64, 128)


@pytest.fixture(scope="module")
def target():
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, 0)))


def lookup(history: list[int], num_draft_tokens: int, min_n: int, max_n: int) -> list[int]:
    """The rule, in plain Python."""
    for n in range(max_n, min_n - 1, -1):
        if n > len(history):
            continue
        suffix = history[-n:]
        for end in range(n, len(history)):
            if history[end - n : end] == suffix:
                return history[end : end + num_draft_tokens]
    return []


def propose(rows: list[list[int]], num_draft_tokens: int, min_n: int, max_n: int, active=None, size=24):
    tokens = np.full((len(rows), size), 99, np.int32)
    for row, history in zip(tokens, rows, strict=True):
        row[: len(history)] = history
    active = jnp.ones(len(rows), bool) if active is None else active
    context = Context(jnp.asarray(tokens), jnp.array([len(r) for r in rows]), active)
    proposer = proposers.ngram(num_draft_tokens, min_n, max_n)
    draft, _ = jax.jit(proposer.propose)(jax.random.key(0), context, None, ())
    assert draft.distribution is None
    rows = [row[:n] for row, n in zip(draft.tokens.tolist(), draft.num_tokens.tolist(), strict=True)]
    for row, n in zip(draft.tokens.tolist(), draft.num_tokens.tolist(), strict=True):
        assert row[n:] == [-1] * (num_draft_tokens - n)
    return rows


class TestNGram:
    @pytest.mark.parametrize(
        "history, expected",
        [
            ([1, 2, 3, 4], []),  # no match
            ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2]),  # the earliest of two
            ([2, 9, 1, 2, 3, 7, 1, 2], [3, 7, 1]),  # the longest n, though 2 alone occurred before
            ([5, 6, 5], [6, 5]),  # up to the end, not past it
            ([4, 4, 4], [4]),  # overlap with the suffix itself
            ([4, 4], [4]),
            ([4], []),
            ([1, 2, 3, 99, 1, 2, 3], [99, 1, 2]),  # ids that stand past the end too
        ],
    )
    def test_cases(self, history, expected):
        assert lookup(history, 3, 1, 3) == expected
        assert propose([history], 3, 1, 3) == [expected]

    def test_min_n(self):
        assert propose([[2, 9, 1, 2]], 3, 2, 3) == [[]]
        assert propose([[2, 9, 1, 2]], 3, 1, 3) == [[9, 1, 2]]

    def test_against_the_rule(self):
        rng = np.random.default_rng(0)
        for min_n, max_n in ((1, 1), (1, 3), (2, 4)):
            rows = [rng.integers(0, 3, rng.integers(1, 24)).tolist() for _ in range(300)]
            assert propose(rows, 4, min_n, max_n) == [lookup(row, 4, min_n, max_n) for row in rows]

    def test_inactive_rows_have_no_drafts(self):
        assert propose([[1, 2, 1], [1, 2, 1]], 2, 1, 2, active=jnp.array([False, True])) == [[], [2, 1]]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("name", ["block", "match", "rejection"])
    def test_decoding_is_plain_decoding(self, target, temperature, name):
        """Deterministic drafts are verified by exact match: also a sampled run is the plain one."""
        params = [SamplingParams(temperature=temperature, max_tokens=40)] * 2
        prompts, lengths = jnp.array([[3, 4, 3, 4, 3], [7, 7, 0, 0, 0]]), jnp.array([5, 2])
        outputs = []
        for proposer in (None, proposers.ngram(4)):
            state = decode.prefill(
                target, proposer, prompts, lengths, sampling.batch(params), jax.random.key(1), max_length=64
            )
            outputs.append(decode.generate(target, proposer, state, verifier=getattr(verifiers, name)))
        np.testing.assert_array_equal(outputs[0].context.tokens, outputs[1].context.tokens)
        assert int(outputs[1].totals.drafted.sum()) > 0

    @pytest.mark.parametrize("numbers", [(0, 1, 3), (3, 0, 3), (3, 4, 3)])
    def test_bad_numbers(self, numbers):
        with pytest.raises(ValueError, match="must"):
            proposers.ngram(*numbers)


@pytest.mark.parametrize("drafts", [[[3, 4, 5], [6, -1, -1], [-1, -1, -1]], [[1, 2, 3]] * 3, [[], [], []]])
def test_batch_expansion_is_mqa(target, drafts):
    prompts, lengths = jnp.array([[3, 4, 3, 4, 3], [7, 7, 0, 0, 0], [9, 0, 0, 0, 0]]), jnp.array([5, 2, 1])
    rows = sampling.batch([SamplingParams(max_tokens=9)] * 3)
    state = decode.prefill(target, None, prompts, lengths, rows, jax.random.key(0), max_length=32)
    draft = Draft(jnp.array(drafts, jnp.int32).reshape(3, -1))
    one, one_cache = jax.jit(scorers.mqa)(target, state.context, draft, state.cache)
    many, many_cache = jax.jit(scorers.batch_expansion)(target, state.context, draft, state.cache)
    num_drafts = (draft.tokens >= 0).sum(axis=1)
    for b, n in enumerate(num_drafts.tolist()):
        np.testing.assert_allclose(many.logits[b, : n + 1], one.logits[b, : n + 1], atol=2e-5)
        np.testing.assert_allclose(many.features[b, : n + 1], one.features[b, : n + 1], atol=2e-5)
        for a, c in zip(jax.tree.leaves(many_cache), jax.tree.leaves(one_cache), strict=True):
            np.testing.assert_allclose(a[b, : lengths[b] + n], c[b, : lengths[b] + n], atol=2e-5)


def test_decoding_with_batch_expansion(target):
    proposer = proposers.ngram(3)
    params = [SamplingParams(temperature=0, max_tokens=30)] * 2
    prompts, lengths = jnp.array([[3, 4, 3, 4, 3], [7, 7, 0, 0, 0]]), jnp.array([5, 2])
    outputs = []
    for scorer in (scorers.mqa, scorers.batch_expansion):
        state = decode.prefill(
            target, proposer, prompts, lengths, sampling.batch(params), jax.random.key(1), max_length=64
        )
        outputs.append(decode.generate(target, proposer, state, scorer=scorer).context.tokens)
    np.testing.assert_array_equal(*outputs)
