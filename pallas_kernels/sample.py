"""Gumbel-max draws from rows in two levels, and the drafts that agree with them.

The first launch reads each row once and stores the mass of every block of the vocabulary. In the second launch one
program a row adds a Gumbel number to the log-mass of each block, and then one to each logit of the best block. Where
there are drafts, the last program of a sequence emits the drafts that agree with the draws.

The second launch is bound by its random numbers, of which a row takes one a block and one a token of a block.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import threefry
from pallas_kernels.launch import Joined, Leaf, Ref, call, is_last
from pallas_kernels.rows import (
    BLOCK_SIZE,
    Batch,
    Rows,
    Verdict,
    block_max,
    block_sum,
    count_drafts,
    exp,
    finite,
    in_blocks,
    in_parts,
    inverse,
    marked,
    over_blocks,
    tile_of_blocks,
    token_log_prob,
    twice_where_nan,
)
from pallas_kernels.triton import plgpu


class _Masses(NamedTuple, Generic[Leaf]):
    """Masses of the P blocks of each row. Rows past the drafts of a sequence are not written."""

    top: Leaf  # [B, T, P] largest kept logit of the block
    mass: Leaf  # [B, T, P] sum of exp((logit - top) / temperature)
    arrivals: Leaf | None  # [B] int32 zeros, for the programs of the next launch; None without drafts


class _Drawn(NamedTuple, Generic[Leaf]):
    tokens: Leaf  # [B, T] int32, `marked`
    log_probs: Leaf | None  # [B, T] float32


def sample(
    key_data: Array,
    batch: Batch[Array],
    *,
    purpose: int | None = None,
    log_probs: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    draw_num_warps: int = 8,
    interpret: bool = False,
) -> Verdict[Array]:
    """Draw a token from every target row; where there are drafts, emit the draws up to the first that differs.

    Args:
        key_data: [2], [B, 2] or [B, T, 2] uint32, words of threefry keys.
        batch: target rows [B, T, V], and drafts [B, T-1] or None. The draft distribution is not read.
        purpose: number that is folded into the key of each row; None folds nothing.
        log_probs: whether to fill `Verdict.log_probs`.
        tile_size: tokens a program of launch 1 reads, a power of two and a multiple of BLOCK_SIZE; None chooses it.
        num_warps: warps of each program of launch 1.
        draw_num_warps: warps of each program of launch 2.
        interpret: run the kernels interpreted, on any platform.

    Returns:
        Verdict. Without drafts it has a token of every row, and no count.
    """
    batch = batch._replace(draft=None)
    has_drafts = batch.tokens is not None
    batch_size, num_rows = shape = batch.target.shape
    if tile_size is None:
        tile_size = tile_of_blocks(batch_size * num_rows, batch.target.vocab_size)
    num_tiles = pl.cdiv(batch.target.vocab_size, tile_size)
    outputs = _outputs(shape, num_tiles * (tile_size // BLOCK_SIZE), has_drafts, log_probs)
    masses = drawn = verdict = None
    for first, end in in_parts(batch.target, num_rows) if has_drafts else [(0, num_rows)]:
        num_accepted = None if verdict is None else verdict.num_accepted
        masses = call(
            partial(_block_mass_kernel, first=first, tile_size=tile_size, interpret=interpret),
            outputs[0],
            (batch._replace(bonus_tokens=None), num_accepted, masses),
            begun=masses,
            grid=(batch_size, end - first, num_tiles),
            num_warps=num_warps,
            interpret=interpret,
        )
        begun = masses.arrivals, drawn
        arrivals, drawn, verdict = call(
            partial(_draw_kernel, first=first, end=end, purpose=purpose, interpret=interpret),
            (outputs[0].arrivals, *outputs[1:]),
            (key_data, batch, masses._replace(arrivals=None), num_accepted, begun),
            begun=begun,
            grid=(batch_size, end - first),
            num_warps=draw_num_warps,
            interpret=interpret,
        )
        masses = masses._replace(arrivals=arrivals)
    if verdict is not None:
        return verdict
    assert drawn is not None, "at least one range of rows is drawn"
    return Verdict(drawn.tokens, None, drawn.log_probs)


class Draws(NamedTuple, Generic[Leaf]):
    """Samples of the rows if each had the ids of one part of the vocabulary alone."""

    token: Leaf  # [B, T] float32, which has all ids
    score: Leaf  # [B, T] score of the token's block, relative to `top`; in greedy rows the largest logit
    top: Leaf  # [B, T] finite logit that score and mass are relative to
    mass: Leaf | None  # [B, T] sum of exp((logit - top) / temperature)
    logit: Leaf | None  # [B, T] logit of the token, or of the bonus token in its row, -inf where another part has that


def draws(
    key_data: Array,
    batch: Batch[Array],
    first_block: Array,
    *,
    purpose: int | None = None,
    log_probs: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    draw_num_warps: int = 8,
    interpret: bool = False,
) -> Draws[Array]:
    """Draw from every row of a part of the vocabulary; `choose_draws` chooses among all parts.

    The arguments that are not named here are as `sample` takes them.

    Args:
        key_data: as `sample` takes it.
        batch: as `sample` takes it, whose rows have `first_id`.
        first_block: [1] int32, the blocks of the parts before this one.

    Returns:
        Draws of this part.
    """
    batch = batch._replace(draft=None)
    batch_size, num_rows = shape = batch.target.shape
    if tile_size is None:
        tile_size = tile_of_blocks(batch_size * num_rows, batch.target.vocab_size)
    num_tiles = pl.cdiv(batch.target.vocab_size, tile_size)
    masses = call(
        partial(_block_mass_kernel, first=0, tile_size=tile_size, interpret=interpret),
        _outputs(shape, num_tiles * (tile_size // BLOCK_SIZE), False, False)[0],
        (batch._replace(bonus_tokens=None), None, None),
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
    more = numbers if log_probs else None
    return call(
        partial(_part_draw_kernel, purpose=purpose),
        Draws(numbers, numbers, numbers, more, more),
        (key_data, batch, masses, first_block),
        grid=(batch_size, num_rows),
        num_warps=draw_num_warps,
        interpret=interpret,
    )


def choose_draws(batch: Batch[Array], parts: Draws[Joined], *, interpret: bool = False) -> Verdict[Array]:
    """Emit the outputs of `sample`, given the draws of all n parts.

    Args:
        batch: the rows to verify, whose logits are not read.
        parts: arrays [B, n T] in place of [B, T].
        interpret: run the kernel interpreted, on any platform.

    Returns:
        Verdict. Without drafts it has a token of every row, and no count.
    """
    batch_size, num_rows = parts.token.part_shape
    _, drawn, verdict = _outputs((batch_size, num_rows), 1, batch.tokens is not None, parts.mass is not None)
    drawn, verdict = call(
        _choice_kernel, (drawn, verdict), (batch, parts), grid=(batch_size,), num_warps=1, interpret=interpret
    )
    return Verdict(drawn.tokens, None, drawn.log_probs) if verdict is None else verdict


def _outputs(
    shape: tuple[int, int], num_blocks: int, has_drafts: bool, log_probs: bool
) -> tuple[_Masses[jax.ShapeDtypeStruct], _Drawn[jax.ShapeDtypeStruct], Verdict[jax.ShapeDtypeStruct] | None]:
    """Return the shapes and dtypes of the outputs of the two launches for the rows [B, T]."""
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32) if log_probs else None
    counts = jax.ShapeDtypeStruct(shape[:1], jnp.int32) if has_drafts else None
    blocks = jax.ShapeDtypeStruct((*shape, num_blocks), jnp.float32)
    verdict = Verdict(ids, counts, numbers) if has_drafts else None
    return _Masses(blocks, blocks, counts), _Drawn(ids, numbers), verdict


def _is_needed(batch: Batch[Ref], sequence: Array, row: Array) -> tuple[Array | None, Array]:
    """Return the number of drafts of the sequence, None without drafts, and whether the sequence has the row."""
    if batch.tokens is None:
        return None, row >= 0
    count = count_drafts(batch, sequence)
    return count, row <= count


def _block_mass_kernel(inputs, out: _Masses[Ref], *, first: int, tile_size: int, interpret: bool):
    batch, num_accepted, _ = inputs
    rows = batch.target
    sequence, row, tile = pl.program_id(0), first + pl.program_id(1), pl.program_id(2)
    parts, blocks = in_blocks(tile, tile_size, rows.logits.dtype)
    temperature = rows.load_temperature(sequence)
    arrivals = out.arrivals
    if arrivals is not None:
        pl.when((row == first) & (tile == 0))(lambda: plgpu.store(arrivals.at[sequence], tile))
    is_needed = _is_needed(batch, sequence, row)[1]
    may_read: Array | None = None
    if num_accepted is not None:
        is_needed &= plgpu.load(num_accepted.at[sequence]) >= first
    if num_accepted is not None or rows.rows is not None:
        may_read = is_needed  # otherwise a row is loaded before it is known to be needed: that saves a load's latency
    at = rows.locate(sequence, row)
    loaded = [rows.load(at, rows.whole_ids(ids), may_read, keeps_nan=True) for ids in parts]

    def reduce(logits: list[Array]) -> tuple[Array, ...]:
        top, scale = block_max(logits), inverse(temperature)
        weights = [exp(part - over_blocks(finite(top), part), scale, flush=not interpret) for part in logits]
        return top, block_sum(weights)

    @pl.when(is_needed)
    def _():
        top, mass = twice_where_nan(reduce, loaded, lambda _, mass: jnp.sum(mass))
        plgpu.store(out.top.at[sequence, row, blocks], top)
        plgpu.store(out.mass.at[sequence, row, blocks], mass)


def _draw_kernel(inputs, out, *, first: int, end: int, purpose: int | None, interpret: bool):
    key_data, batch, masses, num_accepted, _ = inputs
    arrivals, drawn, verdict = out
    rows = batch.target
    sequence, row = pl.program_id(0), first + pl.program_id(1)
    # All is loaded before the row is known to be needed: that saves a load's latency.
    at = rows.locate(sequence, row)
    temperature = rows.load_temperature(sequence)
    key = threefry.load_key(key_data, sequence, row)
    tops, mass = _load_masses(masses, sequence, row)
    count, is_needed = _is_needed(batch, sequence, row)
    if num_accepted is not None:
        is_needed &= plgpu.load(num_accepted.at[sequence]) >= first
    if purpose is not None:
        key = threefry.fold_in(key, purpose)

    @pl.when(is_needed)
    def _():
        top = finite(jnp.max(tops))
        distance = (tops - top) * inverse(temperature)
        scores = _block_scores(rows, key, temperature, tops, jnp.log(mass) + distance)
        token = _draw_of_block(rows, at, key, temperature, top, jax.lax.argmax(scores, 0, jnp.int32))
        emitted = token = marked(token, jnp.max(tops) == -jnp.inf)
        if batch.bonus_tokens is not None:
            is_last_row = row == count
            emitted = jnp.where(is_last_row, plgpu.load(batch.bonus_tokens.at[sequence]).astype(jnp.int32), token)
        plgpu.store(drawn.tokens.at[sequence, row], emitted)
        if drawn.log_probs is not None:
            log_mass = jnp.log(jnp.sum(mass * jnp.exp(distance)))
            logit = rows.load(at, jnp.maximum(emitted, 0), emitted >= 0)
            log_prob = token_log_prob(logit, top, inverse(temperature), log_mass)
            # The temperature is 0 here, and stands for that number: a select between Python scalars does not lower.
            greedy = jnp.where((emitted == token) & (token >= 0), temperature, -jnp.inf)
            plgpu.store(drawn.log_probs.at[sequence, row], jnp.where(temperature == 0, greedy, log_prob))

    if verdict is not None:

        @pl.when(is_last(arrivals, sequence, end - first, interpret))
        def _():
            _match(batch, drawn, verdict, sequence, end)


def _load_masses(masses: _Masses[Ref], sequence: Array, row: Array) -> tuple[Array, Array]:
    """Load the largest logits and the masses of the blocks of a row."""
    num_blocks = masses.mass.shape[2]
    block = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_blocks))
    tops = plgpu.load(masses.top.at[sequence, row, block], mask=block < num_blocks, other=-jnp.inf)
    mass = plgpu.load(masses.mass.at[sequence, row, block], mask=block < num_blocks, other=0)
    return tops, mass


def _block_scores(
    rows: Rows[Ref],
    key: threefry.Key,
    temperature: Array,
    tops: Array,
    log_masses: Array,
    first_block: Array | None = None,
) -> Array:
    """Return the scores of blocks, whose noise follows from their places in the whole vocabulary."""
    block = jax.lax.iota(jnp.int32, tops.shape[0])
    if first_block is not None:
        block = first_block + block
    noise = threefry.gumbel(key, min(BLOCK_SIZE, rows.vocab_size) + block)
    return jnp.where(temperature == 0, tops, log_masses + noise)


def _draw_of_block(
    rows: Rows[Ref], at: tuple[Array, ...], key: threefry.Key, temperature: Array, top: Array, block: Array
) -> Array:
    """Draw a token from a block, the argmax in greedy rows; return its place in the logits."""
    inside = jax.lax.iota(jnp.int32, BLOCK_SIZE)
    logits = (rows.load(at, rows.whole_ids(block * BLOCK_SIZE + inside)) - top) * inverse(temperature)
    noise = jnp.where(temperature == 0, 0, threefry.gumbel(key, inside))
    scores = jnp.where(logits > -jnp.inf, logits + noise, -jnp.inf)
    return jnp.minimum(block * BLOCK_SIZE + jax.lax.argmax(scores, 0, jnp.int32), rows.vocab_size - 1)


def _part_draw_kernel(inputs, out: Draws[Ref], *, purpose: int | None):
    key_data, batch, masses, first_block = inputs
    rows = batch.target
    sequence, row = pl.program_id(0), pl.program_id(1)
    at = rows.locate(sequence, row)
    temperature = rows.load_temperature(sequence)
    key = threefry.load_key(key_data, sequence, row)
    if purpose is not None:
        key = threefry.fold_in(key, purpose)
    tops, mass = _load_masses(masses, sequence, row)
    count, is_needed = _is_needed(batch, sequence, row)

    @pl.when(is_needed)
    def _():
        top = finite(jnp.max(tops))
        distance = (tops - top) * inverse(temperature)
        first = first_block[0]
        scores = _block_scores(rows, key, temperature, tops, jnp.log(mass) + distance, first)
        place = _draw_of_block(rows, at, key, temperature, top, jax.lax.argmax(scores, 0, jnp.int32))
        token = rows.whole_ids(place)
        plgpu.store(out.token.at[sequence, row], token.astype(jnp.float32))
        plgpu.store(out.score.at[sequence, row], jnp.max(scores))
        plgpu.store(out.top.at[sequence, row], top)
        if out.mass is not None and out.logit is not None:
            plgpu.store(out.mass.at[sequence, row], jnp.sum(mass * jnp.exp(distance)))
            listed = token
            if batch.bonus_tokens is not None:
                bonus = plgpu.load(batch.bonus_tokens.at[sequence]).astype(jnp.int32)
                listed = jnp.where(row == count, bonus, token)
            plgpu.store(out.logit.at[sequence, row], rows.load(at, jnp.maximum(listed, 0), listed >= 0))


def _choice_kernel(inputs, out):
    batch, parts = inputs
    drawn, verdict = out
    sequence = pl.program_id(0)
    num_parts, num_rows = parts.token.num_parts, parts.token.part_shape[1]
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_rows))

    def of_parts(field: Ref, other: float = 0) -> list[Array]:
        places = [part * num_rows + lane for part in range(num_parts)]
        return [plgpu.load(field.at[sequence, place], mask=lane < num_rows, other=other) for place in places]

    temperature = batch.target.load_temperature(sequence)
    scale = inverse(temperature)
    scores, tops = of_parts(parts.score, -jnp.inf), of_parts(parts.top)
    with_mass = [jnp.where(score > -jnp.inf, top, -jnp.inf) for score, top in zip(scores, tops, strict=True)]
    highest = finite(functools.reduce(jnp.maximum, with_mass))
    is_moved = [(temperature > 0) & (score > -jnp.inf) for score in scores]
    scores = [
        jnp.where(moved, score + (top - highest) * scale, score)
        for moved, score, top in zip(is_moved, scores, tops, strict=True)
    ]
    token = _of_best(scores, of_parts(parts.token)).astype(jnp.int32)
    token = marked(token, functools.reduce(jnp.maximum, scores) == -jnp.inf)
    emitted, is_bonus = token, None
    if batch.bonus_tokens is not None:
        is_bonus = lane == count_drafts(batch, sequence)
        emitted = jnp.where(is_bonus, plgpu.load(batch.bonus_tokens.at[sequence]).astype(jnp.int32), token)

    def log_prob_of(where: Array) -> Array:
        masses, logits = of_parts(parts.mass), of_parts(parts.logit, -jnp.inf)
        own = [jnp.where(m > 0, m * jnp.exp((t - highest) * scale), 0) for m, t in zip(masses, tops, strict=True)]
        logit = _of_best(scores, logits)
        if is_bonus is not None:
            logit = jnp.where(is_bonus, functools.reduce(jnp.maximum, logits), logit)
        log_prob = token_log_prob(logit, highest, scale, jnp.log(functools.reduce(jnp.add, own)))
        # The temperature is 0 here, and stands for that number: a select between Python scalars does not lower.
        greedy = jnp.where((emitted == token) & (token >= 0), temperature, -jnp.inf)
        return jnp.where(where, jnp.where(temperature == 0, greedy, log_prob), 0)

    if verdict is not None:
        _store_match(batch, verdict, sequence, emitted, log_prob_of, num_rows)
        return
    plgpu.store(drawn.tokens.at[sequence, lane], emitted, mask=lane < num_rows)
    if drawn.log_probs is not None:
        plgpu.store(drawn.log_probs.at[sequence, lane], log_prob_of(lane < num_rows), mask=lane < num_rows)


def _of_best(scores: Sequence[Array], values: Sequence[Array]) -> Array:
    """Return the value that stands at the largest score, the first where several are equal."""
    best, found = scores[0], values[0]
    for score, value in zip(scores[1:], values[1:], strict=True):
        best, found = jnp.where(score > best, score, best), jnp.where(score > best, value, found)
    return found


def _match(batch: Batch[Ref], drawn: _Drawn[Ref], out: Verdict[Ref], sequence: Array, end: int):
    """Emit the draws up to the first that differs from its draft.

    Only the rows before `end` have been drawn. Where all of these agree and more rows follow, the launches for those
    write the verdict again.
    """
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(drawn.tokens.shape[1]))
    sampled = plgpu.load(drawn.tokens.at[sequence, lane], mask=lane < end, other=-1)

    def log_prob_of(where: Array) -> Array:
        assert drawn.log_probs is not None, "they are asked for"
        return plgpu.load(drawn.log_probs.at[sequence, lane], mask=where & (lane < end), other=0)

    _store_match(batch, out, sequence, sampled, log_prob_of, end)


def _store_match(
    batch: Batch[Ref],
    out: Verdict[Ref],
    sequence: Array,
    sampled: Array,
    log_prob_of: Callable[[Array], Array],
    end: int,
):
    """Emit the draws up to the first that differs from its draft, of which those before `end` are given in lanes.

    `log_prob_of` is a function of a mask to their log-probabilities, 0 where it is false.
    """
    assert batch.tokens is not None and out.num_accepted is not None, "without drafts nothing agrees"
    num_rows = batch.num_drafts + 1
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_rows))
    draft = plgpu.load(batch.tokens.at[sequence, lane], mask=lane < num_rows - 1, other=-1)
    agreeing = jnp.min(jnp.where((draft == sampled) & (lane < end), num_rows, lane))
    num_accepted = jnp.minimum(agreeing, count_drafts(batch, sequence))
    plgpu.store(out.num_accepted.at[sequence], num_accepted)
    is_emitted = lane <= num_accepted
    plgpu.store(out.tokens.at[sequence, lane], jnp.where(is_emitted, sampled, -1), mask=lane < num_rows)
    if out.log_probs is not None:
        plgpu.store(out.log_probs.at[sequence, lane], log_prob_of(is_emitted), mask=lane < num_rows)
