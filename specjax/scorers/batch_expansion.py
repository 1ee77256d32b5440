"""Batch expansion: every prefix of a draft scored as a sequence of its own."""

import jax
import jax.numpy as jnp

from specjax.scorers.mqa import mqa
from specjax.types import Context, Draft, Model, ModelOutput, PyTree


def batch_expansion(model: Model, context: Context, draft: Draft, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    """Score a draft by K+1 copies of each sequence, of which copy i is fed the drafts before i and read at its end.

    The same output as `mqa`, at K+1 times the cost, for models whose queries must not share a call with later drafts.

    Takes and returns what `mqa` does; the cache is that of the copies that were fed all drafts.
    """
    batch_size, num_draft_tokens = draft.tokens.shape
    num_copies = num_draft_tokens + 1
    context, cache = jax.tree.map(lambda x: jnp.repeat(x, num_copies, axis=0), (context, cache))
    copy = jnp.tile(jnp.arange(num_copies), batch_size)
    is_fed = jnp.arange(num_draft_tokens)[None] < copy[:, None]
    tokens = jnp.where(is_fed, jnp.repeat(draft.tokens, num_copies, axis=0), -1)
    output, cache = mqa(model, context, Draft(tokens), cache)

    def last(x: jax.Array) -> jax.Array:
        return x[jnp.arange(batch_size * num_copies), copy].reshape(batch_size, num_copies, *x.shape[2:])

    return jax.tree.map(last, output), jax.tree.map(lambda x: x[num_draft_tokens::num_copies], cache)
