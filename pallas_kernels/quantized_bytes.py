"""Sums of products of codes of 8 bits with inputs that were changed for them (`quantized_inputs`), inside a kernel.

The codes are the bytes of their words. Signed integers are multiplied as they are; an instruction turns two e4m3 into
float16. Where inputs share a scale, it multiplies the sum of a step.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantized import Quantized, as_scale, beside, convert_e4m3, joined
from pallas_kernels.quantized_inputs import Inputs
from pallas_kernels.triton import plgpu

_BIASES = 0x80808080 - 2**32  # added to the four codes of a word, as int32


def sums(
    inputs: Inputs,
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
    """Return the products of rows with some outputs of a matrix, like `quantized_matmul.sums`."""
    outputs, num_rows = output.shape[0], row.shape[0]
    num_words, size = weight.values.shape[1], width * weight.places
    is_float = inputs.dtype != jnp.int8
    num_parts = inputs.numbers.shape[0]
    all_inputs = weight.group[1] == 0
    part = jnp.broadcast_to(jax.lax.iota(jnp.int32, num_parts)[:, None, None], (num_parts, num_rows, 1))
    part, row_of_part = (_flat(x, num_parts, num_rows) for x in (part, row))
    of_outputs = [] if has_output is None else [has_output]
    of_rows = [] if has_row is None else [_flat(has_row, num_parts, num_rows)]

    def load(ref, *index, masks: list[Array], other: int = 0) -> Array:
        mask = reduce(jnp.logical_and, masks) if masks else None
        return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else jnp.full((), other, ref.dtype))

    def scales_of(at: Array | int) -> Array:
        """Load the scales of a tile, [outputs, 1]; 1 where rows have one scale, which multiplies the result."""
        if all_inputs:
            return jnp.ones((outputs, 1), jnp.float32)
        first = jnp.asarray(at, jnp.int32) * size  # tiles after the last one are asked for too
        group = jax.lax.div(first, jnp.full_like(first, weight.group[1]))
        masks = [mask[:, 0] for mask in of_outputs] + [jnp.broadcast_to(first < weight.shape[1], (outputs,))]
        index = output[:, 0] // weight.group[0], jnp.broadcast_to(group, (outputs,))
        return load(weight.scale, *index, masks=masks, other=1)[:, None]

    def combined(product: Array) -> Array:
        """Return sums of both parts of integers, in the units of the lower part."""
        upper, lower = jnp.split(product, 2, axis=1)
        return upper * 256 + lower

    def add(total: Array, at: Array, scale: Array, following: Array) -> Array:
        """Add the products of a tile to sums in units of its scale, and return them in units of the following scale."""
        column = at * width + jax.lax.iota(jnp.int32, width)[None]
        in_row = [column < num_words] if is_ragged else []
        x = load(inputs.numbers, part, row_of_part, at * size + jax.lax.iota(jnp.int32, size)[None], masks=of_rows)
        words = load(weight.values, output, column, masks=[*in_row, *of_outputs])
        codes = _as_float16(words, interpret) if is_float else _as_int8(words)
        product = jax.lax.dot(codes, x.T, preferred_element_type=jnp.float32 if is_float else jnp.int32)
        if all_inputs:
            return total + product
        # The tensor cores add floats to the sum, so that the product needs no more registers.
        product = product if is_float else combined(product).astype(jnp.float32)
        return (total + product) * (as_scale(scale) / as_scale(following))

    def step(index, carry):
        total, scales = carry
        first = (first_step + index) * num_tiles
        following = [scales_of(first + num_tiles + i) for i in range(num_tiles)]
        for i, scale in enumerate(scales):
            total = add(total, first + i, scale, [*scales, *following][i + 1])
        return total, following

    is_int = all_inputs and not is_float
    total = jnp.zeros((outputs, (num_parts if is_int else 1) * num_rows), jnp.int32 if is_int else jnp.float32)
    scales = [scales_of(first_step * num_tiles + i) for i in range(num_tiles)]
    total, (scale, *_) = jax.lax.fori_loop(0, num_steps, step, (total, scales))
    if is_int:
        upper, lower = (x.astype(jnp.float32) for x in jnp.split(total, 2, axis=1))
        total = 256 * upper + lower
    total *= load(inputs.factor, row.T, masks=[] if has_row is None else [has_row.T])
    if all_inputs:
        scale = load(weight.scale, output // weight.group[0], jnp.zeros_like(output), masks=of_outputs)
    return total * as_scale(scale)


def _flat(x: Array, num_parts: int, num_rows: int) -> Array:
    return jnp.broadcast_to(x, (num_parts, num_rows, 1)).reshape(num_parts * num_rows, 1)


def _as_int8(words: Array) -> Array:
    """Return the codes of words [N, W] of integers, [N, 4 W] int8."""
    words = words ^ jnp.int32(_BIASES)
    bytes_ = [words, *(jax.lax.shift_right_logical(words, jnp.full_like(words, 8 * i)) for i in (1, 2, 3))]
    first, second, third, fourth = (x.astype(jnp.int8) for x in bytes_)
    return beside(beside(first, third), beside(second, fourth)).reshape(words.shape[0], -1)


def _as_float16(words: Array, interpret: bool) -> Array:
    """Return the codes of words [N, W] of e4m3, [N, 4 W] float16, as `quantized_inputs` puts the inputs."""
    first, second, third, fourth = convert_e4m3(words, interpret)
    return joined([(first, second), (third, fourth)])
