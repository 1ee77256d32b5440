"""Requests from prompt to result: samples of one prompt, log-probabilities, what speculation must not change."""

import copy
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_llm import PROMPTS, tokens, write_pair

from specjax import ModelInput, keys, verifiers
from specjax.engine.llm import LLM
from specjax.sampling import SamplingParams


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(*write_pair(tmp_path_factory.mktemp("requests"), num_layers=1), num_draft_tokens=2)


@pytest.fixture(scope="module")
def matching(llm):
    other = copy.copy(llm)
    other.setup = replace(llm.setup, verifier=verifiers.match)
    return other


def encode(llm, prompt):
    return llm.tokenizer.encode(prompt).ids


@jax.jit
def forward(model, inputs):
    return model.apply(model.params, inputs, None)[0].logits


def expected_log_probs(llm, prompt, output, params=None):
    """Log-probabilities [N, V] of all tokens after the first, in float64.

    With params the output's log-probabilities follow presence_penalty, temperature and top_k, as its tokens do.
    """
    size = len(prompt) + len(output)
    sequence = np.array([prompt + output + [0] * (80 - size)], np.int32)
    inputs = ModelInput(sequence, np.arange(80)[None])
    logits = np.array(forward(llm.model, inputs)[0, : size - 1], np.float64)
    for i in range(len(prompt) - 1, len(logits)) if params else ():
        logits[i, sorted(set(output[: i + 1 - len(prompt)]))] -= params.presence_penalty
        logits[i] /= params.temperature or 1
        if params.top_k > 0 and params.temperature:
            logits[i, logits[i] < np.sort(logits[i])[-params.top_k]] = -np.inf
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def check_listed(listed, distribution, token_ids, n):
    """Each entry is the token itself, then the n most likely, by the distribution of that token."""
    assert len(listed) == len(token_ids) == len(distribution)
    for entry, row, token in zip(listed, distribution, token_ids, strict=True):
        likely = np.argsort(-row, kind="stable")[:n].tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token} | {i for i in likely if row[i] > -math.inf}
        np.testing.assert_allclose(list(entry.values()), row[list(entry)], atol=1e-4)
        assert list(entry)[1:] == [i for i in likely if i != token and row[i] > -math.inf]


MIX = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3, top_k=2, presence_penalty=1.0),
    SamplingParams(temperature=0.7, max_tokens=24, logprobs=5, prompt_logprobs=2, seed=1, top_k=3),
    SamplingParams(temperature=1.2, max_tokens=20, logprobs=0, prompt_logprobs=0, seed=2, presence_penalty=1.5),
]


class TestLogProbs:
    @pytest.mark.slow
    def test_of_the_distribution_that_tokens_are_drawn_from(self, llm):
        for prompt, params, result in zip(PROMPTS, MIX, llm.generate(PROMPTS, MIX), strict=True):
            ids = encode(llm, prompt)
            distribution = expected_log_probs(llm, ids, result.token_ids, params)[len(ids) - 1 :]
            check_listed(result.completions[0].logprobs, distribution, result.token_ids, params.logprobs)
            if params.prompt_logprobs is None:
                assert result.prompt_logprobs is None
                continue
            assert result.prompt_logprobs[0] is None
            distribution = expected_log_probs(llm, ids, [])
            check_listed(result.prompt_logprobs[1:], distribution, ids[1:], params.prompt_logprobs)

    @pytest.mark.slow
    def test_with_match_they_are_those_of_plain_decoding(self, matching):
        speculative, plain = matching.generate(PROMPTS, MIX), matching.plain().generate(PROMPTS, MIX)
        assert tokens(speculative) == tokens(plain)
        for ours, others in zip(speculative, plain, strict=True):
            for a, b in zip(ours.completions[0].logprobs, others.completions[0].logprobs, strict=True):
                assert list(a) == list(b)
                np.testing.assert_allclose(list(a.values()), list(b.values()), atol=1e-4)

    @pytest.mark.slow
    def test_in_a_stream(self, llm):
        stream = llm.stream(PROMPTS[1], MIX[1])
        for _ in range(5):
            next(stream)
        assert len(stream.result.completions[0].logprobs) == 5
        list(stream)
        whole = llm.generate(PROMPTS[1], MIX[1])[0]
        assert stream.result.completions[0].token_ids == whole.token_ids
        assert stream.result.completions[0].logprobs == whole.completions[0].logprobs
        assert stream.result.prompt_logprobs == whole.prompt_logprobs

    @pytest.mark.slow
    def test_truncated_prompt(self, llm):
        ids = encode(llm, PROMPTS[2])
        params = replace(MIX[1], prompt_logprobs=1, presence_penalty=0.5)
        truncations = [replace(params, truncate_prompt_tokens=n) for n in (4, None, 1000)]
        prompts = [PROMPTS[2], ids[-4:], PROMPTS[2]]
        truncated, short, whole = llm.generate(prompts, truncations)
        assert truncated.completions == short.completions
        assert truncated.prompt_logprobs == short.prompt_logprobs
        assert [entry and next(iter(entry)) for entry in short.prompt_logprobs] == [None, *ids[-3:]]
        assert [entry and next(iter(entry)) for entry in whole.prompt_logprobs] == [None, *ids[1:]]
        assert truncated.prompt == PROMPTS[2]

    @pytest.mark.slow
    def test_truncation_makes_a_prompt_fit(self, llm):
        params = replace(MIX[1], truncate_prompt_tokens=20)
        assert len(llm.generate([[5] * 500], params)[0].prompt_logprobs) == 20


