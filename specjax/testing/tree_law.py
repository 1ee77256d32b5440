"""The exact distribution of one step of a verifier of trees, over all draws of the trees' tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.testing.enumeration import Table, enumerate_outcomes, probabilities, product_law
from specjax.types import Categorical, DraftTree, Verified


class DrawnTrees(NamedTuple):
    """All trees that a drafter may draw in a step, each with its probability."""

    tokens: np.ndarray  # [R, N] int32, -1 where no token was left
    parents: np.ndarray  # [R, N] int32
    weight: np.ndarray  # [R] float64

    @property
    def depth(self) -> np.ndarray:
        """The number [R, N] int32 of nodes above each node."""
        depth = np.zeros_like(self.parents)
        for node in range(1, depth.shape[1]):
            depth[:, node] = np.take_along_axis(depth, self.parents[:, node : node + 1], axis=1)[:, 0] + 1
        return depth


def draw_trees(parents: Sequence[int], draft: Sequence[Table]) -> DrawnTrees:
    """Return all trees of a shape, whose siblings are drawn without replacement in the order of their indices.

    Args:
        parents: the parent of each node, -1 for node 0.
        draft: conditional probabilities; level d has shape [V] * (d + 1), for the children of nodes of depth d.
    """
    trees: list[tuple[list[int], float]] = [([0], 1.0)]
    for node in range(1, len(parents)):
        trees = [
            ([*tokens, token], weight * chance)
            for tokens, weight in trees
            for token, chance in next_tokens(tokens, parents, parents[node], draft)
        ]
    tokens, weight = zip(*trees, strict=True)
    return DrawnTrees(np.array(tokens, np.int32), np.array([parents] * len(trees), np.int32), np.array(weight))


def next_tokens(
    tokens: Sequence[int], parents: Sequence[int], parent: int, draft: Sequence[Table]
) -> list[tuple[int, float]]:
    """Return the tokens that may be drawn as the next child of a node, with their probabilities; -1 if none is left."""
    path, node = [], parent
    while node > 0:
        path.insert(0, tokens[node])
        node = parents[node]
    if -1 in path:
        return [(-1, 1.0)]
    left = np.array(draft[len(path)][tuple(path)], np.float64)
    left[[tokens[n] for n in range(1, len(tokens)) if parents[n] == parent and tokens[n] >= 0]] = 0
    if not left.sum() > 0:
        return [(-1, 1.0)]
    return [(int(token), left[token] / left.sum()) for token in np.flatnonzero(left)]


def rows_of_nodes(tables: Sequence[Table], trees: DrawnTrees, garbage: float = 0.0) -> np.ndarray:
    """Return the row [R, N, V] of conditional tables after the path of each node, and `garbage` after no token."""
    vocab_size = tables[0].shape[-1]
    depth, code = trees.depth, np.zeros_like(trees.tokens, int)
    is_real = np.ones(code.shape, bool)
    for node in range(1, code.shape[1]):
        above = trees.parents[:, node]
        row, token = np.arange(len(code)), trees.tokens[:, node]
        is_real[:, node] = is_real[row, above] & (token >= 0)
        code[:, node] = np.where(is_real[:, node], code[row, above] * vocab_size + token, 0)
    rows = np.full((*code.shape, vocab_size), garbage)
    for level, table in enumerate(tables):
        here = is_real & (depth == level)
        rows[here] = table.reshape(-1, vocab_size)[code[here]]
    return rows


def completed_laws(
    tokens: np.ndarray, weight: np.ndarray, group: np.ndarray, num_groups: int, target: Sequence[Table]
) -> np.ndarray:
    """Return the joint distributions [G, V ** (D+1)] of emitted tokens, completed to D+1 tokens from the target.

    Args:
        tokens: [M, D+1] int32, outputs of a verifier, each with -1 after its emitted tokens.
        weight: [M] float64, the probability of each output in its group.
        group: [M] int, the group of each output.
        num_groups: G.
        target: conditional probabilities of the target, levels 0 to D.
    """
    vocab_size, num_tokens = target[0].shape[-1], tokens.shape[1]
    count = np.sum(tokens >= 0, axis=1)
    laws = np.zeros((num_groups, vocab_size**num_tokens))
    for length in range(1, num_tokens + 1):
        here = (count == length) & (weight != 0)
        code = np.zeros(here.sum(), int)
        for place in range(length):
            code = code * vocab_size + tokens[here, place]
        cells = vocab_size**length
        mass = np.bincount(group[here] * cells + code, weight[here], minlength=num_groups * cells)
        prefixes = np.ndindex(*[vocab_size] * length)
        rest = np.stack([product_law(target, prefix).reshape(-1) for prefix in prefixes])
        laws += (mass.reshape(num_groups, cells, 1) * rest[None]).reshape(num_groups, -1)
    return laws


def tree_laws(
    verifier: Callable[..., Verified],
    target: Sequence[Table],
    draft: Sequence[Table],
    cases: Sequence[DrawnTrees],
    *,
    dtype: Any = jnp.float32,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the exact joint distribution of the next D+1 tokens for each way to draw a tree, in one call.

    Args:
        verifier: a verifier of trees that `trees.from_core` made.
        target: conditional logits of the target, levels 0 to D.
        draft: conditional logits of the draft, levels 0 to D.
        cases: the trees of each case, all of N nodes.
        dtype: the dtype of the logits that the verifier gets.
        **options: the verifier's options.

    Returns:
        The distributions [C, V ** (D+1)] of the C cases, and the mean number [C] of accepted drafts.
    """
    trees = DrawnTrees(*(np.concatenate(field) for field in zip(*cases, strict=True)))
    case = np.repeat(np.arange(len(cases)), [len(each.weight) for each in cases])
    drafted = Categorical(jnp.asarray(rows_of_nodes(draft, trees), dtype))
    tree = DraftTree(*map(jnp.asarray, (trees.tokens, trees.parents, trees.depth)), distribution=drafted)
    scored = Categorical(jnp.asarray(rows_of_nodes(target, trees), dtype))
    max_depth = len(target) - 1
    verified, chance = enumerate_outcomes(verifier, tree, scored, max_depth=max_depth, **options)
    weight = (trees.weight[:, None] * chance).reshape(-1)
    group = np.repeat(case, chance.shape[1])
    expected = [probabilities(table) for table in target]
    laws = completed_laws(np.asarray(verified.tokens), weight, group, len(cases), expected)
    accepted = np.bincount(group, weight * np.asarray(verified.num_accepted), minlength=len(cases))
    return laws, accepted
