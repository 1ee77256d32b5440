"""Common parts of the attention kernels: where a slot of a cache lies, and attention to one block of slots.

A cache is a pool of pages, [num_pages, page_size, kv heads, head size]. Slot s of a sequence lies in page
`pages[sequence, s // page_size]`, at s % page_size. Without a table of pages, sequence b has page b alone.

A cache in float8_e4m3fn stores keys and values divided by the scale of their kv head. The scale of keys becomes a
factor of the scores, and the scale of values a factor of the result, so that a stored number costs one conversion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import has_float8
from pallas_kernels.triton import plgpu

_HIDDEN = -1e30  # score of a slot that a query does not see; finite, so that a maximum over such scores is no NaN
LOG2_E = 1.4426950408889634
_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256
FLOAT8 = jnp.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
_SMALLEST_QUERY = 2.0**-100  # a query whose numbers are all smaller is not made larger any more
CacheScales = tuple[Array, Array]  # of keys and of values, [kv heads] float32
HeadNorm = tuple[Any, float, float]  # scale [head size], epsilon, and a number added to the scale


@dataclass(frozen=True)
class Chunks:
    """Parts of a sequence, one after the other, of which a token sees its own alone, up to itself."""

    size: int  # positions of a part


# The positions that a token sees: a number of them up to its own, its part, or all before it.
Window: TypeAlias = int | Chunks | None


def first_inside(window: int | Chunks, position: Array) -> Array:
    """Return the first position that tokens at some positions see, int32."""
    if isinstance(window, Chunks):
        return position - lax.rem(position, jnp.full_like(position, window.size))
    return jnp.maximum(position - window + 1, 0)


class Layout(NamedTuple):
    """Sizes of a cache."""

    num_pages: int
    page_size: int
    num_slots: int  # of one sequence
    head_size: int

    @property
    def lanes(self) -> int:
        """Numbers that are loaded of a head: a power of two."""
        return pl.next_power_of_2(self.head_size)


class Cached(NamedTuple):
    """Where the keys and values of one kv head of a sequence lie: references, and indices into them."""

    key_ref: Any
    value_ref: Any
    pages_ref: Any  # None for a dense cache
    sequence: Array
    kv_head: Array
    layout: Layout
    scales_ref: Any = None  # `CacheScales`; None is 1

    @property
    def key_scale(self) -> Array | None:
        return None if self.scales_ref is None else plgpu.load(self.scales_ref[0].at[self.kv_head])

    @property
    def value_scale(self) -> Array | None:
        return None if self.scales_ref is None else plgpu.load(self.scales_ref[1].at[self.kv_head])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms of each query and each key, before they turn."""

    query: Any  # [head size], scale of the norm
    key: Any  # likewise; None where the keys have had their norm
    epsilon: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})  # number added to the scales

    @property
    def of_query(self) -> HeadNorm:
        return self.query, self.epsilon, self.offset

    @property
    def of_key(self) -> HeadNorm | None:
        return None if self.key is None else (self.key, self.epsilon, self.offset)


class New(NamedTuple):
    """References to the arrays of a call: queries, keys and values, and how queries and keys are changed first."""

    heads_ref: Any  # [B, T, H + 2 kv heads, head size]: queries, then keys, then values
    rotation_ref: Any  # cosine and sine [B, T, R / 2] float32 of the first R numbers of a head, or None
    start_ref: Any  # [B] int32, the slot of the first token
    norms: HeadNorms | None  # of references


class Scores(NamedTuple):
    """How the product of a query and a key becomes a score, and which slots have one."""

    scale: float
    softcap: float | None  # number c that turns a score s into c tanh(s / c); None for none
    window: Window  # the positions that a query sees
    num_hidden: int  # number of slots, from the first on, that only their own tokens see


