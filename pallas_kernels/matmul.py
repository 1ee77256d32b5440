"""The product of a few rows with a large matrix, with the gate or the sum after it, in one launch.

Bound by memory: the matrix is read once, by copies to shared memory that run several tiles ahead of the tensor cores.

On an H200, bfloat16, with what XLA takes for product and gate or sum in brackets, microseconds, alone: 14336 to 4096
26.2 (27.2) for one row and 25.8 (25.9) for six, 4096 to two halves of 14336 with a gate 56.1 (57.1), to 128256 241
(244). Among other kernels XLA's launches count too: of one row 14336 to 4096 30.0 (32.1), of six the gate 58.5 (59.3).
"""

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.rows import call, shared_bytes
from pallas_kernels.triton import plgpu

_ROWS = 16  # of the smallest product of the tensor cores
_MIN_BYTES = 1e8  # of the matrix: XLA reads smaller ones faster
_PROGRAMS = 132  # that fill the device


def is_supported(x: Array, weight: Array) -> bool:
    """Whether the kernel takes these and gains by it: at most 16 rows of 16-bit floats, and a large matrix."""
    return (
        plgpu is not None
        and x.size <= _ROWS * x.shape[-1]
        and x.dtype == weight.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and weight.size * weight.dtype.itemsize >= _MIN_BYTES
    )


def matmul(
    x: Array,
    weight: Array,
    *,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tile: tuple[int, int] | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    interpret: bool = False,
) -> Array:
    """The products of rows with each row of a matrix, summed in float32.

    Args:
        x: [T, D] bfloat16 or float16, T <= 16.
        weight: [N, D] of the same dtype.
        activation: the first half of the products goes through it, and is multiplied by the second.
        residual: [T, N], or with an activation [T, N / 2]: added at the end.
        dtype: of the result; None is that of x.
        tile: outputs of a program, and numbers of each that it reads at a time.
        num_warps: of a program.
        num_stages: tiles on their way at a time; None is at most as many as shared memory holds.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [T, N], or with an activation [T, N / 2].
    """
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    many = num_outputs >= 64 * _PROGRAMS
    tile = tile or ((64, 128) if many else (16, 256))
    if num_stages is None:
        tile_bytes = (tile[0] * (weight.shape[0] // num_outputs) + _ROWS) * tile[1] * weight.dtype.itemsize
        num_stages = min(4 if many else 5, shared_bytes() // tile_bytes)
    return call(
        partial(_matmul_kernel, activation=activation, tile=tile),
        jax.ShapeDtypeStruct((x.shape[0], num_outputs), dtype or x.dtype),
        (x, weight, residual),
        grid=(pl.cdiv(num_outputs, tile[0]),),
        num_warps=num_warps or (4 if many else 2),
        num_stages=num_stages,
        interpret=interpret,
    )


def _matmul_kernel(inputs, out_ref, *, activation, tile: tuple[int, int]):
    x_ref, weight_ref, residual_ref = inputs
    (num_rows, size), num_outputs = x_ref.shape, out_ref.shape[1]
    tile_outputs, width = tile
    outputs_first = tile_outputs >= 64  # of a product: 64 rows are the fewest of the fast one, 16 of the other
    row = jax.lax.iota(jnp.int32, _ROWS)[:, None]
    output = pl.program_id(0) * tile_outputs + jax.lax.iota(jnp.int32, tile_outputs)[:, None]
    halves = (0,) if activation is None else (0, num_outputs)

    def step(index, totals):
        column = index * width + jax.lax.iota(jnp.int32, width)[None]
        of_row = [column < size] if size % width else []  # no masks where tiles divide the matrix
        of_matrix = of_row + ([output < num_outputs] if num_outputs % tile_outputs else [])

        def load(ref, row, *masks: Array) -> Array:
            mask = reduce(jnp.logical_and, masks) if masks else None
            return plgpu.load(ref.at[row, column], mask=mask, other=None if mask is None else 0.0)

        x = load(x_ref, row, row < num_rows, *of_row)
        weights = [load(weight_ref, half + output, *of_matrix) for half in halves]
        products = [plgpu.dot(w, x.T) if outputs_first else plgpu.dot(x, w.T) for w in weights]
        return [total + product for total, product in zip(totals, products, strict=True)]

    shape = (tile_outputs, _ROWS) if outputs_first else (_ROWS, tile_outputs)
    totals = jax.lax.fori_loop(0, pl.cdiv(size, width), step, [jnp.zeros(shape, jnp.float32)] * len(halves))
    y = totals[0] if activation is None else activation(totals[0]) * totals[1]
    at = (row.T, output) if outputs_first else (row, output.T)
    exists = (at[0] < num_rows) & (at[1] < num_outputs)
    if residual_ref is not None:
        y += plgpu.load(residual_ref.at[at], mask=exists, other=0.0).astype(jnp.float32)
    plgpu.store(out_ref.at[at], y.astype(out_ref.dtype), mask=exists)
