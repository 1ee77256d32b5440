"""Jobs on slots: in any order of arrival, with too few pages, cancelled or stopped, each gets its tokens as alone."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_slots import (
    CAPACITIES,
    CHUNK,
    EOS,
    GRAMMARS,
    KINDS,
    LONGEST,
    MAX_LENGTH,
    NUM_SLOTS,
    PAGE_SIZE,
    TILE,
    VOCAB,
    alone,
    make,
    make_proposer,
    some_jobs,
)

from specjax import SamplingParams, decode, keys, sampling, verifiers
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.draft_length import ByFunction
from specjax.engine.mixed_sizes import thrifty_tokens
from specjax.engine.pages import PageTables
from specjax.engine.scheduler import HELD, Job, Scheduler
from specjax.engine.sizes import cheapest
from specjax.engine.slots import Slots
from specjax.sampling.capacities import of_request

SIZES = 4, 12  # tokens of calls that feed prompts, beside CHUNK
MIXED = (2, CHUNK)  # slots and tokens of prompts of mixed steps
PLENTY, FEW = 30, 9  # free pages: for all slots, and for the longest request and a little more
REASONS = {decode.STOP: "stop", decode.MAX_TOKENS: "length", decode.BUFFER_FULL: "length"}


class Letters:
    """A tokenizer with a letter for each token."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("A") + i) for i in ids)


class UntilItsEnd(Detokenizer):
    """An output that takes no token after its end."""

    def extend(self, tokens):
        assert self.finish_reason is None, "the output has ended"
        super().extend(tokens)


def job_of(request, **options):
    """The job of a request of `some_jobs`."""
    prompt = request.prompt.tolist()
    output = UntilItsEnd(Letters(), prompt, request.params)
    return Job(prompt, of_request(request.params, CAPACITIES, EOS, VOCAB), request.key, output, **options)


@pytest.fixture(scope="module")
def target():
    return make(0)


DENSE = pytest.param(None, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[PLENTY, FEW, DENSE], ids=["plenty", "few pages", "dense"])
def device(request, target):
    device = slots_of(target, None if request.param is None else (PLENTY, PAGE_SIZE))
    device.num_held = PLENTY - FEW if request.param == FEW else 0
    return device


class Device(Slots):
    """Slots whose pool other requests share, so that devices with few pages and with many run the same programs."""

    num_held = 0  # pages that the others hold


def slots_of(target, pool):
    sizes = {
        "num_slots": NUM_SLOTS,
        "max_length": MAX_LENGTH,
        "capacities": CAPACITIES,
        "pool": pool,
        "step_sizes": (2,),
        "tile_size": TILE,
    }
    near = jax.tree.map(lambda own, other: own + 0.1 * other, target.params, make(1).params)  # most drafts are right
    return Device(target, make_proposer("reduced", replace(target, params=near)), **sizes)


