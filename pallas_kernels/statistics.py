"""First launch of a verification: statistics of every tile of the rows that drafts stand in, and the uniforms.

The kernel is bound by memory. It reads each row once, in programs that share no work. The first program of each row
also draws the uniforms of its draft, while the loads of the other programs are on their way.
"""

from functools import partial
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import threefry
from pallas_kernels.launch import Leaf, Ref, call
from pallas_kernels.rows import Batch, Rows, count_drafts, default_tile_size, exp, finite, inverse, twice_where_nan
from pallas_kernels.triton import plgpu


class Statistics(NamedTuple, Generic[Leaf]):
    """Statistics of the N tiles of the K target rows, then of the K draft rows, as one array of R = 2K rows.

    Where the log-normalisers of the draft rows are known, these rows are left out, and R = K. Rows at and after the
    number of drafts of a sequence are not written.
    """

    top: Leaf  # [B, R, N] largest kept logit of the tile
    mass: Leaf  # [B, R, N] sum of exp((logit - top) / temperature); in greedy rows what `_greedy_mass` returns
    weighted: Leaf | None  # [B, R, N] sum of exp(x) x with x = (logit - top) / temperature, for the entropy
    token: Leaf  # [B, 2K] logit of the draft token in the target rows, then in the draft rows; -inf if it is not kept
    uniforms: Leaf  # [B, K + 2] one uniform to accept each draft, then two to draw the token after them


class Streams(NamedTuple):
    """The numbers that are folded into a sequence's first key for each purpose of the uniforms."""

    accept: int  # accept + i * stride for draft i
    residual: int  # for the two uniforms of the token after the accepted drafts
    stride: int


class Part(NamedTuple):
    """The drafts whose rows one launch reduces, after earlier launches for the drafts before them."""

    first: int
    end: int
    statistics: Statistics[Array] | None = None  # of the drafts before `first`; the launch continues them in place
    num_accepted: Array | None = None  # [B] int32; a sequence that accepted fewer than `first` drafts is skipped


class _Place(NamedTuple):
    """Where one program works."""

    sequence: Array
    position: Array  # of the draft
    row: Array  # of the statistics
    tile: Array


