"""Traversal verification, which tests the nodes of a sampled tree from the leaves to the root."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rules import Evidence, NodeState, enter_sibling, log_ratio, note_failure
from pallas_kernels.traverse import Density, Nodes, traverse
from specjax import distributions
from specjax.distributions import Normalized, Residual
from specjax.keys import ACCEPT, stream, uniform
from specjax.operations.dispatch import as_rows
from specjax.parallel import shards
from specjax.trees.arrays import (
    all_above,
    ancestor_mask,
    by_parent,
    first_children,
    next_siblings,
    post_order,
    previous_siblings,
)
from specjax.trees.verifier import emit, exists, from_core
from specjax.types import Array, Categorical, DraftTree, Verified
from specjax.verifiers.core import Draw, KeyDraw, is_deterministic


class _Plan(NamedTuple):
    """The facts about the nodes that the walk reads, arrays [B, N] but for `one_hot`."""

    tokens: Array  # int32
    parents: Array  # int32, not negative
    exists: Array  # bool, as `trees.verifier.exists` returns it
    order: Array  # int32, the nodes in post-order, then -1
    next_sibling: Array  # int32, -1 for the last
    head: Array  # int32, the first of the nodes that are entered together, each but the first a first child
    log_ratio: Array  # log(target / draft probability) of the node's token
    log_cap: Array  # a node is entered with min(exp(log_cap), a * exp(log_run)), where its head is entered with a
    log_run: Array
    one_hot: Array  # [B] bool: drafts have probability 1, and the draft's rows are not read


# The accepted node [B] of each row, and the ratio of the factors of its residual [B].
_Accepted = tuple[Array, Array]


class _Walk(NamedTuple):
    """The state of the walk through the nodes, whose numbers are [B, N]."""

    step: Array  # [] int32, index in the post-order
    tested: Array  # [B] int32, the node whose test failed and that its parent has not noted; -1: the row is done
    node: Array  # [B] int32, the accepted node; 0 where there is none yet
    states: NodeState


def _kernel(
    keys: Array,
    tree: DraftTree,
    target: Categorical,
    *,
    max_depth: int,
    interpret: bool,
    log_probs: bool = False,
) -> Verified:
    index = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    uniforms = uniform(stream(keys[:, :1], ACCEPT, jnp.maximum(index - 1, 0)))

    def walk(plan: _Plan, target: Normalized, draft: Normalized) -> _Accepted:
        nodes = Nodes(
            plan.tokens,
            plan.parents,
            plan.order,
            plan.next_sibling,
            previous_siblings(plan.parents, plan.exists),
            plan.head,
            plan.log_ratio,
            plan.log_cap,
            plan.log_run,
            uniforms,
            plan.one_hot.astype(jnp.int32),
        )
        return traverse(nodes, _density(target), _density(draft), interpret=interpret)

    return _verify(KeyDraw(keys), walk, tree, target, max_depth=max_depth, log_probs=log_probs)


def _density(normalized: Normalized) -> Density:
    """Return normalised rows as the kernel reads them."""
    log_mass = jnp.where(normalized.log_mass == -jnp.inf, 0, normalized.log_mass)
    rows = as_rows(normalized.distribution._replace(log_normalizer=None))
    return Density(rows, normalized.shift, log_mass, normalized.argmax)


@partial(from_core, kernel=_kernel)
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
    walk = partial(_walk, draw)
    return _verify(draw, walk, tree, target, max_depth=max_depth, log_probs=log_probs, axis_name=axis_name)


def _verify(
    draw: Draw,
    walk: Callable[[_Plan, Normalized, Normalized], _Accepted],
    tree: DraftTree,
    target: Categorical,
    *,
    max_depth: int,
    log_probs: bool,
    axis_name: str | None = None,
) -> Verified:
    """Verify a tree, given the function that walks through its nodes."""
    if tree.distribution is None and tree.tokens.shape[1] > 1:
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
        plan = _plan(tree, ancestors, normalized, drafted, max_depth)
        node, ratio = walk(plan, normalized, drafted)
        residual = _residual(plan, node, ratio, normalized, drafted)
    token = draw.pick(residual)
    return emit(tree, node, token, normalized if log_probs else None, max_depth=max_depth, ancestors=ancestors)


def _reachable(tree: DraftTree, target: Normalized) -> DraftTree:
    """Return the tree without the nodes behind a target row without mass, as it can follow a stop token."""
    has_mass, temperature = jnp.isfinite(target.log_mass), target.distribution.temperature
    if temperature is not None:
        has_mass |= temperature[:, None] == 0
    keep = all_above(by_parent(has_mass, tree.parents) | (tree.parents < 0), ancestor_mask(tree.parents))
    return tree._replace(tokens=jnp.where(keep | (tree.parents < 0), tree.tokens, -1))


def _plan(tree: DraftTree, ancestors: Array, target: Normalized, draft: Normalized, max_depth: int) -> _Plan:
    """Return the facts about the nodes that the walk reads."""
    there = exists(tree)
    index = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    parents = jnp.maximum(tree.parents, 0)
    one_hot = is_deterministic(tree)
    if target.distribution.temperature is not None:
        one_hot |= target.distribution.temperature == 0
    ratio = _log_ratios(tree, parents, one_hot, target, draft)
    is_first = index == jnp.take_along_axis(first_children(tree.parents, there), parents, axis=1)
    head = jnp.max(jnp.where(ancestors & ~is_first[:, None], index[:, None], 0), axis=-1)
    log_cap, log_run = _along_first_children(ratio, parents, head, max_depth)
    order, following = post_order(tree.parents, there, ancestors), next_siblings(tree.parents, there)
    return _Plan(tree.tokens, parents, there, order, following, head, ratio, log_cap, log_run, one_hot)


def _of(rows: Array, node: Array) -> Array:
    """Return the entry [B] of one node of each row in `rows` [B, N]; -1 gets the entry of node 0."""
    return jnp.take_along_axis(rows, jnp.maximum(node, 0)[:, None], axis=1)[:, 0]


def _walk(draw: Draw, plan: _Plan, target: Normalized, draft: Normalized) -> _Accepted:
    """Walk through the nodes by XLA, which takes one pass over two rows of each sequence for each failed node."""
    num_nodes, one_hot = plan.tokens.shape[1], plan.one_hot
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None]

    def test(step: Array, node: Array, is_open: Array, states: NodeState) -> tuple[Array, Array]:
        """Flip the coin of the next node: return the node if it failed, else -1, and the accepted node."""
        tested = jnp.where(step < num_nodes, _of(plan.order, jnp.broadcast_to(step, node.shape)), 0)
        coin = draw.flip(_of(states.accept, tested)[:, None], node=tested[:, None])[:, 0]
        is_accepted = (tested <= 0) | coin  # the root is accepted always
        node = jnp.where(is_open & is_accepted, jnp.maximum(tested, 0), node)
        return jnp.where(is_open & ~is_accepted, tested, -1), node

    def fail(walk: _Walk) -> _Walk:
        child = walk.tested
        parent = _of(plan.parents, child)
        siblings = (plan.parents == parent[:, None]) & (index <= child[:, None]) & plan.exists & (index > 0)
        failed = jnp.where(siblings, plan.tokens, -1)
        own = jax.tree.map(lambda field: _of(field, parent), walk.states)
        scale, subtracted = own.after_failure(one_hot)
        wanted, drafted = distributions.take_row(target, parent), distributions.take_row(draft, parent)
        residual, rest = _masses(wanted, drafted, scale, subtracted, failed, one_hot)
        new = note_failure(own.accept, scale, subtracted, residual, jnp.where(one_hot, 1, rest))
        sibling = _of(plan.next_sibling, child)
        log_accept = jnp.log(enter_sibling(new, jnp.exp(_of(plan.log_ratio, sibling))))
        is_parent = (index == parent[:, None]) & (child >= 0)[:, None]
        is_entered = (plan.head == sibling[:, None]) & (child >= 0)[:, None]
        states = jax.tree.map(lambda field, value: jnp.where(is_parent, value[:, None], field), walk.states, new)
        accept = jnp.exp(jnp.minimum(plan.log_cap, log_accept[:, None] + plan.log_run))
        states = states._replace(accept=jnp.where(is_entered, accept, states.accept))
        tested, node = test(walk.step + 1, walk.node, child >= 0, states)
        return _Walk(walk.step + 1, tested, node, states)

    one = jnp.ones_like(plan.log_cap)
    states = NodeState(jnp.exp(plan.log_cap), one, 0 * one, one, one)
    step, node = jnp.zeros((), jnp.int32), jnp.zeros(one.shape[0], jnp.int32)
    tested, node = test(step, node, jnp.ones(node.shape, bool), states)
    walk = _Walk(step, tested, node, states)
    walk = draw.loop(lambda walk: jnp.any(walk.tested >= 0), fail, walk, num_nodes - 1)
    return walk.node, _of(walk.states.ratio, walk.node)


def _residual(plan: _Plan, node: Array, ratio: Array, target: Normalized, draft: Normalized) -> Residual:
    """Return the residual that the token after the accepted node is drawn from."""
    index = jnp.arange(plan.tokens.shape[1], dtype=jnp.int32)[None]
    children = (plan.parents == node[:, None]) & plan.exists & (index > 0)
    return Residual(
        distributions.take_row(target, node),
        distributions.take_row(draft, node),
        has_draft=jnp.any(children, axis=1) & ~plan.one_hot,
        scale=ratio,
        without=jnp.where(children & plan.one_hot[:, None], plan.tokens, -1),
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
