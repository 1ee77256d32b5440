"""Attention of queries to arrays of keys and values, by XLA or cuDNN."""

from functools import partial

import jax
import jax.numpy as jnp

from specjax.operations.dispatch import has_static_shape, is_partitioned
from specjax.types import Array

MANY_QUERIES = 128  # tokens of a sequence from which on cuDNN attends without a cache


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attend from queries [B, T, H, D] to keys and values [B, S, kv heads, D], causally where `mask` is None.

    The scores are multiplied by `scale`, 1 / sqrt(D) if None; a softcap c turns a score s into c tanh(s / c). Sinks [H]
    are scores of one more place of each head, whose value is 0; they are neither scaled nor capped. On NVIDIA GPUs
    cuDNN attends causally from many queries of 16 bits: it holds no scores, and has reverse-mode gradients alone.
    """
    if mask is None and softcap is None and sinks is None and _suits_cudnn(query, key, value):
        return jax.lax.platform_dependent(
            *(query, key, value),
            cuda=partial(jax.nn.dot_product_attention, is_causal=True, scale=scale, implementation="cudnn"),
            default=partial(_attend_in_xla, mask=None, scale=scale, softcap=None, sinks=None),
        )
    return _attend_in_xla(query, key, value, mask, scale, softcap, sinks)


def _suits_cudnn(*operands: Array) -> bool:
    """Return whether cuDNN can attend causally with these queries, keys and values, and is faster than XLA."""
    if not has_static_shape(operands) or is_partitioned(operands):
        return False
    query = operands[0]
    num_tokens, size = query.shape[1], query.shape[-1]
    if query.dtype not in (jnp.bfloat16, jnp.float16) or num_tokens < MANY_QUERIES or size > 128 or size % 8:
        return False
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # there are none
        return False
    return all(float(device.compute_capability) >= 8 for device in devices)


def _attend_in_xla(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    scale: float | None,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    # For float16, JAX asks for a product that CPUs do not have.
    if softcap is None and sinks is None and query.dtype != jnp.float16:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=mask is None, scale=scale)
    batch_size, num_tokens, num_heads, size = query.shape
    grouped = query.reshape(batch_size, num_tokens, key.shape[2], -1, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores *= size**-0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if mask is None:
        mask = jnp.tri(num_tokens, dtype=bool)[None, None]
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = _softmax(scores, None if sinks is None else sinks.reshape(1, key.shape[2], -1, 1, 1), axis=-1)
    attended = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value)
    return attended.reshape(batch_size, num_tokens, num_heads, size)


def _softmax(scores: Array, sinks: Array | None, axis: int) -> Array:
    """Return the softmax of scores along an axis, with a sink that takes a part of the mass where there are sinks."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=axis)
    sinks = jnp.broadcast_to(sinks.astype(scores.dtype), jnp.max(scores, axis=axis, keepdims=True).shape)
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=axis), axis=axis)
    return jax.lax.slice_in_dim(weights, 0, scores.shape[axis], axis=axis)


def heads_together(query: Array, num_kv_heads: int) -> Array:
    """Return queries [B, T, H, D] as [B, T, H, kv heads * D], zero where the keys of another head stand.

    A product for each head costs XLA a copy of the cache on CPUs, with its heads first. With these queries the heads of
    a sequence share one product, which reads keys and values as they lie in the cache. `own_head` undoes it.
    """
    batch_size, num_tokens, num_heads, size = query.shape
    own = jnp.eye(num_kv_heads, dtype=query.dtype)
    grouped = query.reshape(batch_size, num_tokens, num_kv_heads, -1, size)
    return jnp.einsum("btkgd,jk->btkgjd", grouped, own).reshape(batch_size, num_tokens, num_heads, -1)


def own_head(attended: Array, num_kv_heads: int) -> Array:
    """Return the part [B, T, H, D] of each query's own head from the attention of `heads_together`."""
    batch_size, num_tokens, num_heads, _ = attended.shape
    own = jnp.eye(num_kv_heads, dtype=attended.dtype)
    grouped = attended.reshape(batch_size, num_tokens, num_kv_heads, num_heads // num_kv_heads, num_kv_heads, -1)
    return jnp.einsum("btkgjd,jk->btkgd", grouped, own).reshape(batch_size, num_tokens, num_heads, -1)


def attend_few(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attend as `attend` does, by products that read keys and values as they lie in the cache (`heads_together`)."""
    batch_size, num_tokens, num_heads, size = query.shape
    num_slots, num_kv_heads = key.shape[1:3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    spread = heads_together(query, num_kv_heads).reshape(batch_size, num_tokens * num_heads, -1)
    keys, values = (x.reshape(batch_size, num_slots, -1) for x in (key, value))
    scores = jnp.einsum("bsf,bqf->bsq", keys, spread, preferred_element_type=dtype)
    scores *= size**-0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)

    scores = scores.reshape(batch_size, num_slots, num_tokens, num_heads)
    scores = jnp.where(jnp.swapaxes(mask[:, 0], 1, 2)[..., None], scores, jnp.finfo(dtype).min)
    weights = _softmax(scores, None if sinks is None else sinks[None, None, None], axis=1)
    weights = weights.reshape(batch_size, num_slots, -1).astype(value.dtype)
    attended = jnp.einsum("bsq,bsf->bqf", weights, values)
    return own_head(attended.reshape(batch_size, num_tokens, num_heads, -1), num_kv_heads)
