"""The decoding loop on small models: exactness over several steps, ends of sequences, purity."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import LOSSLESS, one_of
from jax.tree_util import Partial

from specjax import decode, metrics, proposers, sampling, scorers, testing, verifiers
from specjax.keys import ACCEPT, gumbel, positions, stream, uniform
from specjax.keys import DRAFT as DRAFT_PURPOSE
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.proposers import drawing
from specjax.sampling import SamplingParams
from specjax.testing import verdicts
from specjax.types import Categorical, Draft, Model, ModelInput, ModelOutput
from specjax.verifiers import core

VOCAB = 61
TARGET = DecoderConfig(VOCAB, 32, 2, 4, 2, 8, 64, 128)
DRAFT = DecoderConfig(VOCAB, 16, 1, 2, 1, 8, 32, 128)

prefill = jax.jit(decode.prefill, static_argnames=("max_length", "chunk_size", "num_logprobs", "prompt_logprobs"))
propose = jax.jit(lambda proposer, *arguments: proposer.propose(*arguments))

MATCH, REJECTION = one_of("match"), one_of("rejection")


def model(config: DecoderConfig, seed: int) -> Model:
    """Random weights, scaled up so that distributions are neither flat nor one-hot."""
    return decoder_model(config, jax.tree.map(lambda x: 4 * x, init_params(config, seed)))


@pytest.fixture(scope="module")
def target():
    return model(TARGET, 0)


@pytest.fixture(scope="module")
def draft():
    return model(DRAFT, 1)


@pytest.fixture(scope="module")
def stranger():
    """A draft model of the target's form, so that one compiled loop takes both, with other weights."""
    return model(TARGET, 1)


def start(target, proposer, params, lengths=(9, 4, 1), max_length=64, keys=None, seed=0, prefill=prefill):
    rng = np.random.default_rng(seed)
    prompts = jnp.asarray(rng.integers(0, VOCAB, (len(lengths), max(lengths))), jnp.int32)
    keys = jax.random.split(jax.random.key(7), len(lengths)) if keys is None else keys
    batch = sampling.batch(params if isinstance(params, list) else [params] * len(lengths))
    return prefill(target, proposer, prompts, jnp.array(lengths), batch, keys, max_length=max_length)


def run(target, proposer, params, verifier=REJECTION, **options):
    return decode.generate(target, proposer, start(target, proposer, params, **options), verifier=verifier)


def outputs(state) -> list[list[int]]:
    context = jax.device_get(state.context)
    return [t[p:n].tolist() for t, p, n in zip(context.tokens, context.prompt_length, context.length, strict=True)]


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_row_ends_where_no_token_can_follow(name):
    """Nothing is committed for a place whose logits are all NaN or -inf, unless the row has ended before it."""
    table = np.full((8, 8), np.nan, np.float32)
    for token, following in ((0, 1), (1, 2), (2, 3), (4, 5), (5, 4), (7, 3)):
        table[token, following] = 0
    table[6] = -np.inf
    target = testing.bigram_model(jnp.asarray(table))
    drafter = testing.bigram_model(jnp.asarray(np.where(np.isnan(table), -9, table)))  # drafts go on past the end
    params = [{}, {}, {"stop_token_ids": [3]}, {"max_tokens": 3}, {}, {"temperature": 0}, {"temperature": 0}]
    rows = sampling.batch([SamplingParams(**{"temperature": 1.0, "max_tokens": 9} | each) for each in params])
    prompts = jnp.array([[0], [4], [0], [0], [6], [2], [3]])
    for proposer in (None, proposers.draft_model(drafter, 2)):
        state = prefill(target, proposer, prompts, jnp.ones(7, int), rows, jax.random.key(0), max_length=16)
        state = decode.generate(target, proposer, state, verifier=one_of(name))
        assert outputs(state) == [[1, 2, 3], [5, 4] * 4 + [5], [1, 2, 3], [1, 2, 3], [], [3], []]
        none, full = decode.NO_TOKEN, decode.MAX_TOKENS
        assert state.finished.tolist() == [none, full, decode.STOP, full, none, none, none]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_greedy_equals_plain(target, draft, stranger, num_draft_tokens, name):
    """One draft of a model of another form, and four of one of the target's, as other tests have them."""
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = run(target, None, params)
    drafter = draft if num_draft_tokens == 1 else stranger
    fast = run(target, proposers.draft_model(drafter, num_draft_tokens), params, one_of(name))
    assert outputs(fast) == outputs(plain)
    assert [len(o) for o in outputs(plain)] == [40, 40, 40]


@pytest.mark.slow
def test_match_equals_plain_sampling(target, stranger):
    """With keys by position, exact match emits what plain sampling does, whatever the drafts, accepted or not."""
    params = SamplingParams(temperature=0.3, top_k=20, top_p=0.95, max_tokens=40)
    plain = outputs(run(target, None, params, MATCH))
    assert outputs(run(target, None, params, REJECTION)) == plain
    for drafter, least in ((stranger, 0.0), (target, 0.3)):
        fast = run(target, proposers.draft_model(drafter, 4), params, MATCH)
        assert outputs(fast) == plain
        assert metrics.acceptance_rate(fast.totals) >= least


