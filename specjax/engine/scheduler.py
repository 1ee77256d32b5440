"""Decide which requests the device works on: who enters a slot, whose prompt is fed next, and who leaves.

A scheduler runs in one thread and reads no clock, so that its decisions can be repeated. Each round lets requests into
vacant slots, feeds chunks of prompts, dispatches a step of all active slots, and reads the output of the step before:
the device has the next step when the host looks at the last one.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import decode
from specjax.decoding.drafters import num_fed
from specjax.decoding.log_probs import LogProbs
from specjax.engine.draft_length import DraftLength
from specjax.engine.grammars import GrammarTables
from specjax.engine.jobs import Counts, Job, NoTokenError, Seat, first_of_row, joined, kinds_of, seat_of
from specjax.engine.mixed_sizes import thrifty_tokens
from specjax.engine.pages import PageTables
from specjax.engine.sizes import cheapest
from specjax.engine.slot_calls import Chunk, Output, chunk_at
from specjax.engine.slot_rows import request
from specjax.engine.slots import MIXED_USE, Slots
from specjax.sampling.capacities import Needs
from specjax.sampling.guided.tables import Grammar

BURST = 8  # chunks between two steps while more prompts wait to be fed than samples decode
SEVERAL = 4  # chunks while at least so many prompts wait, more than an eighth of the samples that decode
FED_SHARE = 4  # one prompt of 4 that wait gets a chunk, where that is more chunks, up to twice as many
LOOK_AHEAD = 16  # tokens for which jobs get pages early, where one lacks a page and there are many
UNFED_SHARE = 8  # one job of 8 with a slot: where at most so many wait for their prompts, these are in no hurry
HELD = 4  # rounds for which prompts wait until they fill a call
CALLS_AHEAD = 2  # calls with chunks that the device has not finished when the next is dispatched and no slot is active


class Scheduler:
    """Run jobs on the slots of a device.

    Args:
        device: the slots.
        tables: the page tables of the slots; None where their caches are dense.
        chunk_size: the most tokens of one prompt that are fed in a call, up to a multiple of this number.
        eos_token_ids: end-of-sequence tokens, which end an output without a `stop_reason`.
        prompt_sizes: numbers of tokens of the calls that feed prompts; None is `chunk_size`, which is always one of
            them. Prompts whose log-probabilities are asked for are fed by calls of `chunk_size` tokens.
        chunks_per_step: the calls between two steps have at most the tokens of `chunks_per_step` chunks, padding
            included. One call must not have more. None is BURST while more jobs wait to be fed than are active, SEVERAL
            while at least so many do, more than an eighth of the active ones, or up to twice as many where many wait,
            and 1 otherwise.
        draft_length: chooses the number of draft tokens of each step, one of the device's numbers. None: always the
            largest.

    Attributes:
        waiting: number of jobs without a slot.
        running: jobs with a slot.
        changed: jobs that became active in the last round, or got tokens of a step that it read.
    """

    def __init__(
        self,
        device: Slots,
        tables: PageTables | None,
        chunk_size: int,
        eos_token_ids: Sequence[int] = (),
        *,
        prompt_sizes: Sequence[int] = (),
        chunks_per_step: int | None = None,
        draft_length: DraftLength | None = None,
    ):
        self._device, self._tables, self._chunk_size, self._eos = device, tables, chunk_size, eos_token_ids
        self._sizes = tuple(sorted({*prompt_sizes, chunk_size}))
        self._draft_length = draft_length
        self._chunks_per_step = chunks_per_step
        self._width = num_fed(device.proposer)  # slots that a step writes, at least as many as it commits tokens
        self._grammars = GrammarTables(device.capacities, device.model.vocab_size)
        self._slots: list[Job | None] = [None] * device.num_slots
        self._active: list[Job] = []  # the jobs that take part in steps, by slot; a change makes a new list
        self._queue: list[Job] = []  # jobs that wait without a grammar, by rank
        self._guided: list[Job] = []  # jobs that wait with one, by rank
        self._in_flight: deque[tuple[Output, list[Job], Sequence[int]]] = deque()  # with the row of each job
        self._chosen: deque[int] = deque()  # the K of the steps in flight, where they are chosen
        self._fed: deque[Any] = deque()  # features of the last calls with chunks
        self._num_held = 0  # rounds in a row in which prompts have waited until they fill a call
        self._thrifty = thrifty_tokens(device.model, device.mixed_sizes)
        self.changed: list[Job] = []
        self._num_jobs = 0
        self._left: list[int] = []  # slots whose jobs have left, which the device does not know yet
        self._table = None if tables is None else tables.no_pages(device.num_slots)  # of which each slot has a row
        self._is_table_new = self._are_grammars_new = False  # whether the device does not know them yet

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._guided)

    @property
    def running(self) -> list[Job]:
        return [job for job in self._slots if job is not None]

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
        self._wait(job)

    def take_over(self, job: Job, slot: int) -> None:
        """Let a job have a vacant slot, in which the device decodes its tokens already. The caches are not in pages."""
        job.seat = Seat(slot, num_computed=len(job.tokens))
        self._slots[slot] = job
        self._take_part(job)

    def cancel(self, job: Job) -> None:
        """End a job now; tokens that the device still computes for it are not read."""
        if not job.is_done:
            job.is_done = True
            if job.seat is None and job.number >= 0:
                self._queue_of(job).remove(job)
            self._leave(job)

    def lend_device(self) -> list[int] | None:
        """Let the caller use the device, while there is no job and no step in flight.

        All its slots are vacant, and must be so before the next round. The page table may be any: a job that enters a
        slot has its own sent.

        Returns:
            The pages that hold nothing, which the caller may write; None where caches are not in pages.
        """
        self._send()
        return None if self._tables is None else self._tables.free_pages

    def advance(self) -> bool:
        """Do one round; return whether there is more to do."""
        self.changed = []
        self._admit()
        num_left = self._chunks_between_steps() * self._chunk_size
        if not self._step_mixed(num_left):
            if not self._holds_prompts():
                while num_fed := self._feed(num_left):
                    num_left -= num_fed
            self._step()
        while len(self._in_flight) > 1 or (self._in_flight and not self._active):
            self._read()
        return bool(self.waiting or self._in_flight or self.running)

    def _queue_of(self, job: Job) -> list[Job]:
        return self._queue if job.grammar is None else self._guided

    def _wait(self, job: Job) -> None:
        """Put a job into its queue."""
        bisect.insort(self._queue_of(job), job, key=lambda job: job.rank)

    def _room(self, length: int) -> int:
        """Slots that a row of this length needs for the steps up to the time its length is known again."""
        return min(length + 2 * self._width, self._device.max_length)

    def _admit(self) -> None:
        """Let the first jobs into vacant slots, as long as there are pages.

        Where the first job with a grammar finds no place for it, those after it that have one wait, too.
        """
        queues = [self._queue, self._guided]
        while None in self._slots:
            jobs = [queue[0] for queue in queues if queue]
            if not jobs:
                return
            job = min(jobs, key=lambda job: job.rank)
            if job.grammar is not None and not self._place_grammar(job.grammar):
                queues = [self._queue]
                continue
            seat = self._find_seat(job)
            if seat is None:
                if job.grammar is not None:
                    self._grammars.remove(job.grammar)
                return
            self._queue_of(job).remove(job)
            job.seat, self._slots[seat.slot] = seat, job

    def _place_grammar(self, grammar: Grammar) -> bool:
        """Hold a place of the tables for a grammar; return whether there is one."""
        is_known = grammar in self._grammars
        has_place = self._grammars.insert(grammar)
        self._are_grammars_new |= has_place and not is_known
        return has_place

    def _find_seat(self, job: Job) -> Seat | None:
        """Return a vacant slot with pages for the tokens of a job; None where there are too few pages."""
        slot = self._slots.index(None)
        if self._tables is None or self._table is None:
            return Seat(slot)
        tokens, table = np.array(job.tokens, np.int32), self._table[slot]
        pages = self._tables.insert(tokens, self._room(len(tokens)), job.salt, takes=job.is_scored, table=table)
        if pages is None:
            return None
        self._is_table_new = True
        seat = Seat(slot, pages, num_computed=pages.num_cached_tokens)
        _go_on(seat)
        return seat

    def _chunks_between_steps(self) -> int:
        """Return how many chunks may be fed before the next step."""
        if self._chunks_per_step is not None:
            return self._chunks_per_step
        num_active = len(self._active)
        num_unfed = len(self.running) - num_active
        if num_unfed > num_active:
            number = BURST
        elif num_unfed >= SEVERAL and UNFED_SHARE * num_unfed > num_active:
            number = SEVERAL
        else:
            return 1
        return min(max(number, num_unfed // FED_SHARE), 2 * number)

    def _counts_cost_alone(self) -> bool:
        """Return whether jobs wait for slots, few of which have jobs whose prompts are not fed.

        The more tokens the device gives in a second, the sooner these jobs come; the slots that wait meanwhile are few.
        """
        num_running = len(self.running)
        return self.waiting > 0 and UNFED_SHARE * (num_running - len(self._active)) <= num_running

    def _holds_prompts(self) -> bool:
        """Return whether prompts wait until they fill a call, in which a token costs less than in one of a few tiles.

        They do so only where the next calls have room for several, beside running jobs, and for a few rounds.
        """
        jobs, num_tokens = self._next_prompts() if self._active and self._counts_cost_alone() else ([], 0)
        may_share = bool(jobs) and jobs[0].is_scored and self._device.tile_size is not None
        is_held = may_share and num_tokens < self._chunk_size and self._num_held < HELD
        self._num_held = self._num_held + 1 if is_held else 0
        return is_held

    def _feed(self, most: int) -> int:
        """Feed the next tokens of the first unfinished prompts, in one call; jobs become active after their last ones.

        A prompt whose log-probabilities are wanted is fed alone.

        Args:
            most: the most tokens that the call may have, padding included.

        Returns:
            The tokens of the call, 0 where there is nothing to feed within `most`.
        """
        jobs, num_tokens = self._next_prompts()
        if not jobs:
            return 0
        if jobs[0].is_scored:
            size = self._size_of_call(num_tokens, most)
        else:
            size = self._chunk_size if self._chunk_size <= most else 0
        if not size:
            return 0
        self._send()
        fed, counts, chunks = self._chunks(jobs, size)
        log_probs = not jobs[0].is_scored
        slots = [seat_of(job).slot for job in fed]
        features, scores = self._device.prefill(slots, chunks, *self._device.tiles_of(size), log_probs=log_probs)
        self._fed.append(features)
        if len(self._fed) > CALLS_AHEAD:
            last = self._fed.popleft()
            if not self._active:
                jax.block_until_ready(last)
        self._count_fed(fed, counts, features, scores)
        return size

    def _size_of_call(self, num_tokens: int, most: int) -> int:
        """Return the tokens of the first of the calls that feed so many at the least cost; 0 where `most` is less."""
        sizes = tuple(size for size in self._sizes if size <= most)
        return cheapest(num_tokens, sizes, self._device.tile_size or self._chunk_size)[1] if sizes else 0

    def _next_prompts(self) -> tuple[list[Job], int]:
        """Return the jobs that the next call may feed, in their order, and its tokens, padding of tiles included."""
        running = self.running
        if len(running) == len(self._active):
            return [], 0
        jobs = sorted((job for job in running if not job.is_active), key=lambda job: job.rank)
        for job in jobs:
            self._take(job)
        is_scored = jobs[0].is_scored
        if not is_scored or self._device.tile_size is None:
            jobs = jobs[:1]
        jobs = self._distinct([job for job in jobs if job.is_scored == is_scored])
        return jobs, sum(self._in_tiles(self._next(job)) for job in jobs)

    def _next(self, job: Job) -> int:
        """Return how many tokens of a job may be fed next: up to the end of its chunk, which others may share."""
        num_computed = seat_of(job).num_computed
        return min(len(job.tokens) - num_computed, self._chunk_size - num_computed % self._chunk_size)

    def _in_tiles(self, num_tokens: int) -> int:
        """Return the tokens of the tiles that hold so many; tiles are 1 token where a call has one chunk."""
        size = self._device.tile_size or 1
        return -(-num_tokens // size) * size

    def _distinct(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs without those for which an earlier one computes the next chunk."""
        if self._tables is None:
            return list(jobs)
        kept, keys = [], set()
        for job in jobs:
            seat = seat_of(job)
            key = None if seat.pages is None else self._tables.key_at(seat.pages, seat.num_computed)
            if key not in keys or seat.num_computed % self._chunk_size:
                kept.append(job)
            if key is not None:
                keys.add(key)
        return kept

    def _chunks(self, jobs: Sequence[Job], size: int) -> tuple[list[Job], list[int], list[Chunk]]:
        """Return the jobs for whose next tokens a call of `size` tokens has room, the numbers of these, and chunks."""
        num_left, tile = self._device.tiles_of(size)
        fed, counts, chunks = [], [], []
        for job in jobs:
            if not num_left:
                break
            seat, count = seat_of(job), min(self._next(job), num_left * tile)
            features = self._device.no_features if seat.num_computed == 0 else seat.features
            if seat.kept is not None:
                self._device.put_back(seat.slot, seat.kept)
                seat.kept = None
            used = -(-count // tile)
            tokens = np.array(job.tokens, np.int32)
            chunks.append(chunk_at(tokens, seat.num_computed, used * tile, features, count))
            fed.append(job)
            counts.append(count)
            num_left -= used
        return fed, counts, chunks

    def _count_fed(
        self, fed: Sequence[Job], counts: Sequence[int], features: Sequence[Any], scores: LogProbs | None = None
    ) -> None:
        """Count the tokens that a call has fed; jobs become active after their last ones."""
        for job, count, last in zip(fed, counts, features, strict=False):  # places without a job are the last
            seat = seat_of(job)
            seat.num_computed, seat.features = seat.num_computed + count, last
            if scores is not None:
                seat.scores.append(scores)
            if seat.pages is None or self._tables is None:
                continue
            if self._tables.can_register(seat.pages, seat.num_computed):
                kept = self._device.kept(seat.slot) if self._device.keeps_rows else None
                self._tables.register(seat.pages, seat.num_computed, (seat.features, kept))
        for job in fed:
            if seat_of(job).num_computed == len(job.tokens):
                self._activate(job)

    def _take(self, job: Job) -> None:
        """Let a job take the chunks that others have computed since it came, instead of computing them."""
        seat = seat_of(job)
        if self._tables is None or seat.pages is None:
            return
        while job.is_scored and self._tables.take(seat.pages, seat.num_computed):
            seat.num_computed += self._chunk_size
            _go_on(seat)
            self._is_table_new = True
        if not job.num_preempted:
            job.num_cached_tokens = seat.pages.num_cached_tokens

    def _activate(self, job: Job) -> None:
        """Make a job whose tokens are computed take part in steps."""
        tokens, seat = np.array(job.tokens, np.int32), seat_of(job)
        try:
            row = request(
                self._device.state,
                tokens,
                job.key_data,
                job.sampling,
                prompt_length=len(job.prompt),
                sample=job.sample,
                totals=job.totals,
                guide=None if job.grammar is None else self._grammars.guide(job.grammar, tokens[len(job.prompt) :]),
            )
        except Exception as error:  # of its parameters: it ends this job alone
            job.error, job.is_done = error, True
            self.changed.append(job)
            self._leave(job)
            return
        if self._are_grammars_new:
            self._device.set_grammars(self._grammars.token_classes, self._grammars.transitions)
            self._are_grammars_new = False
        self._device.insert(seat.slot, row)
        if not job.is_scored:
            job.scores, job.is_scored = seat.scores, True
        self._take_part(job)

    def _take_part(self, job: Job) -> None:
        """Make a job take part in steps from now on."""
        seat_of(job).is_active = True
        self._active = [*self._active]
        bisect.insort(self._active, job, key=lambda job: seat_of(job).slot)
        self.changed.append(job)

    def _step(self) -> None:
        """Dispatch a step of all active slots; where there are too few pages for it, some lose their slots."""
        active = self._with_pages()
        if not active:
            return
        self._send()
        wants_log_probs = any(job.wants_log_probs for job in active)
        rows = self._device.rows_of([seat_of(job).slot for job in active], wants_log_probs)
        output = self._device.step(
            max(job.use for job in active) if rows is None else Needs.EVERYTHING,
            log_probs=wants_log_probs,
            num_draft_tokens=self._choose(active),
            rows=rows,
        )
        self._expect(output, active)

    def _step_mixed(self, most: int) -> bool:
        """Dispatch a step of all active slots that also feeds prompts, where the device has a program for both.

        Between more chunks than one they are fed by calls of their own, which are larger, and so they are beside jobs
        that need more of a step than mixed ones compute. Where the cost of tokens counts alone, few are fed at a time.

        Args:
            most: the most tokens of prompts, padding included.

        Returns:
            Whether it did.
        """
        if not self._device.mixed_sizes or most != self._chunk_size or not (active := self._with_pages()):
            return False
        jobs, num_tokens = self._next_prompts()
        if not jobs or not jobs[0].is_scored:
            return False
        if any(job.wants_log_probs or job.use > MIXED_USE for job in active):
            return False
        fitting = [each for each in self._device.mixed_sizes if each[0] >= len(active)]
        if fitting and self._counts_cost_alone():
            most = self._thrifty.get(min(fitting)[0], most)
        size = self._size_of_call(num_tokens, most)
        sizes = [each for each in fitting if each[1] == size]
        if not sizes:
            return False
        self._send()
        fed, counts, chunks = self._chunks(jobs, size)
        slots, own = ([seat_of(job).slot for job in jobs] for jobs in (active, fed))
        output, features = self._device.mixed_step(min(sizes), slots, own, chunks)
        self._expect(output, active)
        self._count_fed(fed, counts, features)
        return True

    def _with_pages(self) -> list[Job]:
        """Return the active jobs, which get pages for a step; where there are too few, some lose their slots."""
        if short := self._short():
            for job in sorted(short, key=lambda job: job.rank):
                while job.is_active and not self._has_pages(job):
                    self._make_room()
            self._look_ahead()
        return self._active

    def _short(self, ahead: int = 0) -> list[Job]:
        """Return the active jobs that have too few pages for the tokens of the next step, and `ahead` more."""
        if self._tables is None:
            return []
        size, seats = self._tables.page_size, [seat_of(job).pages for job in self._active]
        held = [0 if pages is None else pages.stop * size for pages in seats]
        return [job for job, room in zip(self._active, held, strict=True) if self._room_for_step(job, ahead) > room]

    def _look_ahead(self) -> None:
        """Give active jobs the pages that they need soon, so that the table is sent once for many jobs.

        Pages are then as many as slots at least, so that no job lacks one because of it.
        """
        if self._tables is None:
            return
        for job in self._short(LOOK_AHEAD):
            if self._tables.num_available < len(self._slots):
                return
            self._has_pages(job, LOOK_AHEAD)

    def _expect(self, output: Output, active: list[Job]) -> None:
        """Note a step that was dispatched for the active jobs, whose output the host will read."""
        output.numbers.copy_to_host_async()
        rows = range(len(active))
        if output.numbers.shape[0] == len(self._slots):
            rows = [seat_of(job).slot for job in active]
        for job in active:
            job.num_unread += 1
        self._in_flight.append((output, active, rows))

    def _choose(self, active: Sequence[Job]) -> int | None:
        """Return the number of draft tokens of the next step; None is the device's own."""
        if self._draft_length is None:
            return None
        seats = [seat_of(job) for job in active]
        num_draft_tokens = self._draft_length.choose(len(active), max(seat.num_behind for seat in seats))
        if num_draft_tokens not in self._device.draft_lengths:
            expected = f"one of draft_lengths = {list(self._device.draft_lengths)}"
            raise ValueError(f"choose_draft_length must return {expected}, got {num_draft_tokens!r}")
        for seat in seats:
            seat.num_behind = 0 if num_draft_tokens else seat.num_behind + 1
        self._chosen.append(num_draft_tokens)
        return num_draft_tokens

    def _room_for_step(self, job: Job, ahead: int = 0) -> int:
        """Return the slots that a job needs for the tokens of the next step, and `ahead` more."""
        return min(len(job.tokens) + (job.num_unread + 1) * self._width + ahead, self._device.max_length)

    def _has_pages(self, job: Job, ahead: int = 0) -> bool:
        """Return whether a job has pages for the tokens of the next step and `ahead` more, after giving it some."""
        pages = seat_of(job).pages
        if self._tables is None or pages is None:
            return True
        self._is_table_new = True
        return self._tables.ensure(pages, self._room_for_step(job, ahead))

    def _make_room(self) -> None:
        """Free pages: read the steps in flight, in which jobs may have ended, or else preempt the last job."""
        if self._in_flight:
            while self._in_flight:
                self._read()
            return
        job = max(self.running, key=lambda job: job.rank)
        self._leave(job)
        job.num_preempted += 1
        self._wait(job)

    def _send(self) -> None:
        """Tell the device which slots are vacant by now, and the pages of the others."""
        if self._left:
            self._device.evict(self._left)
            self._left = []
        if self._table is not None and self._is_table_new:
            self._device.set_pages(self._table)
            self._is_table_new = False

    def _read(self) -> None:
        """Read the oldest step, and end the jobs that it ends."""
        output, jobs, rows = self._in_flight.popleft()
        scores = {job.number: job.scores for job in jobs if job.scores}
        read: Any = jax.device_get((output.numbers, output.log_probs, scores))
        numbers, log_probs, scores = read
        if self._draft_length is not None:
            has_run = numbers[:, 0] >= 0
            self._draft_length.count(numbers[has_run, -2], numbers[has_run, -1], self._chosen.popleft())
        totals, lists = Counts(output.totals), numbers.tolist()
        num_committed = (numbers[:, :-3] >= 0).sum(axis=1).tolist()
        for job, row in zip(jobs, rows, strict=True):
            job.num_unread -= 1
            if job.is_done:  # since the step was dispatched
                continue
            if job.scores:
                job.scores, job.prompt_log_probs = [], joined(scores[job.number], len(job.prompt) - 1)
            count, (reason, num_drafts, num_accepted) = num_committed[row], lists[row][-3:]
            job.counts = totals, row
            job.kinds += kinds_of(num_drafts, num_accepted, count)
            if log_probs is not None and job.wants_log_probs:
                job.log_probs.append(first_of_row(log_probs, row, count))
            self._extend(job, lists[row][:count], reason)

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
            if finished != decode.RUNNING and job.output.finish_reason is None:
                job.output.finish(finished == decode.STOP, self._eos)
        except Exception as error:  # of the tokenizer or for want of a token: it ends this job alone
            job.error = error
        if job.error is not None or job.output.finish_reason is not None:
            job.is_done = True
            self._leave(job)
        self.changed.append(job)

    def _leave(self, job: Job) -> None:
        """Take a job out of its slot, if it has one, and free its pages and the place of its grammar."""
        seat = job.seat
        if seat is None:
            return
        self._left.append(seat.slot)
        self._slots[seat.slot] = None
        self._active = [each for each in self._active if each is not job]
        if seat.pages is not None and self._tables is not None:
            self._tables.free(seat.pages)  # of which the device hears when the slot is evicted
        if job.grammar is not None:
            self._grammars.remove(job.grammar)
        job.seat = None


def _go_on(seat: Seat) -> None:
    """Let a seat go on from the value of the last chunk that its pages share, if there is a new one."""
    assert seat.pages is not None, "caches are pages"
    if seat.pages.value is not None:
        seat.features, seat.kept = seat.pages.value
        seat.pages.value = None  # large, and of no use any more
