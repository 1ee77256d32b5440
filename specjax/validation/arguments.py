"""Checks of arguments that several modules share. They raise ValueError with the expected and the actual value.

Shapes and dtypes are checked everywhere, values only where they are known: not under jit.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax.types import FLOATS, Array, Categorical, Draft


def is_integer(value: object) -> bool:
    """Return whether `value` is an integer of Python or NumPy; True and False do not count as integers."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_iterable(value: object) -> bool:
    """Return whether `value` has elements; an array without axes has the method for them, but none."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def holds_booleans(value: object) -> bool:
    """Return whether a list or a tuple holds True or False, which an array of numbers would take for 1 or 0."""
    if isinstance(value, list | tuple):
        return any(map(holds_booleans, value))
    return isinstance(value, bool | np.bool)


def as_python(value: Any) -> Any:
    """Return a number of NumPy as one of Python, because sums in small integer types overflow; else `value` itself."""
    return value.item() if isinstance(value, np.generic) else value


def suggestion(value: object, choices: Iterable[str]) -> str:
    """Return the end of a message that asks whether a misspelt value was meant to be one of some choices.

    Args:
        value: the actual value.
        choices: the values that are known.

    Returns:
        "; did you mean 'CHOICE'?" with the choice that is close to the value; "" where none is.
    """
    close = difflib.get_close_matches(str(value), choices, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def is_traced(*trees: Any) -> bool:
    """Return whether a leaf of some pytrees is traced, so that it has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def check_shapes(draft: Draft, target: Categorical, bonus_tokens: Array | None) -> None:
    """Raise ValueError if an argument of a verifier has a wrong shape or dtype."""
    check_array("draft.tokens", draft.tokens, "[B, K]", (None, None), jnp.integer)
    batch_size, num_draft_tokens = draft.tokens.shape
    if draft.num_tokens is not None:
        check_array("draft.num_tokens", draft.num_tokens, "[B]", (batch_size,), jnp.integer)
    if bonus_tokens is not None:
        check_array("bonus_tokens", bonus_tokens, "[B]", (batch_size,), jnp.integer)
    vocab_size = check_categorical("target", target, "K+1", (batch_size, num_draft_tokens + 1))
    if draft.distribution is not None:
        if not isinstance(draft.distribution, Categorical):
            got = type(draft.distribution).__name__
            raise ValueError(f"draft.distribution must be a Categorical or None (deterministic drafts), got {got}")
        shape = (batch_size, num_draft_tokens)
        check_categorical("draft.distribution", draft.distribution, "K", shape, vocab_size)


def check_bonus_tokens(bonus_tokens: Array | None, vocab_size: int) -> None:
    """Raise ValueError for an id outside [0, V). Ids are not checked under jit, nor where other hosts hold some."""
    if bonus_tokens is None or is_traced(bonus_tokens):
        return
    if isinstance(bonus_tokens, jax.Array) and not bonus_tokens.is_fully_addressable:
        return
    values = np.asarray(bonus_tokens)
    is_valid = (values >= 0) & (values < vocab_size)
    if not is_valid.all():
        index = is_valid.argmin()
        raise ValueError(f"bonus_tokens[{index}] must be in [0, V = {vocab_size}), got {values[index]}")


def check_categorical(
    name: str, distribution: Categorical, rows: str, shape: tuple[int | None, ...], vocab_size: int | None = None
) -> int:
    """Raise ValueError unless the fields describe rows of this shape, where None is any size; return V."""
    logits, temperature, min_logit, log_normalizer, row_index, _ = distribution
    if row_index is None:
        check_array(name, logits, f"[B, {rows}, V]", (*shape, vocab_size), jnp.floating)
        field_axes, field_shape, shape = f"[B, {rows}]", logits.shape[:2], logits.shape[:2]
    else:
        check_array(f"{name}.logits", logits, "[R, V]", (None, vocab_size), jnp.floating)
        check_array(f"{name}.rows", row_index, f"[B, {rows}]", shape, jnp.integer)
        field_axes, field_shape, shape = "[R]", logits.shape[:1], row_index.shape
    if temperature is not None:
        check_array(f"{name}.temperature", temperature, "[B]", shape[:1], jnp.floating)
    if min_logit is not None:
        check_array(f"{name}.min_logit", min_logit, field_axes, field_shape, jnp.floating)
    if log_normalizer is not None:
        check_array(f"{name}.log_normalizer", log_normalizer, field_axes, field_shape, jnp.floating)
    if logits.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one token in its vocabulary, got shape {logits.shape}")
    return logits.shape[-1]


def check_number(name: str, value: Any, expected: str, least: float, most: float) -> None:
    """Raise ValueError unless `value` is one number in [least, most]. For a traced value only the shape is checked."""
    if isinstance(value, Tracer):
        is_valid = value.shape == ()
    else:
        array = np.asarray(value)
        is_valid = array.shape == () and jnp.issubdtype(array.dtype, jnp.number) and least <= array <= most
    if not is_valid:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_array(name: str, array: Array, axes: str, shape: tuple[int | None, ...], kind: type[np.generic]) -> None:
    """Raise ValueError unless `array` has this shape, where None is any size, and a supported dtype of this kind."""
    if not hasattr(array, "dtype"):
        raise ValueError(f"{name} must be an array, got {type(array).__name__}")
    got = jnp.shape(array)
    expected = str(tuple("any" if n is None else n for n in shape)).replace("'", "")
    if len(got) != len(shape) or any(n is not None and n != m for n, m in zip(shape, got, strict=True)):
        raise ValueError(f"{name} must have shape {axes} = {expected}, got {got}")
    dtype = jnp.result_type(array)
    if kind is jnp.floating and dtype.name not in FLOATS:
        raise ValueError(f"{name} must be of one of the dtypes {', '.join(FLOATS)}, got {dtype}")
    if not jnp.issubdtype(dtype, kind):
        raise ValueError(f"{name} must be of {kind.__name__} dtype, got {dtype}")
