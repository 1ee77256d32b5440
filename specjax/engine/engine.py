"""Serve requests that come and go on one batch of slots, from a thread that keeps the device busy."""

import asyncio
import atexit
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax import proposers, verifiers
from specjax.decoding.drafters import in_memory
from specjax.engine import garbage
from specjax.engine.draft_length import check_choice, has_budget
from specjax.engine.grammar_compiler import MAX_WAITING_OF_CLIENT, GrammarCompiler
from specjax.engine.inputs import check_eos_token_ids, encode_prompt, key_data
from specjax.engine.later_lengths import LaterLengths, first_lengths, measured_choice
from specjax.engine.memory import num_pages_that_fit
from specjax.engine.mixed_sizes import checked_mixed_sizes, mixed_sizes_of
from specjax.engine.pages import PageTables
from specjax.engine.pending import Pending, wake
from specjax.engine.report import log_caches
from specjax.engine.requests import Piece, Result, Samples
from specjax.engine.scheduler import Scheduler
from specjax.engine.sizes import checked_prompt_sizes, checked_step_sizes, default_sizes
from specjax.engine.slots import Slots, keeps_rows
from specjax.engine.stats import Stats, Sums
from specjax.engine.step_times import as_step_times
from specjax.processes.repeat import Repeated, leads
from specjax.sampling import Sampling, SamplingParams
from specjax.sampling.capacities import Capacities, Needs, check_grammar, needs_of, of_request
from specjax.sampling.guided import Grammar, Source, vocabulary
from specjax.theory import StepTimes
from specjax.types import Model, Proposer, Verifier
from specjax.validation import as_python, is_integer, is_iterable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specjax.engine.llm import LLM

MOST = 2**31 - 1  # numbers of slots, of pages and of tokens are int32


class QueueFull(RuntimeError):
    """Too many requests wait already."""


class Request(Pending):
    """A request that an engine works on.

    Iterate over it to get each token as a `Piece` as soon as its text is certain, of all samples as they come. A `for`
    waits, an `async for` leaves the event loop to others. Every iteration begins with the first token. After the last,
    `result` has everything. An iteration raises what `result` raises, after the pieces that came before. To leave an
    iteration early does not end the request; `cancel` does.
    """

    def __init__(self, engine: "Engine", samples: Samples, client: str | None):
        super().__init__()
        self._engine, self._samples, self._client = engine, samples, client
        grammar = samples.params.guided_decoding
        self._source = grammar if isinstance(grammar, Source) else None
        self._grammar: Future[Grammar] = Future()  # compiled from the source

    def cancel(self) -> None:
        self._engine._send(self._engine._cancel, self)

    def _reader(self) -> Callable[[], list[Piece]]:
        counts = [0] * len(self._samples.jobs)
        samples = [self._samples.pieces(i) for i in range(len(counts))]

        def read() -> list[Piece]:
            nonlocal counts
            old, counts = counts, self._samples.num_certain
            counted = zip(samples, counts, old, strict=True)
            return [piece for sample, count, before in counted for piece in itertools.islice(sample, count - before)]

        return read