@pytest.mark.parametrize(
    "name, temperature", [("block", 0.0), ("block", 1.0), ("match", 0.0), ("rejection", 0.0), ("rejection", 1.0)]
)
def test_target_as_its_own_draft(target, temperature, name):
    """Every draft of the target's own is accepted, over many steps: no gap in the draft's cache."""
    params = SamplingParams(temperature=temperature, max_tokens=50)
    state = run(target, proposers.draft_model(target, 4), params, one_of(name))
    assert metrics.acceptance_rate(state.totals) == 1.0
    assert metrics.mean_acceptance_length(state.totals) == 5.0


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_neighbours_do_not_change_a_request(target, stranger, name):
    """`test_match_equals_plain_sampling` compiles the same loop."""
    proposer = proposers.draft_model(stranger, 4)
    keys = jax.random.split(jax.random.key(3), 3)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, max_tokens=n)
        for t, k, p, n in [(1.0, 5, 1.0, 20), (0.0, -1, 1.0, 11), (1.3, 9, 0.9, 30)]
    ]
    verifier = one_of(name)
    together = run(target, proposer, params, verifier, keys=keys)
    order = [2, 0, 1]
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(0, VOCAB, (3, 9)), jnp.int32)
    lengths = jnp.array([9, 4, 1])
    shuffled = prefill(
        target,
        proposer,
        prompts[jnp.array(order)],
        lengths[jnp.array(order)],
        sampling.batch([params[i] for i in order]),
        keys[jnp.array(order)],
        max_length=64,
    )
    shuffled = outputs(decode.generate(target, proposer, shuffled, verifier=verifier))
    assert [shuffled[order.index(i)] for i in range(3)] == outputs(together)


def test_stop_token_inside_the_accepted_block(target):
    """The target drafts for itself, so whole blocks are accepted; a stop in the middle of one ends the row there."""
    plain = outputs(run(target, None, SamplingParams(temperature=1, max_tokens=30)))
    for offset in range(4, 9):
        stops = [row[offset] for row in plain]
        params = [SamplingParams(temperature=1, max_tokens=30, stop_token_ids=[s]) for s in stops]
        state = run(target, proposers.draft_model(target, 4), params, MATCH)
        for row, expected, stop in zip(outputs(state), plain, stops, strict=True):
            assert row == expected[: expected.index(stop) + 1]
        assert state.finished.tolist() == [decode.STOP] * 3
        assert not state.context.active.any()
        assert np.asarray(state.totals.emitted).tolist() == [len(row) for row in outputs(state)]


def test_stop_of_a_self_draft_block(target):
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = outputs(run(target, None, params))
    stops = [row[3] for row in plain]
    limited = [replace(params, stop_token_ids=[s]) for s in stops]
    state = run(target, proposers.draft_model(target, 4), limited)
    assert outputs(state) == [row[: row.index(s) + 1] for row, s in zip(plain, stops, strict=True)]


@pytest.mark.slow
def test_min_tokens_keep_stop_tokens_out(target, draft):
    params = SamplingParams(temperature=1, max_tokens=30, min_tokens=12, stop_token_ids=list(range(0, VOCAB, 2)))
    state = run(target, proposers.draft_model(draft, 4), params, verifiers.match)
    for row in outputs(state):
        assert len(row) >= 13
        assert all(t % 2 for t in row[:12])
        assert [t % 2 == 0 for t in row].index(True) == len(row) - 1
    assert outputs(run(target, None, params, verifiers.match)) == outputs(state)


