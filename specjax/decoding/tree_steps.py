"""A step with trees of drafts: the call of the target, the history of each node, and the slots that are kept.

Node n of a tree stands in slot start + n, where node 0 is the pending token, and at the position start + depth, so
siblings share a position, never a slot. After verification the accepted nodes move to the slots of a chain.
"""

import jax
import jax.numpy as jnp

from specjax.pages import locate, write_slots
from specjax.trees import ancestor_mask
from specjax.types import NO_PAGE, Array, Context, DraftTree, Memory, Model, ModelInput, PyTree


def check_target(model: Model) -> None:
    """Raise ValueError where the cache of a target cannot keep one path of a tree."""
    if model.commit is not None or model.init_rows is not None:
        raise ValueError(
            "a target with a recurrent state takes no trees, because siblings would need states of their own, got a "
            f"DraftTree for {model!r}: use a chain, with tree=None"
        )
    if not model.takes_pages:
        raise ValueError(
            "a target must take pages to score trees, because only then its leaves are known to have the slots as "
            f"their second axis, got a DraftTree for {model!r}: set takes_pages=True, or use a chain"
        )


def fed(context: Context, tree: DraftTree) -> ModelInput:
    """Return the target's input in a step: the last committed token of each sequence, and its drafts."""
    start = jnp.maximum(context.length - 1, 0)[:, None]
    last = jnp.take_along_axis(context.tokens, start, axis=1)
    tokens = jnp.concatenate([last, jnp.maximum(tree.tokens[:, 1:], 0)], axis=1)
    return ModelInput(tokens, start + tree.depth, ancestor_mask(tree.parents), pages=context.pages)


def on_path(values: PyTree, path: Array) -> PyTree:
    """Return the leaves [B, N, ...] of the nodes of each row's path, [B, D+1, ...]."""
    rows = jnp.arange(path.shape[0])[:, None]
    return jax.tree.map(lambda x: x[rows, path], values)


def compact(memory: Memory, inputs: ModelInput, path: Array, count: Array) -> Memory:
    """Move the slots of the accepted nodes to the slots of a chain; this is `Model.commit` where overwriting suffices.

    The positions of the nodes are their depths, so keys are turned as they must be. The next call overwrites the slots
    after the path before a token sees them.

    Args:
        memory: after the call that fed the tree.
        inputs: of this call.
        path: [B, D+1] int32, indices of its tokens, increasing from path[:, 0] = 0.
        count: [B] int32, number of tokens that stay.
    """
    start, index = inputs.positions[:, :1], jnp.arange(1, path.shape[1], dtype=jnp.int32)[None]
    is_moved = (index < count[:, None]) & (path[:, 1:] != index)
    source, target = start + path[:, 1:], jnp.where(is_moved, start + index, NO_PAGE)

    def move(pool: Array) -> Array:
        values = pool.at[locate(pool, source, inputs.pages)].get(mode="fill", fill_value=0)
        return write_slots(pool, target, values, inputs.pages)

    return Memory(jax.tree.map(move, memory.pools), memory.rows)
