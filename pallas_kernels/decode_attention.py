"""Attention of a few new tokens a sequence to a cache, dense or in pages, which the kernel also writes, in place.

The slots before the call are split among programs by the true length of each sequence, so that a long cache costs only
its filled slots and small batches still fill the device. The program of the last split also attends to the new tokens
and writes them to the cache; the other programs read only slots before them. A second kernel joins the splits.
"""

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
    splits: int
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
    if plan.splits == 1:
        results = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)
    else:
        results = tuple(
            jax.ShapeDtypeStruct((batch_size, plan.splits, *rest), jnp.float32) for rest in (shape, shape[:-1])
        )
    if tree is not None:
        tree = tree[0].astype(jnp.int32), tree[1]
    new = New(jnp.concatenate([query, key, value], axis=2), rotation, start, norms)
    inputs = _Inputs(new, key_cache, value_cache, pages, tree, cache_scales, sinks if plan.splits == 1 else None)
    first_cache = len(jax.tree.leaves(new))
    ((attended, log_mass, key_cache, value_cache),) = pl.pallas_call(
        partial(_attention_kernel, plan=plan),
        grid=(batch_size, key_cache.shape[2] * plan.row_blocks, plan.splits),
        out_shape=(out_shapes((*results, key_cache, value_cache), inputs),),
        input_output_aliases={first_cache: 2, first_cache + 1: 3},
        compiler_params=plgpu.CompilerParams(num_warps=plan.num_warps, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(inputs)
    if plan.splits > 1:
        attended = _join(attended, log_mass, sinks, query.dtype, interpret)
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
    num_warps = 2 if splits == 1 and num_rows <= 32 else 4
    return _Plan(
        num_tokens=num_tokens,
        group=group,
        num_rows=num_rows,
        row_blocks=row_blocks,
        num_new=num_new,
        splits=splits,
        block_size=32 if splits == 1 else 64,
        num_warps=8 if num_new * layout.lanes > _MAX_NUMBERS else num_warps,  # so that new keys fit the registers
        layout=layout,
        scores=scores,
    )


def _attention_kernel(inputs: _Inputs, out, *, plan: _Plan):
    out_ref, log_mass_ref, *caches_out = out
    sequence, split = pl.program_id(0), pl.program_id(2)
    kv_head, row_block = pl.program_id(1) // plan.row_blocks, pl.program_id(1) % plan.row_blocks
    row = row_block * plan.num_rows + lax.iota(jnp.int32, plan.num_rows)
    token, head = row // plan.group, kv_head * plan.group + row % plan.group
    caches = inputs.key_cache, inputs.value_cache, inputs.pages
    cached = Cached(*caches, sequence, kv_head, plan.layout, inputs.cache_scales)
    queries = _Queries(
        load_queries(inputs.new, sequence, token, head[:, None], plan.layout),
        token,
        _positions(inputs, sequence, token, plan),
        inputs.new.start_ref[sequence],
    )
    begin, end = _slots_of(split, cached, queries.first, plan)
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
    attended = lax.cond(split == plan.splits - 1, new_tokens, lambda so_far: so_far, attended)
    attended = attended.with_sinks(load_sinks(inputs.sinks, head))
    is_row, mean = token < plan.num_tokens, attended.mean(cached.value_scale)
    if plan.splits == 1:
        index = sequence, token[:, None], head[:, None]
        store_heads(out_ref, index, mean, plan.layout, is_row[:, None])
    else:
        index = sequence, split, token[:, None], head[:, None]
        store_heads(out_ref, index, mean, plan.layout, is_row[:, None])
        has_mass = attended.mass > 0
        log_mass = jnp.where(has_mass, attended.top + jnp.log2(jnp.where(has_mass, attended.mass, 1)), -jnp.inf)
        plgpu.store(log_mass_ref.at[sequence, split, token, head], log_mass, mask=is_row)


def _positions(inputs: _Inputs, sequence: Array, token: Array, plan: _Plan) -> Array:
    """Return the positions [N] of new tokens [N]."""
    if inputs.tree is None:
        return inputs.new.start_ref[sequence] + token
    return plgpu.load(inputs.tree[1].at[sequence, token], mask=token < plan.num_tokens, other=0)


def _slots_of(split: Array, cached: Cached, first: Array, plan: _Plan) -> tuple[Array, Array]:
    """Return the range [begin, end) of the cached slots that a split attends to, of those before `first`.

    It is empty where the first new token has no page, as in a vacant slot of an engine, which stands at the end.
    """
    window, block_size = plan.scores.window, plan.block_size
    length = jnp.minimum(first, plan.layout.num_slots)
    seen = 0 if window is None else first_inside(window, length) // block_size * block_size  # by any query
    chunk = pl.cdiv(length - seen, plan.splits * block_size) * block_size
    begin = seen + split * chunk
    end = jnp.minimum(begin + chunk, length)
    if cached.pages_ref is None:
        return begin, end
    page, _ = locate(cached, first)
    return begin, jnp.where(in_pool(page, plan.layout), end, begin)


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


def _join(attended: Array, log_mass: Array, sinks: Array | None, dtype: jnp.dtype, interpret: bool) -> Array:
    """Return the mean over splits of the attention of each [B, splits, T, H, D], weighted by its mass, with sinks."""
    batch_size, _, num_tokens, num_heads, size = attended.shape
    return pl.pallas_call(
        _join_kernel,
        grid=(batch_size, num_tokens, num_heads),
        out_shape=out_shapes(
            jax.ShapeDtypeStruct((batch_size, num_tokens, num_heads, size), dtype), (attended, log_mass)
        ),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )((attended, log_mass, sinks))


def _join_kernel(inputs, out_ref):
    attended_ref, log_mass_ref, sinks_ref = inputs
    _, splits, _, _, size = attended_ref.shape
    b, t, h = (pl.program_id(axis) for axis in range(3))
    split, d = lax.iota(jnp.int32, splits), lax.iota(jnp.int32, pl.next_power_of_2(size))
    inside = d < size
    parts = plgpu.load(attended_ref.at[b, split[:, None], t, h, d[None]], mask=inside[None], other=0.0)
    log_masses = plgpu.load(log_mass_ref.at[b, split, t, h])
    top, of_sink = jnp.max(log_masses), jnp.float32(0)
    if sinks_ref is not None:
        score = plgpu.load(sinks_ref.at[h]).astype(jnp.float32) * LOG2_E
        top = jnp.maximum(top, score)
        of_sink = jnp.exp2(score - top)
    weights = jnp.exp2(log_masses - top)
    mean = jnp.sum(parts * weights[:, None], axis=0) / (jnp.sum(weights) + of_sink)
    plgpu.store(out_ref.at[b, t, h, d], mean.astype(out_ref.dtype), mask=inside)