def scheduler_of(device, **options):
    tables = None
    if device.state.context.pages is not None:
        num_pages = jax.tree.leaves(device.state.cache)[0].shape[0]
        tables = PageTables(num_pages, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
        for num_pages in np.diff([*range(0, device.num_held, tables.pages_per_row), device.num_held]).tolist():
            assert tables.insert(np.zeros(1, np.int32), num_pages * PAGE_SIZE, salt=None)
    return Scheduler(device, tables, CHUNK, EOS, prompt_sizes=SIZES, **options), tables


def run(scheduler, jobs, seed, meanwhile=lambda: None):
    """Add the jobs at random times, and go on until all have ended."""
    rng, waiting = np.random.default_rng(seed), list(jobs)
    for _ in range(10_000):
        while waiting and rng.random() < 0.3:
            scheduler.add(waiting.pop(0))
        meanwhile()
        has_more = scheduler.advance()
        assert scheduler._active == [job for job in scheduler.running if job.is_active]
        assert_pages_are_of_their_slots(scheduler)
        if not has_more and not waiting:
            return
    raise AssertionError("the jobs do not end")


def assert_pages_are_of_their_slots(scheduler):
    if scheduler._tables is None:
        return
    expected = scheduler._tables.no_pages(NUM_SLOTS)
    for job in scheduler.running:
        expected[job.seat.slot] = job.seat.pages.table
    np.testing.assert_array_equal(scheduler._table, expected)


def preempting(scheduler):
    """A function that takes a job's slot away in every third call."""
    rounds = iter(range(10_000))

    def preempt():
        is_third = next(rounds) % 3 == 0
        for _ in range(2):  # the first call may find that reading the steps in flight is enough
            if is_third and scheduler.running:
                scheduler._make_room()

    return preempt


def assert_nothing_left(scheduler, tables):
    assert scheduler.running == [] and scheduler.waiting == 0
    if tables is not None:
        tables.check()
        assert tables.stats().num_used == scheduler._device.num_held


def job_alone(device, request, job):
    """The last state of a job alone, with log-probabilities.

    Without grammars the parameters of all have the same sizes, and one program; with grammars they have another.
    """
    params = None
    if job.grammar is None:
        params = jax.tree.map(lambda x: np.asarray(x)[None], job.sampling._replace(guide=None))
    return alone(device.model, device.proposer, verifiers.rejection, request, CAPACITIES.logprobs, params)


def assert_as_alone(device, request, job):
    state = job_alone(device, request, job)
    length = int(state.context.length[0])
    assert job.output.token_ids == np.asarray(state.context.tokens)[0, len(job.prompt) : length].tolist()
    assert job.output.finish_reason == REASONS[int(state.finished[0])]
    jax.tree.map(np.testing.assert_array_equal, job.totals, jax.tree.map(lambda x: np.asarray(x)[0], state.totals))


def test_tokens_are_those_of_the_request_alone(device):
    requests = some_jobs(14)
    jobs = [job_of(request) for request in requests]
    scheduler, tables = scheduler_of(device)
    run(scheduler, jobs, 0)
    assert_nothing_left(scheduler, tables)
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)
    if tables is not None and not device.num_held:
        assert any(job.num_cached_tokens for job in jobs)
        assert not any(job.num_preempted for job in jobs)


def test_preempted_jobs_go_on_where_they_were(device):
    """All kinds of parameters, of outputs that grow long, where a job gives its slot up every third round."""
    kinds = [replace(params, stop_token_ids=None, ignore_eos=True) for params in KINDS]
    requests = some_jobs(12, 1, kinds)
    jobs = [job_of(request) for request in requests]
    scheduler, tables = scheduler_of(device)
    run(scheduler, jobs, 1, preempting(scheduler))
    assert_nothing_left(scheduler, tables)
    assert sum(job.num_preempted for job in jobs) >= 6
    drafted, accepted = (sum(int(getattr(job.totals, name)) for job in jobs) for name in ("drafted", "accepted"))
    assert 0.3 * drafted < accepted < 0.95 * drafted
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)


@pytest.mark.slow  # changes no token
def test_pages_that_are_needed_soon_come_together(device, monkeypatch):
    """Where there are many; the table is then sent fewer times than pages are given."""
    if device.state.context.pages is None or device.num_held:
        pytest.skip("pages are few, or there are none")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    num_sent = []
    for look_ahead in (0, 16):
        monkeypatch.setattr("specjax.engine.scheduler.LOOK_AHEAD", look_ahead)
        tables_sent = []
        monkeypatch.setattr(
            device, "set_pages", lambda table, sent=tables_sent: sent.append(Slots.set_pages(device, table))
        )
        scheduler, tables = scheduler_of(device)
        jobs = [job_of(replace(request, params=params)) for request in some_jobs(3)]
        run(scheduler, jobs, 0)
        assert_nothing_left(scheduler, tables)
        num_sent.append(len(tables_sent))
    assert num_sent[1] < num_sent[0]


def test_jobs_are_preempted_where_pages_run_short(device):
    if not device.num_held:
        pytest.skip("there are pages for all")
    kinds = [replace(params, stop_token_ids=None, ignore_eos=True) for params in KINDS]
    requests = some_jobs(14, 1, kinds)
    jobs = [job_of(request) for request in requests]
    scheduler, tables = scheduler_of(device)
    run(scheduler, jobs, 1)
    assert_nothing_left(scheduler, tables)
    assert any(job.num_preempted for job in jobs)
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)


def test_a_smaller_priority_comes_first(target, device):
    scheduler, _ = scheduler_of(device)
    jobs = [job_of(request, priority=-i) for i, request in enumerate(some_jobs(6))]
    for job in jobs:
        scheduler.add(job)
    while not any(job.is_done for job in jobs):
        scheduler.advance()
        started = [job for job in jobs if job.is_running or job.is_done]
        assert started == jobs[-len(started) :]
    for job in jobs:
        scheduler.cancel(job)
    while scheduler.advance():
        pass


