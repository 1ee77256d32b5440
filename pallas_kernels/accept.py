"""How many drafts each sequence accepts, and which rows its next token may come from.

One small program a sequence, all of its drafts in lanes, from the statistics of their rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.rows import Rows, call, count_drafts, exp, finite, inverse
from pallas_kernels.statistics import Statistics
from pallas_kernels.triton import plgpu


class Evidence(NamedTuple):
    """What a rule sees of one sequence, in lanes, some more than K: the rule masks none."""

    log_prob: Array  # of each draft under the target
    draft_log_prob: Array  # under the draft; 0 for deterministic drafts and greedy rows
    entropy: Array | None  # of each target row, in nats
    lane: Array  # int32


class Decision(NamedTuple):
    """Of each sequence and of M = 1 row that the next token comes from, or of K rows that it may come from.

    A row stands for the law of the token at `position`, and for the residual there if position < count.
    """

    count: Array  # [B] int32 number of drafts, less where a target row has no mass and later ones decide
    num_accepted: Array  # [B] int32; -1 where the residuals of the rows decide
    log_prob: Array  # [B, K] of each draft under the target
    position: Array  # [B, M] int32; -1 where the row is not needed
    top: Array  # [B, M] log p(v) = (logit - top) / temperature - log_mass under the target, where position < count
    log_mass: Array  # [B, M]
    joint: Array  # [B, M] probability to accept the drafts before the row as a whole; 1 if they are accepted one by one
    draft_shift: Array | None  # [B, M] the same under the draft
    draft_log_mass: Array | None  # [B, M]
    arrivals: Array  # [B] int32 zeros


def accept(
    tokens: Array,
    num_tokens: Array | None,
    target: Rows,
    draft: Rows | None,
    statistics: Statistics,
    options: Any,
    *,
    rule: Callable[[Evidence, Any], Array] | None,
    num_warps: int = 1,
    interpret: bool = False,
) -> Decision:
    """Accept drafts.

    Args:
        tokens: [B, K] int32.
        num_tokens: [B] int32 or None.
        target: of K+1 rows a sequence.
        draft: of K rows, or None for deterministic drafts.
        statistics: of these rows. Rows after the first rejected one may lack.
        options: arrays for the rule, references there.
        rule: (evidence, options) to the probability of accepting each draft; None for block verification, where the
            probabilities depend on the residuals.
    """
    batch_size, num_drafts = tokens.shape
    num_rows = num_drafts if rule is None else 1

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), jnp.float32)

    outputs = Decision(
        count=jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        num_accepted=jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        log_prob=floats(num_drafts),
        position=jax.ShapeDtypeStruct((batch_size, num_rows), jnp.int32),
        top=floats(num_rows),
        log_mass=floats(num_rows),
        joint=floats(num_rows),
        draft_shift=None if draft is None else floats(num_rows),
        draft_log_mass=None if draft is None else floats(num_rows),
        arrivals=jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    )
    return call(
        partial(_accept_kernel, rule=rule),
        outputs,
        (tokens, num_tokens, target, draft, statistics, options),
        grid=(batch_size,),
        num_warps=num_warps,
        interpret=interpret,
    )


def accept_ratio(evidence: Evidence, options: None) -> Array:
    """Modified rejection sampling: min(1, target / draft), 0 where the draft's probability is."""
    ratio = jnp.exp(jnp.minimum(evidence.log_prob - evidence.draft_log_prob, 0))
    return jnp.where(evidence.draft_log_prob > -jnp.inf, ratio, 0)


