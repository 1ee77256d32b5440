"""Matrices of few bits, as leaves of the parameters: made from codes and scales or from floats, and turned into floats.

The arithmetic of W is float32: (q - zero) scale, or q scale + minimum, each operation rounded once.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from pallas_kernels.quantized import BIAS, MIDDLE, WORD_BITS, WORDS_IN_BLOCK, Quantized
from specjax.types import Array
from specjax.validation import suggestion

__all__ = ["FORMATS", "Quantized", "concatenate", "dequantize", "is_quantized", "pack", "quantize", "rows", "stack"]

FORMATS = ("int8", "int4", "fp8")  # that `quantize` knows
CODES = {8: ("int", "e4m3"), 4: ("int", "e2m1", "nf4", "fp4")}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
NF4 = np.array(  # quantiles of a normal distribution, as bitsandbytes has them
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)  # of bitsandbytes, too
FP4 = np.concatenate([FP4, 0 - FP4])
TABLES = {"e2m1": E2M1, "nf4": NF4, "fp4": FP4}  # the number for which each code stands
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
SHARES = (1.0, 0.93, 0.86, 0.79)  # of the range of a group that codes may cover: the one with the least error is kept
GROUPS = (128, 64, 32)  # sizes that `quantize` tries for integers of 4 bits
NARROW = 1024  # inputs; with fewer a step takes no longer for a matrix of 8 bits than for one of 4
OF_ATTENTION = re.compile(r"(?:.*\.)?(?:[qkv]_proj|c_attn)(?:\.weight)?")  # what makes queries, keys and values
RATES = re.compile(
    r"(?:.*\.)?(?:in_proj_(?:a|b|ba)|(?:f_)?[ab]_proj)(?:\.weight)?"
)  # what makes rates of gated delta nets


def pack(
    codes: Any,
    scale: Any,
    *,
    bits: int,
    code: str = "int",
    group: int | tuple[int, int] | None = None,
    zero: Any = None,
    minimum: Any = None,
    order: Any = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> Quantized:
    """Make a quantised matrix of codes, one an element.

    Arrays of NumPy give a matrix of arrays of NumPy, on the host, and arrays of JAX one of arrays of JAX.

    Args:
        codes: [..., N, K]: int8 for integers of 8 bits, float8_e4m3fn for "e4m3", and uint8 in [0, 15] for 4 bits.
        scale: [..., ceil(N / rows), ceil(K / columns)], with the rows and columns of a group: float32, float16 or
            bfloat16, whichever the checkpoint has, or uint8 s that stands for 2 ** (s - 127). Kernels read them as they
            are, so that scales of 16 bits cost half as much as scales of 32 bits.
        bits: of a code, 8 or 4.
        code: "int", "e4m3" (of 8 bits), "e2m1", "nf4" or "fp4" (of 4 bits).
        group: number of inputs that share a scale, or numbers of outputs and inputs. None, 0 and -1 are all inputs. The
            last group may be shorter.
        zero: of the shape of `scale`, of a float or integer dtype: W = (q - zero) scale. None is 8 for integers of 4
            bits, and 0 otherwise.
        minimum: floats of the shape of `scale`: W = q scale + minimum, for GGUF. Never beside `zero`.
        order: [..., K] integers, a permutation: column j of `codes` multiplies input order[j].
        dtype: of the floats for which the matrix stands. An embedding gives rows of it.

    Returns:
        The matrix.

    Raises:
        ValueError: a shape or dtype is another one, a code is out of range, a scale is 0, infinite or NaN, or both
            `zero` and `minimum` are given.
    """
    if code not in CODES.get(bits, ()):
        known = [f"{b} bits with {c!r}" for b, names in CODES.items() for c in names]
        raise ValueError(f"bits and code must be one of {', '.join(known)}, got {bits!r} bits with {code!r}")
    if zero is not None and minimum is not None:
        raise ValueError("zero and minimum must not be given both, W is (q - zero) scale or q scale + minimum")
    _check_codes(codes, bits, code)
    rows, columns = _group_of(group, codes.shape[-1])
    expected = (*codes.shape[:-2], -(-codes.shape[-2] // rows), -(-codes.shape[-1] // (columns or codes.shape[-1])))
    for name, x in (("scale", scale), ("zero", zero), ("minimum", minimum)):
        if x is None and name != "scale":
            continue
        if x is None or np.shape(x) != expected:
            got = "None" if x is None else f"shape {np.shape(x)}"
            raise ValueError(f"{name} must have shape {expected} for codes {codes.shape} in groups {group}, got {got}")
        _check_numbers(name, x)
    if order is not None:
        order = _checked_order(order, (*codes.shape[:-2], codes.shape[-1]))
    values, padding = _to_words(codes, bits, code)
    return Quantized(
        values,
        scale,
        zero,
        minimum,
        order,
        bits=bits,
        code=code,
        group=(rows, columns),
        padding=padding,
        dtype=jnp.dtype(dtype),
    )


def _group_of(group: int | tuple[int, int] | None, inputs: int) -> tuple[int, int]:
    """Return the outputs and inputs of a group, with 0 for all inputs."""
    rows, columns = group if isinstance(group, tuple) else (1, group)
    columns = 0 if columns in (None, 0, -1) else columns
    if rows < 1 or columns < 0:
        raise ValueError(f"group must be the number of inputs that share a scale, or None for all, got {group!r}")
    return rows, 0 if columns >= inputs else columns


def _check_codes(codes: Any, bits: int, code: str) -> None:
    if len(codes.shape) < 2 or 0 in codes.shape:
        raise ValueError(f"codes must have shape [..., N, K], got {codes.shape}")
    dtype = E4M3 if code == "e4m3" else jnp.dtype(jnp.int8 if bits == 8 else jnp.uint8)
    if jnp.dtype(codes.dtype) != dtype:
        raise ValueError(f"codes must be of dtype {dtype} for {bits} bits and {code!r}, got {codes.dtype}")
    if isinstance(codes, Tracer):
        return
    if bits == 4 and (largest := int(codes.max())) > 15:
        raise ValueError(f"codes of 4 bits must be in [0, 15], got {largest}")
    if code == "e4m3":
        # NaN is the only code with all lower bits set.
        as_bits = (
            codes.view(np.uint8) if isinstance(codes, np.ndarray) else jax.lax.bitcast_convert_type(codes, jnp.uint8)
        )
        if int(((as_bits & 127) == 127).sum()):
            raise ValueError("codes must be numbers, got NaN")


def _check_numbers(name: str, x: Any) -> None:
    """Raise ValueError for scales that are 0 or no numbers, and zeros and minima that are no numbers."""
    if isinstance(x, Tracer):
        return
    numbers = np.asarray(x)
    if name == "scale" and numbers.dtype == np.uint8:
        if (numbers == 255).any():
            raise ValueError("scale must be of numbers, got 255, which is NaN")
        return
    if numbers.dtype.kind in "iub" and name == "zero":
        return
    if not jnp.issubdtype(numbers.dtype, jnp.floating):
        raise ValueError(f"{name} must be of floats, got {numbers.dtype}")
    numbers = numbers.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be finite, got {int((~np.isfinite(numbers)).sum())} that are infinite or NaN")
    if name == "scale" and (numbers == 0).any():
        raise ValueError(f"scale must not be 0, got {int((numbers == 0).sum())} zeros")


def _checked_order(order: Any, shape: tuple[int, ...]) -> Any:
    if np.shape(order) != shape or jnp.dtype(order.dtype).kind not in "iu":
        raise ValueError(f"order must be integers of shape {shape}, got {order.dtype} {np.shape(order)}")
    if not isinstance(order, Tracer):
        ordered = np.sort(np.asarray(order), axis=-1)
        if (ordered != np.arange(shape[-1])).any():
            raise ValueError("order must be a permutation of the inputs, got one that repeats or lacks an input")
    return order.astype(np.int32)


def _to_words(codes: Any, bits: int, code: str) -> tuple[Any, int]:
    """Return codes in words, and how many codes were added to the end of each row."""
    padding = -codes.shape[-1] % (WORD_BITS // bits * WORDS_IN_BLOCK)
    words = _words if isinstance(codes, np.ndarray) else _compiled_words
    return words(codes, bits, code, padding), padding


def _words(codes: Any, bits: int, code: str, padding: int) -> Any:
    """Return the words of codes to whose rows `padding` codes of 0 are added."""
    xp: Any = np if isinstance(codes, np.ndarray) else jnp
    places = WORD_BITS // bits
    *outer, _ = codes.shape
    if bits == 8:
        codes = codes.view(np.uint8) if xp is np else jax.lax.bitcast_convert_type(codes, jnp.uint8)
        if code == "int":
            codes = codes ^ np.uint8(BIAS)
    codes = xp.pad(codes, [(0, 0)] * len(outer) + [(0, padding)])
    codes = codes.reshape(*outer, -1, places, WORDS_IN_BLOCK)
    words = xp.zeros((*codes.shape[:-2], WORDS_IN_BLOCK), np.uint32)
    for place in range(places):
        words = words | (codes[..., place, :].astype(np.uint32) << np.uint32(bits * place))
    words = words.reshape(*outer, -1)
    return words.view(np.int32) if xp is np else jax.lax.bitcast_convert_type(words, jnp.int32)


# One program in place of one for each operation, which would each keep an array of the size of the matrix.
_compiled_words = jax.jit(_words, static_argnames=("bits", "code", "padding"))


def codes_of(weight: Quantized) -> Array:
    """Return the codes [..., N, K] of a matrix, one an element: the argument of `pack`."""
    return _codes(weight.values, weight.bits, weight.code, weight.shape[-1])


@partial(jax.jit, static_argnames=("bits", "code", "num_codes"))
def _codes(values: Array, bits: int, code: str, num_codes: int) -> Array:
    """Return the first `num_codes` codes of each row of words."""
    places = WORD_BITS // bits
    *outer, size = values.shape
    words = values.reshape(*outer, size // WORDS_IN_BLOCK, 1, WORDS_IN_BLOCK)
    shifts = bits * jnp.arange(places, dtype=jnp.int32)[:, None]
    codes = jnp.right_shift(words, jnp.expand_dims(shifts, range(len(outer) + 1))) & (2**bits - 1)
    codes = codes.astype(jnp.uint8).reshape(*outer, size * places)[..., :num_codes]
    if bits == 4:
        return codes
    if code == "int":
        return jax.lax.bitcast_convert_type(codes ^ np.uint8(BIAS), jnp.int8)
    return jax.lax.bitcast_convert_type(codes, E4M3)


def scales_of(weight: Quantized) -> Array:
    """Return the scales of a matrix in float32, of the shape that `pack` was given."""
    scale = jnp.asarray(weight.scale)
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    exponents = jnp.maximum(scale.astype(jnp.int32) << 23, 1 << 22)  # the smallest is below the normal numbers
    return jax.lax.bitcast_convert_type(exponents, jnp.float32)


def dequantize(weight: Quantized, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the matrix [..., N, K] for which codes stand, computed in float32, with its inputs in their own order."""
    *_, num_rows, size = weight.shape
    of_rows, of_columns = weight.group[0], weight.inputs_of_scale

    def spread(x: Any) -> Array:
        x = jnp.asarray(x).astype(jnp.float32)
        x = x if of_rows == 1 else jnp.repeat(x, of_rows, axis=-2)[..., :num_rows, :]
        return x if x.shape[-1] == 1 else jnp.repeat(x, of_columns, axis=-1)[..., :size]

    codes = codes_of(weight)
    if weight.code in TABLES:
        q = jnp.asarray(TABLES[weight.code])[codes.astype(jnp.int32)]
    else:
        q = codes.astype(jnp.float32)
    if weight.zero is not None:
        q = q - spread(weight.zero)
    elif weight.minimum is None and weight.bits == 4 and weight.code == "int":
        q = q - MIDDLE
    w = q * spread(scales_of(weight))
    if weight.minimum is not None:
        w = w + spread(weight.minimum)
    if weight.order is not None:
        inverse = jnp.argsort(jnp.asarray(weight.order), axis=-1)
        w = jnp.take_along_axis(w, inverse[..., None, :], axis=-1)
    return w.astype(dtype)