LISTED = 5  # log-probabilities of a token, as many as in `MIX`, so that the tests share their programs


def sampled(**options):
    return SamplingParams(**dict(temperature=0.9, max_tokens=24, seed=3, logprobs=LISTED) | options)


def score(completion):
    return sum(next(iter(entry.values())) for entry in completion.logprobs)


class TestSamples:
    @pytest.mark.slow
    def test_ranked_by_log_probability(self, llm):
        (result,) = llm.generate(PROMPTS[0], sampled(n=5))
        scores = [score(completion) for completion in result.completions]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(completion.token_ids) for completion in result.completions}) == 5
        assert result.metrics.num_tokens == sum(len(completion.token_ids) for completion in result.completions)

        (best,) = llm.generate(PROMPTS[0], sampled(n=2, best_of=5))
        assert best.completions == result.completions[:2]
        assert best.metrics[:4] == result.metrics[:4]

    @pytest.mark.slow
    def test_first_sample_is_that_of_n_1(self, llm):
        result, alone = llm.generate([PROMPTS[0]] * 2, [sampled(n=4), sampled()])
        some, fewer = llm.generate([PROMPTS[0]] * 2, [sampled(n=3), sampled(n=2)])
        sequences = [completion.token_ids for completion in result.completions]
        for other, n in ((alone, 1), (fewer, 2), (some, 3)):
            assert len(other.completions) == n
            assert all(completion.token_ids in sequences for completion in other.completions)

    def test_keys(self):
        """The first sample has the request's own key; no other shares a key with a position of any."""
        requests = jax.random.split(jax.random.key(0), 2)
        samples = keys.samples(requests[jnp.array([0, 0, 0, 1])], jnp.array([0, 1, 2, 1]))
        assert (samples[0] == requests[0]).all()
        used = jnp.concatenate([requests, samples[1:], keys.positions(samples, jnp.zeros(4, jnp.int32), 63).ravel()])
        assert len({tuple(words) for words in jax.random.key_data(used).tolist()}) == len(used)

    @pytest.mark.slow
    def test_samples_ignore_the_batch(self, llm):
        alone = [llm.generate(prompt, sampled(n=2, seed=i))[0] for i, prompt in enumerate(PROMPTS[:2])]
        params = [sampled(n=2, seed=0), sampled(n=2, seed=1), sampled(seed=0)]
        together = llm.generate([*PROMPTS[:2], PROMPTS[0]], params)
        assert [len(result.completions) for result in together] == [2, 2, 1]
        for one, other in zip(alone, together[:2], strict=True):
            assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
        assert together[2].token_ids in [c.token_ids for c in together[0].completions]

    @pytest.mark.slow
    def test_match_gives_the_samples_of_plain_decoding(self, matching):
        fast, plain = (other.generate(PROMPTS[0], sampled(n=5))[0] for other in (matching, matching.plain()))
        assert [c.token_ids for c in fast.completions] == [c.token_ids for c in plain.completions]

    @pytest.mark.slow
    def test_stop_strings_cut_before_the_ranking(self, llm):
        """The device decodes past a stop string: what lies past it counts neither in the sums nor in the lists."""
        (whole,) = llm.generate(PROMPTS[0], sampled(n=5))
        stop = whole.completions[0].text[4:6]
        (result,) = llm.generate(PROMPTS[0], sampled(n=5, stop=stop))
        scores = [score(completion) for completion in result.completions]
        assert scores == sorted(scores, reverse=True)
        assert "stop" in [completion.finish_reason for completion in result.completions]
        ids = encode(llm, PROMPTS[0])
        for completion in result.completions:
            assert len(completion.logprobs) == len(completion.token_ids)
            distribution = expected_log_probs(llm, ids, completion.token_ids, sampled())[len(ids) - 1 :]
            check_listed(completion.logprobs, distribution, completion.token_ids, LISTED)
            assert any(c.token_ids[: len(completion.token_ids)] == completion.token_ids for c in whole.completions)

    def test_a_stream_has_one(self, llm):
        with pytest.raises(ValueError, match="n and best_of must be 1 in a stream, got 1 and 3"):
            llm.stream("a", sampled(best_of=3))


