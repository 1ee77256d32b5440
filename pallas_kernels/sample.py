"""A token from every row by Gumbel-max in two levels, and the drafts that agree with it.

The first launch reads each row once and leaves the mass of every block of the vocabulary. The second, one program a
sequence, adds one Gumbel number to the log-mass of each block, then one to each logit of the best block.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import threefry
from pallas_kernels.rows import BLOCK_SIZE, Rows, call, count_drafts, exp, finite, inverse

ROWS_AT_ONCE = 8


class _Masses(NamedTuple):
    """Of N tiles and P blocks. Rows past the drafts of a sequence are not written."""

    top: Array  # [B, T, N] largest kept logit of the tile
    mass: Array  # [B, T, P] sum of exp((logit - top of its tile) / temperature) of the block; not of greedy rows
    best_id: Array | None  # [B, T, N] int32 lowest id of the largest logit, of greedy rows


def sample(
    key_data: Array,
    rows: Rows,
    tokens: Array | None = None,
    num_tokens: Array | None = None,
    bonus_tokens: Array | None = None,
    *,
    purpose: int | None = None,
    log_probs: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    pick_num_warps: int = 8,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array | None]:
    """Draw a token from every row; with drafts, emit the draws up to the first that is not the draft.

    Args:
        key_data: [2], [B, 2] or [B, T, 2] uint32.
        rows: of T rows a sequence.
        tokens: [B, T-1] int32 drafts, or None.
        num_tokens: [B] int32 or None.
        bonus_tokens: [B] int32, emitted where all drafts agree.
        purpose: what is folded into the key of a row; None for nothing.
        tile_size: tokens a program of the first launch, a power of two, a multiple of BLOCK_SIZE.

    Returns:
        tokens [B, T] int32, with drafts -1 after the last; number of accepted drafts [B] int32, or None; with
        `log_probs` the log-probability [B, T] float32 of each token.
    """
    batch_size, num_rows = rows.shape
    if tile_size is None:
        tile_size = default_tile_size(batch_size * num_rows, rows.vocab_size)
    num_tiles = pl.cdiv(rows.vocab_size, tile_size)
    shape = batch_size, num_rows
    masses = call(
        partial(_block_mass_kernel, tile_size=tile_size),
        _Masses(
            jax.ShapeDtypeStruct((*shape, num_tiles), jnp.float32),
            jax.ShapeDtypeStruct((*shape, num_tiles * (tile_size // BLOCK_SIZE)), jnp.float32),
            None if rows.temperature is None else jax.ShapeDtypeStruct((*shape, num_tiles), jnp.int32),
        ),
        (tokens, num_tokens, rows),
        grid=(*shape, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )
    return call(
        partial(_sample_kernel, purpose=purpose),
        (
            jax.ShapeDtypeStruct(shape, jnp.int32),
            None if tokens is None else jax.ShapeDtypeStruct((batch_size,), jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32) if log_probs else None,
        ),
        (key_data, tokens, num_tokens, bonus_tokens, rows, masses),
        grid=(batch_size,),
        num_warps=pick_num_warps,
        interpret=interpret,
    )


def default_tile_size(num_rows: int, vocab_size: int) -> int:
    """Tiles small enough that a small batch still fills the device."""
    tile_size = 4096
    while tile_size > 2048 and num_rows * pl.cdiv(vocab_size, tile_size) < 256:
        tile_size //= 2
    return max(BLOCK_SIZE, min(tile_size, pl.next_power_of_2(vocab_size)))


def _block_mass_kernel(inputs, out: _Masses, *, tile_size: int):
    tokens, num_tokens, rows = inputs
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    ids = tile * tile_size + jax.lax.iota(jnp.int32, tile_size)
    temperature = rows.load_temperature(sequence)
    is_needed = row >= 0 if tokens is None else row <= count_drafts(tokens, num_tokens, sequence)
    # Dense rows are read before it is known whether they are needed: that is a load sooner.
    logits = rows.load(rows.at(sequence, row), ids, None if rows.rows is None else is_needed)

    @pl.when(is_needed)
    def _():
        kept = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
        top = jnp.max(kept)
        plgpu.store(out.top.at[sequence, row, tile], top)

        def store_masses():
            weights = exp(kept - finite(top), inverse(temperature))
            num_blocks = tile_size // BLOCK_SIZE
            sums = jnp.sum(weights.reshape(num_blocks, BLOCK_SIZE), axis=1)
            plgpu.store(out.mass.at[sequence, row, tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)], sums)

        if out.best_id is None:
            store_masses()
            return
        pl.when(temperature != 0)(store_masses)

        @pl.when(temperature == 0)
        def _():
            plgpu.store(out.best_id.at[sequence, row, tile], tile * tile_size + jax.lax.argmax(kept, 0, jnp.int32))


def _sample_kernel(inputs, out, *, purpose: int | None):
    key_data, tokens, num_tokens, bonus_tokens, rows, masses = inputs
    out_tokens, out_num_accepted, out_log_probs = out
    num_rows = out_tokens.shape[1]
    sequence = pl.program_id(0)
    width = min(ROWS_AT_ONCE, pl.next_power_of_2(num_rows))
    firsts = range(0, num_rows, width)
    lanes = [first + jax.lax.iota(jnp.int32, width) for first in firsts]
    draws = [_draw(key_data, rows, masses, sequence, jnp.minimum(lane, num_rows - 1), purpose) for lane in lanes]
    if tokens is not None:
        num_accepted = count = count_drafts(tokens, num_tokens, sequence)
        for lane, (drawn, *_) in zip(lanes, draws, strict=True):
            draft = plgpu.load(tokens.at[sequence, lane], mask=lane < num_rows - 1, other=-1)
            num_accepted = jnp.minimum(num_accepted, jnp.min(jnp.where(draft == drawn, num_rows, lane)))
        plgpu.store(out_num_accepted.at[sequence], num_accepted)
    for lane, (drawn, top, log_mass, best) in zip(lanes, draws, strict=True):
        if bonus_tokens is not None:
            takes_bonus = (lane == num_accepted) & (num_accepted == count)
            drawn = jnp.where(takes_bonus, plgpu.load(bonus_tokens.at[sequence]).astype(jnp.int32), drawn)
        is_emitted = lane < num_rows if tokens is None else lane <= num_accepted
        plgpu.store(out_tokens.at[sequence, lane], jnp.where(is_emitted, drawn, -1), mask=lane < num_rows)
        if out_log_probs is not None:
            temperature = rows.load_temperature(sequence)
            row = jnp.minimum(lane, num_rows - 1)
            at = rows.at(jnp.broadcast_to(sequence, row.shape), row)
            logit = rows.load(at, jnp.maximum(drawn, 0), is_emitted & (drawn >= 0))
            log_prob = (logit - top) * inverse(temperature) - log_mass
            log_prob = jnp.where(temperature == 0, jnp.where(drawn == best, 0, -jnp.inf), log_prob)
            log_prob = jnp.where(is_emitted, log_prob, 0)
            plgpu.store(out_log_probs.at[sequence, lane], log_prob, mask=lane < num_rows)


def _draw(key_data, rows: Rows, masses: _Masses, sequence: Array, row: Array, purpose: int | None):
    """One token for each of the rows [N]; their tops, log-masses and greedy tokens."""
    vocab_size = rows.vocab_size
    temperature = rows.load_temperature(sequence)
    key = threefry.load_key(key_data, jnp.broadcast_to(sequence, row.shape), row)
    if purpose is not None:
        key = threefry.fold_in(key, purpose)
    key = tuple(word[:, None] for word in key)
    num_blocks = masses.mass.shape[2]
    shape = row.shape[0], pl.next_power_of_2(num_blocks)
    row_2d, block = jnp.broadcast_to(row[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    tile = block // (num_blocks // masses.top.shape[2])
    tops = plgpu.load(masses.top.at[sequence, row_2d, tile], mask=block < num_blocks, other=-jnp.inf)
    top = finite(jnp.max(tops, axis=1))
    mass = plgpu.load(masses.mass.at[sequence, row_2d, block], mask=block < num_blocks, other=0)
    distance = (tops - jnp.broadcast_to(top[:, None], shape)) * inverse(temperature)
    log_mass = jnp.log(jnp.sum(mass * jnp.exp(distance), axis=1))
    noise = threefry.gumbel(_spread(key, shape), min(BLOCK_SIZE, vocab_size) + block)
    scores = jnp.where(mass > 0, jnp.log(mass) + distance + noise, -jnp.inf)
    chosen = jax.lax.argmax(scores, 1, jnp.int32)

    shape = row.shape[0], BLOCK_SIZE
    row_2d, inside = jnp.broadcast_to(row[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    ids = jnp.broadcast_to(chosen[:, None] * BLOCK_SIZE, shape) + inside
    logits = rows.load(rows.at(jnp.broadcast_to(sequence, shape), row_2d), ids)
    distance = (logits - jnp.broadcast_to(top[:, None], shape)) * inverse(temperature)
    scores = jnp.where(distance > -jnp.inf, distance + threefry.gumbel(_spread(key, shape), inside), -jnp.inf)
    token = jnp.minimum(chosen * BLOCK_SIZE + jax.lax.argmax(scores, 1, jnp.int32), vocab_size - 1)
    log_mass = jnp.log(
        jnp.sum(jnp.where(mass > 0, mass * jnp.exp((tops - top[:, None]) * inverse(temperature)), 0), axis=1)
    )
    if masses.best_id is None:
        return token, top, log_mass, token
    num_tiles = masses.top.shape[2]
    shape = row.shape[0], pl.next_power_of_2(num_tiles)
    row_2d, tile = jnp.broadcast_to(row[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    tops = plgpu.load(masses.top.at[sequence, row_2d, tile], mask=tile < num_tiles, other=-jnp.inf)
    best = plgpu.load(masses.best_id.at[sequence, row, jax.lax.argmax(tops, 1, jnp.int32)])
    return jnp.where(temperature == 0, best, token), top, log_mass, best


def _spread(key: threefry.Key, shape: tuple[int, int]) -> threefry.Key:
    return tuple(jnp.broadcast_to(word, shape) for word in key)
