"""Choose the number of draft tokens for the next steps from the acceptance rate of recent steps."""

from dataclasses import replace

import jax
import numpy as np

from specjax import metrics, proposers, theory
from specjax.metrics import Totals
from specjax.proposers import DraftModel
from specjax.types import Model, Proposer, PyTree

CHOICES = (0, 2, 4, 6, 8)  # values of K; the step is compiled once for each value that gets used
FADE = 0.9  # factor on past counts at each step; old failures fade, so drafts are tried again after some plain steps
PRIOR_RATE, PRIOR_TRIALS = 0.7, 4.0  # acceptance rate assumed at first, and the number of trials this prior weighs


class DraftLength:
    """Choose K for a batch between chunks of steps: `theory.best_draft_length` at the recent acceptance rate.

    Each choice depends on committed tokens alone and precedes the drafts that it governs, so the output keeps the
    target's distribution. The cost model of a step is one read of the target's weights and K reads of the draft's.

    Args:
        target: the target model.
        draft: the proposer with the draft model; its `num_draft_tokens` is ignored.
        batch_size: number of rows B.
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
        """The proposer for the next steps. The proposers of all K share the state that was made for the largest K."""
        if self.num_draft_tokens == 0:
            return proposers.none()
        return replace(self._draft, num_draft_tokens=self.num_draft_tokens, may_pause=True)

    def update(self, totals: Totals) -> None:
        """Choose K again, given the batch's totals after a chunk of steps with the present K."""
        added = jax.tree.map(np.subtract, totals, self._totals)
        num_drafts, fade = self.num_draft_tokens, FADE ** int(added.steps.max())
        accepted = int(added.accepted.sum())
        num_full = int(added.accepted_at[:, num_drafts - 1].sum()) if num_drafts else 0  # row steps with no rejection
        self._accepted = fade * self._accepted + accepted
        self._trials = fade * self._trials + accepted + int(added.row_steps.sum()) - num_full
        self._totals = totals
        self.num_draft_tokens = self._best()

    def _best(self) -> int:
        """Return the best K at the estimated acceptance rate."""
        rate = (self._accepted + PRIOR_RATE * PRIOR_TRIALS) / (self._trials + PRIOR_TRIALS)
        return theory.best_draft_length(rate, self._step_costs)


def _num_bytes(params: PyTree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))
