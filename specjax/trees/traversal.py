"""Traversal verification, which tests the nodes of a sampled tree from the leaves to the root."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rules import Evidence, accept_prefix, log_ratio
from specjax import distributions
from specjax.distributions import Normalized, Residual
from specjax.parallel import shards
from specjax.trees.arrays import all_above, ancestor_mask, by_parent, first_children, next_siblings, post_order
from specjax.trees.verifier import emit, exists, from_core
from specjax.types import Array, Categorical, DraftTree, Verified
from specjax.verifiers.core import Draw, is_deterministic


class _States(NamedTuple):
    """The four numbers [B, N] of each node, and the ratio of two of them.

    The residual of a node after its first failed children is max(scale * target - subtracted * draft, 0).
    """

    accept: Array  # the probability of accepting the node when it is tested
    scale: Array  # factor of the target row in the residual
    subtracted: Array  # factor of the draft row in the residual
    ratio: Array  # scale / subtracted, before both are divided by the mass of the residual
    mass: Array  # the draft's mass without the failed children; 1 where drafts are deterministic


class _Walk(NamedTuple):
    """The state of the walk through the nodes."""

    step: Array  # [] int32, index in the post-order
    tested: Array  # [B] int32, the node whose test failed and that its parent has not noted; -1: the row is done
    node: Array  # [B] int32, the accepted node; 0 where there is none yet
    states: _States


@from_core
def traversal(
    draw: Draw,
    tree: DraftTree,
    target: Categorical,
    *,
    max_depth: int,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify a sampled tree from the leaves to the root. Lossless: the output follows the target's distribution.

    Every child must be drawn from the row of its parent in `tree.distribution`, without replacement in the order of the
    siblings, and every node that is drawn must be in the tree. The number of children of a node may depend on anything
    that was drawn before them, and not on the children. A tree of temperature 0 may hold any distinct siblings.

    Nodes are tested in post-order, each after its descendants and its earlier siblings, and the path to the first node
    that is accepted is kept. The root has a = 1 and is always accepted. Another node has a = min(1, a_parent *
    residual(x) / draft(x)), where residual is the target row of its parent, and draft the draft row of its parent
    without the failed siblings. When a child fails, the residual of the parent becomes max(a * residual - draft, 0),
    normalised, and its a becomes S / (S + 1 - a), where S is the mass before it is normalised. The token after the path
    is drawn from the residual of the last node.

    On a chain this is `verifiers.block` with the same coins. On a tree it accepts on average at least as many drafts as
    rejection from the root to the leaves. Each failed node costs one pass over its parent's two rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Categorical, DraftTree, trees
        >>> draft = Categorical.from_probs(jnp.array([[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]]))
        >>> nodes = jnp.array([[0, 1, 0]]), jnp.array([[-1, 0, 0]]), jnp.array([[0, 1, 1]])
        >>> logits = jnp.log(jnp.array([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]]))
        >>> verified = trees.traversal(jax.random.key(0), DraftTree(*nodes, distribution=draft), logits, max_depth=1)
        >>> verified.tokens, verified.path
        (Array([[0, 1]], dtype=int32), Array([[0, 2]], dtype=int32))

    References:
        Weng et al., Traversal Verification for Speculative Tree Decoding, arXiv:2505.12398, Algorithm 1.
    """
    num_nodes = tree.tokens.shape[1]
    if tree.distribution is None and num_nodes > 1:
        raise ValueError(
            "tree.distribution must be the Categorical that the nodes were drawn from, got None: trees.match takes "
            "trees without a distribution"
        )
    normalized = distributions.normalize(target, axis_name=axis_name)
    tree = _reachable(tree, normalized)
    ancestors = ancestor_mask(tree.parents)
    if tree.distribution is None:
        node = jnp.zeros(tree.tokens.shape[0], jnp.int32)
        residual = Residual(distributions.take_row(normalized, node))
    else:
        drafted = distributions.normalize_drafts(tree.distribution, axis_name)
        node, residual = _traverse(draw, tree, ancestors, normalized, drafted, max_depth)
    token = draw.pick(residual)
    return emit(tree, node, token, normalized if log_probs else None, max_depth=max_depth, ancestors=ancestors)