def is_quantized(leaf: Any) -> bool:
    """Return whether a leaf of the parameters is a `Quantized` matrix, for `is_leaf` of the functions on trees."""
    return isinstance(leaf, Quantized)


def rows(weight: Quantized, index: Array) -> Array:
    """Return rows [..., K] of a matrix [N, K] at the places `index` [...], as floats of the matrix's dtype."""
    taken = weight.with_scales_of_rows()[index.reshape(-1)]
    return dequantize(taken, weight.dtype).reshape(*index.shape, weight.shape[-1])


def concatenate(weights: Sequence[Quantized]) -> Quantized:
    """Return a matrix with the outputs of several matrices of the same inputs, one after the other.

    Raises:
        ValueError: the matrices are not of one format, or their inputs differ in number or in order.
    """
    first = weights[0]
    blocks = first.group[0]
    if any(w.group[0] != blocks for w in weights) or any(w.shape[-2] % blocks for w in weights[:-1]):
        weights = [w.with_scales_of_rows() for w in weights]
    if any(w.zero is not None for w in weights):
        weights = [_with_zero(w) for w in weights]
    first = weights[0]
    for w in weights[1:]:
        for name in ("bits", "code", "group", "padding"):
            if getattr(w, name) != getattr(first, name):
                got = f"{getattr(first, name)} and {getattr(w, name)}"
                raise ValueError(f"weights must have the same {name} to be concatenated, got {got}")
        if (w.minimum is None) != (first.minimum is None):
            raise ValueError("weights must all have a minimum or none, to be concatenated")
        if (w.order is None) != (first.order is None) or (
            w.order is not None and not np.array_equal(np.asarray(w.order), np.asarray(first.order))
        ):
            raise ValueError("weights must take their inputs in one order to be concatenated, got different orders")

    def join(name: str) -> Any:
        parts = [getattr(w, name) for w in weights]
        if parts[0] is None:
            return None
        xp: Any = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
        return xp.concatenate(parts, axis=-2)

    joined = {name: join(name) for name in ("values", "scale", "zero", "minimum")}
    return first.replace(**joined)


