"""Drafts of a reduced vocabulary: the same beside any neighbour, drawn from the reported distribution, and lossless."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import one_of
from conftest import OPTIMIZED

from specjax import Context, SamplingParams, decode, distributions, proposers, sampling, testing
from specjax.proposers.drawing import Drawer, reduced_vocabulary
from specjax.sampling.guided import Grammar
from specjax.testing.statistics import chi_square
from specjax.verifiers.core import canonical

VOCAB, K, SIZE = 1400, 3, 12  # tokens of the target, drafts, and the size of the token buffer
IDS = np.random.default_rng(0).permutation(VOCAB)[:1100]  # in no order, and of more than two blocks of `distributions`


def lower_the_last_token(logits, context):
    return logits.at[context.tokens[context.length - 1]].add(-1)


PLAIN = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.8, top_k=9),
    SamplingParams(temperature=0.9, top_p=0.7, min_p=0.01),
]
READING = [  # token ids, each in another way
    SamplingParams(presence_penalty=0.5),
    SamplingParams(frequency_penalty=0.5, top_p=0.9),
    SamplingParams(repetition_penalty=1.2, temperature=0),
    SamplingParams(logit_bias={int(IDS[0]): 3}),
    SamplingParams(allowed_token_ids=IDS[::2].tolist()),
    SamplingParams(bad_words=[(int(IDS[1]),)]),
    SamplingParams(min_tokens=2, stop_token_ids=[int(IDS[2])]),
    SamplingParams(logits_processors=[lower_the_last_token]),
    SamplingParams(guided_decoding=Grammar(np.arange(VOCAB) % 2, np.array([[1, 0], [0, 1]]))),
]


def drawn(params, logits, is_greedy=False, temperature=None):
    """The draft of some requests with the same tokens before it."""
    rows = sampling.batch(params, vocab_size=VOCAB)
    if temperature is not None:
        rows = rows._replace(temperature=jnp.where(rows.temperature > 0, temperature, 0))
    count = len(params)
    context = Context(
        jnp.asarray(np.tile(IDS[:SIZE].astype(np.int32), (count, 1))),
        jnp.full(count, 5),
        jnp.ones(count, bool),
        jnp.full(count, 3),
        None if rows.guide is None else jnp.zeros(count, jnp.int32),
    )
    keys = jax.random.split(jax.random.key(1), (len(logits), K))[:count]
    drawer = Drawer(keys, context, rows, is_greedy, reduced_vocabulary(IDS, VOCAB))
    return jax.jit(lambda logits: canonical(drawer.parallel(logits)))(logits[:count])


@pytest.mark.parametrize(
    "is_greedy, temperature",
    [
        (False, None),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_row_draws_the_same_beside_any_other(is_greedy, temperature):
    """The tokens and every reported bit are equal, where logits are equal too: the lowest draft token wins a tie."""
    logits = np.random.default_rng(2).normal(0, 2, (len(PLAIN) + len(READING), K, len(IDS))).astype(np.float32)
    logits[:, :, :100] = np.round(logits[:, :, :100])
    logits[0, :, 40:60] = 9
    options = is_greedy, temperature
    alone, beside = drawn(PLAIN, logits, *options), drawn([*PLAIN, *READING], logits, *options)
    own = slice(len(PLAIN))
    np.testing.assert_array_equal(beside.tokens[own], alone.tokens)
    np.testing.assert_array_equal(alone.num_tokens, K)
    np.testing.assert_array_equal(beside.num_tokens[own], K)
    assert (np.asarray(alone.tokens[0]) == IDS[40]).all()
    if is_greedy:
        assert (alone.distribution, beside.distribution) == (None, None)
        return
    for name in ("logits", "temperature", "min_logit"):
        np.testing.assert_array_equal(getattr(beside.distribution, name)[own], getattr(alone.distribution, name))
    assert (np.asarray(alone.tokens[1:]) != np.asarray(alone.tokens[1:2])).any()


def revive(logits, context):
    """Give every token a logit, those that the drafter lacks too."""
    return jnp.maximum(logits, 0)


def test_nothing_is_reported_that_cannot_be_drawn():
    """A logits processor may raise tokens that the drafter lacks; they stay out of draws and reports."""
    logits = np.random.default_rng(3).normal(0, 2, (2, K, len(IDS))).astype(np.float32)
    draft = drawn([SamplingParams(logits_processors=[revive], top_p=0.9)] * 2, logits)
    is_known = np.isin(np.arange(VOCAB), IDS)
    np.testing.assert_array_equal(np.isfinite(draft.distribution.logits), np.broadcast_to(is_known, (2, K, VOCAB)))
    assert is_known[np.asarray(draft.tokens)].all()


SMALL, FEW = 8, np.array([6, 1, 7, 2, 4])  # tokens of a target and of its drafter
TABLE = np.random.default_rng(4).normal(0, 1, (SMALL, SMALL)).astype(np.float32)
ROWS = [
    SamplingParams(max_tokens=3, temperature=0.8, presence_penalty=0.9, repetition_penalty=1.3, top_p=0.9),
    SamplingParams(max_tokens=3, allowed_token_ids=[0, 1, 4, 6, 7], logit_bias={6: 1.5}, bad_words=[(4, 1)], top_k=4),
    SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=[7], frequency_penalty=0.7, min_p=0.1),
    SamplingParams(max_tokens=3, temperature=0.7),  # reads no ids
]


def repeated(count):
    """The parameters of a batch with as many rows of each of `ROWS`, one after another."""
    return jax.tree.map(lambda x: jnp.asarray(np.repeat(x, count, axis=0)), sampling.batch(ROWS, vocab_size=SMALL))


def expected():
    """The probability of each three tokens after token 0 in plain decoding, for each of `ROWS`."""
    pairs = np.indices((SMALL, SMALL)).reshape(2, -1).T
    drafts = np.tile(pairs, (len(ROWS), 1))
    logits = np.stack([TABLE[0 * drafts[:, 0]], TABLE[drafts[:, 0]], TABLE[drafts[:, 1]]], axis=1)
    one = np.ones(len(drafts), np.int32)
    context = Context(np.zeros((len(drafts), 4), np.int32), one, one > 0, one)
    process = jax.jit(lambda *given: distributions.log_probs(distributions.normalize(sampling.process(*given))))
    probs = np.exp(np.asarray(process(repeated(len(pairs)), logits, context, drafts), np.float64))
    probs = probs.reshape(len(ROWS), SMALL, SMALL, 3, SMALL)
    first, second = probs[:, 0, 0, 0], probs[:, :, 0, 1]
    return first[:, :, None, None] * second[:, :, :, None] * probs[:, :, :, 2]


@partial(jax.jit, compiler_options=OPTIMIZED)  # it runs longer than it compiles
def decoded(target, proposer, ids, rows, verifier):
    length = jnp.full(len(ids), ids.shape[1])
    state = decode.prefill(target, proposer, ids, length, rows, jax.random.key(6), max_length=ids.shape[1] + 3)
    state = decode.generate(target, proposer, state, verifier=verifier)
    return state.context.tokens[:, ids.shape[1] :], state.totals


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_the_distribution_is_the_targets_whatever_requests_ask_for(name):
    """Requests with penalties, masks and cuts in one batch, and one without."""
    count, rng = 5000, np.random.default_rng(5)
    heads = [{"blocks": [], "head": rng.normal(0, 0.6, (len(FEW), SMALL)).astype(np.float32)} for _ in range(2)]
    heads[0]["head"] += np.eye(SMALL, dtype=np.float32)[FEW]  # the first draft is nearly the target's
    proposer = proposers.medusa(heads, vocab_size=SMALL, token_ids=FEW)
    ids = np.zeros((len(ROWS) * count, 2), np.int32)  # the features of the first of two tokens let the first step draft
    given = testing.bigram_model(TABLE), proposer, ids, repeated(count), one_of(name)
    tokens, totals = jax.device_get(decoded(*given))
    assert 0.2 < totals.accepted.sum() / totals.drafted.sum() < 0.9
    for own, joint in zip(np.split(tokens, len(ROWS)), expected(), strict=True):
        counts = np.bincount(np.ravel_multi_index(tuple(own.T), joint.shape), minlength=joint.size)
        test = chi_square(counts, joint)
        assert test.statistic < test.bound
