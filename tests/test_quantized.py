"""Quantised matrices: the values of their codes, bit by bit, how they are cut and joined, and refused layouts."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specjax.models import quantized
from specjax.models.linear import linear
from specjax.models.quantized import Quantized, concatenate, dequantize, format_of, pack, quantize

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
RNG = np.random.default_rng(0)
# Code, bits, columns of a group, rows of a group, what stands beside the scales, their dtype.
CASES: dict[str, tuple] = {
    "int8": ("int", 8, None, 1, None, np.float32),
    "int8 with zeros": ("int", 8, 32, 1, "zero", np.float32),
    "e4m3": ("e4m3", 8, None, 1, None, np.float32),
    "e4m3 in blocks": ("e4m3", 8, 128, 128, None, np.float32),
    "int4": ("int", 4, 128, 1, None, np.float16),
    "int4 with zeros": ("int", 4, 64, 1, "zero", ml_dtypes.bfloat16),
    "int4 with minima": ("int", 4, 32, 1, "minimum", np.float16),
    "int4 in a row": ("int", 4, -1, 1, None, np.float32),
    "mxfp4": ("e2m1", 4, 32, 1, None, np.uint8),
    "nvfp4": ("e2m1", 4, 16, 1, None, np.float32),
    "nf4": ("nf4", 4, 64, 1, None, np.float32),
}


def fabricated(case: str, *shape: int) -> tuple[Quantized, np.ndarray]:
    """A matrix, and the floats that it stands for by the formula, computed in NumPy."""
    code, bits, columns, of_rows, beside, dtype = CASES[case]
    rng = np.random.default_rng([*case.encode(), *shape])  # the same numbers in any order of tests
    codes: Any
    num_rows, size = shape[-2:]
    of_columns = size if columns in (None, -1) else columns
    groups = (*shape[:-2], -(-num_rows // of_rows), -(-size // of_columns))
    if code == "e4m3":
        codes = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    elif bits == 8:
        codes = rng.integers(-128, 128, shape).astype(np.int8)
    else:
        codes = rng.integers(0, 16, shape).astype(np.uint8)
    if dtype is np.uint8:
        scale = rng.integers(110, 130, groups).astype(np.uint8)
        wide = np.float32(2) ** (scale.astype(np.int32) - 127)
    else:
        scale = (rng.random(groups) + 0.1).astype(dtype)
        wide = scale.astype(np.float32)
    options = {}
    if beside == "zero":
        options["zero"] = rng.integers(0, 16, groups).astype(np.uint8)
    if beside == "minimum":
        options["minimum"] = rng.normal(size=groups).astype(dtype)

    def spread(x):
        return np.repeat(np.repeat(x.astype(np.float32), of_rows, -2)[..., :num_rows, :], of_columns, -1)[..., :size]

    table = {"e2m1": np.array(E2M1, np.float32), "nf4": quantized.NF4}.get(code)
    q = codes.astype(np.float32) if table is None else table[codes]
    if beside == "minimum":
        expected = q * spread(wide) + spread(options["minimum"])
    else:
        zero = spread(options["zero"]) if beside else 8 if (bits, code) == (4, "int") else 0
        expected = (q - np.float32(zero)) * spread(wide)
    group: Any = columns if of_rows == 1 else (of_rows, columns)
    return pack(codes, scale, bits=bits, code=code, group=group, dtype=jnp.float32, **options), expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(5, 256), (130, 300), (2, 3, 35)])
def test_formula_bit_by_bit(case, shape):
    """Also of stacked matrices, of groups that end early, and of arrays on a device."""
    weight, expected = fabricated(case, *shape)
    assert weight.shape == shape and weight.ndim == len(shape) and weight.size == expected.size
    np.testing.assert_array_equal(dequantize(weight), expected)
    np.testing.assert_array_equal(dequantize(jax.tree.map(jnp.asarray, weight)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows(case):
    """Slices on the borders of blocks and beside them, an embedding's rows, and concatenation."""
    weight, expected = fabricated(case, 300, 300)
    for index in (slice(128, 256), slice(5, 130), slice(128, None), slice(250, 300)):
        np.testing.assert_array_equal(dequantize(weight[index]), expected[index])
    tokens = jnp.array([[0, 299], [7, 7]])
    np.testing.assert_array_equal(quantized.rows(jax.tree.map(jnp.asarray, weight), tokens), expected[tokens])
    joined = concatenate([weight, weight[3:9], weight[128:]])
    np.testing.assert_array_equal(dequantize(joined), np.concatenate([expected, expected[3:9], expected[128:]]))


