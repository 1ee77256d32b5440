"""Choose the number of draft tokens for the next steps from the acceptance rate of recent steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from specjax import proposers, theory
from specjax.proposers import DraftModel, Fallback, NGram
from specjax.types import Array, Model, Proposer, PyTree
from specjax.validation import is_integer

CHOICES = (0, 2, 4, 6, 8)  # values of K; the step is compiled once for each value that gets used
FADE = 0.9  # factor on past counts at each step; old failures fade, so drafts are tried again after some plain steps
PRIOR_RATE, PRIOR_TRIALS = 0.7, 4.0  # acceptance rate assumed at first, and the number of trials this prior weighs


def with_draft_lengths(proposer: Proposer, draft_lengths: Sequence[int]) -> dict[int, Proposer]:
    """Return for each number of draft tokens, the largest first, a proposer that makes so many.

    They share the state that the first of them makes, and may take turns from step to step.

    Args:
        proposer: a draft model, a look-up of n-grams, or a fallback of these.
        draft_lengths: the numbers, each at most the proposer's own; 0 is plain decoding.

    Raises:
        ValueError: there is no number, one is out of its range, or the proposer is of another kind.
    """
    most = proposer.num_draft_tokens
    if not draft_lengths or not all(is_integer(k) and 0 <= k <= most for k in draft_lengths):
        raise ValueError(f"draft_lengths must be one or more integers in [0, {most}], got {draft_lengths!r}")
    return {k: _with_draft_length(proposer, k) for k in sorted(set(draft_lengths), reverse=True)}


def _with_draft_length(proposer: Proposer, num_draft_tokens: int) -> Proposer:
    if num_draft_tokens == 0:
        return proposers.none()
    num_draft_tokens = min(num_draft_tokens, proposer.num_draft_tokens)
    if isinstance(proposer, DraftModel):
        return replace(proposer, num_draft_tokens=num_draft_tokens, may_pause=True)
    if isinstance(proposer, NGram):
        return replace(proposer, num_draft_tokens=num_draft_tokens)
    if isinstance(proposer, Fallback):
        return Fallback(*(_with_draft_length(each, num_draft_tokens) for each in (proposer.first, proposer.second)))
    raise ValueError(
        f"draft_lengths must be None for a proposer that is no draft model, n-gram look-up or fallback, "
        f"got {type(proposer).__name__}"
    )


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
    """Choose `theory.best_draft_length`, where a step costs a read of the target's weights and K of the draft's.

    Args:
        draft_cost: the bytes of the draft's weights on a device as a share of the target's.
        draft_lengths: the numbers of draft tokens to choose from.
    """

    draft_cost: float
    draft_lengths: tuple[int, ...] = CHOICES

    @classmethod
    def of(cls, target: Model, draft: DraftModel, draft_lengths: Sequence[int] = CHOICES) -> "BestDraftLength":
        """Return the choice for a pair of models."""
        return cls(_num_bytes(draft.model.params) / _num_bytes(target.params), tuple(draft_lengths))

    def __call__(self, num_running: int, acceptance_rate: float) -> int:
        return theory.best_draft_length(acceptance_rate, {k: 1 + k * self.draft_cost for k in self.draft_lengths})


def _num_bytes(params: PyTree) -> int:
    """Return the bytes of the parameters on one device."""

    def shape(leaf: Array) -> tuple[int, ...]:
        return leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape

    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
