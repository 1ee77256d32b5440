"""The engine's thread: requests of many callers, cancelled, refused and failed ones among them."""

import asyncio
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from test_scheduler import Letters, alone, replace_params
from test_slots import (
    CAPACITIES,
    CHUNK,
    EOS,
    GRAMMARS,
    KINDS,
    MAX_LENGTH,
    NUM_PAGES,
    NUM_SLOTS,
    PAGE_SIZE,
    VOCAB,
    make,
    make_proposer,
    some_jobs,
)

from specjax import Capacities, SamplingParams, guided, proposers, verifiers
from specjax.engine import grammar_compiler, memory
from specjax.engine.draft_length import ByFunction, check_choice
from specjax.engine.engine import Engine, QueueFull
from specjax.engine.inputs import key_data
from specjax.engine.mixed_sizes import mixed_sizes_of
from specjax.engine.scheduler import NoTokenError
from specjax.engine.sizes import checked_prompt_sizes, checked_step_sizes
from specjax.engine.slots import Slots
from specjax.theory import StepTimes


class Tokenizer(Letters):
    """Letters for tokens, as a tokenizer of bytes has them; the end of a sequence is special."""

    def encode(self, text, add_special_tokens=True):
        raise AssertionError("the tests give token ids")

    def decode(self, ids, skip_special_tokens):
        return super().decode([i for i in ids if not (skip_special_tokens and i in EOS)], skip_special_tokens)

    def to_str(self):
        return '{"decoder": {"type": "ByteLevel"}}'

    def get_vocab(self):
        return {chr(ord("A") + i): i for i in range(VOCAB)}

    def get_added_tokens_decoder(self):
        return {EOS[0]: SimpleNamespace(special=True, content="F")}


@pytest.fixture(scope="module")
def target():
    return make(0)


@pytest.fixture(scope="module")
def proposer():
    return make_proposer("reduced", make(1))


FEW = Capacities(stop_tokens=4, biases=0, allowed_tokens=0, bad_words=0, logprobs=0)  # programs are quick to compile


def engine_of(target, proposer, **options):
    """An engine of the sizes of the slots in other tests, whose programs are found where those have compiled them."""
    sizes = {"num_slots": NUM_SLOTS, "max_length": MAX_LENGTH, "page_size": PAGE_SIZE, "chunk_size": CHUNK}
    sizes |= {"num_pages": NUM_PAGES if target.takes_pages else None, "prompt_sizes": [CHUNK // 2]}
    given = {"tokenizer": Tokenizer(), "eos_token_ids": EOS, "capacities": CAPACITIES}
    return Engine(target, proposer, **(sizes | given | options))


@pytest.fixture(scope="module")
def engine(target, proposer):
    with engine_of(target, proposer) as engine:
        yield engine


def seeded(number, seed=0):
    """Requests with seeds, and the keys that these make."""
    requests = [replace_params(request, seed=100 + i) for i, request in enumerate(some_jobs(number, seed))]
    return [replace(request, key=key_data(request.params.seed, np.random.default_rng())) for request in requests]


def expected(target, proposer, request):
    state = alone(target, proposer, verifiers.rejection, request)
    length = int(state.context.length[0])
    return np.asarray(state.context.tokens)[0, len(request.prompt) : length].tolist()


@pytest.mark.slow
def test_callers_in_several_threads(engine, target, proposer):
    requests, results = seeded(12), {}

    def call(i):
        results[i] = engine.submit(requests[i].prompt.tolist(), requests[i].params).result(timeout=120)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, request in enumerate(requests):
        assert results[i].token_ids == expected(target, proposer, request)
        assert results[i].metrics.num_tokens == len(results[i].token_ids)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages.num_used) == (0, 0, 0)


@pytest.mark.slow
def test_a_request_ends_alone_where_no_token_can_follow(target, proposer):
    """One of its tokens has an embedding of NaN; all others get a logit of NaN for it, and never draw it."""

    def without_9(params):
        return params | {"embedding": params["embedding"].at[9].set(jnp.nan)}

    broken = replace(target, params=without_9(target.params))
    proposer = replace(proposer, params=proposer.params | {"model": without_9(proposer.params["model"])})
    requests = [request for request in seeded(5, 2) if 9 not in request.prompt]
    with engine_of(broken, proposer) as engine:
        failing = [engine.submit([3, 9, 5], SamplingParams(temperature=t, max_tokens=8)) for t in (0, 1)]
        calls = [engine.submit(request.prompt.tolist(), request.params) for request in requests]
        for call in failing:
            with pytest.raises(NoTokenError, match="the model gave no finite logit for the token after 3 tokens, or"):
                call.result(timeout=120)
        for call, request in zip(calls, requests, strict=True):
            found = call.result(timeout=120).token_ids
            assert found == expected(broken, proposer, request) and 9 not in found
        assert engine.stats().pages.num_used == 0


@pytest.mark.slow
def test_asynchronous_callers(engine, target, proposer):
    requests = seeded(6, 1)

    async def call():
        calls = (engine.generate(request.prompt.tolist(), request.params) for request in requests)
        return await asyncio.gather(*calls)

    for request, result in zip(requests, asyncio.run(call()), strict=True):
        assert result.token_ids == expected(target, proposer, request)


@pytest.mark.slow
def test_beside_one_request_of_every_use(engine, target, proposer):
    """Where it runs with one other that asks for samples, log-probabilities, a grammar or penalties, or is greedy."""
    request = seeded(2, 2)[1]
    tokens = expected(target, proposer, request)
    others = {"n": 2}, {"logprobs": 3}, {"guided_decoding": GRAMMARS[0]}, {"presence_penalty": 1.0}, {"temperature": 0}
    for i, params in enumerate(others):
        other = engine.submit([1, 2, i], SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | params)))
        own = engine.submit(request.prompt.tolist(), request.params)
        assert own.result(timeout=120).token_ids == tokens, params
        other.result(timeout=120)


