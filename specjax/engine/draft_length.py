"""Choose the number of draft tokens of the next step from the acceptance of drafts in earlier steps.

A choice reads counts of earlier steps alone, and of each row only up to its first rejection: nothing that the drafts of
the coming step could have changed.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np

from specjax.decoding.drafters import num_fed, with_num_draft_tokens, with_tree
from specjax.proposers import DraftModel, WithinBudget
from specjax.theory import StepTimes
from specjax.types import Proposer
from specjax.validation import is_integer, is_iterable

CHOICES = (0, 2, 4, 6, 8)  # values of K; the step is compiled once for each value that gets used
FADE = 0.9  # factor on past counts at each step; old failures fade, so drafts are tried again after some plain steps
PRIOR_RATE, PRIOR_TRIALS = 0.7, 4.0  # acceptance rate assumed at first, and the number of trials this prior weighs

FEW_TRIALS = 2.0  # trials that the first assumption weighs, and that an old estimate of the first place keeps
MEMORY = 64.0  # rows and steps after which a trial weighs 1/e, but at least MEMORY_STEPS steps
MEMORY_STEPS = 8.0
PROBE_SHARE = 0.01  # of the time, for steps with drafts while plain decoding is faster
FEED_SHARE = 0.015  # of the time, for feeding a drafter before such steps the tokens of the plain steps since
HELD = 64  # tokens of a sequence whose features may wait for a drafter
FED_IN_PROBE = 16.0  # tokens that a drafter, left behind by plain steps, is fed in about the time that drafts take


def with_draft_lengths(proposer: Proposer, draft_lengths: Sequence[int]) -> dict[int, Proposer]:
    """Return for each number of draft tokens, the largest first, a proposer that makes so many.

    They share the state that the first of them makes, and may take turns from step to step.

    Args:
        proposer: a proposer with the method `with_num_draft_tokens`, as all built-in proposers are.
        draft_lengths: the numbers, each at most the proposer's own; 0 is plain decoding. A proposer of trees of N nodes
            has N - 1 among them. A number above its own is a tree of one node more, and the others are chains. Beside
            others a proposer of K drafts within a budget has the sum of K and `drafts_per_row` among them. A number
            above K is K and a budget, and the others are chains without a budget.

    Raises:
        ValueError: there is no number, one is out of its range, or the proposer does not have the method.
    """
    most, forms = proposer.num_draft_tokens, form_lengths(proposer, draft_lengths or ())
    chains = sorted({k for k in draft_lengths or () if k not in forms}, reverse=True)
    if not draft_lengths or not all(is_integer(k) and 0 <= k <= most for k in chains):
        raise ValueError(f"draft_lengths must be one or more integers in [0, {most}], got {draft_lengths!r}")
    if has_budget(proposer) and len(chains) > 1 and not forms:
        own = f"{largest_length(proposer)}, which stands for the {most} drafts of the proposer within its budget"
        raise ValueError(f"draft_lengths must have {own}, beside others, got {draft_lengths!r}")
    found = {k: with_num_draft_tokens(_form(proposer, k), most, may_pause=True) for k in forms}
    chain = _form(proposer, most) if forms else proposer
    return found | {k: with_num_draft_tokens(chain, k, may_pause=True) for k in chains}


def _form(proposer: Proposer, number: int) -> Proposer:
    """Return the proposer that makes the tree, or has the budget, which a number stands for; its own K is a chain."""
    most = proposer.num_draft_tokens
    if number == largest_length(proposer):
        return proposer
    if isinstance(proposer, WithinBudget):
        return replace(proposer, drafts_per_row=number - most if number > most else most)
    if number > most:
        return with_tree(proposer, number + 1, coupled=getattr(proposer, "coupled", True))
    return with_tree(proposer, None, coupled=False)


def form_lengths(proposer: Proposer, draft_lengths: Sequence[int]) -> list[int]:
    """Return the numbers that stand for trees or budgets in `with_draft_lengths`, the largest first."""
    most, largest = proposer.num_draft_tokens, largest_length(proposer)
    if largest == most or largest not in draft_lengths:
        return []
    return sorted({k for k in draft_lengths if is_integer(k) and most < k <= largest}, reverse=True)


def largest_length(proposer: Proposer) -> int:
    """Return the largest number that `with_draft_lengths` takes for a proposer."""
    if isinstance(proposer, WithinBudget) and proposer.is_shared:
        return proposer.num_draft_tokens + proposer.drafts_per_row
    return num_fed(proposer) - 1


def has_budget(proposer: Proposer) -> bool:
    """Return whether the rows of a step share a budget of verified drafts."""
    return isinstance(proposer, WithinBudget) and proposer.is_shared


def name_of_drafts(proposer: Proposer, number: int) -> str:
    """Return the name of the drafts that a number stands for in `with_draft_lengths`, for the log."""
    most = proposer.num_draft_tokens
    if number <= most:
        return f"{number} draft tokens"
    if has_budget(proposer):
        return f"{most} draft tokens, {number - most} a row verified"
    return f"a tree of {number + 1} nodes"


class DraftLength(Protocol):
    """A choice of K for each step, which counts what became of the drafts of earlier ones."""

    def choose(self, num_running: int, num_behind: int) -> int:
        """Return the K of the next step.

        Args:
            num_running: number of sequences in the step.
            num_behind: the most tokens of one of them that the drafter has not been fed, because steps were plain.
        """
        ...

    def count(self, num_drafts: np.ndarray, num_accepted: np.ndarray, length: int | None = None) -> None:
        """Count a step, given the numbers [B] of drafts and of accepted ones of its rows, and the K that was chosen."""
        ...


class RecentAcceptance:
    """Estimate how often a draft is accepted, from steps whose weight fades."""

    def __init__(self):
        self._accepted = self._trials = 0.0

    @property
    def rate(self) -> float:
        """The acceptance rate of a draft whose predecessors are accepted, in (0, 1)."""
        return (self._accepted + PRIOR_RATE * PRIOR_TRIALS) / (self._trials + PRIOR_TRIALS)

    def update(self, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Count one step, given the numbers [B] of drafts and of accepted ones of its rows."""
        accepted = int(num_accepted.sum())
        self._accepted = FADE * self._accepted + accepted
        self._trials = FADE * self._trials + accepted + int((num_accepted < num_drafts).sum())


