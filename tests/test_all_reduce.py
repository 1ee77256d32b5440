"""Sums over GPUs through each other's memory; test_lowering.py compiles the kernel on machines without them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import all_reduce
from specjax.parallel.links import _rows, links_in, links_of, sum_over


def mesh_of(devices):
    return Mesh(np.array(devices), ("tensor",))


def test_devices_without_common_memory():
    """XLA sums on CPUs, and where one device has all."""
    assert links_of(mesh_of(jax.devices("cpu")[:2]), "tensor") is None
    assert links_of(mesh_of(jax.devices()[:1]), "tensor") is None
    assert links_in({"embedding": jnp.zeros(3)}) is None and links_in([jnp.zeros(3)]) is None
    np.testing.assert_array_equal(links_in({"links": jnp.arange(5)[None]}), jnp.arange(5))


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        ((1, 1, 4096), jnp.bfloat16, None),
        ((1, 3), jnp.float32, None),
        ((4,), jnp.int32, "the kernel takes float32, bfloat16 or float16, got int32"),
        ((3,), jnp.bfloat16, "the kernel takes 4 to 1048576 bytes, a multiple of 4, got 6"),
        ((1 << 18, 2), jnp.float32, "the kernel takes 4 to 1048576 bytes, a multiple of 4, got 2097152"),
    ],
)
def test_what_the_kernel_takes(shape, dtype, message):
    found: list[str | None] = []
    jax.eval_shape(lambda x: found.append(all_reduce.unsupported(x)), jax.ShapeDtypeStruct(shape, dtype))
    assert found == [message]


def test_links_of_a_mesh():
    """Each device knows the mailboxes along the axis, its own included, and its place among them."""
    addresses = np.array([[0x0, 0x1_0000_0010, 0x20], [0xFFFF_FFFF_0030, 0x40, 0x50]])
    rows = _rows(addresses, 1).view(np.uint32)
    np.testing.assert_array_equal(rows[0, 1], [0, 0, 0x10, 1, 0x20, 0, 1])
    np.testing.assert_array_equal(rows[1, 2], [0xFFFF_0030, 0xFFFF, 0x40, 0, 0x50, 0, 2])
    np.testing.assert_array_equal(_rows(addresses, 0).view(np.uint32)[1, 1], [0x10, 1, 0x40, 0, 1])


def test_bits_of_numbers():
    for dtype, count in ((jnp.float32, 1), (jnp.bfloat16, 2), (jnp.float16, 2)):
        values = [jnp.array([1.5, -0.0, np.inf, -2.0], dtype) * (i + 1) for i in range(count)]
        bits = all_reduce._to_bits(values)
        assert bits.dtype == jnp.int32
        for got, expected in zip(all_reduce._from_bits(bits, dtype), values, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype", [((1, 4096), "bfloat16"), ((64, 4096), "bfloat16"), ((3, 100), "float32")])
def test_sums_on_gpus(shape, dtype):
    """Every sum of a chain equals the sum by XLA, on every device."""
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    mesh = mesh_of(jax.devices()[:2])
    links = links_of(mesh, "tensor")
    assert links is not None
    own = jax.random.normal(jax.random.key(0), (2, *shape)).astype(dtype)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("tensor"), P("tensor")), out_specs=P("tensor"), check_vma=False)
    def different(own, links):
        def body(i, carry):
            own, number = carry
            got = sum_over(own, "tensor", links, residual=jnp.ones_like(own))
            expected = (jax.lax.psum(own.astype(jnp.float32), "tensor") + 1).astype(own.dtype)
            following = 0.5 * own[..., ::-1] - 0.3 * jnp.sign(got) + 0.01 * (i % 7)
            return following.astype(own.dtype), number + jnp.sum(got != expected)

        return jax.lax.fori_loop(0, 300, body, (own, jnp.int32(0)))[1][None]

    np.testing.assert_array_equal(different(own, links), 0)