def test_cancelled_jobs_leave_the_others_alone(device):
    requests = some_jobs(12, 2)
    jobs = [job_of(request) for request in requests]
    scheduler, tables = scheduler_of(device)
    rng = np.random.default_rng(0)
    victims = jobs[::2]

    def cancel():
        if rng.random() < 0.3 and victims:
            scheduler.cancel(victims.pop(int(rng.integers(len(victims)))))

    run(scheduler, jobs, 0, cancel)
    assert_nothing_left(scheduler, tables)
    for request, job in zip(requests[1::2], jobs[1::2], strict=True):
        assert_as_alone(device, request, job)
    for request, job in zip(requests[::2], jobs[::2], strict=True):
        state = job_alone(device, request, job)
        tokens = np.asarray(state.context.tokens)[0, len(job.prompt) :].tolist()
        assert job.is_done and job.output.token_ids == tokens[: len(job.output.token_ids)]


def test_stop_strings_cut_what_was_decoded_past_them(device):
    scheduler, tables = scheduler_of(device)
    requests = [replace_params(request, max_tokens=20, stop_token_ids=None) for request in some_jobs(8, 3)]
    whole = [job_of(request) for request in requests]
    run(scheduler, whole, 3)
    stops = [job.output.text(0, len(job.output.token_ids))[2:4] for job in whole]
    cut = [job_of(replace_params(request, stop=stop or None)) for request, stop in zip(requests, stops, strict=True)]
    run(scheduler, cut, 4)
    assert_nothing_left(scheduler, tables)
    num_cut = 0
    for job, other, stop in zip(cut, whole, stops, strict=True):
        text, full = (each.output.text(0, len(each.output.token_ids)) for each in (job, other))
        assert text == (full[: full.index(stop)] if stop else full)
        if job.output.stop_reason == stop:
            num_cut += 1
            end = len(job.prompt) + len(job.output.token_ids) + len(stop)  # tokens of the step that completed it follow
            assert len(job.tokens) <= end + device.proposer.num_draft_tokens
        assert job.error is None  # no tokens came after the end
    assert num_cut >= 4


def replace_params(request, **changes):
    return replace(request, params=replace(request.params, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("device", [PLENTY, FEW], indirect=True)
def test_log_probs_are_those_of_the_request_alone(device):
    requests = some_jobs(6, 5, kinds=[replace(params, logprobs=3) for params in KINDS])
    jobs = [job_of(request, wants_log_probs=i % 2 == 0) for i, request in enumerate(requests)]
    scheduler, _ = scheduler_of(device)
    run(scheduler, jobs, 5)
    for request, job in zip(requests, jobs, strict=True):
        if not job.wants_log_probs:
            assert job.log_probs == []
            continue
        buffer = job_alone(device, request, job).log_probs
        start, count = len(job.prompt), len(job.output.token_ids)
        chosen = np.concatenate([part.chosen for part in job.log_probs])[:count]
        np.testing.assert_allclose(chosen, np.asarray(buffer.chosen)[0, start : start + count], rtol=1e-4, atol=1e-5)


def test_bad_jobs_are_refused(target):
    scheduler, _ = scheduler_of(slots_of(target, (2, PAGE_SIZE)))
    request = some_jobs(1)[0]
    long = replace(request, prompt=np.zeros(MAX_LENGTH, np.int32))
    with pytest.raises(ValueError, match=rf"prompt must have fewer tokens than max_length = {MAX_LENGTH}, got"):
        scheduler.check(job_of(long))
    with pytest.raises(ValueError, match="prompt and max_tokens must fit the 2 pages, got a need of"):
        scheduler.check(job_of(request))


def guided_kinds():
    """All kinds of parameters, some with a grammar; of the grammars, no two fit into the tables."""
    kinds = [replace(params, stop_token_ids=None, ignore_eos=True) for params in KINDS]
    return [replace(kinds[1], guided_decoding=GRAMMARS[0]), *kinds, replace(kinds[2], guided_decoding=GRAMMARS[1])]


@pytest.mark.parametrize("device", [PLENTY, pytest.param(FEW, marks=pytest.mark.slow)], indirect=True)
def test_grammars_survive_preemption_and_wait_for_a_place(device):
    requests = some_jobs(10, 8, guided_kinds())
    jobs = [job_of(request, grammar=request.params.guided_decoding) for request in requests]
    scheduler, tables = scheduler_of(device)
    together, preempt = set(), preempting(scheduler)

    def meanwhile():
        together.add(frozenset(job.grammar for job in scheduler.running) - {None})
        preempt()

    run(scheduler, jobs, 6, meanwhile)
    assert_nothing_left(scheduler, tables)
    assert not any(entry.count for entry in scheduler._grammars._entries.values())
    assert frozenset(GRAMMARS) not in together and len(together) == 3
    assert sum(job.num_preempted for job in jobs if job.grammar) >= 2
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)


@pytest.mark.parametrize("device", [PLENTY, pytest.param(None, marks=pytest.mark.slow)], indirect=True)
def test_log_probs_of_prompts_are_those_of_prefill(device):
    """The prompts have a common beginning; one is preempted before it is read."""
    requests = some_jobs(6, 5)
    jobs = [job_of(request, wants_prompt_log_probs=i % 3 < 2) for i, request in enumerate(requests)]
    scheduler, tables = scheduler_of(device)
    run(scheduler, jobs, 5, preempting(scheduler))
    assert_nothing_left(scheduler, tables)
    assert any(job.num_preempted for job in jobs if job.wants_prompt_log_probs)
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)
        if not job.wants_prompt_log_probs:
            assert job.prompt_log_probs is None
            continue
        assert job.num_cached_tokens == 0
        state = prompt_log_probs(device.model, request, CAPACITIES.logprobs)
        for name in ("chosen", "top_ids", "top"):
            expected = np.asarray(getattr(state.log_probs, name))[0, 1 : len(job.prompt)]
            np.testing.assert_allclose(getattr(job.prompt_log_probs, name), expected, rtol=1e-5, atol=1e-5)