@pytest.mark.slow
def test_samples_are_ranked_by_their_log_probability(engine):
    params = SamplingParams(temperature=1.0, n=3, best_of=5, logprobs=2, max_tokens=8, seed=3)
    result = engine.submit([1, 2, 3], params).result(timeout=120)
    assert len(result.completions) == 3
    totals = [
        sum(entry[token] for entry, token in zip(each.logprobs, each.token_ids, strict=True))
        for each in result.completions
    ]
    assert totals == sorted(totals, reverse=True)
    assert len({tuple(each.token_ids) for each in result.completions}) > 1
    again = engine.submit([1, 2, 3], params).result(timeout=120)
    assert [each.token_ids for each in again.completions] == [each.token_ids for each in result.completions]


STREAMED = SamplingParams(temperature=1.0, n=3, logprobs=2, max_tokens=20, seed=4, ignore_eos=True)


def check_pieces(pieces, result):
    """The pieces of each sample are its tokens, their text and their log-probabilities, in their order."""
    assert sorted(each.index for each in result.completions) == [0, 1, 2]
    for completion in result.completions:
        own = [piece for piece in pieces if piece.index == completion.index]
        assert [piece.token_id for piece in own] == completion.token_ids
        assert "".join(piece.text for piece in own) == completion.text
        assert [piece.logprobs for piece in own] == completion.logprobs
    kinds = [piece.kind for piece in pieces]
    assert set(kinds) <= {"accepted", "recovered", "bonus"}
    assert kinds.count("accepted") <= result.metrics.num_accepted


def test_pieces(engine):
    request = engine.submit([1, 2, 3], STREAMED)
    pieces = list(request)
    check_pieces(pieces, request.result(timeout=0))
    check_pieces(list(request), request.result())  # again from the first token
    assert (request.result().num_prompt_tokens, request.result().num_cached_tokens) == (3, 0)


def test_pieces_come_while_the_request_runs(engine, monkeypatch):
    rounds, advance = threading.Semaphore(4), engine._scheduler.advance
    monkeypatch.setattr(engine._scheduler, "advance", lambda: rounds.acquire() and advance())
    request = engine.submit([1, 2, 3], replace(STREAMED, n=1, max_tokens=20))
    pieces = iter(request)
    first = next(pieces)
    assert not request.is_done
    pieces.close()
    assert request._listeners == []
    rounds.release(1000)
    assert request.result(timeout=120).token_ids[0] == first.token_id


