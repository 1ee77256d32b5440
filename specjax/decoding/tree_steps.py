"""A step with trees of drafts: the call of the target, the history of each node, and the slots that are kept.

Node n of a tree stands in slot start + n, where node 0 is the pending token, and at the position start + depth, so
siblings share a position, never a slot. After verification the accepted nodes move to the slots of a chain.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.decoding import state_rows
from specjax.pages import locate, write_slots
from specjax.parallel import OnMesh
from specjax.sampling import Sampling, guided
from specjax.sampling import process as sampling_process
from specjax.sampling.logits import adjust, reads_token_ids, with_cut
from specjax.trees import ancestor_mask, is_node
from specjax.types import (
    NO_PAGE,
    Array,
    Categorical,
    Context,
    Draft,
    DraftTree,
    Memory,
    Model,
    ModelInput,
    PyTree,
    Verified,
)
from specjax.verifiers import core


def check_target(model: Model) -> None:
    """Raise ValueError where the cache of a target cannot keep one path of a tree."""
    if model.commit is not None or model.init_rows is not None:
        raise ValueError(
            "a target with a recurrent state takes no trees, because siblings would need states of their own, got a "
            f"DraftTree for {model!r}: use a chain, with tree=None"
        )
    has_slots = model.takes_pages or (isinstance(model.apply, OnMesh) and model.apply.has_slots)
    if not has_slots:
        raise ValueError(
            "a target must take pages to score trees, because only then its leaves are known to have the slots as "
            f"their second axis, got a DraftTree for {model!r}: set takes_pages=True, or use a chain"
        )


def fit(context: Context, draft: Draft | DraftTree) -> Draft | DraftTree:
    """Return a tree with node 0 alone in rows that are not active, or whose buffer has no slot for every node.

    A chain is returned as it is: the drafts for which the buffer has no slot come after all others.
    """
    if isinstance(draft, Draft):
        return draft
    tree = draft
    size = tree.tokens.shape[1]
    has_room = context.active & (context.length + size <= context.tokens.shape[1])
    count = size if tree.num_nodes is None else tree.num_nodes
    return tree._replace(num_nodes=jnp.where(has_room, count, 1).astype(jnp.int32))


def num_drafts(draft: Draft | DraftTree) -> Array:
    """Return the number of drafts of each row, [B] int32; of a tree, the depth of its deepest node."""
    if isinstance(draft, Draft):
        return core.num_drafts(core.canonical(draft))
    return jnp.max(jnp.where(is_node(draft), draft.depth, 0), axis=1)


def paths(tree: DraftTree, width: int) -> Array:
    """Return the tokens of the drafts on the path to each node, in order, then -1: [B, N, width] int32."""
    depth = jnp.where(ancestor_mask(tree.parents), tree.depth[:, None], 0)  # [B, N, N]
    index = jnp.arange(1, width + 1, dtype=jnp.int32)
    at = depth[..., None] == index[None, None, None]  # [B, N, N, width]
    return jnp.max(jnp.where(at, tree.tokens[:, None, :, None], -1), axis=2)


def fed(context: Context, tree: DraftTree) -> ModelInput:
    """Return the target's input in a step: the last committed token of each sequence, and its drafts."""
    start = jnp.maximum(context.length - 1, 0)[:, None]
    last = jnp.take_along_axis(context.tokens, start, axis=1)
    tokens = jnp.concatenate([last, jnp.maximum(tree.tokens[:, 1:], 0)], axis=1)
    return ModelInput(tokens, start + tree.depth, ancestor_mask(tree.parents), pages=context.pages)


def drafts_fed(context: Context, tree: DraftTree) -> ModelInput:
    """Return the input of a drafter that has been fed all committed tokens: the nodes of a tree but for node 0."""
    positions = context.length[:, None] - 1 + tree.depth[:, 1:]
    mask = ancestor_mask(tree.parents)[:, 1:, 1:]
    return ModelInput(jnp.maximum(tree.tokens[:, 1:], 0), positions, mask, pages=context.pages)


def process(
    sampling: Sampling,
    logits: Array,
    context: Context,
    draft: Draft | DraftTree,
    width: int,
    *,
    axis_name: str | None = None,
) -> Categorical:
    """Return the distributions of the token after each draft, where every node of a tree has its ancestors as history.

    Args:
        sampling: the sampling parameters of the batch.
        logits: [B, N, V], of the token after each node; [B, K+1, V] for a chain.
        context: the committed tokens.
        draft: the drafts.
        width: D, the depth of the deepest node of any tree.
        axis_name: as `sampling.process` takes it.

    Returns:
        Categorical, with logits of the given shape.
    """
    if isinstance(draft, Draft):
        return sampling_process(sampling, logits, context, draft.tokens, axis_name=axis_name)
    tree = draft
    if reads_token_ids(sampling):
        logits = adjust_nodes(sampling, logits, context, tree, width=width, axis_name=axis_name)
    return with_cut(sampling, logits, axis_name=axis_name)


def adjust_nodes(
    sampling: Sampling,
    logits: Array,
    context: Context,
    tree: DraftTree,
    nodes: np.ndarray | None = None,
    *,
    width: int | None = None,
    axis_name: str | None = None,
) -> Array:
    """Adjust the logits as if every node were a row of the batch, with the drafts on its path committed.

    `process` describes the other arguments.

    Args:
        nodes: [W] integers, the nodes that the logits [B, W, V] are of; None is all.
        width: None is N - 1.
    """
    batch_size, size, _ = logits.shape
    nodes = np.arange(size) if nodes is None else nodes
    width = tree.tokens.shape[1] - 1 if width is None else width
    rows = jnp.repeat(jnp.arange(batch_size, dtype=jnp.int32), size)
    drafts = paths(tree, width)[:, nodes].reshape(batch_size * size, width)
    depth = tree.depth[:, nodes].reshape(-1)
    own = jax.tree.map(lambda x: x[rows], context._replace(pages=None))
    index = own.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    tokens = jnp.pad(own.tokens, ((0, 0), (0, width)))
    tokens = tokens.at[jnp.arange(len(rows))[:, None], index].set(drafts)
    of_nodes = state_rows.take_sampling(sampling, lambda x: x[rows])
    if of_nodes.guide is not None and own.guided_state is not None:
        own = own._replace(guided_state=guided.advance(of_nodes.guide, own.guided_state, drafts)[:, -1])
    own = own._replace(tokens=tokens, length=own.length + depth)
    none = jnp.zeros((len(rows), 0), jnp.int32)
    adjusted = adjust(of_nodes, logits.reshape(len(rows), 1, -1), own, none, axis_name=axis_name)
    return adjusted.reshape(batch_size, size, -1)


def on_path(values: PyTree, path: Array) -> PyTree:
    """Return the leaves [B, N, ...] of the nodes of each row's path, [B, D+1, ...]."""
    rows = jnp.arange(path.shape[0])[:, None]
    return jax.tree.map(lambda x: x[rows, path], values)


def of_path(features: PyTree, target: Categorical, verified: Verified) -> tuple[PyTree, Categorical]:
    """Return the features [B, D+1, ...] and the target rows [B, D+1] that the verified tokens of a tree follow.

    The features and rows of a chain are returned as they are.
    """
    if verified.path is None:
        return features, target
    packed = distributions.pack(target)
    assert packed.rows is not None, "packed logits have rows"
    target = packed._replace(rows=jnp.take_along_axis(packed.rows, verified.path, axis=1))
    return on_path(features, verified.path), target


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
