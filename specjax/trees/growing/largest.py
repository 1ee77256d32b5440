"""The largest of many numbers, by compares in place of a sort, which takes GPUs many launches."""

import jax
import jax.numpy as jnp

from specjax.types import Array

MOST_COMPARED = 512  # numbers of which each is compared with each


def largest(values: Array, count: int) -> Array:
    """Return the indices [..., count] int32 of the largest values [..., C], the largest first.

    Where values are equal, the lower index comes first. No value may be NaN. Where `count` is above C, the index C - 1
    fills the rest.
    """
    size = values.shape[-1]
    if count > size:
        filled = ((0, 0),) * (values.ndim - 1) + ((0, count - size),)
        return jnp.pad(largest(values, size), filled, constant_values=size - 1)
    if size <= MOST_COMPARED:
        return _by_compares(values, count)
    width = -(-size // MOST_COMPARED)
    num_blocks = -(-size // width)
    if count * width >= size:
        return jax.lax.top_k(values, count)[1].astype(jnp.int32)
    unpadded = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, [*unpadded, (0, num_blocks * width - size)], constant_values=-jnp.inf)
    blocks = padded.reshape(*values.shape[:-1], num_blocks, width)
    best = jnp.sort(_by_compares(jnp.max(blocks, axis=-1), count), axis=-1)  # in the order of indices, for equal values
    found = jnp.take_along_axis(blocks, best[..., None], axis=-2).reshape(*values.shape[:-1], count * width)
    place = largest(found, count)
    return jnp.minimum(jnp.take_along_axis(best, place // width, axis=-1) * width + place % width, size - 1)


def _by_compares(values: Array, count: int) -> Array:
    """Return the result of `largest` for few values, by the number of values that stand before each."""
    index = counting(values.shape[-1], values.ndim + 1)
    mine, other = values[..., :, None], values[..., None, :]
    is_earlier = index < jnp.swapaxes(index, -1, -2)
    rank = jnp.sum((other > mine) | ((other == mine) & is_earlier), axis=-1, dtype=jnp.int32)
    place = jnp.swapaxes(counting(count, values.ndim + 1), -1, -2)
    return jnp.sum(jnp.where(rank[..., None, :] == place, index, 0), axis=-1, dtype=jnp.int32)


def counting(count: int, ndim: int) -> Array:
    """Return 0, 1, ... along the last of `ndim` axes, int32."""
    return jnp.arange(count, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (-1,))