def test_pieces_for_asynchronous_callers(engine):
    async def call():
        requests = [engine.submit([1, 2, i], STREAMED) for i in range(3)]

        async def stream(request):
            return [piece async for piece in request]

        return zip(await asyncio.gather(*map(stream, requests)), requests, strict=True)

    for pieces, request in asyncio.run(call()):
        check_pieces(pieces, request.result(timeout=0))


def test_an_iteration_ends_as_the_request_does(engine):
    long = replace(STREAMED, n=1, max_tokens=MAX_LENGTH)
    requests = [engine.submit([1, 2], long) for _ in range(2 * NUM_SLOTS)]
    last = requests[-1]  # it waits for a slot
    for request in requests:
        request.cancel()
    with pytest.raises(CancelledError, match="the request was cancelled"):
        list(last)

    async def leave(request):
        pieces = aiter(request)
        await anext(pieces)
        await pieces.aclose()

    request = engine.submit([1, 2], long)
    asyncio.run(leave(request))
    assert request.result(timeout=120).completions[0].finish_reason == "length"


def test_a_greedy_request_ends_at_its_stop_token(engine):
    """Alone, so that its steps compute nothing but the argmax."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = engine.submit([1, 2, 3], params).result(timeout=120).completions[0].token_ids
    stop = tokens[4]
    found = engine.submit([1, 2, 3], replace(params, stop_token_ids=[stop])).result(timeout=120).completions[0]
    assert found.finish_reason == "stop" and list(found.token_ids) == list(tokens[: list(tokens).index(stop) + 1])


def test_text_is_held_back_while_a_stop_string_may_come(engine):
    (completion,) = engine.submit([1, 2], replace(STREAMED, n=1)).result(timeout=120).completions
    stop = completion.text[5:8]
    request = engine.submit([1, 2], replace(STREAMED, n=1, stop=stop))
    assert "".join(piece.text for piece in request) == completion.text[: completion.text.index(stop)]
    assert request.result(timeout=0).completions[0].stop_reason == stop


def test_counters_never_fall(engine):
    before = engine.stats()
    requests = [engine.submit([1, 2, i], replace(STREAMED, n=1)) for i in range(6)]
    requests[0].cancel()
    seen, names = [before], ("num_finished", "num_tokens", "num_prompt_tokens", "num_drafts", "num_drafted")
    while not all(request.is_done for request in requests):
        seen.append(engine.stats())
    after = engine.stats()
    for one, other in itertools.pairwise([*seen, after]):
        assert all(getattr(one, name) <= getattr(other, name) for name in (*names, "num_accepted"))
    assert after.num_finished - before.num_finished == 6
    assert after.num_prompt_tokens - before.num_prompt_tokens == 18
    assert after.num_tokens - before.num_tokens >= 100
    assert 0 < after.num_drafted <= 3 * after.num_drafts
    figures = [request.result().metrics for request in requests[1:]]
    assert after.num_drafted - before.num_drafted >= sum(each.num_drafted for each in figures)
    assert sum(after.num_accepted_at) == after.num_accepted


def test_requests_without_a_seed_differ(engine):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    results = [engine.submit([1, 2, 3], params) for _ in range(4)]
    assert len({tuple(each.result(timeout=120).token_ids) for each in results}) > 1


def test_cancelled_requests_end(engine):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [engine.submit([1, 2, i], params) for i in range(9)]
    for request in requests[::2]:
        request.cancel()
        request.cancel()
    for request in requests[1::2]:
        assert len(request.result(timeout=120).token_ids) == 20
    for request in requests[::2]:
        with suppress(CancelledError):
            assert len(request.result(timeout=120).token_ids) == 20  # it ended before it was cancelled
    assert engine.stats().pages.num_used == 0

    async def cancel():
        task = asyncio.create_task(engine.generate([1, 2, 3], params))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
            raise AssertionError("the task must be cancelled")

    async def problems_of_cancelling():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        await cancel()
        await engine.generate([4], params)  # the engine forgets its last change
        gc.collect()
        return problems

    assert asyncio.run(problems_of_cancelling()) == []


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "prompt must have at least one token"),
        ([99], {}, r"prompt must have token ids in \[0, 31\), got 99"),
        ([1] * MAX_LENGTH, {}, "prompt must leave room for one token"),
        ([1], {"prompt_logprobs": 4}, r"prompt_logprobs must have at most 3 tokens \(Capacities.logprobs\), got 4"),
        ([1], {"n": 10**9}, r"n must have at most 128 completions \(Capacities.samples\), got 1000000000"),
        ([1], {"stop_token_ids": list(range(9))}, "stop_token_ids must have at most 4 ids"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingParams(**params))


def test_a_salt_that_is_no_text_is_refused(engine):
    with pytest.raises(ValueError, match=r"cache_salt must be text that UTF-8 can encode, got '\\ud800'"):
        engine.submit([1], cache_salt="\ud800")


def test_params_of_another_type_are_refused(engine):
    with pytest.raises(ValueError, match=r"params must be SamplingParams, got {'max_tokens': 3}"):
        engine.submit([1], {"max_tokens": 3})


@pytest.mark.slow
def test_close_ends_what_runs(target):
    engine = engine_of(target, None, max_waiting=2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests, refused = [], 0
    for _ in range(40):
        try:
            requests.append(engine.submit([1], params))
        except QueueFull as error:
            assert "max_waiting is 2" in str(error)
            refused += 1
    assert refused
    engine.close()
    engine.close()
    for request in requests:
        assert request.is_done
    with pytest.raises(CancelledError, match="the engine was closed"):
        list(requests[-1])
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit([1], params)


@pytest.mark.slow
def test_an_error_of_one_request_ends_it_alone(engine, target, proposer, monkeypatch):
    def decode(self, ids, skip_special_tokens):
        if 30 in ids[:1]:
            raise UnicodeError("no such letter")
        return "".join(chr(ord("A") + i) for i in ids)

    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, skip_special_tokens: "")
    bad = engine.submit([30], SamplingParams(max_tokens=20, ignore_eos=True, n=2))
    for job in bad._samples.jobs:
        job.output._decode = lambda ids, skips: decode(None, [30], True)
    request = seeded(1)[0]
    good = engine.submit(request.prompt.tolist(), request.params)
    with pytest.raises(UnicodeError, match="no such letter"):
        bad.result(timeout=60)
    assert good.result(timeout=60).token_ids == expected(target, proposer, request)
    assert engine.stats().pages.num_used == 0


LARGE = replace(CAPACITIES, grammars=2, grammar_states=40, grammar_classes=20)


@pytest.fixture(scope="module")
def guided_engine(target):
    """With one process for grammars: each takes seconds to start, and another one where it is ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_compiler, "NUM_PROCESSES", 1)
        with engine_of(target, None, capacities=LARGE) as engine:
            yield engine


