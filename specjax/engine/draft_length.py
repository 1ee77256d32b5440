"""The number of drafts of the next steps, from what the steps before them accepted."""

from dataclasses import replace

import jax
import numpy as np

from specjax import metrics, proposers, theory
from specjax.metrics import Totals
from specjax.proposers import DraftModel
from specjax.types import Model, Proposer, PyTree

CHOICES = (0, 2, 4, 6, 8)  # each that is used compiles once
FADE = 0.9  # weight of what was seen, a step later: drafts that failed are tried again after some plain steps
PRIOR_RATE, PRIOR_TRIALS = 0.7, 4.0  # what the acceptance rate is taken for at first, and how many trials that is worth


class DraftLength:
    """Chooses K for a batch between chunks of steps: `theory.best_draft_length` at the recent acceptance rate.

    A choice is made from committed tokens alone, before any of the drafts that it concerns, so the output's law is the
    target's. A step is taken to cost one read of the target's weights and K of the draft's.

    Args:
        target: the target model.
        draft: its proposer, whose number of drafts is not used.
        batch_size: B.
    """

    def __init__(self, target: Model, draft: DraftModel, batch_size: int):
        cost = _num_bytes(draft.model.params) / _num_bytes(target.params)
        self._step_costs = {k: 1 + k * cost for k in CHOICES}
        self._draft = draft
        self._accepted = self._trials = 0.0
        self._totals = jax.tree.map(np.asarray, metrics.zeros(batch_size, max(CHOICES)))
        self.num_draft_tokens = self._best()

    @property
    def proposer(self) -> Proposer:
        """The proposer of the next steps; all share the state of the widest."""
        if self.num_draft_tokens == 0:
            return proposers.none()
        return replace(self._draft, num_draft_tokens=self.num_draft_tokens, may_pause=True)

    def update(self, totals: Totals) -> None:
        """Choose anew, given the totals of the batch after steps with the present choice."""
        added = jax.tree.map(np.subtract, totals, self._totals)
        num_drafts, fade = self.num_draft_tokens, FADE ** int(added.steps.max())
        accepted = int(added.accepted.sum())
        num_full = int(added.accepted_at[:, num_drafts - 1].sum()) if num_drafts else 0  # without a rejection
        self._accepted = fade * self._accepted + accepted
        self._trials = fade * self._trials + accepted + int(added.row_steps.sum()) - num_full
        self._totals = totals
        self.num_draft_tokens = self._best()

    def _best(self) -> int:
        rate = (self._accepted + PRIOR_RATE * PRIOR_TRIALS) / (self._trials + PRIOR_TRIALS)
        return theory.best_draft_length(rate, self._step_costs)


def _num_bytes(params: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))
