"""The inputs of a product with a quantised matrix, as the tensor cores take them, and the norm before the product.

One launch puts the inputs of each row in the order in which a thread finds the codes. For codes of 8 bits it also
changes the numbers, so that the codes hardly need decoding:

* integers are multiplied on the tensor cores for integers, which sum without rounding: an input becomes an integer of
  16 bits, in two parts of 8 bits, and the largest input of a row has all of them. A bfloat16 number has 8 bits, so
  numbers down to 1/256 of the largest one are exact, and smaller ones are off by 2^-16 of the largest one at most;
* e4m3 becomes float16 by one instruction for two codes: inputs become float16 times a power of two, which is exact for
  bfloat16 down to 2^-31 of the largest input of a row.
"""

import math
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


def scaled_dtype(weight: Quantized, num_rows: int) -> Any:
    """Return the dtype to which inputs are changed for a matrix of 8 bits with scales of rows or of tiles, or None."""
    if weight.bits != 8 or weight.zero is not None or weight.minimum is not None or weight.group[1] % STEP:
        return None
    # The sums of both parts of more rows do not fit the registers beside large tiles of codes.
    if weight.code == "int":
        return jnp.int8 if num_rows <= 64 else None
    return jnp.float16 if has_float8() else None


class Order(NamedTuple):
    """An order of the inputs of a block: the digits of a place, and how far each of them moves the input."""

    sizes: tuple[int, ...]  # of the digits, the highest one first
    strides: tuple[int, ...]

    def input_at(self, at: Array) -> Array:
        """Return the inputs that stand in some places of a row, int32."""
        found, rest = jnp.zeros_like(at), at
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            divisor = jnp.full_like(rest, size)
            found += jax.lax.rem(rest, divisor) * stride
            rest = jax.lax.div(rest, divisor)
        return rest * math.prod(self.sizes) + found


def order_of_words(places: int, dtype: Any) -> Order:
    """Return the order in which the four words of a block follow each other.

    They do once with all of their codes, where integers of 8 bits are multiplied, else once for each pair of codes of a
    word. A pair of e4m3 are neighbours, and other pairs stand half a word apart.

    Args:
        places: codes in a word.
        dtype: to which inputs are changed, None if they are not.
    """
    if dtype == jnp.int8:
        return Order((WORDS_IN_BLOCK, places), (1, WORDS_IN_BLOCK))
    pair, second = (1, places // 2) if dtype is None else (2, 1)
    return Order((places // 2, WORDS_IN_BLOCK, 2), (WORDS_IN_BLOCK * pair, 1, WORDS_IN_BLOCK * second))


def order_of_tiles(places: int) -> Order:
    """Return the order of `hopper.product`, in which eight words, two blocks, follow each other.

    A thread has two words side by side. The tensor cores take 16 inputs at a time, of which a thread gives two pairs of
    codes of one word, half a word apart.
    """
    # Word of the two, pair of pairs, pair, block, two words of a block, half of a word.
    return Order((2, places // 4, 2, 2, 2, 2), (1, 8, 4, 4 * places, 2, 2 * places))


def arranged(
    x: Array,
    weight: Quantized,
    size: int,
    *,
    num_rows: int | None = None,
    dtype: Any = None,
    order: Order | None = None,
    norm: tuple[Array, float] | tuple[Array, float, float] | None = None,
    interpret: bool = False,
) -> Inputs:
    """Return the inputs of a product, with zeros after each row.

    Args:
        x: [T, K] bfloat16 or float16.
        weight: [..., N, K].
        size: inputs of a row of the result, a multiple of a block of codes.
        num_rows: rows of the result, zeros after the last row of x; None is T.
        dtype: int8 or float16, to which inputs are changed for codes of 8 bits; None leaves them as they are.
        order: of the inputs; None is `order_of_words`.
        norm: scale [K], epsilon and optionally an offset: a row is first divided by its root mean square and multiplied
            by the scale, to which the offset is added.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        Rows of `size` inputs. Where a row has a number that is not finite, its factor is NaN.
    """
    num_rows = num_rows or x.shape[0]
    factor = None if dtype is None else jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    num_parts = 2 if dtype == jnp.int8 else 1
    lanes = pl.next_power_of_2(size)
    return call(
        partial(
            _arrange_kernel,
            epsilon=None if norm is None else norm[1],
            offset=0.0 if norm is None else sum(norm[2:]),
            lanes=lanes,
            order=order or order_of_words(weight.places, dtype),
            interpret=interpret,
        ),
        Inputs(jax.ShapeDtypeStruct((num_parts, num_rows, size), dtype or x.dtype), factor),
        (x, None if norm is None else norm[0]),
        grid=(num_rows,),
        num_warps=min(32, max(4, lanes // 512)),
        interpret=interpret,
    )


def _arrange_kernel(inputs, out, *, epsilon: float | None, offset: float, lanes: int, order: Order, interpret: bool):
    x_ref, scale_ref = inputs
    row, at = pl.program_id(0), jax.lax.iota(jnp.int32, lanes)
    column = order.input_at(at)
    exists = (column < x_ref.shape[1]) & (row < x_ref.shape[0])

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
