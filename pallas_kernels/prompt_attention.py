"""Attention of many new tokens a sequence to a cache, dense or in pages: for prompts.

One kernel writes the new tokens to the cache, in place, and turns the queries. A program of the other holds a block of
queries, all queries of one kv head for a few tokens, and walks over the slots that these tokens see, a block at a time.
No score leaves the program, and no slot is read that no query of the block sees, so the length of the buffer costs
nothing.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import (
    Attended,
    Cached,
    CacheScales,
    HeadNorms,
    Layout,
    New,
    Scores,
    Window,
    as_factors,
    attend,
    first_inside,
    layout_of,
    load_heads,
    load_queries,
    load_sinks,
    scores_of,
    store_heads,
    unsupported,
    walk,
    write_new,
)
from pallas_kernels.launch import NUM_MULTIPROCESSORS, call

__all__ = ["prompt_attention", "unsupported"]

_BLOCK = 64  # slots that are read at a time, half of it for the largest heads
_TOKENS = 32  # that a program writes to the cache
_SIZES = ((256, 8), (128, 4), (64, 4))  # queries and warps of a program, from the fewest programs to the most


class _Plan(NamedTuple):
    """Static properties of a call."""

    num_tokens: int
    group: int  # query heads of a kv head
    num_rows: int  # queries of a program; row r of a sequence is token r // group, head r % group
    block_size: int  # slots that are read at a time
    layout: Layout
    scores: Scores


def prompt_attention(
    query: Array,
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    start: Array,
    rotation: tuple[Array, Array] | None = None,
    pages: Array | None = None,
    *,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    num_hidden: int = 0,
    cache_scales: CacheScales | None = None,
    sinks: Array | None = None,
    norms: HeadNorms | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Write new tokens to the slots from `start` on, and attend from each to the slots up to its own.

    Args:
        query: [B, T, H, D] bfloat16 or float16.
        key: [B, T, kv heads, D] of the new tokens, of the same dtype.
        value: as `key`.
        key_cache: [B, S, kv heads, D] of the same dtype or float8_e4m3fn; with `pages`, [num_pages, page_size, kv
            heads, D].
        value_cache: as `key_cache`.
        start: [B] int32, the slot of the first new token. Tokens past the end of the cache are not written.
        rotation: cosine and sine [B, T, R / 2] float32 that first turn the halves of the first R numbers of queries
            and new keys.
        pages: [B, P] int32, the page of each page_size slots; None for a dense cache. Tokens whose page is not in
            [0, num_pages) are not written.
        window: number of slots that a query sees, its own included, or parts; None is all before it.
        scale: factor of the scores; None is 1 / sqrt(D).
        softcap: number c that turns a score s into c tanh(s / c); None for none.
        num_hidden: number of slots, from the first on, that only their own tokens see.
        cache_scales: keys and values are stored divided by these; None is 1. The new tokens, too, are attended to as
            they are stored.
        sinks: [H] floats, the score of one more place of each head, whose value is 0; None for none.
        norms: of queries and new keys, before they turn; None for none.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        The attention of the queries [B, T, H, D], and the two caches.

    Raises:
        NotImplementedError: for dtypes and sizes that the kernel does not take.
    """
    reason = unsupported(query, key_cache)
    if reason is not None:
        raise NotImplementedError(reason)
    layout = layout_of(key_cache, pages)
    batch_size, num_tokens, num_heads, _ = query.shape
    kv_heads = key_cache.shape[2]
    group = num_heads // kv_heads
    num_rows, num_warps = _program_size(batch_size * kv_heads, num_tokens * group, layout.lanes)
    block_size = _BLOCK if layout.lanes <= 128 else _BLOCK // 2
    plan = _Plan(num_tokens, group, num_rows, block_size, layout, scores_of(layout, scale, softcap, window, num_hidden))
    new = New(jnp.concatenate([query, key, value], axis=2), rotation, start, norms)
    key_cache, value_cache, query = call(
        partial(_write_kernel, plan=plan),
        (key_cache, value_cache, jax.ShapeDtypeStruct(query.shape, query.dtype)),
        (new, pages, cache_scales, key_cache, value_cache),
        grid=(kv_heads, pl.cdiv(num_tokens, _TOKENS), batch_size),
        num_warps=4,
        interpret=interpret,
        begun=(key_cache, value_cache),
    )
    attended = call(
        partial(_prompt_attention_kernel, plan=plan),
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        (query, key_cache, value_cache, start, pages, cache_scales, sinks),
        grid=(kv_heads, batch_size, pl.cdiv(num_tokens * group, num_rows)),
        num_warps=num_warps,
        num_stages=3,
        interpret=interpret,
    )
    return attended, key_cache, value_cache


