"""Trees whose shape follows the draft's probabilities, for `trees.match` and `trees.typical`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.trees.growing import children
from specjax.trees.growing.children import Children
from specjax.trees.growing.largest import counting, largest
from specjax.types import Array, Categorical, DraftTree
from specjax.validation import is_integer


def expand(
    last_tokens: Array,
    first: Categorical,
    advance: Callable[[Array, Array, int, Any], tuple[Categorical, Any]],
    carry: Any,
    *,
    num_nodes: int,
    width: int,
    max_depth: int,
    choose: Callable[[int, Categorical, int], Children] | None = None,
) -> tuple[DraftTree, Any]:
    """Grow the tree of EAGLE-2 and EAGLE-3: the best nodes of each level are expanded, then the best of all are kept.

    A node is as good as the product of the draft's probabilities on its path. At each level the best `width` nodes get
    `width` children each, and the best `width` of these are expanded next. In the end the best N - 1 of all are the
    drafts, by the order of their levels. A node is never better than its parent, so the parents of all are kept.

    Args:
        last_tokens: [B] int32, the last committed token of each row.
        first: the draft's distribution [B, 1, V] after node 0.
        advance: function of the tokens [B, width] of the nodes that are expanded, of the places [B, width] int32 of
            their parents among the nodes that were expanded before, of the level >= 1 of the nodes, which is static,
            and of the carry. It returns the draft's distribution [B, width, V] after each of them and the carry.
        carry: any pytree.
        num_nodes: N, at most 1 + width + (max_depth - 1) * width ** 2.
        width: number of nodes of a level that are expanded.
        max_depth: D, number of levels.
        choose: function of the depth of some nodes, which is static, of the distribution after each of them and of
            `width`, which returns their children; None is `children.top`. With `children.coupled` the tree is for
            `trees.match` alone.

    Returns:
        The tree without a distribution, and the last carry.

    Raises:
        ValueError: a number is out of its range.

    References:
        Li et al., EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, arXiv:2406.16858.
    """
    most = 1 + width + (max_depth - 1) * width**2 if min(width, max_depth) >= 1 else 0
    for name, value, limit in (("width", width, None), ("max_depth", max_depth, None), ("num_nodes", num_nodes, most)):
        if not (is_integer(value) and value >= 1 and (limit is None or value <= limit)):
            range_ = ">= 1" if limit is None else f"in [1, {limit}], where so many are grown"
            raise ValueError(f"{name} must be an integer {range_}, got {value!r}")
    choose = choose or (lambda depth, distribution, width: children.top(distribution, width))
    found = choose(0, first, width)
    tokens, scores = found.tokens[:, 0], found.log_probs[:, 0]
    all_tokens, all_scores, all_parents = [tokens], [scores], [jnp.full_like(tokens, -1)]
    beam = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)  # among all candidates
    place = jnp.zeros_like(beam)
    for level in range(1, max_depth):
        distribution, carry = advance(jnp.maximum(tokens, 0), place, level, carry)
        found = choose(level, distribution, width)
        candidates = (scores[..., None] + found.log_probs).reshape(tokens.shape[0], -1)
        start = sum(each.shape[1] for each in all_tokens)
        all_tokens.append(found.tokens.reshape(candidates.shape))
        all_scores.append(candidates)
        all_parents.append(jnp.repeat(beam, width, axis=1))
        best = largest(candidates, width)
        place, beam = best // width, start + best
        tokens, scores = (jnp.take_along_axis(x, best, axis=1) for x in (all_tokens[-1], candidates))
    depth = np.repeat(np.arange(1, max_depth + 1), [each.shape[1] for each in all_tokens]).astype(np.int32)
    drafts, totals, parents = (jnp.concatenate(each, axis=1) for each in (all_tokens, all_scores, all_parents))
    return keep_best(last_tokens, drafts, totals, parents, jnp.asarray(depth), num_nodes), carry


def keep_best(
    last_tokens: Array, tokens: Array, scores: Array, parents: Array, depth: Array, num_nodes: int
) -> DraftTree:
    """Return the tree of the best N - 1 of C candidates, in the order of the candidates.

    Args:
        last_tokens: [B] int32.
        tokens: [B, C] int32.
        scores: [B, C], at most the score of the parent; -inf is no candidate.
        parents: [B, C] int32 index of an earlier candidate, -1 for node 0.
        depth: [C] int32.
        num_nodes: N, at most C + 1.
    """
    chosen = jnp.sort(largest(scores, num_nodes - 1), axis=1)
    is_chosen = jnp.any(chosen[..., None] == counting(scores.shape[1], 3), axis=1)
    node = jnp.cumsum(is_chosen.astype(jnp.int32), axis=1)  # of each candidate that is chosen
    above = jnp.take_along_axis(parents, chosen, axis=1)
    is_there = jnp.take_along_axis(scores, chosen, axis=1) > -jnp.inf
    drafts = jnp.where(is_there, jnp.take_along_axis(tokens, chosen, axis=1), -1)
    above = jnp.where(above < 0, 0, jnp.take_along_axis(node, jnp.maximum(above, 0), axis=1))
    return DraftTree(
        jnp.concatenate([last_tokens[:, None], drafts], axis=1).astype(jnp.int32),
        jnp.pad(above, ((0, 0), (1, 0)), constant_values=-1).astype(jnp.int32),
        jnp.pad(depth[chosen], ((0, 0), (1, 0))).astype(jnp.int32),
    )


def best_first(last_tokens: Array, found: Children, num_nodes: int) -> DraftTree:
    """Grow the best tree of N nodes from candidates that do not depend on the tokens before them, as block drafters do.

    A node of depth d has a candidate of place d, and is as good as the product of the probabilities on its path. The
    N - 1 best are the tree that a search from the best node on would find. No draft pass is needed.

    Args:
        last_tokens: [B] int32, the last committed token of each row.
        found: for each of D places the M best candidates, by `children.top` or `children.coupled`; M < N - 1 leaves out
            trees with more children of a node.
        num_nodes: N.

    Returns:
        The tree, for `trees.match` and `trees.typical`. Where there are fewer candidates, nodes with the token -1 fill
        it.

    Raises:
        ValueError: `num_nodes` is no integer >= 1.

    References:
        DDTree, arXiv:2604.12989.
    """
    if not (is_integer(num_nodes) and num_nodes >= 1):
        raise ValueError(f"num_nodes must be an integer >= 1, got {num_nodes!r}")
    batch_size, max_depth, width = found.tokens.shape
    size = num_nodes - 1
    scores, places = jnp.zeros((batch_size, 1), jnp.float32), jnp.full((batch_size, 1), -1, jnp.int32)
    columns: list[tuple[Array, Array, Array]] = []
    start, depth = 0, []
    for level in range(max_depth):
        # The i-th best node with the j-th best candidate has (i + 1) (j + 1) - 1 better ones in its level.
        pairs = [(i, j) for i in range(scores.shape[1]) for j in range(width) if (i + 1) * (j + 1) <= size]
        above, rank = np.array(pairs, np.int32).reshape(-1, 2).T
        total = scores[:, above] + found.log_probs[:, level, rank]
        best = largest(total, min(size, len(pairs)))
        scores = jnp.take_along_axis(total, best, axis=1)
        token = jnp.take_along_axis(found.tokens[:, level], jnp.asarray(rank)[best], axis=1)
        columns.append((token, scores, jnp.take_along_axis(places, jnp.asarray(above)[best], axis=1)))
        places = jnp.broadcast_to(start + jnp.arange(best.shape[1], dtype=jnp.int32)[None], best.shape)
        start += best.shape[1]
        depth += [level + 1] * best.shape[1]
    tokens, totals, parents = (jnp.concatenate(each, axis=1) for each in zip(*columns, strict=True))
    short = max(0, size - start)
    tokens, totals, parents = (
        jnp.pad(each, ((0, 0), (0, short)), constant_values=fill)
        for each, fill in ((tokens, -1), (totals, -jnp.inf), (parents, -1))
    )
    return keep_best(last_tokens, tokens, totals, parents, jnp.asarray([*depth, *[1] * short], jnp.int32), num_nodes)
