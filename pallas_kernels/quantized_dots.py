"""Sums of products of codes with inputs as integers, four at a time, inside a kernel.

Codes are bytes, and inputs are integers with a common exponent, in parts of 8 bits that lie in words as the codes do.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.triton import plgpu

# Bits of an integer that stands for an input, without its sign: sums of the products of a load fit in int32.
INPUT_BITS = {("int", 4): 22, ("e2m1", 4): 21, ("int", 8): 19}
MIDDLE_OF_E2M1 = 12  # added to twice the numbers e2m1, so that bytes hold no negative ones
TABLES = 0x0F0E0D0C, 0x090A0B0C  # halves of the tables of `bytes_of_e2m1`
_BITS_OF_TWO_PARTS = 15
_ROUND = 1.5 * 2.0**23  # added to a smaller number in float32, it leaves a rounded integer in the lower bits
_BITS_OF_ROUND = 0x4B400000


def as_integers(
    xs: list[Array], code: str, bits: int, num_parts: int, interpret: bool
) -> tuple[list[list[Array]], Array]:
    """Return inputs as integers, whose parts of 8 bits lie in words as `bytes_of` leaves the codes.

    Args:
        xs: float32 [1, lanes, 4] of each of the 4 or 8 places.
        code: of the codes that multiply them.
        bits: of a code.
        num_parts: of an integer, 2 or 3.
        interpret: whether the kernel is interpreted.

    Returns:
        int32 [1, lanes, 4] of each part, the lowest first, and in it of each four of the places; and float32
        [1, lanes], the number for which 1 stands. A lane with an input that is not finite gives any numbers.
    """
    fours = (slice(0, 4), slice(4, 8)) if code == "e2m1" else (slice(0, 8, 2), slice(1, 8, 2))
    fours = fours if bits == 4 else (slice(0, 4),)
    largest = jnp.max(reduce(jnp.maximum, [jnp.abs(x) for x in xs]), axis=-1)
    exponent = jnp.clip(jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23, 32, 254)  # of float32

    def power(n) -> Array:
        return jax.lax.bitcast_convert_type(n << 23, jnp.float32)

    to_integer = (INPUT_BITS[code, bits] if num_parts == 3 else _BITS_OF_TWO_PARTS) + 126 - exponent
    xs = [x * power(127 + to_integer)[:, :, None] for x in xs]  # they will be rounded to integers
    if num_parts == 2:
        xs = [jnp.minimum(x, 2.0**_BITS_OF_TWO_PARTS - 1) for x in xs]
    integers = [jax.lax.bitcast_convert_type(x + _ROUND, jnp.int32) for x in xs]
    if num_parts == 3:
        integers = [x - _BITS_OF_ROUND for x in integers]  # two parts are of bits that are 0 in it
    numbers = [_parts(integers[four], num_parts, interpret) for four in fours]
    return [list(of_part) for of_part in zip(*numbers, strict=True)], power(127 - to_integer)


def _parts(words: list[Array], num_parts: int, interpret: bool) -> list[Array]:
    """Return the lowest bytes of four words together in a word, then the second bytes, and the third ones."""
    first, second, third, fourth = words

    def of_pair(x: Array, y: Array) -> Array:
        return permuted(x, y, 0x5140, interpret)  # the lowest and the second bytes of both

    pairs = of_pair(first, second), of_pair(third, fourth)
    parts = [permuted(*pairs, 0x5410, interpret), permuted(*pairs, 0x7632, interpret)]
    if num_parts == 3:
        thirds = permuted(first, second, 0x62, interpret), permuted(third, fourth, 0x62, interpret)
        parts.append(permuted(*thirds, 0x5410, interpret))
    return parts


def permuted(x: Array, y: Array, selector: int, interpret: bool) -> Array:
    """Return words of the bytes of two words that the digits of a selector name: 0 to 3 of x and 4 to 7 of y."""
    if interpret:
        digits = [selector >> 4 * i & 15 for i in range(4)]
        return reduce(jnp.bitwise_or, [((x, y)[n // 4] >> 8 * (n % 4) & 0xFF) << 8 * i for i, n in enumerate(digits)])
    (word,) = plgpu.elementwise_inline_asm(
        f"prmt.b32 $0, $1, $2, {selector:#x};",
        args=[x, y],
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.int32)],
    )
    return word


def bytes_of_e2m1(first: int) -> str:
    """Return the PTX from 4 codes e2m1 in the word $1, from a place on, to the bytes $0: 12 + twice a number.

    prmt looks four codes up in a table of 8 bytes by their lower 3 bits; where the sign is set it gives 0, the highest
    bit of the byte, repeated. The second table is for codes with the sign, which is turned around before. An
    instruction has room for one constant, so that half of a table comes in a register, $2 and $3 (`TABLES`).
    """
    lines = [f"shr.b32 w, $1, {4 * first};", "xor.b32 v, w, 0x88888888;"]
    lines += ["mov.b32 b, 0x18141210;", "mov.b32 d, 0x00040608;"]
    lines += ["prmt.b32 p, $2, b, w;", "prmt.b32 q, $3, d, v;", "or.b32 $0, p, q;"]
    return " ".join(["{ .reg .b32 w, v, p, q, b, d;", *lines, "}"])


def kept_in_register(number: int, lane: Array) -> Array:
    """Return a number for each thread in a way that hides from the compiler that it is a constant, int32 like `lane`.

    The compiler moves a constant into a register again and again, before each instruction that takes it from there.
    """
    (found,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .b32 t; mul.hi.u32 t, $1, 3; or.b32 $0, t, {number:#x}; }}",  # t is 0
        args=[lane],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(lane.shape, jnp.int32)],
    )
    return found


def bytes_of(code: str, bits: int, words: Array, tables: list[Array], interpret: bool) -> list[Array]:
    """Return the codes in words in words of 4 bytes: integers as they are, e2m1 as 12 + twice the number.

    The tables are `TABLES`, of a shape that fits `words`.
    """
    if bits == 8:
        return [words]
    if code == "int":  # even places, odd places
        return [words & 0x0F0F0F0F, jax.lax.shift_right_logical(words, jnp.full_like(words, 4)) & 0x0F0F0F0F]
    found = []
    for first in (0, 4):  # places
        if interpret:
            codes = [(words >> 4 * place) & 15 for place in range(first, first + 4)]
            sizes = [jnp.where(c & 4 == 0, c & 3, (2 | c & 1) << ((c >> 1 & 3) - (c >> 2 & 1))) for c in codes]
            numbers = [MIDDLE_OF_E2M1 + jnp.where(c & 8 == 0, n, -n) for c, n in zip(codes, sizes, strict=True)]
            found.append(reduce(jnp.bitwise_or, [number << 8 * i for i, number in enumerate(numbers)]))
            continue
        (some,) = plgpu.elementwise_inline_asm(
            bytes_of_e2m1(first),
            args=[words, *(jnp.broadcast_to(table, words.shape) for table in tables)],
            constraints="=r,r,r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int32)],
        )
        found.append(some)
    return found


def dots(codes: list[Array], inputs: list[list[Array]], interpret: bool) -> Array:
    """Return the sums of products of codes of `bytes_of`, int32 [..., 4], with inputs of `as_integers`, int32 [...]."""
    sums = []
    for part, numbers in enumerate(inputs):
        kind = "s32" if part == len(inputs) - 1 else "u32"
        dot = jnp.zeros_like(codes[0])
        for some, x in zip(codes, numbers, strict=True):
            dot = _dot(some, jnp.broadcast_to(x, some.shape), dot, kind, interpret)
        sums.append(jnp.sum(dot, axis=-1) << 8 * part)
    return reduce(jnp.add, sums)


def _dot(codes: Array, x: Array, y: Array, kind: str, interpret: bool) -> Array:
    """Add to y the sum of products of the 4 bytes of codes and inputs, which are signed where the kind is s32."""
    if interpret:
        for i in range(4):
            byte = (x << 24 - 8 * i) >> 24 if kind == "s32" else (x >> 8 * i) & 0xFF
            y += ((codes >> 8 * i) & 0xFF) * byte
        return y
    (dot,) = plgpu.elementwise_inline_asm(
        f"dp4a.u32.{kind} $0, $1, $2, $3;",
        args=[codes, x, y],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int32)],
    )
    return dot
