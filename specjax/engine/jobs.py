"""Samples of requests, from their arrival to their end, and their places on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np

from specjax.decoding.log_probs import LogProbs
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.pages import Row
from specjax.metrics import Totals
from specjax.sampling import Sampling
from specjax.sampling.capacities import needs_of
from specjax.sampling.guided.tables import Grammar


class NoTokenError(ArithmeticError):
    """No token can follow: the model gave no finite logit, or the parameters of the request forbid all its tokens."""


@dataclass(eq=False)
class Seat:
    """The place of a job on the device, from its entry into a slot until it leaves the slot."""

    slot: int
    pages: Row | None = None  # None where caches are dense
    num_computed: int = 0  # tokens whose chunks are dispatched
    features: Any = None  # of the last of these tokens
    kept: Any = None  # rows of these tokens that the slot does not have yet; None where it has them
    scores: list[LogProbs] = field(default_factory=list)  # of the chunks of the prompt so far, on the device
    is_active: bool = False  # whether the row takes part in steps: its prompt is computed
    num_behind: int = 0  # plain steps since it last had drafts, whose tokens a drafter may not have been fed


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
        use: the sampling features of its steps, as `capacities.needs_of` returns them.
        is_done: whether it has ended, for whatever reason.
        error: what ended it, where its own text or row could not be made, or no token can follow.
        num_preempted: how often it gave its slot up to others, to be computed anew.
        num_cached_tokens: number of tokens of the prompt that were found in the pages of others.
        number: of its arrival; -1 before.
        seat: its place on the device; None before it enters a slot and after it leaves one.
        num_unread: number of steps with the job whose output has not been read.
        scores: log-probabilities of all chunks of the prompt, on the device; empty once they are read.
        is_scored: whether the log-probabilities of the prompt are complete or not wanted.
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
    number: int = -1
    seat: Seat | None = None
    num_unread: int = 0
    scores: list[LogProbs] = field(default_factory=list)
    is_scored: bool = False

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.use = needs_of(self.sampling)
        self.is_scored = not self.wants_prompt_log_probs

    @property
    def totals(self) -> Totals | None:
        """The counts of its steps; None before the first is read."""
        if self.counts is None:
            return None
        counts, index = self.counts
        row: Any = (np.array(x[index]) for x in counts.totals)
        return Totals(*row)

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.seat is not None

    @property
    def is_active(self) -> bool:
        """Whether its row takes part in steps."""
        seat = self.seat  # which another thread may take away
        return seat is not None and seat.is_active

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


def seat_of(job: Job) -> Seat:
    """Return the seat of a job that has a slot."""
    assert job.seat is not None, "the job has a slot"
    return job.seat


def first_of_row(log_probs: LogProbs, row: int, width: int) -> LogProbs:
    """Return a copy of the first log-probabilities of a row."""
    return jax.tree.map(lambda x: np.array(x[row, :width]), log_probs)


def joined(parts: Sequence[LogProbs], length: int) -> LogProbs:
    """Return the log-probabilities of several chunks [1, T, ...] as one, cut to a length."""
    return jax.tree.map(lambda *arrays: np.concatenate([array[0] for array in arrays])[:length], *parts)


@cache
def kinds_of(num_drafts: int, num_accepted: int, num_committed: int) -> tuple[str, ...]:
    """Return how each committed token of a step came about, as in `Piece.kind`."""
    last = "target" if num_drafts == 0 else "bonus" if num_accepted == num_drafts else "recovered"
    return (*["accepted"] * num_accepted, last)[:num_committed]
