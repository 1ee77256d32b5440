"""The token after the accepted drafts: the residual of the rows that it may come from, as masses of blocks of the
vocabulary, then an inverse CDF over these, then over one block.

Bound by memory: one target row and one draft row a sequence are read once; under block verification those of every
prefix that may yet be accepted. The last program of a sequence draws, and writes the verdict: a launch less.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.accept import Decision
from pallas_kernels.rows import (
    BLOCK_SIZE,
    Rows,
    call,
    default_tile_size,
    exp,
    finite,
    first_above,
    inverse,
    is_last,
)
from pallas_kernels.statistics import Statistics


class _Masses(NamedTuple):
    """Of the M rows of a decision, N tiles, and P blocks: those of the vocabulary after padding the tiles.

    Rows that are not needed are not written.
    """

    top: Array  # [B, M, N] what the weights of the tile are relative to, a logit
    residual: Array  # [B, M, P] mass of max(joint * target - draft, 0) in each block
    plain: Array  # [B, M, P] mass of the target row in each block
    best: Array | None  # [B, N] largest logit of the tile, of rows that take the argmax
    best_id: Array | None  # [B, N] int32, the lowest id that has it


class _Verdict(NamedTuple):
    tokens: Array  # [B, K+1] int32, -1 after the last
    num_accepted: Array  # [B] int32
    log_probs: Array | None  # [B, K+1] float32 of each token under the target


def recover(
    tokens: Array,
    target: Rows,
    draft: Rows | None,
    statistics: Statistics,
    decision: Decision,
    bonus_tokens: Array | None = None,
    *,
    recover_best: bool = False,
    log_probs: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Emit the accepted drafts and one token.

    Args:
        tokens: [B, K] int32.
        target: of K+1 rows a sequence.
        draft: of K rows, or None for deterministic drafts.
        statistics: of these rows.
        decision: about these.
        bonus_tokens: [B] int32, emitted where all drafts are accepted.
        recover_best: a rejected token is replaced by the argmax of its row.
        log_probs: give those too.
        tile_size: tokens a program, a power of two, a multiple of BLOCK_SIZE.

    Returns:
        tokens [B, K+1] int32, -1 after the last; number of accepted drafts [B] int32; with `log_probs` the
        log-probability [B, K+1] float32 of each token under the target.
    """
    batch_size, num_rows = decision.position.shape
    if tile_size is None:
        tile_size = max(BLOCK_SIZE, default_tile_size(batch_size * num_rows, target.vocab_size))
    num_tiles = pl.cdiv(target.vocab_size, tile_size)

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    has_best = recover_best or target.temperature is not None
    blocks = array(num_rows, num_tiles * (tile_size // BLOCK_SIZE))
    masses = _Masses(
        top=array(num_rows, num_tiles),
        residual=blocks,
        plain=blocks,
        best=array(num_tiles) if has_best else None,
        best_id=array(num_tiles, dtype=jnp.int32) if has_best else None,
    )
    width = tokens.shape[1] + 1
    verdict = _Verdict(array(width, dtype=jnp.int32), array(dtype=jnp.int32), array(width) if log_probs else None)
    _, _, verdict = call(
        partial(_recover_kernel, recover_best=recover_best, tile_size=tile_size, interpret=interpret),
        (array(dtype=jnp.int32), masses, verdict),
        (tokens, target, draft, statistics, decision._replace(arrivals=None), bonus_tokens, decision.arrivals),
        begun=decision.arrivals,
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )
    return verdict


class _Source(NamedTuple):
    """A row that the token may come from, inside a kernel: references, and where in them."""

    tokens: Any
    target: Rows
    draft: Rows | None
    decision: Decision
    sequence: Array
    row: Array  # of the decision
    position: Array
    is_rejected: Array

    def of_row(self, field) -> Array:
        """What a field of the decision says of the row."""
        return plgpu.load(field.at[self.sequence, self.row])

    def load(self, ids: Array) -> tuple[Array, Array | None]:
        """Logits under the target, and where the row has sampled drafts those under the draft."""
        logits = self.target.load(self.target.at(self.sequence, self.position), ids)
        if self.draft is None:
            return logits, None
        return logits, self.draft.load(self.draft.at(self.sequence, self._draft_position()), ids, self._has_draft())

    def weigh(self, logits: tuple[Array, Array | None], ids: Array, top: Array) -> tuple[Array, Array]:
        """Target probabilities of tokens, and max(joint * target - draft, 0); relative to `top`, not to the row's mass,
        where that is not known.
        """
        logits, draft_logits = logits
        temperature = self.target.load_temperature(self.sequence)
        plain = exp(logits - top, inverse(temperature), self.of_row(self.decision.log_mass))
        is_one_hot = self.is_rejected
        if self.draft is not None:
            is_one_hot &= self.draft.load_temperature(self.sequence) == 0
        excluded = jnp.where(is_one_hot, plgpu.load(self.tokens.at[self.sequence, self._draft_position()]), -1)
        weights = jnp.where(ids == excluded, 0, self.of_row(self.decision.joint) * plain)
        if self.draft is not None:
            distance = draft_logits - self.of_row(self.decision.draft_shift)
            scale = inverse(self.draft.load_temperature(self.sequence))
            probs = exp(distance, scale, self.of_row(self.decision.draft_log_mass))
            weights = jnp.where(self._has_draft(), weights - probs, weights)
        return tuple(jnp.where(x > 0, x, 0) for x in (plain, weights))

    def _draft_position(self) -> Array:
        return jnp.minimum(self.position, self.tokens.shape[1] - 1)

    def _has_draft(self) -> Array:
        return self.is_rejected & (self.draft.load_temperature(self.sequence) != 0)


def _recover_kernel(inputs, out, *, recover_best: bool, tile_size: int, interpret: bool):
    tokens, target, draft, _, decision, _, _ = inputs
    arrivals, masses, verdict = out
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    position = plgpu.load(decision.position.at[sequence, row])

    @pl.when(position >= 0)
    def _():
        is_rejected = position < plgpu.load(decision.count.at[sequence])
        source = _Source(tokens, target, draft, decision, sequence, row, position, is_rejected)
        _store_masses(source, tile, masses, recover_best, tile_size)
        num_programs = _count_needed(decision, sequence) * masses.top.shape[2]

        @pl.when(is_last(arrivals, sequence, num_programs, interpret))
        def _():
            _emit(inputs, masses, verdict, sequence, recover_best)


def _count_needed(decision: Decision, sequence: Array) -> Array | int:
    num_rows = decision.position.shape[1]
    if num_rows == 1:
        return 1
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_rows))
    positions = plgpu.load(decision.position.at[sequence, lane], mask=lane < num_rows, other=-1)
    return jnp.sum((positions >= 0).astype(jnp.float32)).astype(jnp.int32)