class TestPrompts:
    @pytest.mark.slow
    def test_odd_text(self, llm):
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 256, rng.integers(1, 40), np.uint8).tobytes() for _ in range(64)]
        prompts = [p.decode("latin-1") if i % 2 else p.decode("utf-8", "replace") for i, p in enumerate(prompts)]
        few = copy.copy(llm)
        few.setup = replace(llm.setup, num_slots=8)  # as other calls have
        params = SamplingParams(temperature=1, max_tokens=9, stop="\ufffd\ufffd", logprobs=LISTED)
        results = few.generate(prompts, params)
        assert all(1 <= len(result.token_ids) <= 9 or result.completions[0].stop_reason for result in results)

    @pytest.mark.parametrize(
        "prompts, message",
        [
            (5, "prompts must be a string, or a list of strings or of token ids, got 5"),
            (b"abc", "prompts must be a string, or a list of strings or of token ids, got b'abc'"),
            (np.array(5), r"prompts must be a string, or a list of strings or of token ids, got array\(5\)"),
            ([b"abc"], r"prompts\[0\] must be a string or a list of token ids, got b'abc'"),
            ([bytearray(b"a")], r"prompts\[0\] must be a string or a list of token ids, got bytearray"),
            ([[True, 2]], r"prompts\[0\] must be a string or a list of token ids, got \[True, 2\]"),
            ([None], r"prompts\[0\] must be a string or a list of token ids, got None"),
            ([[[1], [1, 2]]], r"prompts\[0\] must be a string or a list of token ids, got \[\[1\], \[1, 2\]\]"),
            (["a", "b\udcff"], r"prompts\[1\] must be text that UTF-8 can encode, got '\\udcff' at 1"),
        ],
    )
    def test_wrong_types(self, llm, prompts, message):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts)

    def test_wrong_params(self, llm):
        for params in (5, [5], {"n": 1}):
            with pytest.raises(ValueError, match="params must be SamplingParams, one for all or one a prompt, got"):
                llm.generate(["a"], params)
        with pytest.raises(ValueError, match="params must be SamplingParams, got 3"):
            llm.stream("a", 3)
        with pytest.raises(ValueError, match="prompt must be a string or a list of token ids, got 5"):
            llm.stream(5)
        with pytest.raises(ValueError, match="logprobs must be at most vocab_size = 300, got 301"):
            llm.generate("a", SamplingParams(logprobs=301))


@pytest.mark.slow
def test_metrics(llm):
    (result,) = llm.generate(PROMPTS[0], sampled())
    figures = result.metrics
    steps = figures.num_drafted / 2
    assert figures.system_efficiency == (figures.num_accepted + steps) / (3 * steps)
    assert figures.time_to_first_token > 0
    assert math.isnan(llm.stream(PROMPTS[0]).result.metrics.time_to_first_token)
