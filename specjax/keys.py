"""Every random stream of specjax, in one place.

A step that starts at absolute position s verifies K drafts with K+1 keys, one for each position s, s+1, ...:

* TARGET(t), the Gumbel row of position t, comes from the key of that position;
* DRAFT(s, i), ACCEPT(s, i) and RESIDUAL(s) come from the key of the step's FIRST position.

The split matters. A step may look at noise past the last token it accepts (block verification does); named by its own
position, that noise would be met again by the next step, now conditioned on what was seen. A step commits at least one
token, so s never repeats.
"""

import jax
import jax.numpy as jnp

from specjax.types import Array

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
NUM_PURPOSES = 4


def check(keys: Array) -> None:
    """Raise ValueError unless `keys` is an array of typed threefry keys."""
    if not jax.dtypes.issubdtype(getattr(keys, "dtype", None), jax.dtypes.prng_key):
        raise ValueError(f"keys must be typed keys (jax.random.key), got {getattr(keys, 'dtype', type(keys).__name__)}")
    if "fry" not in str(keys.dtype):
        raise ValueError(f"keys must be threefry keys: other generators change under vmap; got {keys.dtype}")


def fold(keys: Array, data: Array | int) -> Array:
    """Fold `data` (broadcast against keys) into every key."""
    shape = jnp.broadcast_shapes(keys.shape, jnp.shape(data))
    keys, data = jnp.broadcast_to(keys, shape), jnp.broadcast_to(jnp.asarray(data, jnp.uint32), shape)
    return jax.vmap(jax.random.fold_in)(keys.reshape(-1), data.reshape(-1)).reshape(shape)


def positions(request_keys: Array, lengths: Array, num_draft_tokens: int) -> Array:
    """The keys [B, K+1] of the K+1 positions that follow `lengths` [B] committed tokens, from one key a request [B]."""
    return fold(request_keys[:, None], lengths[:, None] + jnp.arange(num_draft_tokens + 1)[None])


def numbered(keys: Array, number: Array | int) -> Array:
    """The keys of repetition `number` (broadcast against keys) of what they are for: number 0 has `keys` themselves.

    The others are folded with numbers that no position and no stream has, so that they share no noise with it.
    """
    if isinstance(number, int) and number == 0:
        return keys
    number = jnp.asarray(number, jnp.uint32)
    return jnp.where(number == 0, keys, fold(keys, number + jnp.uint32(1 << 31)))


def samples(request_keys: Array, index: Array) -> Array:
    """The keys [B] of sample `index` [B] of each request: sample 0 has the request's own."""
    return numbered(request_keys, index)


def of_step(keys: Array, batch_size: int, num_draft_tokens: int) -> Array:
    """The keys [B, K+1] of a step: from one key [], one fresh key a row [B], or already by position [B, K+1].

    Raises:
        ValueError: for raw keys, another generator than threefry, or another shape.
    """
    check_step(keys, batch_size, num_draft_tokens)
    if keys.shape == (batch_size, num_draft_tokens + 1):
        return keys
    if keys.shape == ():
        keys = fold(keys, jnp.arange(batch_size))
    return fold(keys[:, None], jnp.arange(num_draft_tokens + 1)[None])


def check_step(keys: Array, batch_size: int, num_draft_tokens: int) -> None:
    """Raise ValueError unless `keys` are typed threefry keys [], [B] or [B, K+1]."""
    check(keys)
    shape = (batch_size, num_draft_tokens + 1)
    if keys.shape not in ((), (batch_size,), shape):
        raise ValueError(f"keys must have shape [], [B] = ({batch_size},) or [B, K+1] = {shape}, got {keys.shape}")


def stream(keys: Array, purpose: int, index: Array | int = 0) -> Array:
    """The keys of one purpose; `index` tells apart the draws that a step makes for it."""
    return fold(keys, jnp.asarray(index, jnp.uint32) * NUM_PURPOSES + purpose)


def _bits(keys: Array, shape: tuple[int, ...]) -> Array:
    draws = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys.reshape(-1))
    return draws.reshape(*keys.shape, *shape)


def uniform(keys: Array, shape: tuple[int, ...] = ()) -> Array:
    """Uniforms in [0, 1) of 24 bits, float32, shape keys.shape + shape."""
    return (_bits(keys, shape) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def gumbel(keys: Array, shape: tuple[int, ...]) -> Array:
    """Standard Gumbel noise, float32, shape keys.shape + shape; always finite.

    The distance of the uniform from 1 is drawn on a grid of 2**-32, so that the upper tail, which decides an argmax, is
    resolved by 32 bits; a float32 uniform near 1 has 24, which shows on flat rows of 100,000 tokens.
    """
    distance = (_bits(keys, shape).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(distance, jnp.float32(1 - 2**-24))))