def _wants_best(source: _Source, recover_best: bool) -> Array:
    return (source.target.load_temperature(source.sequence) == 0) | (source.is_rejected & recover_best)


def _store_masses(source: _Source, tile: Array, out: _Masses, recover_best: bool, tile_size: int):
    sequence, row = source.sequence, source.row
    top = source.of_row(source.decision.top)
    ids = tile * tile_size + jax.lax.iota(jnp.int32, tile_size)
    wants_best = _wants_best(source, recover_best)

    if out.best is not None:

        @pl.when(wants_best)
        def _():
            logits = source.target.load(source.target.at(sequence, source.position), ids)
            logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
            plgpu.store(out.top.at[sequence, row, tile], top)
            plgpu.store(out.best.at[sequence, tile], jnp.max(logits))
            plgpu.store(out.best_id.at[sequence, tile], tile * tile_size + jax.lax.argmax(logits, 0, jnp.int32))

    @pl.when(~wants_best)
    def _():
        loaded = source.load(ids)
        shift = jnp.where(source.is_rejected, top, finite(jnp.max(loaded[0])))
        plgpu.store(out.top.at[sequence, row, tile], shift)
        num_blocks = tile_size // BLOCK_SIZE
        blocks = tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
        for ref, values in zip((out.plain, out.residual), source.weigh(loaded, ids, shift), strict=True):
            plgpu.store(ref.at[sequence, row, blocks], jnp.sum(values.reshape(num_blocks, BLOCK_SIZE), axis=1))


