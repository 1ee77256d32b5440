"""Exchanges between devices that each hold a part of every vocabulary-sized array.

Inside `jax.shard_map`, device r of the n devices along a mesh axis holds the logits of the ids [r V/n, (r+1) V/n). What
is of the size of the vocabulary stays where it is; the devices exchange a few numbers for each row. Decisions rest on
these exchanges alone, and every device must decide alike. A sum of different numbers may come out differently on two
devices, because they may add in different orders. So each exchange is a table with a row for each device, and the sum
adds nothing but zeros to an entry: all devices have the same table, whatever the order, and finish from it alike.

An `axis_name` of None stands for a vocabulary that is whole, and then nothing is exchanged.
"""

import jax
import jax.numpy as jnp

from specjax.types import Array

MAX_IDS = 1 << 24  # ids are exchanged as float32, which has every integer below


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


def own_part(logits: Array, axis_name: str | None) -> Array:
    """Return this device's part of logits [..., V] that every device holds whole.

    Raises:
        ValueError: the vocabulary cannot be split into equal parts.
    """
    parts = num_shards(axis_name)
    if logits.shape[-1] % parts:
        raise ValueError(
            f"logits must have a vocabulary that {parts} devices can share equally, got {logits.shape[-1]} tokens: pad "
            "it with -inf"
        )
    size = logits.shape[-1] // parts
    return jax.lax.dynamic_slice_in_dim(logits, first_id(size, axis_name), size, axis=-1)


def table(values: Array, axis_name: str) -> Array:
    """Return the values [...] of all devices, [n, ...], the same on every device."""
    empty = jnp.zeros((num_shards(axis_name), *values.shape), values.dtype)
    return jax.lax.psum(empty.at[jax.lax.axis_index(axis_name)].set(values), axis_name)


def total(values: Array, axis_name: str | None) -> Array:
    """Return the sum of the values [...] of all devices, added in one order everywhere."""
    return values if axis_name is None else jnp.sum(table(values, axis_name), axis=0)


def largest(values: Array, axis_name: str | None) -> Array:
    """Return the largest of the values [...] of all devices."""
    return values if axis_name is None else jnp.max(table(values, axis_name), axis=0)


def smallest(values: Array, axis_name: str | None) -> Array:
    """Return the smallest of the values [...] of all devices."""
    return values if axis_name is None else jnp.min(table(values, axis_name), axis=0)


def of_owner(values: Array, is_owner: Array, axis_name: str | None) -> Array:
    """Return the values [...] of the one device on which `is_owner` [...] is true, 0 where there is none.

    Integers must be smaller than `MAX_IDS`.
    """
    if axis_name is None:
        return values
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    own = jnp.where(is_owner, values.astype(jnp.float32) if is_integer else values, 0)
    return jax.lax.psum(own, axis_name).astype(values.dtype)