def _program_size(num_sequences: int, num_queries: int, lanes: int) -> tuple[int, int]:
    """Return the queries and the warps of a program: the largest with which programs still fill the device."""
    shrink = 1 if lanes <= 128 else 2
    sizes = [(rows // shrink, num_warps) for rows, num_warps in _SIZES]
    return next(
        (
            (rows, num_warps)
            for rows, num_warps in sizes
            if num_sequences * pl.cdiv(num_queries, rows) >= 1.5 * NUM_MULTIPROCESSORS
        ),
        sizes[-1],
    )


def _write_kernel(inputs, outputs, *, plan: _Plan):
    """Write the new keys and values to the cache, and turn the queries."""
    new, pages_ref, scales_ref, key_ref, value_ref = inputs
    *caches_out, query_ref = outputs
    kv_head, block, sequence = (pl.program_id(axis) for axis in range(3))
    cached = Cached(key_ref, value_ref, pages_ref, sequence, kv_head, plan.layout, scales_ref)
    write_new(new, caches_out, cached, block * _TOKENS + lax.iota(jnp.int32, _TOKENS))
    for i in range(plan.group):
        token, head = block * _TOKENS + lax.iota(jnp.int32, _TOKENS), kv_head * plan.group + i
        heads = load_queries(new, sequence, token, head, plan.layout)
        store_heads(query_ref, (sequence, token[:, None], head), heads, plan.layout, (token < plan.num_tokens)[:, None])


def _prompt_attention_kernel(inputs, out_ref, *, plan: _Plan):
    query_ref, key_ref, value_ref, start_ref, pages_ref, scales_ref, sinks_ref = inputs
    kv_head, sequence = pl.program_id(0), pl.program_id(1)
    cached = Cached(key_ref, value_ref, pages_ref, sequence, kv_head, plan.layout, scales_ref)
    first_row = (pl.num_programs(2) - 1 - pl.program_id(2)) * plan.num_rows  # the last tokens see most: they come first
    row = first_row + lax.iota(jnp.int32, plan.num_rows)
    token, head = row // plan.group, kv_head * plan.group + row % plan.group
    index, exists = (sequence, token[:, None], head[:, None]), (token < plan.num_tokens)[:, None]
    heads, factor = as_factors(load_heads(query_ref, index, plan.layout, exists), cached)

    start = start_ref[sequence]
    first = start + first_row // plan.group
    last = start + jnp.minimum((first_row + plan.num_rows - 1) // plan.group, plan.num_tokens - 1)
    end = jnp.minimum(last + 1, plan.layout.num_slots)

    def visit(attended, keys, values, slot, *, is_seen_whole=False):
        distance = (start + token)[:, None] - slot[None]
        seen = distance >= 0
        if plan.scores.window is not None:
            seen &= slot[None] >= first_inside(plan.scores.window, start + token)[:, None]
        if plan.scores.num_hidden:
            seen &= (slot >= plan.scores.num_hidden)[None] | (distance == 0)
        return attend(attended, heads, keys, values, None if is_seen_whole else seen, plan.scores, factor)

    attended, width = Attended.nothing(plan.num_rows, plan.layout), plan.block_size
    if plan.scores.window is None:
        begin = jnp.minimum(first + 1, end) // width * width
        hidden = jnp.minimum(pl.cdiv(plan.scores.num_hidden, width) * width, begin)
        if plan.scores.num_hidden:
            attended = walk(cached, jnp.int32(0), hidden, width, visit, attended)
        whole = partial(visit, is_seen_whole=True)
        attended = walk(cached, hidden, begin, width, whole, attended, has_part=False)
    else:
        begin = first_inside(plan.scores.window, first) // width * width
    attended = walk(cached, begin, end, width, visit, attended)
    attended = attended.with_sinks(load_sinks(sinks_ref, head))
    store_heads(out_ref, index, attended.mean(cached.value_scale), plan.layout, exists)
