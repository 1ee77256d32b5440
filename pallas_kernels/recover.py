"""The token after the accepted drafts: the residual of the rows that it may come from, as masses of blocks of the
vocabulary, then an inverse CDF over these, then over one block.

Bound by memory: one target row and one draft row a sequence are read once; under block verification those of every
prefix that may yet be accepted. The last program of a sequence draws, and writes the verdict: a launch less. At
B = 256, bfloat16, tiles of 4096 take 41 microseconds, of 8192 45 and of 2048 45; under block verification 92, 101, 96.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.accept import Decision
from pallas_kernels.rows import (
    BLOCK_SIZE,
    Rows,
    Verdict,
    block_max,
    block_sum,
    call,
    exp,
    finite,
    first_above,
    in_blocks,
    inverse,
    is_last,
    over_blocks,
    tile_of_blocks,
)
from pallas_kernels.statistics import Statistics
from pallas_kernels.triton import plgpu


class _Inputs(NamedTuple):
    tokens: Array  # [B, K]
    target: Rows
    draft: Rows | None
    statistics: Statistics
    decision: Decision
    bonus_tokens: Array | None  # [B]
    arrivals: Array  # [B]


class _Masses(NamedTuple):
    """Of the M rows of a decision and P blocks: those of the vocabulary after padding the tiles.

    Rows that are not needed are not written.
    """

    top: Array  # [B, M, P] what the weights of the block are relative to, a logit; -inf if it is empty
    residual: Array  # [B, M, P] mass of max(joint * target - draft, 0) in each block
    plain: Array  # [B, M, P] mass of the target row in each block


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
) -> Verdict:
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
    """
    batch_size, num_rows = decision.position.shape
    if tile_size is None:
        tile_size = tile_of_blocks(batch_size * num_rows, target.vocab_size)
    num_tiles = pl.cdiv(target.vocab_size, tile_size)

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    blocks = array(num_rows, num_tiles * (tile_size // BLOCK_SIZE))
    masses = _Masses(blocks, blocks, blocks)
    width = tokens.shape[1] + 1
    verdict = Verdict(array(width, dtype=jnp.int32), array(dtype=jnp.int32), array(width) if log_probs else None)
    _, _, verdict = call(
        partial(_recover_kernel, recover_best=recover_best, tile_size=tile_size, interpret=interpret),
        (array(dtype=jnp.int32), masses, verdict),
        _Inputs(tokens, target, draft, statistics, decision._replace(arrivals=None), bonus_tokens, decision.arrivals),
        begun=decision.arrivals,
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )
    return verdict


class _Source(NamedTuple):
    """A row that the token may come from, inside a kernel, with all that is known of it, so that it is read at once."""

    target: Rows
    draft: Rows | None
    sequence: Array
    row: Array  # of the decision
    position: Array
    is_rejected: Array
    has_draft: Array  # a draft distribution is subtracted
    wants_best: Array | None  # the token is the argmax; None if it never is
    excluded: Array  # token that a deterministic draft takes out, or -1
    scale: Array  # 1 / temperature
    top: Array
    log_mass: Array
    joint: Array
    draft_scale: Array | None
    draft_shift: Array | None
    draft_log_mass: Array | None
    interpret: bool

    def load(self, ids: Array) -> tuple[Array, Array | None]:
        """Logits under the target, and where the row has sampled drafts those under the draft."""
        logits = self.target.load(self.target.at(self.sequence, self.position), ids)
        if self.draft is None:
            return logits, None
        at = self.draft.at(self.sequence, jnp.minimum(self.position, self.draft.shape[1] - 1))
        return logits, self.draft.load(at, ids, self.has_draft)

    def load_ordered(self, ids: Array) -> Array:
        """Logits under the target, NaN as -inf."""
        logits = self.target.load(self.target.at(self.sequence, self.position), ids)
        return jnp.where(jnp.isnan(logits), -jnp.inf, logits)

    def weigh(self, logits: tuple[Array, Array | None], ids: Array, top: Array) -> tuple[Array, Array]:
        """Target probabilities of tokens, and max(joint * target - draft, 0); relative to `top` and `log_mass`, which
        is 0 where the mass of the row is not known.
        """
        logits, draft_logits = logits
        plain = exp(logits - top, self.scale, self.log_mass, flush=not self.interpret)
        weights = jnp.where(ids == self.excluded, 0, self.joint * plain)
        if self.draft is not None:
            distance = draft_logits - self.draft_shift
            probs = exp(distance, self.draft_scale, self.draft_log_mass, flush=not self.interpret)
            weights = jnp.where(self.has_draft, weights - probs, weights)
        return tuple(jnp.where(x > 0, x, 0) for x in (plain, weights))


def _source(
    inputs: _Inputs, sequence: Array, row: Array, position: Array, *, recover_best: bool, interpret: bool
) -> _Source:
    tokens, target, draft, decision = inputs.tokens, inputs.target, inputs.draft, inputs.decision

    def of_row(field) -> Array | None:
        return None if field is None else plgpu.load(field.at[sequence, row])

    temperature = target.load_temperature(sequence)
    is_rejected = position < plgpu.load(decision.count.at[sequence])
    token = plgpu.load(tokens.at[sequence, jnp.clip(position, 0, tokens.shape[1] - 1)])
    wants_best = None
    if target.temperature is not None or recover_best:
        wants_best = (temperature == 0) | (is_rejected & recover_best)
    has_draft, draft_scale = is_rejected & (draft is not None), None
    if draft is not None:
        draft_temperature = draft.load_temperature(sequence)
        has_draft, draft_scale = is_rejected & (draft_temperature != 0), inverse(draft_temperature)
    return _Source(
        target,
        draft,
        sequence,
        row,
        position,
        is_rejected,
        has_draft,
        wants_best=wants_best,
        excluded=jnp.where(is_rejected & ~has_draft, token, -1),
        scale=inverse(temperature),
        top=of_row(decision.top),
        log_mass=of_row(decision.log_mass),
        joint=of_row(decision.joint),
        draft_scale=draft_scale,
        draft_shift=of_row(decision.draft_shift),
        draft_log_mass=of_row(decision.draft_log_mass),
        interpret=interpret,
    )


def _recover_kernel(inputs: _Inputs, out, *, recover_best: bool, tile_size: int, interpret: bool):
    decision = inputs.decision
    arrivals, masses, verdict = out
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    position = plgpu.load(decision.position.at[sequence, row])
    source_of = partial(_source, inputs, sequence, recover_best=recover_best, interpret=interpret)
    source = source_of(row, position)

    @pl.when(position >= 0)
    def _():
        _store_masses(source, tile, masses, tile_size)
        num_programs = _count_needed(decision, sequence) * pl.num_programs(2)

        @pl.when(is_last(arrivals, sequence, num_programs, interpret))
        def _():
            if decision.position.shape[1] == 1:
                _emit(inputs, masses, verdict, source)
            else:
                _emit(inputs, masses, verdict, _choose(inputs, masses, sequence, source_of))


def _count_needed(decision: Decision, sequence: Array) -> Array | int:
    num_rows = decision.position.shape[1]
    if num_rows == 1:
        return 1
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_rows))
    positions = plgpu.load(decision.position.at[sequence, lane], mask=lane < num_rows, other=-1)
    return jnp.sum((positions >= 0).astype(jnp.float32)).astype(jnp.int32)