@pytest.mark.parametrize("case", ["int8", "int4 with zeros", "e4m3 in blocks"])
def test_stacked(case):
    """A scan over layers, and one layer of them."""
    weight, expected = fabricated(case, 3, 70, 96)
    weight = jax.tree.map(jnp.asarray, weight)
    np.testing.assert_array_equal(dequantize(weight[1]), expected[1])
    x = jnp.ones((1, 2, 96))
    _, y = jax.lax.scan(lambda x, layer: (x, linear(x, layer)), x, weight)
    np.testing.assert_allclose(y[:, 0, 0], expected.sum(-1), rtol=1e-4, atol=1e-4)


def test_blocks_stay_where_a_slice_keeps_to_them():
    weight, _ = fabricated("e4m3 in blocks", 300, 300)
    assert weight[128:256].group == (128, 128) and weight[128:256].scale.shape == (1, 3)
    assert weight[100:256].group == (1, 128)


@pytest.mark.parametrize("case", CASES)
def test_bytes(case):
    weight, _ = fabricated(case, 256, 256)
    _, bits, columns, of_rows, beside, dtype = CASES[case]
    scales = 256 * (256 // (256 if columns in (None, -1) else columns)) // of_rows * np.dtype(dtype).itemsize
    beside_scales = {None: 0, "zero": scales // np.dtype(dtype).itemsize, "minimum": scales}[beside]
    assert weight.nbytes == 256 * 256 * bits // 8 + scales + beside_scales


def test_an_order_of_inputs():
    """Column j of the codes multiplies input order[j], after the norm and beside its scale."""
    weight, expected = fabricated("int4", 7, 256)
    order = RNG.permutation(256)
    ordered = pack(quantized.codes_of(weight), jnp.asarray(weight.scale), bits=4, group=128, order=order)
    floats = np.empty_like(expected)
    floats[:, order] = expected
    np.testing.assert_array_equal(dequantize(ordered), floats)
    x, scale = RNG.normal(size=(1, 3, 256)).astype(np.float32), RNG.random(256).astype(np.float32)
    y = linear(jnp.asarray(x), ordered, norm=(jnp.asarray(scale), 1e-5))
    reference = linear(jnp.asarray(x), jnp.asarray(floats), transposed=True, norm=(jnp.asarray(scale), 1e-5))
    np.testing.assert_allclose(y, reference, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="in one order"):
        concatenate([ordered, jax.tree.map(jnp.asarray, weight)])


@pytest.mark.parametrize(("format", "error"), [("int8", 0.01), ("fp8", 0.03), ("int4", 0.096)])
def test_rounding(format, error):
    w = RNG.normal(size=(64, 384)).astype(np.float32)
    w[3] = 0
    weight = quantize(w, format)
    assert float(jnp.sqrt(jnp.mean((dequantize(weight) - w) ** 2))) < error
    np.testing.assert_array_equal(dequantize(weight)[3], 0)
    assert weight.dtype == jnp.float32 and quantize(w.astype(ml_dtypes.bfloat16), format).dtype == jnp.bfloat16


@pytest.mark.parametrize(("size", "group"), [(384, 128), (192, 64), (96, 32), (80, 32)])
def test_groups_of_rounding(size, group):
    assert quantize(jnp.ones((3, size)), "int4").group == (1, group)


def test_formats_of_matrices_of_few_inputs():
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [format_of(name, inputs, "int4") for inputs in (1023, 1024)] == ["int8", "int4"]
    assert format_of("model.layers.0.self_attn.o_proj", 64, "int4") == "int4"
    assert format_of(name, 64, "fp8") == "fp8"
    inner = "model.layers.0.linear_attn.in_proj"
    assert [format_of(f"{inner}_{part}.weight", 64, "fp8") for part in ("a", "b", "ba", "z")] == [
        None,
        None,
        None,
        "fp8",
    ]


@pytest.mark.parametrize("options", [{}, {"norm": True}, {"activation": jax.nn.silu}, {"residual": True}])
@pytest.mark.parametrize("case", CASES)
def test_linear(case, options):
    weight, floats = fabricated(case, 34, 160)
    x = jnp.asarray(RNG.normal(size=(2, 3, 160)), jnp.float32)
    options = dict(options)
    if "norm" in options:
        options["norm"] = (jnp.asarray(RNG.random(160), jnp.float32), 1e-5)
    if "residual" in options:
        options["residual"] = jnp.ones((1, 1, 34))
    y = jax.jit(lambda x, weight: linear(x, weight, **options))(x, jax.tree.map(jnp.asarray, weight))
    reference = linear(x, jnp.asarray(floats), transposed=True, **options)
    np.testing.assert_allclose(y, reference, rtol=1e-4, atol=1e-4 * float(jnp.abs(reference).max()))


CODES = np.ones((4, 64), np.uint8)
SCALE = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 3}, "bits and code must be one of 8 bits with 'int'.*got 3 bits with 'int'"),
        ({"code": "e4m3"}, "got 4 bits with 'e4m3'"),
        ({"scale": None}, r"scale must have shape \(4, 2\).*got None"),
        (
            {"scale": SCALE[:, :1]},
            r"scale must have shape \(4, 2\) for codes \(4, 64\) in groups 32, got shape \(4, 1\)",
        ),
        ({"group": 64}, r"scale must have shape \(4, 1\)"),
        ({"group": -3}, "group must be the number of inputs that share a scale, or None for all, got -3"),
        ({"scale": SCALE * 0}, "scale must not be 0, got 8 zeros"),
        ({"scale": SCALE * np.nan}, "scale must be finite, got 8 that are infinite or NaN"),
        ({"scale": np.full((4, 2), 255, np.uint8)}, "scale must be of numbers, got 255, which is NaN"),
        ({"scale": np.ones((4, 2), np.int32)}, "scale must be of floats, got int32"),
        ({"zero": np.ones((4, 1), np.uint8)}, r"zero must have shape \(4, 2\)"),
        ({"minimum": SCALE * np.inf}, "minimum must be finite"),
        ({"zero": SCALE, "minimum": SCALE}, "zero and minimum must not be given both"),
        ({"codes": CODES.astype(np.int8)}, "codes must be of dtype uint8 for 4 bits and 'int', got int8"),
        ({"codes": CODES * 16}, r"codes of 4 bits must be in \[0, 15\], got 16"),
        ({"codes": CODES[0]}, r"codes must have shape \[..., N, K\], got \(64,\)"),
        ({"order": np.zeros(64, int)}, "order must be a permutation"),
        ({"order": np.arange(63)}, r"order must be integers of shape \(64,\)"),
    ],
)
def test_refused(changed, message):
    arguments = {"codes": CODES, "scale": SCALE, "bits": 4, "group": 32} | changed
    with pytest.raises(ValueError, match=message):
        pack(arguments.pop("codes"), arguments.pop("scale"), **arguments)


def test_refused_floats():
    with pytest.raises(ValueError, match="codes must be numbers, got NaN"):
        pack(np.full((4, 64), np.nan, ml_dtypes.float8_e4m3fn), SCALE[:, :1], bits=8, code="e4m3")
    with pytest.raises(ValueError, match="format must be one of int8, int4, fp8, got 'int9'"):
        quantize(jnp.ones((4, 64)), "int9")
    with pytest.raises(ValueError, match="weight must be finite"):
        quantize(jnp.full((4, 64), jnp.nan), "int8")
    for format, bad in product(quantized.FORMATS, (np.nan, np.inf)):
        weight = np.ones((64, 64), np.float32)
        weight[3, 5] = bad
        with pytest.raises(ValueError, match="weight must be finite"):
            quantize(weight, format)
    with pytest.raises(ValueError, match="weight must be floats"):
        quantize(jnp.ones((4, 64), jnp.int32), "int8")
    for shape, format in product([(0, 64), (4, 0)], quantized.FORMATS):
        with pytest.raises(ValueError, match=r"weight must be floats of shape .*, got float32"):
            quantize(np.ones(shape, np.float32), format)
