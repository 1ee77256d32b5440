"""The largest values of wide rows, such as rows of logits over a vocabulary."""

from functools import partial

import jax
import jax.numpy as jnp

from specjax.types import Array

MAX_PIECES, MIN_WIDTH = 64, 1024  # XLA's kernel takes rows of 1024 values or more, and sorts others
MIN_GAIN = 4  # times that a row has as many values as its pieces leave for the second pass


def top_k(values: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest values [..., k] of each row [..., V], and their indices int32, as `jax.lax.top_k` does.

    The lower index comes first among equal values. On NVIDIA GPUs XLA gives a row to one block of threads, however wide
    the row is, so that a wide row is cut into pieces there. On CPUs one pass takes less time than two.
    """
    size = values.shape[-1]
    num_pieces = 1 << (min(MAX_PIECES, max(1, size // MIN_WIDTH)).bit_length() - 1)
    if num_pieces == 1 or k == 0 or MIN_GAIN * num_pieces * k > size:
        return _in_one_pass(values, k)
    by_pieces = partial(top_k_of_pieces, k=k, num_pieces=num_pieces)
    return jax.lax.platform_dependent(values, cuda=by_pieces, default=partial(_in_one_pass, k=k))


def _in_one_pass(values: Array, k: int) -> tuple[Array, Array]:
    best, index = jax.lax.top_k(values, k)
    return best, index


def top_k_of_pieces(values: Array, k: int, num_pieces: int) -> tuple[Array, Array]:
    """Return the k largest values of the k largest in each piece of a row. A piece has k values or more."""
    *outer, size = values.shape
    width = -(-size // num_pieces)
    end = size - size % width
    rows = values.reshape(-1, size)
    best, place = jax.lax.top_k(rows[:, :end].reshape(-1, width), k)
    first = width * jnp.arange(end // width, dtype=jnp.int32)
    index = place.reshape(-1, end // width, k) + first[None, :, None]
    best, index = best.reshape(-1, first.size * k), index.reshape(-1, first.size * k)
    if end < size:  # a last piece, which is narrower and may have fewer than k values
        last, place = jax.lax.top_k(rows[:, end:], min(k, size - end))
        best, index = jnp.concatenate([best, last], axis=1), jnp.concatenate([index, place + end], axis=1)
    best, place = jax.lax.top_k(best, k)
    return best.reshape(*outer, k), jnp.take_along_axis(index, place, axis=1).reshape(*outer, k)
