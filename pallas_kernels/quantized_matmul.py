"""The product of a few rows with a quantised matrix, with the gate or the sum after it.

The kernel is bound by memory: it reads the matrix once, by copies to shared memory that run several tiles ahead of the
tensor cores, which get the codes as numbers of 16 bits. Scales and zeros are read one tile ahead. Where a matrix has
few outputs, several programs share the inputs of an output, and XLA adds their sums.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import NUM_MULTIPROCESSORS, Ref, call
from pallas_kernels.quantized import (
    WORDS_IN_BLOCK,
    Quantized,
    as_scale,
    decode,
    decode_pairs,
    field_of,
    has_pairs,
    offset_of,
    unsupported_weight,
)
from pallas_kernels.triton import plgpu

MAX_ROWS = 512
_MOST_ROWS = 64  # XLA multiplies more rows faster, after it has turned the matrix into floats
_MIN_ROWS = 16  # in the smallest product of the tensor cores


class Tiling(NamedTuple):
    """How the matrix is split: among programs, and by each program over time."""

    outputs: int  # outputs of a program, a power of two
    words: int  # words that it reads for each output at a time, a power of two from 16 on
    num_warps: int  # warps of a program
    num_stages: int  # tiles that a program has in flight
    num_splits: int = 1  # programs that share the inputs of an output
    rows: int = 64  # the most rows of a program, a power of two


class _Groups(NamedTuple):
    """Numbers of the groups of a step: references, or what was loaded."""

    scale: Any
    zero: Any
    minimum: Any


def unsupported(x: Array, weight: Quantized) -> str | None:
    """Return why the kernel cannot multiply x [..., K] by a weight [N, K], or None where it can."""
    if x.size > MAX_ROWS * x.shape[-1]:
        return f"the kernel takes at most {MAX_ROWS} rows, got shape {x.shape}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel takes bfloat16 or float16 rows, got {x.dtype}"
    return unsupported_weight(weight)


def is_worthwhile(x: Array, weight: Quantized) -> bool:
    """Return whether the kernel is faster than XLA, which turns a matrix into floats first: for few rows."""
    return x.size <= _MOST_ROWS * x.shape[-1]


def default_tiling(weight: Quantized, num_outputs: int, num_rows: int, dtype: DTypeLike = jnp.bfloat16) -> Tiling:
    """Choose a tiling whose steps keep to a group of inputs where groups are large, and that fills the device."""
    halves = weight.shape[0] // num_outputs
    words = 16 if weight.group[1] == 16 * weight.places else 32
    tiling, programs_wanted = Tiling(64 // halves, words, 4, 4 if num_rows <= 32 else 3), 2 * NUM_MULTIPROCESSORS
    if has_pairs(weight, dtype) and num_rows <= 16:
        # Two warps use the tensor cores without a barrier between places, and each warp has 32 outputs or more: with 16
        # the compiler passes the numbers on through shared memory.
        few = 3 * NUM_MULTIPROCESSORS // (1 if weight.bits == 4 else 2)
        tiling, programs_wanted = Tiling(64, 16 if weight.bits == 4 else 32, 2, 4), few
    elif has_pairs(weight, dtype):
        # On the fast tensor cores the left factor of a product, here some outputs, has at least 64 rows.
        is_wide = words == 16 or weight.bits == 8
        tiling = Tiling(128 // halves if is_wide else 64, words, 4, 3)
        programs_wanted = NUM_MULTIPROCESSORS if words == 16 else 3 * NUM_MULTIPROCESSORS // 2
    programs = pl.cdiv(num_outputs, tiling.outputs)
    num_steps = pl.cdiv(weight.values.shape[1], tiling.words)
    num_splits = 1
    while num_splits < 8 and programs * num_splits < programs_wanted and num_steps >= 16 * num_splits:
        num_splits *= 2
    return tiling._replace(num_splits=num_splits)


def matmul(
    x: Array,
    weight: Quantized,
    *,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply rows by each row of a matrix, summing in float32.

    Args:
        x: [T, K] bfloat16 or float16, T <= 512.
        weight: [N, K]. Its numbers are rounded to the dtype of x, after their scale where a step of the kernel meets
            several scales.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [T, N], or [T, N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        tiling: how the matrix is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [T, N], or with an activation [T, N / 2].
    """
    num_rows, dtype = x.shape[0], dtype or x.dtype
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    tiling = tiling or default_tiling(weight, num_outputs, num_rows, x.dtype)
    padded_rows = min(tiling.rows, max(_MIN_ROWS, pl.next_power_of_2(num_rows)))
    is_split = tiling.num_splits > 1
    num_parts = 1 if activation is None or not is_split else 2
    shape = (num_rows, num_outputs) if not is_split else (tiling.num_splits, num_parts, num_rows, num_outputs)
    y = call(
        partial(
            _quantized_matmul_kernel,
            activation=activation,
            tile=(tiling.outputs, tiling.words, padded_rows),
            num_splits=tiling.num_splits,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct(shape, jnp.float32 if is_split else dtype),
        (x, weight, None if is_split else residual),
        # Programs of the same outputs run at the same time, so that the cache serves all but one of them.
        grid=(pl.cdiv(num_rows, padded_rows), pl.cdiv(num_outputs, tiling.outputs), tiling.num_splits),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    )
    if not is_split:
        return y
    y = jnp.sum(y, axis=0)
    y = y[0] if activation is None else activation(y[0]) * y[1]
    return (y if residual is None else y + residual.astype(jnp.float32)).astype(dtype)


def _quantized_matmul_kernel(
    inputs, out_ref, *, activation, tile: tuple[int, int, int], num_splits: int, interpret: bool
):
    x_ref, weight, residual_ref = inputs
    (num_rows, _), num_outputs = x_ref.shape, out_ref.shape[-1]
    num_words = weight.values.shape[1]
    outputs, width, padded_rows = tile
    row = pl.program_id(0) * padded_rows + jax.lax.iota(jnp.int32, padded_rows)[:, None]
    output = pl.program_id(1) * outputs + jax.lax.iota(jnp.int32, outputs)[:, None]
    halves = (0,) if activation is None else (0, num_outputs)  # the first row of each half of the matrix
    num_steps = pl.cdiv(pl.cdiv(num_words, width), num_splits)
    totals = sums(
        x_ref,
        weight,
        row,
        row < num_rows,
        [half + output for half in halves],
        None if num_outputs % outputs == 0 else output < num_outputs,
        width=width,
        first_step=pl.program_id(2) * num_steps,
        num_steps=num_steps,
        is_ragged=num_words != width * num_steps * num_splits,
        interpret=interpret,
    )
    at = row.T, output
    exists = (at[0] < num_rows) & (at[1] < num_outputs)
    if num_splits > 1:
        for i, total in enumerate(totals):
            plgpu.store(out_ref.at[pl.program_id(2), i, *at], total, mask=exists)
        return
    y = totals[0] if activation is None else activation(totals[0]) * totals[1]
    if residual_ref is not None:
        y += plgpu.load(residual_ref.at[at], mask=exists, other=0.0).astype(jnp.float32)
    plgpu.store(out_ref.at[at], y.astype(out_ref.dtype), mask=exists)


def sums(
    x_ref: Ref,
    weight: Quantized,
    row: Array,
    has_row: Array,
    parts: list[Array],
    has_output: Array | None,
    *,
    width: int,
    first_step: Array | int,
    num_steps: Array | int,
    is_ragged: bool,
    interpret: bool,
) -> list[Array]:
    """Return the products of rows with parts of a quantised matrix, inside a kernel.

    Args:
        x_ref: reference to [T, K].
        weight: references, of a matrix [N, K].
        row: [R, 1] int32, rows of x.
        has_row: [R, 1], which of them to read.
        parts: rows of the matrix, [outputs, 1] int32 each.
        has_output: [outputs, 1], which of them to read; None is all.
        width: words of a step.
        first_step: step to begin with.
        num_steps: number of steps.
        is_ragged: whether a step may read past the end of a row of the matrix.
        interpret: whether the kernel is interpreted.

    Returns:
        For each part [outputs, R] float32.
    """
    size, outputs = x_ref.shape[1], parts[0].shape[0]
    places, num_words = weight.places, weight.values.shape[1]
    per_group, group = weight.inputs_of_scale, width * places  # inputs that share a scale, and inputs of a step
    all_inputs = weight.group[1] == 0
    one_group = all_inputs or (per_group % group == 0 and weight.minimum is None)
    field, offset = field_of(weight, interpret), offset_of(weight)
    is_paired = has_pairs(weight, x_ref.dtype)
    # Numbers e4m3 and e2m1 times the scales of groups are left small enough for bfloat16 with this factor.
    unit = 2.0**63 if is_paired and weight.code != "int" and not one_group else 1.0
    span = min(group, math.gcd(per_group, group))  # inputs of a step that share a scale for certain
    group_refs = _Groups(weight.scale, weight.zero, weight.minimum)
    of_outputs = [] if has_output is None else [has_output]

    # Where the inputs of place 0 of words stand among the inputs of a step, in runs of a block's words.
    word = jax.lax.iota(jnp.int32, width)[None]
    in_block = jnp.full_like(word, WORDS_IN_BLOCK)
    in_step = jax.lax.div(word, in_block) * (WORDS_IN_BLOCK * places) + jax.lax.rem(word, in_block)

    def load(ref, *index, masks: list[Array]) -> Array:
        mask = reduce(jnp.logical_and, masks) if masks else None
        return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))

    def load_groups(part: Array, at: Array | int) -> _Groups:
        """Load the numbers of the groups of a step as they are: [outputs] for one group, else [outputs, groups]."""
        output, column, masks = part[:, 0], jnp.full((outputs,), at * group), [mask[:, 0] for mask in of_outputs]
        if not one_group:
            output, masks = part, of_outputs
            column = at * group + span * jax.lax.iota(jnp.int32, group // span)[None]
        masks = [*masks, column < weight.shape[1]]  # the step after the last one is asked for too
        return jax.tree.map(
            lambda ref: load(ref, output // weight.group[0], column // per_group, masks=masks), group_refs
        )

    def spread(x: Array) -> Array:
        """Repeat numbers of groups for each word, [outputs, width], or [outputs, 1] for one group."""
        if one_group:
            return x[:, None]
        repeated = jnp.broadcast_to(x[:, :, None], (*x.shape, width // x.shape[1]))
        return repeated.reshape(outputs, width)

    def numbers(words: Array, groups: _Groups) -> list[Array]:
        """Return the operands of the tensor cores, [outputs, width] for each place, without scales of a whole step."""
        if is_paired:
            return decode_pairs(weight, words, *operands_of(groups), interpret)
        subtracted: Array | float = offset
        if groups.zero is not None:
            subtracted = groups.zero.astype(jnp.float32) + offset
        codes = [decode(weight, words, place, interpret) for place in range(places)]
        codes = [code - subtracted if weight.code == "int" else code * field for code in codes]
        if weight.code != "int" and groups.zero is not None:
            codes = [code - subtracted for code in codes]
        if not one_group:
            codes = [code * as_scale(groups.scale) for code in codes]
            if groups.minimum is not None:
                codes = [code + groups.minimum.astype(jnp.float32) for code in codes]
        return [code.astype(x_ref.dtype) for code in codes]

    def operands_of(groups: _Groups) -> tuple[Array | None, list[Array]]:
        """Return the zeros and the scales for `decode_pairs`, each [outputs, width]."""

        def of_words(x: Array) -> Array:
            return jnp.broadcast_to(x.astype(jnp.bfloat16), (outputs, width))

        zero = None
        if weight.code == "int":
            zero = of_words(jnp.float32(-offset) - (0 if groups.zero is None else groups.zero.astype(jnp.float32)))
        if one_group:
            return zero, [] if field == 1 else [of_words(jnp.float32(field))]
        scale = as_scale(groups.scale) * jnp.float32(field / unit)
        scales = [of_words(scale)]
        if weight.scale.dtype not in (jnp.uint8, jnp.bfloat16):
            scales.append(of_words(scale - scale.astype(jnp.bfloat16).astype(jnp.float32)))
        return zero, scales

    def step(index, carry):
        totals, groups = carry
        at = first_step + index
        following = [load_groups(part, at + 1) for part in parts]
        column = at * width + jax.lax.iota(jnp.int32, width)[None]
        in_row = [column < num_words] if is_ragged else []
        # Where places of words stand among the inputs; codes after the last input multiply nothing.
        first = at * group + in_step
        columns = [first + WORDS_IN_BLOCK * place for place in range(places)]
        in_x = [[x_column < size] if is_ragged or weight.padding else [] for x_column in columns]
        xs = [load(x_ref, row, *at, masks=[has_row, *masks]) for *at, masks in zip(columns, in_x, strict=True)]
        found = []
        for part, total, loaded in zip(parts, totals, groups, strict=True):
            of_words = jax.tree.map(spread, loaded)
            words = load(weight.values, part, column, masks=in_row + of_outputs)
            pairs = zip(numbers(words, of_words), xs, strict=True)
            scaled_here = one_group and not all_inputs
            product = jnp.zeros_like(total) if scaled_here else total
            for w, x_of_place in pairs:
                product += plgpu.dot(w, x_of_place.T)  # the tensor cores add to the sum
            found.append(total + product * as_scale(of_words.scale) if scaled_here else product)
        return found, following

    totals = [jnp.zeros((outputs, row.shape[0]), jnp.float32)] * len(parts)
    groups = [load_groups(part, first_step) for part in parts]
    totals, _ = jax.lax.fori_loop(0, num_steps, step, (totals, groups))
    if unit != 1:
        totals = [total * unit for total in totals]
    if all_inputs:
        for i, part in enumerate(parts):
            totals[i] *= as_scale(load(weight.scale, part // weight.group[0], jnp.zeros_like(part), masks=of_outputs))
    return totals