def _reachable(tree: DraftTree, target: Normalized) -> DraftTree:
    """Return the tree without the nodes behind a target row without mass, as it can follow a stop token."""
    has_mass, temperature = jnp.isfinite(target.log_mass), target.distribution.temperature
    if temperature is not None:
        has_mass |= temperature[:, None] == 0
    keep = all_above(by_parent(has_mass, tree.parents) | (tree.parents < 0), ancestor_mask(tree.parents))
    return tree._replace(tokens=jnp.where(keep | (tree.parents < 0), tree.tokens, -1))


def _traverse(
    draw: Draw, tree: DraftTree, ancestors: Array, target: Normalized, draft: Normalized, max_depth: int
) -> tuple[Array, Residual]:
    """Return the accepted node [B] of each row and the residual of the token after it."""
    there, num_nodes = exists(tree), tree.tokens.shape[1]
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None]
    parents = jnp.maximum(tree.parents, 0)
    one_hot = is_deterministic(tree)
    if target.distribution.temperature is not None:
        one_hot |= target.distribution.temperature == 0
    ratio = _log_ratios(tree, parents, one_hot, target, draft)
    following = next_siblings(tree.parents, there)
    is_first = index == jnp.take_along_axis(first_children(tree.parents, there), parents, axis=1)
    # Nodes that are entered together: a node, its first child, the first child of that, and so on, from the head on.
    head = jnp.max(jnp.where(ancestors & ~is_first[:, None], index[:, None], 0), axis=-1)
    log_cap, log_run = _along_first_children(ratio, parents, head, max_depth)
    order = post_order(tree.parents, there, ancestors)

    def of(rows: Array, node: Array) -> Array:
        return jnp.take_along_axis(rows, jnp.maximum(node, 0)[:, None], axis=1)[:, 0]

    def test(step: Array, node: Array, is_open: Array, states: _States) -> tuple[Array, Array]:
        """Flip the coin of the next node: return the node if it failed, else -1, and the accepted node."""
        tested = jnp.where(step < num_nodes, of(order, jnp.broadcast_to(step, node.shape)), 0)
        coin = draw.flip(of(states.accept, tested)[:, None], node=tested[:, None])[:, 0]
        is_accepted = (tested <= 0) | coin  # the root is accepted always
        node = jnp.where(is_open & is_accepted, jnp.maximum(tested, 0), node)
        return jnp.where(is_open & ~is_accepted, tested, -1), node

    def fail(walk: _Walk) -> _Walk:
        child, states = walk.tested, walk.states
        parent = of(parents, child)
        siblings = (parents == parent[:, None]) & (index <= child[:, None]) & there & (index > 0)
        failed = jnp.where(siblings, tree.tokens, -1)
        own = jax.tree.map(lambda field: of(field, parent), states)
        scale = own.accept * own.scale
        inverse = jnp.where(own.mass > 0, 1 / jnp.where(own.mass > 0, own.mass, 1), 0)
        subtracted = jnp.where(one_hot, 0, own.accept * own.subtracted + inverse)
        wanted, drafted = distributions.take_row(target, parent), distributions.take_row(draft, parent)
        residual, rest = _masses(wanted, drafted, scale, subtracted, failed, one_hot)
        new = _noted(own.accept, scale, subtracted, residual, jnp.where(one_hot, 1, rest))
        sibling = of(following, child)
        log_accept = jnp.log(_entered(new, jnp.exp(of(ratio, sibling))))
        is_parent = (index == parent[:, None]) & (child >= 0)[:, None]
        is_entered = (head == sibling[:, None]) & (child >= 0)[:, None]
        states = jax.tree.map(lambda field, value: jnp.where(is_parent, value[:, None], field), states, new)
        accept = jnp.exp(jnp.minimum(log_cap, log_accept[:, None] + log_run))
        states = states._replace(accept=jnp.where(is_entered, accept, states.accept))
        tested, node = test(walk.step + 1, walk.node, child >= 0, states)
        return _Walk(walk.step + 1, tested, node, states)

    one = jnp.ones_like(log_cap)
    states = _States(jnp.exp(log_cap), one, 0 * one, one, one)
    step, node = jnp.zeros((), jnp.int32), jnp.zeros(tree.tokens.shape[0], jnp.int32)
    tested, node = test(step, node, jnp.ones(node.shape, bool), states)
    walk = _Walk(step, tested, node, states)
    walk = draw.loop(lambda walk: jnp.any(walk.tested >= 0), fail, walk, num_nodes - 1)
    node = walk.node
    children = (parents == node[:, None]) & there & (index > 0)
    return node, Residual(
        distributions.take_row(target, node),
        distributions.take_row(draft, node),
        has_draft=jnp.any(children, axis=1) & ~one_hot,
        scale=of(walk.states.ratio, node),
        without=jnp.where(children & one_hot[:, None], tree.tokens, -1),
    )


