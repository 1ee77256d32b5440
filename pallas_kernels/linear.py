"""The product of one row with a matrix, from the norm before it to the gate or the sum after it, in one launch.

Bound by memory: the matrix is read once. Each program takes an output at a time and reads what the next one needs
before it finishes this one. The norm of the input scales the sums at the end, so that nothing waits for it.

On an H200, bfloat16, with what XLA takes for norm, product and gate or sum in brackets, microseconds: 2048 to 3072
5.6 (9.1), to 2048 4.5 (5.8), to two halves of 8192 with a gate 18.2 (20.2), 8192 to 2048 10.6 (11.7).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.rows import call
from pallas_kernels.triton import plgpu

_VECTOR_BYTES = 16  # of the widest load of a thread
_LOADS = 2  # of a thread for a row of the matrix
_WARP = 32  # threads
_MIN_WARPS, _MAX_WARPS, _WARPS = 4, 32, 132 * 32  # of a program, and on the device at a time
_MAX_SIZE, _MAX_BYTES = 8192, 3e8  # of a row and of the matrix: XLA reads larger ones as fast or faster


def is_supported(x: Array, weight: Array) -> bool:
    """Whether the kernel takes these and gains by it: one row, of a matrix that is neither wide nor large."""
    return (
        plgpu is not None
        and x.size == x.shape[-1] <= _MAX_SIZE
        and x.dtype == weight.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and weight.size * weight.dtype.itemsize <= _MAX_BYTES
    )


def linear(
    x: Array,
    weight: Array,
    *,
    norm: tuple[Array, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    num_programs: int | None = None,
    num_warps: int | None = None,
    interpret: bool = False,
) -> Array:
    """The product of a row with each row of a matrix, summed in float32.

    Args:
        x: [D] floats.
        weight: [N, D].
        norm: a scale [D] and epsilon: x is divided by its root mean square, and scaled, first.
        activation: the first half of the products goes through it, and is multiplied by the second.
        residual: [N], or with an activation [N / 2]: added at the end.
        dtype: of the result; None is that of x.
        num_programs: that share the outputs, at most.
        num_warps: of a program.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [N], or with an activation [N / 2].
    """
    (size,), num_outputs = x.shape, weight.shape[0] // (1 if activation is None else 2)
    vector = _VECTOR_BYTES // weight.dtype.itemsize
    if num_warps is None:
        num_warps = pl.next_power_of_2(pl.cdiv(size, _LOADS * vector * _WARP))
        num_warps = min(_MAX_WARPS, max(_MIN_WARPS, num_warps))
    if num_programs is None:
        num_programs = _WARPS // num_warps
    num_programs = min(num_programs, num_outputs)
    return call(
        partial(
            _linear_kernel,
            epsilon=None if norm is None else norm[1],
            activation=activation,
            tile=(num_warps * _WARP, vector),
            num_programs=num_programs,
            num_steps=pl.cdiv(num_outputs, num_programs),
        ),
        jax.ShapeDtypeStruct((num_outputs,), dtype or x.dtype),
        (x, weight, None if norm is None else norm[0], residual),
        grid=(num_programs,),
        num_warps=num_warps,
        interpret=interpret,
    )


def _linear_kernel(inputs, out_ref, *, epsilon, activation, tile: tuple[int, int], num_programs: int, num_steps: int):
    x_ref, weight_ref, scale_ref, residual_ref = inputs
    (size,), (num_outputs,) = x_ref.shape, out_ref.shape
    width = tile[0] * tile[1]
    tiles = range(pl.cdiv(size, width))
    thread, element = (jax.lax.iota(jnp.int32, n) for n in tile)
    lane = thread[:, None] * tile[1] + element[None]
    halves = (0,) if activation is None else (0, num_outputs)
    program = pl.program_id(0)

    def load(ref, i, *row, exists: Array | None = None) -> Array:
        """Tile i of a vector, or of a row of a matrix."""
        column = i * width + lane
        masks = [] if exists is None else [jnp.full(tile, exists)]
        if (i + 1) * width > size:
            masks.append(column < size)
        mask = masks[0] & masks[-1] if masks else None
        return plgpu.load(ref.at[*row, column], mask=mask, other=None if mask is None else 0.0)

    def load_weights(output: Array) -> list[list[Array]]:
        exists = output < num_outputs
        return [[load(weight_ref, i, half + output, exists=exists) for half in halves] for i in tiles]

    weights = load_weights(program)
    xs, inverse = [load(x_ref, i).astype(jnp.float32) for i in tiles], 1
    if epsilon is not None:
        inverse = jax.lax.rsqrt(jnp.sum(sum(x * x for x in xs)) / size + epsilon)
        xs = [x * load(scale_ref, i).astype(jnp.float32) for i, x in zip(tiles, xs, strict=True)]

    def step(index, weights):
        output = program + index * num_programs
        following = load_weights(output + num_programs)
        y = [
            jnp.sum(sum(w[half].astype(jnp.float32) * x for w, x in zip(weights, xs, strict=True))) * inverse
            for half in range(len(halves))
        ]
        y = y[0] if activation is None else activation(y[0]) * y[1]
        exists = output < num_outputs
        if residual_ref is not None:
            y += plgpu.load(residual_ref.at[output], mask=exists, other=0.0).astype(jnp.float32)
        plgpu.store(out_ref.at[output], y.astype(out_ref.dtype), mask=exists)
        return following

    jax.lax.fori_loop(0, num_steps, step, weights)