def prompt_log_probs(target, request, num_logprobs):
    """The state that `prefill` makes of a prompt alone."""
    prompt = np.zeros((1, LONGEST), np.int32)
    prompt[0, : len(request.prompt)] = request.prompt
    given = target, None, prompt, np.array([len(request.prompt)]), sampling.batch([SamplingParams()])
    options = {"max_length": MAX_LENGTH, "num_logprobs": num_logprobs, "prompt_logprobs": True}
    return score(*given, jax.random.key(0), **options)


score = jax.jit(decode.prefill, static_argnames=("max_length", "num_logprobs", "prompt_logprobs"))


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_samples_compute_a_chunk_once(device, monkeypatch):
    """Those that arrive together, too; the last chunk, which their steps write, is each one's own."""
    request = some_jobs(1, 2)[0]
    request = replace(request, prompt=np.arange(20, dtype=np.int32))
    request = replace_params(request, temperature=0.9, n=NUM_SLOTS)
    jobs = [job_of(request, sample=i) for i in range(NUM_SLOTS)]
    scheduler, tables = scheduler_of(device)
    fed, prefill = [], device.prefill
    monkeypatch.setattr(device, "prefill", lambda slots, *rest, **o: fed.extend(slots) or prefill(slots, *rest, **o))
    for job in jobs:
        scheduler.add(job)
    while scheduler.advance():
        tables.check()
    assert_nothing_left(scheduler, tables)
    assert len(fed) == 2 + NUM_SLOTS
    assert [job.num_cached_tokens for job in jobs] == [0, *[2 * CHUNK] * (NUM_SLOTS - 1)]
    for job in jobs:
        key = jax.random.wrap_key_data(request.key[None], impl="threefry2x32")
        own = np.asarray(jax.random.key_data(keys.samples(key, jax.numpy.array([job.sample]))))[0]
        assert_as_alone(device, replace(request, key=own), job)


