"""Decode the requests of one call in the caller's thread, on slots that are made for it."""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from specjax.decoding.drafters import num_fed
from specjax.decoding.log_probs import LogProbs
from specjax.engine.draft_length import ByStepTimes
from specjax.engine.memory import num_pages_that_fit
from specjax.engine.pages import PageTables
from specjax.engine.report import Compiling
from specjax.engine.requests import Piece, Result, Samples
from specjax.engine.scheduler import Scheduler
from specjax.engine.setup import Setup
from specjax.engine.sizes import MANY_SAMPLES, Sizes, default_sizes
from specjax.engine.slot_calls import Chunk, Output
from specjax.engine.slot_rows import Row
from specjax.engine.slots import Slots, StepProgram, keeps_rows
from specjax.engine.step_times import step_times_of
from specjax.processes.repeat import Repeated, leads
from specjax.sampling import Sampling, SamplingParams
from specjax.sampling.arrays import tokenized
from specjax.sampling.capacities import Capacities, needs_of, of_request
from specjax.sampling.guided import Grammar, Source, vocabulary
from specjax.sampling.guided.tables import round_up
from specjax.sampling.params import LogitsProcessor
from specjax.theory import StepTimes
from specjax.types import Array, Context, PyTree

LEAST_LENGTH = 128  # slots of the smallest token buffer


