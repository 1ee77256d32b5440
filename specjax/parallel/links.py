"""Sums over devices of small arrays: between the GPUs of one process through each other's memory, else by XLA.

A sum by XLA ends a graph of CUDA and starts another, which costs a decoding step of a few rows more than the sum
itself. The kernel of `pallas_kernels.all_reduce` is one more node of the graph.
"""

from collections.abc import Mapping
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import all_reduce
from pallas_kernels.triton import plgpu
from specjax.parallel.cuda_memory import mailboxes
from specjax.types import Array, PyTree

MAX_DEVICES = 8  # that sum through their memory; the memory that each needs grows with their number


def sum_over(
    x: Array,
    axis_name: str,
    links: Array | None = None,
    residual: Array | None = None,
    after: Array | None = None,
) -> Array:
    """Return the sum of x [...] over the devices along an axis, plus a residual [...], the same on every device.

    Sums with links must follow one another: each needs an input that depends on the sum before.

    Args:
        x: floats.
        axis_name: the axis of the `jax.shard_map` around the call.
        links: this device's part of `links_of` the mesh; None: XLA sums.
        residual: [...], or what broadcasts to it, which is added to the sum; None for none.
        after: the result of the sum before, where neither x nor the residual depends on it; None for none.
    """
    if links is not None and all_reduce.unsupported(x) is None:
        fits = residual is not None and residual.shape == x.shape
        total = all_reduce.all_reduce(x, links.ravel(), residual=residual if fits else None, after=after)
        return total if fits or residual is None else residual + total
    total = jax.lax.psum(x, axis_name)
    return total if residual is None else residual + total


def links_in(params: PyTree) -> Array | None:
    """Return the links [2 n + 1] among one device's part of the parameters of a model; None where it has none."""
    own = params.get("links") if isinstance(params, Mapping) else None
    return None if own is None else own.ravel()


@cache  # the memory stays until the process ends: programs know its addresses
def links_of(mesh: Mesh, axis_name: str) -> Array | None:
    """Return the links of all devices of a mesh along one of its axes, as `pallas_kernels.all_reduce` takes them.

    Returns:
        [*sizes of the mesh, 2 n + 1] int32, of which every device has its own row; None where XLA must sum: on other
        devices than CUDA GPUs of this process that reach each other's memory, or where there are more than
        `MAX_DEVICES` along the axis.
    """
    number, axis = mesh.shape[axis_name], mesh.axis_names.index(axis_name)
    devices = list(mesh.devices.flat)
    is_here = all(d.platform == "gpu" and d.process_index == jax.process_index() for d in devices)
    if plgpu is None or not 2 <= number <= MAX_DEVICES or not is_here:
        return None
    # XLA may get its own memory in a way that hides it from the other devices.
    addresses = mailboxes([d.local_hardware_id for d in devices], 4 * all_reduce.mailbox_words(number))
    if addresses is None:
        return None
    with jax.ensure_compile_time_eval():
        each = NamedSharding(mesh, P(*mesh.axis_names))
        return jax.device_put(_rows(np.array(addresses).reshape(mesh.devices.shape), axis), each)


def _rows(addresses: np.ndarray, axis: int) -> np.ndarray:
    """Return the row of each device in `links_of`, given the addresses of all mailboxes [*sizes of the mesh]."""
    number = addresses.shape[axis]
    rows = np.zeros((*addresses.shape, 2 * number + 1), np.uint32)
    for place in np.ndindex(addresses.shape):
        for i, address in enumerate(np.moveaxis(addresses, axis, -1)[*place[:axis], *place[axis + 1 :]].tolist()):
            rows[place][2 * i : 2 * i + 2] = address & 0xFFFFFFFF, address >> 32
        rows[place][-1] = place[axis]
    return rows.view(np.int32)