@pytest.mark.parametrize("num_draft_tokens", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_end_of_buffer(target, stranger, num_draft_tokens):
    """Rows end where the buffer does, with the tokens that a longer buffer gives, also inside an accepted block."""
    params = SamplingParams(temperature=0, max_tokens=40)
    long = outputs(run(target, None, params))
    for drafter in (stranger, target):
        proposer = proposers.draft_model(drafter, num_draft_tokens) if num_draft_tokens else None
        state = run(target, proposer, params, verifiers.rejection, max_length=20)
        assert state.context.length.tolist() == [20, 20, 20]
        assert state.finished.tolist() == [decode.BUFFER_FULL] * 3
        assert outputs(state) == [row[: 20 - n] for row, n in zip(long, (9, 4, 1), strict=True)]


def test_a_prompt_that_fills_the_buffer_is_finished(target):
    params = SamplingParams(max_tokens=40)
    state = run(target, None, params, verifiers.rejection, lengths=(20, 3, 20), max_length=20)
    assert state.finished.tolist() == [decode.BUFFER_FULL] * 3
    assert state.context.length.tolist() == [20] * 3


def test_no_drafts_past_the_drafts_limit(target, draft):
    """Top1Proposer: a row speculates iff length + K < max_length, strictly."""
    proposer = proposers.draft_model(draft, 4, max_length=16)
    params = SamplingParams(temperature=0, max_tokens=30)
    state = start(target, proposer, params, lengths=(11, 12, 2))
    context = state.context
    keys = positions(state.keys, context.length, 4)
    drafted, _ = propose(proposer, keys, context, state.sampling, state.proposer)
    assert drafted.num_tokens.tolist() == [4, 0, 4]
    assert drafted.tokens[1].tolist() == [-1] * 4
    assert bool((drafted.tokens[0] >= 0).all())
    inactive = context._replace(active=jnp.array([False, True, False]))
    skipped, _ = propose(proposer, keys, inactive, state.sampling, state.proposer)
    assert skipped.num_tokens.tolist() == [0, 0, 0]
    assert skipped.tokens.tolist() == [[-1] * 4] * 3


@pytest.mark.slow
def test_rows_past_the_drafts_limit_decode_normally(target, draft):
    params, lengths = SamplingParams(temperature=0, max_tokens=30), (11, 12, 2)
    limited = proposers.draft_model(draft, 4, max_length=16)
    assert outputs(run(target, limited, params, lengths=lengths)) == outputs(run(target, None, params, lengths=lengths))


def test_nobody_speculates_and_the_draft_is_not_run(target, draft):
    """A draft whose every logit is NaN would show, had it been run."""
    proposer = proposers.draft_model(replace(draft, params=jax.tree.map(lambda x: x * jnp.nan, draft.params)), 4, 16)
    params = SamplingParams(temperature=1, max_tokens=20)
    state = start(target, proposer, params, lengths=(12, 13, 12))
    keys = positions(state.keys, state.context.length, 4)
    drafted, cache = propose(proposer, keys, state.context, state.sampling, state.proposer)
    assert not jnp.isnan(drafted.distribution.logits).any()
    assert all(
        bool(jnp.array_equal(a, b, equal_nan=True))
        for a, b in zip(*map(jax.tree.leaves, (cache, state.proposer)), strict=True)
    )


@pytest.mark.slow
def test_prompts_longer_than_a_chunk(target, stranger):
    params = SamplingParams(temperature=0, max_tokens=10)
    proposer, lengths = proposers.draft_model(stranger, 4), (40, 7, 33)
    whole = run(target, proposer, params, lengths=lengths)
    calls = []
    counted = replace(target, apply=Counting(target.apply, calls))
    in_chunks = jax.jit(partial(decode.prefill, chunk_size=16), static_argnames="max_length")
    state = start(counted, proposer, params, lengths=lengths, prefill=in_chunks)
    assert set(calls) == {(3, 16)}
    assert outputs(decode.generate(target, proposer, state, verifier=REJECTION)) == outputs(whole)


@pytest.mark.slow
def test_ragged_prompts_and_ends(target):
    """Prompts of 1 to 199 tokens in one batch, rows of different ends: as plain decoding."""
    own = replace(target, max_length=256)
    params = [SamplingParams(temperature=i % 3 / 2, max_tokens=1 + 7 * i % 23) for i in range(67)]
    options = dict(lengths=tuple(range(1, 201, 3)), max_length=256, keys=jax.random.split(jax.random.key(1), 67))
    plain = run(own, None, params, verifiers.match, **options)
    fast = run(own, proposers.draft_model(own, 2), params, verifiers.match, **options)
    assert outputs(fast) == outputs(plain)
    assert [len(row) for row in outputs(fast)] == [p.max_tokens for p in params]
    assert min(fast.totals.steps.tolist()) == 1 < max(fast.totals.steps.tolist())


class TestSharedPrompts:
    @pytest.mark.slow
    def test_rows_are_those_of_repeated_prompts(self, target, stranger):
        prompts, lengths = jnp.array([[3, 4, 5, 6], [7, 0, 0, 0]]), jnp.array([4, 1])
        keys, rows = jax.random.split(jax.random.key(0), 3), jnp.array([1, 0, 1])
        requests = sampling.batch([SamplingParams(temperature=1, max_tokens=9)] * 3)
        proposer = proposers.draft_model(stranger, 4)
        shared = prefill(target, proposer, prompts, lengths, requests, keys, max_length=64, rows=rows)
        repeated = prefill(target, proposer, prompts[rows], lengths[rows], requests, keys, max_length=64)
        for a, b in zip(jax.tree.leaves(shared), jax.tree.leaves(repeated), strict=True):
            assert a.shape == b.shape
        shared, repeated = (
            decode.generate(target, proposer, state, verifier=REJECTION) for state in (shared, repeated)
        )
        assert outputs(shared) == outputs(repeated)

    @pytest.mark.parametrize(
        "rows, message",
        [
            (np.array([0, 2]), r"rows must be in \[0, 2\), the number of prompts, got \[0, 2\]"),
            (np.array([0.0, 1.0], np.float32), r"rows must be int32 \[B\], got float32 \(2,\)"),
            (np.array([0, 1, 1]), "sampling must have 3 rows"),
            ([0, 1, 1], "sampling must have 3 rows"),
        ],
    )
    def test_bad_rows(self, target, rows, message):
        prompts, lengths, requests = (
            jnp.zeros((2, 4), jnp.int32),
            jnp.array([4, 2]),
            sampling.batch([SamplingParams()] * 2),
        )
        with pytest.raises(ValueError, match=message):
            decode.prefill(target, None, prompts, lengths, requests, jax.random.key(0), max_length=16, rows=rows)


class TestLogProbs:
    def test_of_prompt_and_output(self, target, draft):
        """Against one pass over the finished sequences; prompts are fed in several calls, blocks end inside."""
        params = [SamplingParams(temperature=t, max_tokens=n) for t, n in ((0.0, 9), (0.5, 14), (1.0, 3))]
        rng = np.random.default_rng(0)
        lengths = (11, 4, 1)
        state = prefill(
            target,
            proposers.draft_model(draft, 3),
            jnp.asarray(rng.integers(0, VOCAB, (3, 11)), jnp.int32),
            jnp.array(lengths),
            sampling.batch(params),
            jax.random.key(0),
            max_length=32,
            chunk_size=4,
            num_logprobs=2,
            prompt_logprobs=True,
        )
        state = decode.generate(target, proposers.draft_model(draft, 3), state)
        inputs = ModelInput(state.context.tokens, jnp.broadcast_to(jnp.arange(32), (3, 32)))
        logits = np.asarray(jax.jit(target.apply)(target.params, inputs, None)[0].logits, np.float64)
        found = jax.device_get(state.log_probs)
        for b, (start, end) in enumerate(zip(lengths, state.context.length.tolist(), strict=True)):
            for i in range(1, end):
                row = logits[b, i - 1] / (1 if i < start else params[b].temperature or 1)
                row -= np.log(np.exp(row).sum())
                np.testing.assert_allclose(found.chosen[b, i], row[state.context.tokens[b, i]], atol=1e-4)
                assert found.top_ids[b, i].tolist() == np.argsort(-row)[:2].tolist()
                np.testing.assert_allclose(found.top[b, i], np.sort(row)[:-3:-1], atol=1e-4)
            assert not found.chosen[b, end:].any()
            assert not found.chosen[b, 0]

    def test_without_a_number_there_are_none(self, target):
        assert start(target, None, SamplingParams()).log_probs is None
        requests = sampling.batch([SamplingParams()])
        with pytest.raises(ValueError, match="prompt_logprobs must be False where num_logprobs is None, got True"):
            decode.prefill(
                target,
                None,
                jnp.zeros((1, 4), jnp.int32),
                jnp.array([4]),
                requests,
                jax.random.key(0),
                max_length=16,
                prompt_logprobs=True,
            )


@pytest.mark.slow
def test_stream_yields_what_generate_commits(target, stranger):
    proposer = proposers.draft_model(stranger, 4)
    params = SamplingParams(temperature=1, max_tokens=25)
    expected = outputs(run(target, proposer, params))
    rows = [[], [], []]
    for info in decode.stream(target, proposer, start(target, proposer, params)):
        for row, tokens in zip(rows, info.tokens.tolist(), strict=True):
            row += [t for t in tokens if t >= 0]
    assert rows == expected


@pytest.mark.slow
def test_max_steps_pauses(target, stranger):
    proposer = proposers.draft_model(stranger, 4)
    params = SamplingParams(temperature=1, max_tokens=25)
    state = start(target, proposer, params)
    while state.context.active.any():
        state = decode.generate(target, proposer, state, verifier=REJECTION, max_steps=2)
        assert int(state.totals.steps.max()) <= 2 * 25
    assert outputs(state) == outputs(run(target, proposer, params))


@dataclass(frozen=True)
class Counting:
    """A model function that counts its traces."""

    apply: object
    traces: list

    def __call__(self, params, inputs, cache):
        self.traces.append(inputs.tokens.shape)
        return self.apply(params, inputs, cache)

    def __hash__(self):
        return id(self.traces)


@pytest.mark.slow
def test_one_compilation_for_any_mix():
    traces = []
    own = testing.bigram_model(jax.random.normal(jax.random.key(0), (VOCAB, VOCAB)))
    counted = replace(own, apply=Counting(own.apply, traces))
    proposer = proposers.draft_model(own, 3)
    mixes = [
        [SamplingParams(temperature=t, top_p=p, max_tokens=n) for t, p, n in mix]
        for mix in (
            [(0.0, 0.9, 9), (1.0, 1.0, 4), (0.5, 0.7, 7)],
            [(1.5, 0.8, 3), (0.0, 1.0, 8), (0.0, 0.6, 5)],
        )
    ]
    run(counted, proposer, mixes[0], verifiers.rejection)
    first = len(traces)
    run(counted, proposer, mixes[1], verifiers.rejection, lengths=(2, 9, 5))
    assert first > 0
    assert len(traces) == first


@pytest.mark.slow
def test_weights_are_not_constants(target, draft):
    proposer = proposers.draft_model(draft, 3)
    state = start(target, proposer, SamplingParams(max_tokens=9))
    text = jax.jit(decode.step).lower(target, proposer, state).as_text()
    assert len(text) < 1_000_000
    for constant in text.split("stablehlo.constant")[1:]:
        assert len(constant.split("\n")[0]) < 5000


@pytest.mark.slow
def test_state_holds_no_weights_and_no_array_twice(target, draft):
    proposer = proposers.draft_model(draft, 3)
    leaves = [x for x in jax.tree.leaves(start(target, proposer, SamplingParams(max_tokens=9)))]
    pointers = [x.unsafe_buffer_pointer() for x in leaves if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.slow
def test_the_callers_arrays_survive():
    own = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))
    proposer = proposers.draft_model(own, 3)
    prompts, lengths = jnp.zeros((2, 64), jnp.int32), jnp.array([3, 5], jnp.int32)
    keys, rows = jax.random.split(jax.random.key(0), 2), sampling.batch([SamplingParams(max_tokens=9)] * 2)
    for make in (decode.prefill, prefill):
        decode.generate(own, proposer, make(own, proposer, prompts, lengths, rows, keys, max_length=64))
        assert not any(x.is_deleted() for x in jax.tree.leaves((prompts, lengths, keys, rows)))


