"""Commits of memories that overwriting does not correct, such as recurrent states."""

import jax.numpy as jnp

from specjax.decoding import tree_steps
from specjax.decoding.drafters import commit_of
from specjax.scorers.mqa import fed
from specjax.types import Context, Draft, DraftTree, Memory, Model, Proposer, Verified


def keep(
    model: Model,
    proposer: Proposer,
    context: Context,
    draft: Draft | DraftTree,
    verified: Verified,
    cache: Memory,
    proposer_state: Memory,
) -> tuple[Memory, Memory]:
    """Have target and proposer keep the pending token and the accepted drafts, where overwriting does not suffice."""
    commit, commit_drafter = model.commit, commit_of(proposer)
    if isinstance(draft, DraftTree):
        commit = tree_steps.compact
    if commit is None and commit_drafter is None:
        return cache, proposer_state
    inputs = fed(context, draft)
    path = verified.path
    if path is None:
        path = jnp.broadcast_to(jnp.arange(inputs.tokens.shape[1], dtype=jnp.int32), inputs.tokens.shape)
    count = jnp.where(context.active, verified.num_accepted + 1, 0).astype(jnp.int32)
    if commit is not None:
        cache = commit(cache, inputs, path, count)
    if commit_drafter is not None:
        proposer_state = commit_drafter(proposer_state, inputs, path, count)
    return cache, proposer_state
