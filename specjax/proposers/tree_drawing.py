"""Trees of drafts that are drawn level by level from logits, by the sampling parameters of each request.

A sampled tree has a shape that is fixed before a token is drawn, and every drawn token is a node, so a lossless
verifier stays lossless. A coupled tree is for exact match: it holds the paths that the target is likeliest to follow,
given the noise with which it draws its own tokens.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

import jax.numpy as jnp
import numpy as np

from specjax.decoding import tree_steps
from specjax.decoding.drafters import InMemory, check_tree
from specjax.keys import TARGET, stream
from specjax.proposers.drawing import Reduced, draft_sampling, last_token, widen
from specjax.sampling import Sampling
from specjax.sampling.logits import reads_token_ids, with_cut
from specjax.trees import growing
from specjax.types import Array, Categorical, Context, DraftTree, PyTree

RATES = (0.72, 0.13, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)  # with which a first, second, ... sibling is accepted
MOST_SIBLINGS = 8  # of a node in a coupled tree

# (nodes that are fed, node 0 among them; how many of them are new, the last ones; carry) -> (logits [B, T, D] after the
# new ones, carry)
Advance = Callable[[DraftTree, int, Any], tuple[Array, Any]]


@lru_cache
def shape_of(num_nodes: int, max_depth: int) -> growing.Shape:
    """Return the shape of N nodes, up to a depth, with the paths that are accepted most often by `RATES`."""
    found: list[tuple[int, ...]] = []  # the ranks on the way to each node
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while heap and len(found) < num_nodes:
        chance, node = heapq.heappop(heap)
        found.append(node)
        if len(node) < max_depth:
            heapq.heappush(heap, (chance * RATES[0], (*node, 0)))
        if node and node[-1] + 1 < len(RATES):
            heapq.heappush(heap, (chance / RATES[node[-1]] * RATES[node[-1] + 1], (*node[:-1], node[-1] + 1)))
    return growing.of_paths(found[1:])


@dataclass(frozen=True)
class TreeDrawer:
    """Draws a tree for each row."""

    num_nodes: int  # N
    keys: Array  # [B, D+1], of the positions of the step
    context: Context  # the tokens before the drafts
    sampling: Sampling  # as `draft_sampling` returns it
    coupled: bool  # whether siblings are ranked with the target's noise; else they are drawn from the reported rows
    is_greedy: bool = False
    reduced: Reduced | None = None  # None: logits are of the target's vocabulary

    @property
    def max_depth(self) -> int:
        """D."""
        return self.keys.shape[1] - 1

    def grow(self, logits: Array, advance: Advance, carry: PyTree) -> tuple[DraftTree, PyTree]:
        """Draw a tree level by level, and return it with the last carry.

        Args:
            logits: [B, 1, D], of the token after node 0.
            advance: function that feeds the drafter. It is traced once for each level but the last.
            carry: any pytree.
        """
        last, first = last_token(self.context), self._row(logits, self._fed(last_token(self.context), [-1], [0]), 1)
        if self.coupled:
            return self._expand(last, first, advance, carry)
        shape = shape_of(self.num_nodes, self.max_depth)
        inner = [node for node in range(len(shape.parents)) if node in shape.parents]

        def level(tokens: Array, nodes: tuple[int, ...], state: Any) -> tuple[Categorical, Any]:
            so_far, carry = state
            so_far = jnp.concatenate([so_far, tokens], axis=1)
            own = inner[: so_far.shape[1]]
            parents = [-1, *(inner.index(shape.parents[node]) for node in own[1:])]
            fed = self._fed(so_far, parents, [shape.depth[node] for node in own])
            logits, carry = advance(fed, len(nodes), carry)
            return self._row(logits, fed, len(nodes)), (so_far, carry)

        choose = growing.by_drawing
        tree, (_, carry) = growing.grow(shape, self.keys, last[:, 0], first, level, (last, carry), choose)
        return tree, carry

    def of_depths(self, logits: Array) -> DraftTree:
        """Draw a tree from logits [B, D, V] that depend on nothing but the depth of the node before a token."""
        if not self.coupled:

            def advance(fed: DraftTree, num_new: int, depth: int) -> tuple[Array, int]:
                return jnp.repeat(logits[:, depth : depth + 1], num_new, axis=1), depth + 1

            return self.grow(logits[:, :1], advance, 1)[0]
        last = last_token(self.context)
        rows = self._row(logits, self._fed(last, [-1], [0]), np.zeros(self.max_depth, int))
        found = self._children(0, rows, min(self.num_nodes - 1, MOST_SIBLINGS, logits.shape[-1]))
        return growing.best_first(last[:, 0], found, self.num_nodes)

    def _expand(self, last: Array, first: Categorical, advance: Advance, carry: Any) -> tuple[DraftTree, Any]:
        """Grow the best tree of match; the nodes that are expanded are fed, as many in each level."""
        width = min(max(2, self.num_nodes // 4), first.logits.shape[-1])
        while 1 + width + (self.max_depth - 1) * width**2 < self.num_nodes:
            width += 1

        def level(tokens: Array, place: Array, depth: int, state: Any) -> tuple[Categorical, Any]:
            so_far, carry = state
            above = place + (0 if depth == 1 else so_far.tokens.shape[1] - width)
            fed = DraftTree(
                jnp.concatenate([so_far.tokens, tokens], axis=1),
                jnp.concatenate([so_far.parents, above], axis=1),
                jnp.pad(so_far.depth, ((0, 0), (0, width)), constant_values=depth),
            )
            logits, carry = advance(fed, width, carry)
            return self._row(logits, fed, width), (fed, carry)

        sizes = {"num_nodes": self.num_nodes, "width": width, "max_depth": self.max_depth}
        state = self._fed(last, [-1], [0]), carry
        tree, (_, carry) = growing.expand(last[:, 0], first, level, state, choose=self._children, **sizes)
        return tree, carry

    def _children(self, depth: int, rows: Categorical, width: int) -> growing.Children:
        """Return the best tokens after nodes of one depth [B, T]; of T depths from `depth` on where T is D."""
        if self.is_greedy:
            return growing.top(rows, width)
        keys = stream(self.keys, TARGET)
        num_rows = rows.logits.shape[1]
        own = keys[:, :num_rows] if depth == 0 else jnp.repeat(keys[:, depth : depth + 1], num_rows, axis=1)
        return growing.coupled(own, rows, width)

    def _fed(self, tokens: Array, parents: list[int], depth: list[int]) -> DraftTree:
        """Return nodes with the same parents and depths in each row."""
        above, level = (jnp.broadcast_to(jnp.asarray([x], jnp.int32), tokens.shape) for x in (parents, depth))
        return DraftTree(tokens, above, level)

    def _row(self, logits: Array, fed: DraftTree, nodes: int | np.ndarray) -> Categorical:
        """Return the distributions [B, T] of the children of T nodes of a tree, the last ones or those given."""
        logits = widen(logits, self.reduced)
        if reads_token_ids(self.sampling):
            if isinstance(nodes, int):
                nodes = np.arange(fed.tokens.shape[1])[-nodes:]
            logits = tree_steps.adjust_nodes(self.sampling, logits, self.context, fed, nodes)
        return with_cut(self.sampling, logits)


Trees = TypeVar("Trees", bound="InTrees")


class InTrees(InMemory):
    """The base of proposers that draft trees of one shape; they have the fields `tree`, `coupled` and `is_greedy`."""

    tree: int | None
    coupled: bool

    def with_tree(self, tree: int | None, *, coupled: bool) -> Self:
        """Return the proposer with trees of N nodes, as `Proposer` describes it."""
        own: Any = self
        if tree is None:
            return replace(own, tree=None, coupled=False)
        check_tree(tree, own.num_draft_tokens)
        if own.is_greedy and not coupled:
            raise ValueError("temperature must not be 0 for sampled trees, which must have a distribution, got 0")
        return replace(own, tree=tree, coupled=coupled)


def tree_drawer_of(
    proposer: Any, keys: Array, context: Context, sampling: Sampling, reduced: Reduced | None = None
) -> TreeDrawer:
    """Return the drawer of the trees of a step, given the arguments of `Proposer.propose`.

    Args:
        proposer: has `tree` and `coupled`, and `temperature` and `is_greedy` as `draft_options` returns them.
        keys: [B, D+1], as `propose` gets them.
        context: the tokens before the drafts.
        sampling: the parameters of the requests.
        reduced: the draft vocabulary; None is the target's.
    """
    own = draft_sampling(sampling, proposer.temperature, proposer.is_greedy)
    return TreeDrawer(proposer.tree, keys, context, own, proposer.coupled, proposer.is_greedy, reduced)


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