@pytest.mark.slow
def test_a_function_of_ones_own_as_a_model():
    """A model without a cache needs none of the machinery."""

    table = jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))
    own = testing.bigram_model(table)
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = run(own, None, params, verifiers.rejection)
    assert outputs(run(own, proposers.draft_model(own, 3), params, verifiers.rejection)) == outputs(plain)
    token = int(plain.context.tokens[0, 8])
    for expected in outputs(plain)[0]:
        token = int(jnp.argmax(table[token]))
        assert token == expected


def apply_features(params, inputs, cache):
    return ModelOutput(params[inputs.tokens], inputs.positions), cache


@pytest.mark.slow
def test_features_reach_the_proposer():
    """`update` sees the features of the positions that were scored."""
    own = replace(testing.bigram_model(jnp.zeros((5, 5))), apply=apply_features)

    class Spy(testing.BigramProposer):
        def update(self, context, verified, features, state):
            return context.length, features

    jax.tree_util.register_dataclass(Spy, ["logits"], ["num_draft_tokens", "drafter", "is_ragged"])
    spy = Spy(jnp.zeros((5, 5)), 2)
    state = start(own, spy, SamplingParams(), lengths=(4,), max_length=9)
    length, features = jax.jit(decode.step)(own, spy, state)[0].proposer
    assert length.tolist() == [4]
    assert features.tolist() == [[3, 4, 5]]


