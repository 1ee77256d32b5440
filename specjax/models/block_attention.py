"""Attention of a chain of tokens to a cache, by XLA, a block of slots at a time."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention import FLOAT8, Window, first_inside
from specjax.models.dense_attention import heads_together, own_head
from specjax.models.latent_heads import Expand
from specjax.pages import in_pool, locate
from specjax.parallel.loops import as_carry
from specjax.types import Array, ModelInput

BLOCK, SMALL_BLOCK = 512, 128  # slots that many queries attend to at a time, and a few on CPUs
# "key" and "value" of a layer, [B, S, kv heads, head size] or [pages, page size, ...], or "latent" [B, S, D], likewise
Cache = dict[str, Array]


def loaded(x: Array, dtype: jnp.dtype) -> Array:
    """Return stored keys or values in a dtype with which queries can be multiplied."""
    return x.astype(dtype) if x.dtype == FLOAT8 else x


def num_blocks(cache: Cache, inputs: ModelInput, size: int) -> Array:
    """Return the number of blocks of `size` slots that the longest row of a call fills, at least 1."""
    return jnp.maximum(jnp.max(_last_slot(cache, inputs)), 0) // size + 1


def _last_slot(cache: Cache, inputs: ModelInput) -> Array:
    """Return the last slot of each row that holds a token [B, 1] int32, and -1 for a row without pages."""
    num_held: Array | int = cache["key"].shape[1]
    if inputs.pages is not None:
        num_pages, size = cache["key"].shape[:2]
        end = size * jnp.arange(
            1, inputs.pages.shape[1] + 1, dtype=jnp.int32
        )  # of each page, as slots; some may be freed
        num_held = jnp.max(jnp.where(in_pool(inputs.pages, num_pages), end[None], 0), axis=1, keepdims=True)
    return jnp.minimum(inputs.positions[:, :1] + inputs.tokens.shape[1], num_held) - 1


def attend_in_blocks(
    query: Array,
    cache: Cache,
    inputs: ModelInput,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    num_hidden: int = 0,
    sinks: Array | None = None,
    size: int = BLOCK,
    is_together: bool = False,
    expand: Expand | None = None,
) -> Array:
    """Attend from the tokens of a chain to their slots and those before, a block of `size` slots at a time.

    Only the scores of one block exist at a time, and slots past the longest row cost nothing, nor does a row without
    pages. With `is_together` the heads of a sequence share a product (`heads_together`). `expand` makes a key and a
    value for each head of the keys of a block, which are latents. `attend_to_cache` describes the other arguments; the
    cache holds the tokens of the call.
    """
    batch_size, num_tokens, num_heads, head_size = query.shape
    num_kv_heads = cache["key"].shape[2] if expand is None else num_heads
    num_products = 1 if is_together else num_kv_heads
    asked = heads_together(query, num_kv_heads) if is_together else query
    grouped = asked.reshape(batch_size, num_tokens, num_products, -1, asked.shape[-1])
    position = inputs.positions[:, :1] + jnp.arange(num_tokens, dtype=jnp.int32)[None]  # [B, T]
    last = _last_slot(cache, inputs)
    factor = head_size**-0.5 if scale is None else scale
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    hidden = jnp.finfo(dtype).min

    def block(index: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, top, mass = carry
        slot = jnp.broadcast_to(index * size + jnp.arange(size, dtype=jnp.int32), (batch_size, size))
        is_filled = (slot <= last)[:, :, None, None]  # other slots may hold NaN, which a weight of 0 does not hide
        where = locate(cache["key"], slot, inputs.pages)

        def load(name: str) -> Array:
            return loaded(jnp.where(is_filled, cache[name].at[where].get(mode="fill", fill_value=0), 0), query.dtype)

        pair = (load("key"), load("value")) if expand is None else expand(load("key"))
        key, value = (x.reshape(batch_size, size, num_products, -1) for x in pair)
        distance = position[:, :, None] - slot[:, None]  # [B, T, size]
        seen = distance >= 0
        if window is not None:
            seen &= slot[:, None] >= first_inside(window, position)[:, :, None]
        if num_hidden:
            seen &= (slot[:, None] >= num_hidden) | (distance == 0)
        scores = factor * jnp.einsum("btkgd,bskd->btkgs", grouped, key, preferred_element_type=dtype)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen[:, :, None, None], scores, hidden)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        added = jnp.einsum("btkgs,bskd->btkgd", weights.astype(value.dtype), value, preferred_element_type=dtype)
        return total * shrink[..., None] + added, new_top, mass * shrink + jnp.sum(weights, axis=-1)

    shape = grouped.shape[:-1]
    nothing = jnp.zeros(grouped.shape, dtype), jnp.full(shape, hidden), jnp.zeros(shape, dtype)
    nothing = as_carry(partial(block, 0), nothing, asked, cache, inputs)
    total, top, mass = jax.lax.fori_loop(0, num_blocks(cache, inputs, size), block, nothing)
    if sinks is not None:
        of_head = sinks.astype(dtype).reshape(1, 1, num_products, -1)
        new_top = jnp.maximum(top, of_head)
        shrink = jnp.exp(top - new_top)
        total, mass = total * shrink[..., None], mass * shrink + jnp.exp(of_head - new_top)
    attended = (total / mass[..., None]).astype(query.dtype).reshape(asked.shape)
    return own_head(attended, num_kv_heads) if is_together else attended
