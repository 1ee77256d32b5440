"""Attention of a few new tokens a sequence to a cache addressed by position, which it also writes, in place.

The slots before a call are split among programs by the true length of each sequence, so that a long cache costs only
what it holds and short batches still fill the device. The program of the last split adds the new tokens, attended
causally, and writes them to the cache; the others read only slots before them. A second kernel joins the splits: where
the program that ends last did so, 5.6 microseconds became 7.8 (8 splits of 64 slots, 8 heads of 64 numbers).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.rows import out_shapes
from pallas_kernels.triton import plgpu

_PROGRAMS = 132  # that fill the device
_MAX_SPLITS = 16
_MIN_DOT = 16  # rows of the smallest matrix product
_MAX_ROWS = 64
_HIDDEN = -1e30  # a score of weight 0, finite so that a maximum over nothing but these is no NaN


def is_supported(query: Array, key_cache: Array) -> bool:
    """Whether the kernel takes these: 16-bit floats, head sizes 16, 32, ..., 256 and few enough queries."""
    num_tokens, num_heads, size = query.shape[1:]
    return (
        plgpu is not None
        and query.dtype == key_cache.dtype
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and size in (16, 32, 64, 128, 256)
        and num_tokens * (num_heads // key_cache.shape[2]) <= _MAX_ROWS
    )


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
    """Attend to the slots before `start` and causally to the new tokens, and write those to the slots from it on.

    Args:
        query: [B, T, H, D] bfloat16 or float16; T * H / kv heads <= 64.
        key: [B, T, kv heads, D] of the new tokens, of the same dtype.
        value: as key.
        key_cache: [B, S, kv heads, D] of the same dtype.
        value_cache: as key_cache.
        start: [B] int32, the slot of the first new token. Those past the end of the cache are not written.
        rotation: cosine and sine [B, T, D / 2] float32, by which the halves of queries and new keys are turned first.
        window: slots that a query sees, its own included; None is all before it.
        scale: of the scores; None is 1 / sqrt(D).
        softcap: c turns a score s into c tanh(s / c).
        interpret: run the kernel interpreted, on any platform.

    Returns:
        What the queries attended to [B, T, H, D], and the caches.

    Raises:
        NotImplementedError: for dtypes and sizes that the kernel does not take.
    """
    batch_size, num_tokens, num_heads, size = query.shape
    num_slots, kv_heads = key_cache.shape[1:3]
    if not is_supported(query, key_cache):
        raise NotImplementedError(
            "decode_attention takes float16 or bfloat16, head sizes 16, 32, ..., 256 and T * H / kv heads <= "
            f"{_MAX_ROWS}, got {query.dtype} {query.shape} and a cache {key_cache.dtype} {key_cache.shape}"
        )
    group = num_heads // kv_heads
    scale = size**-0.5 if scale is None else scale
    num_rows = max(_MIN_DOT, pl.next_power_of_2(num_tokens * group))  # row r is token r // group, head r % group
    num_new = max(_MIN_DOT, pl.next_power_of_2(num_tokens))
    splits = min(_MAX_SPLITS, pl.next_power_of_2(pl.cdiv(_PROGRAMS, batch_size * kv_heads)))
    block_size, num_warps = (32, 2) if splits == 1 else (64, 4)  # slots read at a time; measured

    def kernel(inputs, out):
        heads_ref, key_in, value_in, start_ref, rotation_refs = inputs
        out_ref, log_mass_ref, key_out, value_out = out
        b, h, split = (pl.program_id(axis) for axis in range(3))
        row, d = lax.iota(jnp.int32, num_rows), lax.iota(jnp.int32, size)
        token, head = row // group, h * group + row % group

        def load_heads(token, head) -> Array:
            """Of the new tokens [N, D], turned."""
            exists = (token < num_tokens)[:, None]

            def load(ref, *index) -> Array:
                return plgpu.load(ref.at[b, token[:, None], *index], mask=exists, other=0.0)

            x = load(heads_ref, head, d[None])
            if rotation is None:
                return x
            half = size // 2
            cos, sin = (load(ref, (d % half)[None]) for ref in rotation_refs)
            partner = load(heads_ref, head, ((d + half) % size)[None]).astype(jnp.float32)
            turned = x.astype(jnp.float32) * cos + jnp.where((d < half)[None], -partner, partner) * sin
            return turned.astype(x.dtype)

        queries = load_heads(token, head[:, None])
        first = start_ref[b]
        seen = 0 if window is None else jnp.clip(first - window + 1, 0, num_slots)  # the first slot of any query
        length = jnp.minimum(first, num_slots)
        chunk = pl.cdiv(length - seen, splits * block_size) * block_size
        begin = jnp.minimum(seen + split * chunk, length)
        end = jnp.minimum(begin + chunk, length)

        def fold(carry, keys, values, slot, is_seen):
            total, top, mass = carry
            scores = plgpu.dot(queries, keys.T) * scale
            if softcap is not None:
                scores = softcap * (1 - 2 / (1 + jnp.exp(2 / softcap * scores)))  # tanh
            if window is not None:
                is_seen &= (first + token)[:, None] - slot[None] < window
            scores = jnp.where(is_seen, scores, _HIDDEN)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights, shrink = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
            total = total * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
            return total, new_top, mass * shrink + jnp.sum(weights, axis=1)

        def block(index, carry):
            slot = begin + index * block_size + lax.iota(jnp.int32, block_size)
            inside = (slot < end)[:, None]
            keys = plgpu.load(key_in.at[b, slot[:, None], h, d[None]], mask=inside, other=0.0)
            values = plgpu.load(value_in.at[b, slot[:, None], h, d[None]], mask=inside, other=0.0)
            return fold(carry, keys, values, slot, (slot < end)[None])

        def new_tokens(carry):
            i = lax.iota(jnp.int32, num_new)
            exists, fits = (i < num_tokens)[:, None], ((i < num_tokens) & (first + i < num_slots))[:, None]
            keys = load_heads(i, num_heads + h)
            values = plgpu.load(heads_ref.at[b, i[:, None], num_heads + kv_heads + h, d[None]], mask=exists, other=0.0)
            plgpu.store(key_out.at[b, (first + i)[:, None], h, d[None]], keys, mask=fits)
            plgpu.store(value_out.at[b, (first + i)[:, None], h, d[None]], values, mask=fits)
            return fold(carry, keys, values, first + i, (i[None] <= token[:, None]) & (i < num_tokens)[None])

        carry = jnp.zeros((num_rows, size), jnp.float32), jnp.full((num_rows,), _HIDDEN), jnp.zeros((num_rows,))
        carry = lax.fori_loop(0, pl.cdiv(end - begin, block_size), block, carry)
        total, top, mass = lax.cond(split == splits - 1, new_tokens, lambda carry: carry, carry)
        is_row = token < num_tokens
        safe_mass = jnp.where(mass > 0, mass, 1)
        attended = (total / safe_mass[:, None]).astype(out_ref.dtype)
        if splits == 1:
            plgpu.store(out_ref.at[b, token[:, None], head[:, None], d[None]], attended, mask=is_row[:, None])
        else:
            log_mass = jnp.where(mass > 0, top + jnp.log(safe_mass), -jnp.inf)
            plgpu.store(out_ref.at[b, split, token[:, None], head[:, None], d[None]], attended, mask=is_row[:, None])
            plgpu.store(log_mass_ref.at[b, split, token, head], log_mass, mask=is_row)

    shape = (batch_size, num_tokens, num_heads, size)
    if splits == 1:
        partial = jax.ShapeDtypeStruct(shape, query.dtype), jax.ShapeDtypeStruct((1,), jnp.float32)
    else:
        partial = tuple(
            jax.ShapeDtypeStruct((batch_size, splits, *rest), jnp.float32) for rest in (shape[1:], shape[1:-1])
        )
    inputs = jnp.concatenate([query, key, value], axis=2), key_cache, value_cache, start, rotation
    ((attended, log_mass, key_cache, value_cache),) = pl.pallas_call(
        kernel,
        grid=(batch_size, kv_heads, splits),
        out_shape=(out_shapes((*partial, key_cache, value_cache), inputs),),
        input_output_aliases={1: 2, 2: 3},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(inputs)
    if splits > 1:
        attended = _join(attended, log_mass, query.dtype, interpret)
    return attended, key_cache, value_cache


def _join(attended: Array, log_mass: Array, dtype: jnp.dtype, interpret: bool) -> Array:
    """The mean over splits of what each attended to [B, splits, T, H, D], weighted by its mass."""
    batch_size, splits, num_tokens, num_heads, size = attended.shape

    def kernel(attended_ref, log_mass_ref, out_ref):
        b, t, h = (pl.program_id(axis) for axis in range(3))
        split, d = lax.iota(jnp.int32, splits), lax.iota(jnp.int32, size)
        parts = plgpu.load(attended_ref.at[b, split[:, None], t, h, d[None]])
        log_masses = plgpu.load(log_mass_ref.at[b, split, t, h])
        weights = jnp.exp(log_masses - jnp.max(log_masses))
        mean = jnp.sum(parts * weights[:, None], axis=0) / jnp.sum(weights)
        plgpu.store(out_ref.at[b, t, h, d], mean.astype(dtype))

    return pl.pallas_call(
        kernel,
        grid=(batch_size, num_tokens, num_heads),
        out_shape=out_shapes(
            jax.ShapeDtypeStruct((batch_size, num_tokens, num_heads, size), dtype), (attended, log_mass)
        ),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )(attended, log_mass)
