"""Attention of a few new tokens a sequence to a cache, dense or in pages, which the kernel also writes, in place.

The slots before the call are split among programs by the true length of each sequence, so that a long cache costs only
its filled slots and small batches still fill the device. The program of the last split also attends to the new tokens
and writes them to the cache; the other programs read only slots before them. A second kernel joins the splits.

Where the sequences fill the device without splits, a sequence has several only where it is long: the one program of a
sequence of 8,192 tokens would take longer than all others of 64 sequences of 512.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import attention
from pallas_kernels.attention import (
    LOG2_E,
    Attended,
    Cached,
    CacheScales,
    Chunks,
    HeadNorms,
    Layout,
    New,
    Scores,
    Window,
    as_factors,
    attend,
    first_inside,
    in_pool,
    layout_of,
    load_queries,
    load_sinks,
    locate,
    scores_of,
    store_heads,
    walk,
    write_new,
)
from pallas_kernels.launch import NUM_MULTIPROCESSORS, out_shapes
from pallas_kernels.triton import plgpu

MAX_TOKENS = 64
_MAX_SPLITS = 16
_LONG_SPLITS, _LEAST = 8, 1024  # splits of a long sequence where others have one, and the fewest slots of each
_JOINED_HEADS = 8  # heads that a program joins then, since most have nothing to join
_MOST_PARTS = 2**27  # bytes of the attention of splits then
_MIN_DOT = 16  # rows in the smallest matrix product
_MAX_NUMBERS = 64 * 128  # of the queries that one program holds
_WIDE = 256  # lanes of heads of which a program takes as few queries as it can, where splits are left
_THIN_SPLITS = 8  # the fewest splits that must be left


class _Plan(NamedTuple):
    """Static properties of a call."""

    num_tokens: int
    group: int  # query heads of a kv head
    num_rows: int  # queries of a program; row r of a kv head is token r // group, head r % group
    row_blocks: int  # programs that share the queries of a kv head
    num_new: int  # new tokens, padded
    splits: int  # the most of a sequence
    least: int  # fewest slots of a split; 0 where each sequence has all splits
    block_size: int  # slots that are read at a time
    num_warps: int
    layout: Layout
    scores: Scores


class _Inputs(NamedTuple):
    """References to the inputs."""

    new: New
    key_cache: Any
    value_cache: Any
    pages: Any
    tree: Any
    cache_scales: Any
    sinks: Any  # where one split attends; else they are added where the splits are joined


class _Parts(NamedTuple):
    """The attention of splits, and what joins them: arrays, or references to them."""

    means: Any  # [B, splits, T, H, D] float32
    log_masses: Any  # [B, splits, T, H] float32, logarithms to the base 2 of the sums of weights
    sinks: Any
    start: Any  # of the call, where the number of splits depends on the sequence; else None
    pages: Any  # likewise


class _Span(NamedTuple):
    """The cached slots that a sequence attends to, and how they are split."""

    begin: Array  # int32
    end: Array  # int32
    chunk: Array  # int32 slots of a split
    count: Array  # int32 splits

    def of_split(self, split: Array) -> tuple[Array, Array]:
        """Return the range [begin, end) of the slots of a split."""
        begin = self.begin + split * self.chunk
        return begin, jnp.minimum(begin + self.chunk, self.end)


class _Queries(NamedTuple):
    """The queries that a program attends from."""

    heads: Array  # [rows, lanes]
    token: Array  # [rows] int32 index of each query's token
    position: Array  # [rows] int32
    first: Array  # int32 slot of the first new token


def unsupported(query: Array, key_cache: Array) -> str | None:
    """Return why the kernel cannot attend with these queries to this cache, or None where it can."""
    if query.shape[1] > MAX_TOKENS:
        return f"the kernel takes at most {MAX_TOKENS} tokens of a sequence, got {query.shape[1]}"
    return attention.unsupported(query, key_cache)


def decode_attention(
    query: Array,
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    start: Array,
    rotation: tuple[Array, Array] | None = None,
    pages: Array | None = None,
    tree: tuple[Array, Array] | None = None,
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
    """Attend to the slots before `start` and causally to the new tokens, and write these to the slots from it on.

    Args:
        query: [B, T, H, D] bfloat16 or float16; T <= 64.
        key: [B, T, kv heads, D] of the new tokens, of the same dtype.
        value: as `key`.
        key_cache: [B, S, kv heads, D] of the same dtype or float8_e4m3fn; with `pages`, [num_pages, page_size, kv
            heads, D].
        value_cache: as `key_cache`.
        start: [B] int32, the slot of the first new token. Tokens past the end of the cache are not written.
        rotation: cosine and sine [B, T, R / 2] float32 that first turn the halves of the first R numbers of queries
            and new keys.
        pages: [B, P] int32, the page of each page_size slots; None for a dense cache. Tokens whose page is not in
            [0, num_pages) are not written. A sequence whose first token has none attends to its new tokens alone.
        tree: which of the new tokens each of them sees, [B, T, T] bool, and their positions [B, T] int32, by which a
            window hides slots. None is a chain: each sees the tokens up to itself.
        window: number of positions that a query sees, its own included, or parts; None is all before it.
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
    plan = _plan(query.shape, key_cache.shape[2], layout, scores_of(layout, scale, softcap, window, num_hidden))
    batch_size, *shape = query.shape
    whole, parts = jax.ShapeDtypeStruct(query.shape, query.dtype), None
    if plan.splits > 1:
        parts = tuple(
            jax.ShapeDtypeStruct((batch_size, plan.splits, *rest), jnp.float32) for rest in (shape, shape[:-1])
        )
    results = whole if parts is None or plan.least else None, parts
    if tree is not None:
        tree = tree[0].astype(jnp.int32), tree[1]
    new = New(jnp.concatenate([query, key, value], axis=2), rotation, start, norms)
    has_whole = results[0] is not None
    inputs = _Inputs(new, key_cache, value_cache, pages, tree, cache_scales, sinks if has_whole else None)
    first_cache, num_results = len(jax.tree.leaves(new)), len(jax.tree.leaves(results))
    ((attended, parts, key_cache, value_cache),) = pl.pallas_call(
        partial(_attention_kernel, plan=plan),
        grid=(batch_size, key_cache.shape[2] * plan.row_blocks, plan.splits),
        out_shape=(out_shapes((*results, key_cache, value_cache), inputs),),
        input_output_aliases={first_cache: num_results, first_cache + 1: num_results + 1},
        compiler_params=plgpu.CompilerParams(num_warps=plan.num_warps, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(inputs)
    if parts is not None:
        means, log_masses = parts
        of_splits = _Parts(means, log_masses, sinks, *((start, pages) if plan.least else (None, None)))
        attended = _join(attended, of_splits, plan, query.shape, query.dtype, interpret)
    return attended, key_cache, value_cache


def _plan(query_shape: tuple[int, ...], kv_heads: int, layout: Layout, scores: Scores) -> _Plan:
    batch_size, num_tokens, num_heads, _ = query_shape
    group = num_heads // kv_heads
    num_rows = min(_MAX_NUMBERS // layout.lanes, max(_MIN_DOT, pl.next_power_of_2(num_tokens * group)))
    row_blocks = pl.cdiv(num_tokens * group, num_rows)
    programs = batch_size * kv_heads * row_blocks
    splits = min(_MAX_SPLITS, pl.next_power_of_2(pl.cdiv(NUM_MULTIPROCESSORS, programs)))
    # A program of many wide queries runs out of registers. Where programs of few fit the device at once, these take two
    # thirds of the time.
    thin_blocks = pl.cdiv(num_tokens * group, _MIN_DOT)
    each = NUM_MULTIPROCESSORS // (batch_size * kv_heads * thin_blocks)
    if layout.lanes >= _WIDE and num_rows > _MIN_DOT and each >= _THIN_SPLITS:
        num_rows, row_blocks = _MIN_DOT, thin_blocks
        splits = _MAX_SPLITS if each >= _MAX_SPLITS else _THIN_SPLITS
    num_new = max(_MIN_DOT, pl.next_power_of_2(num_tokens))
    is_even, least = splits > 1, 0
    if not is_even:
        splits, least = _splits_of_long(query_shape, layout, scores)
    num_warps = 4 if is_even or num_rows > 32 else 2
    return _Plan(
        num_tokens=num_tokens,
        group=group,
        num_rows=num_rows,
        row_blocks=row_blocks,
        num_new=num_new,
        splits=splits,
        least=least,
        block_size=64 if is_even else 32,
        num_warps=8 if num_new * layout.lanes > _MAX_NUMBERS else num_warps,  # so that new keys fit the registers
        layout=layout,
        scores=scores,
    )


def _splits_of_long(query_shape: tuple[int, ...], layout: Layout, scores: Scores) -> tuple[int, int]:
    """Return the most splits of a long sequence where others have one, and the fewest slots of each.

    They are 1 and 0 where no sequence is long.
    """
    window = scores.window.size if isinstance(scores.window, Chunks) else scores.window
    most = layout.num_slots if window is None else min(window, layout.num_slots)
    parts = 4 * math.prod(query_shape)  # bytes of the attention of each split
    splits = min(_LONG_SPLITS, most // _LEAST, max(1, _MOST_PARTS // parts))
    return (1 << splits.bit_length() - 1, _LEAST) if splits > 1 else (1, 0)


def _attention_kernel(inputs: _Inputs, out, *, plan: _Plan):
    sequence, split = pl.program_id(0), pl.program_id(2)
    kv_head, row_block = pl.program_id(1) // plan.row_blocks, pl.program_id(1) % plan.row_blocks
    caches = inputs.key_cache, inputs.value_cache, inputs.pages
    cached = Cached(*caches, sequence, kv_head, plan.layout, inputs.cache_scales)
    span = _span_of(cached, inputs.new.start_ref[sequence], plan)
    run = partial(_attend_split, inputs, out, cached, span, split, row_block, plan=plan)
    if plan.least:
        pl.when(split < span.count)(run)
    else:
        run()


def _attend_split(
    inputs: _Inputs, out, cached: Cached, span: _Span, split: Array, row_block: Array, *, plan: _Plan
) -> None:
    """Attend to the slots of a split, and in the last one to the new tokens, too."""
    whole_ref, parts, *caches_out = out
    sequence, kv_head = cached.sequence, cached.kv_head
    row = row_block * plan.num_rows + lax.iota(jnp.int32, plan.num_rows)
    token, head = row // plan.group, kv_head * plan.group + row % plan.group
    queries = _Queries(
        load_queries(inputs.new, sequence, token, head[:, None], plan.layout),
        token,
        _positions(inputs, sequence, token, plan),
        inputs.new.start_ref[sequence],
    )
    begin, end = span.of_split(split)
    heads, factor = as_factors(queries.heads, cached)

    def visit(attended, keys, values, slot):
        seen = (slot < end)[None]
        if plan.scores.window is not None:
            seen &= slot[None] >= first_inside(plan.scores.window, queries.position)[:, None]
        if plan.scores.num_hidden:
            seen &= (slot >= plan.scores.num_hidden)[None]
        return attend(attended, heads, keys, values, seen, plan.scores, factor)

    def new_tokens(so_far):
        token = lax.iota(jnp.int32, plan.num_new)
        keys, values = write_new(inputs.new, caches_out, cached, token, row_block == 0)
        seen = _seen_of_new(inputs, sequence, queries, plan)
        return attend(so_far, heads, keys, values, seen, plan.scores, factor)

    attended = Attended.nothing(plan.num_rows, plan.layout)
    attended = walk(cached, begin, end, plan.block_size, visit, attended)
    attended = lax.cond(split == span.count - 1, new_tokens, lambda so_far: so_far, attended)
    is_row = token < plan.num_tokens
    if whole_ref is not None:
        mean = attended.with_sinks(load_sinks(inputs.sinks, head)).mean(cached.value_scale)
        is_whole = is_row if parts is None else is_row & (span.count == 1)
        store_heads(whole_ref, (sequence, token[:, None], head[:, None]), mean, plan.layout, is_whole[:, None])
    if parts is not None:
        means_ref, log_mass_ref = parts
        is_part = is_row if whole_ref is None else is_row & (span.count > 1)
        index = sequence, split, token[:, None], head[:, None]
        store_heads(means_ref, index, attended.mean(cached.value_scale), plan.layout, is_part[:, None])
        has_mass = attended.mass > 0
        log_mass = jnp.where(has_mass, attended.top + jnp.log2(jnp.where(has_mass, attended.mass, 1)), -jnp.inf)
        plgpu.store(log_mass_ref.at[sequence, split, token, head], log_mass, mask=is_part)


def _positions(inputs: _Inputs, sequence: Array, token: Array, plan: _Plan) -> Array:
    """Return the positions [N] of new tokens [N]."""
    if inputs.tree is None:
        return inputs.new.start_ref[sequence] + token
    return plgpu.load(inputs.tree[1].at[sequence, token], mask=token < plan.num_tokens, other=0)


def _span_of(cached: Cached, first: Array, plan: _Plan) -> _Span:
    """Return the cached slots that a sequence attends to, of those before `first`, and how they are split.

    There are none where the first new token has no page, as in a vacant slot of an engine, which stands at the end.
    """
    window, block_size = plan.scores.window, plan.block_size
    end = jnp.minimum(first, plan.layout.num_slots)
    begin = jnp.zeros_like(end)
    if window is not None:
        begin = first_inside(window, end) // block_size * block_size  # by any query
    if cached.pages_ref is not None:
        page, _ = locate(cached, first)
        end = jnp.where(in_pool(page, plan.layout), end, begin)
    chunk = pl.cdiv(end - begin, plan.splits * block_size) * block_size
    if not plan.least:
        return _Span(begin, end, chunk, jnp.full_like(end, plan.splits))
    chunk = jnp.maximum(chunk, plan.least)
    return _Span(begin, end, chunk, jnp.maximum(pl.cdiv(end - begin, chunk), 1))


def _seen_of_new(inputs: _Inputs, sequence: Array, queries: _Queries, plan: _Plan) -> Array:
    """Return which of the new tokens each query sees, [rows, new] bool."""
    i, token = lax.iota(jnp.int32, plan.num_new), queries.token
    exists = (i < plan.num_tokens)[None]
    if inputs.tree is None:
        seen = (i[None] <= token[:, None]) & exists
    else:
        index = inputs.tree[0].at[sequence, token[:, None], i[None]]
        seen = plgpu.load(index, mask=(token < plan.num_tokens)[:, None] & exists, other=0) != 0
    if plan.scores.window is not None:
        position = _positions(inputs, sequence, i, plan)
        seen &= position[None] >= first_inside(plan.scores.window, queries.position)[:, None]
    if plan.scores.num_hidden:
        seen &= (queries.first + i >= plan.scores.num_hidden)[None] | (i[None] == token[:, None])
    return seen


def _join(
    whole: Array | None, inputs: _Parts, plan: _Plan, shape: tuple[int, ...], dtype: jnp.dtype, interpret: bool
) -> Array:
    """Return the mean over splits of the attention [B, T, H, D], weighted by its mass, with sinks.

    `whole` has the attention of sequences with one split. It is None where all have several.
    """
    heads = _JOINED_HEADS if plan.least else 1
    return pl.pallas_call(
        partial(_join_kernel, plan=plan, num_heads=heads),
        grid=(*shape[:2], pl.cdiv(shape[2], heads)),
        out_shape=out_shapes(jax.ShapeDtypeStruct(shape, dtype), (inputs, whole)),
        input_output_aliases={len(jax.tree.leaves(inputs)): 0} if plan.least else {},
        compiler_params=plgpu.CompilerParams(num_warps=4 if plan.least else 2, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )((inputs, whole))


def _join_kernel(inputs, out_ref, *, plan: _Plan, num_heads: int):
    parts, _ = inputs
    b, t = pl.program_id(0), pl.program_id(1)
    head = pl.program_id(2) * num_heads + lax.iota(jnp.int32, num_heads)
    if not plan.least:
        _join_heads(parts, out_ref, b, t, head, None)
        return
    span = _span_of(Cached(None, None, parts.pages, b, jnp.zeros_like(b), plan.layout), parts.start[b], plan)
    pl.when(span.count > 1)(partial(_join_heads, parts, out_ref, b, t, head, span.count))


def _join_heads(parts: _Parts, out_ref, b: Array, t: Array, head: Array, count: Array | None) -> None:
    """Join the first `count` splits of heads [N] of a token; all if it is None."""
    _, splits, _, num_heads, size = parts.means.shape
    split, d = lax.iota(jnp.int32, splits)[:, None], lax.iota(jnp.int32, pl.next_power_of_2(size))[None]
    exists, inside = head < num_heads, (d < size) & (head < num_heads)[:, None]
    is_used = jnp.broadcast_to(exists[None], (splits, *head.shape))
    if count is not None:
        is_used &= split < count
    log_masses = plgpu.load(parts.log_masses.at[b, split, t, head[None]], mask=is_used, other=-jnp.inf)
    of_heads = is_used[:, :, None] & inside[None]
    means = plgpu.load(parts.means.at[b, split[:, :, None], t, head[None, :, None], d[None]], mask=of_heads, other=0.0)
    top, of_sinks = jnp.max(log_masses, axis=0), jnp.zeros(head.shape, jnp.float32)
    if parts.sinks is not None:
        scores = plgpu.load(parts.sinks.at[head], mask=exists, other=0.0).astype(jnp.float32) * LOG2_E
        top = jnp.maximum(top, scores)
        of_sinks = jnp.exp2(scores - top)
    weights = jnp.exp2(log_masses - top[None])
    mean = jnp.sum(means * weights[:, :, None], axis=0) / (jnp.sum(weights, axis=0) + of_sinks)[:, None]
    plgpu.store(out_ref.at[b, t, head[:, None], d], mean.astype(out_ref.dtype), mask=inside)
