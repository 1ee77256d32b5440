"""The kernels on quantised matrices: interpreted against float64, compiled for an H100 and an H200, and chosen."""

from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import compile_for_sm90, triton_kernels
from test_quantized import CASES, E2M1, fabricated

from pallas_kernels import launch, quantized_linear, quantized_matmul, quantized_tiles
from pallas_kernels.quantized import as_pair, assembly, decode_pairs, field_of
from pallas_kernels.quantized_dots import TABLES, bytes_of, bytes_of_e2m1
from pallas_kernels.quantized_linear import RowTiling
from pallas_kernels.quantized_matmul import Tiling
from specjax.models import linear as models
from specjax.models.quantized import Quantized, pack

EPSILON = 1e-3
SUPPORTED = sorted(set(CASES) - {"nf4", "nvfp4"})  # the kernels know no table, and no groups of 16
INTERPRET = [True, pytest.param(False, marks=pytest.mark.gpu)]


def operands(case: str, num_outputs: int, size: int, num_rows: int):
    """A matrix whose products are about 1, its floats, rows, the scale of a norm, and a residual."""
    weight, floats = fabricated(case, num_outputs, size)
    norm = np.sqrt((floats.astype(np.float64) ** 2).sum(1).mean())
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(num_rows, size)) / norm, jnp.bfloat16)
    scale = jnp.asarray((1 + 0.1 * rng.normal(size=size)) / norm, jnp.bfloat16)
    residual = jnp.asarray(rng.normal(size=(num_rows, num_outputs)), jnp.bfloat16)
    return jax.tree.map(jnp.asarray, weight), floats, x, scale, residual


def expected(x, floats, scale=None, activation=None, residual: Any = 0):
    x = np.asarray(x, np.float64)
    if scale is not None:
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * np.asarray(scale, np.float64)
    y = x @ floats.astype(np.float64).T
    if activation is not None:
        gate, up = np.split(y, 2, axis=-1)
        y = gate / (1 + np.exp(-gate)) * up
    return y + np.asarray(residual, np.float64)


def error(y, reference) -> float:
    """The largest error in units of the root mean square of the results."""
    return float(np.abs(np.asarray(y) - reference).max() / np.sqrt(np.mean(reference**2)))