class Attended(NamedTuple):
    """Running attention of some queries, with exp2(score - top) as the weight of a value."""

    total: Array  # [rows, lanes] float32, sum of the weighted values
    top: Array  # [rows] float32, largest score so far; scores are in units of log 2
    mass: Array  # [rows] float32, sum of the weights

    @classmethod
    def nothing(cls, num_rows: int, layout: Layout) -> "Attended":
        shape = num_rows, layout.lanes
        return cls(jnp.zeros(shape, jnp.float32), jnp.full(num_rows, _HIDDEN), jnp.zeros(num_rows, jnp.float32))

    def with_sinks(self, sinks: Array | None) -> "Attended":
        """Return the attention with the scores [rows] of one more place of each query, whose value is 0."""
        if sinks is None:
            return self
        scores = sinks.astype(jnp.float32) * LOG2_E
        top = jnp.maximum(self.top, scores)
        shrink = jnp.exp2(self.top - top)
        return Attended(self.total * shrink[:, None], top, self.mass * shrink + jnp.exp2(scores - top))

    def mean(self, value_scale: Array | None = None) -> Array:
        """Return the mean of the values [rows, lanes] times their scale; zeros where nothing was attended to."""
        mean = self.total / jnp.where(self.mass > 0, self.mass, 1)[:, None]
        return mean if value_scale is None else mean * value_scale


def unsupported(query: Array, key_cache: Array) -> str | None:
    """Return why no kernel attends from these queries [.., D] to this cache, or None where one does."""
    if plgpu is None:
        return "this version of JAX has no Triton backend of Pallas"
    if query.dtype not in (jnp.bfloat16, jnp.float16) or key_cache.dtype not in (query.dtype, FLOAT8):
        return (
            "the kernel takes bfloat16 or float16 queries, and a cache of their dtype or of float8_e4m3fn, got "
            f"{query.dtype} and {key_cache.dtype}"
        )
    if key_cache.dtype == FLOAT8 and not has_float8():
        return "the kernel converts float8_e4m3fn on GPUs of compute capability 8.9 or more"
    size = query.shape[-1]
    if not _SMALLEST_HEAD <= size <= _LARGEST_HEAD or size % 2:
        return f"the kernel takes heads of an even size in [{_SMALLEST_HEAD}, {_LARGEST_HEAD}], got {size}"
    return None


def layout_of(cache: Array, pages: Array | None) -> Layout:
    """Return the sizes of a cache [num_pages, page_size, kv heads, D] with a table of pages [B, P] or None."""
    num_pages, page_size, _, size = cache.shape
    return Layout(num_pages, page_size, page_size * (1 if pages is None else pages.shape[1]), size)


def scores_of(layout: Layout, scale: float | None, softcap: float | None, window: Window, num_hidden: int) -> Scores:
    """Return how scores are made; a scale of None is 1 / sqrt(head size)."""
    return Scores(layout.head_size**-0.5 if scale is None else scale, softcap, window, num_hidden)