@pytest.mark.slow
def test_the_number_of_drafts_follows_the_load(target):
    """Under `match` the tokens equal the tokens of the request alone, whatever is chosen before each step."""
    pool = PLENTY, PAGE_SIZE
    sizes = {
        "num_slots": NUM_SLOTS,
        "max_length": MAX_LENGTH,
        "capacities": CAPACITIES,
        "pool": pool,
        "step_sizes": (2,),
        "tile_size": TILE,
    }
    near = jax.tree.map(lambda own, other: own + 0.1 * other, target.params, make(1).params)
    proposer = make_proposer("draft_model", replace(target, params=near))
    device = Device(target, proposer, verifier=verifiers.match, draft_lengths=(0, 3), **sizes)
    assert device.draft_lengths == (3, 0)
    seen = []

    def choose(num_running, rate):
        seen.append((num_running, rate))
        return 3 if num_running < NUM_SLOTS else 0

    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    scheduler = Scheduler(device, tables, CHUNK, EOS, draft_length=ByFunction(choose))
    requests = some_jobs(9, 7, [replace(KINDS[2], stop_token_ids=None, ignore_eos=True)])
    jobs = [job_of(request) for request in requests]
    run(scheduler, jobs, 7)
    assert_nothing_left(scheduler, tables)
    assert {count for count, _ in seen} == {1, 2, 3} and len({rate for _, rate in seen}) > 3
    assert sum(int(job.totals.row_steps) for job in jobs) < sum(int(job.totals.steps) for job in jobs)
    assert sum(int(job.totals.accepted) for job in jobs) > 5
    for request, job in zip(requests, jobs, strict=True):
        state = alone(target, proposer, verifiers.match, request)
        length = int(state.context.length[0])
        assert job.output.token_ids == np.asarray(state.context.tokens)[0, len(job.prompt) : length].tolist()


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_jobs_that_end_in_the_queue_take_no_memory(device):
    scheduler, _ = scheduler_of(device)
    jobs = [job_of(request) for request in some_jobs(3)] * 400
    jobs = [replace_job(job) for job in jobs]
    for job in jobs:
        scheduler.add(job)
    for job in jobs[5:]:
        scheduler.cancel(job)
    assert scheduler.waiting == len(scheduler._queue) == 5
    while scheduler.advance():
        pass
    assert all(job.is_done for job in jobs)


def replace_job(job):
    return Job(job.prompt, job.sampling, job.key_data, Detokenizer(Letters(), job.prompt, job.output.params))


