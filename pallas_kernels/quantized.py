"""A quantised matrix as kernels read it: codes, the scales of groups of codes, and the layout of codes."""

import math
from dataclasses import dataclass, field
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.launch import Leaf
from pallas_kernels.triton import plgpu

# Codes lie in words of 32 bits, 4 or 8 to a word. A block takes 4 words, which one load of a thread reads, and holds as
# many inputs in a row: code 4 i + r of a block lies in place i of word r, the lowest bits being place 0. The codes of
# one place are then contiguous, and meet 4 inputs in a row.
WORD_BITS, WORDS_IN_BLOCK = 32, 4
MIDDLE = 8  # the zero of integers of 4 bits where none is given
BIAS = 128  # added to integers of 8 bits, so that words hold no negative ones


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized(Generic[Leaf]):
    """A matrix [..., N, K] of codes q, which stands for W = (q - zero) scale, or for W = q scale + minimum.

    N are the outputs of a product and K its inputs, whatever the orientation of other matrices of a network is. Axes
    before them are of stacked matrices, such as the matrices of experts. The fields are arrays outside a kernel, and
    references to these arrays inside. `specjax.models.quantized.pack` makes one.
    """

    values: Leaf  # [..., N, W] int32 words
    # [..., N / group[0], K / group[1]], sizes rounded up: floats, or uint8 s that stands for 2 ** (s - 127).
    scale: Leaf
    zero: Leaf | None = None  # of the shape of `scale`; None is 8 for integers of 4 bits, and 0 otherwise
    minimum: Leaf | None = None  # of the shape of `scale`; never beside `zero`
    order: Leaf | None = None  # [..., K] int32: column j of the codes multiplies input order[j]; None: input j
    bits: int = field(default=8, metadata={"static": True})  # of a code: 8 or 4
    # "int": of 8 bits signed, of 4 bits unsigned; "e4m3" of 8 bits; "e2m1", "nf4" and "fp4" of 4.
    code: str = field(default="int", metadata={"static": True})
    group: tuple[int, int] = field(default=(1, 0), metadata={"static": True})  # outputs, inputs of a scale; 0: all
    padding: int = field(default=0, metadata={"static": True})  # codes in a row after the K-th
    dtype: Any = field(default=jnp.dtype(jnp.bfloat16), metadata={"static": True})  # in which a network computes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., N, K] of the matrix."""
        *outer, last = self.values.shape
        return *outer, last * self.places - self.padding

    @property
    def places(self) -> int:
        """The number of codes in a word."""
        return WORD_BITS // self.bits

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    @property
    def size(self) -> int:
        """The number of codes of the matrix."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(self))

    @property
    def inputs_of_scale(self) -> int:
        """The number of inputs that share a scale."""
        return self.group[1] or self.shape[-1]

    def __getitem__(self: "Quantized[jax.Array]", index: Any) -> "Quantized[jax.Array]":
        """Return some rows of a matrix [N, K], or some of the stacked matrices. An index of the last axis is not known.

        Args:
            index: an integer, a slice or an array of integers for the first axis.
        """
        rows = self.group[0]
        if self.ndim > 2 or rows == 1 or _is_aligned(index, rows, self.shape[0]):
            outer = index
            if self.ndim == 2 and rows > 1:
                start, stop, _ = index.indices(self.shape[0])
                outer = slice(start // rows, -(-stop // rows))
            parts = {name: _at(getattr(self, name), outer) for name in ("scale", "zero", "minimum")}
            order = self.order if self.ndim == 2 else _at(self.order, index)
            return self.replace(values=self.values[index], order=order, **parts)
        return self.with_scales_of_rows()[index]

    def replace(self, **changes: Any) -> "Quantized":
        """Return a copy with some fields changed."""
        return Quantized(**{name: changes.get(name, getattr(self, name)) for name in self.__dataclass_fields__})

    def with_scales_of_rows(self: "Quantized[jax.Array]") -> "Quantized[jax.Array]":
        """Return the same matrix with scales for each row, where rows share them."""
        rows, columns = self.group
        if rows == 1:
            return self

        def spread(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else jnp.repeat(x, rows, axis=-2)[..., : self.shape[-2], :]

        parts = {name: spread(getattr(self, name)) for name in ("scale", "zero", "minimum")}
        return self.replace(**parts, group=(1, columns))


def _at(x: jax.Array | None, index: Any) -> jax.Array | None:
    return None if x is None else x[index]


def _is_aligned(index: Any, rows: int, size: int) -> bool:
    """Return whether an index takes whole blocks of rows, in order."""
    if not isinstance(index, slice):
        return False
    start, stop, step = index.indices(size)
    return step == 1 and start % rows == 0 and (stop % rows == 0 or stop == size)


# The bits of a number in float32 by which a code is turned into a float without a conversion.
_OF_128, _OF_256 = 0x43000000, 0x43800000
_E4M3_BITS, _E2M1_BITS = -0x78100000, -0x7E400000  # the sign, the lower exponent and the upper mantissa, as int32
RAISE = 2.0**100  # factor on inputs that are multiplied by numbers with small exponents
_FIELD = {"e4m3": 2.0**120, "e2m1": 2.0**126}  # factor from the float of the bits to the value of a code


def unsupported_weight(weight: Quantized) -> str | None:
    """Return why kernels cannot read a matrix, or None where they can."""
    if weight.ndim != 2:
        return f"the kernels take one matrix [N, K], got shape {weight.shape}"
    return unsupported_codes(weight)


def unsupported_codes(weight: Quantized) -> str | None:
    """Return why kernels cannot read the codes of a matrix, or of stacked matrices, or None where they can."""
    if weight.code in ("nf4", "fp4"):
        return f"the kernels take integers, e4m3 and e2m1, got {weight.code}"
    block = WORDS_IN_BLOCK * weight.places
    if weight.group[1] % block:
        return f"the kernels take groups of multiples of {block} inputs, got {weight.group[1]}"
    if weight.order is not None:
        return "the kernels take inputs in the order of the codes, got another order"
    return None


def field_of(weight: Quantized, interpret: bool) -> float:
    """Return the factor that `decode` leaves out of numbers: 1 for integers."""
    return 1.0 if interpret else _FIELD.get(weight.code, 1.0)


def offset_of(weight: Quantized) -> float:
    """Return the number that `decode` adds to codes that are integers, with their zero where none is given."""
    if weight.code != "int":
        return 0.0
    if weight.bits == 8:
        return 256.0 + BIAS
    return 128.0 + (MIDDLE if weight.zero is None and weight.minimum is None else 0)


def decode(weight: Quantized, words: jax.Array, place: int, interpret: bool) -> jax.Array:
    """Return the codes in one place of words, as float32 v: the code is (v - offset) field.

    The bits of a code become bits of a float by shifts and masks. Codes e4m3 and e2m1 become numbers with the smallest
    exponents, some below the normal ones; an interpreted kernel would flush these, so it multiplies first.
    """
    if weight.code == "int":
        field, exponent = (0x7F8000, _OF_256) if weight.bits == 8 else (0xF0000, _OF_128)
        bits = (_shifted(words, (15 if weight.bits == 8 else 16) - weight.bits * place) & field) | exponent
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    at_top = _shifted(words, WORD_BITS - weight.bits * (place + 1))
    right, mask = (4, _E4M3_BITS) if weight.code == "e4m3" else (6, _E2M1_BITS)
    bits = jax.lax.shift_right_arithmetic(at_top, jnp.full_like(at_top, right)) & mask
    if not interpret:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    magnitude = bits & 0x7FFFFFFF
    normal = jax.lax.bitcast_convert_type(magnitude + (64 << 23), jnp.float32) * (_FIELD[weight.code] * 2.0**-64)
    small = magnitude.astype(jnp.float32) * (_FIELD[weight.code] * 2.0**-126 * 2.0**-23)
    value = jnp.where(magnitude < 1 << 23, small, normal)
    return jnp.where(bits < 0, -value, value)


def convert_e4m3(words: jax.Array, interpret: bool) -> list[jax.Array]:
    """Return the codes e4m3 in the four places of words as float16, by an instruction for two of them.

    GPUs before compute capability 8.9 do not have it (`launch.has_float8`).
    """
    if interpret:
        shifted = (_shifted(words, -8 * place).astype(jnp.uint8) for place in range(4))
        return [jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float16) for code in shifted]
    found = []
    for half in ("a", "b"):
        (pair,) = plgpu.elementwise_inline_asm(
            f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}",
            args=[words],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int32)],
        )
        found += [jax.lax.bitcast_convert_type(_shifted(pair, -n).astype(jnp.int16), jnp.float16) for n in (0, 16)]
    return found


def _shifted(words: jax.Array, left: int) -> jax.Array:
    """Shift words to the left, or to the right by a negative number; the bits that come in are not used."""
    shift = jax.lax.shift_left if left > 0 else jax.lax.shift_right_logical
    return words if left == 0 else shift(words, jnp.full_like(words, abs(left)))


def as_scale(scale: jax.Array) -> jax.Array:
    """Return scales that were loaded, in float32."""
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    exponent = scale.astype(jnp.int32)
    # 2 ** -127 is below the normal numbers; as 2 ** -126 it is as good as 0.
    return jax.lax.bitcast_convert_type(jnp.maximum(exponent, 1) << 23, jnp.float32)


def has_pairs(weight: Quantized, dtype: Any) -> bool:
    """Return whether `decode_pairs` makes operands of a dtype: bfloat16, with integers as zeros and no minimum."""
    if dtype != jnp.bfloat16 or weight.minimum is not None:
        return False
    return weight.zero is None or (weight.code == "int" and jnp.issubdtype(weight.zero.dtype, jnp.integer))


def beside(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return two arrays side by side on a new last axis."""
    return jnp.concatenate([x[..., None], y[..., None]], axis=-1)


