"""Arrays that loops and branches begin with, inside `jax.shard_map`.

There the type of an array says over which axes of the mesh it varies. Zeros vary over none, but a loop must not change
the types of its carry, and the branches of a `cond` must agree.
"""

from collections.abc import Callable
from typing import Any

import jax

from specjax.types import PyTree


def as_carry(body: Callable[[Any], PyTree], carry: PyTree, *operands: PyTree) -> PyTree:
    """Return the first carry of a loop, each array varying over the axes over which the loop makes it vary.

    Args:
        body: the body of the loop, a function of its carry.
        carry: the carry.
        operands: the other arrays that `body` uses. Where neither these nor the arrays of the carry vary, as outside of
            `jax.shard_map`, the carry is returned as it is, and `body` is not traced.
    """
    if not any(_axes(jax.typeof(x)) for x in jax.tree.leaves((carry, operands))):
        return carry
    while True:
        like = jax.eval_shape(body, carry)
        if not any(jax.tree.leaves(jax.tree.map(_missing, carry, like))):
            return carry
        carry = varying(carry, like)


def varying(arrays: PyTree, like: PyTree) -> PyTree:
    """Return arrays as they are, but varying over the axes, too, over which the types `like` vary."""

    def vary(x: Any, kind: Any) -> Any:
        axes = _missing(x, kind)
        return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x

    return jax.tree.map(vary, arrays, like)


def _missing(x: Any, kind: Any) -> frozenset[str]:
    return _axes(kind) - _axes(jax.typeof(x))


def _axes(kind: Any) -> frozenset[str]:
    """Return the axes over which arrays of a type vary."""
    return getattr(getattr(kind, "manual_axis_type", None), "varying", frozenset())
