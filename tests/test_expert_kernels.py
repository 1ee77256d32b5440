"""The kernels on the matrices of experts: interpreted and on a GPU against the dense sum, and compiled for an H100."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import compile_for_sm90, triton_kernels
from test_experts import choices, dense_sum, make_experts, numbers
from test_quantized import fabricated

from pallas_kernels import choice, expert_rows, row_choice
from pallas_kernels import experts as kernels
from pallas_kernels.linear import linear_after_norm
from pallas_kernels.quantized import Quantized
from pallas_kernels.quantized_linear import RowTiling
from specjax.models.experts import (
    Beside,
    ClippedGated,
    Experts,
    Gated,
    Shared,
    SigmoidTopK,
    SoftmaxTopK,
    TopKSoftmax,
    Ungated,
    normed_and_logits,
    sizes_of_tiles,
    tiles_of,
)
from specjax.models.linear import Norm, rms_norm
from specjax.models.quantized import dequantize

INTERPRET = [True, pytest.param(False, marks=pytest.mark.gpu)]
PLAIN, CLIPPED = {}, {"gate": ClippedGated(), "has_bias": True, "is_interleaved": True}
UNGATED = {"gate": Ungated()}


def implementation(interpret: bool) -> str:
    return "interpret" if interpret else "pallas"


def error(got, expected) -> float:
    """The largest error in units of the root mean square of the results."""
    return float(np.abs(np.asarray(got) - expected).max() / np.sqrt(np.mean(np.square(expected))))


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize(("num_rows", "options"), [(1, CLIPPED), (9, PLAIN), (9, UNGATED), (70, CLIPPED)])
def test_floats(num_rows, options, interpret):
    """Tiles of one row and of many, of several tiles an expert, and experts that no row chose; odd widths; no gate."""
    number, size = (4, 37) if num_rows > 64 else (20, 23)
    ffn, params = make_experts(number, size, **options)
    params = {name: jnp.asarray(x / 4, jnp.bfloat16) for name, x in params.items()}
    x, weights = jnp.asarray(numbers(num_rows, 24), jnp.bfloat16), np.abs(numbers(num_rows, 2, seed=5))
    mix = jax.jit(partial(ffn.mix, implementation=implementation(interpret)))
    floats = {name: np.asarray(x, np.float64) for name, x in params.items()}
    for name in ("spread", "empty"):
        experts = choices(number, num_rows)[name].astype(np.int32)
        expected = dense_sum(ffn, floats, np.asarray(x, np.float64), experts, weights, jnp.bfloat16)
        assert error(mix(params, x, experts, weights), expected) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize("case", ["int8", "int4 with zeros", "mxfp4", "e4m3 in blocks"])
def test_codes(case, interpret):
    """Experts in the formats of checkpoints, with inputs that do not divide into steps, each product for itself."""
    experts = jnp.asarray(choices(5, 11)["spread"], jnp.int32)
    tiles = tiles_of(experts, 5, kernels.MIN_TILE, kernels.MAX_TILE)
    expert_of_place = np.zeros(22, np.int32)
    expert_of_place[tiles.place] = np.asarray(experts).reshape(-1)
    for is_gathered, (num_outputs, size) in ((True, (128, 352)), (False, (352, 64))):
        weight, floats = fabricated(case, 5, num_outputs, size)
        x = jnp.asarray(
            numbers(11 if is_gathered else 22, size) / np.sqrt(np.square(floats).sum(-1).mean()), jnp.bfloat16
        )
        gate = Gated() if is_gathered else None
        call = partial(kernels.product, is_gathered=is_gathered, gate=gate, dtype=jnp.float32, interpret=interpret)
        got = jax.jit(call)(x, jax.tree.map(jnp.asarray, weight), tiles)
        rows = np.asarray(x, np.float64)[np.asarray(tiles.row)] if is_gathered else np.asarray(x, np.float64)
        expected = np.einsum("pk,pnk->pn", rows, floats[expert_of_place].astype(np.float64))
        if is_gathered:
            first, second = np.split(expected, 2, axis=1)
            expected = first / (1 + np.exp(-first)) * second
        assert error(got, expected) < 2e-2


def experts_of_codes(case: str, number: int, hidden: int, size: int, **options) -> tuple[Experts, dict, dict]:
    """A mixture of codes whose products are about 1, its parameters, and its parameters as floats."""
    ffn, params, floats = Experts(SoftmaxTopK(number, 2), **options), {}, {}
    for name, shape in (("experts_gate_up", (ffn.gate.num_parts * size, hidden)), ("experts_out", (hidden, size))):
        weight, _ = fabricated(case, number, *shape)
        norm = np.sqrt(np.square(dequantize(weight)).sum(-1).mean())
        if weight.scale.dtype == np.uint8:  # exponents
            parts = {"scale": (weight.scale - round(float(np.log2(norm)))).astype(np.uint8)}
        else:
            parts = {part: getattr(weight, part) for part in ("scale", "minimum")}
            parts = {part: (x / norm).astype(x.dtype) for part, x in parts.items() if x is not None}
        params[name] = jax.tree.map(jnp.asarray, weight.replace(**parts))
        floats[name] = np.asarray(dequantize(params[name]), np.float64)
    if ffn.has_bias:
        params["experts_gate_up_bias"] = jnp.asarray(numbers(number, 2 * size, seed=2), jnp.bfloat16)
        floats["experts_gate_up_bias"] = np.asarray(params["experts_gate_up_bias"], np.float64)
    return ffn, params, floats


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("int8", PLAIN),
        ("int8", UNGATED),
        ("e4m3 in blocks", CLIPPED),
        ("mxfp4", CLIPPED),
        ("int4 with minima", {"has_bias": True}),
    ],
)
def test_pairs_of_few_rows(case, options, interpret):
    """Each is a product of one row; the second expert of the first row is the first one of the second."""
    number, hidden = 16, 160
    ffn, params, floats = experts_of_codes(case, number, hidden, 72, **options)
    experts, weights = np.array([[3, 7], [7, 0]], np.int32), np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)
    x = jnp.asarray(numbers(2, hidden), jnp.bfloat16)
    got = jax.jit(partial(ffn.mix, implementation=implementation(interpret)))(params, x, experts, weights)
    assert error(got, dense_sum(ffn, floats, np.asarray(x, np.float64), experts, weights, jnp.bfloat16)) < 1e-2


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize(
    ("case", "tiling"),
    [
        pytest.param("mxfp4", RowTiling(2, 1), marks=pytest.mark.slow),
        pytest.param("int4 with zeros", RowTiling(4, 1, 6), marks=pytest.mark.slow),
        ("mxfp4", RowTiling(8, 2, 3)),
    ],
)
def test_tilings_of_pairs(case, tiling, interpret):
    """Steps and programs that end early, one group of outputs a program and several; two rows choose an expert."""
    ffn, params, floats = experts_of_codes(case, 3, 1376, 37, **CLIPPED)
    x, row, expert = jnp.asarray(numbers(2, 1376), jnp.bfloat16), np.array([0, 0, 1, 1]), np.array([1, 2, 2, 0])
    options = {"gate": ffn.gate, "is_interleaved": True, "dtype": jnp.float32, "tiling": tiling, "interpret": interpret}
    options["bias"] = params["experts_gate_up_bias"]
    got = jax.jit(partial(expert_rows.products, **options))(x, params["experts_gate_up"], expert.reshape(2, 2))
    each = np.einsum("pk,pnk->pn", np.asarray(x, np.float64)[row], floats["experts_gate_up"][expert])
    both = ffn.split(jnp.asarray(each + floats["experts_gate_up_bias"][expert], jnp.float32))
    assert error(got, np.asarray(ffn.gate(*both), np.float64)) < 1e-4


CHOICES = [  # a router of each kind, for rows that pad to a power of two and that do not
    (1, TopKSoftmax(16, 4)),
    (5, SigmoidTopK(16, 2, scale=2.5)),
    (16, SoftmaxTopK(8, 4, has_scales=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize(("num_rows", "router"), CHOICES)
def test_choice(num_rows, router, interpret):
    """Many scores are equal. Each pair has a place in a tile of its expert."""
    number, chosen = router.num_experts, router.num_chosen
    vectors = {name: jnp.asarray(np.round(numbers(*shape, seed=1)) / 2) for name, shape in router.shapes().items()}
    logits = np.random.default_rng(2).integers(0, 3, (num_rows, number)).astype(np.float32)
    num_tiles, size = sizes_of_tiles(num_rows, chosen, number, kernels.MIN_TILE, kernels.MAX_TILE)
    call = partial(choice.choose, rule=router, num_chosen=chosen, num_tiles=num_tiles, size=size, interpret=interpret)
    experts, weights, tiles = jax.tree.map(np.asarray, jax.jit(call)(logits, vectors))
    expected, of_expected = router(vectors, jnp.asarray(logits))
    np.testing.assert_array_equal(experts, expected)
    np.testing.assert_allclose(weights, of_expected, rtol=1e-5)
    np.testing.assert_array_equal(tiles.row[tiles.place], np.arange(num_rows * chosen) // chosen)
    assert tiles.count.max() <= size and tiles.count.sum() == num_rows * chosen
    for start, count, expert in zip(tiles.start, tiles.count, tiles.expert, strict=True):
        is_inside = (tiles.place >= start) & (tiles.place < start + count)
        assert is_inside.sum() == count and (experts.reshape(-1)[is_inside] == expert).all()


MANY = [  # a router of each kind, of sizes that are powers of two and that are not
    SoftmaxTopK(256, 8),
    SoftmaxTopK(512, 10, has_scales=True),
    TopKSoftmax(128, 5),
    SigmoidTopK(160, 6, scale=2.5),
    SoftmaxTopK(96, 6, has_corrections=True),
]


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize("router", MANY)
def test_choice_among_many(router, interpret):
    """Rows of random, equal, infinite and very different logits, of zeros of both signs and of NaN."""
    number, rng = router.num_experts, np.random.default_rng(2)
    vectors = {name: jnp.asarray(np.round(numbers(*shape, seed=1)) / 2) for name, shape in router.shapes().items()}
    logits = np.stack([scale * numbers(number, seed=i) for i, scale in enumerate((1, 1, 100))] + 4 * [np.zeros(number)])
    logits[3] = rng.integers(0, 3, number)
    logits[4] = rng.choice([-0.0, 0.0, -1.0], number)
    logits[5] = np.where(np.arange(number) % 50 == 7, logits[0], -np.inf)
    logits[6] = np.where(np.arange(number) % 40 == 7, np.nan, logits[0])
    logits = logits.astype(np.float32)
    without = jax.tree.map(jnp.zeros_like, vectors)
    call = jax.jit(partial(row_choice.choose, rule=router, num_chosen=router.num_chosen, interpret=interpret))
    for own in (vectors, without):
        experts, weights = call(logits, own)
        expected, of_expected = router(own, jnp.asarray(logits))
        np.testing.assert_array_equal(experts, expected)
        np.testing.assert_allclose(weights, of_expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(call(logits[4:5], own)[1], weights[4:5])


@pytest.mark.parametrize("interpret", INTERPRET)
def test_routes(interpret):
    """The kernels together, from logits to sums, against the choice and the products by themselves."""
    ffn, params = make_experts(16, 23)
    ffn = replace(ffn, router=TopKSoftmax(16, 2))
    params = {name: jnp.asarray(x / 4, jnp.bfloat16) for name, x in params.items()}
    params["router_bias"] = jnp.asarray(numbers(16, seed=3))
    x, logits = jnp.asarray(numbers(9, 24), jnp.bfloat16), jnp.asarray(numbers(9, 16, seed=4))
    by = {"implementation": implementation(interpret)}
    y, experts, weights = jax.jit(partial(ffn.route, **by))(params, x, logits)
    np.testing.assert_array_equal(experts, ffn.router(params, logits)[0])
    np.testing.assert_allclose(y, jax.jit(partial(ffn.mix, **by))(params, x, experts, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize("num_rows", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_routes_of_codes(num_rows, interpret):
    """Experts as gpt-oss has them, by one row and by rows that share experts."""
    number, chosen, hidden = 8, 4, 160
    ffn, params, _ = experts_of_codes("mxfp4", number, hidden, 96, **CLIPPED)
    ffn = replace(ffn, router=TopKSoftmax(number, chosen))
    params["router_bias"] = jnp.asarray(numbers(number, seed=3))
    x, logits = jnp.asarray(numbers(num_rows, hidden), jnp.bfloat16), jnp.asarray(numbers(num_rows, number, seed=4))
    y, *made = jax.jit(partial(ffn.route, implementation=implementation(interpret)))(params, x, logits)
    expected, *made_by_xla = jax.jit(partial(ffn.route, implementation="xla"))(params, x, logits)
    np.testing.assert_array_equal(made[0], made_by_xla[0])
    np.testing.assert_allclose(made[1], made_by_xla[1], rtol=1e-5)
    assert error(y, np.asarray(expected, np.float64)) < 2e-2


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize(
    ("case", "router", "num_rows", "num_parts", "is_gated"),
    [
        ("e4m3 in blocks", SoftmaxTopK(16, 2), 2, 2, True),
        ("int4 with zeros", SoftmaxTopK(8, 2), 5, 2, False),
        ("int8", SigmoidTopK(12, 3, scale=2.5), 1, 1, False),
    ],
)
def test_routes_beside_an_mlp(case, router, num_rows, num_parts, is_gated, interpret):
    """The MLP that every row passes through is one more pair of each, in the launches of the experts."""
    number, hidden, size = router.num_experts, 160, 72
    ffn, params, floats = experts_of_codes(case, number + 1, hidden, size, **(PLAIN if num_parts == 2 else UNGATED))
    for name in ("gate_up", "out"):
        both = params[f"experts_{name}"]
        params |= {f"shared_{name}": both[number], f"experts_{name}": both[np.arange(number)]}
    ffn = replace(ffn, router=router, shared=Shared("silu" if num_parts == 2 else "relu2", is_gated, num_parts))
    params |= {name: jnp.asarray(numbers(number, seed=3)) for name in router.shapes()}
    x = jnp.asarray(numbers(num_rows, hidden), jnp.bfloat16)
    logits, of_factor = jnp.asarray(numbers(num_rows, number, seed=4)), jnp.asarray(numbers(num_rows, 1, seed=5))
    factor = jax.nn.sigmoid(of_factor) if is_gated else jnp.ones((num_rows, 1))
    beside = Beside(params["shared_gate_up"], params["shared_out"], factor)
    assert ffn.is_joined(params, x, beside)
    route = partial(jax.jit(ffn.route, static_argnames="implementation"), params, x, logits)
    y, *made = route(beside=beside, implementation=implementation(interpret))
    by_xla, *made_by_xla = route(beside=beside, implementation="xla")
    np.testing.assert_array_equal(made[0], made_by_xla[0])
    np.testing.assert_allclose(made[1], made_by_xla[1], rtol=1e-5)
    # The MLP as an expert that every row has chosen.
    experts = np.concatenate([made[0], np.full((num_rows, 1), number)], axis=1)
    weights = np.concatenate([made[1], factor], axis=1)
    of_all = replace(ffn, router=SoftmaxTopK(number + 1, 1))
    expected = dense_sum(of_all, floats, np.asarray(x, np.float64), experts, weights, jnp.bfloat16)
    assert error(y, expected) < 1e-2 and error(by_xla, expected) < 5e-2
    apart = ffn.shared(beside, x[None], transposed=True, implementation="xla")
    without = route(implementation="xla")[0]
    np.testing.assert_allclose(by_xla, without + apart, rtol=1e-5, atol=1e-5)
    assert error(without, expected) > 0.1
    many = jnp.tile(x, (number, 1))  # which share tiles
    with pytest.raises(ValueError, match="beside must be None or an MLP that is_joined"):
        ffn.route(params, many, jnp.tile(logits, (number, 1)), beside=beside)


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize("num_programs", [None, 3])
def test_rows_and_two_matrices(num_programs, interpret):
    """A program has outputs of one matrix, of the other, and of none; each row is multiplied as if it were alone."""
    x, norm = jnp.asarray(numbers(5, 200), jnp.bfloat16), (jnp.asarray(numbers(1, 200, seed=5)[0]), 0.1, 0.0)
    first, second = (jnp.asarray(numbers(n, 200, seed=n), jnp.bfloat16) for n in (14, 3))
    call = partial(linear_after_norm, norm=norm, dtype=jnp.float32, interpret=interpret, num_programs=num_programs)
    y, of_second, rows = jax.jit(call)(x, first, more=second)
    np.testing.assert_allclose(np.asarray(rows, np.float32), np.asarray(rms_norm(x, norm), np.float32), rtol=2**-7)
    expected = np.asarray(rms_norm(x.astype(jnp.float32), norm), np.float64)
    assert error(y, expected @ np.asarray(first, np.float64).T) < 1e-5
    assert error(of_second, expected @ np.asarray(second, np.float64).T) < 1e-5
    for row in range(5):
        alone = jax.jit(call)(x[row : row + 1], first, more=second)
        for own, of_all in zip(alone, (y, of_second, rows), strict=True):
            np.testing.assert_array_equal(own[0], of_all[row])


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize("size", [160, 1100])
def test_one_row_is_normed_where_the_router_multiplies_it(size, interpret):
    """With an offset of the scale, in a row of one tile and of a tile and a part; without a norm it comes back."""
    x = jnp.asarray(5 * numbers(1, size, seed=3), jnp.bfloat16)
    router = jnp.asarray(numbers(16, size, seed=4) / 10, jnp.bfloat16)
    norm = Norm(jnp.asarray(numbers(1, size, seed=5)[0], jnp.bfloat16), 0.1, 1.0)
    read = partial(normed_and_logits, implementation=implementation(interpret))
    rows, logits, _ = jax.jit(partial(read, norm=norm))(router, x)
    expected = rms_norm(x, norm)
    np.testing.assert_allclose(*(np.asarray(one, np.float32) for one in (rows, expected)), rtol=2**-7)
    products = np.asarray(expected, np.float64) @ np.asarray(router, np.float64).T
    assert error(logits, products) < 1e-2
    same, plain, of_more = jax.jit(read)(router, x, more=router[3:5])
    np.testing.assert_array_equal(same, x)
    np.testing.assert_allclose(of_more, plain[:, 3:5], rtol=1e-5)
    assert error(plain, np.asarray(x, np.float64) @ np.asarray(router, np.float64).T) < 1e-2


def test_choices_without_the_kernel():
    """Sizes that it lacks, and groups."""

    def reason(*shape, chosen=2):
        return choice.unsupported(jax.ShapeDtypeStruct(shape, jnp.float32), chosen)

    assert reason(4, 32) is None
    assert reason(4, 12) == "the kernel takes a power of two of experts, got 12"
    assert reason(4, 32, chosen=3) == "the kernel takes a power of two of chosen experts, got 3"
    assert reason(17, 32) == "the kernel takes at most 16 rows and 128 pairs, got 17 rows of 2"
    assert reason(4, 128) == "the kernel takes at most 64 experts, got 128"
    assert reason(5, 64) == "the kernel makes at most 16384 comparisons, got 5 rows of 64 experts"
    assert not SigmoidTopK(16, 2, num_groups=4, num_chosen_groups=2).has_kernel
    for shape, chosen, message in (
        ((64, 512), 16, None),
        ((65, 128), 8, "the kernel takes at most 64 rows, got 65"),
        ((1, 513), 8, "the kernel takes at most 512 experts, got 513"),
        ((1, 128), 17, "the kernel takes at most 16 chosen experts, got 17"),
    ):
        assert row_choice.unsupported(jax.ShapeDtypeStruct(shape, jnp.float32), chosen) == message


def test_unsupported():
    ffn, params = make_experts(4, 7)
    x, experts, weights = numbers(3, 24), np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
    with pytest.raises(NotImplementedError, match="the kernel takes bfloat16 or float16 rows, got float32"):
        ffn.mix(params, x, experts, weights, implementation="interpret")
    with pytest.raises(NotImplementedError, match="the kernel takes one dtype, got rows bfloat16 and float32"):
        ffn.mix(params, x.astype(jnp.bfloat16), experts, weights, implementation="interpret")
    with pytest.raises(NotImplementedError, match="the kernels have no error function, got the activation gelu"):
        replace(ffn, gate=Gated("gelu")).mix(params, x, experts, weights, implementation="interpret")


SHAPES = {  # of released models: experts, chosen ones, hidden size, width of an expert
    "gpt-oss": (32, 4, 2880, 2880),
    "qwen3": (128, 8, 2048, 768),
}


def described(name: str, format: str) -> tuple[Experts, dict, int]:
    """The mixture of a released model, with the shapes of its matrices."""
    number, chosen, hidden, size = SHAPES[name]
    router = TopKSoftmax(number, chosen) if name == "gpt-oss" else SoftmaxTopK(number, chosen)
    ffn = Experts(router, **(CLIPPED if name == "gpt-oss" else PLAIN))
    params = {}
    for key, shape in (("experts_gate_up", (number, 2 * size, hidden)), ("experts_out", (number, hidden, size))):
        params[key] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        if format != "bf16":
            bits, code, group, dtype = {
                "mxfp4": (4, "e2m1", (1, 32), jnp.uint8),
                "fp8": (8, "e4m3", (128, 128), jnp.float32),
                "int4": (4, "int", (1, 64), jnp.bfloat16),
            }[format]
            *_, rows, inputs = shape
            scale = jax.ShapeDtypeStruct((number, -(-rows // group[0]), -(-inputs // group[1])), dtype)
            zero = scale.update(dtype=jnp.uint8) if format == "int4" else None
            words = jax.ShapeDtypeStruct((number, rows, inputs * bits // 32), jnp.int32)
            params[key] = Quantized(words, scale, zero, bits=bits, code=code, group=group)
    if ffn.has_bias:
        params["experts_gate_up_bias"] = jax.ShapeDtypeStruct((number, 2 * size), jnp.bfloat16)
    return ffn, params, hidden


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format", "num_rows"),
    [
        *product(("gpt-oss",), ("mxfp4",), (1, 2048)),
        *product(("qwen3",), ("bf16", "fp8"), (1, 2048)),
        ("qwen3", "int4", 1),
    ],
)
def test_compiles_without_spilling(name, format, num_rows, tmp_path):
    pytest.importorskip("triton")
    ffn, params, hidden = described(name, format)
    shape = jax.ShapeDtypeStruct
    rows = shape((num_rows, hidden), jnp.bfloat16)
    logits = shape((num_rows, ffn.router.num_experts), jnp.float32)
    params |= {name: shape(size, jnp.bfloat16) for name, size in ffn.router.shapes().items()}
    found = triton_kernels(ffn.route, params, rows, logits)
    chosen = "_choice_kernel" if name == "gpt-oss" else "_row_choice_kernel"
    products = "_expert_row_kernel" if num_rows == 1 and format != "bf16" else "_expert_kernel"
    arranged = format != "bf16" and products == "_expert_kernel"
    names = [chosen] * (num_rows == 1) + 2 * [*["_arrange_kernel"] * arranged, products]
    assert [kernel.name for kernel in found] == names
    for kernel in found:
        resources = compile_for_sm90(kernel, tmp_path)
        assert resources.spilled_bytes == 0 and resources.shared_bytes <= 227 * 1024, resources


@pytest.mark.parametrize(("name", "format", "most"), [("gpt-oss", "mxfp4", 4), ("qwen3", "fp8", 4)])
def test_pairs_apart(name, format, most):
    """Few pairs with codes of 4 bits are products of one row, and so are pairs of which few share an expert."""
    ffn, params, hidden = described(name, format)

    def products(num_rows: int) -> set[str]:
        shape = partial(jax.ShapeDtypeStruct, (num_rows, ffn.router.num_chosen))
        x = jax.ShapeDtypeStruct((num_rows, hidden), jnp.bfloat16)
        found = triton_kernels(ffn.mix, params, x, shape(jnp.int32), shape(jnp.float32))
        return {kernel.name for kernel in found}

    assert products(most) == {"_expert_row_kernel"}
    assert products(most + 1) == {"_arrange_kernel", "_expert_kernel"}


def test_no_row_of_another_expert_is_read():
    """NaN in the matrices of experts that nobody chose, and in rows beside, stay where they are."""
    ffn, params = make_experts(6, 16)
    params = {name: jnp.asarray(x / 4, jnp.bfloat16) for name, x in params.items()}
    x, experts = jnp.asarray(numbers(5, 24), jnp.bfloat16), np.array([[0, 1]] * 4 + [[2, 3]], np.int32)
    mix, weights = partial(ffn.mix, implementation="interpret"), np.ones((5, 2), np.float32)
    expected = mix(params, x, experts, weights)
    broken = {name: matrix.at[2:].set(jnp.nan) for name, matrix in params.items()}
    np.testing.assert_array_equal(mix(broken, x, experts, weights)[:4], expected[:4])
