"""Attention over a cache addressed by position: the slots that a query sees, the writes of a call, and the attention.

The S slots of a row are its row of a dense cache, or the pages that `ModelInput.pages` names, one after another.

A token attends to the numbers in the cache, also for its own key and value and for the tokens beside it. So where
a cache rounds them, the output of a token does not depend on which tokens came in the same call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import decode_attention as of_few
from pallas_kernels import prompt_attention as of_many
from pallas_kernels.attention import CacheScales, Chunks, HeadNorms, Window, first_inside, stored
from specjax.models.block_attention import BLOCK, SMALL_BLOCK, Cache, attend_in_blocks, loaded
from specjax.models.dense_attention import attend, attend_few
from specjax.models.latent_heads import Expand, HeadMatrices
from specjax.models.linear import Norm, rms_norm
from specjax.models.rope import Rotation, rotate
from specjax.operations.dispatch import dispatch
from specjax.operations.groups import joined, split
from specjax.operations.pieces import by_tile, in_tiles
from specjax.pages import in_pool, read_slots, write_slots
from specjax.types import Array, ModelInput, PyTree

FEW_QUERIES = 64  # queries of a sequence, of all heads, for which `heads_together` is worth its arithmetic on CPUs


class KeyValues(Protocol):
    """The keys and values that one layer attends to in a call, a pytree: sequences, a cache, or records of training."""

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Any]:
        """Attend from the queries of a call, with its keys and values among those that they see.

        Args:
            query: [B, T, H, D], not yet rotated.
            key: [B, T, kv heads, D], likewise.
            value: [B, T, kv heads, D].
            turns: the rotation of queries and keys; None for none.
            scale: factor of the scores; None is 1 / sqrt(D).
            softcap: number c that turns a score s into c tanh(s / c); None for none.
            sinks: [H] floats, the score of one more place of each head, whose value is 0; None for none.
            norms: of queries and keys, before they turn; None for none.

        Returns:
            The attention of the queries [B, T, H, D], and the record that replaces the layer's cache.
        """
        ...


def normed(query: Array, key: Any, norms: HeadNorms | None) -> tuple[Array, Any]:
    """Return queries and keys [B, T, heads, D], which may be None, after their norms; None keeps both."""
    if norms is None:
        return query, key
    of_key = norms.of_key
    return rms_norm(query, Norm(*norms.of_query)), key if of_key is None else rms_norm(key, Norm(*of_key))


def placed(query: Array, key: Array, turns: Rotation | None, norms: HeadNorms | None) -> tuple[Array, Array]:
    """Return queries and keys [B, T, heads, D] after their norms and their rotation."""
    query, key = normed(query, key, norms)
    return rotate(query, turns), rotate(key, turns)


@partial(jax.tree_util.register_dataclass, data_fields=["mask"], meta_fields=[])
@dataclass(frozen=True)
class Uncached:
    """Whole sequences, which are not kept."""

    mask: Array | None  # [B, 1, T, T] bool; None is causal

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, None]:
        return attend(*placed(query, key, turns, norms), value, self.mask, scale, softcap, sinks), None

    def attend_to_latents(self, query: Array, latent: Array, heads: HeadMatrices, scale: float) -> tuple[Array, None]:
        """Attend as `latent_attention.Latents` says."""
        one = latent[:, :, None]

        def attend_to(query: Array, expand: Expand | None) -> Array:
            key, value = (one, one) if expand is None else expand(one)
            return attend(query, key, value, self.mask, scale)

        return heads.attend(query, attend_to), None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "inputs", "mask", "scales"],
    meta_fields=["window", "num_hidden", "is_packed"],
)
@dataclass(frozen=True)
class Cached:
    """The cache of a layer, to which a call adds its own keys and values."""

    cache: Cache
    inputs: ModelInput
    mask: Array  # [B, 1, T, S] bool
    window: Window
    num_hidden: int
    scales: CacheScales | None = None
    is_packed: bool = False  # whether the rows of `inputs` are the tiles of a packed call

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Cache]:
        shape = query.shape
        query, key, value, turns = in_tiles(self.inputs, (query, key, value, turns))
        attended, cache = attend_to_cache(
            query,
            key,
            value,
            self.cache,
            self.inputs,
            self.mask,
            turns,
            window=self.window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            num_hidden=self.num_hidden,
            scales=self.scales,
            norms=norms,
            is_packed=self.is_packed,
        )
        return attended.reshape(shape), cache

    def attend_to_latents(self, query: Array, latent: Array, heads: HeadMatrices, scale: float) -> tuple[Array, Cache]:
        """Attend as `latent_attention.Latents` says."""
        inputs, shape = self.inputs, query.shape
        query, latent = in_tiles(inputs, (query, latent))
        slots = inputs.positions[:, :1] + jnp.arange(latent.shape[1], dtype=jnp.int32)[None]
        cache = {"latent": write_slots(self.cache["latent"], slots, latent, inputs.pages)}
        one_head = {"key": cache["latent"][:, :, None], "value": cache["latent"][:, :, None]}
        how: dict[str, Any] = {"window": self.window, "num_hidden": self.num_hidden, "is_packed": self.is_packed}
        attended = heads.attend(
            query,
            lambda asked, expand: _attend_in_xla(asked, one_head, inputs, self.mask, scale=scale, expand=expand, **how),
        )
        return attended.reshape(*shape[:-1], attended.shape[-1]), cache


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "call", "groups"], meta_fields=[])
@dataclass(frozen=True)
class Grouped:
    """The cache of a layer, to which the groups of a call add their keys and values one after another."""

    cache: Cache
    call: ModelInput  # with groups
    groups: tuple[Cached, ...]  # of each group

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        turns: Rotation | None,
        scale: float | None,
        softcap: float | None,
        sinks: Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Cache]:
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "norms": norms}
        return self._each((query, key, value, turns), lambda one, part: one.attend(*part, **how))

    def attend_to_latents(self, query: Array, latent: Array, heads: HeadMatrices, scale: float) -> tuple[Array, Cache]:
        """Attend as `latent_attention.Latents` says."""
        return self._each((query, latent), lambda one, part: one.attend_to_latents(*part, heads=heads, scale=scale))

    def _each(self, values: PyTree, attend: Callable[[Cached, Any], tuple[Array, Cache]]) -> tuple[Array, Cache]:
        cache, attended = self.cache, []
        for one, part in zip(self.groups, split(self.call, values), strict=True):
            result, cache = attend(replace(one, cache=cache), part)
            attended.append(result)
        return joined(self.call, attended), cache


def cache_scales(params: Mapping[str, Any]) -> CacheScales | None:
    """Return the scales of the cache of the layer with these parameters; None where they have none."""
    return (params["key_scale"], params["value_scale"]) if "key_scale" in params else None


def memories(
    inputs: ModelInput,
    cache: Sequence[Cache] | None,
    windows: Sequence[Window],
    num_hidden: int = 0,
    scales: Sequence[CacheScales | None] | None = None,
) -> list[Uncached] | list[Cached] | list[Grouped]:
    """Return the keys and values of each layer in a call.

    Args:
        inputs: the call. Without a cache they are whole sequences from position 0, which are attended causally or as
            `inputs.mask` says.
        cache: of each layer; None for none.
        windows: of each layer, the number of positions that a token sees, its own included, or parts; None is all.
        num_hidden: number of slots, from the first on, that only their own tokens see.
        scales: of each layer's cache, as `attend_to_cache` takes them; None for none.
    """
    if inputs.groups is not None:
        of_groups: Any = [memories(group, cache, windows, num_hidden, scales) for group in inputs.groups]
        return [Grouped(of_layer[0].cache, inputs, of_layer) for of_layer in zip(*of_groups, strict=True)]
    inputs, is_packed = by_tile(inputs), inputs.pieces is not None
    size = inputs.tokens.shape[1] if cache is None else num_slots(cache[0], inputs)
    windows = [None if _covers(window, size) else window for window in windows]
    is_causal = cache is None and inputs.mask is None
    masked = [window for window in dict.fromkeys(windows) if window is not None or not is_causal]
    masks = {window: attention_mask(inputs, size, window, num_hidden) for window in masked}
    if cache is None:
        return [Uncached(masks.get(window)) for window in windows]
    scales = [None] * len(cache) if scales is None else scales
    each = zip(cache, windows, scales, strict=True)
    return [Cached(one, inputs, masks[window], window, num_hidden, scale, is_packed) for one, window, scale in each]


def _covers(window: Window, size: int) -> bool:
    """Return whether a token sees all tokens before it in rows of `size` slots."""
    if isinstance(window, Chunks):
        return window.size >= size
    return window is None or window >= size


def num_slots(cache: Cache, inputs: ModelInput) -> int:
    """Return S, the number of slots that each row has."""
    if inputs.groups is not None:
        return num_slots(cache, inputs.groups[0])
    size = next(iter(cache.values())).shape[1]
    return size if inputs.pages is None else inputs.pages.shape[1] * size


def attention_mask(inputs: ModelInput, num_slots: int, window: Window = None, num_hidden: int = 0) -> Array:
    """Return which cache slots each query may attend to, [B, 1, T, S] bool.

    They are all slots before this call, and in it the slots that `inputs.mask` allows; with a window, only slots of
    positions inside it. The first `num_hidden` slots are seen by their own tokens alone.
    """
    batch_size, num_tokens = inputs.tokens.shape
    start = inputs.positions[:, :1, None]  # [B, 1, 1]
    offset = jnp.arange(num_slots, dtype=jnp.int32)[None, None] - start  # [B, 1, S]: the slot's index inside the call
    query = jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None]
    index = jnp.clip(offset, 0, num_tokens - 1)
    if inputs.mask is None:
        seen = offset <= query
    else:
        inside = jnp.take_along_axis(inputs.mask, jnp.broadcast_to(index, (batch_size, num_tokens, num_slots)), axis=2)
        seen = (offset < 0) | ((offset < num_tokens) & inside)
    if window is not None:
        inside = jnp.take_along_axis(inputs.positions[:, None], index, axis=2)  # in a tree, siblings share a position
        position = jnp.where(offset < 0, jnp.arange(num_slots, dtype=jnp.int32)[None, None], inside)  # [B, 1, S]
        seen &= position >= first_inside(window, inputs.positions)[:, :, None]
    if num_hidden:
        seen &= (jnp.arange(num_slots, dtype=jnp.int32)[None, None] >= num_hidden) | (offset == query)
    return seen[:, None]


def update_cache(
    cache: Cache, key: Array, value: Array, inputs: ModelInput, scales: CacheScales | None = None
) -> Cache:
    """Write keys and values [B, T, H, D] to the slots of the call; those past the end or without a page are dropped.

    They are stored divided by the scales of their heads, if there are any.
    """
    slots = inputs.positions[:, :1] + jnp.arange(key.shape[1], dtype=jnp.int32)[None]
    dtype, factors = cache["key"].dtype, (None, None) if scales is None else scales
    new = [
        stored(x, dtype, None if factor is None else factor[None, None, :, None])
        for x, factor in zip((key, value), factors, strict=True)
    ]
    return {
        name: write_slots(cache[name], slots, x, inputs.pages) for name, x in zip(("key", "value"), new, strict=True)
    }


def _times(heads: Array, scale: Array) -> Array:
    """Return queries or their results [B, T, H, D] times the scale of each one's kv head [kv heads]."""
    factor = jnp.repeat(scale, heads.shape[2] // scale.shape[0])[None, None, :, None]
    return (heads.astype(jnp.promote_types(heads.dtype, jnp.float32)) * factor).astype(heads.dtype)


def read_cache(cache: Cache, inputs: ModelInput, mask: Array) -> tuple[Array, Array, Array]:
    """Return the keys and values [B, S, H, D] of each row, and the slots that each query sees [B, 1, T, S] bool.

    From pages, slots past the call are read as zeros: a page that another sequence used before may hold NaN, which an
    attention weight of 0 does not hide.
    """
    if inputs.pages is None:
        return cache["key"], cache["value"], mask
    num_pages, size = cache["key"].shape[:2]
    is_filled = jnp.repeat(in_pool(inputs.pages, num_pages), size, axis=1)
    slot = jnp.arange(is_filled.shape[1], dtype=jnp.int32)[None]
    is_filled &= slot < inputs.positions[:, :1] + inputs.tokens.shape[1]
    key, value = (
        jnp.where(is_filled[:, :, None, None], read_slots(cache[name], inputs.pages), 0) for name in ("key", "value")
    )
    return key, value, mask & is_filled[:, None, None]


def attend_to_cache(
    query: Array,
    key: Array,
    value: Array,
    cache: Cache,
    inputs: ModelInput,
    mask: Array,
    rotation: Rotation | None = None,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    num_hidden: int = 0,
    sinks: Array | None = None,
    scales: CacheScales | None = None,
    norms: HeadNorms | None = None,
    is_packed: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Cache]:
    """Write the keys and values of a call to its slots, and attend from its queries to the cache.

    The kernels take queries of 16 bits and read no more of the cache than it holds: one takes a few tokens, in a chain
    or a tree, and one many tokens in a chain.

    Args:
        query: [B, T, H, D].
        key: [B, T, kv heads, D] of the tokens of the call; `value` likewise.
        cache: of the layer.
        inputs: the tokens of the call and their positions.
        mask: [B, 1, T, S] bool, as `attention_mask` gives it.
        rotation: turns queries and keys first; None for none.
        window: number of positions that a query sees, its own included, or parts, as in `mask`; None is all.
        scale: factor of the scores; None is 1 / sqrt(D).
        softcap: number c that turns a score s into c tanh(s / c); None for none.
        num_hidden: number of slots, from the first on, that only their own tokens see, as in `mask`.
        sinks: [H] floats, the score of one more place of each head, whose value is 0; None for none.
        scales: of keys and values, [kv heads] float32: the cache stores them divided by these; None is 1.
        norms: of queries and keys, before they turn; None for none.
        is_packed: whether rows are the tiles of a packed call, and so may see what others write.
        implementation: "xla", "pallas", "interpret", or None: the kernel on CUDA where it supports the case.

    Returns:
        The attention of the queries [B, T, H, D], and the cache.

    Raises:
        NotImplementedError: if the named implementation does not support the case.
    """
    # Only the other kernel writes all tiles before it attends from one.
    is_for_few = _has_few(query) and not is_packed
    of_scores: dict[str, Any] = {"scale": scale, "softcap": softcap}
    hidden: dict[str, Any] = {"window": window, "num_hidden": num_hidden}

    def by_kernel(query, key, value, cache, inputs, mask, rotation, scales, sinks, norms, *, interpret):
        tokens = query, key, value, cache["key"], cache["value"], inputs.positions[:, 0], rotation, inputs.pages
        options = hidden | of_scores | {"cache_scales": scales, "sinks": sinks, "norms": norms, "interpret": interpret}
        if is_for_few:
            tree = None if inputs.mask is None else (inputs.mask, inputs.positions)
            attended, *updated = of_few.decode_attention(*tokens, tree, **options)
        else:
            attended, *updated = of_many.prompt_attention(*tokens, **options)
        return attended, dict(zip(("key", "value"), updated, strict=True))

    def by_xla(query, key, value, cache, inputs, mask, rotation, scales, sinks, norms):
        query, key = placed(query, key, rotation, norms)
        cache = update_cache(cache, key, value, inputs, scales)
        asked = query if scales is None else _times(query, scales[0])
        attended = _attend_in_xla(asked, cache, inputs, mask, sinks, is_packed=is_packed, **hidden, **of_scores)
        return attended if scales is None else _times(attended, scales[1]), cache

    def reason(query, key, value, cache, inputs, mask, rotation, scales, sinks, norms):
        if is_for_few:
            return of_few.unsupported(query, cache["key"])
        if inputs.mask is not None:
            return f"the kernel of more than {of_few.MAX_TOKENS} tokens takes a chain, got a ModelInput with a mask"
        return of_many.unsupported(query, cache["key"])

    return dispatch(
        (query, key, value, cache, inputs, mask, rotation, scales, sinks, norms),
        xla=by_xla,
        pallas=by_kernel,
        reason=reason,
        implementation=implementation,
    )


def _attend_in_xla(
    query: Array,
    cache: Cache,
    inputs: ModelInput,
    mask: Array,
    sinks: Array | None = None,
    *,
    window: Window,
    num_hidden: int,
    scale: float | None,
    softcap: float | None = None,
    is_packed: bool = False,
    expand: Expand | None = None,
) -> Array:
    """Attend as `attend_to_cache` does, to a cache that has the tokens of the call; rows are tiles of a packed one.

    `expand` makes a key and a value for each head of the keys, which are latents.
    """
    is_on_cpu = jax.default_backend() == "cpu"
    is_together = is_on_cpu and expand is None and query.shape[1] * query.shape[2] <= FEW_QUERIES
    # Pages are copied to be read, which CPUs do slowly. Other devices would rather copy than wait for each block.
    size = SMALL_BLOCK if is_on_cpu and inputs.pages is not None and _has_few(query) else BLOCK
    copies_whole = size == BLOCK and _has_few(query) and not is_packed
    if inputs.mask is None and not copies_whole and num_slots(cache, inputs) > 2 * size:
        how = window, scale, softcap, num_hidden, sinks, size, is_together, expand
        return attend_in_blocks(query, cache, inputs, *how)
    key, value, mask = read_cache(cache, inputs, mask)
    key, value = loaded(key, query.dtype), loaded(value, query.dtype)
    if expand is not None:
        key, value = expand(key)
    return (attend_few if is_together else attend)(query, key, value, mask, scale, softcap, sinks)


def _has_few(query: Array) -> bool:
    return query.shape[1] <= of_few.MAX_TOKENS