@pytest.mark.slow
@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_whatever_a_request_asks_for_survives_preemption(device):
    """Samples of requests with stop strings, grammars, penalties, min_tokens and log-probabilities."""
    kinds = [replace(params, min_tokens=3, logprobs=2, n=3) for params in guided_kinds() if params.temperature > 0]
    kinds = [replace(params, stop=() if params.guided_decoding else tuple("CDEFGHIJKLMN")) for params in kinds]
    requests = [replace_params(request, max_tokens=16) for request in some_jobs(6, 8, kinds)]
    runs = []
    for meanwhile in (lambda scheduler: lambda: None, preempting):
        jobs = [
            job_of(request, sample=i, wants_log_probs=True, grammar=request.params.guided_decoding)
            for request in requests
            for i in range(3)
        ]
        scheduler, tables = scheduler_of(device)
        run(scheduler, jobs, 8, meanwhile(scheduler))
        assert_nothing_left(scheduler, tables)
        runs.append(jobs)
    assert sum(job.num_preempted for job in runs[1]) >= 6 and not any(job.num_preempted for job in runs[0])
    assert {"stop", "length"} == {job.output.finish_reason for job in runs[0]}
    assert sum(isinstance(job.output.stop_reason, str) for job in runs[0]) >= 3
    for one, other in zip(*runs, strict=True):
        count = len(one.output.token_ids)
        assert one.output.text(0, count) == other.output.text(0, len(other.output.token_ids))
        assert (one.output.token_ids, one.output.stop_reason) == (other.output.token_ids, other.output.stop_reason)
        assert one.kinds[:count] == other.kinds[:count]
        jax.tree.map(np.testing.assert_array_equal, one.totals, other.totals)
        total, same = (np.concatenate([part.chosen for part in job.log_probs])[:count].sum() for job in (one, other))
        np.testing.assert_allclose(total, same, rtol=1e-4)


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
@pytest.mark.parametrize("chunks_per_step, prompt_sizes", [(1, ()), (4, ()), (1, [4]), (1, [12])])
def test_chunks_between_two_steps(device, monkeypatch, chunks_per_step, prompt_sizes):
    calls = called(device, monkeypatch)
    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    options = {"chunks_per_step": chunks_per_step, "prompt_sizes": prompt_sizes}
    scheduler = Scheduler(device, tables, CHUNK, EOS, **options)
    kinds = [replace(KINDS[0], stop_token_ids=None, ignore_eos=True)]
    for i, request in enumerate(some_jobs(NUM_SLOTS, 9, kinds)):
        request = replace_params(request, max_tokens=10)
        scheduler.add(job_of(replace(request, prompt=np.arange(i, i + 17, dtype=np.int32))))
    while scheduler.advance():
        pass
    fed = [0]  # tokens of the calls since the step before
    for call in calls:
        if call == "step":
            fed.append(0)
        elif call != "evict":
            fed[-1] += call[1]
    assert max(fed[1:]) == chunks_per_step * CHUNK


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_more_chunks_follow_each_other_while_most_prompts_wait(device, monkeypatch):
    """By default: eight while more prompts wait than samples decode, and one from then on."""
    calls = called(device, monkeypatch)
    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    scheduler = Scheduler(device, tables, CHUNK, EOS)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True, max_tokens=3)
    for i, request in enumerate(some_jobs(NUM_SLOTS, 9, [params])):
        request = replace_params(request, max_tokens=3)
        scheduler.add(job_of(replace(request, prompt=np.arange(i, i + 25, dtype=np.int32))))  # four chunks
    while scheduler.advance():
        pass
    fed = [0]  # calls with chunks since the step before
    for call in calls:
        if call == "step":
            fed.append(0)
        elif call != "evict":
            fed[-1] += 1
    assert fed[:2] == [8, 1]  # two of three decode then
    assert sum(fed) == 4 * NUM_SLOTS - 1  # the ends of two prompts share a call


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
@pytest.mark.parametrize(
    "max_tokens, num_steps, then",
    [
        ((24, 24, 1, 1), 2, (1, TILE)),  # no other waits for a slot
        ((24, 24, 1, 1, 1), 2 + HELD, (1, TILE)),
        ((24, 1, 1, 1, 1, 1), 2, (2, CHUNK)),  # two prompts fill a call
    ],
)
def test_prompts_wait_until_they_fill_a_call(device, monkeypatch, max_tokens, num_steps, then):
    """They do while others wait for slots, and few slots for them, and for some rounds at most."""
    calls = called(device, monkeypatch)
    monkeypatch.setattr("specjax.engine.scheduler.UNFED_SHARE", 1)
    scheduler, tables = scheduler_of(device)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True)
    for i, request in enumerate(some_jobs(len(max_tokens), 9, [params])):
        request.prompt = np.arange(i, i + TILE, dtype=np.int32)
        scheduler.add(job_of(replace_params(request, max_tokens=max_tokens[i])))
    while scheduler.advance():
        pass
    assert_nothing_left(scheduler, tables)
    calls = [call for call in calls if call != "evict"]
    assert calls[: num_steps + 2] == [(NUM_SLOTS, NUM_SLOTS * TILE), *["step"] * num_steps, then]


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
@pytest.mark.parametrize("num_more, sizes", [(0, [CHUNK]), (1, [TILE, TILE])])
def test_mixed_steps_feed_few_tokens_while_others_wait(device, monkeypatch, num_more, sizes):
    """Beside a step that is below the ridge each costs less."""
    mixed = [(2, TILE), (2, CHUNK)]
    monkeypatch.setattr(device, "mixed_sizes", mixed)
    monkeypatch.setattr("specjax.engine.scheduler.UNFED_SHARE", 1)
    monkeypatch.setattr("specjax.engine.mixed_sizes.RIDGE", (2 + TILE) / 2)  # of 16 bits; these weights have 32
    assert thrifty_tokens(device.model, mixed) == {2: TILE} == thrifty_tokens(device.model, [*mixed, (CHUNK, TILE)])
    fed = []

    def mixed_step(size, *args):
        fed.append(size[1])
        return Slots.mixed_step(device, size, *args)

    monkeypatch.setattr(device, "mixed_step", mixed_step)
    scheduler, tables = scheduler_of(device)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True)
    max_tokens = [24, 24, 1, 1, *[1] * num_more]
    for i, request in enumerate(some_jobs(len(max_tokens), 9, [params])):
        request.prompt = np.arange(i, i + (CHUNK if i == 3 else TILE), dtype=np.int32)
        scheduler.add(job_of(replace_params(request, max_tokens=max_tokens[i])))
    while scheduler.advance():
        pass
    assert_nothing_left(scheduler, tables)
    assert fed[: len(sizes)] == sizes


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
@pytest.mark.parametrize(
    "num_unfed, num_active, num_chunks",
    [
        (1, 0, 8),
        (9, 8, 8),
        (8, 8, 4),
        (8, 63, 4),
        (8, 64, 1),
        (3, 5, 1),
        (48, 40, 12),
        (90, 40, 16),
        (28, 99, 7),
        (60, 99, 8),
    ],
)
def test_more_prompts_that_wait_get_more_chunks(device, num_unfed, num_active, num_chunks):
    scheduler, _ = scheduler_of(device)
    scheduler._active, scheduler._slots = [None] * num_active, [0] * (num_unfed + num_active) + [None]
    assert scheduler._chunks_between_steps() == num_chunks


