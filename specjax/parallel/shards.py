"""Exchanges between devices that each hold a part of every vocabulary-sized array.

Inside `jax.shard_map`, device r of the n devices along a mesh axis holds the logits of the ids [r V/n, (r+1) V/n).
Arrays of the size of the vocabulary stay where they are; the devices exchange a few numbers for each row. Decisions
rest on these exchanges alone, and every device must decide alike. A sum of different numbers may come out differently
on two devices, because they may add in different orders. So each exchange is a table with a row for each device, and
the sum adds nothing but zeros to an entry: all devices have the same table, whatever the order, and finish from it
alike.

An `axis_name` of None stands for a vocabulary that is whole, and then nothing is exchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.launch import Joined
from pallas_kernels.rows import BLOCK_SIZE
from specjax.parallel.links import sum_over
from specjax.types import Array, Draft, PyTree

MAX_IDS = 1 << 24  # ids are exchanged as float32, which has every integer below
WIDTH = 64  # numbers in a table are a multiple of it, as the fast sum of a GPU takes them


def num_shards(axis_name: str | None) -> int:
    """Return the number of devices that share the vocabulary.

    Raises:
        ValueError: there is no such axis here.
    """
    if axis_name is None:
        return 1
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be None or an axis of the jax.shard_map around the call, got {axis_name!r}"
        ) from None


def first_id(size: int, axis_name: str | None) -> Array | int:
    """Return the first id of this device's part, where every part has `size` ids."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name) * size


def part_size(vocab_size: int, parts: int) -> int:
    """Return how many ids each of the devices holds, the padding after the last one included.

    A part is whole blocks of the ids that are drawn together, so that tokens are the same as on one device, where the
    vocabulary has a block for each.
    """
    unit = BLOCK_SIZE if vocab_size >= parts * BLOCK_SIZE else 1
    return -(-vocab_size // (parts * unit)) * unit


def own_part(values: Array, axis_name: str | None, padding: float = 0) -> Array:
    """Return this device's part of values [..., V] that every device holds whole, padded after the last one."""
    if axis_name is None:
        return values
    parts = num_shards(axis_name)
    size = part_size(values.shape[-1], parts)
    unpadded = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, [*unpadded, (0, parts * size - values.shape[-1])], constant_values=padding)
    return jax.lax.dynamic_slice_in_dim(padded, first_id(size, axis_name), size, axis=-1)


def own_draft(draft: Draft, axis_name: str | None) -> Draft:
    """Return a draft with this device's part of its distribution, which every device holds whole."""
    distribution: Any = draft.distribution
    if axis_name is None or distribution is None:
        return draft
    part = own_part(distribution.logits, axis_name, padding=-jnp.inf)
    return draft._replace(distribution=distribution._replace(logits=part))


def table(values: Array, axis_name: str) -> Array:
    """Return the values [...] of all devices, [n, ...], the same on every device."""
    device = jnp.arange(num_shards(axis_name), dtype=jnp.int32).reshape(-1, *[1] * values.ndim)
    return jax.lax.psum(jnp.where(device == jax.lax.axis_index(axis_name), values[None], 0), axis_name)


def join(own: PyTree, once: PyTree, axis_name: str, links: Array | None = None) -> tuple[PyTree, PyTree]:
    """Exchange arrays of float32, all at once, and return them as kernels read them, the same on every device.

    Args:
        own: arrays [..., N], of which every device has others.
        once: arrays of whose numbers at most one device has one that is not 0.
        axis_name: the axis of the devices.
        links: as `links.sum_over` takes them.

    Returns:
        The arrays `own` of all n devices side by side, [..., n N], and the sums of `once`.
    """
    num_parts = num_shards(axis_name)
    is_own = jnp.arange(num_parts, dtype=jnp.int32)[:, None] == jax.lax.axis_index(axis_name)
    (parts, own_structure), (sums, once_structure) = jax.tree.flatten(own), jax.tree.flatten(once)
    flat = [jnp.where(is_own, part.reshape(1, -1), 0).reshape(-1) for part in parts]
    flat += [value.reshape(-1) for value in sums]
    starts = np.cumsum([0, *(x.size for x in flat)]).tolist()
    summed = sum_over(jnp.concatenate([*flat, jnp.zeros(-starts[-1] % WIDTH, jnp.float32)]), axis_name, links)
    shapes = [*((x.shape, num_parts) for x in parts), *((x.shape, 1) for x in sums)]
    views = [Joined(summed, start, *shape) for start, shape in zip(starts, shapes, strict=False)]
    return own_structure.unflatten(views[: len(parts)]), once_structure.unflatten(views[len(parts) :])


def whole_rows(logits: Array, axis_name: str | None) -> Array:
    """Exchange parts of R rows [R, V / n] for whole rows: device r gets ceil(R / n) of them, from r ceil(R / n) on.

    Rows of -inf follow the last one.
    """
    if axis_name is None:
        return logits
    unequal = -logits.shape[0] % num_shards(axis_name)
    padded = jnp.pad(logits, ((0, unequal), (0, 0)), constant_values=-jnp.inf)
    return jax.lax.all_to_all(padded, axis_name, split_axis=0, concat_axis=1, tiled=True)


def own_rows(values: PyTree, axis_name: str | None) -> PyTree:
    """Return what belongs to the rows that `whole_rows` gives a device, of arrays [R, ...] that every device holds.

    The last row stands for the rows that follow it.
    """
    if axis_name is None:
        return values

    def own(array: Array) -> Array:
        size = -(-array.shape[0] // num_shards(axis_name))
        rows = jax.lax.axis_index(axis_name) * size + jnp.arange(size, dtype=jnp.int32)
        return array.at[rows].get(mode="clip")

    return jax.tree.map(own, values)


def all_rows(values: Array, num_rows: int, axis_name: str | None) -> Array:
    """Return the results [R] of all rows from those [ceil(R / n)] that each device has found for `whole_rows`."""
    return values if axis_name is None else table(values, axis_name).reshape(-1)[:num_rows]


def total(values: Array, axis_name: str | None) -> Array:
    """Return the sum of the values [...] of all devices, added in one order everywhere."""
    return values if axis_name is None else jnp.sum(table(values, axis_name), axis=0)


def largest(values: Array, axis_name: str | None) -> Array:
    """Return the largest of the values [...] of all devices."""
    return values if axis_name is None else jnp.max(table(values, axis_name), axis=0)


def of_owner(values: Array, is_owner: Array, axis_name: str | None) -> Array:
    """Return the values [...] of the one device on which `is_owner` [...] is true, 0 where there is none.

    Integers must be smaller than `MAX_IDS`.
    """
    if axis_name is None:
        return values
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    own = jnp.where(is_owner, values.astype(jnp.float32) if is_integer else values, 0)
    return jax.lax.psum(own, axis_name).astype(values.dtype)