def _emit(inputs, masses: _Masses, out: _Verdict, sequence: Array, recover_best: bool):
    tokens, target, draft, statistics, decision, bonus_tokens, _ = inputs
    num_drafts = tokens.shape[1]
    num_accepted = plgpu.load(decision.num_accepted.at[sequence])
    is_decided = num_accepted >= 0
    if masses.residual.shape[1] > 1:
        num_accepted = jax.lax.cond(
            is_decided,
            lambda: num_accepted,
            lambda: _count_jointly_accepted(decision, masses, statistics, sequence),
        )
    row = jnp.where(is_decided, 0, num_accepted)
    is_rejected = num_accepted < plgpu.load(decision.count.at[sequence])
    source = _Source(tokens, target, draft, decision, sequence, row, num_accepted, is_rejected)

    def draw():
        return _draw(source, masses, statistics, num_drafts)

    if masses.best is None:
        last, top, log_mass = draw()
    else:

        def take_best():
            return _best(masses, sequence), masses.top[sequence, row, 0], source.of_row(decision.log_mass)

        last, top, log_mass = jax.lax.cond(_wants_best(source, recover_best), take_best, draw)

    drawn = last
    if bonus_tokens is not None:
        last = jnp.where(is_rejected, last, plgpu.load(bonus_tokens.at[sequence]).astype(jnp.int32))
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_drafts + 1))
    accepted = plgpu.load(tokens.at[sequence, lane], mask=lane < num_accepted, other=-1).astype(jnp.int32)
    emitted = jnp.where(lane == num_accepted, last, accepted)
    plgpu.store(out.tokens.at[sequence, lane], emitted, mask=lane <= num_drafts)
    plgpu.store(out.num_accepted.at[sequence], num_accepted)
    if out.log_probs is None:
        return
    temperature = target.load_temperature(sequence)
    logit = target.load(target.at(sequence, num_accepted), jnp.maximum(last, 0), last >= 0)
    greedy_log_prob = jnp.where(last == drawn, temperature, -jnp.inf)  # 0: a scalar select needs one that varies
    last_log_prob = jnp.where(temperature == 0, greedy_log_prob, (logit - top) * inverse(temperature) - log_mass)
    log_prob = plgpu.load(decision.log_prob.at[sequence, lane], mask=lane < num_accepted, other=0)
    log_prob = jnp.where(lane == num_accepted, last_log_prob, log_prob)
    plgpu.store(out.log_probs.at[sequence, lane], log_prob, mask=lane <= num_drafts)


def _draw(source: _Source, masses: _Masses, statistics: Statistics, num_drafts: int) -> tuple[Array, Array, Array]:
    """A token, and log p(v) = (logit - top) / temperature - log_mass of its row: the last two."""
    sequence, row = source.sequence, source.row
    size = masses.residual.shape[2]
    block = jax.lax.iota(jnp.int32, pl.next_power_of_2(size))
    tile = block // (size // masses.top.shape[2])
    tops = plgpu.load(masses.top.at[sequence, row, tile], mask=block < size, other=-jnp.inf)
    top = finite(jnp.max(tops))
    # Tiles of a row that was normalised before are relative to the same top.
    factors = exp(tops - top, inverse(source.target.load_temperature(sequence)))
    weights = plgpu.load(masses.residual.at[sequence, row, block], mask=block < size, other=0) * factors
    plain = plgpu.load(masses.plain.at[sequence, row, block], mask=block < size, other=0) * factors
    is_plain = ~(jnp.sum(weights) > 0)
    first = first_above(jnp.where(is_plain, plain, weights), statistics.uniforms[sequence, num_drafts])
    ids = first * BLOCK_SIZE + jax.lax.iota(jnp.int32, BLOCK_SIZE)
    inner_plain, inner_weights = source.weigh(source.load(ids), ids, top)
    inner = first_above(jnp.where(is_plain, inner_plain, inner_weights), statistics.uniforms[sequence, num_drafts + 1])
    token = jnp.minimum(first * BLOCK_SIZE + inner, source.target.vocab_size - 1)
    log_mass = source.of_row(source.decision.log_mass)
    return token, top, log_mass + jnp.log(jnp.where(source.is_rejected, 1, jnp.sum(plain)))


def _best(masses: _Masses, sequence: Array) -> Array:
    """Lowest id of the largest logit, from those of the tiles."""
    num_tiles = masses.best.shape[1]
    tile = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_tiles))
    best = plgpu.load(masses.best.at[sequence, tile], mask=tile < num_tiles, other=-jnp.inf)
    return plgpu.load(masses.best_id.at[sequence, jax.lax.argmax(best, 0, jnp.int32)])


def _count_jointly_accepted(decision: Decision, masses: _Masses, statistics: Statistics, sequence: Array) -> Array:
    """Block verification below full acceptance: the last prefix i with u_i < S_i / (S_i + 1 - P_i)."""
    num_rows, size = masses.residual.shape[1:]
    shape = pl.next_power_of_2(num_rows), pl.next_power_of_2(size)
    lane = jax.lax.iota(jnp.int32, shape[0])  # row i is the residual after i accepted drafts
    is_needed = plgpu.load(decision.position.at[sequence, lane], mask=lane < num_rows, other=-1) >= 0
    rows, blocks = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(is_needed[:, None], shape) & (blocks < size)
    residual = jnp.sum(plgpu.load(masses.residual.at[sequence, rows, blocks], mask=mask, other=0), axis=1)
    joint = plgpu.load(decision.joint.at[sequence, lane], mask=is_needed, other=0)
    uniforms = plgpu.load(statistics.uniforms.at[sequence, jnp.maximum(lane - 1, 0)], mask=is_needed, other=1)
    rest = residual + (1 - joint)
    chance = jnp.where(rest > 0, residual / jnp.where(rest > 0, rest, 1), 1)
    return jnp.max(jnp.where(is_needed & (uniforms < chance), lane, 0))
