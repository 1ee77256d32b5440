"""Trees whose shape is known before anything is drafted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.keys import DRAFT, TARGET, stream
from specjax.trees.growing import children
from specjax.trees.growing.children import Children
from specjax.types import Array, Categorical, DraftTree
from specjax.validation import is_integer

Choose = Callable[[Array, Sequence[int], int, Categorical, int], Children]


@dataclass(frozen=True)
class Shape:
    """The static shape of a tree: its nodes by increasing depth, the children of one node side by side."""

    parents: tuple[int, ...]  # [N], -1 for node 0
    ranks: tuple[int, ...]  # [N], the place of each node's token among the candidates of its parent, the best is 0

    @property
    def depth(self) -> tuple[int, ...]:
        """The number [N] of nodes above each node."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @property
    def max_depth(self) -> int:
        """The depth D of the last node."""
        return self.depth[-1]

    @property
    def has_all_candidates(self) -> bool:
        """Whether the nodes of a parent are its best candidates, without a gap."""
        return all(rank == self.parents[:node].count(self.parents[node]) for node, rank in enumerate(self.ranks))

    def level(self, depth: int) -> tuple[int, ...]:
        """Return the nodes of a depth that have children."""
        return tuple(n for n, d in enumerate(self.depth) if d == depth and n in self.parents)


def of_paths(paths: Iterable[Sequence[int]]) -> Shape:
    """Return the shape that a list of index paths describes, as Medusa and EAGLE-1 publish theirs.

    Args:
        paths: a path for each node but node 0: the ranks of the tokens on the way to it, the best candidate is 0.

    Raises:
        ValueError: a path is empty, occurs twice, has a negative rank, or the path to its parent is missing.

    Example:
        >>> of_paths([[0], [1], [0, 0]])
        Shape(parents=(-1, 0, 0, 1), ranks=(0, 0, 1, 0))
    """
    given = [tuple(path) for path in paths]
    root: tuple[int, ...] = ()
    ordered: list[tuple[int, ...]] = sorted({root, *given}, key=lambda path: (len(path), path))
    for path in given:
        if not path or given.count(path) > 1 or not all(is_integer(rank) and rank >= 0 for rank in path):
            raise ValueError(f"paths must be different and each have one or more ranks >= 0, got {list(path)}")
        if path[:-1] not in ordered:
            raise ValueError(f"paths must have the path {list(path[:-1])}, the parent of {list(path)}")
    index: dict[tuple[int, ...], int] = {path: node for node, path in enumerate(ordered)}
    return Shape((-1, *(index[path[:-1]] for path in ordered[1:])), (0, *(path[len(path) - 1] for path in ordered[1:])))


def of_counts(counts: Mapping[tuple[int, ...], int]) -> Shape:
    """Return the shape in which the node at a path has a number of children, which are its best candidates.

    Args:
        counts: the number of children by the path of a node; () is node 0. Other nodes have none.
    """
    return of_paths([(*path, rank) for path, count in counts.items() for rank in range(count)])


def of_widths(widths: Sequence[int]) -> Shape:
    """Return the shape in which every node of depth d has `widths[d]` children; (1, 1, 1) is a chain of three drafts.

    Raises:
        ValueError: there is no width, or one is no integer >= 1.
    """
    if not widths or not all(is_integer(width) and width >= 1 for width in widths):
        raise ValueError(f"widths must be one or more integers >= 1, got {widths!r}")
    counts: dict[tuple[int, ...], int] = {}
    level: list[tuple[int, ...]] = [()]
    for width in widths:
        counts |= dict.fromkeys(level, int(width))
        level = [(*path, rank) for path in level for rank in range(width)]
    return of_counts(counts)


