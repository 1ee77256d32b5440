"""The token after the accepted drafts, by inverse CDF over the masses of vocabulary blocks, then over one block.

One program a sequence. It reads no row but the chosen block, and writes the verdict.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.accept import Decision
from pallas_kernels.residual import Residuals
from pallas_kernels.rows import BLOCK_SIZE, Rows, call, exp, finite, first_above, inverse
from pallas_kernels.statistics import Statistics


def pick(
    tokens: Array,
    target: Rows,
    draft: Rows | None,
    statistics: Statistics,
    decision: Decision,
    residuals: Residuals,
    bonus_tokens: Array | None = None,
    *,
    recover_best: bool = False,
    log_probs: bool = False,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Emit the accepted drafts and one token.

    Args:
        tokens: [B, K] int32.
        target: of K+1 rows a sequence.
        draft: of K rows, or None for deterministic drafts.
        statistics: of these rows.
        decision: about these.
        residuals: of the rows of the decision, found with the same `recover_best`.
        bonus_tokens: [B] int32, emitted where all drafts are accepted.

    Returns:
        tokens [B, K+1] int32, -1 after the last; number of accepted drafts [B] int32; with `log_probs` the
        log-probability [B, K+1] float32 of each token under the target.
    """
    batch_size, num_drafts = tokens.shape
    if num_warps is None:
        num_warps = 4 if decision.position.shape[1] == 1 else 8
    shape = batch_size, num_drafts + 1
    outputs = (
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32) if log_probs else None,
    )
    return call(
        partial(_pick_kernel, recover_best=recover_best),
        outputs,
        (tokens, target, draft, statistics, decision, residuals, bonus_tokens),
        grid=(batch_size,),
        num_warps=num_warps,
        interpret=interpret,
    )