def called(device, monkeypatch):
    """The names of the calls of a device from now on; of "prefill" the numbers of prompts and tokens."""
    calls = []
    for name in ("prefill", "step", "evict"):

        def call(*args, _name=name, **options):
            if _name == "prefill":
                given, _, num_tiles, tile = args
                calls.append((len(given), num_tiles * tile))
            else:
                calls.append(_name)
            return getattr(Slots, _name)(device, *args, **options)

        monkeypatch.setattr(device, name, call)
    return calls


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
@pytest.mark.parametrize("sizes, first", [((4,), [(1, 8), (2, 8), (1, 4)]), ((12,), [(2, 12), (2, 8)])])
def test_prompts_are_fed_together(device, monkeypatch, sizes, first):
    """A piece ends with its chunk, its prompt or the call. Those that end together become active together."""
    calls = called(device, monkeypatch)
    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    scheduler = Scheduler(device, tables, CHUNK, EOS, prompt_sizes=sizes, chunks_per_step=4)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True, max_tokens=1)
    requests = some_jobs(4, 9, [params])
    for request, length in zip(requests, (CHUNK + TILE, 1, TILE, TILE + 1), strict=True):
        request.prompt = np.arange(length, dtype=np.int32)
    requests = [replace_params(request, max_tokens=1) for request in requests]
    jobs = [job_of(request) for request in requests]
    for some in (jobs[:3], jobs[3:]):
        for job in some:
            scheduler.add(job)
        while scheduler.advance():
            pass
    assert calls == [*first, "step", "step", "evict", (1, 8), "step", "step"]
    assert_nothing_left(scheduler, tables)
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_a_piece_ends_with_its_call(device, monkeypatch):
    """A long prompt takes the room that a short one leaves, and no more."""
    calls = called(device, monkeypatch)
    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    scheduler = Scheduler(device, tables, CHUNK, EOS, prompt_sizes=[CHUNK], chunks_per_step=4)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True, max_tokens=1)
    requests = [replace_params(request, max_tokens=1) for request in some_jobs(2, 9, [params])]
    for request, length in zip(requests, (1, CHUNK), strict=True):
        request.prompt = np.arange(length, dtype=np.int32)
    jobs = [job_of(request) for request in requests]
    for job in jobs:
        scheduler.add(job)
    while scheduler.advance():
        pass
    assert [call for call in calls if call not in ("step", "evict")] == [(2, CHUNK), (1, CHUNK)]
    for request, job in zip(requests, jobs, strict=True):
        assert_as_alone(device, request, job)