def test_other_things_than_a_state():
    target = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))
    for call in (decode.generate, decode.step, lambda *given: next(decode.stream(*given))):
        with pytest.raises(ValueError, match="state must be a State, as prefill returns it, got int"):
            call(target, None, 5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompts=np.zeros(4, np.int32)), r"prompts must be int32 \[B, W\]"),
        (dict(prompts=np.zeros((2, 4), np.float32)), r"prompts must be int32 \[B, W\]"),
        (dict(prompts=np.zeros((2, 0), np.int32)), r"prompts must have a width in \[1, max_length = 16\], got 0"),
        (dict(prompts=np.zeros((2, 17), np.int32)), r"prompts must have a width in \[1, max_length = 16\], got 17"),
        (dict(prompts=[[0, 1], [2]]), r"prompts must be int32 \[B, W\], got lists of several lengths"),
        (dict(prompts=[[True, 2]]), r"prompts must be int32 \[B, W\], got \[\[True, 2\]\]"),
        (dict(lengths=[2, True]), r"lengths must be int32 \[B\], got \[2, True\]"),
        (dict(prompts="ab"), r"prompts must be int32 \[B, W\], got 'ab'"),
        (dict(lengths=np.ones(3, np.int32)), r"lengths must be int32 of shape \[B\] = \(2,\), got int32 \(3,\)"),
        (dict(lengths=np.ones(2, np.float32)), r"lengths must be int32 of shape \[B\] = \(2,\), got float32"),
        (dict(lengths=np.array([0, 1])), r"lengths must be in \[1, W = 4\], got \[0, 1\]"),
        (dict(lengths=[5, 1]), r"lengths must be in \[1, W = 4\], got \[5, 1\]"),
        (dict(prompts=np.full((2, 4), VOCAB)), r"prompts must have token ids in \[0, 61\), got 61 to 61"),
        (dict(prompts=[[1, 2, 3, -1], [1, 1, 1, 1]]), r"prompts must have token ids in \[0, 61\), got -1 to 3"),
        (dict(max_length=129), r"max_length must be at most the model's 128, got 129"),
        (dict(max_length=8.5), "max_length must be an integer, got 8.5"),
        (dict(num_logprobs=-1), r"num_logprobs must be None or an integer in \[0, V = 61\], got -1"),
        (dict(num_logprobs=62), r"num_logprobs must be None or an integer in \[0, V = 61\], got 62"),
        (dict(sampling=SamplingParams()), r"sampling must be a Sampling, as sampling.batch returns, got"),
        (lambda: dict(sampling=sampling.batch([SamplingParams()])), r"sampling must have 2 rows"),
        (
            lambda: dict(sampling=sampling.batch([SamplingParams(), SamplingParams(logit_bias={3: 1.0, 61: 1.0})])),
            r"sampling.bias_tokens must have token ids in \[0, 61\), got 61",
        ),
        (
            lambda: dict(sampling=sampling.batch([SamplingParams(bad_words=[[4, 70]])] * 2)),
            r"sampling.bad_words must have token ids in \[0, 61\), got 70",
        ),
        (lambda: dict(keys=jax.random.PRNGKey(0)), r"keys must be typed keys"),
        (lambda: dict(keys=jax.random.key(0, impl="rbg")), r"keys must be threefry keys"),
        (
            lambda: dict(keys=jax.random.split(jax.random.key(0), 3)),
            r"keys must have shape \[\] or \[B\] = \(2,\), got \(3,\)",
        ),
    ],
)
def test_bad_input(target, change, message):
    arguments = dict(
        prompts=jnp.zeros((2, 4), jnp.int32),
        lengths=jnp.array([4, 2]),
        sampling=sampling.batch([SamplingParams()] * 2),
        keys=jax.random.key(0),
        max_length=16,
    )
    change = change() if callable(change) else change  # a function, where collecting would start the device
    with pytest.raises(ValueError, match=message):
        decode.prefill(target, None, **(arguments | change))


