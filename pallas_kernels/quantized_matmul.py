"""The product of up to some hundred rows with a quantised matrix, with the gate or the sum after it.

The kernel reads the matrix once for a block of rows, by copies to shared memory that run several tiles ahead of the
tensor cores, or for few rows of e4m3 and of integers of 4 bits by many programs that wait for their loads in turns. The
tensor cores get the codes of a tile as one operand of numbers of 16 bits. The threads that read words have all numbers
that the tensor cores want from them, because the inputs are put in the order of the codes first. Scales and zeros are
read one tile ahead. Where a matrix has few outputs, several programs share the inputs of an output, and XLA adds their
sums.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import quantized_bytes
from pallas_kernels.launch import NUM_MULTIPROCESSORS, call
from pallas_kernels.quantized import (
    WORDS_IN_BLOCK,
    Quantized,
    as_pair,
    as_scale,
    decode,
    decode_pairs,
    field_of,
    has_pairs,
    joined,
    offset_of,
    unsupported_weight,
)
from pallas_kernels.quantized_inputs import Inputs, arranged, scaled_dtype
from pallas_kernels.triton import plgpu

MAX_ROWS = 512
_MOST_ROWS = 256  # XLA multiplies more rows faster, after it has turned the matrix into floats
_FEW_ROWS = 64  # the same for numbers that are not decoded by pairs, and for small groups with other scales than powers
_MIN_ROWS = 16  # in the smallest product of the tensor cores
_MOST_SCALED = 16  # rows of a program up to which the product of each step is scaled


class Tiling(NamedTuple):
    """How the matrix is split: among programs, and by each program over time."""

    outputs: int  # outputs of a program, a power of two
    words: int  # words of a product that it reads for each output, a power of two from 8 on
    num_warps: int  # warps of a program
    num_stages: int  # tiles that a program has in flight, in shared memory; 1 is the one that it waits for, in none
    num_splits: int = 1  # programs that share the inputs of an output
    rows: int = 64  # the most rows of a program, a power of two
    num_tiles: int = 1  # products of a step, whose words lie side by side


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
    is_fast = has_pairs(weight, x.dtype) and (weight.scale.dtype == jnp.uint8 or weight.inputs_of_scale % 64 == 0)
    return x.size <= (_MOST_ROWS if is_fast else _FEW_ROWS) * x.shape[-1]


def default_tiling(weight: Quantized, num_outputs: int, num_rows: int, dtype: DTypeLike = jnp.bfloat16) -> Tiling:
    """Choose a tiling whose steps keep to a group of inputs where groups are large, and that fills the device.

    On the fast tensor cores the left factor of a product, here the outputs of all halves, has at least 64 rows.
    """
    halves = weight.shape[0] // num_outputs
    words, least_steps = 128 // weight.places, 8
    is_few = num_rows <= 16
    if not has_pairs(weight, dtype):
        words = 16 if weight.group[1] == 16 * weight.places else 32
        tiling, programs_wanted = Tiling(64 // halves, words, 4, 4 if num_rows <= 32 else 3), 2 * NUM_MULTIPROCESSORS
    elif num_rows > 128 and weight.code == "e4m3" and scaled_dtype(weight, num_rows) is not None:
        tiling = Tiling(128 // halves, words // 2, 8, 4, rows=256)
        programs_wanted = 3 * NUM_MULTIPROCESSORS // 4
    elif num_rows > 64:
        tiling, programs_wanted = Tiling(128 // halves, words // 2, 4, 3, rows=128), 3 * NUM_MULTIPROCESSORS // 4
    elif is_few and weight.code == "e2m1":
        tiling, programs_wanted, least_steps = Tiling(64 // halves, words, 4, 3), 4 * NUM_MULTIPROCESSORS, 2
    elif weight.code == "e2m1":
        tiling, programs_wanted = Tiling(64, words, 4, 4), NUM_MULTIPROCESSORS
    elif is_few and (weight.bits == 4 or scaled_dtype(weight, num_rows) == jnp.float16):
        # Programs that wait for their loads in turns are faster than copies that run ahead of the tensor cores.
        tiling, least_steps = Tiling(64 // halves, 32, 4, 1), 2
        programs_wanted = (2 if halves > 1 else 4) * 15 * NUM_MULTIPROCESSORS // 16
    elif is_few:
        outputs = 64 // halves if weight.code == "e4m3" else 64
        tiling, programs_wanted = Tiling(outputs, words, 2, 4), 3 * NUM_MULTIPROCESSORS // 2
    else:
        tiling, programs_wanted = Tiling(128 // halves, words, 4, 3), NUM_MULTIPROCESSORS
    programs = pl.cdiv(num_outputs, tiling.outputs) * pl.cdiv(num_rows, tiling.rows)
    num_steps = pl.cdiv(weight.values.shape[1], tiling.words)
    num_splits = 1
    while num_splits < 8 and programs * num_splits < programs_wanted and num_steps >= 2 * least_steps * num_splits:
        num_splits *= 2
    return tiling._replace(num_splits=num_splits)


def matmul(
    x: Array,
    weight: Quantized,
    *,
    norm: tuple[Array, float] | tuple[Array, float, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply rows by each row of a matrix, summing in float32, or integers of 8 bits without rounding.

    Args:
        x: [T, K] bfloat16 or float16, T <= 512.
        weight: [N, K]. Its numbers are rounded to the dtype of x, after their scale where a step of the kernel meets
            several scales. Codes of 8 bits are not rounded (`quantized_inputs`).
        norm: scale [K], epsilon and optionally an offset: a row is first divided by its root mean square and multiplied
            by the scale, to which the offset is added.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [T, N], or [T, N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        tiling: how the matrix is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [T, N], or with an activation [T, N / 2].

    Raises:
        ValueError: the tiling has steps of several scales for codes of 8 bits.
    """
    num_rows, dtype = x.shape[0], dtype or x.dtype
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    tiling = tiling or default_tiling(weight, num_outputs, num_rows, x.dtype)
    num_steps = pl.cdiv(weight.values.shape[1], tiling.words * tiling.num_tiles * tiling.num_splits)
    inputs_of_tile = tiling.words * weight.places
    changed = scaled_dtype(weight, num_rows)
    if changed is not None and weight.group[1] % inputs_of_tile:
        raise ValueError(f"tiling.words must divide the words of a scale, got {tiling.words} for {weight.group}")
    size = num_steps * tiling.num_splits * tiling.num_tiles * inputs_of_tile  # of the inputs that all programs ask for
    padded_rows = min(tiling.rows, max(_MIN_ROWS, pl.next_power_of_2(num_rows)))
    is_split = tiling.num_splits > 1
    num_parts = 1 if activation is None or not is_split else 2
    shape = (num_rows, num_outputs) if not is_split else (tiling.num_splits, num_parts, num_rows, num_outputs)
    y = call(
        partial(
            _quantized_matmul_kernel,
            activation=activation,
            tile=(tiling.outputs, tiling.words, padded_rows, tiling.num_tiles),
            num_splits=tiling.num_splits,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct(shape, jnp.float32 if is_split else dtype),
        (
            arranged(x, weight, size, dtype=changed, norm=norm, interpret=interpret),
            weight,
            None if is_split else residual,
        ),
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
    inputs, out_ref, *, activation, tile: tuple[int, int, int, int], num_splits: int, interpret: bool
):
    x, weight, residual_ref = inputs
    num_rows, num_outputs = x.num_rows, out_ref.shape[-1]
    num_words = weight.values.shape[1]
    outputs, width, padded_rows, num_tiles = tile
    row = pl.program_id(0) * padded_rows + jax.lax.iota(jnp.int32, padded_rows)[:, None]
    output = pl.program_id(1) * outputs + jax.lax.iota(jnp.int32, outputs)[:, None]
    # The rows of both halves of the matrix are multiplied as one: the tensor cores want many.
    num_halves = 1 if activation is None else 2
    half, place = halves_of(outputs, num_halves)
    place += pl.program_id(1) * outputs
    num_steps = x.num_inputs // (width * weight.places * num_tiles * num_splits)
    total = sums(
        x,
        weight,
        row,
        None if num_rows % padded_rows == 0 else row < num_rows,
        half * num_outputs + place,
        None if num_outputs % outputs == 0 else place < num_outputs,
        width=width,
        num_tiles=num_tiles,
        first_step=pl.program_id(2) * num_steps,
        num_steps=num_steps,
        is_ragged=num_words != width * num_tiles * num_steps * num_splits,
        interpret=interpret,
    )
    totals = jnp.split(total, num_halves)
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


def halves_of(outputs: int, num_halves: int) -> tuple[Array, Array]:
    """Return the half and the place in it, [num_halves outputs, 1] each, of rows that are multiplied as one."""
    row = jax.lax.iota(jnp.int32, num_halves * outputs)[:, None]
    size = jnp.full_like(row, outputs)
    return jax.lax.div(row, size), jax.lax.rem(row, size)


def sums(
    x: Inputs,
    weight: Quantized,
    row: Array,
    has_row: Array | None,
    output: Array,
    has_output: Array | None,
    *,
    width: int,
    num_tiles: int,
    first_step: Array | int,
    num_steps: Array | int,
    is_ragged: bool,
    interpret: bool,
) -> Array:
    """Return the products of rows with some outputs of a quantised matrix, inside a kernel.

    Args:
        x: references to what `arranged` gave.
        weight: references, of a matrix [N, K].
        row: [R, 1] int32, rows of x.
        has_row: [R, 1], which of them to read; None is all.
        output: [outputs, 1] int32, rows of the matrix.
        has_output: [outputs, 1], which of them to read; None is all.
        width: words of a tile.
        num_tiles: tiles of a step.
        first_step: step to begin with.
        num_steps: number of steps.
        is_ragged: whether a step may read past the end of a row of the matrix.
        interpret: whether the kernel is interpreted.

    Returns:
        [outputs, R] float32.
    """
    if x.factor is not None:
        at = {
            "width": width,
            "num_tiles": num_tiles,
            "first_step": first_step,
            "num_steps": num_steps,
            "is_ragged": is_ragged,
        }
        return quantized_bytes.sums(x, weight, row, has_row, output, has_output, **at, interpret=interpret)
    outputs, num_rows = output.shape[0], row.shape[0]
    places, num_words = weight.places, weight.values.shape[1]
    per_group, group = weight.inputs_of_scale, width * places  # inputs that share a scale, and inputs of a tile
    all_inputs = weight.group[1] == 0
    one_group = all_inputs or (per_group % group == 0 and weight.minimum is None)
    # The product of a tile is scaled, or where it meets several scales, or has too many numbers, the codes are. Scales
    # of more bits than bfloat16 has cost two operations on codes.
    most_rows = _MOST_SCALED if weight.scale.dtype in (jnp.uint8, jnp.bfloat16) else 4 * _MOST_SCALED
    scales_codes = not all_inputs and (not one_group or num_rows > most_rows)
    field, offset = field_of(weight, interpret), offset_of(weight)
    is_paired = has_pairs(weight, x.dtype)
    # Numbers e4m3 and e2m1 times the scales of groups are left small enough for bfloat16 with this factor.
    unit = 2.0**63 if is_paired and field != 1 and scales_codes else 1.0
    # Groups of a tile; a group is met twice where the groups of the matrix do not fit the tiles.
    num_groups = 1 if one_group else width // WORDS_IN_BLOCK
    if group % per_group == 0:
        num_groups = min(num_groups, group // per_group)
    # Words stand in an array [outputs, width], or [outputs, groups, width] for several groups, which have an axis then.
    shape = (outputs, width) if num_groups == 1 else (outputs, num_groups, width // num_groups)
    at_group, word = jnp.zeros((1, 1), jnp.int32), jax.lax.iota(jnp.int32, shape[-1])[None]
    if num_groups > 1:
        at_group = jax.lax.iota(jnp.int32, num_groups)[None, :, None]
        word = at_group * shape[-1] + word[None]

    def beside_words(x: Array) -> Array:
        return x if num_groups == 1 else x[:, :, None]

    group_refs = _Groups(weight.scale, weight.zero, weight.minimum)
    of_outputs = [] if has_output is None else [has_output]
    of_rows = [] if has_row is None else [has_row]

    def load(ref, *index, masks: list[Array]) -> Array:
        mask = reduce(jnp.logical_and, masks) if masks else None
        return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))

    def load_groups(at: Array | int) -> _Groups:
        """Load the numbers of the groups of a tile as they are: [outputs] of one, or [outputs, groups, 1]."""
        column = at * group + at_group * (group // num_groups)
        masks = [*map(beside_words, of_outputs), column < weight.shape[1]]  # tiles after the last one are asked for too
        index = beside_words(output) // weight.group[0], jax.lax.div(column, jnp.full_like(column, per_group))
        if num_groups == 1:
            index = index[0][:, 0], jnp.broadcast_to(index[1][:, 0], (outputs,))
            masks = [mask[:, 0] for mask in masks]
        return jax.tree.map(lambda ref: load(ref, *index, masks=masks), group_refs)

    def spread(x: Array) -> Array:
        """Give numbers of groups the axis of words."""
        return x[:, None] if num_groups == 1 else x

    def numbers(words: Array, groups: _Groups) -> Array:
        """Return the operand of the tensor cores, [outputs, group], without scales that the product gets."""
        if is_paired:
            return joined(decode_pairs(weight, words, *operands_of(groups), interpret))
        groups = jax.tree.map(spread, groups)
        subtracted: Array | float = offset
        if groups.zero is not None:
            subtracted = groups.zero.astype(jnp.float32) + offset
        codes = [decode(weight, words, place, interpret) for place in range(places)]
        codes = [code - subtracted if weight.code == "int" else code * field for code in codes]
        if weight.code != "int" and groups.zero is not None:
            codes = [code - subtracted for code in codes]
        if scales_codes:
            codes = [code * as_scale(groups.scale) for code in codes]
            if groups.minimum is not None:
                codes = [code + groups.minimum.astype(jnp.float32) for code in codes]
        codes = [code.astype(x.dtype) for code in codes]
        return joined(list(zip(codes[: places // 2], codes[places // 2 :], strict=True)))

    def operands_of(groups: _Groups) -> tuple[Array | int | None, list[Array | int]]:
        """Return the zeros and the scales for `decode_pairs`."""

        def of_words(x: Array) -> Array:
            return jnp.broadcast_to(spread(jnp.asarray(as_pair(x))), shape)

        zero = None
        subtracted = offset if weight.bits == 4 else 0.0
        if weight.code == "int" and groups.zero is not None:
            zero = of_words(-subtracted - groups.zero.astype(jnp.float32))
        elif weight.code == "int" and subtracted:
            zero = as_pair(-subtracted)
        if not scales_codes:
            return zero, [] if field == 1 else [as_pair(field)]
        scale = as_scale(groups.scale) * jnp.float32(field / unit)
        scales: list[Array | int] = [of_words(scale)]
        if weight.scale.dtype not in (jnp.uint8, jnp.bfloat16):
            scales.append(of_words(scale - scale.astype(jnp.bfloat16).astype(jnp.float32)))
        return zero, scales

    def add(total: Array, at: Array, groups: _Groups) -> Array:
        column = at * width + word
        in_row = [column < num_words] if is_ragged else []
        of_tile = load(x.numbers, 0, row, at * group + jax.lax.iota(jnp.int32, group)[None], masks=of_rows)
        words = load(weight.values, beside_words(output), column, masks=[*in_row, *map(beside_words, of_outputs)])
        product = plgpu.dot(numbers(words, groups), of_tile.T)
        if not (scales_codes or all_inputs):
            product *= as_scale(groups.scale[:, None])
        return total + product  # the tensor cores add to the sum

    def step(index, carry):
        total, of_tiles = carry
        first = (first_step + index) * num_tiles
        following = [load_groups(first + num_tiles + i) for i in range(num_tiles)]
        for i, groups in enumerate(of_tiles):
            total = add(total, first + i, groups)
        return total, following

    total = jnp.zeros((outputs, num_rows), jnp.float32)
    of_tiles = [load_groups(first_step * num_tiles + i) for i in range(num_tiles)]
    total, _ = jax.lax.fori_loop(0, num_steps, step, (total, of_tiles))
    if unit != 1:
        total *= unit
    if all_inputs:
        total *= as_scale(load(weight.scale, output // weight.group[0], jnp.zeros_like(output), masks=of_outputs))
    return total