def _log_ratios(tree: DraftTree, parents: Array, one_hot: Array, target: Normalized, draft: Normalized) -> Array:
    """Return log(target / draft probability) [B, N] of each node's token; deterministic drafts have probability 1."""
    log_prob, draft_log_prob = (
        distributions.token_log_prob(distributions.take_row(rows, parents), tree.tokens) for rows in (target, draft)
    )
    draft_log_prob = jnp.where(one_hot[:, None], 0, draft_log_prob)
    return log_ratio(Evidence(log_prob, draft_log_prob, None, jnp.zeros_like(parents)))


def _along_first_children(ratio: Array, parents: Array, head: Array, max_depth: int) -> tuple[Array, Array]:
    """Return two logarithms [B, N], by which a node is entered with min(exp(cap), a * exp(run)).

    Here a is the probability at the head of the node, at which cap is 0 and run is 0. Every node between them is a
    first child, which multiplies a with its ratio and bounds the product by 1.
    """
    is_head = head == jnp.arange(head.shape[1], dtype=jnp.int32)[None]
    cap = run = jnp.zeros_like(ratio)
    for _ in range(max_depth):
        cap, run = (jnp.where(is_head, 0, by_parent(each, parents) + ratio) for each in (cap, run))
        cap = jnp.minimum(cap, 0)
    return cap, run


def _masses(
    target: Normalized, draft: Normalized, scale: Array, subtracted: Array, failed: Array, one_hot: Array
) -> tuple[Array, Array]:
    """Return two masses [B] of one row per sequence without the tokens `failed` [B, N], in one pass.

    They are the mass of max(scale * target - subtracted * draft, 0), and the mass of the draft. The draft's row is not
    read where `one_hot` [B] is true.
    """
    size = target.distribution.logits.shape[-1]
    ids = shards.first_id(size, target.axis_name) + jnp.arange(size, dtype=jnp.int32)[None]
    keep = ~distributions.is_among(ids, failed)
    drafted = jnp.where(keep & ~one_hot[:, None], distributions.probs(draft)[:, 0], 0)
    wanted = jnp.where(keep, distributions.probs(target)[:, 0], 0)
    difference = scale[:, None] * wanted - subtracted[:, None] * drafted
    sums = jnp.sum(jnp.maximum(difference, 0), axis=-1), jnp.sum(drafted, axis=-1)
    residual, rest = shards.total(jnp.stack(sums), target.axis_name)
    return residual, rest


def _noted(accept: Array, scale: Array, subtracted: Array, residual: Array, mass: Array) -> _States:
    """Return the numbers [B] of a node one of whose children failed, given the residual's mass S as `residual`."""
    has_mass = residual > 0
    norm = jnp.where(has_mass, residual, 1)
    is_scaled = has_mass & (subtracted > 0)
    return _States(
        accept_prefix(residual, accept),
        jnp.where(has_mass, scale / norm, 1),  # without mass the row stands for itself
        jnp.where(has_mass, subtracted / norm, 0),
        jnp.where(is_scaled, scale / jnp.where(is_scaled, subtracted, 1), 1),
        mass,
    )


def _entered(parent: _States, ratio: Array) -> Array:
    """Return the probability [B] with which a later sibling is entered, given target / draft of its token."""
    residual = jnp.maximum(parent.scale * ratio - parent.subtracted, 0) * parent.mass
    return jnp.where((parent.accept > 0) & (ratio > 0), jnp.minimum(parent.accept * residual, 1), 0)
