"""Batch expansion, which scores every prefix of a draft as a sequence of its own."""

import jax
import jax.numpy as jnp

from specjax.scorers.mqa import mqa
from specjax.types import Context, Draft, Model, ModelOutput, PyTree


def batch_expansion(model: Model, context: Context, draft: Draft, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    """Score a draft by a call with K+1 copies of each sequence, where copy i is fed the first i drafts.

    The output is that of `mqa`, at K+1 times the cost. It serves models whose query tokens must not share a call with
    later drafts.

    Args:
        model: the target.
        context: the sequences; the last committed token of each has not been fed yet.
        draft: the draft, tokens [B, K].
        cache: the target's cache.

    Returns:
        ModelOutput, whose logits [B, K+1, V] score the token at position context.length + j in row j, and the cache of
        the copies that were fed all drafts.

    Raises:
        ValueError: the context has pages, which no copy of a sequence may write.
    """
    if context.pages is not None:
        shape = context.pages.shape
        raise ValueError(
            f"context.pages must be None for batch expansion, which copies cache rows, got a table {shape}"
        )
    batch_size, num_draft_tokens = draft.tokens.shape
    num_copies = num_draft_tokens + 1
    context, cache = jax.tree.map(lambda x: jnp.repeat(x, num_copies, axis=0), (context, cache))
    copy = jnp.tile(jnp.arange(num_copies, dtype=jnp.int32), batch_size)
    is_fed = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None] < copy[:, None]
    tokens = jnp.where(is_fed, jnp.repeat(draft.tokens, num_copies, axis=0), -1)
    output, cache = mqa(model, context, Draft(tokens), cache)

    def last(x: jax.Array) -> jax.Array:
        return x[jnp.arange(batch_size * num_copies), copy].reshape(batch_size, num_copies, *x.shape[2:])

    return jax.tree.map(last, output), jax.tree.map(lambda x: x[num_draft_tokens::num_copies], cache)