@pytest.mark.parametrize(
    "num_tokens, size",
    [(64, 128), (128, 128), (192, 256), (320, 256), (448, 512), (704, 512), (1088, 512), (1856, 2048), (9999, 2048)],
)
def test_calls_of_the_least_cost_feed_the_prompts(num_tokens, size):
    assert cheapest(num_tokens, (128, 256, 512, 2048), 64)[1] == size


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_calls_without_tiles_feed_one_prompt(device, monkeypatch):
    """By the shortest call that has room."""
    calls = called(device, monkeypatch)
    monkeypatch.setattr(device, "tile_size", None)
    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    scheduler = Scheduler(device, tables, CHUNK, EOS, prompt_sizes=[2, 4], chunks_per_step=4)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True, max_tokens=1)
    requests = [replace_params(some_jobs(1, 9, [params])[0], max_tokens=1) for _ in range(3)]
    for request, length in zip(requests, (1, CHUNK + 3, 5), strict=True):
        request.prompt = np.arange(length, length * 2, dtype=np.int32)
        scheduler.add(job_of(request))
    while scheduler.advance():
        pass
    assert [call for call in calls if call not in ("step", "evict")] == [(1, 2), (1, CHUNK), (1, 4), (1, CHUNK)]


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_a_call_that_is_longer_than_the_rest_of_a_chunk_ends_with_it(device, monkeypatch):
    """A recurrent state would have the tokens after the chunk twice, and others would share it."""
    fed = []

    def prefill(slots, chunks, *args, **options):
        fed.extend((slots[0], chunk.inputs.positions[0, 0], int(chunk.inputs.num_tokens[0])) for chunk in chunks)
        return Slots.prefill(device, slots, chunks, *args, **options)

    monkeypatch.setattr(device, "prefill", prefill)
    monkeypatch.setattr(device, "tile_size", None)
    tables = PageTables(PLENTY, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
    scheduler = Scheduler(device, tables, CHUNK, EOS, prompt_sizes=[2, 4], chunks_per_step=1)
    params = replace(KINDS[0], stop_token_ids=None, ignore_eos=True, max_tokens=1)
    requests = [replace_params(some_jobs(1, 9, [params])[0], max_tokens=1) for _ in range(3)]
    for request, length in zip(requests, (2, 4, CHUNK + 1), strict=True):
        request.prompt = np.arange(length, length * 2, dtype=np.int32)
        scheduler.add(job_of(request))
    while scheduler.advance():
        pass
    assert [(start, count) for slot, start, count in fed if slot == 2] == [(0, 2), (2, CHUNK - 2), (CHUNK, 1)]


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_no_schedule_changes_a_token(device, monkeypatch):
    """Mixed steps or none, of all sizes, at random times, with few pages or many, preempted and cancelled jobs."""
    requests = some_jobs(12, 7, [replace(params, logits_processors=None) for params in KINDS])
    expected = [job_alone(device, request, job_of(request)) for request in requests]
    tables, num_mixed = [], 0

    def mixed_step(*args):
        nonlocal num_mixed
        num_mixed += 1
        return Slots.mixed_step(device, *args)

    monkeypatch.setattr(device, "mixed_step", mixed_step)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(device, "mixed_sizes", [MIXED] if seed % 3 else [])
        monkeypatch.setattr("specjax.engine.scheduler.UNFED_SHARE", 1 if seed % 2 else 8)
        monkeypatch.setattr(device, "step_sizes", (2, NUM_SLOTS) if rng.random() < 0.7 else (NUM_SLOTS,))
        monkeypatch.setattr(device, "num_held", PLENTY - FEW if rng.random() < 0.4 else 0)
        scheduler, tables = scheduler_of(device, chunks_per_step=rng.choice([None, 1, 2]))
        jobs = [job_of(request) for request in requests]
        preempt, victims = preempting(scheduler), [job for job in jobs if rng.random() < 0.1]

        def meanwhile(rng=rng, scheduler=scheduler, preempt=preempt, victims=victims, preempts=seed % 2):
            if preempts:
                preempt()
            if victims and victims[0].number >= 0 and rng.random() < 0.2:
                scheduler.cancel(victims.pop(0))

        run(scheduler, jobs, seed, meanwhile)
        assert_nothing_left(scheduler, tables)
        for job, state in zip(jobs, expected, strict=True):
            tokens = np.asarray(state.context.tokens)[0, len(job.prompt) : int(state.context.length[0])].tolist()
            assert job.output.token_ids == tokens[: len(job.output.token_ids)]
            if job.output.finish_reason is not None:
                assert job.output.token_ids == tokens
                totals = jax.tree.map(lambda x: np.asarray(x)[0], state.totals)
                jax.tree.map(np.testing.assert_array_equal, job.totals, totals)
    assert num_mixed > 10


@pytest.mark.parametrize("device", [PLENTY], indirect=True)
def test_a_row_that_cannot_be_made_ends_its_job_alone(device):
    requests = some_jobs(4, 2)
    jobs = [job_of(request) for request in requests]
    jobs[1].key_data = np.zeros(3, np.uint32)
    scheduler, tables = scheduler_of(device)
    run(scheduler, jobs, 2)
    assert_nothing_left(scheduler, tables)
    assert "key_data must be uint32 [2]" in str(jobs[1].error)
    for i in (0, 2, 3):
        assert_as_alone(device, requests[i], jobs[i])
