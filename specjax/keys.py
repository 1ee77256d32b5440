"""All keys that specjax draws random numbers with.

A step that starts at absolute position s verifies K drafts with K+1 keys, one for each position s, s+1, ...:

* TARGET(t), the Gumbel noise that draws the target's token of position t, comes from the key of position t.
* DRAFT(s, i) and ACCEPT(s, i), the noise that draws and tests draft i, and RESIDUAL(s), the noise that draws the
  recovered token, come from the key of the step's FIRST position s.

Exactness depends on this choice. A step may look at noise past the last token that it accepts, as block verification
does. If that noise came from the key of its position, the next step would use it again, although its distribution
is no longer the same, given the outcome of the first step. A step commits at least one token, so no two steps of a
sequence start at the same s.
"""

import jax
import jax.numpy as jnp

from specjax.types import Array
from specjax.validation import check_array, is_integer

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
NUM_PURPOSES = 4


def check(keys: Array) -> None:
    """Raise ValueError unless `keys` is an array of typed threefry keys."""
    if not (hasattr(keys, "dtype") and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"keys must be typed keys (jax.random.key), got {getattr(keys, 'dtype', type(keys).__name__)}")
    if "fry" not in str(keys.dtype):
        raise ValueError(f"keys must be threefry keys: other generators change under vmap; got {keys.dtype}")


def fold(keys: Array, data: Array | int) -> Array:
    """Fold `data` (broadcast against keys) into every key."""
    shape = jnp.broadcast_shapes(keys.shape, jnp.shape(data))
    keys, data = jnp.broadcast_to(keys, shape), jnp.broadcast_to(jnp.asarray(data, jnp.uint32), shape)
    return jax.vmap(jax.random.fold_in)(keys.reshape(-1), data.reshape(-1)).reshape(shape)


def positions(request_keys: Array, lengths: Array, num_draft_tokens: int) -> Array:
    """Return the keys [B, K+1] of the K+1 positions after the committed tokens.

    Args:
        request_keys: [B], one key for each request.
        lengths: [B] int32, the number of committed tokens.
        num_draft_tokens: K.

    Raises:
        ValueError: `request_keys` are raw keys, or keys of another generator than threefry; or an argument has another
            shape or dtype.
    """
    check(request_keys)
    if request_keys.ndim != 1:
        raise ValueError(f"request_keys must have shape [B], got {request_keys.shape}")
    check_array("lengths", lengths, "[B]", request_keys.shape, jnp.integer)
    if not (is_integer(num_draft_tokens) and num_draft_tokens >= 0):
        raise ValueError(f"num_draft_tokens must be an integer >= 0, got {num_draft_tokens!r}")
    return fold(request_keys[:, None], lengths[:, None] + jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None])


def numbered(keys: Array, number: Array | int) -> Array:
    """Return the keys of repetition `number` of a purpose; repetition 0 has `keys` themselves.

    The other repetitions are folded with numbers that no position and no purpose is folded with, so they share no noise
    with `keys`. `number` is broadcast against `keys`.
    """
    if isinstance(number, int) and number == 0:
        return keys
    number = jnp.asarray(number, jnp.uint32)
    return jnp.where(number == 0, keys, fold(keys, number + jnp.uint32(1 << 31)))


def samples(request_keys: Array, index: Array) -> Array:
    """Return the keys [B] of sample `index` [B] of each request; sample 0 has the request's own key."""
    return numbered(request_keys, index)


def of_step(keys: Array, batch_size: int, num_draft_tokens: int) -> Array:
    """Return the keys [B, K+1] of the positions of a step.

    Args:
        keys: one key for the step [], one for each row [B], or one for each position [B, K+1], which is returned as it
            is. Keys [] and [B] must be fresh in every step.
        batch_size: B.
        num_draft_tokens: K.

    Raises:
        ValueError: `keys` are raw keys, keys of another generator than threefry, or have another shape.
    """
    check_step(keys, batch_size, num_draft_tokens)
    if keys.shape == (batch_size, num_draft_tokens + 1):
        return keys
    if keys.shape == ():
        keys = fold(keys, jnp.arange(batch_size, dtype=jnp.int32))
    return fold(keys[:, None], jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None])


def of_requests(keys: Array, batch_size: int) -> Array:
    """Return one key for each request [B], given these or one key for the batch [].

    Raises:
        ValueError: `keys` are raw keys, keys of another generator than threefry, or have another shape.
    """
    check(keys)
    if keys.shape == ():
        return fold(keys, jnp.arange(batch_size, dtype=jnp.int32))
    if keys.shape != (batch_size,):
        raise ValueError(f"keys must have shape [] or [B] = ({batch_size},), got {keys.shape}")
    return keys


def check_step(keys: Array, batch_size: int, num_draft_tokens: int) -> None:
    """Raise ValueError unless `keys` are typed threefry keys [], [B] or [B, K+1]."""
    check(keys)
    shape = (batch_size, num_draft_tokens + 1)
    if keys.shape not in ((), (batch_size,), shape):
        raise ValueError(f"keys must have shape [], [B] = ({batch_size},) or [B, K+1] = {shape}, got {keys.shape}")


def stream(keys: Array, purpose: int, index: Array | int = 0) -> Array:
    """Return the keys of one purpose (TARGET, DRAFT, ACCEPT or RESIDUAL) and, for it, of the draw number `index`."""
    return fold(keys, jnp.asarray(index, jnp.uint32) * NUM_PURPOSES + purpose)


def at_depth(keys: Array, depth: Array) -> Array:
    """Return the key [B, N] of the depth [B, N] of each node of a tree, given the keys [B, D+1]."""
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)[:, None]
    return keys[rows, jnp.clip(depth, 0, keys.shape[1] - 1)]


def _bits(keys: Array, shape: tuple[int, ...]) -> Array:
    draws = jax.vmap(lambda key: jax.random.bits(key, shape, jnp.uint32))(keys.reshape(-1))
    return draws.reshape(*keys.shape, *shape)


def uniform(keys: Array, shape: tuple[int, ...] = ()) -> Array:
    """Return uniform float32 numbers in [0, 1) with 24 random bits, of shape keys.shape + shape."""
    return (_bits(keys, shape) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def gumbel(keys: Array, shape: tuple[int, ...]) -> Array:
    """Return standard Gumbel noise, float32 and finite, of shape keys.shape + shape.

    The noise is -log(-log(u)) for a uniform u. The function draws 1 - u with 32 bits instead of u with the 24 bits of
    float32, because large noise, which decides an argmax, comes from u near 1. With 24 bits, rows of 100,000 equally
    likely tokens are not drawn uniformly.
    """
    distance = (_bits(keys, shape).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(distance, jnp.float32(1 - 2**-24))))