def row_statistics(
    key_data: Array,
    batch: Batch[Array],
    *,
    streams: Streams,
    part: Part | None = None,
    entropy: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> Statistics[Array]:
    """Reduce the rows that drafts stand in.

    Args:
        key_data: [2], [B, 2] or [B, K+1, 2] uint32, words of threefry keys.
        batch: the rows to verify, K >= 1. The last target row of each sequence is not read.
        streams: numbers that name the random streams.
        part: the drafts whose rows are reduced; None for all of them.
        entropy: whether to fill `weighted`.
        tile_size: tokens a program reads, a power of two; None chooses it.
        num_warps: warps of each program.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        Statistics, with arrays of float32.
    """
    batch_size, num_drafts = batch.target.shape[0], batch.num_drafts
    part = part or Part(0, num_drafts)
    num_sides = 1 if batch.draft is None or batch.draft.log_normalizer is not None else 2  # target, and draft
    if tile_size is None:
        tile_size = default_tile_size(batch_size * num_drafts * num_sides, batch.target.vocab_size)
    num_tiles = pl.cdiv(batch.target.vocab_size, tile_size)
    tiles = jax.ShapeDtypeStruct((batch_size, num_drafts * num_sides, num_tiles), jnp.float32)
    outputs = Statistics(
        tiles,
        tiles,
        tiles if entropy else None,
        jax.ShapeDtypeStruct((batch_size, 2 * num_drafts), jnp.float32),
        jax.ShapeDtypeStruct((batch_size, num_drafts + 2), jnp.float32),
    )
    static = {"first": part.first, "end": part.end, "streams": streams, "tile_size": tile_size, "interpret": interpret}
    return call(
        partial(_statistics_kernel, **static),
        outputs,
        (key_data, batch._replace(bonus_tokens=None), part.num_accepted, part.statistics),
        grid=(batch_size, (part.end - part.first) * num_sides, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
        begun=part.statistics,
    )


def _statistics_kernel(
    inputs, out: Statistics[Ref], *, first: int, end: int, streams: Streams, tile_size: int, interpret: bool
):
    key_data, batch, num_accepted, _ = inputs
    target, draft, num_drafts = batch.target, batch.draft, batch.tokens.shape[1]
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    is_target = row < end - first
    position = first + jnp.where(is_target, row, row - (end - first))
    is_needed = position < count_drafts(batch, sequence)
    if num_accepted is not None:
        is_needed &= plgpu.load(num_accepted.at[sequence]) >= first
    token = plgpu.load(batch.tokens.at[sequence, position])
    # A row is loaded before it is known to be needed, which saves a load's latency, unless most rows are not.
    may_read = is_needed if num_accepted is not None else None
    reduce_tile = partial(_reduce_tile, out=out, tile_size=tile_size, interpret=interpret)

    @pl.when(is_target)
    def _():
        reduce_tile(target, _Place(sequence, position, position, tile), token, is_needed, may_read)

    if draft is not None and draft.log_normalizer is None:

        @pl.when(~is_target & (draft.load_temperature(sequence) > 0))
        def _():
            place = _Place(sequence, position, num_drafts + position, tile)
            reduce_tile(draft, place, token, is_needed, may_read)

    @pl.when((tile == 0) & is_target)
    def _():
        logit = target.load(target.locate(sequence, position), token, is_needed)
        plgpu.store(out.token.at[sequence, position], logit)
        if draft is not None:
            logit = draft.load(draft.locate(sequence, position), token, is_needed)
            plgpu.store(out.token.at[sequence, num_drafts + position], logit)
        key = threefry.load_key(key_data, sequence, 0)
        # The program of the first draft also draws the two uniforms of the residual, in lanes 1 and 2.
        lane = jax.lax.iota(jnp.int32, 4)
        data = jnp.where(lane == 0, position * streams.stride + streams.accept, streams.residual)
        uniforms = threefry.uniform(threefry.fold_in(key, data), jnp.maximum(lane - 1, 0))
        index = jnp.where(lane == 0, position, num_drafts + lane - 1)
        plgpu.store(out.uniforms.at[sequence, index], uniforms, mask=(lane == 0) | ((position == 0) & (lane < 3)))


def _reduce_tile(
    rows: Rows[Ref],
    place: _Place,
    token: Array,
    is_needed: Array,
    may_read: Array | None,
    *,
    out: Statistics[Ref],
    tile_size: int,
    interpret: bool,
):
    """Store the statistics of a tile if its row is needed; its logits are loaded where `may_read`, None everywhere."""
    sequence, position, row, tile = place
    ids = rows.whole_ids(tile * tile_size + jax.lax.iota(jnp.int32, tile_size))
    at = rows.locate(sequence, position)
    may_read = is_needed if rows.rows is not None else may_read
    loaded = rows.load(at, ids, may_read, keeps_nan=True)

    @pl.when(is_needed)
    def _():
        temperature = rows.load_temperature(sequence)

        def reduce(parts: list[Array]) -> tuple[Array, ...]:
            (logits,) = parts
            top = jnp.max(logits)
            top = jnp.where(top > -jnp.inf, top, -jnp.inf)
            distance = logits - finite(top)
            weights = exp(distance, inverse(temperature), flush=not interpret)
            if out.weighted is None:
                return top, jnp.sum(weights)
            exponent = distance * inverse(temperature)
            return top, jnp.sum(weights), jnp.sum(jnp.where(weights > 0, weights * exponent, 0))

        top, mass, *weighted = twice_where_nan(reduce, [loaded], lambda top, mass, *_: mass)
        if rows.temperature is not None:
            greedy_mass = partial(_greedy_mass, rows, at, token, loaded, ids, top)
            mass = jax.lax.cond(temperature == 0, greedy_mass, lambda: mass)
        plgpu.store(out.top.at[sequence, row, tile], top)
        plgpu.store(out.mass.at[sequence, row, tile], mass)
        if out.weighted is not None:
            plgpu.store(out.weighted.at[sequence, row, tile], *weighted)


def _greedy_mass(rows: Rows[Ref], at: tuple[Array, ...], token: Array, logits: Array, ids: Array, top: Array) -> Array:
    """Return 1 if a token of the tile beats the draft's; in a part of a vocabulary the lowest id with the logit `top`.

    The logit of the draft's token may be on another device.
    """
    if rows.first_id is not None:
        return jnp.min(jnp.where(logits == top, ids, jnp.int32(2**24)).astype(jnp.float32))
    logit = rows.load(at, token)
    return jnp.max(((logits > logit) | ((logits == logit) & (ids < token))).astype(jnp.float32))