def _accept_kernel(inputs, out: Decision, *, rule):
    tokens, num_tokens, target, draft, statistics, options = inputs
    num_drafts, num_rows = tokens.shape[1], out.position.shape[1]
    sequence = pl.program_id(0)
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_drafts))
    count = count_drafts(tokens, num_tokens, sequence)
    temperature = target.load_temperature(sequence)
    is_greedy = temperature == 0
    # Rows past the drafts hold anything; waiting to know which these are would cost as much as reading them.
    top, log_mass, entropy = _combine(statistics, sequence, lane, num_drafts, 0, temperature)
    log_prob = (_load(statistics.token, sequence, lane, num_drafts) - top) * inverse(temperature) - log_mass
    log_prob = jnp.where(log_mass > -jnp.inf, log_prob, -jnp.inf)  # a row without mass: a minimum may drop its NaN
    draft_log_prob = jnp.zeros_like(log_prob)
    if draft is not None:
        draft_temperature = draft.load_temperature(sequence)
        shift, draft_log_mass = _draft_law(draft, statistics, sequence, lane, draft_temperature)
        logit = plgpu.load(statistics.token.at[sequence, num_drafts + lane], mask=lane < num_drafts, other=0)
        draft_log_prob = (logit - shift) * inverse(draft_temperature) - draft_log_mass
        draft_log_prob = jnp.where((draft_temperature == 0) | is_greedy, 0, draft_log_prob)
    if target.temperature is not None:
        is_beaten = jnp.max(_load_tiles(statistics.mass, sequence, lane, num_drafts, 0, 0), axis=1) > 0
        log_prob = jnp.where(is_greedy, jnp.where(is_beaten, -jnp.inf, 0), log_prob)
        entropy = None if entropy is None else jnp.where(is_greedy, 0, entropy)
    uniforms = _load(statistics.uniforms, sequence, lane, num_drafts)
    if rule is None:
        # A row without mass, as after a stop token, ends looking ahead.
        has_mass = (jnp.abs(log_mass) < jnp.inf) | is_greedy
        count = jnp.minimum(count, jnp.min(jnp.where(has_mass, num_drafts, lane)))
        joint, joint_before = _joint(log_prob - draft_log_prob, draft_log_prob, lane, num_drafts)
        # A prefix is accepted with at most its joint probability: its residual is needed only where that would do.
        before = _load(statistics.uniforms, sequence, jnp.maximum(lane - 1, 0), num_drafts)
        needed = (lane == 0) | (before < joint_before)
        all_pass = jnp.max(jnp.where((lane == count - 1) & (uniforms < joint), 1, 0)) > 0
        undecided = jnp.max(jnp.where((lane > 0) & (lane < count) & needed, 1, 0))
        num_accepted = jnp.where(all_pass, count, -undecided)
        num_accepted = jnp.where(is_greedy, _leading(uniforms < joint, lane, count), num_accepted)
        is_decided = num_accepted >= 0
    else:
        chance = rule(Evidence(log_prob, draft_log_prob, entropy, lane), options)
        num_accepted = _leading(uniforms < chance, lane, count)
        is_decided, joint_before, needed = num_accepted >= 0, jnp.ones_like(log_prob), lane == 0

    def of_row(values: Array) -> Array:
        return jnp.where(is_decided, jnp.sum(jnp.where(lane == num_accepted, values, 0)), values)

    position = jnp.where(is_decided, num_accepted, lane)
    is_row, is_rejected = lane < num_rows, position < count
    needed = jnp.where(is_decided, lane == 0, needed & is_rejected)
    plgpu.store(out.arrivals.at[sequence], count ^ count)  # a constant does not lower here
    plgpu.store(out.count.at[sequence], count)
    plgpu.store(out.num_accepted.at[sequence], num_accepted)
    plgpu.store(out.log_prob.at[sequence, lane], log_prob, mask=lane < num_drafts)
    plgpu.store(out.position.at[sequence, lane], jnp.where(needed, position, -1), mask=is_row)
    plgpu.store(out.joint.at[sequence, lane], jnp.where(is_decided, 1, joint_before), mask=is_row)
    plgpu.store(out.top.at[sequence, lane], of_row(top), mask=is_row)
    plgpu.store(out.log_mass.at[sequence, lane], jnp.where(is_rejected, of_row(log_mass), 0), mask=is_row)
    if draft is not None:
        plgpu.store(out.draft_shift.at[sequence, lane], of_row(shift), mask=is_row)
        plgpu.store(out.draft_log_mass.at[sequence, lane], of_row(draft_log_mass), mask=is_row)