@pytest.mark.parametrize(
    "verifier, message",
    [
        (Partial(verifiers.synthetic, acceptance_length=9.0), r"acceptance_length must be in \[1, K\+1 = 3\], got 9.0"),
        (Partial(verifiers.synthetic, acceptance_rates=[0.1, 0.5]), "acceptance_rates must be non-increasing"),
        (Partial(verifiers.typical, posterior_threshold=-3.0), "posterior_threshold must be in"),
        ("rejection", "verifier and scorer must be functions, got 'rejection'"),
    ],
)
def test_bad_verifier(target, draft, verifier, message):
    proposer = proposers.draft_model(draft, 2)
    state = start(target, proposer, SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match=message):
        decode.generate(target, proposer, state, verifier=verifier)
    with pytest.raises(ValueError, match=message):
        next(decode.stream(target, proposer, state, verifier=verifier))


@pytest.mark.slow
def test_options_of_a_verifier(target, draft):
    """Bound numbers are traced, flags are static."""
    proposer = proposers.draft_model(draft, 2)
    params = SamplingParams(temperature=1, max_tokens=60)
    for rates, expected in (([1.0, 1.0], 3.0), ([1.0, 0.0], 2.0), ([0.0, 0.0], 1.0)):
        verifier = Partial(verifiers.synthetic, acceptance_rates=rates, implementation="xla", log_probs=False)
        state = run(target, proposer, params, verifier, max_length=90)
        assert metrics.mean_acceptance_length(state.totals) == expected


def any_verifier(keys, draft, target, *, index):
    options = {"synthetic": {"acceptance_length": 2.0}}
    verify = [partial(getattr(verifiers, name), **options.get(name, {})) for name in verifiers.__all__]
    return jax.lax.switch(index, verify, keys, draft, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", verifiers.__all__)
def test_under_x64(x64, name):
    own = testing.bigram_model(jax.random.normal(jax.random.key(0), (VOCAB, VOCAB), jnp.float32))
    verifier = Partial(any_verifier, index=verifiers.__all__.index(name))
    state = run(own, proposers.draft_model(own, 3), SamplingParams(temperature=0.8, max_tokens=12), verifier)
    assert [len(row) for row in outputs(state)] == [12, 12, 12]
    assert state.context.length.dtype == jnp.int32


def tokens_alone(keys, draft, target):
    return verifiers.rejection(keys, draft, target).tokens


def test_a_verifier_without_a_verified():
    own = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))
    state = jax.eval_shape(lambda: start(own, None, SamplingParams(), prefill=decode.prefill))
    with pytest.raises(ValueError, match="verifier must return a Verified, got "):
        jax.eval_shape(partial(decode.step, own, None, verifier=tokens_alone), state)


