"""Proposers and scorers by hand-worked cases."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import one_of
from test_eagle import SIZES, drafter

from specjax import checks, decode, metrics, models, proposers, sampling, scorers, testing
from specjax.keys import positions
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.proposers import trunk
from specjax.proposers.split import run_where
from specjax.sampling import SamplingParams
from specjax.types import Context, Draft, Features, Memory, ModelInput

VOCAB = 61
CONFIG = DecoderConfig(VOCAB, 32, 2, 4, 2, 8, 64, 128)
ONES = np.ones((1, 1), np.int32)

prefill = jax.jit(decode.prefill, static_argnames="max_length")


@pytest.fixture(scope="module")
def target():
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, 0)))


@pytest.fixture(scope="module")
def bigram():
    """Compiles faster; for what needs no cache."""
    return testing.bigram_model(jax.random.normal(jax.random.key(0), (VOCAB, VOCAB)))


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

    @pytest.mark.slow
    @pytest.mark.parametrize("name, temperature", [("block", 0.0), ("match", 1.0), ("rejection", 1.0)])
    def test_decoding_is_plain_decoding(self, target, temperature, name):
        """Deterministic drafts are verified by exact match: also a sampled run is the plain one."""
        params = [SamplingParams(temperature=temperature, max_tokens=40)] * 2
        prompts, lengths = jnp.array([[3, 4, 3, 4, 3], [7, 7, 0, 0, 0]]), jnp.array([5, 2])
        outputs = []
        for proposer in (None, proposers.ngram(4)):
            state = prefill(
                target, proposer, prompts, lengths, sampling.batch(params), jax.random.key(1), max_length=64
            )
            outputs.append(decode.generate(target, proposer, state, verifier=one_of(name)))
        np.testing.assert_array_equal(outputs[0].context.tokens, outputs[1].context.tokens)
        assert int(outputs[1].totals.drafted.sum()) > 0

    @pytest.mark.parametrize("numbers", [(0, 1, 3), (3, 0, 3), (3, 4, 3)])
    def test_bad_numbers(self, numbers):
        with pytest.raises(ValueError, match="must"):
            proposers.ngram(*numbers)


@pytest.mark.parametrize("drafts", [[[3, 4, 5], [6, -1, -1], [-1, -1, -1]], [[1, 2, 3]] * 3, [[], [], []]])
def test_batch_expansion_is_mqa(target, drafts):
    target = models.with_feature_layers(target, (2, 0))
    prompts, lengths = jnp.array([[3, 4, 3, 4, 3], [7, 7, 0, 0, 0], [9, 0, 0, 0, 0]]), jnp.array([5, 2, 1])
    rows = sampling.batch([SamplingParams(max_tokens=9)] * 3)
    state = prefill(target, None, prompts, lengths, rows, jax.random.key(0), max_length=32)
    draft = Draft(jnp.array(drafts, jnp.int32).reshape(3, -1))
    one, one_cache = jax.jit(scorers.mqa)(target, state.context, draft, state.cache)
    many, many_cache = jax.jit(scorers.batch_expansion)(target, state.context, draft, state.cache)
    num_drafts = (draft.tokens >= 0).sum(axis=1)
    for b, n in enumerate(num_drafts.tolist()):
        np.testing.assert_allclose(many.logits[b, : n + 1], one.logits[b, : n + 1], atol=2e-5)
        for a, c in zip(many.features, one.features, strict=True):
            np.testing.assert_allclose(a[b, : n + 1], c[b, : n + 1], atol=2e-5)
        for a, c in zip(jax.tree.leaves(many_cache), jax.tree.leaves(one_cache), strict=True):
            np.testing.assert_allclose(a[b, : lengths[b] + n], c[b, : lengths[b] + n], atol=2e-5)


@pytest.mark.slow
def test_decoding_with_batch_expansion(target):
    proposer = proposers.ngram(3)
    params = [SamplingParams(temperature=0, max_tokens=30)] * 2
    prompts, lengths = jnp.array([[3, 4, 3, 4, 3], [7, 7, 0, 0, 0]]), jnp.array([5, 2])
    outputs = []
    for scorer in (scorers.mqa, scorers.batch_expansion):
        state = prefill(target, proposer, prompts, lengths, sampling.batch(params), jax.random.key(1), max_length=64)
        outputs.append(decode.generate(target, proposer, state, scorer=scorer).context.tokens)
    np.testing.assert_array_equal(*outputs)


def start(target, proposer, params, lengths=(5, 2), max_length=64, **options):
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(0, VOCAB, (len(lengths), max(lengths))), jnp.int32)
    params = params if isinstance(params, list) else [params] * len(lengths)
    rows, keys = sampling.batch(params), jax.random.key(1)
    return prefill(target, proposer, prompts, jnp.array(lengths), rows, keys, max_length=max_length, **options)


def outputs(state):
    context = jax.device_get(state.context)
    return [t[p:n].tolist() for t, p, n in zip(context.tokens, context.prompt_length, context.length, strict=True)]


def propose_once(target, proposer, params, **options):
    state = start(target, proposer, params, **options)
    keys = positions(state.keys, state.context.length, proposer.num_draft_tokens)
    return jax.jit(proposer.propose)(keys, state.context, state.sampling, state.proposer)[0]


class TestDraftModel:
    @pytest.mark.slow
    def test_greedy_drafts_are_deterministic(self, bigram):
        params = [SamplingParams(temperature=1, top_k=5, max_tokens=30), SamplingParams(temperature=0, max_tokens=30)]
        draft = propose_once(bigram, proposers.draft_model(bigram, 3, temperature=0), params)
        assert draft.distribution is None
        plain = decode.generate(bigram, None, start(bigram, None, SamplingParams(temperature=0, max_tokens=3)))
        assert draft.tokens.tolist() == outputs(plain)

    @pytest.mark.slow
    @pytest.mark.parametrize("max_length", [None, 24])
    def test_a_greedy_target_accepts_its_own(self, target, max_length):
        proposer = proposers.draft_model(target, 4, max_length, temperature=0)
        params = SamplingParams(temperature=0, max_tokens=40)
        state = decode.generate(target, proposer, start(target, proposer, params))
        assert metrics.acceptance_rate(state.totals) == 1
        limit = 64 if max_length is None else max_length
        most = [min(40, max(0, limit - 4 - n)) for n in (5, 2)]
        assert (np.asarray(state.totals.drafted) <= np.array(most) + 4).all()

    @pytest.mark.slow
    def test_temperature_of_the_drafts(self, bigram):
        params = [SamplingParams(temperature=t, max_tokens=9) for t in (1.5, 0.0)]
        for temperature, expected in ((None, [1.5, 0]), (0.7, [0.7, 0]), (jnp.array([0.4, 0.6]), [0.4, 0])):
            proposer = proposers.draft_model(bigram, 2, temperature=temperature)
            draft = propose_once(bigram, proposer, params)
            np.testing.assert_allclose(draft.distribution.temperature, expected)

    @pytest.mark.slow
    @pytest.mark.usefixtures("optimized_loop")
    def test_the_distribution_is_the_targets_at_any_draft_temperature(self):
        draft = testing.bigram_model(jax.random.normal(jax.random.key(9), (8, 8)))
        testing.assert_proposer_lossless(proposers.draft_model(draft, 2, temperature=0.6), num_samples=30_000)

    @pytest.mark.slow
    def test_prompts_past_the_limit_of_the_draft(self, target):
        """A draft of fewer positions than the target: long rows decode normally, short ones until they are long."""
        short = replace(target, max_length=16)
        proposer = proposers.draft_model(short, 3)
        params = SamplingParams(temperature=0, max_tokens=20)
        state = start(target, proposer, params, lengths=(40, 3))
        assert jax.tree.leaves(state.proposer.pools)[0].shape[1] == 16
        state = decode.generate(target, proposer, state)
        assert state.context.length.tolist() == [60, 23]
        assert state.totals.drafted.tolist()[0] == 0
        assert metrics.acceptance_rate(state.totals) == 1

    @pytest.mark.slow
    def test_speculate_below(self, target):
        """One of two rows ends early; the other drafts from then on, as if it always had."""
        proposer = proposers.draft_model(target, 3, speculate_below=2)
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (45, 21)]
        state = start(target, proposer, params)
        infos = [jax.device_get(info) for info in decode.stream(target, proposer, state)]
        assert [info.num_drafts.tolist() for info in infos] == [[0, 0]] * 21 + [[3, 0]] * 6  # 24 tokens by 4
        assert [info.num_accepted[0] for info in infos[21:]] == [3] * 6

    @pytest.mark.parametrize(
        "options, message",
        [
            (
                {"temperature": -1.0},
                r"temperature must be None, or a number or numbers \[B\], finite and >= 0, got -1.0",
            ),
            ({"temperature": "hot"}, "temperature must be None"),
            ({"speculate_below": 0}, "speculate_below must be None or >= 1, got 0"),
        ],
    )
    def test_bad_options(self, target, options, message):
        with pytest.raises(ValueError, match=message):
            proposers.draft_model(target, 2, **options)


@partial(jax.tree_util.register_dataclass, data_fields=["known"], meta_fields=["num_draft_tokens", "period"])
@dataclass(frozen=True)
class Sometimes:
    """Drafts known tokens [B, L], but only in rows of a length that its period divides, or of the next length."""

    known: jax.Array
    num_draft_tokens: int
    period: int

    takes_pages = True

    def init_memory(self, batch_size, num_pages, page_size):
        return Memory()

    def prefill(self, inputs, following, previous, features, state):
        return state

    def propose(self, keys, context, sampling, state):
        index = context.length[:, None] + jnp.arange(self.num_draft_tokens)[None]
        drafts = context.active & (context.length % self.period < 2)
        known = jnp.broadcast_to(self.known, context.tokens.shape)
        return Draft(jnp.where(drafts[:, None], jnp.take_along_axis(known, index, axis=1), -1)), state

    def update(self, context, verified, features, state):
        return state


class TestFallback:
    @pytest.mark.slow
    @pytest.mark.usefixtures("optimized_loop")
    def test_the_distribution_is_the_targets(self):
        draft = testing.bigram_model(jax.random.normal(jax.random.key(9), (8, 8)))
        proposer = proposers.fallback(Sometimes(ONES, 3, 3), proposers.draft_model(draft, 2))
        testing.assert_proposer_lossless(proposer, num_samples=30_000)

    def test_rows_of_both(self, bigram):
        proposer = proposers.fallback(Sometimes(ONES, 3, 4), proposers.draft_model(bigram, 2))
        draft = propose_once(bigram, proposer, SamplingParams(temperature=0.8, max_tokens=9), lengths=(5, 2, 8))
        alone = propose_once(
            bigram, proposers.draft_model(bigram, 2), SamplingParams(temperature=0.8, max_tokens=9), lengths=(5, 2, 8)
        )
        assert draft.num_tokens.tolist() == [3, 2, 3]
        assert draft.tokens.tolist() == [[1, 1, 1], [*alone.tokens[1].tolist(), -1], [1, 1, 1]]
        np.testing.assert_allclose(draft.distribution.temperature, [0, 0.8, 0])
        checks.validate(draft, jnp.zeros((3, 4, VOCAB)))

    @pytest.mark.slow
    def test_the_second_knows_what_the_first_wrote(self, target):
        """Its drafts equal a fresh start's from the committed tokens, whoever drafted them, in whichever steps."""
        noise = init_params(CONFIG, 1)
        other = replace(target, params=jax.tree.map(lambda x, y: x + 0.3 * y, target.params, noise))
        params, lengths = [SamplingParams(temperature=0, max_tokens=n) for n in (57, 25)], (5, 2)
        known = decode.generate(target, None, start(target, None, params, lengths)).context.tokens
        second = proposers.draft_model(other, 3, temperature=0)
        proposer = proposers.fallback(Sometimes(known, 2, 5), second)

        @jax.jit
        def drafts(state):
            """Drafts of the second as it goes on, drafts of a fresh start, and the rows that use them."""
            context = state.context
            keys = positions(state.keys, context.length, 3)
            slots = jnp.broadcast_to(jnp.arange(64), context.tokens.shape)
            inputs = ModelInput(context.tokens, slots, num_tokens=context.length)
            fresh = second.prefill(inputs, jnp.full_like(slots, -1), None, None, second.init_memory(2, 2, 64))
            draft, both = proposer.propose(keys, context, state.sampling, state.proposer)
            return draft.tokens, second.propose(keys, context, state.sampling, fresh)[0].tokens, both.rows[2]

        step, counts = jax.jit(decode.step), np.zeros((2, 4), int)
        state = start(target, proposer, params, lengths)
        while state.context.active.any():
            ours, fresh, is_first = jax.device_get(drafts(state))
            np.testing.assert_array_equal(ours[~is_first], fresh[~is_first])
            active = state.context.active
            state, info = step(target, proposer, state)
            np.add.at(counts, (is_first[active].astype(int), np.asarray(info.num_accepted)[active]), 1)
        assert (counts[0] > 0).all(), "the second should be accepted in every length"
        assert counts[1, 2] > 5
        np.testing.assert_array_equal(state.context.tokens, known)

    def test_the_first_must_be_deterministic(self, bigram):
        proposer = proposers.fallback(proposers.draft_model(bigram, 2), proposers.ngram(2))
        with pytest.raises(ValueError, match="first must make deterministic drafts"):
            propose_once(bigram, proposer, SamplingParams())

    def test_both_must_draft_chains(self, bigram):
        chain, tree = proposers.ngram(2), proposers.draft_model(bigram, 2, tree=4)
        for name, pair in (("first", (tree, chain)), ("second", (chain, tree))):
            with pytest.raises(ValueError, match=f"{name} must draft chains, got a proposer of trees of 4 nodes"):
                proposers.fallback(*pair)

    @pytest.mark.slow
    def test_greedy_is_plain(self, bigram):
        proposer = proposers.fallback(proposers.ngram(4), proposers.draft_model(bigram, 3))
        params = SamplingParams(temperature=0, max_tokens=40)
        state = decode.generate(bigram, proposer, start(bigram, proposer, params))
        assert outputs(state) == outputs(decode.generate(bigram, None, start(bigram, None, params)))


