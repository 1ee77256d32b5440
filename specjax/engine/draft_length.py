"""Choose the number of draft tokens for the next steps from the acceptance rate of recent steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from specjax import theory
from specjax.decoding.drafters import with_num_draft_tokens
from specjax.types import Array, Model, Proposer, PyTree
from specjax.validation import is_integer

CHOICES = (0, 2, 4, 6, 8)  # values of K; the step is compiled once for each value that gets used
FADE = 0.9  # factor on past counts at each step; old failures fade, so drafts are tried again after some plain steps
PRIOR_RATE, PRIOR_TRIALS = 0.7, 4.0  # acceptance rate assumed at first, and the number of trials this prior weighs


def with_draft_lengths(proposer: Proposer, draft_lengths: Sequence[int]) -> dict[int, Proposer]:
    """Return for each number of draft tokens, the largest first, a proposer that makes so many.

    They share the state that the first of them makes, and may take turns from step to step.

    Args:
        proposer: a proposer with the method `with_num_draft_tokens`, as all built-in proposers are.
        draft_lengths: the numbers, each at most the proposer's own; 0 is plain decoding.

    Raises:
        ValueError: there is no number, one is out of its range, or the proposer does not have the method.
    """
    most = proposer.num_draft_tokens
    if not draft_lengths or not all(is_integer(k) and 0 <= k <= most for k in draft_lengths):
        raise ValueError(f"draft_lengths must be one or more integers in [0, {most}], got {draft_lengths!r}")
    lengths = sorted(set(draft_lengths), reverse=True)
    return {k: with_num_draft_tokens(proposer, k, may_pause=True) for k in lengths}


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


@dataclass(frozen=True)
class BestDraftLength:
    """Choose `theory.best_draft_length`, where a step costs a read of the target's weights and of the draft's.

    Args:
        step_costs: for each number of draft tokens to choose from, the bytes of the weights that a step reads on a
            device, as a multiple of the target's.
    """

    step_costs: Mapping[int, float]

    @classmethod
    def of(cls, target: Model, proposer: Proposer, draft_lengths: Sequence[int] = CHOICES) -> "BestDraftLength":
        """Return the choice for a target and a proposer, among numbers that the proposer can make.

        Args:
            target: the target.
            proposer: a proposer with the method `with_num_draft_tokens`.
            draft_lengths: the numbers of draft tokens to choose from.
        """
        proposers, target_bytes = with_draft_lengths(proposer, draft_lengths), _num_bytes(target.params)
        costs = {k: _num_bytes(getattr(each, "weights_read", each)) / target_bytes for k, each in proposers.items()}
        return cls({k: 1 + cost for k, cost in costs.items()})

    def __call__(self, num_running: int, acceptance_rate: float) -> int:
        return theory.best_draft_length(acceptance_rate, self.step_costs)


def choices(proposer: Proposer) -> tuple[int, ...]:
    """Return the `CHOICES` below the number of drafts that a proposer makes, and that number, at most the largest."""
    most = min(proposer.num_draft_tokens, max(CHOICES))
    return (*(k for k in CHOICES if k < most), most)


def _num_bytes(params: PyTree) -> int:
    """Return the bytes of the parameters on one device."""

    def shape(leaf: Array) -> tuple[int, ...]:
        return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape

    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
