"""Second launch of a verification: how many drafts each sequence accepts, and which rows its next token may come from.

One program of one warp serves a sequence. It holds all drafts of the sequence in lanes, and reads the statistics of
their rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import Leaf, Ref, call, runtime_zero
from pallas_kernels.rows import Batch, Rows, count_drafts, exp, finite, inverse, token_log_prob
from pallas_kernels.rules import Evidence, log_ratio
from pallas_kernels.statistics import Statistics
from pallas_kernels.triton import plgpu

MAX_DRAFT_TOKENS = 64  # the drafts of a sequence are the lanes of one program


class Decision(NamedTuple, Generic[Leaf]):
    """How many drafts each sequence accepts, and the M rows that its next token may come from.

    M is 1 under rules that accept the drafts one by one. Under block verification M is K: where the drafts as a whole
    fail, the residuals decide which prefix stays, and row i is for the case that i drafts stay. A row stands for the
    target distribution at `position` where position = num_drafts, and for the residual there where it is smaller.
    """

    num_drafts: Leaf  # [B] int32 number of drafts; under block verification those before a target row without mass
    num_accepted: Leaf  # [B] int32; -1 where the residuals of the rows decide
    log_prob: Leaf  # [B, K] log-probability of each draft under the target
    position: Leaf  # [B, M] int32 position of each row; -1 where the row is not needed
    target: "Normalizer[Leaf]"  # [B, M] of each row under the target, where position < num_drafts
    joint: Leaf  # [B, M] probability to accept the drafts before the row as a whole; 1 if they are accepted one by one
    draft: "Normalizer[Leaf] | None"  # [B, M] of each row under the draft distribution
    arrivals: Leaf  # [B] int32 zeros, for the programs of the next launch


class Normalizer(NamedTuple, Generic[Leaf]):
    """log p(v) = (logit - top) / temperature - log_mass, one row a lane inside a kernel."""

    top: Leaf
    log_mass: Leaf


def accept(
    batch: Batch[Array],
    statistics: Statistics[Array],
    options: Any,
    *,
    rule: Callable[[Evidence, Any], Array] | None,
    in_parts: bool = False,
    num_warps: int = 1,
    interpret: bool = False,
) -> Decision[Array]:
    """Accept drafts.

    Args:
        batch: the rows to verify, 1 <= K <= MAX_DRAFT_TOKENS.
        statistics: of the rows of the batch. Statistics of rows after the first rejected draft may be missing.
        options: pytree of arrays for the rule, which gets references to them.
        rule: (evidence, options) to the probability of accepting each draft. None is block verification, whose
            probabilities depend on the residuals.
        in_parts: whether the statistics cover all parts of a vocabulary, whose logits are then not given.
        num_warps: warps of each program.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        Decision, with arrays of float32 where it does not say int32.
    """
    batch_size, num_drafts = statistics.token.shape[0], batch.num_drafts
    num_rows = num_drafts if rule is None else 1

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    outputs = Decision(
        num_drafts=array(dtype=jnp.int32),
        num_accepted=array(dtype=jnp.int32),
        log_prob=array(num_drafts),
        position=array(num_rows, dtype=jnp.int32),
        target=Normalizer(array(num_rows), array(num_rows)),
        joint=array(num_rows),
        draft=None if batch.draft is None else Normalizer(array(num_rows), array(num_rows)),
        arrivals=array(dtype=jnp.int32),
    )
    return call(
        partial(_accept_kernel, rule=rule, in_parts=in_parts),
        outputs,
        (batch._replace(bonus_tokens=None), statistics, options),
        grid=(batch_size,),
        num_warps=num_warps,
        interpret=interpret,
    )


def _accept_kernel(inputs, out: Decision[Ref], *, rule, in_parts: bool):
    batch, statistics, options = inputs
    num_drafts, num_rows = batch.num_drafts, out.position.shape[1]
    sequence = pl.program_id(0)
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_drafts))
    count = count_drafts(batch, sequence)
    is_greedy, target, draft, evidence = _weigh(batch, statistics, sequence, lane, in_parts)
    uniforms = _load(statistics.uniforms, sequence, lane, num_drafts)
    if rule is None:
        # A row without mass, as the target has one after a stop token, ends the drafts that are looked at.
        has_mass = (jnp.abs(target.log_mass) < jnp.inf) | is_greedy
        count = jnp.minimum(count, jnp.min(jnp.where(has_mass, num_drafts, lane)))
        joint, joint_before = _joint(log_ratio(evidence), lane, num_drafts)
        # A prefix is accepted with at most its joint probability: its residual is needed only where that would do.
        before = _load(statistics.uniforms, sequence, jnp.maximum(lane - 1, 0), num_drafts)
        needed = (lane == 0) | (before < joint_before)
        all_pass = jnp.max(jnp.where((lane == count - 1) & (uniforms < joint), 1, 0)) > 0
        undecided = jnp.max(jnp.where((lane > 0) & (lane < count) & needed, 1, 0))
        num_accepted = jnp.where(all_pass, count, -undecided)
        num_accepted = jnp.where(is_greedy, _leading(uniforms < joint, lane, count), num_accepted)
        is_decided = num_accepted >= 0
    else:
        num_accepted = _leading(uniforms < rule(evidence, options), lane, count)
        is_decided, joint_before, needed = num_accepted >= 0, jnp.ones_like(evidence.log_prob), lane == 0

    def of_row(values: Array) -> Array:
        """The value of the row that was decided on, or of each row."""
        return jnp.where(is_decided, jnp.sum(jnp.where(lane == num_accepted, values, 0)), values)

    position = jnp.where(is_decided, num_accepted, lane)
    is_row, is_rejected = lane < num_rows, position < count
    needed = jnp.where(is_decided, lane == 0, needed & is_rejected)
    plgpu.store(out.arrivals.at[sequence], runtime_zero(count))
    plgpu.store(out.num_drafts.at[sequence], count)
    plgpu.store(out.num_accepted.at[sequence], num_accepted)
    plgpu.store(out.log_prob.at[sequence, lane], evidence.log_prob, mask=lane < num_drafts)
    plgpu.store(out.position.at[sequence, lane], jnp.where(needed, position, -1), mask=is_row)
    plgpu.store(out.joint.at[sequence, lane], jnp.where(is_decided, 1, joint_before), mask=is_row)
    plgpu.store(out.target.top.at[sequence, lane], of_row(target.top), mask=is_row)
    log_mass = jnp.where(is_rejected, of_row(target.log_mass), 0)
    plgpu.store(out.target.log_mass.at[sequence, lane], log_mass, mask=is_row)
    if draft is not None and out.draft is not None:
        plgpu.store(out.draft.top.at[sequence, lane], of_row(draft.top), mask=is_row)
        plgpu.store(out.draft.log_mass.at[sequence, lane], of_row(draft.log_mass), mask=is_row)


def _weigh(
    batch: Batch[Ref], statistics: Statistics[Ref], sequence: Array, lane: Array, in_parts: bool
) -> tuple[Array, Normalizer[Array], Normalizer[Array] | None, Evidence]:
    """Return whether the sequence is greedy, the normalizers of its target and draft rows, and the evidence for a rule.

    Rows past the drafts hold anything: to wait until it is known which they are would cost as much as to read them.
    """
    num_drafts = batch.num_drafts
    temperature = batch.target.load_temperature(sequence)
    is_greedy = temperature == 0
    target, entropy = _combine(statistics, sequence, lane, num_drafts, 0, temperature)
    token_logit = _load(statistics.token, sequence, lane, num_drafts)
    log_prob = token_log_prob(token_logit, target.top, inverse(temperature), target.log_mass)
    draft, draft_log_prob = None, jnp.zeros_like(log_prob)
    if batch.draft is not None:
        draft_temperature = batch.draft.load_temperature(sequence)
        draft = _draft_normalizer(batch.draft, statistics, sequence, lane, draft_temperature)
        logit = plgpu.load(statistics.token.at[sequence, num_drafts + lane], mask=lane < num_drafts, other=0)
        draft_log_prob = (logit - draft.top) * inverse(draft_temperature) - draft.log_mass
        draft_log_prob = jnp.where((draft_temperature == 0) | is_greedy, 0, draft_log_prob)
    if batch.target.temperature is not None:
        beats = _load_tiles(statistics.mass, sequence, lane, num_drafts, 0, 0)
        if in_parts:
            tops = _load_tiles(statistics.top, sequence, lane, num_drafts, 0, -jnp.inf)
            logit = jnp.broadcast_to(token_logit[:, None], tops.shape)
            token = _load(batch.tokens, sequence, lane, num_drafts).astype(jnp.float32)
            is_lower = beats < jnp.broadcast_to(token[:, None], tops.shape)
            beats = ((tops > logit) | ((tops == logit) & is_lower)).astype(jnp.float32)
        is_beaten = jnp.max(beats, axis=1) > 0
        is_beaten |= token_logit == -jnp.inf
        log_prob = jnp.where(is_greedy, jnp.where(is_beaten, -jnp.inf, 0), log_prob)
        entropy = None if entropy is None else jnp.where(is_greedy, 0, entropy)
    return is_greedy, target, draft, Evidence(log_prob, draft_log_prob, entropy, lane)


def _load(ref: Ref, sequence: Array, index: Array, size: int) -> Array:
    return plgpu.load(ref.at[sequence, index], mask=index < size, other=0)


def _load_tiles(ref: Ref, sequence: Array, lane: Array, num_rows: int, first_row: int, other: float) -> Array:
    """Load a statistic [lanes, tiles] of `num_rows` rows from `first_row` on."""
    num_tiles = ref.shape[2]
    shape = lane.shape[0], pl.next_power_of_2(num_tiles)
    rows, tiles = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = (rows < num_rows) & (tiles < num_tiles)
    return plgpu.load(ref.at[sequence, first_row + rows, tiles], mask=mask, other=other)


def _combine(
    statistics: Statistics[Ref], sequence: Array, lane: Array, num_rows: int, first_row: int, temperature: Array
) -> tuple[Normalizer[Array], Array | None]:
    """Combine the statistics of the tiles of each row to the row's normalizer and, where asked for, its entropy."""
    tile_tops = _load_tiles(statistics.top, sequence, lane, num_rows, first_row, -jnp.inf)
    masses = _load_tiles(statistics.mass, sequence, lane, num_rows, first_row, 0)
    top = finite(jnp.max(tile_tops, axis=1))
    distance = tile_tops - jnp.broadcast_to(top[:, None], tile_tops.shape)
    factors = exp(distance, inverse(temperature))
    mass = jnp.sum(masses * factors, axis=1)
    if statistics.weighted is None:
        return Normalizer(top, jnp.log(mass)), None
    weighted = _load_tiles(statistics.weighted, sequence, lane, num_rows, first_row, 0)
    moved = jnp.where(masses > 0, factors * (weighted + masses * distance * inverse(temperature)), 0)
    return Normalizer(top, jnp.log(mass)), jnp.log(mass) - jnp.sum(moved, axis=1) / mass