def _store_masses(source: _Source, tile: Array, out: _Masses, tile_size: int):
    parts, blocks = in_blocks(tile, tile_size, source.target.logits.dtype)
    at = source.sequence, source.row, blocks

    def store_weights():
        logits = [source.load(ids) for ids in parts]
        top = jnp.where(source.is_rejected, source.top, block_max([target for target, _ in logits]))
        plgpu.store(out.top.at[at], top)
        weights = [
            source.weigh(part, ids, over_blocks(finite(top), ids)) for part, ids in zip(logits, parts, strict=True)
        ]
        for ref, values in zip((out.plain, out.residual), zip(*weights, strict=True), strict=True):
            plgpu.store(ref.at[at], block_sum(values))

    if source.wants_best is None:
        store_weights()
        return
    pl.when(~source.wants_best)(store_weights)

    @pl.when(source.wants_best)
    def _():
        plgpu.store(out.top.at[at], block_max([source.load_ordered(ids) for ids in parts]))


def _choose(inputs: _Inputs, masses: _Masses, sequence: Array, source_of: Callable[..., _Source]) -> _Source:
    """The row that the token comes from, of several."""
    num_accepted = plgpu.load(inputs.decision.num_accepted.at[sequence])
    is_decided = num_accepted >= 0
    num_accepted = jax.lax.cond(
        is_decided,
        lambda: num_accepted,
        lambda: _count_jointly_accepted(inputs.decision, masses, inputs.statistics, sequence),
    )
    return source_of(jnp.where(is_decided, 0, num_accepted), num_accepted)