def _load(ref, sequence: Array, index: Array, size: int) -> Array:
    return plgpu.load(ref.at[sequence, index], mask=index < size, other=0)


def _load_tiles(ref, sequence: Array, lane: Array, num_rows: int, first_row: int, other: float) -> Array:
    """Statistics [lanes, tiles] of so many rows from `first_row`."""
    num_tiles = ref.shape[2]
    shape = lane.shape[0], pl.next_power_of_2(num_tiles)
    rows, tiles = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = (rows < num_rows) & (tiles < num_tiles)
    return plgpu.load(ref.at[sequence, first_row + rows, tiles], mask=mask, other=other)


def _combine(statistics: Statistics, sequence, lane, num_rows: int, first_row: int, temperature):
    """Maximum, log-mass relative to it, and entropy of rows, from those of their tiles."""
    tile_tops = _load_tiles(statistics.top, sequence, lane, num_rows, first_row, -jnp.inf)
    masses = _load_tiles(statistics.mass, sequence, lane, num_rows, first_row, 0)
    top = finite(jnp.max(tile_tops, axis=1))
    distance = tile_tops - jnp.broadcast_to(top[:, None], tile_tops.shape)
    factors = exp(distance, inverse(temperature))
    mass = jnp.sum(masses * factors, axis=1)
    if statistics.weighted is None:
        return top, jnp.log(mass), None
    weighted = _load_tiles(statistics.weighted, sequence, lane, num_rows, first_row, 0)
    moved = jnp.where(masses > 0, factors * (weighted + masses * distance * inverse(temperature)), 0)
    return top, jnp.log(mass), jnp.log(mass) - jnp.sum(moved, axis=1) / mass


def _draft_law(draft: Rows, statistics: Statistics, sequence, lane, temperature):
    """Shift and log-mass of the draft rows; in one without mass every token has probability 0."""
    num_drafts = statistics.token.shape[1] // 2
    if draft.log_normalizer is None:
        shift, log_mass, _ = _combine(statistics, sequence, lane, num_drafts, num_drafts, temperature)
    else:
        at = draft.at(jnp.broadcast_to(sequence, lane.shape), jnp.minimum(lane, num_drafts - 1))
        shift, log_mass = jnp.zeros(lane.shape, jnp.float32), plgpu.load(draft.log_normalizer.at[at])
        log_mass = log_mass.astype(jnp.float32)
    return shift, jnp.where(log_mass == -jnp.inf, 0, log_mass)


def _joint(log_ratio: Array, draft_log_prob: Array, lane: Array, num_drafts: int) -> tuple[Array, Array]:
    """P_i = min(1, P_{i-1} target / draft) in the lane of draft i and in the one after it, where P_0 = 1."""
    log_ratio = jnp.where(draft_log_prob > -jnp.inf, log_ratio, -jnp.inf)
    log_joint, log_before, carry = jnp.zeros_like(log_ratio), jnp.zeros_like(log_ratio), jnp.float32(0)
    for i in range(num_drafts):
        log_before = jnp.where(lane == i, carry, log_before)
        carry = jnp.minimum(carry + jnp.sum(jnp.where(lane == i, log_ratio, 0)), 0)
        log_joint = jnp.where(lane == i, carry, log_joint)
    return jnp.exp(log_joint), jnp.exp(log_before)


def _leading(accepted: Array, lane: Array, count: Array) -> Array:
    """Number of drafts before the first that is not accepted."""
    return jnp.minimum(jnp.min(jnp.where(accepted, lane.shape[0], lane)), count)