class Engine:
    """Serve requests on a fixed number of slots, with programs that are compiled once.

    Requests enter while others run, and leave when they end. In float32 a request with a seed gets the tokens that it
    gets alone, whatever else runs: its noise comes from its own key. `step_sizes` describes the exception in 16 bits. A
    prompt is fed a chunk at a time between the steps of the others. Where target and proposer take pages, prompts with
    a common beginning share its pages, and where pages run short, the requests that came last give up theirs and are
    computed anew later.

    Args:
        model: the target.
        proposer: the proposer; None is plain decoding.
        num_slots: number of samples that run at a time.
        max_length: the most tokens of a prompt and its output.
        tokenizer: the tokenizer of the target.
        eos_token_ids: the end-of-sequence tokens.
        num_pages: number of pages of the caches; None is as many as all slots need at their longest, or, where a device
            says how much of its memory is free, as many as fit into it.
        page_size: tokens (cache slots) of a page; None is 64.
        chunk_size: tokens of a prompt that are fed between two steps, a multiple of `page_size`, and the granularity in
            which prompts share; None is 512 on GPUs and 64 on CPUs.
        prompt_sizes: numbers of tokens of the calls that feed prompts, each a program. On GPUs several prompts share a
            call, where target and proposer take packed calls; those that cost least are chosen for the prompts that
            wait. `chunk_size` is always one of them. None is (128, 256, 512, 2048) on GPUs and (32, 64) on CPUs, of
            which chunks of all slots fill each.
        verifier: a verifier of `specjax.verifiers` or your own, with its options bound.
        capacities: the most that one request may ask for; None is `Capacities()`.
        max_waiting: the most requests that wait for a slot; None is no limit.
        chunks_per_step: the most tokens of prompts that are fed between two steps, in chunks, padding included. 1 keeps
            the time between the tokens of a request short while the prompts of others enter; more fill vacant slots
            sooner. None is 8 while more samples wait for their prompts than decode, 4 while at least 4 samples do, more
            than a quarter of those that decode, and 1 otherwise. While requests wait for a slot, and at most an eighth
            of the running samples for their prompts, GPUs feed prompts as they cost least: few tokens in each mixed
            step, or in calls of their own that are full, for which prompts wait 4 steps at most.
        draft_lengths: the numbers of draft tokens K that a step may have, each at most the proposer's own, 0 for plain
            decoding. N - 1 among them is the tree of a proposer of trees of N nodes, and the others are then
            chains. The sum of K and `drafts_per_row` stands for the K drafts of `proposers.within_budget`, and the
            others are then chains without a budget. None takes the numbers of `step_times`, or else the proposer's own
            alone. Where there are several, K is chosen before each step. Where that is by `step_times`, the engine
            starts when the programs of the smallest and of the largest K are compiled, and takes the others when theirs
            are; see `wait_for_draft_lengths`. The tokens of a request then depend on the other requests and, at first,
            on when programs are ready, except under `verifiers.match`; the distribution that they are drawn from does
            not.
        choose_draft_length: a function `(num_running, acceptance_rate) -> K` that chooses one of `draft_lengths`, given
            the number of samples in the step and an estimate of how often drafts were accepted lately. The engine fails
            where it raises an error or returns another number. None chooses by `step_times`.
        step_times: the seconds of a step for each K, or the file with them that `specjax tune` has written. Each step
            has the K with the most tokens per second. None measures them when an engine with several `draft_lengths`
            first starts, and keeps them in the folder of compiled programs. Where some K are compiled later, their
            seconds are assumed to lie on lines between the others until no request is there, and then measured.
        grammar_seconds: the most seconds that the grammar of a request may take to compile.
        step_sizes: numbers of slots below `num_slots`: a step computes the smallest of them that holds the active
            slots, so that a few requests do not pay for vacant slots. Each is a program more for each of
            `draft_lengths`. None is (1, 8, 32, 128) on GPUs and (1,) on CPUs; () always computes all slots. With
            parameters of 16 bits the number of slots may change the last bit of a logit, and then a seeded request may
            get other tokens beside other numbers of requests; () keeps them equal.
        mixed_sizes: pairs (slots, tokens): where a step has at most that number of active slots, and the prompts that
            wait would be fed by a call of that number of tokens, one program does both and reads the weights once. Each
            pair is a program. None is the pairs for which that is less work on GPUs, with all slots and with 8, and no
            pairs on CPUs, with `step_sizes=()`, with several `draft_lengths`, or with drafts for a model that is no
            mixture of experts. () always feeds prompts by separate calls, as they are beside requests that ask for
            log-probabilities or change logits.
        warm_up: parameters of requests to expect: the engine compiles the programs of these when it starts, and others
            when a request first needs them. None compiles all, so that no request waits for a program.

    Raises:
        ValueError: a number is out of its range, or the pages do not fit into the memory of the device.
    """

    def __init__(
        self,
        model: Model,
        proposer: Proposer | None = None,
        *,
        num_slots: int,
        max_length: int,
        tokenizer: "Tokenizer",
        eos_token_ids: Sequence[int] = (),
        num_pages: int | None = None,
        page_size: int | None = None,
        chunk_size: int | None = None,
        prompt_sizes: Sequence[int] | None = None,
        verifier: Verifier = verifiers.rejection,
        capacities: Capacities | None = None,
        max_waiting: int | None = None,
        chunks_per_step: int | None = None,
        draft_lengths: Sequence[int] | None = None,
        choose_draft_length: Callable[[int, float], int] | None = None,
        step_times: StepTimes | str | Path | None = None,
        grammar_seconds: float = 10.0,
        step_sizes: Sequence[int] | None = None,
        mixed_sizes: Sequence[tuple[int, int]] | None = None,
        warm_up: Sequence[SamplingParams] | None = None,
    ):
        defaults = default_sizes("server")
        if not isinstance(model, Model):
            raise ValueError(f"model must be a specjax.Model, got {type(model).__name__}")
        if not hasattr(tokenizer, "decode"):  # prompts may all be token ids
            raise ValueError(f"tokenizer must be a Tokenizer, got {type(tokenizer).__name__}")
        num_slots, max_length, num_pages = as_python(num_slots), as_python(max_length), as_python(num_pages)
        page_size, chunk_size = as_python(page_size), as_python(chunk_size)
        max_waiting, chunks_per_step = as_python(max_waiting), as_python(chunks_per_step)
        page_size = defaults.page if page_size is None else page_size
        chunk_size = defaults.chunk if chunk_size is None else chunk_size
        numbers: list[tuple[str, Any, int]] = [("num_slots", num_slots, 1), ("max_length", max_length, 2)]
        numbers += [("page_size", page_size, 1), ("chunk_size", chunk_size, 1)]
        optional = ("num_pages", num_pages, 1), ("chunks_per_step", chunks_per_step, 1), ("max_waiting", max_waiting, 0)
        numbers += [each for each in optional if each[1] is not None]
        for name, number, least in numbers:
            if not (is_integer(number) and least <= number <= MOST):
                raise ValueError(f"{name} must be an integer in [{least}, {MOST}], got {number!r}")
        check_eos_token_ids(eos_token_ids, model.vocab_size)
        if not (capacities is None or isinstance(capacities, Capacities)):
            raise ValueError(f"capacities must be None or Capacities, got {capacities!r}")
        expected_params = () if warm_up is None else warm_up
        is_sequence = isinstance(expected_params, Collection) and is_iterable(expected_params)
        if not (is_sequence and all(isinstance(each, SamplingParams) for each in expected_params)):
            raise ValueError(f"warm_up must be None or SamplingParams of requests to expect, got {warm_up!r}")
        prompt_sizes, tile_size = checked_prompt_sizes(prompt_sizes, chunk_size, num_slots)
        proposer = proposers.none() if proposer is None else proposer
        times = as_step_times(step_times)
        draft_lengths, draft_length = check_choice(draft_lengths, choose_draft_length, times, proposer)
        grammar_seconds = as_python(grammar_seconds)
        is_number = isinstance(grammar_seconds, int | float) and not isinstance(grammar_seconds, bool)
        if not (is_number and 0 < grammar_seconds <= threading.TIMEOUT_MAX):
            expected = f"positive and at most {threading.TIMEOUT_MAX:.0f}"
            raise ValueError(f"grammar_seconds must be {expected}, got {grammar_seconds!r}")
        takes_pages = model.takes_pages and in_memory(proposer).takes_pages
        tables = pool = None
        if takes_pages:
            pages_per_row = -(-max_length // page_size)
            num_kept = num_slots if keeps_rows(model, proposer) else None
            if num_pages is None:
                num_pages = num_pages_that_fit(
                    model,
                    proposer,
                    num_slots=num_slots,
                    max_length=max_length,
                    page_size=page_size,
                    chunk_size=chunk_size,
                    num_kept=num_kept or 0,
                )
            tables = PageTables(num_pages, page_size, pages_per_row, chunk_size, num_values=num_kept)
            pool = num_pages, page_size
        elif num_pages is not None:
            raise ValueError(f"num_pages must be None for a model or a proposer without pages, got {num_pages}")
        self._capacities = capacities or Capacities()
        if step_sizes is None:
            step_sizes = [size for size in defaults.step_sizes if size < num_slots]
        step_sizes = checked_step_sizes(step_sizes, num_slots)
        has_one_length = draft_lengths is None or len(set(draft_lengths)) == 1
        sizes = step_sizes, num_slots, [size for size in prompt_sizes if size <= chunk_size]
        if mixed_sizes is None:
            mixed_sizes = mixed_sizes_of(model, proposer, *sizes) if step_sizes and has_one_length else ()
        mixed_sizes = checked_mixed_sizes(mixed_sizes, *sizes)
        if mixed_sizes and not has_one_length:
            raise ValueError(f"mixed_sizes must be () with several draft_lengths, got {list(mixed_sizes)}")
        device = (Repeated if leads(model) else Slots)(
            model,
            proposer,
            num_slots=num_slots,
            max_length=max_length,
            capacities=self._capacities,
            pool=pool,
            verifier=verifier,
            draft_lengths=draft_lengths,
            chunk_size=chunk_size,
            step_sizes=step_sizes,
            tile_size=tile_size,
            mixed_sizes=mixed_sizes,
        )
        if device.tile_size is None:  # a call has one chunk
            prompt_sizes = tuple(size for size in prompt_sizes if size <= chunk_size)
        log_caches(device, pool)
        self._tokenizer, self._eos, self._vocab_size = tokenizer, eos_token_ids, model.vocab_size
        uses = None if warm_up is None else {self._use_of(each) for each in warm_up}
        # A number above the drafts stands for a budget, whose steps verify fewer rows than the longest chain.
        longest = proposer.num_draft_tokens if has_budget(proposer) else None
        first = first_lengths(device.draft_lengths, is_by_times=choose_draft_length is None, longest=longest)
        with garbage.paused():
            device.compile(chunk_size, prompt_sizes, uses, first)
        measurement = None
        if draft_length is None and len(device.draft_lengths) > 1:
            use = max((use for use, log_probs in uses or () if not log_probs), default=Needs.EVERYTHING)
            draft_length, measurement = measured_choice(device, proposer, first, use)
        self._scheduler = Scheduler(
            device,
            tables,
            chunk_size,
            eos_token_ids,
            prompt_sizes=prompt_sizes,
            chunks_per_step=chunks_per_step,
            draft_length=draft_length,
        )
        self._max_length, self._max_waiting, self._tables = max_length, max_waiting, tables
        self._compiler = GrammarCompiler(
            partial(vocabulary, tokenizer),
            eos_token_ids,
            self._check_grammar,
            time_limit=grammar_seconds,
            max_kept=2 * self._capacities.grammars,
        )
        self._entropy = np.random.default_rng()
        self._live: dict[Request, None] = {}
        self._num_finished = self._num_prompt_tokens = 0
        self._num_draft_tokens = device.proposer.num_draft_tokens
        self._ended = Sums.of([], self._num_draft_tokens)  # of the requests that are not live
        self._calls: deque[tuple[Any, tuple]] = deque()  # for the thread
        self._changed = threading.Condition()
        self._is_closed, self._failure = False, None
        config: Any = jax.config
        self._default_device = config.jax_default_device  # of the caller, for the thread, as the next one is
        self._matmul_precision = config.jax_default_matmul_precision
        self._thread = threading.Thread(target=self._run, name="specjax engine", daemon=True)
        garbage.leave_out()
        self._later = LaterLengths(
            device,
            draft_length,
            uses,
            first=first,
            measurement=measurement,
            send=self._send,
            settings=self._settings,
        )
        _engines.add(self)
        self._thread.start()

    @classmethod
    def of(cls, llm: "LLM", *, num_slots: int | None = None, **options: Any) -> "Engine":
        """Return an engine for the models, the tokenizer and the limits of an `LLM`.

        Args:
            llm: the LLM. It may be used beside the engine.
            num_slots: number of samples that run at a time; None is the number that the LLM was given, or else 16, and
                8 on CPUs.
            options: the other arguments of `Engine`.

        Raises:
            ValueError: as `Engine`.
        """
        if not hasattr(llm, "setup"):
            raise ValueError(f"llm must be an LLM, got {type(llm).__name__}")
        setup = llm.setup
        if num_slots is None:
            num_slots = default_sizes("server").slots if setup.num_slots is None else setup.num_slots
        given = {"max_length": setup.max_length, "verifier": setup.verifier} | options
        if setup.draft_lengths is not None and not given.keys() & {"draft_lengths", "choose_draft_length"}:
            given = {"draft_lengths": setup.draft_lengths, "step_times": setup.step_times} | given
        return cls(
            setup.model,
            setup.proposer,
            num_slots=num_slots,
            tokenizer=setup.tokenizer,
            eos_token_ids=setup.eos_token_ids,
            **given,
        )

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        client: str | None = None,
    ) -> Request:
        """Hand in a request, and return without waiting for it.

        Args:
            prompt: text or token ids.
            params: the parameters; None is `SamplingParams()`. In float32 a request with a seed gives the same output
                whatever else runs.
            priority: requests with a smaller number come first; equal ones in the order of their arrival.
            cache_salt: the computed beginning of a prompt is found again by requests with the same text here alone, so
                that others cannot tell earlier prompts by the time of an answer.
            client: a name of who asks. An eighth of the places of requests that wait is for other clients, and clients
                take turns in having grammars compiled. None is this program itself, which may have all.

        Raises:
            ValueError: the prompt or a parameter is out of its range, or beyond the capacities of the engine.
            QueueFull: too many requests wait already, a RuntimeError.
            RuntimeError: the engine is closed or has failed.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        if not is_integer(priority):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a string, got {type(cache_salt).__name__}")
        try:
            salt = cache_salt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"cache_salt must be text that UTF-8 can encode, got {cache_salt!r}") from error
        if not (client is None or isinstance(client, str)):
            raise ValueError(f"client must be a string or None, got {client!r}")
        ids = encode_prompt("prompt", prompt, self._tokenizer, params, self._max_length, self._vocab_size)
        rows = self._sampling_of(params)
        key = key_data(params.seed, self._entropy)
        samples = Samples(prompt, ids, params, rows, key, self._tokenizer, priority, salt)
        self._scheduler.check(samples.jobs[0])
        request = Request(self, samples, client)
        for job in samples.jobs:
            job.owner = request
        if request._source is not None and self._compiler.is_full(client):
            raise QueueFull(f"{MAX_WAITING_OF_CLIENT} grammars of this client wait already")
        with self._changed:
            self._check_open()
            if self._max_waiting is not None:
                self._check_waiting(client, self._max_waiting)
            self._live[request] = None
            self._num_prompt_tokens += len(ids)
            if request._source is None:
                self._calls.append((self._add, (request,)))
                self._changed.notify()
        if request._source is not None:
            request._grammar = self._compiler.request(request._source, client)
            request._grammar.add_done_callback(lambda _: self._send(self._compiled, request))
        return request

    def _check_waiting(self, client: str | None, most: int) -> None:
        """Raise QueueFull where as many requests wait as may, of all clients or of one."""
        waiting = self._live.keys() - {job.owner for job in self._scheduler.running}
        if len(waiting) >= most:
            raise QueueFull(f"{len(waiting)} requests wait already, max_waiting is {most}")
        if client is not None:
            num_of_client, most_of_client = sum(each._client == client for each in waiting), most - most // 8
            if num_of_client >= most_of_client:
                raise QueueFull(f"{num_of_client} requests of this client wait already, the most is {most_of_client}")

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Result:
        """Return the result of a request; if the caller is cancelled, so is the request. The arguments: `submit`."""
        request = self.submit(prompt, params, priority=priority, cache_salt=cache_salt)
        result = asyncio.wrap_future(request._future)
        # Where the caller is cancelled nobody reads the exception, which asyncio would report.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            request.cancel()
            raise

    def stats(self) -> Stats:
        """Return the engine's load now, and its counters."""
        with self._changed:
            jobs = [job for request in self._live for job in request._samples.jobs]
            unfinished = [job for job in jobs if not job.is_done]
            num_running = sum(job.is_running for job in unfinished)
            counts = self._ended + Sums.of(jobs, self._num_draft_tokens)
            counters: dict[str, Any] = vars(counts) | {"num_accepted_at": tuple(counts.num_accepted_at.tolist())}
            return Stats(
                num_running=num_running,
                num_waiting=len(unfinished) - num_running,
                num_finished=self._num_finished,
                pages=None if self._tables is None else self._tables.stats(),
                num_prompt_tokens=self._num_prompt_tokens,
                **counters,
            )

    def wait_for_draft_lengths(self, timeout: float | None = None) -> None:
        """Wait until each step may have any of `draft_lengths`, chosen by seconds that are known or measured.

        Until then the choice of K depends on the time at which programs are ready. Seconds are measured while there
        are no requests.

        Args:
            timeout: the most seconds to wait; None waits until it is so.

        Raises:
            TimeoutError: it is not so in time.
            RuntimeError: it will not be so: a program does not compile, or the engine is closed or has failed.
        """
        self._later.settled.result(timeout)

    @property
    def is_running(self) -> bool:
        """Whether it takes requests: it is not closed, and has not failed."""
        return not self._is_closed

    def close(self) -> None:
        """Stop. Requests that have not ended are cancelled. A program that is being compiled is waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._later.join()
        if self in _engines:
            _engines.discard(self)
            garbage.take_back()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure
        if self._is_closed:
            raise RuntimeError("the engine is closed")

    def _send(self, function: Any, *arguments: Any) -> None:
        """Have the thread call a function before its next round."""
        with self._changed:
            self._calls.append((function, arguments))
            self._changed.notify()

    def _run(self) -> None:
        """Work, in a thread, until the engine closes or fails."""
        try:
            with self._settings():
                self._work()
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._is_closed = True
                for request in self._live:
                    if self._failure is None:
                        request._future.set_exception(CancelledError("the engine was closed"))
                    else:
                        failure = RuntimeError("the engine has failed")
                        failure.__cause__ = self._failure
                        request._future.set_exception(failure)
                self._live.clear()
            self._compiler.close()
            failure = RuntimeError("the engine is closed" if self._failure is None else "the engine has failed")
            failure.__cause__ = self._failure
            self._later.end(failure)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Call JAX, in a thread, with the settings of who made the engine."""
        with jax.default_device(self._default_device), jax.default_matmul_precision(self._matmul_precision):
            yield

    def _work(self) -> None:
        """Rounds of the scheduler, with the calls of other threads between them, until the engine is closed."""
        has_more = False
        while True:
            with self._changed:
                while not (self._calls or has_more or self._is_closed or self._later.can_measure):
                    self._changed.wait()
                if self._is_closed:
                    break
                while self._calls:
                    function, arguments = self._calls.popleft()
                    function(*arguments)
            has_more = self._scheduler.advance()
            with self._changed:
                self._collect()
            if not has_more and self._later.can_measure:
                self._later.measure(self._scheduler, lambda: not (self._calls or self._is_closed))

    def _sampling_of(self, params: SamplingParams) -> Sampling:
        """Return the parameters of a request as arrays."""

        def tokenize(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False).ids

        return of_request(params, self._capacities, self._eos, self._vocab_size, tokenize)

    def _use_of(self, params: SamplingParams) -> tuple[Needs, bool]:
        """Return the features that the steps of a request compute, and whether it asks for log-probabilities."""
        wants_log_probs = params.num_samples > 1 or (params.logprobs, params.prompt_logprobs) != (None, None)
        needs = Needs.EVERYTHING if wants_log_probs else needs_of(self._sampling_of(params))
        return needs, wants_log_probs

    def _add(self, request: Request) -> None:
        for job in request._samples.jobs:
            self._scheduler.add(job)

    def _check_grammar(self, grammar: Grammar) -> None:
        check_grammar(grammar, self._capacities, self._vocab_size)

    def _compiled(self, request: Request) -> None:
        """Queue the samples of a request whose grammar is compiled, or end it where that failed."""
        if request not in self._live:
            return
        try:
            for job in request._samples.jobs:
                job.grammar = request._grammar.result()
        except Exception as error:
            self._fail(request, error)
        else:
            self._add(request)

    def _cancel(self, request: Request) -> None:
        if request in self._live:
            self._fail(request, CancelledError("the request was cancelled"))

    def _collect(self) -> None:
        """Give out the pieces of the last round, and the results of requests that have ended."""
        now, with_pieces = time.perf_counter(), []
        for request in dict.fromkeys(job.owner for job in self._scheduler.changed):
            samples, error, result = request._samples, None, None
            try:
                if samples.update(now):
                    with_pieces.append(request)
                if ended := [job for job in samples.jobs if job.is_done]:
                    error = next((job.error for job in ended if job.error is not None), None)
                    if error is None and len(ended) == len(samples.jobs):
                        result = samples.result()
            except Exception as other:  # of one request, which ends alone
                error = error or other
            if error is not None:
                self._fail(request, error)
            elif result is not None:
                self._end(request)
                request._future.set_result(result)
        wake(with_pieces)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request without a result."""
        for job in request._samples.jobs:
            self._scheduler.cancel(job)
        self._end(request)
        request._future.set_exception(error)

    def _end(self, request: Request) -> None:
        del self._live[request]
        if request._source is not None:
            self._compiler.leave(request._source, request._grammar)
        self._num_finished += 1
        self._ended += Sums.of(request._samples.jobs, self._num_draft_tokens)


_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop the threads of engines that are not closed: one that calls a device while the process ends may crash it."""
    for engine in list(_engines):
        engine.close()
