"""Decide which requests the device works on: who enters a slot, whose prompt is fed next, and who leaves.

A scheduler runs in one thread and reads no clock, so that its decisions can be repeated. Each round lets requests into
vacant slots, feeds one chunk of one prompt, dispatches a step of all active slots, and reads what the step before gave:
the device has the next step when the host looks at the last one.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from specjax import decode
from specjax.engine import slots
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.pages import PageTables, Row
from specjax.log_probs import LogProbs
from specjax.metrics import Totals
from specjax.sampling import Sampling
from specjax.sampling.capacities import use_of


@dataclass(eq=False)
class Job:
    """One sample of a request, from its arrival to its end.

    Attributes:
        tokens: the prompt and what was generated so far, without what a stop string cut off.
        output: the text of the output, which knows whether it has ended.
        totals: the counts of its steps.
        log_probs: log-probabilities of the output tokens, read of each step; empty if not asked for.
        kinds: how each output token came about, as in `Piece.kind`.
        use: what a step must compute for it, as `capacities.use_of` says.
        is_done: whether it has ended, for whatever reason.
        error: what ended it, where its own text could not be made.
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
    salt: bytes | None = b""
    tokens: list[int] = field(default_factory=list)
    totals: Totals | None = None
    log_probs: list[LogProbs] = field(default_factory=list)
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

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.use = use_of(self.sampling)

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts jobs: a smaller number comes first, of `priority` and then of arrival."""
        return self.priority, self.number


class Scheduler:
    """Run jobs on the slots of a device.

    Args:
        device: the slots.
        tables: the page tables of the slots; None where their caches are dense.
        chunk_size: number of prompt tokens that are fed in a call.
        eos_token_ids: end-of-sequence tokens, which end an output without a `stop_reason`.

    Attributes:
        waiting: number of jobs without a slot.
        running: jobs with a slot.
    """

    def __init__(
        self, device: slots.Slots, tables: PageTables | None, chunk_size: int, eos_token_ids: Sequence[int] = ()
    ):
        self._device, self._tables, self._chunk_size, self._eos = device, tables, chunk_size, eos_token_ids
        self._width = device.proposer.num_draft_tokens + 1  # the most tokens of a step
        self._slots: list[Job | None] = [None] * device.num_slots
        self._queue: list[tuple[tuple[int, int], Job]] = []
        self._in_flight: deque[tuple[slots.Output, list[Job | None]]] = deque()
        self._num_jobs = 0
        self._is_table_new = False

    @property
    def waiting(self) -> int:
        return sum(not job.is_done for _, job in self._queue)

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
        """Queue a job that has passed `check`."""
        job.number = self._num_jobs
        self._num_jobs += 1
        heapq.heappush(self._queue, (job.rank, job))

    def cancel(self, job: Job) -> None:
        """End a job now; what the device still computes of it is not read."""
        if not job.is_done:
            job.is_done = True
            self._leave(job)

    def advance(self) -> bool:
        """Do one round; return whether there is more to do."""
        self._admit()
        self._feed()
        self._step()
        while len(self._in_flight) > 1 or (self._in_flight and not self._active):
            self._read()
        return bool(self._queue or self._in_flight or self.running)

    def _room(self, length: int) -> int:
        """Slots that a row of this length needs for the steps up to the time its length is known again."""
        return min(length + 2 * self._width, self._device.max_length)

    def _admit(self) -> None:
        """Let the first jobs of the queue into vacant slots, as long as there are pages."""
        while self._queue and None in self._slots:
            job = self._queue[0][1]
            if not job.is_done:
                if self._tables is not None:
                    tokens = np.array(job.tokens, np.int32)
                    job.pages = self._tables.insert(tokens, self._room(len(tokens)), job.salt)
                    if job.pages is None:
                        return
                    job.num_computed, job.features = job.pages.num_cached_tokens, job.pages.value
                    if not job.num_preempted:
                        job.num_cached_tokens = job.num_computed
                    self._is_table_new = True
                job.slot = self._slots.index(None)
                self._slots[job.slot] = job
            heapq.heappop(self._queue)

    def _feed(self) -> None:
        """Feed the next chunk of the first job whose prompt is not computed; after the last one it becomes active."""
        jobs = [job for job in self.running if not job.is_active]
        if not jobs:
            return
        job = min(jobs, key=lambda job: job.rank)
        tokens, slot = np.array(job.tokens, np.int32), job.slot
        assert slot is not None
        self._send_tables()
        features = self._device.no_features if job.num_computed == 0 else job.features
        chunk = slots.chunk_at(tokens, job.num_computed, self._chunk_size, features)
        job.features = self._device.prefill(slot, chunk)
        job.num_computed += self._chunk_size
        if job.pages is not None and self._tables is not None and job.num_computed <= len(tokens):
            self._tables.register(job.pages, job.num_computed, job.features)
        if job.num_computed >= len(tokens):
            options = {"prompt_length": len(job.prompt), "sample": job.sample, "totals": job.totals}
            row = slots.request(self._device.state, tokens, job.key_data, job.sampling, **options)
            self._device.insert(slot, row)
            job.is_active = True

    def _step(self) -> None:
        """Dispatch a step of all active slots; where there are too few pages for it, some lose their slots."""
        for job in sorted(self._active, key=lambda job: job.rank):
            while job.is_active and not self._has_pages(job):
                self._make_room()
        active = self._active
        if not active:
            return
        self._send_tables()
        use = max(job.use for job in active)
        output = self._device.step(use, log_probs=any(job.wants_log_probs for job in active))
        self._in_flight.append((output, [job if job and job.is_active else None for job in self._slots]))

    def _has_pages(self, job: Job) -> bool:
        """Return whether a job has pages for the tokens of the next step, after giving it some."""
        if self._tables is None or job.pages is None:
            return True
        unread = sum(job in jobs for _, jobs in self._in_flight)
        room = min(len(job.tokens) + (unread + 1) * self._width, self._device.max_length)
        before = job.pages.stop
        if not self._tables.ensure(job.pages, room):
            return False
        self._is_table_new |= job.pages.stop != before
        return True

    def _make_room(self) -> None:
        """Free pages: of what is not read yet some may end; else the last of the jobs gives its slot up."""
        if self._in_flight:
            while self._in_flight:
                self._read()
            return
        job = max(self.running, key=lambda job: job.rank)
        self._leave(job)
        job.num_preempted += 1
        heapq.heappush(self._queue, (job.rank, job))

    def _send_tables(self) -> None:
        if self._tables is not None and self._is_table_new:
            vacant = np.full(self._tables.pages_per_row, self._tables.num_pages, np.int32)
            rows = [vacant if job is None or job.pages is None else job.pages.table for job in self._slots]
            self._device.set_pages(np.stack(rows))
            self._is_table_new = False

    def _read(self) -> None:
        """Read the oldest step, and end the jobs that it ends."""
        output, jobs = self._in_flight.popleft()
        read: Any = jax.device_get(output)
        tokens, finished, log_probs = read.tokens, read.finished, read.log_probs
        for slot, job in enumerate(jobs):
            if job is None or job.is_done:
                continue
            committed = tokens[slot][tokens[slot] >= 0].tolist()
            job.tokens += committed
            job.kinds += _kinds(int(read.num_drafts[slot]), int(read.num_accepted[slot]), len(committed))
            job.totals = jax.tree.map(lambda x, slot=slot: np.array(x[slot]), read.totals)
            if log_probs is not None and job.wants_log_probs:
                width = len(committed)
                job.log_probs.append(jax.tree.map(lambda x, slot=slot, width=width: x[slot, :width], log_probs))
            try:
                job.output.extend(committed)
                if job.output.finish_reason is None and finished[slot] != decode.RUNNING:
                    job.output.finish(finished[slot] == decode.STOP, self._eos)
            except Exception as error:  # of the tokenizer: it ends this job alone
                job.error = error
            if job.error is not None or job.output.finish_reason is not None:
                job.is_done = True
                self._leave(job)

    def _leave(self, job: Job) -> None:
        """Take a job out of its slot, if it has one, and free its pages."""
        if job.slot is None:
            return
        self._device.evict([job.slot])
        self._slots[job.slot], job.is_active = None, False
        if job.pages is not None and self._tables is not None:
            self._tables.free(job.pages)
            self._is_table_new = True
        job.slot = job.pages = job.features = None
        job.num_computed = 0


def _kinds(num_drafts: int, num_accepted: int, num_committed: int) -> list[str]:
    """Return how each committed token of a step came about, as in `Piece.kind`."""
    last = "target" if num_drafts == 0 else "bonus" if num_accepted == num_drafts else "recovered"
    return (["accepted"] * num_accepted + [last])[:num_committed]
