"""Threefry-2x32 inside a kernel: the same bits as `jax.random` draws from the same key.

A key is a pair of uint32 words, each of any shape; every function broadcasts.
"""

import jax.numpy as jnp
from jax import Array

Key = tuple[Array, Array]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry_2x32(key: Key, counter: Key) -> Key:
    """Encrypt a pair of words, 20 rounds.

    References:
        Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
    """
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def fold_in(key: Key, data: Array | int) -> Key:
    """`jax.random.fold_in`."""
    data = jnp.asarray(data).astype(jnp.uint32)
    return threefry_2x32(key, (jnp.zeros_like(data), data))


def bits(key: Key, index: Array | int) -> Array:
    """Word `index` of `jax.random.bits(key, (n,))`, the same for every n."""
    high, low = fold_in(key, index)
    return high ^ low


def uniform(key: Key, index: Array | int) -> Array:
    """Uniforms in [0, 1) of 24 bits, float32."""
    return (bits(key, index) >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)


def gumbel(key: Key, index: Array | int) -> Array:
    """Standard Gumbel noise, float32, on a grid of 2**-32 in the upper tail; always finite."""
    distance = (bits(key, index).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(distance, jnp.float32(1 - 2**-24))))


def load_key(key_data, batch: Array, row: Array | int) -> Key:
    """The key of a row of a batch: from words [2], one key for all, [B, 2], one a sequence, or [B, T, 2], one a row.

    `key_data` is the reference that holds them. Missing levels are folded in: the sequence, then the row.
    """
    at = (batch, row)[: len(key_data.shape) - 1]
    key = key_data[*at, 0], key_data[*at, 1]
    for level in (batch, row)[len(at) :]:
        key = fold_in(key, level)
    return key