def test_another_proposer():
    """With more drafts than the state counts; with fewer, the drafts of a step are counted where they stand."""
    own = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))
    state = start(own, proposers.draft_model(own, 2), SamplingParams(max_tokens=9))
    for more in (proposers.draft_model(own, 4), proposers.ngram(3)):
        message = "proposer must be the one that the state was made with, .* its 2 draft tokens, got "
        with pytest.raises(ValueError, match=message + str(more.num_draft_tokens)):
            decode.generate(own, more, state)
        with pytest.raises(ValueError, match=message + str(more.num_draft_tokens)):
            next(decode.stream(own, more, state))
    verifier = Partial(verifiers.rejection, outcomes=True)
    totals = jax.jit(partial(decode.step, own, proposers.draft_model(own, 1), verifier=verifier))(state)[0].totals
    np.testing.assert_array_equal(totals.drafted, 1)
    np.testing.assert_array_equal(totals.tested, 1)


@pytest.mark.parametrize("max_steps", [1.5, -1, "a", True, 2**31, np.float32(1), np.ones(1, np.int32)])
def test_bad_max_steps(max_steps):
    with pytest.raises(ValueError, match=r"max_steps must be None or an integer in \[0, 2147483647\], got "):
        decode.generate(None, None, None, max_steps=max_steps)


def test_raw_keys_of_requests():
    with pytest.raises(ValueError, match=r"keys must be typed keys \(jax.random.key\), got uint32"):
        positions(jax.random.PRNGKey(0), jnp.array([1]), 2)


@pytest.mark.parametrize(
    "lengths, num_draft_tokens, message",
    [
        ([1, 2], 2, "lengths must be an array, got list"),
        (np.array([1.0, 2.0]), 2, "lengths must be of integer dtype, got float32"),
        (np.array([1]), 2, r"lengths must have shape \[B\] = \(2,\), got \(1,\)"),
        (np.array([1, 2]), -1, "num_draft_tokens must be an integer >= 0, got -1"),
        (np.array([1, 2]), "a", "num_draft_tokens must be an integer >= 0, got 'a'"),
    ],
)
def test_bad_positions(lengths, num_draft_tokens, message):
    with pytest.raises(ValueError, match=message):
        positions(jax.random.split(jax.random.key(0)), lengths, num_draft_tokens)


def test_bad_draft_model(draft):
    with pytest.raises(ValueError, match="model must be a Model, got str"):
        proposers.draft_model("draft", 2)
    batch = sampling.batch([SamplingParams()] * 2)
    with pytest.raises(ValueError, match=r"temperature must be one number or have shape \[B\] = \(2,\), got \(3,\)"):
        drawing.draft_sampling(batch, jnp.ones(3), False)
    for number in (0, 2.5, True):
        with pytest.raises(ValueError, match="num_draft_tokens must be >= 1"):
            proposers.draft_model(draft, number)
        with pytest.raises(ValueError, match="num_draft_tokens must be >= 1"):
            proposers.ngram(number)
    with pytest.raises(ValueError, match="max_length must be None or an integer >= 1, got 0"):
        proposers.draft_model(draft, 2, max_length=0)
    assert proposers.draft_model(draft, np.int64(2)).num_draft_tokens == 2
    with pytest.raises(ValueError, match="max_length must be at most the draft model's 128, got 200"):
        proposers.draft_model(draft, 2, max_length=200)


def test_scorer_feeds_token_0_for_missing_drafts(target):
    """A draft of -1 wraps to the last row of the embedding, or worse, where it is fed as it is."""
    state = start(target, None, SamplingParams(max_tokens=9))
    with_gap = Draft(jnp.array([[3, -1, 5]] * 3, jnp.int32))
    with_zero = Draft(jnp.array([[3, 0, 5]] * 3, jnp.int32))
    score = jax.jit(scorers.mqa)
    outs = [score(target, state.context, d, state.cache)[0].logits for d in (with_gap, with_zero)]
    np.testing.assert_array_equal(*outs)


