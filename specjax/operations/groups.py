"""Groups of calls: a step of sequences that decode and a packed call with prompts, say, computed at a time.

Norms, products and experts take the tokens of all groups as one row, and so read the weights once. Attention takes one
group after another.

A ragged call leaves the padding of its groups out. Attention gets it back, as copies of the tokens before it, so that
every kernel takes a group.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.types import Array, ModelInput, PyTree
from specjax.validation import check_array


def join(groups: Sequence[ModelInput], size: int | None = None) -> ModelInput:
    """Return calls as the groups of one call, [1, N].

    Args:
        groups: the calls.
        size: N of a ragged call, at least the number of tokens that are no padding; None keeps the padding.
    """
    tokens, positions = (
        jnp.concatenate([getattr(group, name).reshape(1, -1) for group in groups], axis=1)
        for name in ("tokens", "positions")
    )
    if size is not None:
        source = _sources(groups, size)
        tokens, positions = tokens[:, source], positions[:, source]
    return ModelInput(tokens, positions, groups=tuple(groups))


def split(inputs: ModelInput, values: PyTree) -> list[PyTree]:
    """Return the part of each group, [1, n, ...], of values [1, N, ...] of the tokens of a call with groups.

    In a ragged call the padding after a token has the value of this token.
    """
    assert inputs.groups is not None, "the call has groups"
    if is_ragged(inputs):
        place = jnp.cumsum(_is_kept(inputs.groups), dtype=jnp.int32) - 1
        values = jax.tree.map(lambda x: x[:, place], values)
    parts, end = [], 0
    for group in inputs.groups:
        begin, end = end, end + group.tokens.size
        parts.append(jax.tree.map(lambda x, begin=begin, end=end: x[:, begin:end], values))
    return parts


def joined(inputs: ModelInput, parts: Sequence[Array]) -> Array:
    """Return the values [1, N, ...] of the tokens of a call with groups, given the part of each group [1, n, ...]."""
    assert inputs.groups is not None, "the call has groups"
    values = jnp.concatenate(parts, axis=1)
    return values[:, _sources(inputs.groups, inputs.tokens.size)] if is_ragged(inputs) else values


def is_ragged(inputs: ModelInput) -> bool:
    """Return whether a call with groups leaves their padding out."""
    return inputs.groups is not None and inputs.tokens.size < sum(group.tokens.size for group in inputs.groups)


def _is_kept(groups: Sequence[ModelInput]) -> Array:
    """Return which tokens of all groups are no padding, [M] bool."""

    def of_group(group: ModelInput) -> Array:
        if group.num_tokens is None:
            return jnp.ones(group.tokens.size, bool)
        index = jnp.arange(group.tokens.shape[1], dtype=jnp.int32)
        return (index[None] < group.num_tokens[:, None]).reshape(-1)

    return jnp.concatenate([of_group(group) for group in groups])


def _sources(groups: Sequence[ModelInput], size: int) -> Array:
    """Return the index among the tokens of all groups of each token of a ragged call, [N] int32."""
    is_kept = _is_kept(groups)
    place = jnp.where(is_kept, jnp.cumsum(is_kept, dtype=jnp.int32) - 1, size)
    index = jnp.arange(is_kept.shape[0], dtype=jnp.int32)
    return jnp.zeros(size, jnp.int32).at[place].set(index, mode="drop")


def check_groups(inputs: ModelInput, takes_groups: bool, takes_ragged: bool = False) -> None:
    """Raise ValueError for a call with groups of a wrong form, or for a model that takes none."""
    if inputs.groups is None:
        return
    if not takes_groups:
        raise ValueError(
            f"inputs.groups must be None for a model whose takes_groups is False, got {len(inputs.groups)} groups"
        )
    num_tokens = sum(group.tokens.size for group in inputs.groups)
    if takes_ragged and is_ragged(inputs):
        num_tokens = inputs.tokens.size
    check_array("inputs.tokens of a call with groups", inputs.tokens, "[1, N]", (1, num_tokens), jnp.integer)
    names = ("mask", "pages", "num_tokens", "rows", "pieces")
    given = [name for name in names if getattr(inputs, name) is not None]
    if given:
        raise ValueError(f"inputs.{given[0]} must be None in a call with groups, which have it, got an array")