def stored(x: Array, dtype: jnp.dtype, scale: Array | None = None) -> Array:
    """Return keys or values as a cache of a dtype stores them: divided by a scale, and rounded.

    Numbers past the largest one of float8_e4m3fn, which has no infinity, become that one; NaN stays NaN.
    """
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if dtype == FLOAT8:
        x = jnp.clip(x, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return x.astype(dtype)


def in_pool(page: Array, layout: Layout) -> Array:
    """Return whether numbers are pages of the pool; others stand for no page."""
    return (page >= 0) & (page < layout.num_pages)


def locate(cached: Cached, slot: Array) -> tuple[Array, Array]:
    """Return the pages and the indices in them of slots [N]; slots past the last one lie past the end of its page."""
    layout = cached.layout
    if cached.pages_ref is None:
        return jnp.broadcast_to(cached.sequence, slot.shape), slot
    index = jnp.minimum(slot // layout.page_size, layout.num_slots // layout.page_size - 1)
    return plgpu.load(cached.pages_ref.at[cached.sequence, index]), slot - index * layout.page_size


def walk(
    cached: Cached,
    begin: Array,
    end: Array,
    width: int,
    visit: Callable[[Attended, Array, Array, Array], Attended],
    attended: Attended,
    *,
    has_part: bool = True,
) -> Attended:
    """Visit the slots from `begin` to `end`, `width` of them at a time.

    Args:
        cached: where their keys and values lie.
        begin: the first slot, a multiple of `width`.
        end: the slot after the last one. Slots from it on are not read and give zeros, as those without a page do.
        width: number of slots of a visit, a power of two.
        visit: function of the attention so far, the keys and the values [width, lanes], and the slots [width],
            which returns the attention with this block.
        attended: the attention to earlier blocks.
        has_part: whether `end` may not be a multiple of `width`, or slots may have no page. Where neither is so, loads
            need no mask and are faster.
    """
    layout = cached.layout

    def page_of(first):
        """Look up the page of a block of slots, or the pages of the slots where these are several."""
        if cached.pages_ref is None:
            return cached.sequence
        slot = first if layout.page_size % width == 0 else first + lax.iota(jnp.int32, width)
        return locate(cached, slot)[0]

    def body(index, carry):
        attended, page = carry
        first = begin + index * width
        slot = first + lax.iota(jnp.int32, width)
        place, mask = slot, slot < end
        if cached.pages_ref is not None:
            place = slot % layout.page_size
            mask &= in_pool(page, layout)
            page = jnp.clip(page, 0, layout.num_pages - 1)
        index = page[:, None] if page.ndim else page, place[:, None], cached.kv_head
        where = index, layout, mask[:, None] if has_part else None
        attended = visit(attended, load_heads(cached.key_ref, *where), load_heads(cached.value_ref, *where), slot)
        return attended, page_of(first + width)  # looked up a block ahead, so that no load waits for another

    return lax.fori_loop(0, pl.cdiv(end - begin, width), body, (attended, page_of(begin)))[0]


def load_queries(new: New, sequence: Array, token: Array, head: Array, layout: Layout) -> Array:
    """Load queries [N, lanes] of new tokens [N], normed and turned; zeros for tokens past the last."""
    return _load_turned(new, sequence, token, head, layout, None if new.norms is None else new.norms.of_query)


def _load_turned(new: New, sequence: Array, token: Array, head: Array, layout: Layout, norm: HeadNorm | None) -> Array:
    """Load heads [N, lanes] of new tokens [N], normed and turned; zeros for tokens past the last."""
    exists, index = (token < new.heads_ref.shape[1])[:, None], (sequence, token[:, None], head)
    lane, size = lax.iota(jnp.int32, layout.lanes)[None], layout.head_size
    x = load_heads(new.heads_ref, index, layout, exists)
    wide = x.astype(jnp.float32)
    square = jnp.sum(wide * wide, axis=1, keepdims=True) / size

    def normed(x: Array, lane: Array) -> Array:
        """Return numbers [N, lanes] of the heads, at the given lanes, after the norm, rounded as they were loaded."""
        if norm is None:
            return x
        scale_ref, epsilon, offset = norm
        scale = load_heads(scale_ref, (), layout, None, lane).astype(jnp.float32) + offset
        return (x.astype(jnp.float32) * lax.rsqrt(square + epsilon) * scale).astype(x.dtype)

    x = normed(x, lane)
    if new.rotation_ref is None:
        return x
    half = new.rotation_ref[0].shape[-1]
    turns, is_first = lane < 2 * half, lane < half
    other = jnp.where(turns, jnp.where(is_first, lane + half, lane - half), lane)
    cos, sin = (load_heads(ref, index[:2], layout, exists, lane % half) for ref in new.rotation_ref)
    partner = normed(load_heads(new.heads_ref, index, layout, exists, other), other).astype(jnp.float32)
    turned = x.astype(jnp.float32) * cos + jnp.where(is_first, -partner, partner) * sin
    return jnp.where(turns, turned.astype(x.dtype), x) if 2 * half < size else turned.astype(x.dtype)


def write_new(
    new: New, caches_out: Sequence[Any], cached: Cached, token: Array, is_writer: Array | bool = True
) -> tuple[Array, Array]:
    """Store keys, normed and turned, and values of new tokens [N] in their slots; return them [N, lanes] as stored.

    Tokens that do not exist, lie past the last slot or have no page are not stored.

    Args:
        new: the references to the arrays of the call.
        caches_out: references to the caches of keys and values.
        cached: where the slots lie.
        token: indices of the tokens.
        is_writer: whether this program stores anything.
    """
    layout, sequence, kv_head = cached.layout, cached.sequence, cached.kv_head
    (num_tokens, num_heads), kv_heads = new.heads_ref.shape[1:3], cached.key_ref.shape[2]
    exists, slot = token < num_tokens, new.start_ref[sequence] + token
    norm = None if new.norms is None else new.norms.of_key
    keys = _load_turned(new, sequence, token, num_heads - 2 * kv_heads + kv_head, layout, norm)
    value_index = sequence, token[:, None], num_heads - kv_heads + kv_head
    values = load_heads(new.heads_ref, value_index, layout, exists[:, None])
    page, place = locate(cached, slot)
    fits = exists & (slot < layout.num_slots) & in_pool(page, layout) & is_writer
    dtype = cached.key_ref.dtype
    keys, values = stored(keys, dtype, cached.key_scale), stored(values, dtype, cached.value_scale)
    for ref, heads in zip(caches_out, (keys, values), strict=True):
        store_heads(ref, (page[:, None], place[:, None], kv_head), heads, layout, fits[:, None])
    return keys, values


def load_heads(ref: Any, index: tuple, layout: Layout, mask: Array | None, lane: Array | None = None) -> Array:
    """Load heads [N, lanes] at an index; they are zeros past the head's size and where the mask [N, 1] is false."""
    if lane is None:
        lane = lax.iota(jnp.int32, layout.lanes)[None]
    at = ref.at[(*index, lane)]
    mask = _of_head(mask, layout)
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0.0)


def store_heads(ref: Any, index: tuple, heads: Array, layout: Layout, mask: Array) -> None:
    """Store heads [N, lanes] at an index, where the mask [N, 1] is true."""
    lane = lax.iota(jnp.int32, layout.lanes)[None]
    plgpu.store(ref.at[(*index, lane)], heads.astype(ref.dtype), mask=_of_head(mask, layout))


def _of_head(mask: Array | None, layout: Layout) -> Array | None:
    if layout.lanes == layout.head_size:
        return mask
    inside = lax.iota(jnp.int32, layout.lanes)[None] < layout.head_size
    return inside if mask is None else mask & inside


def as_factors(heads: Array, cached: Cached) -> tuple[Array, Array | None]:
    """Return queries [rows, lanes] as stored keys are multiplied by them, and a factor [rows, 1] of these products.

    The factor is None for 1. Two numbers of float8 become float16 in one instruction, but bfloat16 in five. A power of
    two brings each query into the range of float16, in which it loses nothing that counts beside its largest number.
    """
    key_scale = cached.key_scale
    if cached.key_ref.dtype != FLOAT8:
        return heads, key_scale
    wide = heads.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axis=1), _SMALLEST_QUERY)
    size = jnp.exp2(jnp.ceil(jnp.log2(largest)))[:, None]
    return (wide / size).astype(jnp.float16), size if key_scale is None else size * key_scale


