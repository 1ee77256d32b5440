"""The product of one row with a matrix, with the norm before it and the gate or the sum after it, in one launch.

The kernel is bound by memory: it reads the matrix once. A program computes one output at a time, and loads the matrix
block of the next output before it finishes this one. The norm of the input scales the sums at the end, so that no load
waits for it. Each of a few rows is multiplied by itself where the matrix is small, as a router's matrix is: the
rows after the first read it from the cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import NUM_MULTIPROCESSORS, Entry, call
from pallas_kernels.triton import plgpu

_VECTOR_BYTES = 16  # the widest load of a thread
_LOADS = 2  # loads of a thread for one row of the matrix
_WARP = 32  # threads in a warp
_MIN_WARPS, _MAX_WARPS = 4, 32  # warps in a program
_RESIDENT_WARPS = 32 * NUM_MULTIPROCESSORS  # warps that run on the device at the same time
_MAX_SIZE = 8192  # numbers in a row of the matrix; XLA reads longer rows as fast or faster
_MAX_BYTES = 3e8  # size of the matrix; XLA reads a larger one as fast or faster


def unsupported(x: Array, weight: Array) -> str | None:
    """Return why the kernel cannot multiply x [..., D] by weight [N, D], or None where it can."""
    if x.size != x.shape[-1]:
        return f"the kernel takes one row, got shape {x.shape}"
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes float32, bfloat16 or float16 on both sides, got {x.dtype} and {weight.dtype}"
    return None


def is_worthwhile(x: Array, weight: Array) -> bool:
    """Return whether the kernel is faster than XLA: for a matrix that is neither wide nor large."""
    return x.shape[-1] <= _MAX_SIZE and weight.size * weight.dtype.itemsize <= _MAX_BYTES


def linear(
    x: Array,
    weight: Array,
    *,
    norm: tuple[Array, float] | tuple[Array, float, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    num_programs: int | None = None,
    num_warps: int | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply a row by each row of a matrix, summing in float32.

    Args:
        x: [D] float32, bfloat16 or float16.
        weight: [N, D] of the same dtype.
        norm: scale [D], epsilon and optionally an offset: x is first divided by its root mean square and multiplied by
            the scale, to which the offset is added.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [N], or [N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        num_programs: the most programs that share the outputs; None fills the device.
        num_warps: warps of each program; None chooses it by D.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [N], or with an activation [N / 2].
    """
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    how, num_programs, num_warps = _split(x, weight, norm, num_outputs, num_programs, num_warps)
    return call(
        partial(_linear_kernel, **how, activation=activation),
        _Outputs(jax.ShapeDtypeStruct((num_outputs,), dtype or x.dtype)),
        _Inputs(x, weight, None, None if norm is None else norm[0], residual),
        grid=(num_programs,),
        num_warps=num_warps,
        interpret=interpret,
    ).products


def linear_after_norm(
    x: Array,
    weight: Array,
    norm: tuple[Array, float, float] | None,
    *,
    more: Array | None = None,
    dtype: DTypeLike,
    num_programs: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array]:
    """Multiply each of a few rows, as `linear` does, and also return the rows after their norm.

    Args:
        x: [T, D] float32, bfloat16 or float16.
        weight: [N, D] of the same dtype.
        norm: as `linear` takes it.
        more: [M, D], a second matrix; None for none.
        dtype: of the products.
        num_programs: the most programs that share the outputs of a row; None fills the device.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        The products [T, N] with the first matrix, [T, M] with the second or None, and the rows [T, D] after their norm.
    """
    (num_rows, _), num_outputs = x.shape, weight.shape[0]
    num_more = 0 if more is None else more.shape[0]
    how, num_programs, num_warps = _split(x, weight, norm, num_outputs + num_more, num_programs, None)
    found = call(
        partial(_rows_kernel, **how),
        _Outputs(
            jax.ShapeDtypeStruct((num_rows, num_outputs), dtype),
            jax.ShapeDtypeStruct((num_rows, num_more), dtype) if num_more else None,
            None if norm is None else jax.ShapeDtypeStruct(x.shape, x.dtype),
        ),
        _Inputs(x, weight, more, None if norm is None else norm[0], None),
        grid=(num_programs, num_rows),
        num_warps=num_warps,
        interpret=interpret,
    )
    return found.products, found.more, x if found.normed is None else found.normed


class _Inputs(NamedTuple):
    """Inputs of a launch: arrays, or references to them."""

    x: Any
    weight: Any
    more: Any
    scale: Any  # of the norm
    residual: Any


class _Outputs(NamedTuple):
    """Outputs of a launch: shapes, references or arrays."""

    products: Any
    more: Any = None  # products with the second matrix
    normed: Any = None  # the rows after their norm


