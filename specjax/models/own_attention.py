"""Attention with a cache for models of users: it writes keys and values where a call puts them, and attends to them."""

from typing import Any

from specjax.models.attention import Cache, attend_to_cache, attention_mask, num_slots
from specjax.operations.groups import joined, split
from specjax.operations.pieces import by_tile, in_tiles
from specjax.types import Array, ModelInput


def cached_attention(
    query: Array,
    key: Array,
    value: Array,
    memory: Cache,
    inputs: ModelInput,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Array, Cache]:
    """Write the keys and values of a call to their cache slots, and attend from its queries to all slots that they see.

    A model that attends by this function keeps the contract of `Model`, with a dense cache and with pages
    (`takes_pages=True`), in chains, in trees (`inputs.mask`), in packed calls and groups of calls
    (`takes_groups=True`), and in ragged ones (`takes_ragged=True`). On NVIDIA GPUs kernels run where they support it.

    Args:
        query: [R, T, heads, head size] floats, turned by rotary embeddings where the model has them.
        key: [R, T, kv heads, head size], likewise. The number of heads is a multiple of the number of kv heads, and
            neighbouring heads share a kv head.
        value: [R, T, kv heads, head size].
        memory: the cache of the layer, a dict with "key" and "value" of shape [B, slots, kv heads, head size], or
            [pages, page size, kv heads, head size].
        inputs: the input of the model's call.
        scale: factor of the scores; None is 1 / sqrt(head size).
        window: number of positions that a token sees, its own included; None is all.
        softcap: number c that turns a score s into c tanh(s / c); None for none.

    Returns:
        The attended values [R, T, heads, head size], and the cache with the keys and values of the call.

    Raises:
        ValueError: a shape is another one, or the cache lacks a part.

    Example:
        >>> import jax.numpy as jnp
        >>> memory = {name: jnp.zeros((1, 8, 1, 4)) for name in ("key", "value")}
        >>> inputs = ModelInput(jnp.zeros((1, 3), jnp.int32), jnp.arange(3)[None])
        >>> attended, memory = cached_attention(
        ...     jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 4)), memory, inputs
        ... )
        >>> attended.shape, float(memory["value"].sum())
        ((1, 3, 2, 4), 12.0)
    """
    _check(query, key, value, memory, inputs, window)
    shape, is_packed = query.shape, inputs.pieces is not None
    if inputs.groups is not None:
        of_groups = []
        for group, part in zip(inputs.groups, split(inputs, (query, key, value)), strict=True):
            of_call: dict[str, Any] = {"memory": memory, "inputs": group, "scale": scale, "window": window}
            of_group, memory = cached_attention(*in_tiles(group, part), **of_call, softcap=softcap)
            of_groups.append(of_group.reshape(part[0].shape))
        return joined(inputs, of_groups), memory
    if is_packed:
        inputs = by_tile(inputs)
        query, key, value = in_tiles(inputs, (query, key, value))
    mask = attention_mask(inputs, num_slots(memory, inputs), window)
    how: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "is_packed": is_packed}
    attended, memory = attend_to_cache(query, key, value, memory, inputs, mask, **how)
    return attended.reshape(shape), memory


def _check(query: Array, key: Array, value: Array, memory: Cache, inputs: ModelInput, window: int | None) -> None:
    """Raise ValueError for an argument of another shape."""
    calls = inputs.tokens.shape
    if query.ndim != 4 or query.shape[:2] != calls:
        raise ValueError(f"query must have shape [R, T, heads, head size] with R, T = {calls}, got {query.shape}")
    heads, size = query.shape[2:]
    for name, x in (("key", key), ("value", value)):
        if x.ndim != 4 or x.shape[:2] != calls or x.shape[3] != size or heads % max(x.shape[2], 1):
            expected = f"[{calls[0]}, {calls[1]}, kv heads, {size}], with kv heads that divide {heads}"
            raise ValueError(f"{name} must have shape {expected}, got {x.shape}")
    if key.shape != value.shape:
        raise ValueError(f"value must have the shape of key, {key.shape}, got {value.shape}")
    if not isinstance(memory, dict) or set(memory) != {"key", "value"}:
        got = sorted(memory) if isinstance(memory, dict) else type(memory).__name__
        raise ValueError(f'memory must be a dict with "key" and "value", the cache of one layer, got {got}')
    for name, x in memory.items():
        if x.ndim != 4 or x.shape[2:] != key.shape[2:]:
            raise ValueError(f"memory[{name!r}] must have shape [B, slots, *{key.shape[2:]}], got {x.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")
