"""Load and counters of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specjax.engine.jobs import Counts, Job
from specjax.engine.pages import PageStats


class Stats(NamedTuple):
    """Load of the engine now, and counters since its start. Counters never decrease."""

    num_running: int  # samples that have a slot
    num_waiting: int  # samples that wait for one
    num_finished: int  # requests that have ended, cancelled ones included
    num_tokens: int  # generated tokens whose text is certain
    num_preempted: int  # how often a running sample gave its slot up to others
    pages: PageStats | None  # of the cache, with the tokens that were looked up and found; None where it is dense
    num_prompt_tokens: int = 0  # tokens of the prompts of all requests
    num_drafts: int = 0  # how often a sample took a step with at least one draft token
    num_drafted: int = 0  # draft tokens
    num_accepted: int = 0  # accepted draft tokens
    num_accepted_at: tuple[int, ...] = ()  # accepted draft tokens at each of the K positions of a draft


@dataclass(frozen=True)
class Sums:
    """Sums over samples, of numbers that grow while a sample runs; the names are the same as in `Stats`."""

    num_tokens: int
    num_preempted: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    num_accepted_at: np.ndarray  # [K]

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(**{name: number + getattr(other, name) for name, number in vars(self).items()})

    @classmethod
    def of(cls, jobs: Sequence[Job], num_draft_tokens: int) -> "Sums":
        """Return the sums over some jobs, for drafts of K = `num_draft_tokens` tokens."""
        slots_of: dict[Counts, list[int]] = {}  # most jobs have the counts of the last step
        for job in jobs:
            if (last := job.counts) is not None:  # which another thread may replace
                slots_of.setdefault(last[0], []).append(last[1])
        totals = [(counts.totals, slots) for counts, slots in slots_of.items()]
        at = [total.accepted_at[slots].sum(axis=0) for total, slots in totals]
        return cls(
            num_tokens=sum(job.output.num_certain for job in jobs),
            num_preempted=sum(job.num_preempted for job in jobs),
            num_drafts=sum(int(total.row_steps[slots].sum()) for total, slots in totals),
            num_drafted=sum(int(total.drafted[slots].sum()) for total, slots in totals),
            num_accepted=sum(int(total.accepted[slots].sum()) for total, slots in totals),
            num_accepted_at=np.sum([np.zeros(num_draft_tokens, np.int64), *at], axis=0),
        )