def _draft_normalizer(
    draft: Rows[Ref], statistics: Statistics[Ref], sequence: Array, lane: Array, temperature: Array
) -> Normalizer[Array]:
    """Return the normalizers of the draft rows; in a row without mass every token gets probability 0."""
    num_drafts = statistics.token.shape[1] // 2
    if draft.log_normalizer is None:
        (top, log_mass), _ = _combine(statistics, sequence, lane, num_drafts, num_drafts, temperature)
    else:
        at = draft.locate(jnp.broadcast_to(sequence, lane.shape), jnp.minimum(lane, num_drafts - 1))
        top, log_mass = jnp.zeros(lane.shape, jnp.float32), plgpu.load(draft.log_normalizer.at[at])
        log_mass = log_mass.astype(jnp.float32)
    return Normalizer(top, jnp.where(log_mass == -jnp.inf, 0, log_mass))


def _joint(log_ratio: Array, lane: Array, num_drafts: int) -> tuple[Array, Array]:
    """Return the probabilities P of accepting as a whole the drafts up to each one, and of the drafts before each one.

    P = min(1, P_before * target / draft), and P = 1 before the first draft.
    """
    log_joint, log_before, carry = jnp.zeros_like(log_ratio), jnp.zeros_like(log_ratio), jnp.float32(0)
    for i in range(num_drafts):
        log_before = jnp.where(lane == i, carry, log_before)
        carry = jnp.minimum(carry + jnp.sum(jnp.where(lane == i, log_ratio, 0)), 0)
        log_joint = jnp.where(lane == i, carry, log_joint)
    return jnp.exp(log_joint), jnp.exp(log_before)


def _leading(accepted: Array, lane: Array, count: Array) -> Array:
    """Return the number of drafts before the first that is not accepted."""
    return jnp.minimum(jnp.min(jnp.where(accepted, lane.shape[0], lane)), count)