def _split(
    x: Array,
    weight: Array,
    norm: tuple[Array, float] | tuple[Array, float, float] | None,
    num_outputs: int,
    num_programs: int | None,
    num_warps: int | None,
) -> tuple[dict[str, Any], int, int]:
    """Return keywords of the kernel, the number of programs of a row, and their warps."""
    size = x.shape[-1]
    vector = _VECTOR_BYTES // weight.dtype.itemsize
    if num_warps is None:
        num_warps = pl.next_power_of_2(pl.cdiv(size, _LOADS * vector * _WARP))
        num_warps = min(_MAX_WARPS, max(_MIN_WARPS, num_warps))
    if num_programs is None:
        num_programs = _RESIDENT_WARPS // num_warps
    num_programs = min(num_programs, num_outputs)
    how = {
        "epsilon": None if norm is None else norm[1],
        "offset": 0.0 if norm is None else sum(norm[2:]),
        "tile": (num_warps * _WARP, vector),
        "num_programs": num_programs,
        "num_steps": pl.cdiv(num_outputs, num_programs),
    }
    return how, num_programs, num_warps


def _rows_kernel(inputs: _Inputs, outputs: _Outputs, **options):
    row = pl.program_id(1)
    outputs = jax.tree.map(lambda ref: Entry(ref, row), outputs)
    _linear_kernel(inputs._replace(x=Entry(inputs.x, row)), outputs, **options)


def _linear_kernel(
    inputs: _Inputs,
    outputs: _Outputs,
    *,
    epsilon: float | None,
    offset: float,
    activation: Callable[[Array], Array] | None = None,
    tile: tuple[int, int],
    num_programs: int,
    num_steps: int,
):
    x_ref, weight_ref, more_ref, scale_ref, residual_ref = inputs
    out_ref, more_out_ref, normed_ref = outputs
    (size,), (num_first,) = x_ref.shape, out_ref.shape
    num_outputs = num_first if more_ref is None else num_first + more_ref.shape[0]
    width = tile[0] * tile[1]
    tiles = range(pl.cdiv(size, width))
    thread, element = (jax.lax.iota(jnp.int32, n) for n in tile)
    lane = thread[:, None] * tile[1] + element[None]
    halves = (0,) if activation is None else (0, num_first)  # the first row of each half of the matrix
    program = pl.program_id(0)

    def load(ref, i, *row, exists: Array | None = None) -> Array:
        """Load tile i of a vector, or of a row of a matrix."""
        column = i * width + lane
        masks = [] if exists is None else [jnp.full(tile, exists)]
        if (i + 1) * width > size:
            masks.append(column < size)
        mask = masks[0] & masks[-1] if masks else None
        return plgpu.load(ref.at[*row, column], mask=mask, other=None if mask is None else 0.0)

    def load_weights(output: Array) -> list[list[Array]]:
        """Load the rows of the matrix that an output takes, as tiles of one row or two."""
        if more_ref is None:
            exists = output < num_outputs
            return [[load(weight_ref, i, half + output, exists=exists) for half in halves] for i in tiles]
        in_first, in_more = output < num_first, (output >= num_first) & (output < num_outputs)
        # One of the two loads nothing, which gives zeros.
        return [
            [load(weight_ref, i, output, exists=in_first) + load(more_ref, i, output - num_first, exists=in_more)]
            for i in tiles
        ]

    weights = load_weights(program)
    xs, inverse = [load(x_ref, i).astype(jnp.float32) for i in tiles], 1
    if epsilon is not None:
        inverse = jax.lax.rsqrt(jnp.sum(sum(x * x for x in xs)) / size + epsilon)
        scales = [load(scale_ref, i).astype(jnp.float32) + offset for i in tiles]
        if normed_ref is not None:
            for i, x, scale in zip(tiles, xs, scales, strict=True):
                column = i * width + lane
                normed = (x * inverse * scale).astype(normed_ref.dtype)
                plgpu.store(normed_ref.at[column], normed, mask=(column < size) & (program == 0))
        xs = [x * scale for x, scale in zip(xs, scales, strict=True)]

    def step(index, weights):
        output = program + index * num_programs
        following = load_weights(output + num_programs)  # in flight while this output is summed
        y = [
            jnp.sum(sum(w[half].astype(jnp.float32) * x for w, x in zip(weights, xs, strict=True))) * inverse
            for half in range(len(halves))
        ]
        y = y[0] if activation is None else activation(y[0]) * y[1]
        exists = output < num_outputs
        if residual_ref is not None:
            y += plgpu.load(residual_ref.at[output], mask=exists, other=0.0).astype(jnp.float32)
        plgpu.store(out_ref.at[output], y.astype(out_ref.dtype), mask=output < num_first)
        if more_out_ref is not None:
            place = more_out_ref.at[output - num_first]
            plgpu.store(place, y.astype(out_ref.dtype), mask=exists & (output >= num_first))
        return following

    jax.lax.fori_loop(0, num_steps, step, weights)