# The lists that Medusa and EAGLE-1 publish under the name mc_sim_7b_63, with 63 and 25 drafts.
MEDUSA = of_counts(
    {(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2}
    | {(rank,): 1 for rank in range(4, 10)}
    | {(0, 0): 10, (0, 1): 3, (0, 2): 2, (1, 0): 2, (2, 0): 1}
    | {(0, rank): 1 for rank in range(3, 8)}
    | {(0, 0, 0): 2}
)
EAGLE = of_counts(
    {(): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1}
    | {(0, 0, 0): 3, (0, 0, 0, 0): 2}
)


def by_top(keys: Array, nodes: Sequence[int], depth: int, distribution: Categorical, width: int) -> Children:
    """Choose the likeliest tokens, for `trees.match` and `trees.typical`."""
    return children.top(distribution, width)


def by_coupling(keys: Array, nodes: Sequence[int], depth: int, distribution: Categorical, width: int) -> Children:
    """Choose the tokens that the target's noise of the next position prefers, for `trees.match` alone."""
    own = jnp.broadcast_to(stream(keys[:, depth : depth + 1], TARGET), (keys.shape[0], len(nodes)))
    return children.coupled(own, distribution, width)


def by_drawing(keys: Array, nodes: Sequence[int], depth: int, distribution: Categorical, width: int) -> Children:
    """Draw the tokens without replacement, for `trees.traversal` and `trees.match`."""
    own = stream(keys[:, :1], DRAFT, jnp.asarray(nodes, jnp.int32)[None])
    return children.sampled(own, distribution, width)


def grow(
    shape: Shape,
    keys: Array,
    last_tokens: Array,
    first: Categorical,
    advance: Callable[[Array, tuple[int, ...], Any], tuple[Categorical, Any]],
    carry: Any,
    choose: Choose = by_top,
) -> tuple[DraftTree, Any]:
    """Grow a tree of a static shape, level by level.

    Args:
        shape: the shape.
        keys: typed keys [B, D+1] by position, or [B, 1] for `by_top` and `by_drawing`.
        last_tokens: [B] int32, the last committed token of each row.
        first: the draft's distribution [B, 1, V] after node 0.
        advance: function of the tokens [B, T] of some nodes, of the indices of these T nodes, which are static, and of
            the carry. It returns the draft's distribution [B, T, V] after each of them and the carry. It is traced once
            for each level but the last, for the nodes that have children; tokens of no node are 0.
        carry: any pytree.
        choose: `by_top`, `by_coupling`, `by_drawing`, or a function like these, which chooses the children of nodes.

    Returns:
        The tree, with a distribution where `choose` is `by_drawing`, and the last carry.

    Raises:
        ValueError: the shape leaves out the candidate before a node, and `choose` is `by_drawing`: every node that is
            drawn must be verified.
    """
    if choose is by_drawing and not shape.has_all_candidates:
        raise ValueError(
            "shape must have every candidate before the last of a node, because every node that is drawn must be "
            f"verified, got {shape}"
        )
    batch_size, num_nodes = last_tokens.shape[0], len(shape.parents)
    columns, rows, level_rows = {0: last_tokens.astype(jnp.int32)}, [], np.zeros(num_nodes, np.int32)
    distribution = first
    for depth in range(shape.max_depth):
        nodes = shape.level(depth)
        if depth:
            tokens = jnp.stack([jnp.maximum(columns[node], 0) for node in nodes], axis=1)
            distribution, carry = advance(tokens, nodes, carry)
        width = 1 + max(shape.ranks[n] for n, parent in enumerate(shape.parents) if parent in nodes)
        found = choose(keys, nodes, depth, distribution, width).tokens
        for node, parent in enumerate(shape.parents):
            if parent in nodes:
                columns[node] = found[:, nodes.index(parent), shape.ranks[node]]
        level_rows[list(nodes)] = sum(distributions.shape_of(each)[1] for each in rows) + np.arange(len(nodes))
        rows.append(distribution)
    tokens = jnp.stack([columns[node] for node in range(num_nodes)], axis=1)
    parents, depths = (
        jnp.broadcast_to(jnp.asarray(x, jnp.int32)[None], (batch_size, num_nodes)) for x in (shape.parents, shape.depth)
    )
    reported = _joined(rows, level_rows) if choose is by_drawing else None
    return DraftTree(tokens, parents, depths, None, reported), carry


def _joined(rows: Sequence[Categorical], index: np.ndarray) -> Categorical:
    """Return distributions of [B, T_i, V] side by side, in which node n has row `index[n]`."""

    def side_by_side(fields: list[Any]) -> Any:
        return None if fields[0] is None else jnp.concatenate(fields, axis=1)

    first = rows[0]
    logits = side_by_side([row.logits for row in rows])
    cut = side_by_side([row.min_logit for row in rows])
    packed = distributions.pack(Categorical(logits, first.temperature, cut))
    assert packed.rows is not None, "packed logits have rows"
    return packed._replace(rows=packed.rows[:, index])
