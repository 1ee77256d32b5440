"""Attention of a few new tokens a sequence to a cache addressed by position, which the kernel also writes, in place.

The slots before the call are split among programs by the true length of each sequence, so that a long cache costs only
what it holds and small batches still fill the device. The program of the last split also attends to the new tokens,
causally, and writes them to the cache; the other programs read only slots before them. A second kernel joins the
splits.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import NUM_MULTIPROCESSORS, out_shapes
from pallas_kernels.triton import plgpu

_MAX_SPLITS = 16
_MIN_DOT = 16  # rows in the smallest matrix product
_MAX_ROWS = 64  # queries that one program holds
_HIDDEN = -1e30  # score of a slot that a query does not see; finite, so that a maximum over such scores is no NaN


class _Plan(NamedTuple):
    """What is known of a call when it is traced."""

    num_tokens: int
    group: int  # query heads of a kv head
    num_rows: int  # queries of a kv head, padded; row r is token r // group, head r % group
    num_new: int  # new tokens, padded
    num_slots: int
    splits: int
    block_size: int  # slots that are read at a time
    window: int | None
    scale: float
    softcap: float | None


class _Program(NamedTuple):
    """Where one program works."""

    sequence: Array
    kv_head: Array
    split: Array
    dims: Array  # [D] int32, the indices of the numbers of a head


class _Queries(NamedTuple):
    """The queries that a program attends from."""

    heads: Array  # [rows, D]
    token: Array  # [rows] int32 index of each query's token
    first: Array  # int32 slot of the first new token


def unsupported(query: Array, key_cache: Array) -> str | None:
    """Return why the kernel cannot attend with these queries to this cache, or None where it can."""
    num_tokens, num_heads, size = query.shape[1:]
    if query.dtype != key_cache.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel takes bfloat16 or float16 queries and cache, got {query.dtype} and {key_cache.dtype}"
    if size not in (16, 32, 64, 128, 256):
        return f"the kernel takes heads of size 16, 32, 64, 128 or 256, got {size}"
    num_queries = num_tokens * (num_heads // key_cache.shape[2])
    if num_queries > _MAX_ROWS:
        return f"the kernel takes at most {_MAX_ROWS} queries for each kv head of a sequence, got {num_queries}"
    return None


def decode_attention(
    query: Array,
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    start: Array,
    rotation: tuple[Array, Array] | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Attend to the slots before `start` and causally to the new tokens, and write these to the slots from it on.

    Args:
        query: [B, T, H, D] bfloat16 or float16; T * H / kv heads <= 64.
        key: [B, T, kv heads, D] of the new tokens, of the same dtype.
        value: as `key`.
        key_cache: [B, S, kv heads, D] of the same dtype.
        value_cache: as `key_cache`.
        start: [B] int32, the slot of the first new token. Tokens past the end of the cache are not written.
        rotation: cosine and sine [B, T, D / 2] float32 that first turn the halves of queries and new keys.
        window: number of slots that a query sees, its own included; None is all before it.
        scale: factor of the scores; None is 1 / sqrt(D).
        softcap: number c that turns a score s into c tanh(s / c); None for none.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        What the queries attended to [B, T, H, D], and the two caches.

    Raises:
        NotImplementedError: for dtypes and sizes that the kernel does not take.
    """
    reason = unsupported(query, key_cache)
    if reason is not None:
        raise NotImplementedError(reason)
    plan = _plan(query.shape, key_cache.shape, window, scale, softcap)
    batch_size, *shape = query.shape
    if plan.splits == 1:
        results = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)
    else:
        results = tuple(
            jax.ShapeDtypeStruct((batch_size, plan.splits, *rest), jnp.float32) for rest in (shape, shape[:-1])
        )
    inputs = jnp.concatenate([query, key, value], axis=2), key_cache, value_cache, start, rotation
    ((attended, log_mass, key_cache, value_cache),) = pl.pallas_call(
        partial(_attention_kernel, plan=plan),
        grid=(batch_size, key_cache.shape[2], plan.splits),
        out_shape=(out_shapes((*results, key_cache, value_cache), inputs),),
        input_output_aliases={1: 2, 2: 3},
        compiler_params=plgpu.CompilerParams(num_warps=2 if plan.splits == 1 else 4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(inputs)
    if plan.splits > 1:
        attended = _join(attended, log_mass, query.dtype, interpret)
    return attended, key_cache, value_cache


def _plan(
    query_shape: tuple[int, ...],
    cache_shape: tuple[int, ...],
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> _Plan:
    (batch_size, num_tokens, num_heads, size), (num_slots, kv_heads) = query_shape, cache_shape[1:3]
    splits = min(_MAX_SPLITS, pl.next_power_of_2(pl.cdiv(NUM_MULTIPROCESSORS, batch_size * kv_heads)))
    return _Plan(
        num_tokens=num_tokens,
        group=num_heads // kv_heads,
        num_rows=max(_MIN_DOT, pl.next_power_of_2(num_tokens * (num_heads // kv_heads))),
        num_new=max(_MIN_DOT, pl.next_power_of_2(num_tokens)),
        num_slots=num_slots,
        splits=splits,
        block_size=32 if splits == 1 else 64,
        window=window,
        scale=size**-0.5 if scale is None else scale,
        softcap=softcap,
    )


def _attention_kernel(inputs, out, *, plan: _Plan):
    heads_ref, key_in, value_in, start_ref, _ = inputs
    out_ref, log_mass_ref, _, _ = out
    b, h, split = (pl.program_id(axis) for axis in range(3))
    size = heads_ref.shape[-1]
    row, d = lax.iota(jnp.int32, plan.num_rows), lax.iota(jnp.int32, size)
    program = _Program(b, h, split, d)
    token, head = row // plan.group, h * plan.group + row % plan.group
    heads = _load_heads(inputs, program, token, head[:, None], plan)
    queries = _Queries(heads, token, start_ref[b])
    begin, end = _slots_of(program, queries.first, plan)

    def block(index, carry):
        slot = begin + index * plan.block_size + lax.iota(jnp.int32, plan.block_size)
        inside = (slot < end)[:, None]
        keys = plgpu.load(key_in.at[b, slot[:, None], h, d[None]], mask=inside, other=0.0)
        values = plgpu.load(value_in.at[b, slot[:, None], h, d[None]], mask=inside, other=0.0)
        return _fold(carry, queries, keys, values, slot, (slot < end)[None], plan)

    def new_tokens(carry):
        return _fold(carry, queries, *_write_new(inputs, out, program, queries, plan), plan)

    carry = (
        jnp.zeros((plan.num_rows, size), jnp.float32),
        jnp.full((plan.num_rows,), _HIDDEN),
        jnp.zeros((plan.num_rows,)),
    )
    carry = lax.fori_loop(0, pl.cdiv(end - begin, plan.block_size), block, carry)
    total, top, mass = lax.cond(split == plan.splits - 1, new_tokens, lambda carry: carry, carry)
    is_row = token < plan.num_tokens
    safe_mass = jnp.where(mass > 0, mass, 1)
    attended = (total / safe_mass[:, None]).astype(out_ref.dtype)
    if plan.splits == 1:
        plgpu.store(out_ref.at[b, token[:, None], head[:, None], d[None]], attended, mask=is_row[:, None])
    else:
        log_mass = jnp.where(mass > 0, top + jnp.log(safe_mass), -jnp.inf)
        plgpu.store(out_ref.at[b, split, token[:, None], head[:, None], d[None]], attended, mask=is_row[:, None])
        plgpu.store(log_mass_ref.at[b, split, token, head], log_mass, mask=is_row)


def _load_heads(inputs, program: _Program, token: Array, head: Array, plan: _Plan) -> Array:
    """Load heads [N, D] of new tokens [N], and turn them where there is a rotation."""
    heads_ref, *_, rotation = inputs
    b, d, size = program.sequence, program.dims, heads_ref.shape[-1]
    exists = (token < plan.num_tokens)[:, None]

    def load(ref, *index) -> Array:
        return plgpu.load(ref.at[b, token[:, None], *index], mask=exists, other=0.0)

    x = load(heads_ref, head, d[None])
    if rotation is None:
        return x
    half = size // 2
    cos, sin = (load(ref, (d % half)[None]) for ref in rotation)
    partner = load(heads_ref, head, ((d + half) % size)[None]).astype(jnp.float32)
    turned = x.astype(jnp.float32) * cos + jnp.where((d < half)[None], -partner, partner) * sin
    return turned.astype(x.dtype)


def _slots_of(program: _Program, first: Array, plan: _Plan) -> tuple[Array, Array]:
    """Return the range [begin, end) of the cached slots that the program attends to, of those before `first`."""
    seen = 0 if plan.window is None else jnp.clip(first - plan.window + 1, 0, plan.num_slots)  # by any query
    length = jnp.minimum(first, plan.num_slots)
    chunk = pl.cdiv(length - seen, plan.splits * plan.block_size) * plan.block_size
    begin = jnp.minimum(seen + program.split * chunk, length)
    end = jnp.minimum(begin + chunk, length)
    return begin, end


def _fold(carry, queries: _Queries, keys: Array, values: Array, slot: Array, is_seen: Array, plan: _Plan):
    """Add what the queries attend to in some slots to the carry: weighted values, largest score, mass."""
    total, top, mass = carry
    scores = plgpu.dot(queries.heads, keys.T) * plan.scale
    if plan.softcap is not None:
        scores = plan.softcap * (1 - 2 / (1 + jnp.exp(2 / plan.softcap * scores)))  # softcap * tanh(scores / softcap)
    if plan.window is not None:
        is_seen &= (queries.first + queries.token)[:, None] - slot[None] < plan.window
    scores = jnp.where(is_seen, scores, _HIDDEN)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights, shrink = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
    total = total * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return total, new_top, mass * shrink + jnp.sum(weights, axis=1)


def _write_new(inputs, out, program: _Program, queries: _Queries, plan: _Plan):
    """Write the new tokens to the cache; return their keys, values and slots, and which of them each query sees."""
    heads_ref, key_out, value_out = inputs[0], *out[2:]
    b, h, d, first = program.sequence, program.kv_head, program.dims, queries.first
    kv_heads = key_out.shape[2]
    num_heads = kv_heads * plan.group
    i = lax.iota(jnp.int32, plan.num_new)
    exists = (i < plan.num_tokens)[:, None]
    fits = ((i < plan.num_tokens) & (first + i < plan.num_slots))[:, None]
    keys = _load_heads(inputs, program, i, num_heads + h, plan)
    values = plgpu.load(heads_ref.at[b, i[:, None], num_heads + kv_heads + h, d[None]], mask=exists, other=0.0)
    plgpu.store(key_out.at[b, (first + i)[:, None], h, d[None]], keys, mask=fits)
    plgpu.store(value_out.at[b, (first + i)[:, None], h, d[None]], values, mask=fits)
    return keys, values, first + i, (i[None] <= queries.token[:, None]) & (i < plan.num_tokens)[None]


def _join(attended: Array, log_mass: Array, dtype: jnp.dtype, interpret: bool) -> Array:
    """Return the mean over splits of what each attended to [B, splits, T, H, D], weighted by its mass."""
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
    )(attended, log_mass)


def _join_kernel(attended_ref, log_mass_ref, out_ref):
    _, splits, _, _, size = attended_ref.shape
    b, t, h = (pl.program_id(axis) for axis in range(3))
    split, d = lax.iota(jnp.int32, splits), lax.iota(jnp.int32, size)
    parts = plgpu.load(attended_ref.at[b, split[:, None], t, h, d[None]])
    log_masses = plgpu.load(log_mass_ref.at[b, split, t, h])
    weights = jnp.exp(log_masses - jnp.max(log_masses))
    mean = jnp.sum(parts * weights[:, None], axis=0) / jnp.sum(weights)
    plgpu.store(out_ref.at[b, t, h, d], mean.astype(out_ref.dtype))
