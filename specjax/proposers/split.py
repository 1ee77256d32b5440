"""The split of a batch into the rows that speculate and those that decode without drafts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.parallel.loops import as_carry, varying
from specjax.types import Array, Context, PyTree


def rows_to_draft(
    context: Context, num_draft_tokens: int, max_length: int | None, speculate_below: int | None
) -> tuple[Array, bool]:
    """Choose the rows that speculate.

    Args:
        context: the sequences of the batch.
        num_draft_tokens: K.
        max_length: a row speculates only where its length + K is below this number; None is no limit.
        speculate_below: rows speculate only while fewer rows than this number are active; None is no limit.

    Returns:
        Whether each row speculates, [B] bool, and whether active rows can be left out (static).
    """
    rows = context.active
    longest = context.tokens.shape[1] - 1  # an active row has room for at least one more token
    is_limited = False
    if max_length is not None and longest + num_draft_tokens >= max_length:
        is_limited = True
        rows &= context.length + num_draft_tokens < max_length
    if speculate_below is not None:
        rows &= jnp.sum(context.active) < speculate_below
    return rows, is_limited or speculate_below is not None


def run_where(rows: Array, function: Callable[..., tuple[PyTree, PyTree]], *operands: Any) -> tuple[PyTree, PyTree]:
    """Call `function(*operands) -> (drafts, state)` if any of the rows [B] is true.

    If none is, the drafts are zeros, which no row reads, and the state is the last operand, unchanged.
    """

    traced_once = jax.jit(lambda *operands: function(*operands))

    def skip(*operands: Any) -> tuple[PyTree, PyTree]:
        drafts, state = jax.eval_shape(traced_once, *operands)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafts)
        return varying(zeros, drafts), varying(operands[-1], state)

    return jax.lax.cond(jnp.any(rows), traced_once, skip, *operands)


def run_where_in_place(
    rows: Array, function: Callable[..., tuple[PyTree, PyTree]], *operands: Any
) -> tuple[PyTree, PyTree]:
    """Do as `run_where` does, and write to the state where it lies, for states that hold the target's pools.

    A loop of at most one round does so. The compiler gives a branch copies of the arrays that it changes.
    """
    *given, state = operands

    def body(carry: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
        return jnp.zeros((), bool), *function(*given, carry[2])

    drafts, _ = jax.eval_shape(function, *operands)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafts)
    carry = as_carry(body, (jnp.any(rows), zeros, state), rows, given)
    _, drafts, state = jax.lax.while_loop(lambda carry: carry[0], body, carry)
    return drafts, state
