"""The kernel that copies tiles of a quantised matrix ahead of the tensor cores: lowered, run on a GPU, and chosen."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh
from lowering import ONE_DEVICE
from test_quantized import fabricated
from test_quantized_kernels import EPSILON, described, error, expected, operands, run_assembly

from pallas_kernels import hopper, launch, quantized_matmul, quantized_tiles
from pallas_kernels.quantized_inputs import arranged, order_of_tiles
from pallas_kernels.quantized_tiles import Tiling
from specjax.models import linear as models
from specjax.models.quantized import dequantize, quantize

FORMATS = "int8", "fp8", "fp8 in blocks", "int4"


def lowered(function, *arguments) -> str:
    with use_abstract_mesh(ONE_DEVICE):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("places", [4, 8])
def test_order(places):
    """Input 16 s + 8 h + 2 c + e, which the tensor cores take from thread c, register h, has a code of a word there.

    Words 2 c and 2 c + 1 lie in the thread. Each gives places / 4 times two pairs of codes, half a word apart.
    """
    found = np.asarray(order_of_tiles(places).input_at(jnp.arange(16 * places)))  # two times eight words
    for tile, s, h, c, e in product(range(2), range(places // 2), range(2), range(4), range(2)):
        word, place = 2 * c + s // (places // 4), 2 * (s % (places // 4)) + h + places // 2 * e
        block, in_block = divmod(word, 4)
        at = 8 * places * tile + 16 * s + 8 * h + 2 * c + e
        assert found[at] == 8 * places * tile + 4 * places * block + 4 * place + in_block


def test_arranged_in_tiles():
    """Also with a norm, and with zeros where a row has no input."""
    weight, _, x, scale, _ = operands("int4", 4, 352, 3)
    plain = arranged(x, weight, 384, interpret=True).numbers[0]
    tiles = arranged(x, weight, 384, order=order_of_tiles(8), interpret=True).numbers[0]
    at = np.asarray(order_of_tiles(8).input_at(jnp.arange(384)))
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 32)))
    np.testing.assert_array_equal(np.asarray(tiles, np.float32), padded[:, at])
    np.testing.assert_array_equal(np.sort(plain.astype(jnp.float32)), np.sort(tiles.astype(jnp.float32)))
    normed = arranged(x, weight, 384, order=order_of_tiles(8), norm=(scale, EPSILON), interpret=True).numbers[0]
    reference = np.asarray(models.rms_norm(x, (scale, EPSILON)), np.float32)
    np.testing.assert_allclose(
        np.asarray(normed, np.float32), np.pad(reference, ((0, 0), (0, 32)))[:, at], atol=1e-2, rtol=1e-2
    )


@pytest.mark.parametrize(("code", "i"), [*product(("int", "e4m3"), range(2))])
def test_bytes_become_halves(code, i):
    """Every pair of bytes i and i + 2 of a word, beside other bytes."""
    values = np.delete(np.arange(256), [127, 255]) if code == "e4m3" else np.arange(256)
    pairs = np.stack(np.meshgrid(values, values), -1).reshape(-1, 2).astype(np.uint32)
    others = np.random.default_rng(0).integers(0, 2**32, len(pairs), np.uint32) & ~np.uint32(0x00FF00FF << 8 * i)
    words = others | pairs[:, 0] << 8 * i | pairs[:, 1] << 8 * i + 16
    found = run_assembly(hopper._half_assembly(code, i), {"$1": words}).astype("<u4").view(np.float16).reshape(-1, 2)
    bytes_ = pairs.astype(np.uint8)
    wanted = bytes_.view(jnp.float8_e4m3fn).astype(np.float16) if code == "e4m3" else pairs.astype(np.float16) - 128
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("format", "num_rows", "gated", "num_splits"),
    [("int8", 64, True, 1), ("fp8", 100, False, 2), ("fp8 in blocks", 128, True, 2), ("int4", 24, True, 1)],
)
def test_lowers(format, num_rows, gated, num_splits):
    tiling = Tiling(256, min(128, -(-num_rows // 8) * 8), num_splits)
    function = partial(quantized_tiles.matmul, activation=jax.nn.silu if gated else None, tiling=tiling)
    x = jax.ShapeDtypeStruct((num_rows, 1024), jnp.bfloat16)
    text = lowered(function, x, described(format, 1024, 1024))
    assert text.count("mosaic_gpu") >= 1, text[:500]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "num_rows", "num_outputs", "size", "gated", "tiling"),
    [
        ("int8", 64, 512, 1024, False, None),
        ("int8", 300, 1152, 1024, False, Tiling(256, 104)),
        ("e4m3", 17, 512, 2048, True, None),
        ("e4m3", 129, 512, 2048, False, Tiling(128, 72, 4)),
        ("e4m3 in blocks", 40, 640, 1152, False, Tiling(256, 40, 2)),
        ("e4m3 in blocks", 256, 512, 1024, True, None),
        ("int4 in a row", 100, 512, 1024, False, None),
        ("int4, rounded", 33, 768, 1024, True, Tiling(256, 40, 2)),
        ("int4", 513, 512, 1152, False, None),
    ],
)
def test_products(case, num_rows, num_outputs, size, gated, tiling):
    if launch.compute_capability() != "9.0":
        pytest.skip("needs a GPU of compute capability 9.0")
    weight, floats, x, scale, residual = operands(case.split(",")[0], num_outputs, size, num_rows)
    if case.endswith("rounded"):
        weight = quantize(jnp.asarray(floats, jnp.bfloat16), "int4")  # has zeros
        floats = np.asarray(dequantize(weight))
    assert quantized_tiles.unsupported(x, weight) is None
    activation = jax.nn.silu if gated else None
    residual = residual[:, : num_outputs // 2] if gated else residual
    run = partial(quantized_tiles.matmul, dtype=jnp.float32, activation=activation, tiling=tiling)
    # Scales of groups are rounded with the codes, and a gate multiplies two products.
    bound = (5e-2 if gated else 2e-2) if weight.group[1] else 5e-5
    added = jax.jit(lambda x: run(x, weight, residual=residual))
    assert error(added(x), expected(x, floats, None, activation, residual)) < bound
    y = jax.jit(lambda x, scale: run(x, weight, norm=(scale, EPSILON)))(x, scale)
    normed = models.rms_norm(x, (scale, EPSILON))
    assert error(y, expected(normed, floats, None, activation)) < max(bound, 2e-2)  # norms round to either side
    holed = added(x.at[5, 3].set(jnp.nan))
    assert np.isnan(holed[5]).all() and np.isfinite(np.delete(holed, 5, axis=0)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_tilings_fit_and_fill_the_device(format):
    """At least three tiles are in flight, and programs fill two thirds of the device where the matrix is large."""
    for (num_outputs, size, gated), num_rows in product(
        ((28672, 4096, True), (4096, 14336, False), (6144, 4096, False), (4096, 4096, False), (512, 1024, False)),
        (8, 17, 32, 64, 100, 128, 130, 256, 512, 2048),
    ):
        weight = described(format, num_outputs, size)
        tiling = quantized_tiles.default_tiling(weight, num_rows, gated)
        assert tiling.rows % 8 == 0 and tiling.rows <= 128 and tiling.outputs in ((256,) if gated else (128, 256))
        assert quantized_tiles.num_stages(weight, tiling, hopper._STAGED_BYTES) >= 3
        programs = -(-num_outputs // tiling.outputs) * -(-num_rows // tiling.rows) * tiling.num_splits
        assert programs >= 2 / 3 * launch.NUM_MULTIPROCESSORS or num_outputs * size < 2**24
        assert programs <= 1.1 * launch.NUM_MULTIPROCESSORS or tiling.num_splits == 1


def test_unsupported(monkeypatch):
    x = jnp.zeros((1, 20, 1024), jnp.bfloat16)

    def reason(case: str, x=x, num_outputs: int = 128, **changed) -> str:
        weight, _ = fabricated(case, num_outputs, 1024)
        return quantized_tiles.unsupported(x, weight.replace(**changed)) or ""

    monkeypatch.setattr(quantized_tiles, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(quantized_tiles, "TRIED", jax.__version__[:5])
    assert reason("int8") == reason("e4m3 in blocks") == reason("int4") == reason("int4 in a row") == ""
    assert "got float32" in reason("int8", x.astype(jnp.float32)) and "got e2m1" in reason("mxfp4")
    assert "128 n outputs" in reason("int8", num_outputs=64) and "groups of 128 n" in reason("int4 with zeros")
    assert "without a minimum" in reason("int4 with minima") and "floats as scales" in reason(
        "int8", scale=jnp.zeros((128, 1), jnp.uint8)
    )
    assert "another order" in reason("int8", order=jnp.arange(1024))
    monkeypatch.setattr(quantized_tiles, "compute_capability", lambda: "8.0")
    assert "capability 9.0, got 8.0" in reason("int8")
    monkeypatch.setattr(quantized_tiles, "TRIED", "0.1.")
    assert f"got {jax.__version__}" in reason("int8")


def test_choice(monkeypatch):
    """Rows beyond `quantized_matmul`'s go to tiles where a GPU has them; an interpreted product never does."""

    def kernel(num_rows: int, interpret: bool = False, num_outputs: int = 512, size: int = 1024, format: str = "int8"):
        weight, x = described(format, num_outputs, size), jax.ShapeDtypeStruct((1, num_rows, size), jnp.bfloat16)
        return models._kernel_of(x, weight, interpret=interpret)

    monkeypatch.setattr(quantized_tiles, "compute_capability", lambda: "8.0")
    assert kernel(64) is quantized_matmul
    monkeypatch.setattr(quantized_tiles, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(quantized_tiles, "TRIED", jax.__version__[:5])
    assert kernel(17) is kernel(1024) is quantized_tiles
    assert kernel(16) is kernel(64, interpret=True) is kernel(64, num_outputs=384) is quantized_matmul
    large = {"num_outputs": 4096, "size": 8192}
    assert kernel(2, **large, format="fp8") is kernel(16, **large, format="fp8 in blocks") is quantized_tiles
    assert kernel(16, **large) is kernel(16, num_outputs=28672, format="fp8") is quantized_matmul
