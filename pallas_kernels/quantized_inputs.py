"""The inputs of a product with a quantised matrix, as the tensor cores take them, and the norm before the product.

One launch puts the inputs of each row in the order in which a thread finds the codes. For codes of 8 bits it also
changes the numbers, so that the codes hardly need decoding:

* integers are multiplied on the tensor cores for integers, which sum without rounding: an input becomes an integer of
  16 bits, in two parts of 8 bits, and the largest input of a row has all of them. A bfloat16 number has 8 bits, so
  numbers down to 1/256 of the largest one are exact, and smaller ones are off by 2^-16 of the largest one at most;
* e4m3 becomes float16 by one instruction for two codes: inputs become float16 times a power of two, which is exact for
  bfloat16 down to 2^-31 of the largest input of a row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import call, has_float8
from pallas_kernels.quantized import WORDS_IN_BLOCK, Quantized
from pallas_kernels.triton import plgpu

STEP = 128  # inputs of a tile
_TOP = 14  # exponent of the largest number of a row: with it and its sign an integer has 16 bits
_LARGEST = 127 * 256 + 127  # of two parts of 8 bits; 255/256 of 2^15 is 1 more
_ROUND = 1.5 * 2.0**23  # added to a smaller number in float32, it leaves a rounded integer in the lower bits


class Inputs(NamedTuple):
    """Rows of inputs, in the order of codes. The fields are arrays outside a kernel, and references inside."""

    numbers: Any  # [parts, T, K']: one part of floats of 16 bits, or the upper and the lower part of integers, int8
    factor: Any = None  # [T] float32, by which a row was divided; None is 1

    @property
    def num_rows(self) -> int:
        return self.numbers.shape[1]

    @property
    def num_inputs(self) -> int:
        return self.numbers.shape[2]

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype


def has_scaled_inputs(weight: Quantized, num_rows: int) -> bool:
    """Return whether inputs are changed for the codes of a matrix, which has 8 bits and scales of rows or of tiles."""
    if weight.bits != 8 or weight.zero is not None or weight.minimum is not None or weight.group[1] % STEP:
        return False
    # The sums of both parts of more rows do not fit the registers beside large tiles of codes.
    return num_rows <= 64 if weight.code == "int" else has_float8()


def arranged(
    x: Array,
    weight: Quantized,
    size: int,
    *,
    is_scaled: bool = False,
    norm: tuple[Array, float] | tuple[Array, float, float] | None = None,
    interpret: bool = False,
) -> Inputs:
    """Return the inputs of a product, with zeros after each row.

    Args:
        x: [T, K] bfloat16 or float16.
        weight: [..., N, K].
        size: inputs of a row of the result, a multiple of a block of codes.
        is_scaled: whether inputs are changed for codes of 8 bits that `has_scaled_inputs` knows.
        norm: scale [K], epsilon and optionally an offset: a row is first divided by its root mean square and multiplied
            by the scale, to which the offset is added.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        Rows of `size` inputs. Where a row has a number that is not finite, its factor is NaN.
    """
    num_rows = x.shape[0]
    dtype, num_parts = x.dtype, 1
    if is_scaled:
        dtype, num_parts = (jnp.float16, 1) if weight.code == "e4m3" else (jnp.int8, 2)
    factor = jax.ShapeDtypeStruct((num_rows,), jnp.float32) if is_scaled else None
    lanes = pl.next_power_of_2(size)
    return call(
        partial(
            _arrange_kernel,
            epsilon=None if norm is None else norm[1],
            offset=0.0 if norm is None else sum(norm[2:]),
            lanes=lanes,
            places=weight.places,
            interpret=interpret,
        ),
        Inputs(jax.ShapeDtypeStruct((num_parts, num_rows, size), dtype), factor),
        (x, None if norm is None else norm[0]),
        grid=(num_rows,),
        num_warps=min(32, max(4, lanes // 512)),
        interpret=interpret,
    )


def _arrange_kernel(inputs, out, *, epsilon: float | None, offset: float, lanes: int, places: int, interpret: bool):
    x_ref, scale_ref = inputs
    row, at = pl.program_id(0), jax.lax.iota(jnp.int32, lanes)
    column = input_at(at, places, is_scaled=out.factor is not None, dtype=out.dtype)
    exists = column < x_ref.shape[1]

    def load(ref, *index) -> Array:
        return plgpu.load(ref.at[index], mask=exists, other=0.0).astype(jnp.float32)

    x = load(x_ref, row, column)
    if epsilon is not None:
        x *= jax.lax.rsqrt(jnp.sum(x * x) / x_ref.shape[1] + epsilon)
        x = (x * (load(scale_ref, column) + offset)).astype(x_ref.dtype).astype(jnp.float32)

    def store(part: int, numbers: Array) -> None:
        plgpu.store(out.numbers.at[part, row, at], numbers.astype(out.dtype), mask=at < out.num_inputs)

    if out.factor is None:
        store(0, x)
        return
    largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x)), jnp.int32)
    exponent = jnp.clip(largest >> 23, 32, 254) - 127

    def power(n: Array) -> Array:
        return jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32)

    # 0 times a number is NaN where the number is not finite.
    plgpu.store(out.factor.at[row], power(exponent - _TOP) + jnp.sum(x * 0))
    x *= power(_TOP - exponent)
    if out.dtype == jnp.float16:
        store(0, x)
        return
    whole = jax.lax.bitcast_convert_type(x + _ROUND, jnp.int32) - jnp.int32(0x4B400000)  # the bits of _ROUND
    whole = jnp.clip(whole, -_LARGEST, _LARGEST)
    upper = jax.lax.shift_right_arithmetic(whole + 128, jnp.full_like(whole, 8))
    store(0, upper)
    store(1, whole - (upper << 8))


def input_at(at: Array, places: int, *, is_scaled: bool, dtype: Any) -> Array:
    """Return the inputs that stand in some places of a row.

    The four words of a block follow each other: once with all of their codes, where integers of 8 bits are multiplied,
    else once for each pair of codes of a word. A pair of e4m3 are neighbours, and other pairs stand half a word apart.

    Args:
        at: int32.
        places: codes in a word.
        is_scaled: whether inputs are changed for the codes.
        dtype: of the numbers that stand there.
    """
    per_block = WORDS_IN_BLOCK * places

    def digits(x: Array, size: int) -> tuple[Array, Array]:
        return jax.lax.div(x, jnp.full_like(x, size)), jax.lax.rem(x, jnp.full_like(x, size))

    block, rest = digits(at, per_block)
    if dtype == jnp.int8:
        word, place = digits(rest, places)
    else:
        rest, second = digits(rest, 2)
        pair, word = digits(rest, WORDS_IN_BLOCK)
        place = 2 * pair + second if is_scaled else pair + places // 2 * second
    return block * per_block + WORDS_IN_BLOCK * place + word