def load_sinks(ref: Any, head: Array) -> Array | None:
    """Load the sinks of heads [N]; None where there are none."""
    return None if ref is None else plgpu.load(ref.at[head])


def attend(
    so_far: Attended,
    heads: Array,
    keys: Array,
    values: Array,
    seen: Array | None,
    scores_of: Scores,
    factor: Array | None = None,
) -> Attended:
    """Attend from queries to one block of slots.

    Args:
        so_far: the attention of the queries to earlier slots.
        heads: the queries [rows, lanes], as `as_factors` gives them.
        keys: [N, lanes] of the slots, as the cache stores them.
        values: likewise.
        seen: [rows, N] bool, which slots each query sees; None is all.
        scores_of: how scores are made. Its window and its hidden slots must be part of `seen`.
        factor: of the products, from `as_factors`.
    """
    keys, values = keys.astype(heads.dtype), values.astype(heads.dtype)
    products = plgpu.dot(heads, keys.T)
    scale, softcap = scores_of.scale, scores_of.softcap
    if factor is not None:
        scale = scale * factor
    if softcap is None:
        scores = products * (scale * LOG2_E)
    else:  # tanh(x) is 1 - 2 / (1 + exp(2 x))
        scores = softcap * LOG2_E * (1 - 2 / (1 + jnp.exp2(2 * scale / softcap * LOG2_E * products)))
    if seen is not None:
        scores = jnp.where(seen, scores, _HIDDEN)
    top = jnp.maximum(so_far.top, jnp.max(scores, axis=1))
    weights, shrink = jnp.exp2(scores - top[:, None]), jnp.exp2(so_far.top - top)
    total = so_far.total * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return Attended(total, top, so_far.mass * shrink + jnp.sum(weights, axis=1))
