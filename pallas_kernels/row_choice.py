"""The choice among many experts, in one launch with a program for each row.

A program of one warp finds the largest score, then the largest of the others, as often as experts are chosen. Each
round is a reduction over a few registers and five exchanges inside the warp. To compare each score with each, as
`choice.py` does for few experts, takes longer for 128 experts than the launches of XLA.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import call
from pallas_kernels.triton import plgpu

MAX_ROWS, MAX_EXPERTS, MAX_CHOSEN = 64, 512, 16
_TAKEN = jnp.iinfo(jnp.int32).min  # key of a place that is no longer compared
Largest = Callable[[Array, int], tuple[Array, Array]]  # of scores [R, E] and k: the k largest, and their places [R, k]


class Rule(Protocol):
    """The choice of experts, given a function that finds the largest scores. It can be hashed."""

    def __call__(self, params: Mapping[str, Array], logits: Array, largest: Largest) -> tuple[Array, Array]: ...


def unsupported(logits: Array, num_chosen: int) -> str | None:
    """Return why the kernel cannot choose by logits [T, E], or None where it can."""
    num_rows, num_experts = logits.shape
    for name, size, most in (
        ("rows", num_rows, MAX_ROWS),
        ("experts", num_experts, MAX_EXPERTS),
        ("chosen experts", num_chosen, MAX_CHOSEN),
    ):
        if size > most:
            return f"the kernel takes at most {most} {name}, got {size}"
    return None


def choose(
    logits: Array, params: Mapping[str, Array], rule: Rule, num_chosen: int, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Choose experts for each row.

    Args:
        logits: [T, E] float32.
        params: vectors [E], which the rule reads.
        rule: function of the vectors, of logits [1, E'] and of `largest` that returns experts [1, k'] int32 and weights
            [1, k'] float32. E' and k' are the powers of two from E and k on. Logits past the last expert are -inf, and
            vectors 0. `largest` finds no expert past the last: beyond the k-th its places are E', and its scores -inf.
            The rule consists of operations by element, of broadcasts and of reductions, and compares places.
        num_chosen: k.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        The experts [T, k] int32, the lower first of equal ones, and their weights [T, k] float32.
    """
    num_rows = logits.shape[0]
    outputs = tuple(jax.ShapeDtypeStruct((num_rows, num_chosen), dtype) for dtype in (jnp.int32, jnp.float32))
    return call(
        partial(_row_choice_kernel, rule=rule),
        outputs,
        (logits, dict(params)),
        grid=(num_rows,),
        num_warps=1,
        interpret=interpret,
    )


def _row_choice_kernel(inputs, outputs, *, rule: Rule):
    logits_ref, params = inputs
    row, num_experts, num_chosen = pl.program_id(0), logits_ref.shape[1], outputs[0].shape[1]
    expert, number = _numbers(num_experts), _numbers(num_chosen)
    exists = expert < num_experts
    logits = plgpu.load(logits_ref.at[row, expert], mask=exists, other=-jnp.inf)[None]
    vectors = {name: plgpu.load(ref.at[expert], mask=exists, other=0.0) for name, ref in params.items()}
    chosen = rule(vectors, logits, partial(_largest, num_experts))
    for ref, values in zip(outputs, chosen, strict=True):
        plgpu.store(ref.at[row, number], values[0], mask=number < num_chosen)


def _largest(num_experts: int, scores: Array, count: int) -> tuple[Array, Array]:
    """Return the largest of the first scores of a row [1, E'], and their places, the lower first of equal ones.

    NaN is below every number.
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    place, number = _numbers(num_experts)[None], _numbers(count)[None]
    keys = jnp.where(place < num_experts, _keys(scores), _TAKEN)
    places = jnp.full_like(number, scores.shape[1])
    for index in range(count):
        best = jax.lax.argmax(keys, 1, jnp.int32)[:, None]  # the lowest of equal ones
        places = jnp.where(number == index, best, places)
        keys = jnp.where(place == best, _TAKEN, keys)
    is_at = places[:, :, None] == place[None]
    return jnp.max(jnp.where(is_at, scores[:, None], -jnp.inf), axis=2), places


def _keys(numbers: Array) -> Array:
    """Return integers above `_TAKEN` that compare as numbers do."""
    bits = jax.lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)  # -0 equals 0
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _numbers(size: int) -> Array:
    """Return 0, 1, ..., as many as the next power of two."""
    return jax.lax.iota(jnp.int32, 1 << (size - 1).bit_length())
