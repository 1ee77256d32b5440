"""The largest values of wide rows, found in pieces and in whole rows."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.operations.top_k import top_k, top_k_of_pieces

PECULIAR = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)


def equal(got, expected):
    """Whether values are equal to the bit, and indices as well."""
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.int32), np.asarray(y).view(np.int32))


# Pieces of equal size, a narrower last piece, one with fewer than k values, and one with a single value.
@pytest.mark.parametrize("size, num_pieces, k", [(64, 8, 5), (61, 8, 5), (57, 8, 5), (50, 8, 7), (9, 2, 4)])
def test_pieces(size, num_pieces, k):
    """Many values are equal, whole rows are -inf or NaN, and no index is past the end."""
    rng = np.random.default_rng(size)
    rows = rng.normal(size=(8, size)).astype(np.float32)
    rows[1:3] = rng.integers(0, 3, (2, size))
    rows[3:6] = rng.choice(PECULIAR, (3, size))
    rows[6], rows[7] = -np.inf, np.where(np.arange(size) < size - 2, -np.nan, -np.inf)
    expected = jax.lax.top_k(rows, k)
    assert expected[1].max() < size
    equal(jax.jit(partial(top_k_of_pieces, k=k, num_pieces=num_pieces))(rows), expected)
    in_batches = top_k_of_pieces(rows.reshape(2, 4, size), k, num_pieces)
    equal(in_batches, [x.reshape(2, 4, k) for x in expected])
    equal(jax.vmap(partial(top_k_of_pieces, k=k, num_pieces=num_pieces))(rows), expected)


# Equal pieces, a narrower last piece, and rows that stay whole: narrow ones, many of their values, and none of them.
@pytest.mark.parametrize(
    "size, k, arrays",
    [
        (248320, 16, ["448x3880", "7x1024"]),
        (50257, 2, ["217x1571", "7x1556", "7x64"]),
        (2047, 2, ["1x7x2047"]),
        (2048, 300, ["1x7x2048"]),
        (248320, 0, ["1x7x248320"]),
    ],
)
def test_platforms(size, k, arrays):
    """CUDA alone gets pieces, in matrices, which XLA has a kernel for."""
    traced = jax.jit(partial(top_k, k=k)).trace(jax.ShapeDtypeStruct((1, 7, size), jnp.float32))
    for platform, expected in (("cuda", arrays), ("cpu", [f"1x7x{size}"])):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert re.findall(r"chlo\.top_k.* : tensor<(\w+)xf32> ->", text) == expected


def test_gradients():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4096)), jnp.float32)
    got, expected = (jax.grad(lambda x, by=by: jnp.sum(by(x, 3)[0] ** 2))(rows) for by in (top_k, jax.lax.top_k))
    np.testing.assert_array_equal(got, expected)