def joined(pairs: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Return the numbers of all places of words [N, ..., W] side by side, [N, inputs].

    A block of words gives, for each pair of places in turn, the two numbers of each word. So the threads that read
    words have the numbers that the tensor cores want from them.
    """

    def stack(xs: list[jax.Array]) -> jax.Array:
        return xs[0] if len(xs) == 1 else beside(stack(xs[::2]), stack(xs[1::2]))

    first = pairs[0][0]
    y = stack([beside(*pair) for pair in pairs])  # outputs, words, the two of a pair, bits of the number of a pair
    y = y.reshape(first.shape[0], -1, WORDS_IN_BLOCK, 2, len(pairs))
    return y.transpose(0, 1, 4, 2, 3).reshape(first.shape[0], -1)


def as_pair(x: jax.Array | float) -> jax.Array | int:
    """Return numbers, rounded to bfloat16, twice in each int32; for one number that is known, an integer of 32 bits."""
    if isinstance(x, (int, float)):
        return int(np.asarray(x, jnp.bfloat16).view(np.uint16)) * 0x10001
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.int16).astype(jnp.int32) & 0xFFFF
    return bits | bits << 16


def decode_pairs(
    weight: Quantized,
    words: jax.Array,
    zero: jax.Array | int | None,
    scales: list[jax.Array | int],
    interpret: bool,
) -> list[tuple[jax.Array, jax.Array]]:
    """Return the numbers in the places of words in bfloat16, by pairs: place i and the place half a word after it.

    Each instruction works on two numbers, a half of a word each. An integer q of 4 bits becomes 128 + q, from which an
    exact difference is taken, and one of 8 bits a sum of its lower 7 bits and its highest one. A scale of more bits
    than bfloat16 has comes as a sum of two, so that only the product is rounded.

    Args:
        weight: of codes that `has_pairs` knows.
        words: int32.
        zero: `as_pair`, of the shape of `words` or an integer, added to integers: for 4 bits -128 less their zeros,
            for 8 bits the negative zeros, or None for none; None for other codes.
        scales: `as_pair`, of the shape of `words` or integers: none for integers without a scale, one, or two that are
            summed. The scales of e4m3 and e2m1 have the factor that the bits of these numbers lack (`field_of`).
        interpret: whether the kernel is interpreted, which knows no assembly.
    """
    half = weight.places // 2
    if interpret:
        each = [_number(weight, words, place, zero, scales) for place in range(weight.places)]
        return list(zip(each[:half], each[half:], strict=True))
    operands = [x for x in (zero, *scales) if isinstance(x, jax.Array)]
    found = []
    for place in range(half):
        (pair,) = plgpu.elementwise_inline_asm(
            assembly(weight.code, weight.bits, place, zero, scales),
            args=[words, *operands],
            constraints=",".join(["=r", "r"] + ["r"] * len(operands)),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int32)],
        )
        halves = pair, jax.lax.shift_right_logical(pair, jnp.full_like(pair, 16))
        lower, upper = (jax.lax.bitcast_convert_type(x.astype(jnp.int16), jnp.bfloat16) for x in halves)
        found.append((lower, upper))
    return found


def _number(
    weight: Quantized, words: jax.Array, place: int, zero: jax.Array | int | None, scales: list[jax.Array | int]
) -> jax.Array:
    """Return what `assembly` computes of a code in float32."""

    def value(pair: jax.Array | int) -> jax.Array:
        bits = pair << 16 if isinstance(pair, jax.Array) else np.array(pair << 16 & 0xFFFFFFFF, np.uint32)
        return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)

    number = decode(weight, words, place, True)
    if (weight.code, weight.bits) == ("int", 8):
        number -= offset_of(weight)
    number = number if zero is None else number + value(zero)
    if scales:
        of_lower = [(number * value(scale)).astype(jnp.bfloat16) for scale in scales[1:]]
        number = sum(of_lower, number * value(scales[0]))
    return number.astype(jnp.bfloat16)


def assembly(code: str, bits: int, place: int, zero: Any, scales: list[Any]) -> str:
    """Return the PTX that turns the codes in a place of the word $1, and half a word after it, into two numbers $0.

    The zero and the scales are integers, or else the next operands, $2 and so on.
    """
    low = bits * place  # the lowest bit of a code in its half of the word
    if (code, bits) == ("int", 8):
        # 128 and the lower 7 bits, and -128 where the highest bit is set, else -256: words hold 128 more than a code.
        lines = [_shift("t", -low), "lop3.b32 u, t, 0x00800080, 0xc380c380, 0x6a;"]  # (t & a) ^ b
        lines += ["lop3.b32 t, t, 0x007f007f, 0x43004300, 0xea;", "fma.rn.bf16x2 t, t, one, u;"]  # (t & a) | b
    elif code == "int":
        lines = [_shift("t", -low), "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"]
    else:
        top, right, mask = (8, 4, "0x07f007f0") if code == "e4m3" else (12, 6, "0x01c001c0")
        lines = [_shift("t", top - right - low), f"and.b32 t, t, {mask};", _shift("u", top - low)]
        lines += ["lop3.b32 t, u, 0x80008000, t, 0xea;"]
    number = iter(range(2, 5))
    z, s, lower = (
        "none" if x is None else f"{x:#010x}" if isinstance(x, int) else f"${next(number)}"
        for x in (zero, *scales, None, None)[:3]
    )
    # GPUs before Hopper have no other arithmetic on pairs in bfloat16 than this; `none` is a pair of -0.
    lines += [f"mov.b32 v, {z};", "fma.rn.bf16x2 t, t, one, v;"] * (zero is not None)
    lines += [f"mov.b32 v, {lower};", "fma.rn.bf16x2 u, t, v, none;"] * (len(scales) > 1)
    lines += [f"mov.b32 v, {s};", f"fma.rn.bf16x2 t, t, v, {'u' if len(scales) > 1 else 'none'};"] * (len(scales) > 0)
    constants = ["mov.b32 one, 0x3f803f80;", "mov.b32 none, 0x80008000;"]
    return " ".join(["{ .reg .b32 t, u, v, one, none;", *constants, *lines, "mov.b32 $0, t; }"])


def _shift(result: str, left: int) -> str:
    """Return the PTX that shifts the word $1 to the left, or to the right by a negative number."""
    operation = "shl" if left > 0 else "shr"
    return f"{operation}.b32 {result}, $1, {abs(left)};" if left else f"mov.b32 {result}, $1;"