@pytest.mark.usefixtures("optimized_loop")
class TestSeveralSteps:
    """Six tokens of several steps, through the public keys, follow the target. One step would not show reused noise."""

    @pytest.mark.slow
    def test_lossless(self):
        """Block verification reads noise past the last accepted token. Match is equal to plain sampling.

        The tests below show what as many samples find.
        """
        testing.assert_lossless(verifiers.block, drafter=testing.sample_draft, num_samples=60_000)

    @pytest.mark.parametrize("name", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
    def test_draft_model_reports_what_it_sampled(self, name):
        """A draft model at the request's temperature and cut: the output has the target's distribution at both.

        Exact match does not read the distribution that a draft reports.
        """
        rows, table = 30_000, np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
        target = testing.bigram_model(jnp.log(jnp.broadcast_to(jnp.asarray(table, jnp.float32)[None], (8, 8))))
        proposer = proposers.draft_model(replace(target, params=target.params[:, ::-1]), 3)
        requests = sampling.Sampling(
            max_tokens=jnp.full(rows, 4), temperature=jnp.full(rows, 0.5), top_k=jnp.full(rows, 6)
        )
        prompts, lengths = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
        state = prefill(target, proposer, prompts, lengths, requests, jax.random.key(0), max_length=5)
        tokens = np.asarray(decode.generate(target, proposer, state, verifier=one_of(name)).context.tokens)
        kept = np.where(table >= np.sort(table)[-6], table, 0) ** 2  # all ties of the sixth
        distribution = np.broadcast_to(kept / kept.sum(), (8, 8))
        counts = np.bincount(8 * tokens[:, 2] + tokens[:, 3], minlength=64)
        test = testing.chi_square(counts, (distribution[0][:, None] * distribution).ravel())
        assert test.statistic < test.bound

    @pytest.mark.slow
    @pytest.mark.parametrize("purpose, num_samples", [(ACCEPT, 300_000), (DRAFT_PURPOSE, 50_000)])
    def test_noise_named_by_its_own_position_fails(self, purpose, num_samples):
        """Block verification looks at noise past the last accepted token, and would meet it again in the next step."""
        target, draft = (np.broadcast_to(distribution, (3, 3)) for distribution in ([0.6, 0.3, 0.1], [0.3, 0.4, 0.3]))
        if purpose == ACCEPT:
            verifier, proposer = block_with_own_positions, testing.BigramProposer(jnp.log(draft), 3)
        else:
            verifier, proposer = verifiers.block, OwnPositions(jnp.log(draft), 2)
        tokens = testing.sampled_tokens(verifier, jnp.log(target), proposer, num_samples=num_samples)
        counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), (3,) * 6), minlength=3**6)
        distribution = testing.product_law([np.broadcast_to(target[0], (3,) * (i + 1)) for i in range(6)])
        test = testing.chi_square(counts, distribution.ravel())
        assert (test.statistic - test.degrees) / (2 * test.degrees) ** 0.5 > 12

    @pytest.mark.slow
    def test_argmax_draft_scored_with_softmax_fails(self):
        def argmax(keys, distribution):
            return jnp.argmax(distribution.logits, axis=-1).astype(jnp.int32), distribution

        self.assert_fails(verifiers.rejection, argmax)

    @pytest.mark.slow
    def test_draft_at_half_temperature_scored_at_one_fails(self):
        def cold(keys, distribution):
            half = distribution._replace(logits=2 * distribution.logits)
            return testing.sample_draft(keys, half)[0], distribution

        self.assert_fails(verifiers.rejection, cold)

    @pytest.mark.slow
    def test_draft_noise_reused_for_the_residual_fails(self):
        self.assert_fails(rejection_with_draft_noise, testing.sample_draft)

    @staticmethod
    def assert_fails(verifier, drafter):
        """With a tenth of the samples that a verdict has: what they show, more would show as well."""
        with pytest.raises(AssertionError, match=r"not lossless on .* expected at most"):
            testing.assert_lossless(verifier, drafter=drafter, num_samples=60_000)


@pytest.mark.slow
def test_an_own_verifier_without_a_core_gets_a_verdict(monkeypatch):
    """By samples too, the drafts sampled as above in the last case; and ragged and deterministic ones."""
    *_, case = verdicts._sampled_cases()
    monkeypatch.setattr(verdicts, "_sampled_cases", lambda: [case])
    testing.assert_lossless(rejection_without_a_core, num_samples=20_000)  # its core is enumerated elsewhere


def rejection_without_a_core(keys, draft, target):
    return verifiers.rejection(keys, draft, target)


class OwnPositionFlips(core.KeyDraw):
    def flip(self, probabilities):
        return uniform(stream(self.keys[:, :-1], ACCEPT)) < probabilities


def block_with_own_positions(keys, draft, target):
    return verifiers.block.core(OwnPositionFlips(keys), verifiers.canonical(draft), Categorical(target.logits))


class OwnPositions(testing.BigramProposer):
    def propose(self, keys, context, sampling, state):
        drawn = [super(OwnPositions, self).propose(keys[:, i:], context, sampling, state)[0] for i in range(2)]
        second = replace(self, num_draft_tokens=1)
        first = drawn[0].tokens[:, :1]
        noise = stream(keys[:, 1:2], DRAFT_PURPOSE, 0)
        token, _ = testing.sample_draft(noise, Categorical(second.logits[first]))
        logits = jnp.concatenate([drawn[0].distribution.logits[:, :1], second.logits[first]], axis=1)
        return Draft(jnp.concatenate([first, token], axis=1), Categorical(logits)), state


jax.tree_util.register_dataclass(OwnPositions, ["logits"], ["num_draft_tokens", "drafter", "is_ragged"])


class DraftNoisePick(core.KeyDraw):
    """Draws the residual by Gumbel-max with the noise that the first draft was drawn with."""

    def pick(self, residual):
        from specjax import distributions

        probs = distributions.residual_probs(residual)
        noise = gumbel(stream(self.keys[:, 0], DRAFT_PURPOSE), (probs.shape[1],))
        return jnp.argmax(jnp.log(probs) + noise, axis=-1).astype(jnp.int32)


def rejection_with_draft_noise(keys, draft, target):
    return verifiers.rejection.core(DraftNoisePick(keys), verifiers.canonical(draft), Categorical(target.logits))