class ByFunction:
    """Choose by a function `(num_running, acceptance_rate) -> K` of the caller."""

    def __init__(self, function: Callable[[int, float], int]):
        self._function, self._recent = function, RecentAcceptance()

    def choose(self, num_running: int, num_behind: int) -> int:
        return self._function(num_running, self._recent.rate)

    def count(self, num_drafts: np.ndarray, num_accepted: np.ndarray, length: int | None = None) -> None:
        self._recent.update(num_drafts, num_accepted)


class _Places:
    """How often the draft at each place was accepted lately, given that those before it are accepted.

    The places are few, and numbers of Python take less time than arrays, which a small model would notice.
    """

    def __init__(self, num_places: int):
        self._trials = [FEW_TRIALS, *[0.0] * num_places][:num_places]
        self._accepted = [PRIOR_RATE * trials for trials in self._trials]

    def rates(self) -> list[float]:
        """Return the rate of each place. Where a place has few trials, it is close to the rate of the place before."""
        rates, before, weight = [], 0.0, 0.0
        for accepted, trials in zip(self._accepted, self._trials, strict=True):
            before = (accepted + weight * before) / (trials + weight)
            rates.append(before)
            weight = FEW_TRIALS
        return rates

    def tokens(self) -> list[float]:
        """Return the tokens of a step with drafts at the first K places, for each K from 0 on."""
        return list(itertools.accumulate(itertools.accumulate(self.rates(), operator.mul), initial=1.0))

    def count(self, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        place = np.arange(len(self._trials))
        is_tried = place < np.minimum(num_accepted + 1, num_drafts)[:, None]
        is_accepted = place < np.minimum(num_accepted, num_drafts)[:, None]
        num_rows = max(np.count_nonzero(num_drafts), 1)
        factors = [math.exp(-min(num_rows / MEMORY, 1 / MEMORY_STEPS))] * len(self._trials)
        # The estimate of the first place stays while nothing is drafted, and weighs less and less.
        factors[:1] = [max(factors[0], min(FEW_TRIALS / trials, 1)) for trials in self._trials[:1]]
        self._trials = _faded(self._trials, factors, is_tried)
        self._accepted = _faded(self._accepted, factors, is_accepted)


class _Tokens:
    """How many tokens a row got in a step lately, where the rows of a step have other numbers of drafts."""

    def __init__(self):
        self._rows = self._accepted = 0.0

    def tokens(self) -> list[float]:
        """Return the tokens of a step, as `_Places` does for its largest K."""
        return [1 + self._accepted / self._rows]

    def count(self, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        factor = math.exp(-min(len(num_drafts) / MEMORY, 1 / MEMORY_STEPS))
        self._rows = factor * self._rows + len(num_drafts)
        self._accepted = factor * self._accepted + float(np.minimum(num_accepted, num_drafts).sum())


def _faded(counts: Sequence[float], factors: Sequence[float], is_new: np.ndarray) -> list[float]:
    """Return the counts at each place times its factor, and one more for each row [B, place] that is new."""
    new = is_new.sum(axis=0).tolist()
    return [factor * count + number for count, factor, number in zip(counts, factors, new, strict=True)]


class ByStepTimes:
    """Choose the K with the most tokens per second, by the seconds of a step and the acceptance at each place.

    Other forms, which are trees and budgets, compete with the best chain. A form is not tried where the most tokens
    that it may give would not pay. After its first step it takes turns with the other ones, for `PROBE_SHARE` of the
    time: beside a chain all seconds of a step count, beside a faster form the seconds that it loses. The best chain is
    tried beside a form in the same way.

    While plain decoding is the fastest, the smallest other K is tried from time to time, in turn with the forms, for
    `PROBE_SHARE` of the time. Before it a draft model is fed all tokens of the plain steps since, and `FEED_SHARE` of
    their time is set aside for that. A drafter that takes more for each token is not tried again in sequences that it
    has been left behind in.

    Args:
        times: the seconds of steps.
        draft_lengths: the K to choose from, as `with_draft_lengths` takes them.
        proposer: the proposer that makes the drafts.

    Attributes:
        times: the seconds of steps, which may be replaced between two choices.

    Raises:
        ValueError: the seconds of a K are missing for a number of sequences.
    """

    def __init__(self, times: StepTimes, draft_lengths: Sequence[int], proposer: Proposer):
        self._lengths = sorted(set(draft_lengths))
        for batch, seconds in times.seconds.items():
            if not set(self._lengths) <= seconds.keys():
                expected = f"the seconds of a step for each K of {self._lengths}"
                raise ValueError(f"step_times must have {expected}, got {sorted(seconds)} for {batch} sequences")
        self.times, self._most_behind = times, _most_behind(proposer)
        forms, depth = form_lengths(proposer, self._lengths), proposer.num_draft_tokens
        chains = [k for k in self._lengths if k not in forms]
        self._places = _Places(chains[-1] if chains else 0)
        is_budget = has_budget(proposer)
        self._of_forms: dict[int, _Tokens | _Places] = {k: _Tokens() if is_budget else _Places(depth) for k in forms}
        self._most_tokens = {k: 1 + (k - depth if is_budget else depth) for k in forms}
        self.allow(self._lengths)
        self._tried: set[int] = set()  # forms whose acceptance is known
        self._asked: set[int] = set()  # forms that a step was chosen to have
        self._saved = {"plain": 0.0, "chain": 0.0, "form": 0.0}  # seconds for the next try beside each of them
        self._num_tries = 0

    def allow(self, draft_lengths: Collection[int]) -> None:
        """Choose among some of the K alone from now on, such as those whose programs are ready."""
        self._chains = [k for k in self._lengths if k in draft_lengths and k not in self._of_forms]
        self._forms = [k for k in self._of_forms if k in draft_lengths]

    def rates(self) -> np.ndarray:
        """Return the acceptance rate [K] of a chain's draft at each place, given that those before it are accepted.

        Where a place has few trials, its rate is close to the rate of the place before.
        """
        return np.array(self._places.rates())

    def choose(self, num_running: int, num_behind: int) -> int:
        seconds, of_chains = self.times.at(num_running), self._places.tokens()
        tokens = {k: of_chains[k] for k in self._chains}
        tokens |= {k: self._of_forms[k].tokens()[-1] for k in self._tried}
        if not tokens:  # there is no chain, and no form has been tried
            return self._forms[0]
        chain = max(self._chains, key=lambda k: tokens[k] / seconds[k], default=None)
        best = max(tokens, key=lambda k: (tokens[k] / seconds[k], k == chain))
        speed = tokens[best] / seconds[best]
        forms = [k for k in self._forms if k != best and self._most_tokens[k] / seconds[k] > speed]
        if best == 0:
            return self._beside_plain([*self._chains[1:2], *forms], seconds, num_behind)
        if best in self._of_forms:
            others = [k for k in (chain or next(iter(self._chains[1:]), 0),) if k] + forms
            cost = {k: seconds[k] - tokens.get(k, 0) / speed for k in others}
            return self._beside("form", best, cost, seconds)
        return self._beside("chain", best, {k: seconds[k] for k in forms}, seconds)

    def _beside(self, kind: str, best: int, cost: Mapping[int, float], seconds: Mapping[int, float]) -> int:
        """Return the fastest K, or one of others where its turn has come and its cost is saved or it is a new form."""
        if not cost:
            return best
        new = [k for k in cost if k in self._of_forms and k not in self._asked]
        other = new[0] if new else list(cost)[self._num_tries % len(cost)]
        if not new and self._saved[kind] < cost[other]:
            self._saved[kind] += PROBE_SHARE * seconds[best]
            return best
        return self._try(kind, other)

    def _beside_plain(self, lengths: Sequence[int], seconds: Mapping[int, float], num_behind: int) -> int:
        """Return a K > 0 where the time that earlier plain steps have set aside allows it, and else 0."""
        if not lengths:
            return 0
        length = lengths[self._num_tries % len(lengths)]
        cost, of_drafts = (max(seconds[k] - seconds[0], 0) for k in (length, lengths[0]))
        feeding = of_drafts * min(num_behind, self._most_behind) / FED_IN_PROBE
        if self._saved["plain"] >= cost + max(feeding - FEED_SHARE * seconds[0] * num_behind, 0):
            return self._try("plain", length)
        self._saved["plain"] += PROBE_SHARE * seconds[0]
        return 0

    def _try(self, kind: str, length: int) -> int:
        self._saved[kind] = 0.0
        self._num_tries += 1
        if length in self._of_forms:
            self._asked.add(length)
        return length

    def count(self, num_drafts: np.ndarray, num_accepted: np.ndarray, length: int | None = None) -> None:
        if not len(num_drafts):  # all sequences of the step had ended
            return
        of_form = None if length is None else self._of_forms.get(length)
        if length is not None and of_form is not None:
            self._tried.add(length)
        (of_form or self._places).count(num_drafts, num_accepted)


def check_choice(
    draft_lengths: Sequence[int] | None,
    choose_draft_length: Callable[[int, float], int] | None,
    step_times: StepTimes | None,
    proposer: Proposer,
) -> tuple[Sequence[int] | None, DraftLength | None]:
    """Return the K of the steps of an engine, and the choice among them, given arguments of `Engine`.

    Without a function and a table the choice is None, and a table must be measured where there are several K.

    Raises:
        ValueError: an argument has a wrong type, the arguments exclude each other, or the table lacks a K.
    """
    given = draft_lengths
    if draft_lengths is not None:
        is_list = isinstance(draft_lengths, Collection) and is_iterable(draft_lengths)
        if not (is_list and all(map(is_integer, draft_lengths))):
            raise ValueError(f"draft_lengths must be None or a sequence of integers, got {draft_lengths!r}")
        draft_lengths = tuple(map(int, draft_lengths))
    if not (choose_draft_length is None or callable(choose_draft_length)):
        raise ValueError(f"choose_draft_length must be None or a function, got {choose_draft_length!r}")
    if step_times is not None and draft_lengths is None:
        draft_lengths = table_lengths(step_times, largest_length(proposer))
    is_chosen = draft_lengths is not None and len(set(draft_lengths)) > 1
    for name, value in (("choose_draft_length", choose_draft_length), ("step_times", step_times)):
        if value is not None and not is_chosen:
            raise ValueError(f"{name} must be None without several draft_lengths, got {value!r} and {given!r}")
    if choose_draft_length is not None and step_times is not None:
        raise ValueError("choose_draft_length must be None where step_times are given, got both")
    if choose_draft_length is not None:
        return draft_lengths, ByFunction(choose_draft_length)
    if step_times is not None and draft_lengths is not None:
        return draft_lengths, ByStepTimes(step_times, draft_lengths, proposer)
    return draft_lengths, None


def table_lengths(times: StepTimes, most: float = math.inf) -> tuple[int, ...]:
    """Return the numbers of draft tokens of a table, of a proposer that makes `most`.

    Raises:
        ValueError: the table has larger ones.
    """
    lengths = tuple(sorted({k for seconds in times.seconds.values() for k in seconds}))
    if lengths[-1] > most:
        expected = f"numbers of draft tokens that the drafter can make, at most {most}"
        raise ValueError(f"step_times must have {expected}, got {list(lengths)}")
    return lengths


def choices(proposer: Proposer) -> tuple[int, ...]:
    """Return the `CHOICES` below the number of drafts that a proposer makes, and that number, at most the largest.

    Where it has a budget, the number that stands for it comes after them.
    """
    most = min(proposer.num_draft_tokens, max(CHOICES))
    return (*(k for k in CHOICES if k < most), most, *([largest_length(proposer)] if has_budget(proposer) else []))


def _most_behind(proposer: Proposer) -> float:
    """Return the most tokens of plain steps that must be fed before drafts are made.

    A draft model is fed all of them, while features are fed after some steps in any case.
    """

    def is_model(part: Any) -> bool:
        return isinstance(part, DraftModel)

    return math.inf if any(map(is_model, jax.tree.leaves(proposer, is_leaf=is_model))) else HELD