def uniform_claim(keys, distribution):
    """Draws from one distribution and reports another."""
    return testing.sample_draft(keys, distribution)[0], distribution._replace(logits=0 * distribution.logits)


def one_hot_claim(keys, distribution):
    return testing.sample_draft(keys, distribution)[0], None


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_loop")
def test_verdict_on_a_proposer():
    logits = jnp.log(jnp.broadcast_to(jnp.array([0.6, 0.2, 0.1, 0.02, 0.02, 0.02, 0.02, 0.02])[None], (8, 8)))
    testing.assert_proposer_lossless(testing.BigramProposer(logits, 2, one_hot_claim), num_samples=30_000)
    with pytest.raises(AssertionError, match="not lossless on 'rejection'"):
        testing.assert_proposer_lossless(testing.BigramProposer(logits, 2, uniform_claim), num_samples=30_000)


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "p_eagle", "medusa", "dflash"])
def test_prompts_are_fed_to_their_slots(kind):
    """Calls of some rows, in any order and with room for more, leave the same state as one call for all rows.

    So does a packed call, in which a prompt fills tiles and another ends in the middle of one.
    """
    if kind == "draft_model":
        model = replace(testing.bigram_model(jnp.zeros((8, 8))), takes_groups=True)
        proposer = proposers.draft_model(model, 2)
    elif kind == "medusa":
        proposer = proposers.medusa([{"blocks": [], "head": jnp.zeros((8, 8))}] * 2, vocab_size=8)
    elif kind == "dflash":
        head = proposers.BlockHead(SIZES, num_taps=1, target_size=8, target_vocab=8, block_size=3, mask_token=3)
        params = trunk.random_params(head.shapes(), jax.random.key(0))
        proposer = proposers.dflash(head, params | {"embedding": jnp.eye(8), "lm_head": jnp.eye(8)}, 2)
    else:
        proposer = drafter(kind)
    rng = np.random.default_rng(0)
    tokens, count = rng.integers(0, 8, (3, 4), dtype=np.int32), np.array([4, 1, 3], np.int32)
    hidden, previous = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4, 8), (3, 8)))
    features = Features(hidden, hidden), Features(previous, previous)
    every = ModelInput(tokens, np.tile(np.arange(4, dtype=np.int32), (3, 1)), num_tokens=count)
    prefill, following = jax.jit(proposer.prefill), np.full_like(tokens, -1)
    state = jax.tree.map(lambda x: x + 7, proposer.init_memory(3, 3, 6))  # of the requests before
    expected = prefill(every, following, features[1], features[0], state)
    assert proposer.takes_groups
    order = [2, 0, 1]  # of the pieces, which begin at tokens 0, 4 and 8
    token = np.stack([tokens[order].reshape(12), np.tile(np.arange(4), 3)]).astype(np.int32)[:, None]
    pieces = np.array([*zip(order, (0, 4, 8), count[order], strict=True), *[(3, 0, 0)] * 3], np.int32)
    call = ModelInput(*token, pages=pieces[:, :1], pieces=pieces)
    of_tokens = jax.tree.map(lambda x: x[order].reshape(1, 12, -1), features[0])
    before = jax.tree.map(lambda x: x[np.minimum(pieces[:, 0], 2)], features[1])
    found = prefill(call, np.full((1, 12), -1), before, of_tokens, state)
    is_fed = np.arange(6)[None] < count[:, None]  # other slots hold padding
    for one, other in zip(jax.tree.leaves(found.pools), jax.tree.leaves(expected.pools), strict=True):
        np.testing.assert_allclose(one[is_fed], other[is_fed], rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found.rows, expected.rows)

    for rows in np.array([[2, 3], [1, 0]], np.int32):
        some, (own, before) = jax.tree.map(lambda x, rows=rows: x[np.minimum(rows, 2)], (every, features))
        count = np.where(rows < 3, some.num_tokens, 0)
        some = some._replace(num_tokens=count, pages=rows[:, None], rows=rows)
        state = prefill(some, following[:2], before, own, state)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), state, expected)


def test_a_draft_of_some_rows_is_traced_once():
    calls = []

    def draft(scale, state):
        calls.append(None)
        return {"tokens": state[:, None] * scale}, state + 1

    def drafts(rows, scale, state):
        return run_where(rows, lambda state: draft(scale, state), state)

    state = jnp.array([2, 3])
    run = jax.jit(drafts)
    tokens, after = run(jnp.array([False, True]), 10, state)
    assert (tokens["tokens"].tolist(), after.tolist(), len(calls)) == ([[20], [30]], [3, 4], 1)
    tokens, after = run(jnp.array([False, False]), 10, state)
    assert (tokens["tokens"].tolist(), after.tolist(), len(calls)) == ([[0], [0]], [2, 3], 1)


def test_a_class_without_its_methods_is_named():
    class Own:
        num_draft_tokens = 2

        def prefill(self, chunk, features, state):
            return state

        def update(self, context, verified, features, state):
            return state

    message = r"init_memory or init, .*got Own without init_memory \(or init, .*\) and propose"
    with pytest.raises(ValueError, match=message):
        testing.assert_proposer_lossless(Own(), num_samples=10)
