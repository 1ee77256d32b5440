"""The product of a few rows with a large matrix, with the gate or the sum after it, in one launch.

The kernel is bound by memory: it reads the matrix once, by copies to shared memory that run several tiles ahead of the
tensor cores.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import NUM_MULTIPROCESSORS, call, shared_bytes
from pallas_kernels.triton import plgpu

_ROWS = 16  # rows in the smallest product of the tensor cores
_MIN_BYTES = 1e8  # size of the matrix; XLA reads a smaller one faster


class Tiling(NamedTuple):
    """How the matrix is split: among programs, and by each program over time."""

    outputs: int  # outputs of a program
    width: int  # numbers that it reads for each output at a time
    num_warps: int  # warps of a program
    num_stages: int  # tiles that a program has in flight


def unsupported(x: Array, weight: Array) -> str | None:
    """Return why the kernel cannot multiply x [..., D] by weight [N, D], or None where it can."""
    if x.size > _ROWS * x.shape[-1]:
        return f"the kernel takes at most {_ROWS} rows, got shape {x.shape}"
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel takes bfloat16 or float16 on both sides, got {x.dtype} and {weight.dtype}"
    return None


def is_worthwhile(x: Array, weight: Array) -> bool:
    """Return whether the kernel is faster than XLA: for a large matrix."""
    return weight.size * weight.dtype.itemsize >= _MIN_BYTES


def default_tiling(weight: Array, num_outputs: int) -> Tiling:
    """Choose a tiling with as many stages as fit in shared memory, up to the number that was measured to pay."""
    is_wide = num_outputs >= 64 * NUM_MULTIPROCESSORS
    outputs, width = (64, 128) if is_wide else (16, 256)
    tile_bytes = (outputs * (weight.shape[0] // num_outputs) + _ROWS) * width * weight.dtype.itemsize
    num_stages = min(4 if is_wide else 5, shared_bytes() // tile_bytes)
    return Tiling(outputs, width, 4 if is_wide else 2, num_stages)


def matmul(
    x: Array,
    weight: Array,
    *,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply rows by each row of a matrix, summing in float32.

    Args:
        x: [T, D] bfloat16 or float16, T <= 16.
        weight: [N, D] of the same dtype.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [T, N], or [T, N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        tiling: how the matrix is split; None chooses it by N.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [T, N], or with an activation [T, N / 2].
    """
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    tiling = tiling or default_tiling(weight, num_outputs)
    return call(
        partial(_matmul_kernel, activation=activation, tile=(tiling.outputs, tiling.width)),
        jax.ShapeDtypeStruct((x.shape[0], num_outputs), dtype or x.dtype),
        (x, weight, residual),
        grid=(pl.cdiv(num_outputs, tiling.outputs),),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    )


def _matmul_kernel(inputs, out_ref, *, activation, tile: tuple[int, int]):
    x_ref, weight_ref, residual_ref = inputs
    (num_rows, size), num_outputs = x_ref.shape, out_ref.shape[1]
    tile_outputs, width = tile
    # The left factor of a product has at least 64 rows on the fast tensor cores, and at least 16 on the others.
    outputs_first = tile_outputs >= 64
    row = jax.lax.iota(jnp.int32, _ROWS)[:, None]
    output = pl.program_id(0) * tile_outputs + jax.lax.iota(jnp.int32, tile_outputs)[:, None]
    halves = (0,) if activation is None else (0, num_outputs)  # the first row of each half of the matrix

    def step(index, totals):
        column = index * width + jax.lax.iota(jnp.int32, width)[None]
        in_row = [column < size] if size % width else []  # there are no masks where tiles divide the matrix
        in_matrix = in_row + ([output < num_outputs] if num_outputs % tile_outputs else [])

        def load(ref, row, *masks: Array) -> Array:
            mask = reduce(jnp.logical_and, masks) if masks else None
            return plgpu.load(ref.at[row, column], mask=mask, other=None if mask is None else 0.0)

        x = load(x_ref, row, row < num_rows, *in_row)
        weights = [load(weight_ref, half + output, *in_matrix) for half in halves]
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
