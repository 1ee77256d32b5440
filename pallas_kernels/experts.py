"""The products of rows with the matrices of the experts that a router chose for them.

Pairs of a row and an expert are sorted by expert and cut into tiles of one expert each. A program gathers the rows of a
tile by their indices and multiplies them by a few outputs of its expert, so that a matrix is read once for each tile of
its expert, and no matrix of an expert without rows is read. Few rows are bound by memory: copies to shared memory run
several steps ahead of the tensor cores.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import quantized_matmul
from pallas_kernels.launch import Entry, Ref, call
from pallas_kernels.quantized import Quantized, unsupported_codes
from pallas_kernels.quantized_inputs import arranged
from pallas_kernels.triton import plgpu

MIN_TILE, MAX_TILE = 16, 128  # rows of a tile; the smallest product of the tensor cores has 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The pairs of a row and an expert, sorted by expert and cut into tiles that each have one expert."""

    row: Any  # [P] int32: the row of each place among the sorted pairs
    place: Any  # [P] int32: the place of each pair; pair p is expert p % k of row p // k
    start: Any  # [tiles] int32: the first place of each tile
    count: Any  # [tiles] int32: the number of its places, 0 for tiles that are not used
    expert: Any  # [tiles] int32: its expert; for tiles that are not used it is one that has rows
    num_rows: int = field(metadata={"static": True})  # most places of a tile


class Tiling(NamedTuple):
    """How the matrix of an expert is split: among programs, and by each program over time."""

    outputs: int  # outputs of a program, a power of two from 16 on
    width: int  # numbers, or words of codes, that it reads for each output at a time, a power of two from 16 on
    num_warps: int  # warps of a program
    num_stages: int  # steps that a program has in flight
    num_tiles: int = 1  # products with codes in a step, whose words lie side by side


