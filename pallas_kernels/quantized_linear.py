"""The product of one row with a quantised matrix, with the norm before it and the gate or the sum after it.

The kernel is bound by memory: it reads the matrix once, 16 bytes a thread and a row. A program computes a few outputs.
Its threads share the inputs, so that a thread prepares an input once for all these outputs, and they put their sums
together once. The codes of a thread's load are of one group of inputs: its scale multiplies their sum.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import NUM_MULTIPROCESSORS, call
from pallas_kernels.quantized import (
    LOWER_HALF,
    RAISE,
    WORDS_IN_BLOCK,
    Quantized,
    as_scale,
    decode,
    decode_halves,
    field_of,
    offset_of,
    unsupported_weight,
)
from pallas_kernels.triton import plgpu

_WARP = 32  # threads in a warp


class RowTiling(NamedTuple):
    """How the matrix is split among programs and threads."""

    outputs: int  # outputs of a program, a power of two
    num_warps: int  # warps of a program, which share the inputs


class _Sums(NamedTuple):
    """Sums of each thread so far."""

    outputs: list[Array]  # [outputs, lanes] of each half of the matrix
    squares: Array  # [1, lanes] of the inputs
    inputs: Array  # [1, lanes]


def unsupported(x: Array, weight: Quantized) -> str | None:
    """Return why the kernel cannot multiply x [..., K] by a weight [N, K], or None where it can."""
    if x.size != x.shape[-1]:
        return f"the kernel takes one row, got shape {x.shape}"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes float32, bfloat16 or float16 rows, got {x.dtype}"
    return unsupported_weight(weight)


def is_worthwhile(x: Array, weight: Quantized) -> bool:
    """Return whether the kernel is faster than XLA, which turns a matrix into floats first: always."""
    return True


def default_tiling(weight: Quantized, num_outputs: int) -> RowTiling:
    """Choose a tiling that reads a row at once where it is short, and makes enough programs to fill the device."""
    loads = weight.values.shape[-1] // WORDS_IN_BLOCK
    # Integers of 4 bits take few instructions; more programs then hide more of the time of their loads.
    largest = RowTiling(4, 2) if _is_paired(weight) else RowTiling(8, 4)
    num_warps = min(largest.num_warps, pl.next_power_of_2(pl.cdiv(loads, _WARP)))
    outputs = largest.outputs // (weight.shape[0] // num_outputs)
    while outputs > 2 and num_outputs < outputs * 2 * NUM_MULTIPROCESSORS:
        outputs //= 2
    return RowTiling(outputs, num_warps)


def _is_paired(weight: Quantized) -> bool:
    """Return whether codes are decoded two at a time."""
    return weight.bits == 4 and weight.code == "int"


def linear(
    x: Array,
    weight: Quantized,
    *,
    norm: tuple[Array, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tiling: RowTiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply a row by each row of a matrix, summing in float32.

    Args:
        x: [K] float32, bfloat16 or float16.
        weight: [N, K].
        norm: scale [K] and epsilon: x is first divided by its root mean square and multiplied by the scale.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [N], or [N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        tiling: how the matrix is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [N], or with an activation [N / 2].
    """
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    tiling = tiling or default_tiling(weight, num_outputs)
    return call(
        partial(
            _quantized_linear_kernel,
            epsilon=None if norm is None else norm[1],
            activation=activation,
            tile=(tiling.outputs, tiling.num_warps * _WARP),
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct((num_outputs,), dtype or x.dtype),
        (x, weight, None if norm is None else norm[0], residual),
        grid=(pl.cdiv(num_outputs, tiling.outputs),),
        num_warps=tiling.num_warps,
        interpret=interpret,
    )


def _quantized_linear_kernel(inputs, out_ref, *, epsilon, activation, tile: tuple[int, int], interpret: bool):
    x_ref, weight, norm_ref, residual_ref = inputs
    (size,), (num_outputs,) = x_ref.shape, out_ref.shape
    outputs, lanes = tile
    num_loads = weight.values.shape[1] // WORDS_IN_BLOCK  # of a row, by all threads
    block = WORDS_IN_BLOCK * weight.places  # inputs of a load
    num_steps = pl.cdiv(num_loads, lanes)
    halves = (0,) if activation is None else (0, num_outputs)  # the first row of each half of the matrix
    output = pl.program_id(0) * outputs + jax.lax.iota(jnp.int32, outputs)
    lane, word = (jax.lax.iota(jnp.int32, n) for n in (lanes, WORDS_IN_BLOCK))
    is_paired = _is_paired(weight)
    is_raised = field_of(weight, interpret) != 1
    unit = field_of(weight, interpret) / RAISE if is_raised else 1.0  # sums are of numbers without this factor
    all_inputs = weight.group[1] == 0  # whether a row has one scale

    def load(ref, *index, exists: Array | None = None) -> Array:
        return plgpu.load(ref.at[index], mask=exists, other=None if exists is None else jnp.zeros((), ref.dtype))

    def load_words(step) -> list[Array]:
        """Load the words of codes for each thread in a step, [outputs, lanes, 4] of each half."""
        at = step * lanes + lane[None, :, None]
        row, column = output[:, None, None], at * WORDS_IN_BLOCK + word[None, None]
        masks = [at < num_loads] if num_loads % lanes else []
        masks += [row < num_outputs] if num_outputs % outputs else []
        exists = None
        if masks:
            exists = jnp.broadcast_to(masks[0] & masks[-1], (outputs, lanes, WORDS_IN_BLOCK))
        return [load(weight.values, half + row, column, exists=exists) for half in halves]

    def of_group(ref, half: int, step) -> Array:
        """Load a number of the group of each load, [outputs, lanes]."""
        row, at = (half + output)[:, None], step * lanes + lane[None]
        exists = jnp.broadcast_to((at < num_loads) & (output[:, None] < num_outputs), (outputs, lanes))
        return load(ref, row // weight.group[0], at * block // weight.inputs_of_scale, exists=exists)

    def codes_of(words: Array) -> Iterator[tuple[int, Array]]:
        """Yield each place, and the numbers that its inputs multiply."""
        for place in range(weight.places // 2 if is_paired else weight.places):
            if is_paired:
                yield from zip((place, place + 4), decode_halves(words, place, interpret), strict=True)
            else:
                yield place, decode(weight, words, place, interpret)

    def adjusted(xs: list[Array]) -> tuple[list[Array], Array, Array | float]:
        """Return inputs for `codes_of`, their sum [1, lanes], and the sum that codes of 0 with their middle would give.

        The second number of a pair contains the code of the first one, multiplied by 2 ** -16; the inputs make up.
        """
        half = weight.places // 2
        lower, upper = (jnp.sum(sum(some), axis=-1) for some in (xs[:half], xs[half:]))
        total = lower + upper
        if weight.code != "int":
            return [x * RAISE for x in xs] if is_raised else xs, total / unit, 0.0
        if not is_paired:
            return xs, total, offset_of(weight) * total
        adjusted = [x - y * 2.0**-16 for x, y in zip(xs[:half], xs[half:], strict=True)]
        return adjusted + xs[half:], total, offset_of(weight) * total + (LOWER_HALF - 128) * 2.0**-16 * upper

    def contribution(half: int, step, words: Array, xs: list[Array], added: Array | float, total: Array) -> Array:
        """Return the sum of each thread for each output, [outputs, lanes], without the scale where a row has one."""
        y = jnp.sum(sum(code * xs[place] for place, code in codes_of(words)), axis=-1) - added
        if weight.zero is not None and not all_inputs:
            y -= of_group(weight.zero, half, step).astype(jnp.float32) * total
        if all_inputs:
            return y
        y *= as_scale(of_group(weight.scale, half, step))
        if weight.minimum is not None:
            y += of_group(weight.minimum, half, step).astype(jnp.float32) * total
        return y

    def add(step, words: list[Array], sums: _Sums) -> _Sums:
        """Add a step to the sums."""
        squares = sums.squares
        xs = []
        for place in range(weight.places):
            column = (step * lanes + lane[None, :, None]) * block + place * WORDS_IN_BLOCK + word[None, None]
            exists = column < size if size % (block * lanes) else None
            x = load(x_ref, column, exists=exists).astype(jnp.float32)
            if norm_ref is not None:
                squares += jnp.sum(x * x, axis=-1)
                x *= load(norm_ref, column, exists=exists).astype(jnp.float32)
            xs.append(x)
        xs, total, added = adjusted(xs)
        each = zip(halves, words, sums.outputs, strict=True)
        outputs_sums = [y + contribution(half, step, w, xs, added, total) for half, w, y in each]
        return _Sums(outputs_sums, squares, sums.inputs + total)

    words, none = load_words(0), jnp.zeros((1, lanes), jnp.float32)
    sums = _Sums([jnp.zeros((outputs, lanes), jnp.float32)] * len(halves), none, none)
    if num_steps > 1:

        def body(step, carry):
            words, sums = carry
            following = load_words(step + 1)  # in flight while this step is summed
            return following, add(step, words, sums)

        words, sums = jax.lax.fori_loop(0, num_steps - 1, body, (words, sums))
    sums = add(num_steps - 1, words, sums)

    factor = jnp.float32(unit)
    if epsilon is not None:
        factor *= jax.lax.rsqrt(jnp.sum(sums.squares) / size + epsilon)
    exists = output < num_outputs
    y = [jnp.sum(one, axis=-1) for one in sums.outputs]
    if all_inputs:
        total = jnp.sum(sums.inputs)

        def of_row(ref, half: int) -> Array:
            row = (half + output) // weight.group[0]
            return load(ref, row, jnp.zeros_like(row), exists=exists)

        for i, half in enumerate(halves):
            if weight.zero is not None:
                y[i] -= of_row(weight.zero, half).astype(jnp.float32) * total
            y[i] *= as_scale(of_row(weight.scale, half))
            if weight.minimum is not None:
                y[i] += of_row(weight.minimum, half).astype(jnp.float32) * total
    y = [one * factor for one in y]
    y = y[0] if activation is None else activation(y[0]) * y[1]
    if residual_ref is not None:
        y += load(residual_ref, output, exists=exists).astype(jnp.float32)
    plgpu.store(out_ref.at[output], y.astype(out_ref.dtype), mask=exists)
