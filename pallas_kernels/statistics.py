"""Statistics of the rows that drafts stand in: maximum and mass of every tile of the vocabulary, the draft's logit.

Bound by memory: each row is read once, by programs that share no work. The uniforms of a verification are drawn here
too, by the first program of each row, while the loads of the others are on their way.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import threefry
from pallas_kernels.rows import Rows, call, count_drafts, default_tile_size, exp, finite, inverse
from pallas_kernels.triton import plgpu


class Statistics(NamedTuple):
    """Of N tiles of K target rows, then of the K draft rows where their log-normaliser is not known: R = K or 2K.

    Rows at and after the number of drafts of a sequence are not written.
    """

    top: Array  # [B, R, N] largest kept logit of the tile
    mass: Array  # [B, R, N] sum of exp((logit - top) / temperature); in greedy rows 1 if a token beats the draft's
    weighted: Array | None  # [B, R, N] sum of exp(x) x, x = (logit - top) / temperature; for the entropy
    token: Array  # [B, 2K] logit of the draft's token in the target rows, then in the draft rows; -inf if not kept
    uniforms: Array  # [B, K + 2] one to accept each draft, two to draw the token after the accepted ones


class Streams(NamedTuple):
    """What is folded into the key of a sequence's first position for each purpose: accept + i * stride, residual."""

    accept: int
    residual: int
    stride: int


def row_statistics(
    key_data: Array,
    tokens: Array,
    num_tokens: Array | None,
    target: Rows,
    draft: Rows | None,
    *,
    streams: Streams,
    positions: tuple[int, int] | None = None,
    begun: Statistics | None = None,
    num_accepted: Array | None = None,
    entropy: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> Statistics:
    """Reduce the rows that drafts stand in.

    Args:
        key_data: [2], [B, 2] or [B, K+1, 2] uint32.
        tokens: [B, K] int32.
        num_tokens: [B] int32 or None.
        target: of K+1 rows a sequence; the last is not read.
        draft: of K rows, or None.
        streams: names of the random streams.
        positions: the first and the end of the drafts whose rows are reduced; None for all.
        begun: statistics that hold earlier drafts already, continued in place.
        num_accepted: [B] int32, with `begun`: sequences that accepted less than all earlier drafts are skipped.
        entropy: fill `weighted`.
        tile_size: tokens a program, a power of two.
    """
    batch_size, num_drafts = tokens.shape
    first, end = positions or (0, num_drafts)
    parts = 1 if draft is None or draft.log_normalizer is not None else 2
    if tile_size is None:
        tile_size = default_tile_size(batch_size * num_drafts * parts, target.vocab_size)
    num_tiles = pl.cdiv(target.vocab_size, tile_size)
    tiles = jax.ShapeDtypeStruct((batch_size, num_drafts * parts, num_tiles), jnp.float32)
    outputs = Statistics(
        tiles,
        tiles,
        tiles if entropy else None,
        jax.ShapeDtypeStruct((batch_size, 2 * num_drafts), jnp.float32),
        jax.ShapeDtypeStruct((batch_size, num_drafts + 2), jnp.float32),
    )
    return call(
        partial(_statistics_kernel, first=first, end=end, streams=streams, tile_size=tile_size, interpret=interpret),
        outputs,
        (key_data, tokens, num_tokens, target, draft, num_accepted, begun),
        grid=(batch_size, (end - first) * parts, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
        begun=begun,
    )


def _statistics_kernel(
    inputs, out: Statistics, *, first: int, end: int, streams: Streams, tile_size: int, interpret: bool
):
    key_data, tokens, num_tokens, target, draft, num_accepted, _ = inputs
    num_drafts = tokens.shape[1]
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    is_target = row < end - first
    position = first + jnp.where(is_target, row, row - (end - first))
    is_needed = position < count_drafts(tokens, num_tokens, sequence)
    if num_accepted is not None:
        is_needed &= plgpu.load(num_accepted.at[sequence]) >= first
    token = plgpu.load(tokens.at[sequence, position])
    # Dense rows are read before it is known whether they are needed: that is a load sooner.
    may_read = is_needed if num_accepted is not None else None

    @pl.when(is_target)
    def _():
        _reduce_tile(target, sequence, position, position, tile, token, is_needed, may_read, out, tile_size, interpret)

    if draft is not None and draft.log_normalizer is None:

        @pl.when(~is_target & (draft.load_temperature(sequence) > 0))
        def _():
            row = num_drafts + position
            _reduce_tile(draft, sequence, position, row, tile, token, is_needed, may_read, out, tile_size, interpret)

    @pl.when((tile == 0) & is_target)
    def _():
        logit = target.load(target.at(sequence, position), token, is_needed)
        plgpu.store(out.token.at[sequence, position], logit)
        if draft is not None:
            logit = draft.load(draft.at(sequence, position), token, is_needed)
            plgpu.store(out.token.at[sequence, num_drafts + position], logit)
        key = threefry.load_key(key_data, sequence, 0)
        # The two uniforms of the residual are drawn with the first draft's.
        lane = jax.lax.iota(jnp.int32, 4)
        data = jnp.where(lane == 0, position * streams.stride + streams.accept, streams.residual)
        uniforms = threefry.uniform(threefry.fold_in(key, data), jnp.maximum(lane - 1, 0))
        index = jnp.where(lane == 0, position, num_drafts + lane - 1)
        plgpu.store(out.uniforms.at[sequence, index], uniforms, mask=(lane == 0) | ((position == 0) & (lane < 3)))


def _reduce_tile(
    rows: Rows, sequence, position, row, tile, token, is_needed, may_read, out: Statistics, tile_size, interpret
):
    ids = tile * tile_size + jax.lax.iota(jnp.int32, tile_size)
    at = rows.at(sequence, position)
    logits = rows.load(at, ids, is_needed if rows.rows is not None else may_read)
    pl.when(is_needed)(lambda: _store_tile(rows, sequence, at, row, tile, token, ids, logits, out, interpret))


def _store_tile(rows: Rows, sequence, at, row, tile, token, ids, logits, out: Statistics, interpret):
    temperature = rows.load_temperature(sequence)
    top = jnp.max(logits)
    distance = logits - finite(top)
    weights = exp(distance, inverse(temperature), flush=not interpret)
    mass = jnp.sum(weights)
    if rows.temperature is not None:

        def beaten():
            logit = rows.load(at, token)
            return jnp.max(((logits > logit) | ((logits == logit) & (ids < token))).astype(jnp.float32))

        mass = jax.lax.cond(temperature == 0, beaten, lambda: mass)
    plgpu.store(out.top.at[sequence, row, tile], top)
    plgpu.store(out.mass.at[sequence, row, tile], mass)
    if out.weighted is not None:
        exponent = distance * inverse(temperature)
        weighted = jnp.sum(jnp.where(weights > 0, weights * exponent, 0))
        plgpu.store(out.weighted.at[sequence, row, tile], weighted)