def unsupported(x: Array, weight: Array | Quantized) -> str | None:
    """Return why the kernel cannot multiply rows x [T, K] by stacked matrices [E, N, K], or None where it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel takes bfloat16 or float16 rows, got {x.dtype}"
    if isinstance(weight, Quantized):
        return unsupported_codes(weight)
    return None if weight.dtype == x.dtype else f"the kernel takes one dtype, got rows {x.dtype} and {weight.dtype}"


def default_tiling(weight: Array | Quantized, num_parts: int, num_rows: int) -> Tiling:
    """Choose a tiling for tiles of `num_rows` rows, whose programs compute `num_parts` rows of the matrix an output."""
    is_few = num_rows == MIN_TILE
    if isinstance(weight, Quantized):
        words = 128 // weight.places  # a step of 128 inputs keeps to a group of checkpoints
        if is_few:
            return Tiling(64 // num_parts, words, 4, 4)
        return Tiling(128 // num_parts, words // 2 if num_rows == MAX_TILE else words, 4, 3)
    return Tiling(32 // num_parts, 256, 2, 4) if is_few else Tiling(128 // num_parts, 64, 8, 3)


def product(
    x: Array,
    weight: Array | Quantized,
    tiles: Tiles,
    *,
    is_gathered: bool,
    bias: Array | None = None,
    gate: Callable[[Array, Array], Array] | None = None,
    is_interleaved: bool = False,
    dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply each row by the matrices of its experts, summing in float32.

    Args:
        x: [T, K] bfloat16 or float16: the rows, or if not `is_gathered` [P, K], one row a place.
        weight: [E, N, K] of the same dtype, or quantised.
        tiles: the rows of each expert.
        is_gathered: whether the rows of a tile are those that it names.
        bias: [E, N] floats, added to the products.
        gate: function of two halves of the N products, which gives the results; None gives the products themselves.
        is_interleaved: whether the halves alternate; otherwise one comes after the other.
        dtype: of the result; None is the dtype of x.
        tiling: how a matrix is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [P, N], or with a gate [P, N / 2], in the order of places.
    """
    num_parts = 1 if gate is None else 2
    num_outputs = weight.shape[1] // num_parts
    tiling = tiling or default_tiling(weight, num_parts, tiles.num_rows)
    inputs: Any = x
    if isinstance(weight, Quantized):
        words = tiling.width * tiling.num_tiles
        size = pl.cdiv(weight.values.shape[-1], words) * words * weight.places
        inputs = arranged(x, weight, size, interpret=interpret)
    return call(
        partial(
            _expert_kernel,
            gate=gate,
            is_gathered=is_gathered,
            is_interleaved=is_interleaved,
            tile=(tiling.outputs, tiling.width, tiling.num_tiles),
            num_rows=tiles.num_rows,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct((tiles.row.shape[0], num_outputs), dtype or x.dtype),
        (inputs, weight, bias, tiles),
        grid=(pl.cdiv(num_outputs, tiling.outputs), tiles.start.shape[0]),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    )


def _expert_kernel(
    inputs,
    out_ref,
    *,
    gate,
    is_gathered: bool,
    is_interleaved: bool,
    tile: tuple[int, int, int],
    num_rows: int,
    interpret: bool,
):
    x, weight, bias_ref, tiles = inputs
    num_outputs = out_ref.shape[1]
    outputs, width, num_tiles = tile
    at_tile = pl.program_id(1)
    start, count, expert = (plgpu.load(ref.at[at_tile]) for ref in (tiles.start, tiles.count, tiles.expert))
    number = jax.lax.iota(jnp.int32, num_rows)[:, None]
    place, has_row = start + number, number < count
    row = plgpu.load(tiles.row.at[place], mask=has_row, other=0) if is_gathered else place
    output = pl.program_id(0) * outputs + jax.lax.iota(jnp.int32, outputs)[:, None]
    has_output = None if num_outputs % outputs == 0 else output < num_outputs
    parts = [output]
    if gate is not None:
        parts = [2 * output, 2 * output + 1] if is_interleaved else [output, num_outputs + output]
    size = weight.values.shape[-1] if isinstance(weight, Quantized) else x.shape[-1]  # words, or inputs
    num_steps = pl.cdiv(size, width * num_tiles) * jnp.minimum(count, 1)  # none where the tile is not used
    of_expert = jax.tree.map(lambda ref: Entry(ref, expert), weight)
    if isinstance(weight, Quantized):
        half, in_half = quantized_matmul.halves_of(outputs, len(parts))
        in_half += pl.program_id(0) * outputs
        total = quantized_matmul.sums(
            x,
            of_expert,
            row,
            has_row,
            2 * in_half + half if is_interleaved else half * num_outputs + in_half,
            None if has_output is None else in_half < num_outputs,
            width=width,
            num_tiles=num_tiles,
            first_step=0,
            num_steps=num_steps,
            is_ragged=size % (width * num_tiles) != 0,
            interpret=interpret,
        )
        totals = jnp.split(total, len(parts))
    else:
        totals = _sums(x, of_expert, row, has_row, parts, has_output, width=width, num_steps=num_steps)
    exists = has_row.T if has_output is None else has_row.T & has_output
    if bias_ref is not None:
        for i, part in enumerate(parts):
            bias = plgpu.load(bias_ref.at[expert, part], mask=has_output, other=None if has_output is None else 0.0)
            totals[i] += bias.astype(jnp.float32)
    y = totals[0] if gate is None else gate(*totals)
    plgpu.store(out_ref.at[place.T, output], y.astype(out_ref.dtype), mask=exists)


def _sums(
    x_ref: Ref,
    weight: Entry,
    row: Array,
    has_row: Array,
    parts: list[Array],
    has_output: Array | None,
    *,
    width: int,
    num_steps: Array,
) -> list[Array]:
    """Return the products of rows with parts of a matrix of floats, as `quantized_matmul.sums` does for codes."""
    size = x_ref.shape[-1]

    def load(ref, index: Array, column: Array, *masks: Array | None) -> Array:
        given = [mask for mask in masks if mask is not None]
        mask = reduce(jnp.logical_and, given) if given else None
        return plgpu.load(ref.at[index, column], mask=mask, other=None if mask is None else 0.0)

    def step(index, totals):
        column = index * width + jax.lax.iota(jnp.int32, width)[None]
        in_row = column < size if size % width else None
        x = load(x_ref, row, column, has_row, in_row)
        weights = [load(weight, part, column, has_output, in_row) for part in parts]
        return [total + plgpu.dot(w, x.T) for total, w in zip(totals, weights, strict=True)]

    totals = [jnp.zeros((parts[0].shape[0], row.shape[0]), jnp.float32)] * len(parts)
    return jax.lax.fori_loop(0, num_steps, step, totals)
