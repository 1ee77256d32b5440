"""Acceptance rules: the arithmetic on one number per draft that decides, in kernels and in XLA, which drafts stay.

Every function is elementwise and broadcasts. In a kernel the arrays hold the drafts of one sequence, and some lanes
beyond them that nothing reads; in XLA they are [B, K].
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


class Evidence(NamedTuple):
    """Evidence for a rule: the log-probabilities of each draft."""

    log_prob: Array  # log-probability of the draft under the target
    draft_log_prob: Array  # log-probability under the draft distribution; 0 for deterministic drafts and greedy rows
    entropy: Array | None  # entropy of the target row in nats, for rules that ask for it
    lane: Array  # int32 index of the draft


def log_ratio(evidence: Evidence) -> Array:
    """Return log(target / draft) of each draft, -inf where the draft's probability is 0."""
    is_possible = evidence.draft_log_prob > -jnp.inf
    ratio = evidence.log_prob - jnp.where(is_possible, evidence.draft_log_prob, 0)
    return jnp.where(is_possible, ratio, -jnp.inf)


def accept_by_ratio(evidence: Evidence, options: Any = None) -> Array:
    """Return the acceptance probability of modified rejection sampling, min(1, target / draft)."""
    return jnp.exp(jnp.minimum(log_ratio(evidence), 0))


def accept_prefix(residual: Array, joint: Array) -> Array:
    """Return the probability at which block verification accepts a prefix that is shorter than the drafts.

    Args:
        residual: mass S of max(P * target - draft, 0) in the row after the prefix.
        joint: probability P of accepting the drafts of the prefix as a whole.

    Returns:
        S / (S + 1 - P), and 1 where that is 0 / 0.
    """
    rest = residual + (1 - joint)
    return jnp.where(rest > 0, residual / jnp.where(rest > 0, rest, 1), 1)