def stack(weights: Sequence[Quantized]) -> Quantized:
    """Return matrices [N, K] as one stack [E, N, K].

    Raises:
        ValueError: the matrices are not of one format.
    """
    if any(w.zero is not None for w in weights):
        weights = [_with_zero(w) for w in weights]
    first = jax.tree.structure(weights[0]), jax.tree.map(np.shape, weights[0])
    for w in weights[1:]:
        if (jax.tree.structure(w), jax.tree.map(np.shape, w)) != first:
            raise ValueError(f"weights must have one format to be stacked, got {weights[0].shape} and {w.shape}")

    def join(*parts: Any) -> Any:
        xp: Any = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
        return xp.stack(parts)

    return jax.tree.map(join, *weights)


def _with_zero(weight: Quantized) -> Quantized:
    if weight.zero is not None:
        return weight
    if weight.minimum is not None:
        raise ValueError("weights must all have zeros or none, to be concatenated, got a minimum beside a zero")
    middle = MIDDLE if (weight.bits, weight.code) == (4, "int") else 0
    return weight.replace(zero=np.full(weight.scale.shape, middle, np.uint8))


def format_of(name: str, inputs: int, format: str) -> str | None:
    """Return the format to which a matrix of a network is rounded where the others are rounded to `format`.

    It is the same one, but for "int4" where a matrix with few inputs makes queries, keys and values: it gets "int8".
    In a small model 4 bits there cost as much quality as in several other matrices, and 8 bits cost no time. None: the
    matrix stays as it is. It makes the rates of a gated delta net, by which a state decays at every token, and has
    few outputs. The releases in FP8 leave it so, too.

    Args:
        name: of the matrix, as the files have it.
        inputs: its number of inputs.
        format: "int8", "int4" or "fp8".
    """
    if RATES.fullmatch(name):
        return None
    return "int8" if format == "int4" and inputs < NARROW and OF_ATTENTION.fullmatch(name) else format


