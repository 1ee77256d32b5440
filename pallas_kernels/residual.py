"""Acceptance of drafts, and the residual of the row that the next token comes from as masses of vocabulary blocks.

Every program decides the acceptance of its sequence again from the statistics: K times some numbers, cheaper than a
launch of its own. Then it reads its tile of the one row the sequence needs and the draft row under it. Where later
drafts decide about earlier ones (block verification), the residuals of all K rows are reduced, but for sequences whose
last draft is accepted, which is known beforehand and leaves one row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.rows import BLOCK_SIZE, Rows, call, count_drafts, exp, finite, inverse
from pallas_kernels.statistics import Statistics


class Evidence(NamedTuple):
    """What a rule sees of one sequence, in lanes, some more than K: the rule masks none."""

    log_prob: Array  # of each draft under the target; at temperature 0, of the law at temperature 1
    draft_log_prob: Array  # 0 for deterministic drafts; not read unless there is a draft distribution
    entropy: Array | None  # of each target row, in nats
    lane: Array  # int32


class Residuals(NamedTuple):
    """Of M = 1 row a sequence, or K; of N tiles and of all blocks of the vocabulary, P after padding the tiles."""

    count: Array  # [B] int32 number of drafts, less where a target row has no mass and later ones decide
    num_accepted: Array  # [B] int32; -1 where the residuals of all rows decide
    log_prob: Array  # [B, K] of each draft under the target
    joint: Array  # [B, K] probability to accept each prefix as a whole, 1 at first, unless decided
    log_mass: Array  # [B, M] log-normaliser of the row relative to `top`; 0 where the row was not normalised before
    draft_shift: Array | None  # [B, M] log p(v) = (logit - shift) / temperature - log_mass under the draft
    draft_log_mass: Array | None  # [B, M]
    top: Array  # [B, M, N] what the weights of the tile are relative to, a logit
    residual: Array  # [B, M, P] mass of max(joint * target - draft, 0) in each block
    plain: Array  # [B, M, P] mass of the target row in each block
    best: Array | None  # [B, N] largest logit of the tile, of rows that take the argmax
    best_id: Array | None  # [B, N] int32, the lowest id that has it


def residual_masses(
    tokens: Array,
    num_tokens: Array | None,
    target: Rows,
    draft: Rows | None,
    statistics: Statistics,
    options: Any,
    *,
    accept: Callable[[Evidence, Any], Array] | None,
    recover_best: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> Residuals:
    """Accept drafts and reduce the residuals.

    Args:
        tokens: [B, K] int32.
        num_tokens: [B] int32 or None.
        target: of K+1 rows a sequence.
        draft: of K rows, or None for deterministic drafts.
        statistics: of these rows.
        options: arrays for `accept`, whole references there.
        accept: (evidence, options) to the probability of accepting each draft; None for block verification, where the
            probabilities depend on the residuals.
        recover_best: a rejected token is replaced by the argmax of its row.
        tile_size: tokens a program, a power of two, a multiple of BLOCK_SIZE.
    """
    batch_size, num_drafts = tokens.shape
    num_rows = num_drafts if accept is None else 1
    if tile_size is None:
        tile_size = default_tile_size(batch_size * num_rows)
    num_tiles = pl.cdiv(target.vocab_size, tile_size)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), jnp.float32)

    has_best = recover_best or target.temperature is not None
    blocks = floats(num_rows, num_tiles * (tile_size // BLOCK_SIZE))
    outputs = Residuals(
        count=jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        num_accepted=jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        log_prob=floats(num_drafts),
        joint=floats(num_drafts),
        log_mass=floats(num_rows),
        draft_shift=None if draft is None else floats(num_rows),
        draft_log_mass=None if draft is None else floats(num_rows),
        top=floats(num_rows, num_tiles),
        residual=blocks,
        plain=blocks,
        best=floats(num_tiles) if has_best else None,
        best_id=jax.ShapeDtypeStruct((batch_size, num_tiles), jnp.int32) if has_best else None,
    )
    return call(
        partial(_residual_kernel, accept=accept, recover_best=recover_best, tile_size=tile_size),
        outputs,
        (tokens, num_tokens, target, draft, statistics, options),
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )


def default_tile_size(num_rows: int) -> int:
    """Small batches are spread over the device; in large ones few programs repeat the acceptance."""
    return 2048 if num_rows < 32 else 4096


def _residual_kernel(inputs, out: Residuals, *, accept, recover_best: bool, tile_size: int):
    tokens, num_tokens, target, draft, statistics, options = inputs
    num_drafts = tokens.shape[1]
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_drafts))
    count = count_drafts(tokens, num_tokens, sequence)
    temperature = target.load_temperature(sequence)
    top, log_mass, entropy = _combine(statistics, sequence, lane, count, 0, temperature)
    log_prob = (_load(statistics.token, sequence, lane, num_drafts) - top) * inverse(temperature) - log_mass
    one_hot, draft_log_prob = jnp.bool_(draft is None), jnp.zeros_like(log_prob)
    if draft is not None:
        draft_temperature = draft.load_temperature(sequence)
        one_hot = draft_temperature == 0
        shift, draft_log_mass = _draft_law(draft, statistics, sequence, lane, count, draft_temperature)
        logit = _load(statistics.token, sequence, num_drafts + lane, 2 * num_drafts)
        draft_log_prob = jnp.where(one_hot, 0, (logit - shift) * inverse(draft_temperature) - draft_log_mass)
    is_greedy = temperature == 0
    uniforms = _load(statistics.uniforms, sequence, lane, num_drafts)
    joint = jnp.ones_like(log_prob)
    if accept is None:
        # A row without mass, as after a stop token, ends looking ahead.
        normalised = (jnp.abs(log_mass) < jnp.inf) | is_greedy
        count = jnp.minimum(count, jnp.min(jnp.where(normalised, num_drafts, lane)))
        joint = _joint(log_prob - draft_log_prob, draft_log_prob, lane, num_drafts)
        last_passes = jnp.max(jnp.where((lane == count - 1) & (uniforms < joint), 1, 0)) > 0
        num_accepted = jnp.where(last_passes | (count == 0), count, -1)
        joint_before = jnp.sum(jnp.where(lane == row - 1, joint, 0)) + (row == 0).astype(jnp.float32)
    else:
        evidence = Evidence(log_prob, draft_log_prob, entropy, lane)
        num_accepted = _leading(uniforms < accept(evidence, options), lane, count)
        joint_before = jnp.float32(1)
    if target.temperature is not None:
        loses = _load_tiles(statistics.mass, sequence, lane, count, 0, 0)
        greedy_accepted = _leading(jnp.max(loses, axis=1) == 0, lane, count)
        num_accepted = jnp.where(is_greedy, greedy_accepted, num_accepted)

    is_decided = num_accepted >= 0
    position = jnp.where(is_decided, num_accepted, row)
    is_rejected = position < count
    wants_best = is_greedy | (is_rejected & recover_best)
    here = lane == position

    @pl.when((row == 0) & (tile == 0))
    def _():
        plgpu.store(out.count.at[sequence], count)
        plgpu.store(out.num_accepted.at[sequence], num_accepted)
        plgpu.store(out.log_prob.at[sequence, lane], log_prob, mask=lane < num_drafts)
        plgpu.store(out.joint.at[sequence, lane], joint, mask=lane < num_drafts)

    ids = tile * tile_size + jax.lax.iota(jnp.int32, tile_size)
    is_needed = jnp.where(is_decided, row == 0, is_rejected)
    at = target.at(sequence, position)

    row_top = jnp.sum(jnp.where(here, top, 0))
    row_log_mass = jnp.where(is_rejected, jnp.sum(jnp.where(here, log_mass, 0)), 0)
    draft_position = jnp.minimum(position, num_drafts - 1)

    @pl.when(is_needed & (tile == 0))
    def _():
        plgpu.store(out.log_mass.at[sequence, row], row_log_mass)
        if draft is not None:
            plgpu.store(out.draft_shift.at[sequence, row], jnp.sum(jnp.where(here, shift, 0)))
            plgpu.store(out.draft_log_mass.at[sequence, row], jnp.sum(jnp.where(here, draft_log_mass, 0)))

    if out.best is not None:

        @pl.when(is_needed & wants_best)
        def _():
            logits = target.load(at, ids)
            logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
            plgpu.store(out.top.at[sequence, row, tile], row_top)
            plgpu.store(out.best.at[sequence, tile], jnp.max(logits))
            plgpu.store(out.best_id.at[sequence, tile], tile * tile_size + jax.lax.argmax(logits, 0, jnp.int32))

    @pl.when(is_needed & ~wants_best)
    def _():
        logits = target.load(at, ids)
        shift_here = jnp.where(is_rejected, row_top, finite(jnp.max(logits)))
        plain = exp(logits - shift_here, inverse(temperature), row_log_mass)
        excluded = jnp.where(is_rejected & one_hot, plgpu.load(tokens.at[sequence, draft_position]), -1)
        weights = jnp.where(ids == excluded, 0, joint_before * plain)
        if draft is not None:
            has_draft = is_rejected & ~one_hot
            draft_logits = draft.load(draft.at(sequence, draft_position), ids, has_draft)
            draft_logits = draft_logits - jnp.sum(jnp.where(here, shift, 0))
            row_draft_log_mass = jnp.sum(jnp.where(here, draft_log_mass, 0))
            probs = exp(draft_logits, inverse(draft_temperature), row_draft_log_mass)
            weights = jnp.where(has_draft, weights - probs, weights)
        plgpu.store(out.top.at[sequence, row, tile], shift_here)
        num_blocks = tile_size // BLOCK_SIZE
        blocks = tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
        for ref, values in ((out.plain, plain), (out.residual, weights)):
            values = jnp.where(values > 0, values, 0)
            sums = jnp.sum(values.reshape(num_blocks, BLOCK_SIZE), axis=1)
            plgpu.store(ref.at[sequence, row, blocks], sums)


def _load(ref, sequence: Array, index: Array, size: int) -> Array:
    return plgpu.load(ref.at[sequence, index], mask=index < size, other=0)


def _load_tiles(ref, sequence: Array, lane: Array, count: Array, first_row: int, other: float) -> Array:
    """Statistics [lanes, tiles] of the rows from `first_row` of which there are `count`."""
    num_tiles = ref.shape[2]
    shape = lane.shape[0], pl.next_power_of_2(num_tiles)
    rows, tiles = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = (rows < count) & (tiles < num_tiles)
    return plgpu.load(ref.at[sequence, first_row + rows, tiles], mask=mask, other=other)


def _combine(statistics: Statistics, sequence, lane, count, first_row: int, temperature):
    """Maximum, log-mass relative to it, and entropy of rows, from those of their tiles."""
    tile_tops = _load_tiles(statistics.top, sequence, lane, count, first_row, -jnp.inf)
    masses = _load_tiles(statistics.mass, sequence, lane, count, first_row, 0)
    top = finite(jnp.max(tile_tops, axis=1))
    distance = tile_tops - jnp.broadcast_to(top[:, None], tile_tops.shape)
    factors = exp(distance, inverse(temperature))
    mass = jnp.sum(masses * factors, axis=1)
    if statistics.weighted is None:
        return top, jnp.log(mass), None
    weighted = _load_tiles(statistics.weighted, sequence, lane, count, first_row, 0)
    moved = jnp.where(masses > 0, factors * (weighted + masses * distance * inverse(temperature)), 0)
    return top, jnp.log(mass), jnp.log(mass) - jnp.sum(moved, axis=1) / mass


def _draft_law(draft: Rows, statistics: Statistics, sequence, lane, count, temperature):
    """Shift and log-mass of the draft rows."""
    num_drafts = statistics.token.shape[1] // 2
    if draft.log_normalizer is None:
        return _combine(statistics, sequence, lane, count, num_drafts, temperature)[:2]
    position = jnp.minimum(lane, num_drafts - 1)
    at = draft.at(jnp.broadcast_to(sequence, lane.shape), position)
    return jnp.zeros(lane.shape, jnp.float32), plgpu.load(draft.log_normalizer.at[at]).astype(jnp.float32)


def _joint(log_ratio: Array, draft_log_prob: Array, lane: Array, num_drafts: int) -> Array:
    """P_i = min(1, P_{i-1} target / draft)."""
    log_ratio = jnp.where(draft_log_prob > -jnp.inf, log_ratio, -jnp.inf)
    log_joint, carry = jnp.zeros_like(log_ratio), jnp.float32(0)
    for i in range(num_drafts):
        carry = jnp.minimum(carry + jnp.sum(jnp.where(lane == i, log_ratio, 0)), 0)
        log_joint = jnp.where(lane == i, carry, log_joint)
    return jnp.exp(log_joint)


def _leading(accepted: Array, lane: Array, count: Array) -> Array:
    """Number of drafts before the first that is not accepted."""
    return jnp.minimum(jnp.min(jnp.where(accepted, lane.shape[0], lane)), count)


def accept_ratio(evidence: Evidence, options: None) -> Array:
    """Modified rejection sampling: min(1, target / draft), 0 where the draft's probability is."""
    ratio = jnp.exp(jnp.minimum(evidence.log_prob - evidence.draft_log_prob, 0))
    return jnp.where(evidence.draft_log_prob > -jnp.inf, ratio, 0)