@pytest.mark.slow
def test_grammars_are_compiled_for_their_requests(guided_engine):
    """More of them than have a place, several requests of one, and requests without one that do not wait."""
    patterns = ["(AB|CD)+E", "[G-K]{3}", "B(A|C){2,5}D"]
    sources = [guided.Regex(pattern) for pattern in patterns] + [guided.Choices(["GO", "AHEAD"])]
    params = [SamplingParams(guided_decoding=source, max_tokens=12, seed=i) for i, source in enumerate(sources * 3)]
    requests = [guided_engine.submit([1, 2, i], each) for i, each in enumerate(params)]
    free = guided_engine.submit([1, 2], SamplingParams(max_tokens=12, seed=1))
    assert len(free.result(timeout=60).token_ids) <= 12
    for i, request in enumerate(requests):
        result = request.result(timeout=120)
        text, source = result.text, sources[i % 4]
        if result.completions[0].finish_reason == "length":
            continue
        if isinstance(source, guided.Choices):
            assert text in source.texts
        else:
            assert re.fullmatch(source.pattern, text)
    reasons = [request.result().completions[0].finish_reason for request in requests]
    assert reasons.count("stop") >= 6


@pytest.mark.parametrize(
    "source, message",
    [
        (guided.Regex("a)(b"), r"guided_decoding must be a valid grammar: pattern must be a regular"),
        (guided.Regex("x"), "must match a text that the vocabulary can make"),
        (guided.Regex("[A-E]{50}"), "guided_decoding must have at most 40 states"),
        (guided.JsonSchema({"type": "nothing"}), r"guided_decoding must be a valid grammar"),
    ],
)
def test_a_grammar_that_does_not_compile_ends_its_request(guided_engine, source, message):
    request = guided_engine.submit([1], SamplingParams(guided_decoding=source, n=2))
    with pytest.raises(ValueError, match=message):
        request.result(timeout=120)
    assert guided_engine.stats().num_waiting == 0


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_ends_its_request(guided_engine, monkeypatch):
    monkeypatch.setattr(guided_engine._compiler, "_time_limit", 0.3)
    slow = guided_engine.submit([1], SamplingParams(guided_decoding=guided.Regex("(B|A)*A(A|B){18}"), max_tokens=3))
    other = guided_engine.submit([1], SamplingParams(max_tokens=3))
    assert len(other.result(timeout=60).token_ids) <= 3
    with pytest.raises(ValueError, match=r"compiles within 0\.3 seconds and its memory, got no answer in time"):
        slow.result(timeout=120)
    monkeypatch.setattr(guided_engine._compiler, "_time_limit", 60)
    fine = guided_engine.submit([1], SamplingParams(guided_decoding=guided.Regex("AB"), max_tokens=3))
    assert fine.result(timeout=120).text == "AB"


