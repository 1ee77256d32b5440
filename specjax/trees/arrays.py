"""The relations between the nodes of a `DraftTree`, as arrays that are computed in jit without a loop."""

import jax.numpy as jnp

from specjax import distributions
from specjax.types import Array, Draft, DraftTree


def of_chain(draft: Draft, last_tokens: Array) -> DraftTree:
    """Return a draft as a tree in which every node has one child: draft i is node i + 1.

    Args:
        draft: K drafts a row.
        last_tokens: [B] int32, the last committed token of each row.

    Returns:
        A tree of N = K + 1 nodes.

    Example:
        >>> import jax.numpy as jnp
        >>> from specjax import Draft, trees
        >>> trees.of_chain(Draft(jnp.array([[5, 3]])), jnp.array([7])).parents
        Array([[-1,  0,  1]], dtype=int32)
    """
    num_draft_tokens = draft.tokens.shape[1]
    tokens = jnp.concatenate([last_tokens[:, None], draft.tokens], axis=1).astype(jnp.int32)
    depth = jnp.broadcast_to(jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None], tokens.shape)
    num_nodes = None if draft.num_tokens is None else jnp.clip(draft.num_tokens.astype(jnp.int32), 0, None) + 1
    distribution = draft.distribution if num_draft_tokens else None
    if distribution is not None:
        distribution = distributions.pack(distribution)
        assert distribution.rows is not None, "packed logits have rows"
        distribution = distribution._replace(rows=jnp.pad(distribution.rows, ((0, 0), (0, 1)), mode="edge"))
    return DraftTree(tokens, depth - 1, depth, num_nodes, distribution)


def ancestor_mask(parents: Array) -> Array:
    """Return which nodes [B, N, N] bool are node n or stand above it: entry (b, n, m) is about node m.

    This is the mask of a call that feeds the nodes to the target (`ModelInput.mask`).

    Args:
        parents: [B, N] int32, -1 for node 0.
    """
    num_nodes = parents.shape[1]
    above = jnp.clip(parents, 0, num_nodes - 1)
    node = jnp.arange(num_nodes, dtype=jnp.int32)
    mask = jnp.broadcast_to(node[None, :, None] == node[None, None], (*parents.shape, num_nodes))
    for _ in range(max(num_nodes - 1, 1).bit_length()):  # each round doubles the number of ancestors that are known
        mask = mask | jnp.take_along_axis(mask, above[..., None], axis=1)
        above = jnp.take_along_axis(above, above, axis=1)
    return mask


def depths(parents: Array) -> Array:
    """Return the number [B, N] int32 of nodes above each node, given the parents [B, N]."""
    return jnp.sum(ancestor_mask(parents), axis=-1, dtype=jnp.int32) - 1


def is_node(tree: DraftTree, max_depth: int | None = None) -> Array:
    """Return which entries [B, N] bool are nodes of the tree.

    Entries from `num_nodes` on are none, nor are those with a negative token, those that are deeper than `max_depth`,
    and the descendants of all of them.
    """
    node = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    own = (tree.tokens >= 0) | (node == 0)
    if tree.num_nodes is not None:
        own &= node < jnp.maximum(tree.num_nodes, 1)[:, None]
    if max_depth is not None:
        own &= tree.depth <= max_depth
    return all_above(own, ancestor_mask(tree.parents))


def all_above(holds: Array, ancestors: Array) -> Array:
    """Return for which nodes [B, N] bool `holds` is true, and true for all nodes above them.

    Args:
        holds: [B, N] bool.
        ancestors: [B, N, N] bool, as `ancestor_mask` returns them.
    """
    return ~jnp.any(ancestors & ~holds[:, None, :], axis=-1)


def siblings_after(parents: Array, exists: Array) -> Array:
    """Return for node n which nodes m [B, N, N] bool are later siblings that exist."""
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)
    is_later = node[None, None] > node[None, :, None]
    return (parents[:, None, :] == parents[:, :, None]) & is_later & exists[:, None, :] & (node > 0)[None, :, None]


def siblings_before(parents: Array, exists: Array) -> Array:
    """Return for node n which nodes m [B, N, N] bool are earlier siblings that exist."""
    return jnp.swapaxes(siblings_after(parents, exists), 1, 2) & exists[:, None, :]


def first_children(parents: Array, exists: Array) -> Array:
    """Return the first child [B, N] int32 of each node that exists, -1 where it has none."""
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)[None, :, None]
    return _first((parents[:, None, :] == node) & exists[:, None, :])


def next_siblings(parents: Array, exists: Array) -> Array:
    """Return the next sibling [B, N] int32 of each node that exists, -1 where it is the last."""
    return _first(siblings_after(parents, exists))


def previous_siblings(parents: Array, exists: Array) -> Array:
    """Return the previous sibling [B, N] int32 of each node that exists, -1 where it is the first."""
    earlier = siblings_before(parents, exists)
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(earlier, node[None, None], -1), axis=-1)


def _first(found: Array) -> Array:
    """Return the first index at which the last axis is true, -1 where it is nowhere."""
    return jnp.where(jnp.any(found, axis=-1), jnp.argmax(found, axis=-1), -1).astype(jnp.int32)


def by_parent(rows: Array, parents: Array) -> Array:
    """Return the entry [B, N] of each node's parent in `rows` [B, N]; node 0 gets its own."""
    return jnp.take_along_axis(rows, jnp.maximum(parents, 0), axis=1)


def deepest(depth: Array, reached: Array) -> Array:
    """Return the deepest node [B] int32 of those that are reached [B, N] bool, the first where several are."""
    return jnp.argmax(jnp.where(reached, depth, -1), axis=1).astype(jnp.int32)


def path_to(depth: Array, ancestors: Array, node: Array, max_depth: int) -> Array:
    """Return the path [B, D+1] int32 from node 0 to `node` [B], with 0 after that node."""
    above = jnp.take_along_axis(ancestors, node[:, None, None], axis=1)
    place = jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :, None]
    index = jnp.arange(depth.shape[1], dtype=jnp.int32)[None, None]
    return jnp.sum(jnp.where(above & (depth[:, None] == place), index, 0), axis=-1, dtype=jnp.int32)


def post_order(parents: Array, exists: Array, ancestors: Array) -> Array:
    """Return the nodes [B, N] int32 in the order in which each follows its descendants and its earlier siblings.

    Node 0 is the last. Entries that do not exist follow as -1.
    """
    num_nodes = parents.shape[1]
    real = ancestors & exists[..., None]
    size = jnp.sum(real, axis=1, dtype=jnp.int32)  # of the part of the tree that hangs on each node, itself included
    earlier = siblings_before(parents, exists)
    before = jnp.sum(jnp.where(earlier, size[:, None, :], 0), axis=-1, dtype=jnp.int32)
    place = size - 1 + jnp.sum(jnp.where(ancestors, before[:, None, :], 0), axis=-1, dtype=jnp.int32)
    is_there = (place[:, None, :] == jnp.arange(num_nodes, dtype=jnp.int32)[None, :, None]) & exists[:, None, :]
    return _first(is_there)
