"""Decide which requests the device works on: who enters a slot, whose prompt is fed next, and who leaves.

A scheduler runs in one thread and reads no clock, so that its decisions can be repeated. Each round lets requests into
vacant slots, feeds chunks of prompts, dispatches a step of all active slots, and reads the output of the step before:
the device has the next step when the host looks at the last one.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from specjax import decode
from specjax.decoding.drafters import commit_of
from specjax.decoding.log_probs import LogProbs
from specjax.engine import slots
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.draft_length import RecentAcceptance
from specjax.engine.grammars import GrammarTables
from specjax.engine.pages import PageTables, Row
from specjax.metrics import Totals
from specjax.sampling import Sampling
from specjax.sampling.capacities import EVERYTHING, use_of
from specjax.sampling.guided.tables import Grammar

BURST = 8  # chunks between two steps while more prompts wait to be fed than samples decode
CALLS_AHEAD = 2  # calls with chunks that the device has not finished when the next is dispatched and no slot is active


class NoTokenError(ArithmeticError):
    """No token can follow: the model gave no finite logit, or the parameters of the request forbid all its tokens."""


@dataclass(eq=False)
class Job:
    """One sample of a request, from its arrival to its end.

    Attributes:
        tokens: the prompt and the tokens generated so far, without tokens that a stop string cut off.
        output: the text of the output, which knows whether it has ended.
        log_probs: log-probabilities of the output tokens, read of each step; empty if not asked for.
        prompt_log_probs: log-probabilities of the tokens of the prompt but the first, fields [prompt length - 1, ...];
            None if not asked for, and before they are read with the first step.
        kinds: how each output token came about, as in `Piece.kind`.
        use: the sampling features of its steps, as `capacities.use_of` returns them.
        is_done: whether it has ended, for whatever reason.
        error: what ended it, where its own text or row could not be made, or no token can follow.
        num_preempted: how often it gave its slot up to others, to be computed anew.
        num_cached_tokens: number of tokens of the prompt that were found in the pages of others.
    """

    prompt: list[int]
    sampling: Sampling
    key_data: np.ndarray
    output: Detokenizer
    sample: int = 0
    priority: int = 0
    wants_log_probs: bool = False
    wants_prompt_log_probs: bool = False
    grammar: Grammar | None = None  # of its parameters
    salt: bytes | None = b""
    owner: Any = None  # whatever the caller knows it by
    tokens: list[int] = field(default_factory=list)
    counts: "tuple[Counts, int] | None" = None  # of the rows of its last step, and the index of its row
    log_probs: list[LogProbs] = field(default_factory=list)
    prompt_log_probs: LogProbs | None = None
    kinds: list[str] = field(default_factory=list)
    is_done: bool = False
    error: Exception | None = None
    num_preempted: int = 0
    num_cached_tokens: int = 0
    # Where it is.
    number: int = -1  # of its arrival
    slot: int | None = None
    pages: Row | None = None
    is_active: bool = False  # whether its row takes part in steps: its prompt is computed
    num_computed: int = 0  # tokens whose chunks are dispatched
    features: Any = None  # of the last of them
    scores: list[LogProbs] = field(default_factory=list)  # of the chunks of the prompt, on the device
    is_scored: bool = False  # whether the log-probabilities of the prompt are complete or not wanted

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.use = use_of(self.sampling)
        self.is_scored = not self.wants_prompt_log_probs

    @property
    def totals(self) -> Totals | None:
        """The counts of its steps; None before the first is read."""
        if self.counts is None:
            return None
        counts, index = self.counts
        return jax.tree.map(lambda x: np.array(x[index]), counts.totals)

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts jobs: a smaller number comes first, of `priority` and then of arrival."""
        return self.priority, self.number


class Counts:
    """The totals of the rows of a step after it, which are read from the device when somebody asks for them."""

    def __init__(self, totals: Totals):
        self._on_device: Totals | None = totals
        self._on_host: Totals | None = None

    @property
    def totals(self) -> Totals:
        on_device = self._on_device  # another thread may read them at the same time
        if on_device is not None:
            self._on_host = jax.device_get(on_device)
            self._on_device = None
        assert self._on_host is not None, "it is set before the other is taken away"
        return self._on_host