@pytest.mark.slow
def test_a_request_is_cancelled_while_its_grammar_compiles(guided_engine, monkeypatch):
    monkeypatch.setattr(guided_engine._compiler, "_time_limit", 0.5)
    slow = [
        guided_engine.submit([1], SamplingParams(guided_decoding=guided.Regex(f"(A|B)*A(A|B){{{n}}}")))
        for n in range(24, 27)
    ]
    for request in slow:
        request.cancel()
        with pytest.raises(CancelledError):
            request.result(timeout=60)
    stats = guided_engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages.num_used) == (0, 0, 0)
    monkeypatch.setattr(guided_engine._compiler, "_time_limit", 60)
    fine = guided_engine.submit([1], SamplingParams(guided_decoding=guided.Regex("AC"), max_tokens=3))
    assert fine.result(timeout=120).text == "AC"


@pytest.mark.usefixtures("all_programs")
@pytest.mark.slow
def test_nothing_is_compiled_after_the_start(target):
    """The requests are of all kinds, with two numbers of drafts and chunks of all kinds."""
    small = Capacities(stop_tokens=4, biases=0, allowed_tokens=0, bad_words=0, logprobs=2, grammars=1, grammar_states=8)
    options = {"draft_lengths": (0, 2), "choose_draft_length": lambda running, rate: 0 if running > 1 else 2}
    options |= {"prompt_sizes": [CHUNK // 2]}
    jax.block_until_ready(jax.jit(lambda: 0)())
    with (
        Compilations() as start,
        engine_of(target, make_proposer("ngram", None), num_slots=2, capacities=small, **options) as engine,
    ):
        assert start.number == 16  # with a step of one slot for each number of drafts
        changes = [{}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 3}, {"presence_penalty": 1.0}, {"top_k": 3}]
        changes += [{"guided_decoding": guided.Choices(["AB"])}, {"stop": "A"}, {"temperature": 0}]
        with Compilations() as later:
            requests = [engine.submit([*range(i + 1)], SamplingParams(**each)) for i, each in enumerate(changes)]
            requests[1].cancel()
            results = [request.result(timeout=60) for request in requests if request is not requests[1]]
            engine.submit([1]).result(timeout=60)
        assert later.number == 0
    entries = results[1].prompt_logprobs
    assert entries[0] is None and [next(iter(entry)) for entry in entries[1:]] == [1, 2] and len(entries[2]) <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("all_programs")
def test_programs_of_the_expected_requests_come_first(target, proposer, caplog):
    greedy = SamplingParams(temperature=0, max_tokens=3)
    with caplog.at_level("INFO", "specjax"), engine_of(target, proposer, warm_up=[greedy]) as engine:
        programs = [record.getMessage().partition(": ")[2] for record in caplog.records if hasattr(record, "programs")]
        steps = {name for name in programs if name.startswith("step")}
        assert steps == {f"step of {NUM_SLOTS} slots, greedy", "step of one slot, all parameters"}
        assert len(programs) == 1 + 6  # with two chunks, the entry and the end of requests
        first = engine.submit([1, 2], greedy).result(timeout=60)
        second = engine.submit([1, 2], replace(greedy, logprobs=1)).result(timeout=60)
        assert first.token_ids == second.token_ids


@pytest.mark.parametrize("chosen", [None, 1])
def test_a_choice_that_is_none_of_the_numbers(target, chosen):
    options = {"draft_lengths": (0, 2), "choose_draft_length": lambda running, rate: chosen}
    with engine_of(target, make_proposer("ngram", None), warm_up=[SamplingParams()], **options) as engine:
        with pytest.raises(RuntimeError, match="the engine has failed") as raised:
            engine.submit([1], SamplingParams(max_tokens=3)).result(timeout=60)
        assert (
            str(raised.value.__cause__)
            == f"choose_draft_length must return one of draft_lengths = [2, 0], got {chosen}"
        )


TIMES = StepTimes({1: {0: 1.0, 3: 2.0}})


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"choose_draft_length": max},
            "choose_draft_length must be None without several draft_lengths, got .* and None",
        ),
        (
            {"step_times": TIMES, "draft_lengths": (3,)},
            r"step_times must be None without several draft_lengths, got .* and \(3,\)",
        ),
        (
            {"step_times": TIMES, "draft_lengths": (0, 3), "choose_draft_length": max},
            "choose_draft_length must be None where step_times are given",
        ),
        ({"step_times": TIMES, "draft_lengths": (0, 2)}, r"for each K of \[0, 2\], got \[0, 3\] for 1 sequences"),
        ({"step_times": StepTimes({1: {9: 1.0}})}, r"that the drafter can make, at most 3, got \[9\]"),
        ({"step_times": 3}, r"step_times must be a theory\.StepTimes or the path of a file, got 3"),
        ({"draft_lengths": 3}, "draft_lengths must be None or a sequence of integers, got 3"),
        ({"draft_lengths": [[0], [3]]}, r"draft_lengths must be None or a sequence of integers, got \[\[0\], \[3\]\]"),
        ({"draft_lengths": np.array(3)}, r"draft_lengths must be None or a sequence of integers, got array\(3\)"),
        (
            {"draft_lengths": (0, 3), "choose_draft_length": 3},
            "choose_draft_length must be None or a function, got 3",
        ),
        ({"draft_lengths": (4,)}, r"draft_lengths must be one or more integers in \[0, 3\], got \(4,\)"),
        ({"chunks_per_step": 0}, r"chunks_per_step must be an integer in \[1, 2147483647\], got 0"),
        ({"prompt_sizes": [4, 0]}, r"prompt_sizes must be integers >= 1, numbers of tokens, got \[4, 0\]"),
        ({"prompt_sizes": 4}, "prompt_sizes must be integers >= 1, numbers of tokens, got 4"),
        ({"step_sizes": 2, "mixed_sizes": [(2, CHUNK)]}, r"step_sizes must be integers in \[1, .*\], got 2"),
        ({"step_sizes": np.array([1, 2])}, r"step_sizes must be integers in \[1, .*\], got array"),
        ({"mixed_sizes": 8}, "mixed_sizes must be pairs of numbers, of slots of .*, got 8"),
        ({"mixed_sizes": [(3, 3)]}, r"and tokens of \[.*\], up to chunk_size, got \(3, 3\)"),
        ({"grammar_seconds": 0}, r"grammar_seconds must be positive and at most \d+, got 0"),
        ({"grammar_seconds": "10"}, r"grammar_seconds must be positive and at most \d+, got '10'"),
        ({"grammar_seconds": 1e30}, r"grammar_seconds must be positive and at most \d+, got 1e\+30"),
        ({"grammar_seconds": True}, r"grammar_seconds must be positive and at most \d+, got True"),
        ({"tokenizer": None}, "tokenizer must be a Tokenizer, got NoneType"),
        ({"eos_token_ids": b"a"}, rf"eos_token_ids must be ids in \[0, {VOCAB}\), got b'a'"),
        ({"eos_token_ids": {1: 2}}, rf"eos_token_ids must be ids in \[0, {VOCAB}\), got {{1: 2}}"),
        ({"eos_token_ids": 5}, rf"eos_token_ids must be ids in \[0, {VOCAB}\), got 5"),
        ({"eos_token_ids": np.array(5)}, rf"eos_token_ids must be ids in \[0, {VOCAB}\), got array\(5\)"),
        ({"eos_token_ids": [VOCAB]}, rf"eos_token_ids must be ids in \[0, {VOCAB}\), got \[{VOCAB}\]"),
        ({"max_length": 0}, r"max_length must be an integer in \[2, 2147483647\], got 0"),
        ({"max_length": 32.0}, r"max_length must be an integer in \[2, .*\], got 32\.0"),
        ({"num_pages": 2.5}, r"num_pages must be an integer in \[1, .*\], got 2\.5"),
        ({"num_pages": 2**63}, r"num_pages must be an integer in \[1, .*\], got 9223372036854775808"),
        ({"num_slots": 2**63}, r"num_slots must be an integer in \[1, .*\], got 9223372036854775808"),
        ({"max_waiting": -1}, r"max_waiting must be an integer in \[0, .*\], got -1"),
        ({"capacities": {"samples": 2}}, "capacities must be None or Capacities, got {'samples': 2}"),
        ({"warm_up": [{"temperature": 0}]}, r"warm_up must be None or SamplingParams of requests .*, got \[{"),
        ({"warm_up": np.array(2)}, r"warm_up must be None or SamplingParams of requests .*, got array\(2\)"),
        ({"warm_up": np.array([1, 2])}, r"warm_up must be None or SamplingParams of requests .*, got array"),
        ({"warm_up": SamplingParams()}, "warm_up must be None or SamplingParams of requests .*, got SamplingParams"),
    ],
)
def test_bad_sizes(target, options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(target, make_proposer("ngram", None), **options)


def test_numbers_of_numpy_become_those_of_python():
    """The name of the file with the seconds of steps has them, as JSON."""
    lengths, _ = check_choice(np.array([0, 2]), None, None, proposers.ngram(2))
    prompt_sizes, _ = checked_prompt_sizes([np.int8(4)], 8, NUM_SLOTS)
    sizes = lengths, checked_step_sizes([np.int8(2)], NUM_SLOTS), prompt_sizes
    assert json.loads(json.dumps(sizes)) == [[0, 2], [2], [4, 8]]


def test_other_things_than_a_model():
    with pytest.raises(ValueError, match=r"model must be a specjax\.Model, got str"):
        Engine("x", num_slots=2, max_length=32, tokenizer=Tokenizer())
    with pytest.raises(ValueError, match="llm must be an LLM, got int"):
        Engine.of(5)


def test_mixed_steps_are_those_that_pay(target, monkeypatch):
    """Without drafts, where slots or tokens of prompts are fewer than the ridge, and on GPUs alone."""
    half = replace(target, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    given = (1, 8, 32), 64, (128, 256)
    assert mixed_sizes_of(half, proposers.none(), *given) == ()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    every = tuple((slots, tokens) for slots in (8, 64) for tokens in (128, 256))
    assert mixed_sizes_of(half, proposers.none(), *given) == every
    assert mixed_sizes_of(half, proposers.none(), (1, 8, 32), 256, (128, 256)) == ((8, 128), (8, 256), (256, 128))
    of_256 = (8, 128), (8, 256), (256, 128), (256, 256)
    assert mixed_sizes_of(target, proposers.none(), (1, 8, 32), 256, (128, 256)) == of_256  # read in twice the time
    assert mixed_sizes_of(half, proposers.ngram(3), *given) == ()
    assert mixed_sizes_of(replace(half, takes_groups=False), proposers.none(), *given) == ()


@pytest.mark.slow
def test_a_choice_of_drafts_that_fails_ends_the_engine(target):
    def choose(num_running, rate):
        raise ZeroDivisionError("no choice")

    with engine_of(target, None) as engine:
        engine._scheduler._draft_length = ByFunction(choose)
        with pytest.raises(RuntimeError, match="the engine has failed") as raised:
            engine.submit([1]).result(timeout=60)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.fixture(scope="module")
def elsewhere(target, programs_when_used):
    """An engine of few programs, made under another device and another precision."""
    device = jax.devices("cpu")[1]
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.default_device(device),
        jax.default_matmul_precision("float32"),
    ):
        patch.setattr(Slots, "compile", programs_when_used)
        engine = engine_of(jax.device_put(target, device), None, capacities=FEW)
    with engine:
        yield engine


def test_the_thread_computes_with_the_settings_of_its_maker(elsewhere, monkeypatch):
    """Others would compile the programs anew, or put what they compute on another device."""
    seen = []

    def choose(active):
        seen.append((jax.config.jax_default_device, jax.config.jax_default_matmul_precision))
        return 0

    monkeypatch.setattr(elsewhere._scheduler, "_choose", choose)
    with Compilations() as later:
        elsewhere.submit([1]).result(timeout=60)
    assert set(seen) == {(jax.devices("cpu")[1], "float32")} and later.number == 0


def test_a_failure_of_the_device_ends_every_request(elsewhere, monkeypatch):
    """The engine is of no use to any test that follows."""

    def fail(*_, **__):
        raise ZeroDivisionError("the device is lost")

    monkeypatch.setattr(elsewhere._scheduler._device, "step", fail)
    request = elsewhere.submit([1], SamplingParams(**{**vars(KINDS[0]), "stop_token_ids": None}))
    with pytest.raises(RuntimeError, match="the engine has failed") as raised:
        request.result(timeout=60)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        elsewhere.submit([1])
    elsewhere.close()


def test_engines_are_closed_before_the_process_ends():
    """A thread that calls a device while the interpreter ends may crash it."""
    program = """
import atexit, threading, time
atexit.register(lambda: print([each.name for each in threading.enumerate() if "specjax" in each.name]))  # runs last
from test_engine import LARGE, engine_of, make
from specjax import SamplingParams, proposers
from specjax.engine.later_steps import LaterSteps
from specjax.engine.slots import Slots
from specjax.theory import StepTimes
Slots.compile = lambda *args: None  # the requests compile what they use
LaterSteps._compile = lambda *args: time.sleep(0.2)
times = StepTimes({1: {0: 1.0, 1: 1.0, 2: 1.0}})
other = engine_of(make(0), proposers.ngram(2), capacities=LARGE, step_times=times)
engine = engine_of(make(0), None, capacities=LARGE)
requests = [engine.submit([1, 2], SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(100)]
"""
    folder = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    # So that it finds the programs of `guided_engine`.
    environment["JAX_NUM_CPU_DEVICES"] = str(len(jax.devices("cpu")))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_pages_are_as_many_as_fit(target, monkeypatch):
    proposer = make_proposer("draft_model", make(1))
    sizes = {"num_slots": 4, "max_length": 64, "page_size": 8, "chunk_size": 16}
    page = 2 * 8 * (2 * 8) * 4  # of two models: slots, keys and values of a head of 8 numbers
    calls = memory.COPIES * 4 * 16 * VOCAB
    for pages, expected in ((1000, 32), (10.5, 10)):
        monkeypatch.setattr(memory, "free_bytes", lambda pages=pages: int(pages * page) + calls + 16)
        assert memory.num_pages_that_fit(target, proposer, **sizes) == expected
    monkeypatch.setattr(memory, "free_bytes", lambda: 7 * page + calls)
    with pytest.raises(ValueError, match=r"^the free memory of the device holds .* tokens .*: lower max_length"):
        memory.num_pages_that_fit(target, proposer, **sizes)