ONE_ROW = (34, 352, True, RowTiling(4, 1, 2)), (7, 2200, False, RowTiling(2, 1)), (32, 2048, False, RowTiling(8, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_outputs", "size", "gated", "tiling"),
    [(case, *sizes) for i, case in enumerate(SUPPORTED) for j, sizes in enumerate(ONE_ROW) if (i + j) % 3],
)
@pytest.mark.parametrize("interpret", INTERPRET)
def test_one_row(case, num_outputs, size, gated, tiling, interpret):
    """Steps that end early and programs with outputs that do not exist; inputs kept and not; norm, gate and sum.

    For integers and e2m1 a row of 16 bits becomes integers of 16 bits, and one in float32 integers of 20 bits or more.
    """
    weight, floats, x, scale, residual = operands(case, num_outputs, size, 1)
    activation = jax.nn.silu if gated else None
    residual = residual[:, : num_outputs // 2] if gated else residual
    product = partial(quantized_linear.linear, dtype=jnp.float32, tiling=tiling, interpret=interpret)

    @jax.jit
    def both(x, weight, scale, residual):
        plain = product(x, weight)
        return product(x, weight, norm=(scale, EPSILON, 0.25), activation=activation, residual=residual), plain

    of_norm = np.asarray(scale, np.float64) + 0.25
    for dtype, bound in ((jnp.bfloat16, 1e-5 if weight.code == "e4m3" else 1e-4), (jnp.float32, 5e-6)):
        x = x.astype(dtype)
        y, plain = both(x[0], weight, scale, residual[0])
        assert error(plain, expected(x, floats)[0]) < bound
        # The product of two halves is far from its root mean square where both are large.
        assert error(y, expected(x, floats, of_norm, activation, residual)[0]) < (5 if gated else 1) * bound


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("interpret", INTERPRET)
def test_inputs_of_one_row(dtype, interpret):
    """An input beside the largest one of a load is off by a share of that one at most; rounding does not carry."""
    sizes = 2.0 ** np.random.default_rng(0).uniform(-12, -0.1, (2, 32)) * np.array([[1], [-(2.0**-13)]])
    sizes[:, 5] = 255 / 256 * np.array([1, 2.0**-13])
    weight = pack(jnp.eye(64).astype(jnp.uint8) + 8, jnp.ones((64, 1)), bits=4, code="int")
    x, scale = jnp.asarray(sizes.reshape(-1), dtype), jnp.zeros(64, dtype)
    floats = np.asarray(x, np.float64)
    product = partial(quantized_linear.linear, x, weight, dtype=jnp.float32, interpret=interpret)
    share, factor = 2.0 ** (-21 if dtype == jnp.float32 else -15), 256 / 255 * (1 - 2.0**-18)  # the largest is about 1
    for by, got in ((1, product()), (factor, product(norm=(scale, float(1 - np.mean(floats**2)), factor)))):
        expected = by * floats.reshape(2, 32)
        largest = np.abs(expected).max(axis=1, keepdims=True)
        assert (np.abs(np.asarray(got, np.float64).reshape(2, 32) - expected) <= share * largest).all()


FEW_ROWS = (
    (3, 128, 512, True, Tiling(64, 16, 4, 2)),
    (17, 70, 352, True, Tiling(16, 32, 2, 2, 1, 16)),
    (6, 70, 1100, False, Tiling(64, 16, 4, 2, 2, num_tiles=2)),
    (64, 34, 300, True, Tiling(64, 32, 4, 2, 2, num_tiles=2)),
    (129, 70, 600, False, Tiling(32, 8, 4, 2, 2, 128)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_rows", "num_outputs", "size", "gated", "tiling"),
    [
        (case, *sizes)
        for i, case in enumerate(SUPPORTED)
        for j, sizes in enumerate(FEW_ROWS)
        if (i + j) % 5 in (0, 1, 3)
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET)
def test_few_rows(case, num_rows, num_outputs, size, gated, tiling, interpret):
    """Numbers of 4 bits are rounded to bfloat16 where a step meets several scales, or many rows: within 2 %.

    Inputs of integers of 8 bits are integers of 16 bits. Rows of one program and of two.
    """
    weight, floats, x, _, residual = operands(case, num_outputs, size, num_rows)
    activation = jax.nn.silu if gated else None
    residual = residual[:, : num_outputs // 2] if gated else residual
    product = partial(quantized_matmul.matmul, dtype=jnp.float32, tiling=tiling, interpret=interpret)
    y = jax.jit(partial(product, activation=activation))(x, weight, residual=residual)
    bound = {"int8": 1e-4}.get(case, 1e-5 if case in ("e4m3", "e4m3 in blocks", "int4 in a row", "mxfp4") else 2e-2)
    assert error(y, expected(x, floats, None, activation, residual)) < bound


@pytest.mark.parametrize(("code", "floor"), [("int", 2.0**-15), ("e4m3", 2.0**-38)])
@pytest.mark.parametrize("interpret", INTERPRET)
def test_scaled_inputs(code, floor, interpret):
    """A small input beside the largest one of its row is off by a share of the largest one at most."""
    sizes = 2.0 ** np.random.default_rng(0).uniform(-40, 0, (3, 64)) * np.array([[1e-20], [1], [1e20]])
    sizes[:, 5] = np.array([255 / 256, -1, 1]) * np.array([1e-20, 1, 1e20])
    x = jnp.asarray(sizes, jnp.bfloat16).at[2, 7].set(0)
    codes = jnp.eye(64).astype(jnp.int8 if code == "int" else jnp.float8_e4m3fn)
    weight = pack(codes, jnp.ones((64, 1)), bits=8, code=code)
    y = np.asarray(quantized_matmul.matmul(x, weight, dtype=jnp.float32, interpret=interpret), np.float64)
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(y - x) <= floor * largest).all()
    is_large = np.abs(x) >= largest * floor * 512
    np.testing.assert_allclose(y[is_large], x[is_large], rtol=1e-4 if code == "int" else 0)


@pytest.mark.parametrize("row", [0, 5])
@pytest.mark.parametrize(("case", "value"), [("int4", jnp.nan), ("int8", jnp.inf), ("e4m3 in blocks", jnp.nan)])
def test_rows_do_not_mix(case, value, row):
    """A row with a number that is not finite is NaN, and leaves the others as they are."""
    weight, _, x, _, _ = operands(case, 64, 352, 6)
    product = partial(quantized_matmul.matmul, dtype=jnp.float32, interpret=True)
    y = product(x, weight).at[row].set(jnp.nan)
    np.testing.assert_array_equal(product(x.at[row, 3].set(value), weight), y)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["e4m3", "e2m1"])
@pytest.mark.parametrize("interpret", INTERPRET)
def test_every_code(code, interpret):
    """Also the smallest ones, which lie below the normal numbers while they are decoded."""
    if code == "e4m3":
        codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255]).view(jnp.float8_e4m3fn)[:, None]
    else:
        codes = np.arange(16, dtype=np.uint8)[:, None]
    codes = np.repeat(codes, 32, axis=1)
    weight = pack(jnp.asarray(codes), jnp.ones((len(codes), 1)), bits=8 if code == "e4m3" else 4, code=code)
    for place in (0, 13, 31):
        x = jnp.zeros((2, 32), jnp.bfloat16).at[0, place].set(1)
        floats = codes[:, 0].astype(np.float32) if code == "e4m3" else np.array([*range(16)], np.float32)
        if code == "e2m1":
            floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
            floats = np.concatenate([floats, -floats])
        one = quantized_linear.linear(x[0], weight, dtype=jnp.float32, interpret=interpret)
        two = quantized_matmul.matmul(x, weight, dtype=jnp.float32, interpret=interpret)
        np.testing.assert_array_equal(one, floats)
        np.testing.assert_array_equal(two, np.stack([floats, np.zeros_like(floats)]))


def run_assembly(text: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    """The register $0 after instructions of PTX on arrays of uint32."""

    def value(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def multiplied(*pairs: np.ndarray) -> np.ndarray:
        same = map(np.ascontiguousarray, np.broadcast_arrays(*pairs))
        x, y, z = (pair.view(jnp.bfloat16).astype(np.float32) for pair in same)
        return (x * y + z).astype(jnp.bfloat16).view(np.uint32)

    def permuted(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
        parts = np.stack(np.broadcast_arrays(x, y, selector)[:2], -1).astype("<u4").view(np.uint8)
        chosen = np.broadcast_to(selector, parts.shape[:-1])[..., None] >> np.arange(0, 16, 4).astype(np.uint32)
        taken = np.take_along_axis(parts, (chosen & 7).astype(int), -1)
        taken = np.where(chosen & 8, np.where(taken > 127, 255, 0), taken).astype(np.uint8)
        return np.ascontiguousarray(taken).view("<u4")[..., 0]

    def halves(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x)[..., None].view(np.float16)

    def converted(x: np.ndarray) -> np.ndarray:
        codes = np.stack([x & 255, x >> 8 & 255], -1).astype(np.uint8).view(jnp.float8_e4m3fn)
        return codes.astype(np.float16).view(np.uint32)[..., 0]

    operations = {
        "add.rn.f16x2": lambda x, y: (halves(x) + halves(y)).view(np.uint32)[..., 0],
        "cvt.u16.u32": lambda x: x & 0xFFFF,
        "cvt.rn.f16x2.e4m3x2": converted,
        "prmt.b32": permuted,
        "shl.b32": lambda x, n: x << n,
        "shr.b32": lambda x, n: x >> n,
        "and.b32": lambda x, y: x & y,
        "or.b32": lambda x, y: x | y,
        "xor.b32": lambda x, y: x ^ y,
        "mov.b32": lambda x: x,
        "lop3.b32": lambda x, y, z, table: {0xEA: (x & y) | z, 0x6A: (x & y) ^ z}[int(table)],
        "fma.rn.bf16x2": multiplied,
    }
    for line in filter(None, map(str.strip, text.strip("{} ").split(";"))):
        name, rest = line.split(maxsplit=1)
        if name == ".reg":
            continue
        result, *arguments = rest.split(", ")
        registers[result] = operations[name](*map(value, arguments))
    return registers["$0"]


@pytest.mark.parametrize(
    ("code", "bits", "place"), [*product(("int", "e2m1"), (4,), range(4)), *product(("int", "e4m3"), (8,), range(2))]
)
@pytest.mark.parametrize("num_scales", [0, 1, 2])
def test_assembly(code, bits, place, num_scales):
    """Pairs of codes, beside other codes in the words, with a zero and scales, as an interpreted kernel has them."""
    rng = np.random.default_rng(place)
    values = np.delete(np.arange(256), [127, 255]) if code == "e4m3" else np.arange(1 << bits)
    codes = np.stack(np.meshgrid(values, values[::5]), -1).reshape(-1, 2).astype(np.uint32)
    shifts = np.array([bits * place, bits * place + 16], np.uint32)
    others = ~np.bitwise_or.reduce(np.uint32((1 << bits) - 1) << shifts)
    words = rng.integers(0, 2**32, len(codes), np.uint32) & others | np.bitwise_or.reduce(codes << shifts, -1)
    weight = Quantized(jnp.asarray(words.view(np.int32)), jnp.ones(()), bits=bits, code=code)
    field = field_of(weight, interpret=False)  # left out of the numbers by the assembly, which takes it from scales
    unit = np.sqrt(field) if num_scales else 1
    zero = None
    if code == "int":
        zero = as_pair(jnp.asarray((-128 if bits == 4 else 0) - rng.integers(0, 17, len(codes)), jnp.float32))
    scales = [rng.uniform(1, 2, len(codes)) * size for size in (1, 2.0**-9)[:num_scales]]

    def pairs(factor: float) -> list:
        """The scales, of which the last one is a number that is known."""
        last = [as_pair(float(scales[-1][0] * factor))] if scales else []
        return [as_pair(jnp.asarray(scale * factor, jnp.float32)) for scale in scales[:-1]] + last

    operands = [x for x in (zero, *pairs(unit)) if isinstance(x, jax.Array)]
    registers = {"$1": words} | {f"${i}": np.asarray(x).view(np.uint32) for i, x in enumerate(operands, 2)}
    numbers = run_assembly(assembly(code, bits, place, zero, pairs(unit)), registers)
    found = np.ascontiguousarray(numbers)[:, None].view(jnp.bfloat16).astype(np.float32) * np.float32(field / unit)
    reference = decode_pairs(weight, weight.values, zero, pairs(1), interpret=True)[place]
    np.testing.assert_array_equal(found, np.stack(reference, -1).astype(np.float32))


def test_bytes_of_e2m1():
    """The codes of each place, beside other codes, give 12 + twice their numbers, interpreted and by the assembly."""
    words = np.random.default_rng(0).integers(0, 2**32, 256, np.uint32)
    tables = {f"${i}": np.full_like(words, table) for i, table in enumerate(TABLES, 2)}
    found = np.stack([run_assembly(bytes_of_e2m1(place), {"$1": words, **tables}) for place in (0, 4)], -1)
    expected = [12 + 2 * np.asarray(E2M1)[(words >> np.uint32(4 * place)) & 15] for place in range(8)]
    np.testing.assert_array_equal(found.astype("<u4").view(np.uint8).T, expected)
    interpreted = bytes_of("e2m1", 4, jnp.asarray(words.view(np.int32)), [], interpret=True)
    np.testing.assert_array_equal(np.stack(interpreted, -1).view(np.uint8).T, expected)


def without_tiles(function):
    """Run a test as on a GPU of another generation than Hopper's."""
    return mock.patch.object(quantized_tiles, "compute_capability", lambda: "8.0")(function)


def described(case: str, num_outputs: int, size: int) -> Quantized:
    """The shapes and dtypes of a matrix."""
    bits, code, group, dtype, has_zero = {
        "int8": (8, "int", (1, 0), jnp.float32, False),
        "fp8": (8, "e4m3", (1, 0), jnp.float32, False),
        "fp8 in blocks": (8, "e4m3", (128, 128), jnp.float32, False),
        "int4": (4, "int", (1, 128), jnp.bfloat16, True),
        "int4 in groups of 32": (4, "int", (1, 32), jnp.float16, True),
        "mxfp4": (4, "e2m1", (1, 32), jnp.uint8, False),
    }[case]
    groups = -(-num_outputs // group[0]), -(-size // (group[1] or size))
    shape = jax.ShapeDtypeStruct
    zero = shape(groups, jnp.uint8) if has_zero else None
    words = shape((num_outputs, size * bits // 32), jnp.int32)
    return Quantized(words, shape(groups, dtype), zero, bits=bits, code=code, group=group)


FORMATS = ("int8", "fp8", "fp8 in blocks", "int4", "int4 in groups of 32", "mxfp4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "size", "num_outputs", "gated", "num_rows"),
    [
        (format, 14336, 4096, False, num_rows) if (i + num_rows) % 2 else (format, 4096, 28672, True, num_rows)
        for i, format in enumerate(FORMATS)
        for num_rows in (1, 6, 64)
    ],
)
@without_tiles
def test_compiles_without_spilling(format, size, num_outputs, gated, num_rows, tmp_path):
    """The products of a layer with 8 billion parameters, norm, gate and sum included."""
    pytest.importorskip("triton")
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arrays = shape((1, num_rows, size)), shape((size,)), shape((1, num_rows, num_outputs // (2 if gated else 1)))

    def product(x, scale, residual, weight):
        options = {"norm": (scale, EPSILON), "activation": jax.nn.silu if gated else None, "residual": residual}
        return models.linear(x, weight, **options)

    kernels = triton_kernels(product, *arrays, described(format, num_outputs, size))
    names = ["quantized_linear_kernel"] if num_rows == 1 else ["_arrange_kernel", "_quantized_matmul_kernel"]
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        resources = compile_for_sm90(kernel, tmp_path)
        assert resources.spilled_bytes == 0 and resources.shared_bytes <= 227 * 1024, (kernel.name, resources)


@pytest.mark.parametrize(
    ("num_outputs", "size", "halves"),
    [
        (34816, 5120, 2),
        (28672, 4096, 2),
        (16384, 5120, 1),
        (12288, 2048, 1),
        (6144, 4096, 1),
        (5120, 6144, 1),
        (5120, 17408, 1),
        (4096, 14336, 1),
        (2048, 4096, 1),
    ],
)
def test_programs_of_e4m3_hide_loads(num_outputs, size, halves):
    """A multiprocessor runs enough programs at once, and nearly all of their threads load in each step."""
    weight = described("fp8 in blocks", num_outputs, size)
    tiling = quantized_linear.default_tiling(weight, num_outputs // halves)
    programs = -(-num_outputs // (halves * tiling.outputs)) / launch.NUM_MULTIPROCESSORS
    assert 11 < tiling.num_warps * programs < 40 or programs > 30
    loads, lanes = size // 16, 32 * tiling.num_warps
    assert -(-loads // lanes) * lanes <= 1.15 * loads and loads <= 16 * lanes
    tiling = quantized_matmul.default_tiling(weight, num_outputs // halves, 4)
    programs = -(-num_outputs // (halves * tiling.outputs)) * tiling.num_splits / launch.NUM_MULTIPROCESSORS
    assert tiling.num_stages == 1 and 1.9 < programs < 8


@pytest.mark.parametrize(
    ("num_outputs", "size", "halves"),
    [
        (34816, 5120, 2),
        (28672, 4096, 2),
        (16384, 2048, 2),
        (16384, 5120, 1),
        (12288, 2048, 1),
        (6144, 4096, 1),
        (5120, 6144, 1),
        (4096, 4096, 1),
        (4096, 14336, 1),
        (2048, 4096, 1),
    ],
)
def test_programs_of_int8_load_ahead(num_outputs, size, halves):
    """A thread loads several times for a row, unless all programs run at once, and few programs have its inputs."""
    weight = described("int8", num_outputs, size)
    tiling = quantized_linear.default_tiling(weight, num_outputs // halves)
    warps = -(-num_outputs // (halves * tiling.outputs)) * tiling.num_warps / launch.NUM_MULTIPROCESSORS
    loads, lanes = size // 16, 32 * tiling.num_warps
    assert loads % lanes == 0
    assert warps <= 32 if loads == lanes else loads >= 3 * lanes
    assert halves * tiling.outputs == 4 and tiling.num_warps == 1 if warps > 23 and loads > lanes else warps > 7


@pytest.mark.parametrize(
    ("num_outputs", "size", "halves"),
    [(28672, 4096, 2), (6144, 4096, 1), (4096, 4096, 1), (4096, 14336, 1), (34816, 5120, 2), (5120, 17408, 1)],
)
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_programs_of_4_bits_keep_their_inputs(format, num_outputs, size, halves):
    """Programs take turns on the outputs, and a few rows have several programs for each multiprocessor."""
    weight = described(format, num_outputs, size)
    tiling = quantized_linear.default_tiling(weight, num_outputs // halves)
    if format == "int4" and size > 8192:
        # Kept inputs of a long row would take registers of half of the programs.
        assert tiling.num_programs is None
        assert 12 < tiling.num_warps * num_outputs / tiling.outputs / launch.NUM_MULTIPROCESSORS < 24
    else:
        assert tiling.num_programs * tiling.num_warps == 16 * launch.NUM_MULTIPROCESSORS
        assert num_outputs // halves > tiling.outputs * tiling.num_programs
    tiling = quantized_matmul.default_tiling(weight, num_outputs // halves, 6)
    programs = -(-num_outputs // (halves * tiling.outputs)) * tiling.num_splits / launch.NUM_MULTIPROCESSORS
    assert 3 < programs < 9 and tiling.num_stages == (3 if format == "mxfp4" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@without_tiles
def test_what_in_a_model_takes_a_kernel(format):
    def kernels(num_tokens: int, dtype=jnp.bfloat16) -> list[str]:
        x = jax.ShapeDtypeStruct((1, num_tokens, 4096), dtype)
        return [kernel.name for kernel in triton_kernels(models.linear, x, described(format, 4096, 4096))]

    assert kernels(1) == kernels(1, jnp.float32) == ["quantized_linear_kernel"]
    most = 64 if format == "int4 in groups of 32" else 256
    assert kernels(2) == kernels(most) == ["_arrange_kernel", "_quantized_matmul_kernel"]
    assert kernels(most + 1) == kernels(2, jnp.float32) == []


def test_unsupported():
    x = jnp.zeros((1, 2, 64), jnp.bfloat16)

    def reason(case: str, kernel=quantized_matmul, **changed) -> str:
        weight, _ = fabricated(case, 4, 64)
        return kernel.unsupported(x, weight.replace(**changed)) or ""

    assert reason("int4") == "" and "one row, got shape (1, 2, 64)" in reason("int4", quantized_linear)
    assert "got nf4" in reason("nf4") and "multiples of 32 inputs, got 16" in reason("nvfp4")
    assert "another order" in reason("int4", order=jnp.arange(64))
    stacked, _ = fabricated("int8", 2, 3, 64)
    assert "one matrix [N, K], got shape (2, 3, 64)" in (quantized_matmul.unsupported(x, stacked) or "")
    assert "bfloat16 or float16 rows, got float32" in (
        quantized_matmul.unsupported(x.astype(jnp.float32), stacked) or ""
    )


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("case", ["int8", "int4 with zeros", "e4m3 in blocks"])
def test_implementations_agree(case, num_tokens):
    weight, _, x, scale, residual = operands(case, 70, 352, num_tokens)
    options = {"norm": (scale, EPSILON), "residual": residual[None], "dtype": jnp.float32}
    run = partial(models.linear, x[None], weight, **options)
    assert error(run(implementation="interpret"), np.asarray(run(implementation="xla"), np.float64)) < 2e-2