def quantize(weight: Any, format: str = "int8") -> Quantized:
    """Round a matrix of floats to few bits.

    Args:
        weight: [..., N, K] floats.
        format: "int8", a scale for each output; "int4", a scale and a zero for the largest group of 128, 64 or 32
            inputs that divides K, else for 32; "fp8", e4m3 with a scale for each output.

    Returns:
        The matrix, which stands for floats of the dtype of `weight`.

    Raises:
        ValueError: the format is none of these, or a weight is infinite or NaN.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}{suggestion(format, FORMATS)}")
    if len(np.shape(weight)) < 2 or 0 in np.shape(weight) or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ValueError(f"weight must be floats of shape [..., N, K], got {weight.dtype} {np.shape(weight)}")
    size = weight.shape[-1]
    group = next((g for g in GROUPS if size % g == 0), GROUPS[-1]) if format == "int4" else None
    (codes, scale, zero), is_finite = _round(jnp.asarray(weight), format, group)
    if not isinstance(is_finite, Tracer) and not bool(is_finite):
        raise ValueError("weight must be finite, got an infinite number or NaN")
    bits, code = (4, "int") if format == "int4" else (8, "int" if format == "int8" else "e4m3")
    return pack(codes, scale, bits=bits, code=code, group=group, zero=zero, dtype=weight.dtype)


@partial(jax.jit, static_argnames=("format", "group"))
def _round(weight: Array, format: str, group: int | None) -> tuple[tuple[Array, Array, Array | None], Array]:
    """Return the codes [..., N, K], the scales and the zeros, if there are any, of a matrix, and if it is finite."""
    is_finite = jnp.isfinite(weight).all()  # maxima of XLA may leave NaN out
    w = weight.astype(jnp.float32)
    if group is None:
        largest = 127.0 if format == "int8" else float(jnp.finfo(E4M3).max)
        top = jnp.max(jnp.abs(w), axis=-1, keepdims=True)
        scale = jnp.where(top == 0, 1, jnp.maximum(top / largest, jnp.finfo(jnp.float32).tiny))
        q = jnp.clip(w / scale, -largest, largest)
        return ((jnp.round(q).astype(jnp.int8) if format == "int8" else q.astype(E4M3)), scale, None), is_finite
    size = weight.shape[-1]
    w = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, -size % group)], mode="edge").reshape(*w.shape[:-1], -1, group)
    low = jnp.minimum(jnp.min(w, axis=-1, keepdims=True), 0)
    high = jnp.maximum(jnp.max(w, axis=-1, keepdims=True), 0)
    tiny = float(jnp.finfo(jnp.bfloat16).tiny)
    best = None
    for share in SHARES:
        # Kernels read scales of 16 bits, so codes are chosen for the scale as it is kept.
        scale = jnp.where(high == low, 1, jnp.maximum(share * (high - low) / 15, tiny)).astype(jnp.bfloat16)
        wide = scale.astype(jnp.float32)
        zero = jnp.clip(jnp.round(-share * low / wide), 0, 15)
        q = jnp.clip(jnp.round(w / wide) + zero, 0, 15)
        error = jnp.sum(((q - zero) * wide - w) ** 2, axis=-1, keepdims=True)
        found = error, q, scale, zero
        if best is not None:
            found = [jnp.where(error < best[0], new, old) for new, old in zip(found, best, strict=True)]
        best = found
    assert best is not None, "there are shares"
    _, q, scale, zero = best
    codes = q.astype(jnp.uint8).reshape(*weight.shape[:-1], -1)[..., :size]
    return (codes, scale[..., 0], zero[..., 0].astype(jnp.uint8)), is_finite
