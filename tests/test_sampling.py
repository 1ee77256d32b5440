"""Sampling parameters: their arrays, and the logits they shape against an oracle of one row at a time."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import one_of
from jax.tree_util import Partial

from specjax import (
    Categorical,
    Context,
    Draft,
    ModelInput,
    SamplingParams,
    decode,
    distributions,
    proposers,
    sampling,
    verifiers,
)
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.sampling.arrays import RULES, Sampling
from specjax.sampling.capacities import Capacities, Needs, needs_of, of_request
from specjax.sampling.guided.tables import Grammar

V, EOS = 24, 23
BUFFER = 20
PROMPTS = [[1, 2, 3], [5], [4, 4, 9, 2, 7], [8, 1], [3, 3], [6, 7, 8, 9], [2]]
OUTPUTS = [[2, 6], [], [9, 9, 9, 1], [5, 11, 3, 5, 3, 7, 2], [1], [6, 7, 6, 7], [7, 7, 3]]


# A grammar over tokens by hand: pairs of a token below 8 and one of the others, then the end.
FIRST, SECOND, DONE = range(3)
PAIRS = np.full((3, V), -1)
PAIRS[FIRST, :8], PAIRS[SECOND, 8:EOS], PAIRS[FIRST, EOS], PAIRS[DONE, EOS] = SECOND, FIRST, DONE, DONE
GRAMMAR = Grammar(np.arange(V), PAIRS)


def double_last(logits, context):
    """Twice the logit of the last token."""
    return logits.at[context.tokens[context.length - 1]].multiply(2)


def lower_output(logits, context):
    """Takes off as much as tokens were generated, where a token was generated that is as large as its length."""
    index = jnp.arange(context.tokens.shape[0])
    is_output = (index >= context.prompt_length) & (index < context.length)
    return logits - jnp.sum(is_output & (context.tokens >= context.length - context.prompt_length))


class Unhashable:
    __hash__ = None

    def __call__(self, logits, context):
        return logits


@dataclass(frozen=True)
class Add:
    """Adds to the logits of tokens that are in no history."""

    amount: float

    def __call__(self, logits, context):
        seen = jnp.any(context.tokens[:, None] == jnp.arange(logits.shape[0])[None], axis=0)
        return logits + self.amount * ~seen


def oracle_processor(function, logits, prompt, output):
    if function is double_last:
        logits[(prompt + output)[-1]] *= 2
    elif function is lower_output:
        logits -= sum(token >= len(output) for token in output)
    else:
        logits += [function.amount * (token not in prompt + output) for token in range(V)]


def oracle_logits(params, logits, prompt, output):
    """The processed logits of one row in float64, given all that comes before it."""
    logits = np.array(logits, np.float64)
    for function in params.logits_processors:
        oracle_processor(function, logits, prompt, output)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    forbidden = set()
    if params.allowed_token_ids:
        forbidden |= set(range(V)) - set(params.allowed_token_ids)
    if params.guided_decoding is not None:
        state = FIRST
        for token in output:
            state = PAIRS[state, token] if PAIRS[state, token] >= 0 else state
        forbidden |= {token for token in range(V) if PAIRS[state, token] < 0}
    for *prefix, last in params.bad_words:
        if output[len(output) - len(prefix) :] == prefix and len(prefix) <= len(output):
            forbidden.add(last)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    if len(output) < params.min_tokens and not set(range(V)) <= forbidden | stops:
        forbidden |= stops
    logits[list(forbidden)] = -np.inf
    for token in range(V):
        if token in prompt + output:
            logits[token] *= params.repetition_penalty if logits[token] <= 0 else 1 / params.repetition_penalty
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return logits


def oracle_kept(params, logits):
    """The logits that min-p, top-k and top-p keep, by a sort."""
    if params.temperature == 0 or not np.any(logits > -np.inf):
        return logits
    probs = np.exp((logits - logits.max()) / params.temperature)
    kept = probs >= params.min_p * probs.max()
    if params.top_k > 0:
        kept &= logits >= np.sort(np.where(kept, logits, -np.inf))[-min(params.top_k, V)]
    if params.top_p < 1:
        order = np.argsort(-np.where(kept, logits, -np.inf))
        mass = np.cumsum(np.where(kept, probs, 0)[order])
        last = order[np.argmax(mass >= params.top_p * mass[-1])]
        kept &= logits >= logits[last]
    return np.where(kept, logits, -np.inf)


def make_context(prompts, outputs, state=None):
    rows = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    junk = np.random.default_rng(0).integers(0, V, (len(rows), BUFFER))
    for i, row in enumerate(rows):
        junk[i, : len(row)] = row
    return Context(
        tokens=jnp.asarray(junk, jnp.int32),
        length=jnp.asarray([len(row) for row in rows]),
        active=jnp.ones(len(rows), bool),
        prompt_length=jnp.asarray([len(prompt) for prompt in prompts]),
        guided_state=state,
    )


def guided_state(rows, outputs):
    """States of the table of `rows`, whose grammars are all GRAMMAR, after the outputs."""
    if rows.guide is None:
        return None
    states = []
    for i, output in enumerate(outputs):
        state = FIRST
        for token in output:
            state = PAIRS[state, token] if PAIRS[state, token] >= 0 else state
        states.append(int(rows.guide.initial[i]) + (state if rows.guide.initial[i] else 0))
    return jnp.asarray(states, jnp.int32)


def check(params, num_drafts, seed=0):
    """Compare every row of a block with the oracle."""
    rng = np.random.default_rng(seed)
    size = len(params)
    drafts = rng.integers(0, 10, (size, num_drafts))
    drafts[:, : num_drafts // 2] = drafts[:, num_drafts - num_drafts // 2 :]  # tokens twice in a block
    logits = (3 * rng.normal(size=(size, num_drafts + 1, V))).astype(np.float32)
    rows = sampling.batch(params, [EOS], V)
    context = make_context(PROMPTS[:size], OUTPUTS[:size], guided_state(rows, OUTPUTS[:size]))
    tokens = jnp.asarray(drafts, jnp.int32)
    distribution = jax.jit(sampling.process)(rows, jnp.asarray(logits), context, tokens)
    kept = np.asarray(distributions.kept_logits(distribution))
    for i, one in enumerate(params):
        for j in range(num_drafts + 1):
            expected = oracle_logits(one, logits[i, j], PROMPTS[i], OUTPUTS[i] + drafts[i, :j].tolist())
            message = f"row {i}, position {j}"
            np.testing.assert_allclose(distribution.logits[i, j], expected, rtol=2e-6, atol=2e-6, err_msg=message)
            np.testing.assert_allclose(
                kept[i, j], oracle_kept(one, expected), rtol=2e-6, atol=2e-6, err_msg=message + ", kept"
            )
    return rows, context, tokens, logits, distribution


# The values of some rows for each feature; the other rows of the batch do not use it.
FEATURES = {
    "presence_penalty": [1.5, -0.5, 2],
    "frequency_penalty": [0.7, -1.1, 2],
    "repetition_penalty": [1.3, 0.7, 2],
    "logit_bias": [{3: 2.5, 7: -100}, {0: 1}, {i: i / 3 for i in range(9)}],
    "allowed_token_ids": [[1, 2, 3, 5, 8, 13, EOS], [7], [EOS, 4, 4, 6]],
    "bad_words": [[[7], [2, 6], [6, 3]], [[9, 9, 9, 9], [1, 2]], [[7, 3], [3], [5, 3, 3], [0]]],
    "min_tokens": [3, 5, 9],
    "logits_processors": [[double_last], [Add(0.5), lower_output], [lower_output, double_last, Add(-1.0)]],
    "guided_decoding": [GRAMMAR, GRAMMAR, GRAMMAR],
    "temperature": [0.0, 0.5, 2.0],
    "top_k": [1, 3, 100],
    "top_p": [0.3, 0.8, 0.99],
    "min_p": [0.05, 0.3, 1.0],
}


class TestOracle:
    @pytest.mark.parametrize("feature", FEATURES)
    def test_alone(self, feature):
        values = FEATURES[feature]
        used = [{}, *({feature: value} for value in values), {}, {feature: values[0]}, {feature: values[2]}]
        check([SamplingParams(stop_token_ids=[7]) if not use else SamplingParams(**use) for use in used], 3)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_drafts", [0, 4])
    def test_all_in_one_batch(self, num_drafts):
        names = list(FEATURES)
        params = [
            SamplingParams(**{name: FEATURES[name][(i + j) % 3] for j, name in enumerate(names) if (i * 5 + j * 3) % 4})
            for i in range(len(PROMPTS) - 1)
        ]
        everything = {name: values[0] for name, values in FEATURES.items()} | {"temperature": 0.7}
        check([*params, SamplingParams(**everything)], num_drafts, seed=num_drafts)

    @pytest.mark.slow
    def test_a_row_at_a_time(self):
        """As a draft model asks for its rows."""
        params = [SamplingParams(**{name: values[i] for name, values in FEATURES.items()}) for i in range(3)]
        rows, context, tokens, logits, distribution = check(params, 4)
        process = jax.jit(sampling.process)
        for j in range(5):
            known = jnp.where(jnp.arange(4)[None] < j, tokens, -1)
            row = process(rows, jnp.asarray(logits[:, j : j + 1]), context, known, jnp.int32(j))
            np.testing.assert_allclose(row.logits[:, 0], distribution.logits[:, j], rtol=1e-6, atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("feature", ["frequency_penalty", "repetition_penalty", "logit_bias"])
    def test_bfloat16(self, feature):
        rows = sampling.batch([SamplingParams(**{feature: FEATURES[feature][0]})])
        logits = jax.random.normal(jax.random.key(0), (1, 2, V), jnp.bfloat16)
        context = make_context(PROMPTS[:1], OUTPUTS[:1])
        distribution = sampling.process(rows, logits, context, jnp.array([[2]]))
        exact = sampling.process(rows, logits.astype(jnp.float32), context, jnp.array([[2]]))
        assert distribution.logits.dtype == jnp.float32
        np.testing.assert_array_equal(distribution.logits, exact.logits)


def kept(logits, **fields):
    """The tokens that one row keeps, and its logits."""
    rows = sampling.batch([SamplingParams(**fields)])
    context = make_context([[0]], [[]])
    distribution = sampling.process(
        rows, jnp.asarray(logits, jnp.float32)[None, None], context, jnp.zeros((1, 0), jnp.int32)
    )
    return np.flatnonzero(distributions.kept_logits(distribution)[0, 0] > -np.inf).tolist(), distribution.logits[0, 0]


class TestOrder:
    def test_temperature_before_top_p(self):
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.7)[0] == [0, 1]
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.7, temperature=2)[0] == [0, 1, 2]

    def test_top_p_of_what_top_k_leaves(self):
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.6)[0] == [0, 1]
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.6, top_k=2)[0] == [0]

    def test_top_p_of_what_min_p_leaves(self):
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.6, min_p=0.5)[0] == [0]

    def test_temperature_before_min_p(self):
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), min_p=0.4)[0] == [0, 1]
        assert kept(np.log([0.5, 0.3, 0.15, 0.05]), min_p=0.4, temperature=2)[0] == [0, 1, 2]

    def test_bias_before_repetition(self):
        assert kept([1.0, 0.0], logit_bias={0: 1}, repetition_penalty=4)[1].tolist() == [0.5, 0]

    def test_processors_before_bias_and_masks(self):
        ids, logits = kept([1.0, 1, 1], logits_processors=[double_last], logit_bias={0: 1}, allowed_token_ids=[0, 2])
        assert (ids, logits.tolist()) == ([0, 2], [3, -np.inf, 1])

    def test_penalties_before_temperature_and_top_k(self):
        rows = sampling.batch([SamplingParams(presence_penalty=2, temperature=0.5, top_k=1)])
        context = make_context([[1]], [[0]])
        distribution = sampling.process(rows, jnp.array([[[2.0, 1.0]]]), context, jnp.zeros((1, 0), jnp.int32))
        assert distributions.kept_logits(distribution).tolist() == [[[-np.inf, 1]]]


class TestBlock:
    def test_penalties_count_the_drafts_before_a_row(self):
        rows = sampling.batch([SamplingParams(frequency_penalty=0.5)])
        context = make_context([[3, 3]], [[]])
        distribution = sampling.process(rows, jnp.zeros((1, 4, V)), context, jnp.array([[3, 3, 3]]))
        assert distribution.logits[0, :, 3].tolist() == [0, -0.5, -1, -1.5]

    def test_bad_word_begun_in_the_prompt(self):
        rows = sampling.batch([SamplingParams(bad_words=[[3, 4]])])
        distribution = sampling.process(rows, jnp.zeros((1, 2, V)), make_context([[5, 3]], [[]]), jnp.array([[3]]))
        assert distribution.logits[0, :, 4].tolist() == [0, -np.inf]

    def test_what_follows_a_forbidden_or_stop_draft_is_not_empty(self):
        rows = sampling.batch([SamplingParams(guided_decoding=GRAMMAR, min_tokens=3)], [EOS], V)
        for drafts in ([EOS, EOS, 3], [20, 20, 20], [EOS, 1, 9], [-1, -1, -1]):
            context = make_context([[1]], [[]], rows.guide.initial)
            distribution = sampling.process(rows, jnp.zeros((1, 4, V)), context, jnp.array([drafts]))
            assert np.all(np.any(distribution.logits > -np.inf, axis=-1))

    @pytest.mark.slow
    @pytest.mark.parametrize("verifier", [verifiers.block, verifiers.match])
    def test_everything_forbidden_gives_ids_in_range(self, verifier):
        rows = sampling.batch([SamplingParams(allowed_token_ids=[3], bad_words=[[3]], top_p=0.9)])
        distribution = sampling.process(rows, jnp.zeros((1, 3, V)), make_context([[1]], [[2]]), jnp.array([[3, 3]]))
        draft = Draft(jnp.array([[3, 3]]), Categorical(distribution.logits[:, :2]))
        tokens = jax.jit(verifier)(jax.random.key(0), draft, distribution).tokens
        assert np.all((tokens >= -1) & (tokens < V)) and tokens[0, 0] >= 0

    def test_min_tokens_yields_where_nothing_else_is_allowed(self):
        rows = sampling.batch([SamplingParams(min_tokens=3, allowed_token_ids=[EOS, 2], bad_words=[[3, 2]])], [EOS])
        distribution = sampling.process(rows, jnp.zeros((1, 2, V)), make_context([[1]], [[]]), jnp.array([[3]]))
        assert np.argwhere(distribution.logits > -np.inf).tolist() == [[0, 0, 2], [0, 1, EOS]]


class TestProcessors:
    def test_each_row_keeps_its_order(self):
        def double(logits, context):
            return 2 * logits

        def add(logits, context):
            return logits + 1

        params = [SamplingParams(logits_processors=f) for f in ([double, add], [add, double], [add], [double, double])]
        rows = sampling.batch([*params, SamplingParams()])
        context = make_context([[1]] * 5, [[]] * 5)
        distribution = sampling.process(rows, jnp.ones((5, 1, V)), context, jnp.zeros((5, 0), jnp.int32))
        assert distribution.logits[:, 0, 0].tolist() == [3, 4, 2, 4, 1]
        assert len(rows.logits_processors) == 4

    def test_bound_arrays_are_traced(self):
        def shift(offset, logits, context):
            return logits + offset

        @jax.jit
        def run(rows):
            run.count += 1
            return sampling.process(rows, jnp.zeros((1, 1, V)), context, jnp.zeros((1, 0), jnp.int32)).logits[0, 0, 0]

        run.count, context = 0, make_context([[1]], [[]])
        results = [
            run(sampling.batch([SamplingParams(logits_processors=[Partial(shift, jnp.float32(offset))])]))
            for offset in (1, 5)
        ]
        assert (results, run.count) == ([1, 5], 1)

    @pytest.mark.parametrize("k, expected", [(1, [1]), (2, [1, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4]), (9, range(6))])
    def test_exact_top_k_parts_ties(self, k, expected):
        assert kept([1.0, 3, 1, -2, 3, 1], logits_processors=[sampling.ExactTopK(k)])[0] == list(expected)

    @pytest.mark.parametrize("k", [0, -1, 2.0, True])
    def test_bad_exact_top_k(self, k):
        with pytest.raises(ValueError, match=f"k must be an integer >= 1, got {k}"):
            sampling.ExactTopK(k)

    @pytest.mark.parametrize(
        "change, got",
        [
            (lambda logits: logits[:5], r"float32 \(5,\)"),
            (lambda logits: logits.astype(jnp.int32), r"int32 \(24,\)"),
            (lambda logits: logits > 0, r"bool \(24,\)"),
            (lambda logits: None, "NoneType"),
            (lambda logits: (logits, logits), "tuple"),
        ],
    )
    def test_no_logits(self, change, got):
        rows = sampling.batch([SamplingParams(logits_processors=[lambda logits, context: change(logits)])])
        message = r"logits_processors must return floating numbers of shape \[V\] = \(24,\), got " + got
        with pytest.raises(ValueError, match=message):
            sampling.process(rows, jnp.zeros((1, 1, V)), make_context([[1]], [[]]), jnp.zeros((1, 0), jnp.int32))


class TestBatch:
    def test_what_is_not_used_is_none(self):
        rows = sampling.batch([SamplingParams(), SamplingParams(max_tokens=3, seed=1)])
        assert {name for name, value in rows._asdict().items() if value is not None} == {"max_tokens", "temperature"}

    def test_plain_batch_leaves_the_logits(self):
        context = make_context([[1]], [[]])
        rows = sampling.batch([SamplingParams()], [EOS])
        logits = jnp.zeros((1, 3, V))
        traced = jax.make_jaxpr(sampling.process)(rows, logits, context, jnp.zeros((1, 2), jnp.int32))
        assert all(out.aval.size < V for eqn in traced.eqns for out in eqn.outvars)

    def test_one_compilation_for_all_values(self):
        @jax.jit
        def run(rows, context, drafts):
            run.count += 1
            return sampling.process(rows, jnp.zeros((2, 3, V)), context, drafts).logits

        run.count = 0
        some = dict(
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            min_p=0.1,
            min_tokens=2,
            presence_penalty=1,
            frequency_penalty=1,
            repetition_penalty=1.5,
            logit_bias={1: 1.0, 2: -3.0, 7: 0.5},
            allowed_token_ids=range(9),
            bad_words=[[1, 2, 3], [4], [5]],
            logits_processors=[double_last],
            guided_decoding=GRAMMAR,
            stop_token_ids=[3, 4],
        )
        other = some | dict(
            temperature=0.0,
            top_k=7,
            frequency_penalty=-2,
            logit_bias={i: i for i in range(4)},
            allowed_token_ids=range(1, 17),
            bad_words=[[1], [2, 1, 6, 7], [3], [4]],
            guided_decoding=Grammar(np.arange(V), PAIRS[:, ::-1]),
        )
        for first, second, prompts in (
            (some, {}, [[1, 2], [3]]),
            ({}, other, [[3], [4, 5, 6]]),
            (some, some, [[1]] * 2),
        ):
            rows = sampling.batch([SamplingParams(**first), SamplingParams(**second)], [EOS], V)
            run(rows, make_context(prompts, [[7], [8, 8]], rows.guide.initial), jnp.full((2, 2), len(prompts[0])))
        assert run.count == 1

    def test_bad_words_as_strings(self):
        ids = {"cat": [5, 6], " cat": [7], "dog": [8], " dog": [8], "\n": [9]}
        params = [SamplingParams(bad_words=["cat", " dog", (1, 2, 3)]), SamplingParams(bad_words="\n")]
        words = sampling.batch(params, tokenize=ids.__getitem__).bad_words
        unpadded = [[[t for t in word if t >= 0] for word in row] for row in words.tolist()]
        assert unpadded == [[[5, 6], [7], [8], [1, 2, 3]], [[9], [], [], []]]

    def test_one_request_is_no_batch(self):
        with pytest.raises(ValueError, match=r"params must be a sequence of SamplingParams.*, got one alone"):
            sampling.batch(SamplingParams())

    def test_bad_words_without_tokenizer(self):
        with pytest.raises(ValueError, match=r"bad_words must be sequences of token ids .* got 'cat'"):
            sampling.batch([SamplingParams(bad_words=["cat"])])
        with pytest.raises(ValueError, match="bad_words must have tokens, got 'cat'"):
            sampling.batch([SamplingParams(bad_words=["cat"])], tokenize=lambda text: [])

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("stop_token_ids", [V]),
            ("logit_bias", {V: 1.0}),
            ("allowed_token_ids", [1, V]),
            ("bad_words", [[1], [2, V]]),
        ],
    )
    def test_ids_outside_the_vocabulary(self, name, value):
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, vocab_size = 24\), got"):
            sampling.batch([SamplingParams(**{name: value})], vocab_size=V)


class TestParams:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("temperature", x) for x in (-0.1, 1e-50, float("nan"), float("inf"), None, "1", False)),
            *(("top_k", x) for x in (0, -2, 1.5, 2**31, None)),
            *(("top_p", x) for x in (0, 1.1, -1, None)),
            *(("min_p", x) for x in (-0.1, 1.1, None)),
            *(("seed", x) for x in (1.5, "1", 2**64, -(2**63) - 1)),
            *(("max_tokens", x) for x in (0, 1.5, 2**31, None)),
            *(("min_tokens", x) for x in (-1, 17, None)),
            *(("stop", x) for x in ("", ["a", ""], [1], 3, "\udcff")),
            *(("stop_token_ids", x) for x in ([-1], [1.5], [2**31], ["a"], 3, "a", b"a", {3: 1})),
            *((f"{kind}_penalty", x) for kind in ("presence", "frequency") for x in (2.1, -2.1, float("nan"), None)),
            *(("repetition_penalty", x) for x in (0, -1, 1e-50, 1e60, float("inf"), None)),
            *(("logit_bias", x) for x in ({-1: 1}, {1: 101}, {1: float("nan")}, {"a": 1}, {1: None}, [1], {1: True})),
            *(("allowed_token_ids", x) for x in ([], [-1], [1.5], 3)),
            *(
                ("bad_words", x)
                for x in ("", [""], ["a\ud800"], [[]], [[-1]], ["a", [1.5]], [3], 3, [b"ab"], [{3, 7}], [{3: 7}])
            ),
            *(("logits_processors", x) for x in ([3], ["f"], double_last, [Unhashable()])),
            *(("guided_decoding", x) for x in ("[a-z]", {"regex": "a"})),
            *(("n", x) for x in (0, 1.5, None, True)),
            *(("best_of", x) for x in (0, 1.5, "2")),
            *((name, x) for name in ("logprobs", "prompt_logprobs") for x in (-1, 1.5, True)),
            *((name, 10**400) for name in ("temperature", "top_p", "presence_penalty", "repetition_penalty")),
            *((name, np.array(3)) for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")),
            *((name, 1) for name in ("detokenize", "skip_special_tokens", "include_stop_str_in_output")),
            *(("spaces_between_special_tokens", x) for x in (None, "yes")),
            *(("truncate_prompt_tokens", x) for x in (0, -1, 1.5)),
        ],
    )
    def test_bad_value(self, name, value):
        with pytest.raises(ValueError, match=f"{name} must be"):
            SamplingParams(**{name: value})

    def test_numbers_of_numpy(self):
        """They become numbers of Python, because the sum of a small type and a length would overflow."""
        plain = {
            **{"n": 2, "best_of": 3, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": -3},
            **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "ignore_eos": True},
            **{"max_tokens": 100, "min_tokens": 2, "logprobs": 2, "prompt_logprobs": 2, "truncate_prompt_tokens": 9},
        }
        lists = {"stop_token_ids": [7], "allowed_token_ids": [1, 2], "bad_words": [[3, 4]], "logit_bias": {5: 0.5}}
        types = {int: np.int8, float: np.float16, bool: np.bool}
        given = {name: types[type(value)](value) for name, value in plain.items()}
        given |= {name: np.array(lists[name], np.uint8) for name in lists if name != "logit_bias"}
        params = SamplingParams(**given, logit_bias={np.uint8(5): np.float16(0.5)})
        assert repr(params) == repr(SamplingParams(**plain, **lists))

    def test_samples_of_a_greedy_request(self):
        for options in ({"n": 2}, {"best_of": 2}):
            with pytest.raises(ValueError, match="must be 1 at temperature 0, where all completions are the same"):
                SamplingParams(temperature=0, **options)
        assert SamplingParams(temperature=0, best_of=1).num_samples == 1

    def test_best_of_is_at_least_n(self):
        assert [SamplingParams(n=n, best_of=m).num_samples for n, m in ((1, None), (3, None), (2, 5))] == [1, 3, 5]
        with pytest.raises(ValueError, match="best_of must be None or >= n = 3, got 2"):
            SamplingParams(n=3, best_of=2)

    def test_stop_strings_need_text(self):
        with pytest.raises(ValueError, match="stop must be empty where detokenize is False"):
            SamplingParams(stop="a", detokenize=False)

    def test_all_fields_of_the_reference(self):
        fields = (
            "n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
            "stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs "
            "prompt_logprobs detokenize skip_special_tokens spaces_between_special_tokens logits_processors "
            "truncate_prompt_tokens guided_decoding logit_bias allowed_token_ids"
        )
        assert set(SamplingParams.__dataclass_fields__) == set(fields.split())

    def test_hash(self):
        params = SamplingParams(
            logit_bias={1: 2}, bad_words=[[1, 2], "a"], guided_decoding=GRAMMAR, allowed_token_ids=[1], stop=["a"]
        )
        assert len({params, SamplingParams()}) == 2


CONFIG = DecoderConfig(
    vocab_size=V, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=32, max_length=64
)


@cache
def decoder(noise: float = 0.0):
    params = init_params(CONFIG, 0)
    params["embedding"] = 40 * params["embedding"]  # logits of some size
    noisy = jax.tree.map(lambda x: x + noise * jnp.std(x) * jax.random.normal(jax.random.key(1), x.shape), params)
    return decoder_model(CONFIG, noisy)


MIXED = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, presence_penalty=1.5, frequency_penalty=0.6, repetition_penalty=1.4),
    SamplingParams(max_tokens=24, logit_bias={3: 2, 5: -3}, bad_words=[[7], [3, 3], [1, 2]], repetition_penalty=0.8),
    SamplingParams(max_tokens=24, guided_decoding=GRAMMAR, frequency_penalty=2),
    SamplingParams(max_tokens=24, guided_decoding=GRAMMAR, min_tokens=9, logit_bias={EOS: 9, 2: 1}, presence_penalty=2),
    SamplingParams(max_tokens=24, min_tokens=6, logit_bias={EOS: 5}, logits_processors=[lower_output, double_last]),
    SamplingParams(max_tokens=24, allowed_token_ids=[1, 4, 9, EOS], frequency_penalty=1),
]


def generate(params, proposer, verifier=verifiers.rejection):
    rows = sampling.batch(params, [EOS], V)
    width = max(map(len, PROMPTS))
    prompts = jnp.asarray([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS[: len(params)]])
    lengths = jnp.asarray([len(prompt) for prompt in PROMPTS[: len(params)]])
    model = decoder()
    prefill = jax.jit(decode.prefill, static_argnames="max_length")
    state = prefill(model, proposer, prompts, lengths, rows, jax.random.key(0), max_length=48)
    state = decode.generate(model, proposer, state, verifier=verifier)
    ends = np.asarray(state.context.length)
    return [
        row[start:end] for row, start, end in zip(state.context.tokens.tolist(), lengths.tolist(), ends, strict=True)
    ], state


@pytest.fixture(scope="module")
def plain():
    return generate([greedy(p) for p in MIXED], None)[0]


class TestDecoding:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["rejection", "block"])
    def test_greedy_is_that_of_plain_decoding(self, plain, name):
        proposer = proposers.draft_model(decoder(noise=0.3), 3)
        tokens, state = generate([greedy(p) for p in MIXED], proposer, one_of(name))
        assert tokens == plain
        assert 0 < state.totals.accepted.sum() < state.totals.drafted.sum()

    @pytest.mark.slow
    def test_constraints_hold(self, plain):
        follows_grammar(plain[3]), follows_grammar(plain[4])
        assert EOS not in plain[5][:6] and EOS not in plain[4][:8]
        assert set(plain[6]) <= {1, 4, 9, EOS}
        pairs = list(zip(plain[2], plain[2][1:], strict=False))
        assert 7 not in plain[2] and (3, 3) not in pairs and (1, 2) not in pairs

    @pytest.mark.slow
    def test_draft_reports_what_it_sampled_from(self):
        model = decoder(noise=0.3)
        proposer = proposers.draft_model(model, 3)
        rows = sampling.batch(MIXED, [EOS], V)
        context = make_context(PROMPTS, OUTPUTS, guided_state(rows, OUTPUTS))
        positions = jnp.broadcast_to(jnp.arange(context.tokens.shape[1]), context.tokens.shape)
        inputs = ModelInput(context.tokens, positions, num_tokens=context.length)
        memory = proposer.init(len(MIXED), BUFFER + 4)
        cache = jax.jit(proposer.prefill)(inputs, jnp.full_like(positions, -1), None, None, memory)
        keys = jax.random.split(jax.random.key(0), (len(MIXED), 4))
        draft, _ = jax.jit(proposer.propose)(keys, context, rows, cache)
        history = [p + o + d for p, o, d in zip(PROMPTS, OUTPUTS, draft.tokens.tolist(), strict=True)]
        tokens = jnp.asarray([row + [0] * (BUFFER - len(row)) for row in history])
        inputs = ModelInput(tokens, jnp.broadcast_to(jnp.arange(BUFFER), tokens.shape))
        output, _ = jax.jit(model.apply)(model.params, inputs, model.init_cache(len(MIXED), BUFFER))
        for i, row in enumerate(history):
            for j in range(3):
                raw = output.logits[i, len(row) - 4 + j]
                expected = oracle_logits(MIXED[i], raw, PROMPTS[i], OUTPUTS[i] + row[len(row) - 3 : len(row) - 3 + j])
                np.testing.assert_allclose(draft.distribution.logits[i, j], expected, rtol=1e-4, atol=1e-4)
                assert expected[row[len(row) - 3 + j]] > -np.inf


def greedy(params):
    return SamplingParams(**{name: getattr(params, name) for name in params.__dataclass_fields__} | {"temperature": 0})


def follows_grammar(tokens):
    state = FIRST
    for token in tokens:
        state = PAIRS[state, token]
        assert state >= 0, tokens


def test_every_field_of_arrays_has_a_rule():
    """Without one, requests of an engine would lack the field, or the array of a batch would have another dtype."""
    fields = set(Sampling._fields) - {"logits_processors", "guide"}
    assert set(RULES) == fields
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        stop_token_ids=[1],
        min_tokens=1,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=2,
        logit_bias={2: 1.0},
        allowed_token_ids=[1, 2],
        bad_words=[[1, 2]],
    )
    of_batch, of_one = sampling.batch([params]), of_request(params, Capacities())
    for name, rule in RULES.items():
        assert getattr(of_batch, name).dtype == getattr(of_one, name).dtype == rule.dtype
        assert getattr(of_one, name).ndim == len(rule.capacities) == getattr(of_batch, name).ndim - 1
        needs = needs_of(of_one._replace(**{other: None for other in fields - {name, "max_tokens"}}))
        assert (needs == Needs.EVERYTHING) == rule.shapes_logits


def test_an_id_that_is_named_twice_counts_once():
    params = SamplingParams(stop_token_ids=[5, 6, 5], allowed_token_ids=[1, 1, 2])
    found = sampling.batch([params], eos_token_ids=(6,))
    assert found.stop_tokens.tolist() == [[5, 6]] and found.allowed_tokens.tolist() == [[1, 2]]
