"""Products of one row and of a few with a matrix, against float64 and against XLA's path of the same function."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from lowering import compile_for_sm90, triton_kernels
from test_quantized import fabricated

from pallas_kernels import linear as one_row
from pallas_kernels import matmul as few_rows
from pallas_kernels.linear import linear
from pallas_kernels.matmul import Tiling, matmul
from pallas_kernels.quantized import Quantized
from specjax.models import linear as models

EPSILON = 1e-3
SHAPES = {  # D, N, gated: of layers with 1 and 8 billion parameters
    "1b qkv": (2048, 3072, False),
    "1b gate": (2048, 16384, True),
    "1b down": (8192, 2048, False),
    "8b qkv": (4096, 6144, False),
    "8b gate": (4096, 28672, True),
}


def operands(size, num_rows, dtype, num_outputs):
    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape).astype(dtype)

    return normal(0, size), 0.1 * normal(1, num_rows, size), 1 + 0.1 * normal(2, size), normal(3, num_outputs)


def expected(x, weight, scale, residual, activation):
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    return expected_product(x / np.sqrt(np.mean(x**2) + EPSILON) * scale, weight, residual, activation)


def expected_product(x, weight, residual, activation):
    x, weight, residual = (np.asarray(a, np.float64) for a in (x, weight, residual))
    y = x @ weight.T
    if activation is not None:
        gate, up = np.split(y, 2, axis=-1)
        y = gate / (1 + np.exp(-gate)) * up
    return y + residual


INTERPRET = [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(
    "size, num_outputs, num_programs, activation, dtype",
    [
        (72, 9, 4, None, jnp.float32),
        (72, 9, 4, jax.nn.silu, jnp.bfloat16),
        (1024, 7, 3, None, jnp.bfloat16),
        (1024, 7, 3, jax.nn.silu, jnp.float32),
        (3000, 5, 132, None, jnp.float32),
        (3000, 5, 132, jax.nn.silu, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET)
def test_against_float64(size, num_outputs, num_programs, activation, dtype, interpret):
    """Sizes that no tile divides; fewer programs than outputs, of which not all are needed, and more."""
    arrays = operands(size, num_outputs * (1 if activation is None else 2), dtype, num_outputs)

    @jax.jit
    def product(x, weight, scale, residual):
        return linear(
            x,
            weight,
            norm=(scale, EPSILON, 0.25),
            activation=activation,
            residual=residual,
            dtype=jnp.float32,
            num_programs=num_programs,
            interpret=interpret,
        )

    x, weight, scale, residual = arrays
    reference = expected(x, weight, np.asarray(scale, np.float64) + 0.25, residual, activation)
    np.testing.assert_allclose(product(*arrays), reference, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_spilling(name, tmp_path):
    pytest.importorskip("triton")
    size, num_rows, gated = SHAPES[name]
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    num_outputs = num_rows // (2 if gated else 1)

    def product(x, weight, scale, residual):
        activation = jax.nn.silu if gated else None
        return linear(x, weight, norm=(scale, EPSILON), activation=activation, residual=residual)

    (kernel,) = triton_kernels(product, *map(shape, ((size,), (num_rows, size), (size,), (num_outputs,))))
    resources = compile_for_sm90(kernel, tmp_path)
    assert resources.spilled_bytes == 0 and resources.registers <= 64, resources


@pytest.mark.parametrize(
    "num_rows, size, num_outputs, tile, activation, dtype",
    [
        (1, 512, 64, (16, 256), None, jnp.bfloat16),
        (1, 512, 64, (64, 128), jax.nn.silu, jnp.float16),
        (6, 300, 70, (16, 256), jax.nn.silu, jnp.bfloat16),
        (6, 300, 70, (64, 128), None, jnp.float16),
        (16, 100, 9, (16, 256), None, jnp.float16),
        (16, 100, 9, (64, 128), jax.nn.silu, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_few_rows_against_float64(num_rows, size, num_outputs, tile, activation, dtype, interpret):
    """Sizes that tiles divide and that none does; one row, and as many as there may be."""
    _, weight, _, _ = operands(size, num_outputs * (1 if activation is None else 2), dtype, num_outputs)
    x = jax.random.normal(jax.random.key(4), (num_rows, size)).astype(dtype)
    residual = jax.random.normal(jax.random.key(5), (num_rows, num_outputs)).astype(dtype)
    tiling = Tiling(*tile, num_warps=2, num_stages=2)
    options = {"activation": activation, "dtype": jnp.float32, "tiling": tiling, "interpret": interpret}
    y = jax.jit(lambda x, weight, residual: matmul(x, weight, residual=residual, **options))(x, weight, residual)
    np.testing.assert_allclose(y, expected_product(x, weight, residual, activation), rtol=2e-5, atol=2e-5)
    without = matmul(x, weight, **options)
    np.testing.assert_allclose(without, expected_product(x, weight, 0, activation), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("row", [0, 5])
def test_rows_do_not_mix(row):
    """A row of NaN leaves the others as they are."""
    _, weight, _, _ = operands(300, 70, jnp.bfloat16, 70)
    x = jax.random.normal(jax.random.key(4), (6, 300)).astype(jnp.bfloat16)
    product = partial(matmul, dtype=jnp.float32, interpret=True)
    y = product(x, weight).at[row].set(jnp.nan)
    np.testing.assert_array_equal(product(x.at[row].set(jnp.nan), weight), y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "num_outputs", "gated", "shape"),
    [
        (14336, 4096, False, (1, 1)),
        (14336, 4096, False, (1, 6)),
        (4096, 14336, True, (1, 6)),
        (4096, 14336, True, (3, 5)),
    ],
)
def test_few_rows_of_a_large_model(size, num_outputs, gated, shape):
    """With the residual of each token, and with a bias that all share."""
    activation = jax.nn.silu if gated else None
    _, weight, scale, bias = operands(size, num_outputs * (2 if gated else 1), jnp.bfloat16, num_outputs)
    x = jax.random.normal(jax.random.key(4), (*shape, size)).astype(jnp.bfloat16)
    residual = jax.random.normal(jax.random.key(5), (*shape, num_outputs)).astype(jnp.bfloat16)
    assert few_rows.unsupported(x, weight) is None and few_rows.is_worthwhile(x, weight)
    normed = models.rms_norm(x, (scale, EPSILON))
    for added in (residual, bias[None, None]):
        options = {"norm": (scale, EPSILON), "activation": activation, "residual": added, "dtype": jnp.float32}
        y = models.linear(x, weight, transposed=True, **options)
        reference = expected_product(normed, weight, added, activation)
        np.testing.assert_allclose(y, reference, rtol=1e-4, atol=1e-4 * np.abs(reference).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs", "gated"), [(1, 14336, 4096, False), (6, 4096, 14336, True)]
)
@pytest.mark.parametrize("limit", [99 * 1024, 227 * 1024])
def test_few_rows_fit_registers_and_shared_memory(num_rows, size, num_outputs, gated, limit, tmp_path, monkeypatch):
    """The tiles chosen for many outputs and for few, on GPUs with little shared memory and with much."""
    pytest.importorskip("triton")
    monkeypatch.setattr(few_rows, "shared_bytes", lambda: limit)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arrays = (num_rows, size), (num_outputs * (2 if gated else 1), size), (num_rows, num_outputs)

    def product(x, weight, residual):
        return matmul(x, weight, activation=jax.nn.silu if gated else None, residual=residual)

    (kernel,) = triton_kernels(product, *map(shape, arrays))
    resources = compile_for_sm90(kernel, tmp_path)
    assert resources.spilled_bytes == 0 and 32 * 1024 < resources.shared_bytes <= limit, resources


def test_what_in_a_model_takes_a_kernel():
    """One token takes kernels with norm, gate and sum too; a few tokens where the matrix is large."""

    def kernels(num_tokens, size, num_rows):
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        arrays = (1, num_tokens, size), (num_rows, size), (size,), (1, num_tokens, num_rows // 2)

        def product(x, weight, scale, residual):
            options = {"norm": (scale, EPSILON), "activation": jax.nn.silu, "residual": residual}
            return models.linear(x, weight, transposed=True, **options)

        return [kernel.name for kernel in triton_kernels(product, *map(shape, arrays))]

    assert kernels(1, 2048, 16384) == ["_linear_kernel"]
    assert kernels(1, 2048, 128256) == kernels(16, 2048, 128256) == kernels(1, 16384, 4096) == ["_matmul_kernel"]
    assert kernels(17, 2048, 128256) == kernels(2, 2048, 16384) == kernels(1, 16384, 2048) == []


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("size", [256, 8200])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_models_give_what_the_kernel_gives(num_tokens, size, transposed):
    """On a GPU one token of a small row takes a kernel, where it can, and any other is one of a pair."""
    x, weight, scale, residual = operands(size, 12, jnp.float32, 6)
    x = jnp.stack([x] * num_tokens)[None]

    @jax.jit
    def product(x, weight, scale, residual):
        with jax.default_matmul_precision("highest"):
            options = {"norm": (scale, EPSILON), "activation": jax.nn.silu, "residual": residual[None, None]}
            return models.linear(x, weight if transposed else weight.T, transposed=transposed, **options)

    y = product(x, weight, scale, residual)
    assert y.shape == (1, num_tokens, 6)
    reference = expected(x[0, 0], weight, scale, residual, jax.nn.silu)
    np.testing.assert_allclose(y, np.stack([reference] * num_tokens)[None], rtol=2e-5, atol=2e-5)


def test_unsupported():
    weight, large = jnp.zeros((3, 64)), jnp.zeros((4096, 16384), jnp.bfloat16)
    assert one_row.unsupported(jnp.zeros((1, 1, 64)), weight) is None
    assert "one row, got shape (1, 2, 64)" in one_row.unsupported(jnp.zeros((1, 2, 64)), weight)
    assert "got bfloat16 and float32" in one_row.unsupported(jnp.zeros((1, 1, 64), jnp.bfloat16), weight)
    assert one_row.is_worthwhile(jnp.zeros((1, 1, 64)), weight)
    assert not one_row.is_worthwhile(jnp.zeros((1, 1, 16384)), large)
    assert few_rows.unsupported(jnp.zeros((2, 8, 16384), jnp.bfloat16), large) is None
    assert "at most 16 rows, got shape (17, 1" in few_rows.unsupported(jnp.zeros((17, 1, 16384), jnp.bfloat16), large)
    assert "got float32 and bfloat16" in few_rows.unsupported(jnp.zeros((1, 1, 16384)), large)
    assert "got float32 and float32" in few_rows.unsupported(jnp.zeros((1, 1, 64)), weight)
    assert few_rows.is_worthwhile(jnp.zeros((1, 1, 16384), jnp.bfloat16), large)
    assert not few_rows.is_worthwhile(jnp.zeros((1, 1, 16384), jnp.bfloat16), large[:64])


def test_a_named_implementation_does_not_fall_back():
    x, weight = jnp.ones((1, 2, 64)), jnp.ones((3, 64))
    with pytest.raises(
        NotImplementedError, match="'pallas' cannot run this case: the kernel takes bfloat16 or float16"
    ):
        models.linear(x, weight, transposed=True, implementation="pallas")
    with pytest.raises(NotImplementedError, match=r"transposed weight \[N, D\], got transposed=False"):
        models.linear(x, weight.T, implementation="interpret")


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, jnp.float32), (3, jnp.bfloat16)])
def test_implementations_agree(num_tokens, dtype):
    _, weight, scale, residual = operands(300, 14, dtype, 7)
    x = jax.random.normal(jax.random.key(4), (1, num_tokens, 300)).astype(dtype)
    options = {"norm": (scale, EPSILON), "activation": jax.nn.silu, "residual": residual[None, None]}
    run = partial(models.linear, x, weight, transposed=True, dtype=jnp.float32, **options)
    with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 in TF32
        expected = run(implementation="xla")
    np.testing.assert_allclose(run(implementation="interpret"), expected, rtol=1e-4, atol=1e-4)


def two_matrices(code, size, num_outputs, num_small):
    """Return a matrix, of codes or of bfloat16, and a small one beside it, and the numbers of both."""
    _, small, scale, _ = operands(size, num_small, jnp.bfloat16, 1)
    if code is None:
        weight = operands(size, num_outputs, jnp.bfloat16, 1)[1][::-1]
        return (weight, small, scale), [np.asarray(one, np.float64) for one in (weight, small)]
    weight, floats = fabricated(code, num_outputs, size)
    return (weight, small, scale), [floats.astype(np.float64), np.asarray(small, np.float64)]


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2)])
def test_a_norm_that_subtracts_the_mean(shape, implementation):
    """It is computed with its bias before one product and before two, and kernels take the rows."""
    (weight, small, scale), matrices = two_matrices(None, 300, 130, 7)
    x = (5 + jax.random.normal(jax.random.key(4), (*shape, 300))).astype(jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(5), (300,)).astype(jnp.bfloat16)
    norm = models.CentredNorm(scale, EPSILON, 1.0, bias)
    options = {"transposed": True, "norm": norm, "implementation": implementation}
    rows = np.asarray(x, np.float64)
    rows = rows - rows.mean(axis=-1, keepdims=True)
    rows = rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + EPSILON) * (np.asarray(scale, np.float64) + 1)
    rows = rows + np.asarray(bias, np.float64)
    of_two = models.linear_of_two(x, weight, small, **options)
    for got, matrix in zip((models.linear(x, weight, **options), *of_two), (matrices[0], *matrices), strict=True):
        expected = rows @ matrix.T
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("code", [None, "e4m3 in blocks"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (1, 8), (3, 3)])
def test_two_products_after_one_norm(shape, code, interpret):
    """Rows of which a kernel norms a few for both products, with an offset of the scale; sizes that no tile divides."""
    (weight, small, scale), (floats, of_small) = two_matrices(code, 300, 130, 7)
    x = (5 * jax.random.normal(jax.random.key(4), (*shape, 300))).astype(jnp.bfloat16)
    norm = models.Norm(scale, EPSILON, 1.0)
    run = jax.jit(partial(models.linear_of_two, transposed=True, norm=norm), static_argnames="implementation")
    normed = np.asarray(models.rms_norm(x.astype(jnp.float32), norm), np.float64)
    by_xla = run(x, weight, small, implementation="xla")
    by_default = run(x, weight, small)
    by_kernels = run(x, weight, small, implementation="interpret" if interpret else "pallas")
    for i, matrix in enumerate((floats, of_small)):
        expected = normed @ matrix.T
        for got in (by_xla[i], by_default[i], by_kernels[i]):
            assert got.shape == (*shape, len(matrix)) and got.dtype == jnp.bfloat16
            np.testing.assert_allclose(
                np.asarray(got, np.float64), expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max()
            )


@pytest.mark.cpu  # where the products of floats have the same bits
@pytest.mark.parametrize(("dtype", "shape", "transposed"), [(jnp.float32, (1, 4), True), (jnp.bfloat16, (2, 2), False)])
def test_two_products_are_those_of_linear(dtype, shape, transposed):
    """In float32 and with matrices that no kernel takes, and without a norm."""
    _, weight, scale, _ = operands(72, 12, dtype, 1)
    weight, small = (one if transposed else one.T for one in (weight, weight[3:6]))
    x = jax.random.normal(jax.random.key(4), (*shape, 72)).astype(dtype)
    for norm in ((scale, EPSILON), None):
        both = models.linear_of_two(x, weight, small, transposed=transposed, norm=norm)
        for got, matrix in zip(both, (weight, small), strict=True):
            np.testing.assert_array_equal(got, models.linear(x, matrix, transposed=transposed, norm=norm))


def shapes_of_two(num_tokens, size, num_outputs, num_small, dtype=jnp.bfloat16):
    """Describe the operands of two products, of which the large matrix has codes."""
    shape = jax.ShapeDtypeStruct
    words = shape((num_outputs, size // 4), jnp.int32)
    scale = shape((num_outputs // 128, size // 128), jnp.float32)
    weight = Quantized(words, scale, None, bits=8, code="e4m3", group=(128, 128))
    small, factors = shape((num_small, size), dtype), shape((size,), dtype)
    return shape((1, num_tokens, size), dtype), weight, small, factors


def two_products(x, weight, small, scale):
    return models.linear_of_two(x, weight, small, transposed=True, norm=(scale, EPSILON))


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, jnp.bfloat16), (9, jnp.bfloat16), (4, jnp.float32)])
def test_rows_that_each_product_norms(num_tokens, dtype):
    found = triton_kernels(two_products, *shapes_of_two(num_tokens, 2048, 1024, 64, dtype))
    assert "_rows_kernel" not in [kernel.name for kernel in found]


@pytest.mark.parametrize("num_tokens", [2, 8])
def test_a_few_rows_are_normed_once(num_tokens):
    found = triton_kernels(two_products, *shapes_of_two(num_tokens, 2048, 1024, 64))
    assert [kernel.name for kernel in found][:2] == ["_rows_kernel", "_arrange_kernel"]
    assert ["rsqrt" in kernel.triton_ir for kernel in found] == [True, *[False] * (len(found) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_small"), [(2048, 64), (5120, 96)])
def test_a_norm_with_a_small_product_compiles_without_spilling(size, num_small, tmp_path):
    pytest.importorskip("triton")
    first, *_ = triton_kernels(two_products, *shapes_of_two(4, size, 1024, num_small))
    resources = compile_for_sm90(first, tmp_path)
    assert first.name == "_rows_kernel" and resources.spilled_bytes == resources.stack_bytes == 0, resources


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_share_the_outputs_of_two_products(check_vma):
    """Rows that are the same on each device stay so where JAX checks it."""
    (weight, small, scale), _ = two_matrices(None, 96, 12, 6)
    x = jax.random.normal(jax.random.key(4), (1, 4, 96)).astype(jnp.bfloat16)
    whole, parts = PartitionSpec(), PartitionSpec("tensor")
    shared = jax.shard_map(
        two_products,
        mesh=Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",)),
        in_specs=(whole, parts, parts, whole),
        out_specs=PartitionSpec(None, None, "tensor"),
        check_vma=check_vma,
    )
    with jax.default_device(jax.devices("cpu")[0]):
        for got, expected in zip(
            jax.jit(shared)(x, weight, small, scale), two_products(x, weight, small, scale), strict=True
        ):
            np.testing.assert_allclose(*(np.asarray(one, np.float32) for one in (got, expected)), rtol=2e-2, atol=2e-2)


@pytest.mark.cpu  # other devices multiply a few rows at the speed of one
class TestFewRowsOnCPUs:
    """The product of XLA in chunks of inputs, which are the first axis of the product before it is summed."""

    @pytest.mark.parametrize(
        "num_rows, size, num_outputs, transposed, first",
        [
            (1, 576, 465, False, 9),
            (1, 560, 465, False, None),  # 64 does not divide the inputs
            (1, 576, 100, False, None),  # the weight is small
            (2, 1360, 579, False, 85),
            (5, 1360, 579, False, 85),
            (5, 1361, 579, False, None),
            (5, 1360, 577, False, None),
            (7, 1360, 3700, False, None),  # the sums of the chunks are large
            (9, 1360, 579, False, None),  # the rows are many
            (1, 64, 65537, True, None),
            (3, 64, 65537, True, 65537),
            (3, 64, 65535, True, None),
        ],
    )
    def test_against_float64(self, num_rows, size, num_outputs, transposed, first):
        """`first` is the first axis of a product whose rows do not come first."""
        random = np.random.default_rng(0)
        x = random.standard_normal((1, num_rows, size), np.float32)
        weight = random.standard_normal((num_outputs, size) if transposed else (size, num_outputs), np.float32)
        product = partial(models.linear, transposed=transposed)
        y = jax.jit(product)(x, weight)
        expected = x[0].astype(np.float64) @ (weight.T if transposed else weight).astype(np.float64)
        np.testing.assert_allclose(y[0], expected, rtol=2e-5, atol=2e-4)
        assert (f"f32[{first},{num_rows}" in str(jax.make_jaxpr(product)(x, weight))) == (first is not None)

    def test_rows_of_two_sequences(self):
        """The rows of a batch keep their order, and the norm comes before the product and the gate after it."""
        random = np.random.default_rng(0)
        x, weight = (
            np.float32(0.1) * random.standard_normal(shape, np.float32) for shape in [(2, 2, 1360), (1360, 580)]
        )
        beside = {"norm": (np.ones(1360, np.float32), EPSILON), "activation": jax.nn.silu}
        y = jax.jit(partial(models.linear, **beside))(x, weight)
        expected = [
            jax.jit(partial(models.linear, **beside))(x[b : b + 1, t : t + 1], weight) for b, t in np.ndindex(2, 2)
        ]
        np.testing.assert_allclose(y.reshape(4, -1), np.concatenate(expected)[:, 0], rtol=2e-5, atol=2e-4)
