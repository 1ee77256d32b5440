"""Batch expansion, which scores every prefix of a draft as a separate sequence."""

import jax
import jax.numpy as jnp

from specjax.pages import read_slots, write_slots
from specjax.scorers.mqa import fed, mqa
from specjax.types import Array, Context, Draft, Memory, Model, ModelOutput, PyTree


def batch_expansion(model: Model, context: Context, draft: Draft, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    """Score a draft by a call with K+1 copies of each sequence, where copy i is fed the first i drafts.

    It gives the output of `mqa` at K+1 times the cost. It serves models whose query tokens must not share a call with
    later drafts.

    Args:
        model: the target.
        context: the sequences; the last committed token of each has not been fed yet.
        draft: the draft, tokens [B, K].
        cache: the target's memory, or its dense cache as `model.init_cache` makes it.

    Returns:
        ModelOutput, whose logits [B, K+1, V] score the token at position context.length + j in row j, and the memory or
        cache as the copies with all drafts left it.

    Raises:
        ValueError: the draft is a tree.
    """
    if not isinstance(draft, Draft):
        raise ValueError(
            f"batch expansion copies a sequence for each prefix of a chain, and takes a Draft, got a "
            f"{type(draft).__name__}: score it with scorers.mqa"
        )
    if not isinstance(cache, Memory):
        memory = Memory(cache) if model.takes_pages else Memory(rows=cache)
        output, memory = batch_expansion(model, context, draft, memory)
        return output, memory.pools if model.takes_pages else memory.rows
    batch_size, num_draft_tokens = draft.tokens.shape
    num_copies = num_draft_tokens + 1
    slots = jax.tree.map(lambda pool: read_slots(pool, context.pages), cache.pools)
    copies = jax.tree.map(
        lambda x: jnp.repeat(x, num_copies, axis=0), (context._replace(pages=None), Memory(slots, cache.rows))
    )
    copy = jnp.tile(jnp.arange(num_copies, dtype=jnp.int32), batch_size)
    is_fed = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None] < copy[:, None]
    tokens = jnp.where(is_fed, jnp.repeat(draft.tokens, num_copies, axis=0), -1)
    output, copies = mqa(model, copies[0], Draft(tokens), copies[1])

    def last(x: jax.Array) -> jax.Array:
        return x[jnp.arange(batch_size * num_copies), copy].reshape(batch_size, num_copies, *x.shape[2:])

    whole = jax.tree.map(lambda x: x[num_draft_tokens::num_copies], copies)
    written = fed(context, draft).positions

    def keep(pool: Array, own: Array) -> Array:
        """Copy the writes of the call from the slots [B, S, ...] of each sequence to the pool."""
        index = jnp.minimum(written, own.shape[1] - 1).reshape(*written.shape, *[1] * (own.ndim - 2))
        return write_slots(pool, written, jnp.take_along_axis(own, index, axis=1), context.pages)

    return jax.tree.map(last, output), Memory(jax.tree.map(keep, cache.pools, whole.pools), whole.rows)