def choose_num_slots(num_slots: int | None, num_samples: int, num_groups: int = 1, *, in_pages: bool = True) -> int:
    """Return the number of slots for a call of `num_samples` samples, given the `num_slots` of the `LLM`.

    It is a multiple of `num_groups`, the number of devices that share the samples. A single sample gets no more than it
    needs where devices share the samples, as every step then computes all slots, and where caches are not in pages.
    """
    if num_samples == 1 and (num_groups > 1 or not in_pages):
        return num_groups
    if num_slots is not None:
        return num_slots
    number = _sizes(num_samples).slots
    return -(-number // num_groups) * num_groups


def _sizes(num_samples: int) -> Sizes:
    return default_sizes("call" if num_samples < MANY_SAMPLES else "call with many samples")


class Run:
    """Decode the requests of one call.

    There are as many slots as the LLM says, and samples wait for one. Sizes are rounded up, so that few programs are
    compiled: one that feeds prompts, and one for steps of all slots and of a single one each, which compute the
    features of the most demanding request. A single sample needs no program that a batch has not.

    Args:
        setup: the models, tokenizer and limits.
        prompts: prompts as they were given.
        prompt_ids: token ids of each prompt.
        params: parameters of each request.
        key_data: [number of requests, 2] uint32, data of the key of each request.

    Attributes:
        results: the result of each request that has ended, else None.
        errors: errors that ended requests without a result, by their index.
        live: the requests that have begun and not ended, by their index.

    Raises:
        ValueError: a parameter is out of the range of the vocabulary.
    """

    def __init__(
        self,
        setup: Setup,
        prompts: Sequence[str | Sequence[int]],
        prompt_ids: Sequence[list[int]],
        params: Sequence[SamplingParams],
        key_data: np.ndarray,
    ):
        self._start = time.perf_counter()
        self._tokenizer = setup.tokenizer
        params = _with_grammars(setup, params)
        self._capacities, self._rows = _sampling(setup, params)
        self._device, self._scheduler = self._make_scheduler(setup, prompt_ids, params)
        self._coming = enumerate(zip(prompts, prompt_ids, params, key_data, strict=True))
        self.results: list[Result | None] = [None] * len(params)
        self.errors: dict[int, Exception] = {}
        self.live: dict[int, Samples] = {}
        self._num_left = len(params)
        self._num_tokens, self._most_tokens = 0, sum(p.max_tokens * p.num_samples for p in params)
        self._add()

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return self._num_left == 0

    def advance(self) -> None:
        """Do one round of the scheduler: feed prompts, dispatch a step, and read the one before."""
        self._scheduler.advance()
        clock = time.perf_counter() - self._device.compiling.seconds
        for i, samples in list(self.live.items()):
            samples.update(clock)
            error = next((job.error for job in samples.jobs if job.error is not None), None)
            if error is not None:
                self._fail(i, error)
            elif samples.is_done:
                self._end(i)
        self._add()

    def progress(self) -> tuple[int, int]:
        """Return the number of tokens so far, and how many they may become."""
        running = sum(len(job.output.token_ids) for samples in self.live.values() for job in samples.jobs)
        return self._num_tokens + running, self._most_tokens

    def _add(self) -> None:
        """Hand the next requests in, so that there is one for each slot that may become vacant."""
        while self._scheduler.waiting < self._device.num_slots:
            item = next(self._coming, None)
            if item is None:
                return
            i, (prompt, ids, params, key_data) = item
            samples = Samples(prompt, ids, params, self._rows[id(params)], key_data, self._tokenizer)
            samples.start = self._start
            self.live[i] = samples
            for job in samples.jobs:
                self._scheduler.add(job)

    def _end(self, i: int) -> None:
        samples = self.live.pop(i)
        num_tokens = sum(len(job.output.token_ids) for job in samples.jobs)
        self._num_left -= 1
        self._num_tokens += num_tokens
        self._most_tokens += num_tokens - samples.params.max_tokens * len(samples.jobs)
        self.results[i] = samples.result()

    def _fail(self, i: int, error: Exception) -> None:
        """End a request without a result."""
        samples = self.live.pop(i)
        for job in samples.jobs:
            self._scheduler.cancel(job)
        self._num_left -= 1
        self._most_tokens -= samples.params.max_tokens * len(samples.jobs)
        self.errors[i] = error

    def _make_scheduler(
        self, setup: Setup, prompt_ids: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> tuple["_Device", Scheduler]:
        # Drafts after the last token need slots, too: they may decide about tokens before them.
        longest = max(len(ids) + p.max_tokens for ids, p in zip(prompt_ids, params, strict=True))
        needed = longest + num_fed(setup.proposer) - 1
        max_length, room = (min(max(round_up(size), LEAST_LENGTH), setup.max_length) for size in (needed, longest))
        num_slots = _num_slots(setup, params)
        num_samples = sum(p.num_samples for p in params)
        sizes = _sizes(num_samples)
        tables = pool = None
        if setup.takes_pages:
            num_kept = num_slots if keeps_rows(setup.model, setup.proposer) else None
            num_pages = num_pages_that_fit(
                setup.model,
                setup.proposer,
                num_slots=num_slots,
                max_length=max_length,
                page_size=sizes.page,
                chunk_size=sizes.chunk,
                num_samples=num_samples,
                num_kept=num_kept or 0,
            )
            pool = num_pages, sizes.page
            pages_per_row = -(-max_length // sizes.page)
            tables = PageTables(num_pages, sizes.page, pages_per_row, sizes.chunk, num_values=num_kept)
        device = (_RepeatedDevice if leads(setup.model) else _Device)(
            setup.model,
            setup.proposer,
            num_slots=num_slots,
            max_length=max_length,
            capacities=self._capacities,
            pool=pool,
            verifier=setup.verifier,
            draft_lengths=setup.draft_lengths,
            chunk_size=sizes.chunk,
            step_sizes=[size for size in sizes.step_sizes if size < num_slots],
            tile_size=sizes.tile,
            room=room if setup.room is None else setup.room,  # drafts must not change it
            use=max(needs_of(row) for row in self._rows.values()),
            log_probs=any(p.logprobs is not None or p.num_samples > 1 for p in params),
            num_samples=num_samples,
        )
        draft_length = None
        if setup.draft_lengths is not None:
            times = device.step_times() if setup.step_times is None else setup.step_times
            draft_length = ByStepTimes(times, setup.draft_lengths, setup.proposer)
        scheduler = Scheduler(
            device,
            tables,
            sizes.chunk,
            setup.eos_token_ids,
            prompt_sizes=sizes.prompts,
            chunks_per_step=num_slots * -(-max_length // sizes.chunk),  # nobody reads between the steps
            draft_length=draft_length,
        )
        return device, scheduler


class Stream:
    """Iterate over the `Piece`s of one request. Iteration may end early; `result` covers the pieces given so far."""

    def __init__(self, run: Run):
        self._run, self._samples = run, run.live[0]
        self._num_tokens = 0
        self._pieces = self._iterate()
        run.advance()  # compiles

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def result(self) -> Result:
        """The result that the pieces given so far make up."""
        return self._samples.result(self._num_tokens)

    def _iterate(self) -> Iterator[Piece]:
        pieces = self._samples.pieces(0)
        while self._num_tokens < self._samples.num_certain[0] or not self._run.is_done:
            if self._num_tokens < self._samples.num_certain[0]:
                self._num_tokens += 1
                yield next(pieces)
            else:
                self._run.advance()
        if 0 in self._run.errors:
            raise self._run.errors[0]


def show_progress(run: Run) -> None:
    """Decode to the end, while a progress bar on standard error counts the tokens."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("tokens")
        while not run.is_done:
            run.advance()
            completed, total = run.progress()
            progress.update(task, completed=completed, total=total)


class _Device(Slots):
    """Slots whose steps compute the features `use`, and which know the time of calls that may compile them."""

    def __init__(self, *args: Any, use: int, log_probs: bool, num_samples: int, **options: Any):
        self._use, self._log_probs, self._num_samples = use, log_probs, num_samples
        self._called: set[Hashable] = set()
        self.compiling = Compiling()
        with self.compiling.counted():
            super().__init__(*args, **options)
        with self.compiling.counted(), self.compiling_programs(self._steps(), lambda *_: nullcontext()):
            self.evict([])

    def _first(self, *call: Hashable) -> AbstractContextManager[None]:
        """Return a context for a call, which counts the first one as compiling if it compiles."""
        is_first = call not in self._called
        self._called.add(call)
        return self.compiling.counted() if is_first else nullcontext()

    def prefill(
        self,
        slots: Sequence[int],
        chunks: Sequence[Chunk],
        num_tiles: int = 1,
        size: int | None = None,
        *,
        log_probs: bool = False,
    ) -> tuple[tuple[PyTree, ...], LogProbs | None]:
        with self._first("prefill", num_tiles, size, log_probs):
            return super().prefill(slots, chunks, num_tiles, size, log_probs=log_probs)

    def insert(self, slot: int, row: Row) -> None:
        with self._first("insert"):
            super().insert(slot, row)
        if self._num_samples == 1:  # so that the time of decoding begins when the prompt is computed
            jax.block_until_ready(self.state)

    def feed(self, rows: np.ndarray | None = None) -> None:
        with self._first("feed", rows is None):
            super().feed(rows)

    def rows_of(self, slots: Sequence[int], log_probs: bool = False) -> np.ndarray | None:
        return super().rows_of(slots)  # each size has its one program

    def step(
        self,
        use: int = 0,
        *,
        log_probs: bool = False,
        num_draft_tokens: int | None = None,
        rows: np.ndarray | None = None,
    ) -> Output:
        with self._first("step", num_draft_tokens, rows is None):
            return super().step(
                self._use,
                log_probs=self._log_probs,
                num_draft_tokens=num_draft_tokens,
                rows=rows,
            )

    def step_times(self) -> StepTimes:
        """Return the result of `step_times_of`, and count the time of a measurement as compiling."""
        start, compiling = time.perf_counter(), self.compiling.seconds
        times = step_times_of(self, self.step_sizes[: 1 if self._num_samples == 1 else None])
        self.compiling.seconds = compiling + time.perf_counter() - start
        return times

    def _steps(self) -> list[StepProgram]:
        """Return the programs that are compiled at the start; a draft length that may never come has none."""
        sizes = [self._no_rows(size) for size in self.step_sizes[:-1]]
        rows = sizes if self._num_samples == 1 and sizes else [*sizes, None]
        k = self.draft_lengths[0]
        return [StepProgram(self._use, self._log_probs, num_draft_tokens=k, rows=each) for each in rows]


class _RepeatedDevice(_Device, Repeated):
    """The same where other processes share the model."""


def _num_slots(setup: Setup, params: Sequence[SamplingParams]) -> int:
    num_groups = setup.num_row_groups
    return choose_num_slots(setup.num_slots, sum(p.num_samples for p in params), num_groups, in_pages=setup.takes_pages)


def _sampling(setup: Setup, params: Sequence[SamplingParams]) -> tuple[Capacities, dict[int, Sampling]]:
    """Return capacities for all parameters, and the arrays of each, by the `id` of the parameters."""

    def tokenize(text: str) -> list[int]:
        return setup.tokenizer.encode(text, add_special_tokens=False).ids

    distinct = list({id(p): p for p in params}.values())
    words = [tokenized(p.bad_words or (), tokenize) for p in distinct]
    stops = [{*(p.stop_token_ids or ()), *(() if p.ignore_eos else setup.eos_token_ids)} for p in distinct]
    listed = max((n for p in distinct for n in (p.logprobs, p.prompt_logprobs) if n is not None), default=0)
    grammars = {p.guided_decoding: None for p in distinct if isinstance(p.guided_decoding, Grammar)}
    num_states = [grammar.transitions.shape[0] for grammar in grammars]
    num_slots = _num_slots(setup, params)
    processors, known = _placed_processors(distinct)
    capacities = Capacities(
        stop_tokens=_most(map(len, stops), 8),
        biases=_most(len(p.logit_bias or ()) for p in distinct),
        allowed_tokens=_most(len(set(p.allowed_token_ids or ())) for p in distinct),
        bad_words=_most(map(len, words)),
        bad_word_length=_most(len(word) for row in words for word in row),
        logprobs=min(_most([listed]), setup.model.vocab_size),
        grammars=_most([min(len(grammars), num_slots)]),
        grammar_states=_most([min(sum(num_states), num_slots * max(num_states, default=0))]),
        grammar_classes=_most(grammar.transitions.shape[1] for grammar in grammars),
        samples=max(p.num_samples for p in distinct),
        logits_processors=known,
    )
    given = capacities, setup.eos_token_ids, setup.model.vocab_size, tokenize
    rows = (
        of_request(replace(p, logits_processors=own or None), *given)
        for p, own in zip(distinct, processors, strict=True)
    )
    return capacities, {id(p): row for p, row in zip(distinct, rows, strict=True)}


def _with_grammars(setup: Setup, params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    """Return the parameters with grammars in place of their sources."""
    sources = {p.guided_decoding: None for p in params if isinstance(p.guided_decoding, Source)}
    if not sources:
        return params
    words = vocabulary(setup.tokenizer)
    compiled: dict[Any, Grammar] = {source: source.compile(words, setup.eos_token_ids) for source in sources}
    distinct = {id(p): p for p in params}
    own = {
        i: replace(p, guided_decoding=compiled.get(p.guided_decoding, p.guided_decoding)) for i, p in distinct.items()
    }
    return [own[id(p)] for p in params]


def _most(sizes: Any, least: int = 1) -> int:
    """Return the largest of the sizes, rounded up to a power of two and at least `least`; 0 if nothing is asked for."""
    size = max(sizes, default=0)
    return max(round_up(size), least) if size else 0


@dataclass(frozen=True)
class _Placed:
    """A logits processor at one place in the order; equal processors may stand at several."""

    place: int
    function: LogitsProcessor

    def __call__(self, logits: Array, context: Context) -> Array:
        return self.function(logits, context)


def _placed_processors(params: Sequence[SamplingParams]) -> tuple[list[list[_Placed]], tuple[_Placed, ...]]:
    """Return the logits processors of each request, and all of them in one order that fits each request."""
    rows = [[_Placed(*entry) for entry in enumerate(p.logits_processors or ())] for p in params]
    return rows, tuple(sorted({entry: None for row in rows for entry in row}, key=lambda entry: entry.place))
