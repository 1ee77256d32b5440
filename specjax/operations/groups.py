"""Groups of calls: a step of sequences that decode and a packed call with prompts, say, computed at a time.

Norms, products and experts take the tokens of all groups as one row, and so read the weights once. Attention takes one
group after another.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.types import ModelInput, PyTree
from specjax.validation import check_array


def join(groups: Sequence[ModelInput]) -> ModelInput:
    """Return calls as the groups of one call, [1, N]."""
    tokens, positions = (
        jnp.concatenate([getattr(group, name).reshape(1, -1) for group in groups], axis=1)
        for name in ("tokens", "positions")
    )
    return ModelInput(tokens, positions, groups=tuple(groups))


def split(inputs: ModelInput, values: PyTree) -> list[PyTree]:
    """Return the part of each group, [1, n, ...], of values [1, N, ...] of the tokens of a call with groups."""
    assert inputs.groups is not None, "the call has groups"
    parts, end = [], 0
    for group in inputs.groups:
        begin, end = end, end + group.tokens.size
        parts.append(jax.tree.map(lambda x, begin=begin, end=end: x[:, begin:end], values))
    return parts


def check_groups(inputs: ModelInput, takes_groups: bool) -> None:
    """Raise ValueError for a call with groups of a wrong form, or for a model that takes none."""
    if inputs.groups is None:
        return
    if not takes_groups:
        raise ValueError(
            f"inputs.groups must be None for a model whose takes_groups is False, got {len(inputs.groups)} groups"
        )
    num_tokens = sum(group.tokens.size for group in inputs.groups)
    check_array("inputs.tokens of a call with groups", inputs.tokens, "[1, N]", (1, num_tokens), jnp.integer)
    names = ("mask", "pages", "num_tokens", "rows", "pieces")
    given = [name for name in names if getattr(inputs, name) is not None]
    if given:
        raise ValueError(f"inputs.{given[0]} must be None in a call with groups, which have it, got an array")