def _pick_kernel(inputs, out, *, recover_best: bool):
    tokens, target, draft, statistics, decision, residuals, bonus_tokens = inputs
    num_drafts = tokens.shape[1]
    num_rows = residuals.residual.shape[1]
    sequence = pl.program_id(0)
    temperature = target.load_temperature(sequence)
    count = plgpu.load(decision.count.at[sequence])
    num_accepted = plgpu.load(decision.num_accepted.at[sequence])
    is_decided = num_accepted >= 0
    if num_rows > 1:
        num_accepted = jax.lax.cond(
            is_decided,
            lambda: num_accepted,
            lambda: _count_jointly_accepted(decision, residuals, statistics, sequence),
        )
    row = jnp.where(is_decided, 0, num_accepted)
    is_rejected = num_accepted < count
    at = target.at(sequence, num_accepted)

    def draw():
        size = residuals.residual.shape[2]
        block = jax.lax.iota(jnp.int32, pl.next_power_of_2(size))
        tile = block // (size // residuals.top.shape[2])
        tops = plgpu.load(residuals.top.at[sequence, row, tile], mask=block < size, other=-jnp.inf)
        top = finite(jnp.max(tops))
        # Tiles of a row that was normalised before are relative to the same top.
        factors = exp(tops - top, inverse(temperature))
        masses = plgpu.load(residuals.residual.at[sequence, row, block], mask=block < size, other=0) * factors
        plain_masses = plgpu.load(residuals.plain.at[sequence, row, block], mask=block < size, other=0) * factors
        is_plain = ~(jnp.sum(masses) > 0)
        first = first_above(jnp.where(is_plain, plain_masses, masses), statistics.uniforms[sequence, num_drafts])
        ids = first * BLOCK_SIZE + jax.lax.iota(jnp.int32, BLOCK_SIZE)
        log_mass = plgpu.load(decision.log_mass.at[sequence, row])
        plain = exp(target.load(at, ids) - top, inverse(temperature), log_mass)
        position = jnp.minimum(num_accepted, num_drafts - 1)
        one_hot = jnp.bool_(draft is None)
        if draft is not None:
            one_hot = draft.load_temperature(sequence) == 0
        excluded = jnp.where(is_rejected & one_hot, plgpu.load(tokens.at[sequence, position]), -1)
        weights = jnp.where(ids == excluded, 0, plain)
        if draft is not None:
            has_draft = is_rejected & ~one_hot
            draft_logits = draft.load(draft.at(sequence, position), ids, has_draft)
            draft_logits = draft_logits - plgpu.load(decision.draft_shift.at[sequence, row])
            draft_log_mass = plgpu.load(decision.draft_log_mass.at[sequence, row])
            probs = exp(draft_logits, inverse(draft.load_temperature(sequence)), draft_log_mass)
            joint = plgpu.load(decision.joint.at[sequence, row])
            weights = jnp.where(has_draft, joint * weights - probs, weights)
        weights = jnp.where(is_plain, plain, weights)
        token = first * BLOCK_SIZE + first_above(
            jnp.where(weights > 0, weights, 0), statistics.uniforms[sequence, num_drafts + 1]
        )
        mass = jnp.where(is_rejected, 1, jnp.sum(plain_masses))
        return jnp.minimum(token, target.vocab_size - 1), top, log_mass + jnp.log(mass)

    if residuals.best is None:
        last, top, log_mass = draw()
    else:
        wants_best = (temperature == 0) | (is_rejected & recover_best)

        def take_best():
            top = residuals.top[sequence, row, 0]
            return _best(residuals, sequence), top, plgpu.load(decision.log_mass.at[sequence, row])

        last, top, log_mass = jax.lax.cond(wants_best, take_best, draw)

    best = last
    if bonus_tokens is not None:
        last = jnp.where(is_rejected, last, plgpu.load(bonus_tokens.at[sequence]).astype(jnp.int32))
    out_tokens, out_num_accepted, out_log_probs = out
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_drafts + 1))
    drafts = plgpu.load(tokens.at[sequence, lane], mask=lane < num_accepted, other=-1).astype(jnp.int32)
    emitted = jnp.where(lane == num_accepted, last, drafts)
    plgpu.store(out_tokens.at[sequence, lane], emitted, mask=lane <= num_drafts)
    plgpu.store(out_num_accepted.at[sequence], num_accepted)
    if out_log_probs is None:
        return
    is_greedy = temperature == 0
    logit = target.load(at, jnp.maximum(last, 0), last >= 0)
    greedy_log_prob = jnp.where(last == best, temperature, -jnp.inf)  # 0: a scalar select needs one that varies
    last_log_prob = jnp.where(is_greedy, greedy_log_prob, (logit - top) * inverse(temperature) - log_mass)
    log_prob = plgpu.load(decision.log_prob.at[sequence, lane], mask=lane < num_accepted, other=0)
    log_prob = jnp.where(lane == num_accepted, last_log_prob, log_prob)
    plgpu.store(out_log_probs.at[sequence, lane], log_prob, mask=lane <= num_drafts)


def _best(residuals: Residuals, sequence: Array) -> Array:
    """Lowest id of the largest logit, from those of the tiles."""
    num_tiles = residuals.best.shape[1]
    tile = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_tiles))
    best = plgpu.load(residuals.best.at[sequence, tile], mask=tile < num_tiles, other=-jnp.inf)
    return plgpu.load(residuals.best_id.at[sequence, jax.lax.argmax(best, 0, jnp.int32)])


def _count_jointly_accepted(decision: Decision, residuals: Residuals, statistics: Statistics, sequence: Array) -> Array:
    """Block verification below full acceptance: the last prefix i with u_i < S_i / (S_i + 1 - P_i)."""
    num_rows, size = residuals.residual.shape[1:]
    shape = pl.next_power_of_2(num_rows), pl.next_power_of_2(size)
    lane = jax.lax.iota(jnp.int32, shape[0])  # row i is the residual after i accepted drafts
    is_needed = plgpu.load(decision.position.at[sequence, lane], mask=lane < num_rows, other=-1) >= 0
    rows, blocks = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(is_needed[:, None], shape) & (blocks < size)
    masses = jnp.sum(plgpu.load(residuals.residual.at[sequence, rows, blocks], mask=mask, other=0), axis=1)
    joint = plgpu.load(decision.joint.at[sequence, lane], mask=is_needed, other=0)
    uniforms = plgpu.load(statistics.uniforms.at[sequence, jnp.maximum(lane - 1, 0)], mask=is_needed, other=1)
    rest = masses + (1 - joint)
    chance = jnp.where(rest > 0, masses / jnp.where(rest > 0, rest, 1), 1)
    return jnp.max(jnp.where(is_needed & (uniforms < chance), lane, 0))