def _emit(inputs: _Inputs, masses: _Masses, out: Verdict, source: _Source):
    tokens, target, bonus_tokens = inputs.tokens, inputs.target, inputs.bonus_tokens
    sequence, num_accepted, num_drafts = source.sequence, source.position, tokens.shape[1]

    def draw():
        return _draw(source, masses, inputs.statistics, num_drafts)

    if source.wants_best is None:
        last, top, log_mass = draw()
    else:
        last, top, log_mass = jax.lax.cond(
            source.wants_best, lambda: (_best(source, masses), source.top, source.log_mass), draw
        )
    drawn = last
    if bonus_tokens is not None:
        last = jnp.where(source.is_rejected, last, plgpu.load(bonus_tokens.at[sequence]).astype(jnp.int32))
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
    last_log_prob = jnp.where(temperature == 0, greedy_log_prob, (logit - top) * source.scale - log_mass)
    log_prob = plgpu.load(inputs.decision.log_prob.at[sequence, lane], mask=lane < num_accepted, other=0)
    log_prob = jnp.where(lane == num_accepted, last_log_prob, log_prob)
    plgpu.store(out.log_probs.at[sequence, lane], log_prob, mask=lane <= num_drafts)


def _draw(source: _Source, masses: _Masses, statistics: Statistics, num_drafts: int) -> tuple[Array, Array, Array]:
    """A token, and log p(v) = (logit - top) / temperature - log_mass of its row: the last two."""
    sequence = source.sequence
    tops = _load_blocks(masses.top, source, -jnp.inf)
    top = finite(jnp.max(tops))
    factors = exp(tops - top, source.scale)  # of a row that was normalised before, all 1
    weights, plain = (_load_blocks(field, source, 0) * factors for field in (masses.residual, masses.plain))
    is_plain = ~(jnp.sum(weights) > 0)
    first = first_above(jnp.where(is_plain, plain, weights), statistics.uniforms[sequence, num_drafts])
    ids = first * BLOCK_SIZE + jax.lax.iota(jnp.int32, BLOCK_SIZE)
    inner_plain, inner_weights = source.weigh(source.load(ids), ids, top)
    inner = first_above(jnp.where(is_plain, inner_plain, inner_weights), statistics.uniforms[sequence, num_drafts + 1])
    token = jnp.minimum(first * BLOCK_SIZE + inner, source.target.vocab_size - 1)
    return token, top, source.log_mass + jnp.log(jnp.where(source.is_rejected, 1, jnp.sum(plain)))


def _best(source: _Source, masses: _Masses) -> Array:
    """Lowest id of the largest logit."""
    tops = _load_blocks(masses.top, source, -jnp.inf)
    first = jax.lax.argmax(tops, 0, jnp.int32) * BLOCK_SIZE
    logits = source.load_ordered(first + jax.lax.iota(jnp.int32, BLOCK_SIZE))
    return jnp.minimum(first + jax.lax.argmax(logits, 0, jnp.int32), source.target.vocab_size - 1)


def _load_blocks(field, source: _Source, other: float) -> Array:
    """A field of the masses, of all blocks of a row; `other` past the last."""
    size = field.shape[2]
    block = jax.lax.iota(jnp.int32, pl.next_power_of_2(size))
    return plgpu.load(field.at[source.sequence, source.row, block], mask=block < size, other=other)


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