class Scheduler:
    """Run jobs on the slots of a device.

    Args:
        device: the slots.
        tables: the page tables of the slots; None where their caches are dense.
        chunk_size: number of prompt tokens that are fed in a call, of one prompt.
        eos_token_ids: end-of-sequence tokens, which end an output without a `stop_reason`.
        short_chunks: numbers of rows and tokens of calls that feed the rest of prompts, where the rest has no more
            tokens than a row, fewer than `chunk_size`; the shortest call that has room takes it. Prompts whose
            log-probabilities are asked for take no part.
        chunks_per_step: the calls between two steps have at most the tokens of `chunks_per_step` chunks, padding
            included. One call must not have more. None is BURST while more jobs wait to be fed than are active, and 1
            otherwise.
        choose_draft_length: a function of the number of active jobs and the recent acceptance rate of drafts that
            returns the number of draft tokens of the next step, one of the device's numbers. None: always the largest.

    Attributes:
        waiting: number of jobs without a slot.
        running: jobs with a slot.
        changed: jobs that became active in the last round, or got tokens of a step that it read.
    """

    def __init__(
        self,
        device: slots.Slots,
        tables: PageTables | None,
        chunk_size: int,
        eos_token_ids: Sequence[int] = (),
        *,
        short_chunks: Sequence[tuple[int, int]] = (),
        chunks_per_step: int | None = None,
        choose_draft_length: Callable[[int, float], int] | None = None,
    ):
        self._device, self._tables, self._chunk_size, self._eos = device, tables, chunk_size, eos_token_ids
        # The pages of others hold no state that a model or a drafter keeps beside its slots.
        self._shares_prompts = device.model.init_rows is None and commit_of(device.proposer) is None
        self._shapes = *sorted(short_chunks, key=lambda shape: shape[1]), (1, chunk_size)
        self._choose = choose_draft_length
        self._chunks_per_step = chunks_per_step
        self._width = device.proposer.num_draft_tokens + 1  # the most tokens of a step
        self._grammars = GrammarTables(device.capacities, device.model.vocab_size)
        self._slots: list[Job | None] = [None] * device.num_slots
        self._queue, self._guided = _Queue(), _Queue()  # jobs without and with a grammar
        self._in_flight: deque[tuple[slots.Output, list[Job | None]]] = deque()
        self._fed: deque[Any] = deque()  # features of the last calls with chunks
        self._acceptance = RecentAcceptance()
        self.changed: list[Job] = []
        self._num_jobs = 0
        self._left: list[int] = []  # slots whose jobs have left, which the device does not know yet
        self._is_table_new = self._are_grammars_new = False

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._guided)

    @property
    def running(self) -> list[Job]:
        return [job for job in self._slots if job is not None]

    @property
    def _active(self) -> list[Job]:
        return [job for job in self.running if job.is_active]

    def check(self, job: Job) -> None:
        """Raise ValueError if the prompt of a job leaves no room for a token, or the pages could never hold it."""
        most = min(len(job.prompt) + int(job.sampling.max_tokens), self._device.max_length)
        if len(job.prompt) >= self._device.max_length:
            raise ValueError(
                f"prompt must have fewer tokens than max_length = {self._device.max_length}, got {len(job.prompt)}"
            )
        if self._tables is not None:
            needed, available = -(-self._room(most) // self._tables.page_size), self._tables.num_pages
            if needed > available:
                raise ValueError(f"prompt and max_tokens must fit the {available} pages, got a need of {needed}")

    def add(self, job: Job) -> None:
        """Queue a job that has passed `check`, unless it has ended."""
        if job.is_done:
            return
        job.number = self._num_jobs
        self._num_jobs += 1
        self._queue_of(job).push(job)

    def cancel(self, job: Job) -> None:
        """End a job now; tokens that the device still computes for it are not read."""
        if not job.is_done:
            job.is_done = True
            if job.slot is None and job.number >= 0:
                self._queue_of(job).drop(job)
            self._leave(job)

    def advance(self) -> bool:
        """Do one round; return whether there is more to do."""
        self.changed = []
        self._admit()
        num_left = self._chunks_between_steps() * self._chunk_size
        while num_fed := self._feed(num_left):
            num_left -= num_fed
        self._step()
        while len(self._in_flight) > 1 or (self._in_flight and not self._active):
            self._read()
        return bool(self.waiting or self._in_flight or self.running)

    def _queue_of(self, job: Job) -> "_Queue":
        return self._queue if job.grammar is None else self._guided

    def _room(self, length: int) -> int:
        """Slots that a row of this length needs for the steps up to the time its length is known again."""
        return min(length + 2 * self._width, self._device.max_length)

    def _admit(self) -> None:
        """Let the first jobs into vacant slots, as long as there are pages.

        Where the first job with a grammar finds no place for it, those after it that have one wait, too.
        """
        queues = [self._queue, self._guided]
        while None in self._slots:
            jobs = [job for queue in queues if (job := queue.first) is not None]
            if not jobs:
                return
            job = min(jobs, key=lambda job: job.rank)
            if job.grammar is not None and not self._place_grammar(job.grammar):
                queues = [self._queue]
                continue
            if not self._place_tokens(job):
                if job.grammar is not None:
                    self._grammars.remove(job.grammar)
                return
            self._queue_of(job).pop()
            job.slot = self._slots.index(None)
            self._slots[job.slot] = job

    def _place_grammar(self, grammar: Grammar) -> bool:
        """Hold a place of the tables for a grammar; return whether there is one."""
        is_known = grammar in self._grammars
        has_place = self._grammars.insert(grammar)
        self._are_grammars_new |= has_place and not is_known
        return has_place

    def _place_tokens(self, job: Job) -> bool:
        """Give a job pages for its tokens; return whether there are enough."""
        if self._tables is None:
            return True
        tokens = np.array(job.tokens, np.int32)
        salt = job.salt if self._shares_prompts else None
        job.pages = self._tables.insert(tokens, self._room(len(tokens)), salt, takes=job.is_scored)
        if job.pages is None:
            return False
        job.num_computed, job.features = job.pages.num_cached_tokens, job.pages.value
        self._is_table_new = True
        return True

    def _chunks_between_steps(self) -> int:
        """Return how many chunks may be fed before the next step."""
        if self._chunks_per_step is not None:
            return self._chunks_per_step
        num_active = len(self._active)
        return BURST if len(self.running) - num_active > num_active else 1

    def _feed(self, most: int) -> int:
        """Feed one chunk of the first unfinished prompt; if it is short, other short chunks in the same call.

        Jobs become active after their last chunk.

        Args:
            most: the most tokens that the call may have, padding included.

        Returns:
            The tokens of the call, 0 where there is nothing to feed within `most`.
        """
        jobs = sorted((job for job in self.running if not job.is_active), key=lambda job: job.rank)
        if not jobs:
            return 0
        for job in jobs:
            self._take(job)
        num_rows, size = shape = self._shape_of(jobs[0])
        if num_rows * size > most:
            return 0
        self._send()
        jobs = [job for job in jobs if self._shape_of(job) == shape][:num_rows]
        self._prefill(jobs, num_rows, size)
        for job in jobs:
            if job.num_computed >= len(job.tokens):
                self._activate(job)
        return num_rows * size

    def _shape_of(self, job: Job) -> tuple[int, int]:
        """Return the numbers of rows and tokens of the call that feeds the next chunk of a job.

        It depends on how many tokens are left, and not on the company, so that the job is computed alike in any.
        """
        left = len(job.tokens) - job.num_computed
        return next((shape for shape in self._shapes[:-1] if job.is_scored and left <= shape[1]), self._shapes[-1])

    def _prefill(self, jobs: Sequence[Job], num_rows: int, size: int) -> None:
        """Dispatch a call with the next chunks of jobs."""
        given, at = [], []
        for job in jobs:
            assert job.slot is not None
            features = self._device.no_features if job.num_computed == 0 else job.features
            given.append(job.slot)
            at.append(slots.chunk_at(np.array(job.tokens, np.int32), job.num_computed, size, features))
        log_probs = not all(job.is_scored for job in jobs)
        features, scores = self._device.prefill(given, at, num_rows, log_probs=log_probs)
        for job, own in zip(jobs, features, strict=False):  # rows without a job are the last
            job.num_computed, job.features = job.num_computed + size, own
            if scores is not None:
                job.scores.append(scores)
            if job.pages is not None and self._tables is not None and job.num_computed <= len(job.tokens):
                self._tables.register(job.pages, job.num_computed, job.features)
        self._fed.append(features)
        if len(self._fed) > CALLS_AHEAD:
            last = self._fed.popleft()
            if not self._active:
                jax.block_until_ready(last)

    def _take(self, job: Job) -> None:
        """Let a job take the chunks that others have computed since it came, instead of computing them."""
        if self._tables is None or job.pages is None:
            return
        while job.is_scored and self._tables.take(job.pages, job.num_computed):
            job.num_computed, job.features = job.num_computed + self._chunk_size, job.pages.value
            self._is_table_new = True
        if not job.num_preempted:
            job.num_cached_tokens = job.pages.num_cached_tokens

    def _activate(self, job: Job) -> None:
        """Make a job whose tokens are computed take part in steps."""
        tokens, slot = np.array(job.tokens, np.int32), job.slot
        assert slot is not None
        try:
            guide = None if job.grammar is None else self._grammars.guide(job.grammar, tokens[len(job.prompt) :])
            options = {"prompt_length": len(job.prompt), "sample": job.sample, "totals": job.totals, "guide": guide}
            row = slots.request(self._device.state, tokens, job.key_data, job.sampling, **options)
        except Exception as error:  # of its parameters: it ends this job alone
            job.error, job.is_done = error, True
            self.changed.append(job)
            self._leave(job)
            return
        if self._are_grammars_new:
            self._device.set_grammars(self._grammars.token_classes, self._grammars.transitions)
            self._are_grammars_new = False
        self._device.insert(slot, row)
        job.is_active = job.is_scored = True
        self.changed.append(job)

    def _step(self) -> None:
        """Dispatch a step of all active slots; where there are too few pages for it, some lose their slots."""
        for job in sorted(self._active, key=lambda job: job.rank):
            while job.is_active and not self._has_pages(job):
                self._make_room()
        active = self._active
        if not active:
            return
        self._send()
        num_draft_tokens = None if self._choose is None else self._choose(len(active), self._acceptance.rate)
        wants_log_probs = any(job.wants_log_probs for job in active)
        of_slots = [slot for slot, job in enumerate(self._slots) if job and job.is_active]
        rows = self._device.rows_of(of_slots, wants_log_probs)
        options = {"log_probs": wants_log_probs, "num_draft_tokens": num_draft_tokens, "rows": rows}
        use = max(job.use for job in active) if rows is None else EVERYTHING
        output = self._device.step(use, **options)
        jobs = [self._slots[slot] for slot in (range(len(self._slots)) if rows is None else of_slots)]
        self._in_flight.append((output, [job if job and job.is_active else None for job in jobs]))

    def _has_pages(self, job: Job) -> bool:
        """Return whether a job has pages for the tokens of the next step, after giving it some."""
        if self._tables is None or job.pages is None:
            return True
        unread = sum(any(one is job for one in jobs) for _, jobs in self._in_flight)
        room = min(len(job.tokens) + (unread + 1) * self._width, self._device.max_length)
        if room <= job.pages.stop * self._tables.page_size:
            return True
        self._is_table_new = True
        return self._tables.ensure(job.pages, room)

    def _make_room(self) -> None:
        """Free pages: read the steps in flight, in which jobs may have ended, or else preempt the last job."""
        if self._in_flight:
            while self._in_flight:
                self._read()
            return
        job = max(self.running, key=lambda job: job.rank)
        self._leave(job)
        job.num_preempted += 1
        self._queue_of(job).push(job)

    def _send(self) -> None:
        """Tell the device which slots are vacant by now, and the pages of the others."""
        if self._left:
            self._device.evict(self._left)
            self._left = []
        if self._tables is not None and self._is_table_new:
            vacant = np.full(self._tables.pages_per_row, self._tables.num_pages, np.int32)
            rows = [vacant if job is None or job.pages is None else job.pages.table for job in self._slots]
            self._device.set_pages(np.stack(rows))
            self._is_table_new = False

    def _read(self) -> None:
        """Read the oldest step, and end the jobs that it ends."""
        output, jobs = self._in_flight.popleft()
        scores = {job.number: job.scores for job in jobs if job and job.scores}
        counts = output.num_drafts, output.num_accepted
        read: Any = jax.device_get((output.tokens, output.finished, counts, output.log_probs, scores))
        tokens, finished, counts, log_probs, scores = read
        self._acceptance.update(*counts)
        totals = Counts(output.totals)
        # The fillers of a step follow its jobs.
        rows = zip(jobs, tokens.tolist(), finished.tolist(), *(each.tolist() for each in counts), strict=False)
        for index, (job, row, reason, num_drafts, num_accepted) in enumerate(rows):
            if job is None or job.is_done:
                continue
            if job.scores:
                job.scores, job.prompt_log_probs = [], _joined(scores[job.number], len(job.prompt) - 1)
            committed = [token for token in row if token >= 0]
            job.counts = totals, index
            job.kinds += _kinds(num_drafts, num_accepted, len(committed))
            if log_probs is not None and job.wants_log_probs:
                job.log_probs.append(_own(log_probs, index, len(committed)))
            self._extend(job, committed, reason)

    def _extend(self, job: Job, committed: list[int], finished: int) -> None:
        """Add the tokens of a step to a job, and end the job where it ends."""
        job.tokens += committed
        try:
            job.output.extend(committed)
            if job.output.finish_reason is None and finished == decode.NO_TOKEN:
                raise NoTokenError(
                    f"the model gave no finite logit for the token after {len(job.tokens)} tokens, or the parameters "
                    "of the request forbid all that have one"
                )
            if job.output.finish_reason is None and finished != decode.RUNNING:
                job.output.finish(finished == decode.STOP, self._eos)
        except Exception as error:  # of the tokenizer or for want of a token: it ends this job alone
            job.error = error
        if job.error is not None or job.output.finish_reason is not None:
            job.is_done = True
            self._leave(job)
        self.changed.append(job)

    def _leave(self, job: Job) -> None:
        """Take a job out of its slot, if it has one, and free its pages and the place of its grammar."""
        if job.slot is None:
            return
        self._left.append(job.slot)
        self._slots[job.slot], job.is_active = None, False
        if job.pages is not None and self._tables is not None:
            self._tables.free(job.pages)
            self._is_table_new = True
        if job.grammar is not None:
            self._grammars.remove(job.grammar)
        if not job.is_scored:
            job.scores = []
        job.slot = job.pages = job.features = None
        job.num_computed = 0


class _Queue:
    """Jobs that wait, the first by rank first."""

    def __init__(self):
        self._jobs: list[tuple[tuple[int, int], Job]] = []  # a heap, with jobs that have ended meanwhile
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._jobs) - self._num_ended

    @property
    def first(self) -> Job | None:
        """The first job, None where there is none."""
        while self._jobs and self._jobs[0][1].is_done:
            heapq.heappop(self._jobs)
            self._num_ended -= 1
        return self._jobs[0][1] if self._jobs else None

    def push(self, job: Job) -> None:
        heapq.heappush(self._jobs, (job.rank, job))

    def pop(self) -> None:
        """Remove the job that is `first`."""
        heapq.heappop(self._jobs)

    def drop(self, job: Job) -> None:
        """Note that a job in the queue has ended."""
        self._num_ended += 1
        if self._num_ended > len(self._jobs) // 2:  # so that they take no memory
            self._jobs = [entry for entry in self._jobs if not entry[1].is_done]
            heapq.heapify(self._jobs)
            self._num_ended = 0


def _own(log_probs: LogProbs, row: int, width: int) -> LogProbs:
    """Return a copy of the first log-probabilities of a row."""
    return jax.tree.map(lambda x: np.array(x[row, :width]), log_probs)


def _joined(parts: Sequence[LogProbs], length: int) -> LogProbs:
    """Return the log-probabilities of several chunks [1, T, ...] as one, cut to a length."""
    return jax.tree.map(lambda *arrays: np.concatenate([array[0] for array in arrays])[:length], *parts)


def _kinds(num_drafts: int, num_accepted: int, num_committed: int) -> list[str]:
    """Return how each committed token of a step came about, as in `Piece.kind`."""
    last = "target" if num_drafts == 0 else "bonus" if num_accepted == num_drafts else "recovered"
    return (["accepted"] * num_accepted + [last])[:num_committed]
