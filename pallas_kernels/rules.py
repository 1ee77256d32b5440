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


class NodeState(NamedTuple):
    """The numbers of a node under traversal verification.

    The residual of a node after its first failed children is max(scale * target - subtracted * draft, 0).
    """

    accept: Array  # the probability of accepting the node when it is tested
    scale: Array  # factor of the target row in the residual
    subtracted: Array  # factor of the draft row in the residual
    ratio: Array  # scale / subtracted, before both are divided by the mass of the residual
    mass: Array  # the draft's mass without the failed children; 1 where drafts are deterministic

    def after_failure(self, one_hot: Array) -> tuple[Array, Array]:
        """Return the two factors of the residual after one more child failed, before they are normalised."""
        has_mass = self.mass > 0
        inverse = jnp.where(has_mass, 1 / jnp.where(has_mass, self.mass, 1), 0)
        return self.accept * self.scale, jnp.where(one_hot, 0, self.accept * self.subtracted + inverse)


def note_failure(accept: Array, scale: Array, subtracted: Array, residual: Array, mass: Array) -> NodeState:
    """Return the numbers of a node one of whose children failed.

    Args:
        accept: of the node, before the child failed.
        scale: as `NodeState.after_failure` returns it.
        subtracted: likewise.
        residual: mass S of max(scale * target - subtracted * draft, 0) without the failed children.
        mass: the draft's mass without the failed children.
    """
    has_mass = residual > 0
    norm = jnp.where(has_mass, residual, 1)
    is_scaled = has_mass & (subtracted > 0)
    return NodeState(
        accept_prefix(residual, accept),
        jnp.where(has_mass, scale / norm, 1),  # without mass the row stands for itself
        jnp.where(has_mass, subtracted / norm, 0),
        jnp.where(is_scaled, scale / jnp.where(is_scaled, subtracted, 1), 1),
        mass,
    )


def enter_sibling(parent: NodeState, ratio: Array) -> Array:
    """Return the probability with which the next sibling is entered, given target / draft of its token."""
    residual = jnp.maximum(parent.scale * ratio - parent.subtracted, 0) * parent.mass
    return jnp.where((parent.accept > 0) & (ratio > 0), jnp.minimum(parent.accept * residual, 1), 0)
