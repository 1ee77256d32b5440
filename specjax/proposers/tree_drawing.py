"""Trees of drafts of one shape, drawn level by level from logits by the sampling parameters of each request.

The shape is fixed before a token is drawn, and every drawn token is a node. So sampled trees keep a lossless verifier
lossless. A coupled tree is for exact match: the children of a node are the tokens that come first where the logits of
the drafter get the noise with which the target draws its own token.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows import BLOCK_SIZE
from specjax import distributions
from specjax.decoding import tree_steps
from specjax.decoding.drafters import InMemory, check_tree
from specjax.keys import DRAFT, TARGET, gumbel, stream
from specjax.proposers.drawing import Reduced, draft_sampling, last_token, widen
from specjax.sampling import Sampling
from specjax.sampling.logits import reads_token_ids, with_cut
from specjax.types import Array, Categorical, Context, DraftTree

RATES = (0.72, 0.13, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)  # with which a first, second, ... sibling is accepted


@dataclass(frozen=True)
class Shape:
    """The shape of a tree, whose nodes are sorted by their depth: parents, and the siblings in their order."""

    parents: tuple[int, ...]  # of each node; -1 of node 0

    @cached_property
    def depth(self) -> np.ndarray:
        """The number of nodes above each node, [N] int32."""
        depth = np.zeros(len(self.parents), np.int32)
        for node, parent in enumerate(self.parents[1:], 1):
            depth[node] = depth[parent] + 1
        return depth

    @cached_property
    def rank(self) -> np.ndarray:
        """The number of siblings before each node, [N] int32."""
        parents = np.array(self.parents)
        return np.array([np.sum(parents[:node] == parent) for node, parent in enumerate(parents)], np.int32)

    @cached_property
    def inner(self) -> np.ndarray:
        """The nodes that have children, in order."""
        return np.unique(self.parents[1:])

    def level(self, depth: int) -> np.ndarray:
        """Return the nodes of a depth."""
        return np.flatnonzero(self.depth == depth)


@lru_cache
def shape_of(num_nodes: int, max_depth: int) -> Shape:
    """Return the shape of N nodes, up to a depth, with the paths that are accepted most often by `RATES`."""
    found: list[tuple[int, ...]] = []  # the ranks on the way to each node
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while heap and len(found) < num_nodes:
        chance, _, node = heapq.heappop(heap)
        found.append(node)
        if len(node) < max_depth:
            heapq.heappush(heap, (chance * RATES[0], len(node) + 1, (*node, 0)))
        if node and node[-1] + 1 < len(RATES):
            nxt = chance / RATES[node[-1]] * RATES[node[-1] + 1]
            heapq.heappush(heap, (nxt, len(node), (*node[:-1], node[-1] + 1)))
    found.sort(key=lambda node: (len(node), node))
    return Shape(tuple(-1 if not node else found.index(node[:-1]) for node in found))


@dataclass(frozen=True)
class TreeDrawer:
    """Draws a tree for each row."""

    shape: Shape
    keys: Array  # [B, D+1], of the positions of the step
    context: Context  # the tokens before the drafts
    sampling: Sampling  # as `draft_sampling` returns it
    coupled: bool  # whether siblings are ranked with the target's noise; else they are drawn from the reported rows
    is_greedy: bool = False
    reduced: Reduced | None = None  # None: logits are of the target's vocabulary

    def grow(self, logits: Array, advance: Callable[[DraftTree, np.ndarray], Array]) -> DraftTree:
        """Draw a tree level by level.

        Args:
            logits: [B, 1, D], of the token after node 0.
            advance: function of the tree so far and of the nodes of its last level that get children, which returns
                their logits [B, W, D].
        """
        shape = self.shape
        tree, rows = self._tree(last_token(self.context)), []
        for depth in range(shape.depth[-1]):
            nodes = np.intersect1d(shape.level(depth), shape.inner)
            row = self._row(advance(tree, nodes) if depth else logits, tree, nodes)
            children = shape.level(depth + 1)
            parents = np.array(shape.parents)[children]
            most = int(shape.rank[children].max()) + 1
            ids = self._siblings(row, nodes, depth, most)
            tokens = ids[:, np.searchsorted(nodes, parents), shape.rank[children]]
            tree = self._tree(jnp.concatenate([tree.tokens, tokens], axis=1))
            rows.append(row)
        return tree._replace(distribution=self._distribution(rows) if not self.coupled else None)

    def of_depths(self, logits: Array) -> DraftTree:
        """Draw a tree from logits [B, D, V] that depend on nothing but the depth of the node before a token."""

        def advance(tree: DraftTree, nodes: np.ndarray) -> Array:
            depth = self.shape.depth[nodes[0]]
            return jnp.repeat(logits[:, depth : depth + 1], len(nodes), axis=1)

        return self.grow(logits[:, :1], advance)

    def _tree(self, tokens: Array) -> DraftTree:
        """Return the first nodes of the tree, with these tokens."""
        first = (np.array(x, np.int32)[: tokens.shape[1]] for x in (self.shape.parents, self.shape.depth))
        parents, depth = (jnp.broadcast_to(jnp.asarray(x)[None], tokens.shape) for x in first)
        return DraftTree(tokens, parents, depth)

    def _row(self, logits: Array, tree: DraftTree, nodes: np.ndarray) -> Categorical:
        """Return the distributions [B, W] of the children of nodes, given their logits."""
        logits = widen(logits, self.reduced)
        if reads_token_ids(self.sampling):
            logits = tree_steps.adjust_nodes(self.sampling, logits, self.context, tree, nodes)
        return with_cut(self.sampling, logits)

    def _siblings(self, row: Categorical, nodes: np.ndarray, depth: int, most: int) -> Array:
        """Return the first `most` children [B, W, most] of nodes of a depth, -1 after the possible ones."""
        scores = distributions.kept_logits(row)
        if not self.is_greedy:
            temperature = jnp.ones(len(scores)) if row.temperature is None else row.temperature
            temperature = temperature[:, None, None]
            scaled = scores / jnp.where(temperature > 0, temperature, 1).astype(scores.dtype)
            if not self.coupled:
                keys = stream(self.keys[:, :1], DRAFT, jnp.asarray(nodes, jnp.int32)[None])
                noisy = scaled + gumbel(keys, (scores.shape[-1],)).astype(scores.dtype)
            else:
                noisy = _with_noise_of_draw(stream(self.keys[:, depth : depth + 1], TARGET), scaled)
            scores = jnp.where(temperature > 0, noisy, scores)
        values, ids = jax.lax.top_k(scores, min(most, scores.shape[-1]))
        ids = jnp.where(values > -jnp.inf, ids.astype(jnp.int32), -1)
        return jnp.pad(ids, ((0, 0), (0, 0), (0, most - ids.shape[-1])), constant_values=-1)

    def _distribution(self, rows: list[Categorical]) -> Categorical:
        """Return the distributions of all nodes, packed; a leaf gets some row."""
        inner = self.shape.inner
        place = np.minimum(np.searchsorted(inner, np.arange(len(self.shape.parents))), len(inner) - 1)
        fields = [
            jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *(row._replace(temperature=None) for row in rows))
        ]
        packed = distributions.pack(fields[0])
        assert packed.rows is not None, "packed logits have rows"
        return packed._replace(rows=packed.rows[:, place], temperature=rows[0].temperature)


def _with_noise_of_draw(keys: Array, logits: Array) -> Array:
    """Return scores [B, W, V] of tokens, of which the token that `distributions.draw` draws with `keys` is the largest.

    A draw chooses a block of the vocabulary and then a token in it. The score of a token is minus the distance of its
    block from the chosen one, and of the token from the first of its block.

    Args:
        keys: [B, 1].
        logits: [B, W, V], divided by the temperature.
    """
    size = logits.shape[-1]
    block = min(BLOCK_SIZE, size)
    num_blocks = -(-size // block)
    noise = gumbel(keys, (block + num_blocks,)).astype(logits.dtype)
    if num_blocks == 1:
        return logits + noise[..., :block]
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, num_blocks * block - size)), constant_values=-jnp.inf)
    blocks = padded.reshape(*logits.shape[:2], num_blocks, block)
    of_blocks = jax.nn.logsumexp(blocks, axis=-1) + noise[..., block:]
    inside = blocks + noise[:, :, None, :block]
    first = jnp.max(inside, axis=-1, keepdims=True)
    inside = jnp.where(jnp.isfinite(first), inside - first, -jnp.inf)
    scores = (of_blocks - jnp.max(of_blocks, axis=-1, keepdims=True))[..., None] + inside
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    return scores.reshape(*logits.shape[:2], -1)[..., :size]


Trees = TypeVar("Trees", bound="InTrees")


class InTrees(InMemory):
    """The base of proposers that draft trees of one shape; they have the fields `tree`, `coupled` and `is_greedy`."""

    tree: int | None
    coupled: bool

    def with_tree(self, tree: int, *, coupled: bool) -> Self:
        """Return the proposer with trees of N nodes, as `Proposer` describes it."""
        own: Any = self
        check_tree(tree, own.num_draft_tokens)
        if own.is_greedy and not coupled:
            raise ValueError("temperature must not be 0 for sampled trees, which must have a distribution, got 0")
        return replace(own, tree=tree, coupled=coupled)


def tree_drawer_of(
    proposer: Any, keys: Array, context: Context, sampling: Sampling, reduced: Reduced | None = None
) -> TreeDrawer:
    """Return the drawer of the trees of a step, given the arguments of `Proposer.propose`.

    Args:
        proposer: has `tree`, `coupled` and `num_draft_tokens`, and `temperature` and `is_greedy` as `draft_options`
            returns them.
        keys: [B, D+1], as `propose` gets them.
        context: the tokens before the drafts.
        sampling: the parameters of the requests.
        reduced: the draft vocabulary; None is the target's.
    """
    own = draft_sampling(sampling, proposer.temperature, proposer.is_greedy)
    shape = shape_of(proposer.tree, proposer.num_draft_tokens)
    return TreeDrawer(shape, keys, context, own, proposer.coupled, proposer.is_greedy, reduced)


def in_tree(proposer: Trees, tree: int | None, coupled: bool) -> Trees:
    """Return a proposer with trees of N nodes where `tree` is a number, and the same one for None."""
    if tree is not None:
        return proposer.with_tree(tree, coupled=coupled)
    if coupled:
        raise ValueError("coupled must be False where tree is None, got True")
    return proposer


def only_root(rows: Array, tree: DraftTree) -> DraftTree:
    """Return the tree with node 0 alone in the rows that are false in `rows` [B] bool."""
    return tree._replace(num_nodes=jnp.where(rows, tree.tokens.shape[1], 1).astype(jnp.int32))
