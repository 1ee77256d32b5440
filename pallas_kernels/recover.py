"""Last launch of a verification: the token after the accepted drafts, and the outputs of the verification.

The residual is summed in blocks of 512 tokens; a draw picks a block by inverse CDF, then a token in the block.

The kernel is bound by memory. It reads one target row and one draft row of each sequence; under block verification it
reads the rows of every prefix that may still be accepted. The last program of a sequence to finish its blocks draws the
token and writes the verdict, which saves a launch.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.accept import Decision
from pallas_kernels.launch import Leaf, Ref, call, is_last
from pallas_kernels.rows import (
    BLOCK_SIZE,
    Batch,
    Rows,
    Verdict,
    block_max,
    block_sum,
    exp,
    finite,
    first_above,
    in_blocks,
    inverse,
    marked,
    over_blocks,
    tile_of_blocks,
    token_log_prob,
)
from pallas_kernels.rules import accept_prefix
from pallas_kernels.statistics import Statistics
from pallas_kernels.triton import plgpu


class _Inputs(NamedTuple, Generic[Leaf]):
    batch: Batch[Leaf]
    uniforms: Leaf  # [B, K + 2]
    decision: Decision[Leaf]
    arrivals: Leaf | None  # [B]; None where the last program reads no results of other programs


class _Masses(NamedTuple, Generic[Leaf]):
    """Masses of the P blocks of the M rows of a decision, where the tiles pad the vocabulary to P blocks.

    Rows that are not needed are not written.
    """

    top: Leaf  # [B, M, P] logit that the masses of the block are relative to; -inf if the block is empty
    residual: Leaf  # [B, M, P] mass of max(joint * target - draft, 0) in each block
    plain: Leaf  # [B, M, P] mass of the target row in each block


class Candidates(NamedTuple, Generic[Leaf]):
    """The masses of the P blocks of the M rows of a decision, and the token that a draw from each block would give.

    The blocks cover a part of the vocabulary, or all parts, one after the other.
    """

    masses: _Masses[Leaf]
    token: Leaf  # [B, M, P] float32, which has all ids: the token of the residual, of the target row where that is 0
    logit: Leaf | None  # [B, M, P] logit of the token, or of the bonus token if the block has it


def recover(
    batch: Batch[Array],
    statistics: Statistics[Array],
    decision: Decision[Array],
    *,
    recover_best: bool = False,
    log_probs: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> Verdict[Array]:
    """Emit the accepted drafts and one more token.

    Args:
        batch: the rows to verify, K >= 1.
        statistics: of the rows of the batch.
        decision: how many drafts are accepted.
        recover_best: whether a rejected draft is replaced by the argmax of its row instead of a draw.
        log_probs: whether to fill `Verdict.log_probs`.
        tile_size: tokens a program reads, a power of two and a multiple of BLOCK_SIZE; None chooses it.
        num_warps: warps of each program.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        Verdict.
    """
    assert batch.tokens is not None, "without drafts nothing is recovered"
    batch_size, num_rows = decision.position.shape
    vocab_size, width = batch.target.vocab_size, batch.num_drafts + 1
    if tile_size is None:
        tile_size = tile_of_blocks(batch_size * num_rows, vocab_size)
    num_tiles = pl.cdiv(vocab_size, tile_size)

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    blocks = array(num_rows, num_tiles * (tile_size // BLOCK_SIZE))
    verdict = Verdict(array(width, dtype=jnp.int32), array(dtype=jnp.int32), array(width) if log_probs else None)
    _, _, verdict = call(
        partial(_recover_kernel, recover_best=recover_best, tile_size=tile_size, interpret=interpret),
        (array(dtype=jnp.int32), _Masses(blocks, blocks, blocks), verdict),
        _Inputs(
            batch._replace(num_tokens=None), statistics.uniforms, decision._replace(arrivals=None), decision.arrivals
        ),
        begun=decision.arrivals,
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )
    return verdict


def candidates(
    batch: Batch[Array],
    uniforms: Array,
    decision: Decision[Array],
    *,
    recover_best: bool = False,
    log_probs: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> Candidates[Array]:
    """Return the tokens that the blocks of a part of the vocabulary would give.

    A draw from a block takes no number that depends on which block is drawn. So every block draws, one exchange between
    the devices suffices, and `recover_candidate` chooses among the blocks of all parts.

    The arguments that are not named here are as `recover` takes them.

    Args:
        batch: the rows to verify, K >= 1, which have `first_id`.
        uniforms: [B, K+2] `Statistics.uniforms`.
        decision: how many drafts are accepted.

    Returns:
        Candidates of this part.
    """
    batch_size, num_rows = decision.position.shape
    vocab_size = batch.target.vocab_size
    if tile_size is None:
        tile_size = tile_of_blocks(batch_size * num_rows, vocab_size)
    num_tiles = pl.cdiv(vocab_size, tile_size)
    blocks = jax.ShapeDtypeStruct((batch_size, num_rows, num_tiles * (tile_size // BLOCK_SIZE)), jnp.float32)
    found = call(
        partial(_candidate_kernel, recover_best=recover_best, tile_size=tile_size, interpret=interpret),
        Candidates(_Masses(blocks, blocks, blocks), blocks, blocks if log_probs else None),
        _Inputs(batch._replace(num_tokens=None), uniforms, decision._replace(arrivals=None), None),
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )
    return jax.tree.map(lambda field: field[..., : pl.cdiv(vocab_size, BLOCK_SIZE)], found)


def recover_candidate(
    batch: Batch[Array],
    uniforms: Array,
    decision: Decision[Array],
    found: Candidates[Array],
    *,
    part_size: int,
    recover_best: bool = False,
    num_warps: int = 4,
    interpret: bool = False,
) -> Verdict[Array]:
    """Emit the accepted drafts and one more token, as `recover` does, given the candidates of all parts.

    The arguments that are not named here are as `recover` takes them.

    Args:
        batch: the rows to verify, whose logits are not read.
        uniforms: [B, K+2] `Statistics.uniforms`.
        decision: how many drafts are accepted.
        found: the candidates of all parts. Their logits are given where log-probabilities are wanted.
        part_size: the number of ids in a part.

    Returns:
        Verdict.
    """
    assert batch.tokens is not None, "without drafts nothing is recovered"
    batch_size, width = batch.tokens.shape[0], batch.num_drafts + 1
    tokens = jax.ShapeDtypeStruct((batch_size, width), jnp.int32)
    log_probs = None if found.logit is None else jax.ShapeDtypeStruct(tokens.shape, jnp.float32)
    return call(
        partial(_choice_kernel, recover_best=recover_best, part_size=part_size, interpret=interpret),
        Verdict(tokens, jax.ShapeDtypeStruct((batch_size,), jnp.int32), log_probs),
        (_Inputs(batch._replace(num_tokens=None), uniforms, decision._replace(arrivals=None), None), found),
        grid=(batch_size, 1),
        num_warps=num_warps,
        interpret=interpret,
    )


class _Density(NamedTuple):
    """The distribution of one row: log p(v) = (logit - top) * scale - log_mass."""

    rows: Rows[Ref]
    scale: Array  # 1 / temperature
    top: Array
    log_mass: Array


class _Source(NamedTuple):
    """A row that the token may come from, inside a kernel, with all numbers that are known of it."""

    sequence: Array
    row: Array  # index of the row in the decision
    position: Array  # index of the row in the target
    target: _Density
    draft: _Density | None
    is_rejected: Array  # the token comes from the residual, else from the target row
    has_draft: Array  # the residual subtracts the draft distribution
    wants_best: Array | None  # the token is the argmax of the target row; None if it never is
    excluded: Array  # token that the residual of a deterministic draft leaves out, or -1
    joint: Array
    interpret: bool

    def load_target(self, ids: Array, *, keeps_nan: bool = False) -> Array:
        """Load the logits of tokens under the target, as `Rows.load` does."""
        target = self.target.rows
        return target.load(target.locate(self.sequence, self.position), ids, keeps_nan=keeps_nan)

    def load(self, ids: Array, *, keeps_nan: bool = False) -> tuple[Array, Array | None]:
        """Load the logits of tokens under the target, and under the draft distribution where drafts have one.

        `keeps_nan` is for the target alone: `weigh` gives a NaN of the target no weight.
        """
        logits, draft = self.load_target(ids, keeps_nan=keeps_nan), self.draft
        if draft is None:
            return logits, None
        at = draft.rows.locate(self.sequence, jnp.minimum(self.position, draft.rows.shape[1] - 1))
        return logits, draft.rows.load(at, ids, self.has_draft)

    def weigh(self, logits: tuple[Array, Array | None], ids: Array, top: Array) -> tuple[Array, Array]:
        """Return the weights of tokens in the target row, and in max(joint * target - draft, 0).

        The weights are relative to the logit `top` and to the mass of the row, or to 1 where that is not known.
        """
        target_logits, draft_logits = logits
        plain = exp(target_logits - top, self.target.scale, self.target.log_mass, flush=not self.interpret)
        weights = jnp.where(ids == self.excluded, 0, self.joint * plain)
        if self.draft is not None and draft_logits is not None:
            distance = draft_logits - self.draft.top
            probs = exp(distance, self.draft.scale, self.draft.log_mass, flush=not self.interpret)
            weights = jnp.where(self.has_draft, weights - probs, weights)
        return jnp.where(plain > 0, plain, 0), jnp.where(weights > 0, weights, 0)


def _source(
    inputs: _Inputs[Ref], sequence: Array, row: Array, position: Array, *, recover_best: bool, interpret: bool
) -> _Source:
    """Read the statistics of a row of the decision, whose place in the target is `position`."""
    (tokens, _, _, target, draft), decision = inputs.batch, inputs.decision
    assert tokens is not None, "without drafts nothing is recovered"

    def of_row(field: Ref) -> Array:
        return plgpu.load(field.at[sequence, row])

    temperature = target.load_temperature(sequence)
    is_rejected = position < plgpu.load(decision.num_drafts.at[sequence])
    token = plgpu.load(tokens.at[sequence, jnp.clip(position, 0, tokens.shape[1] - 1)])
    wants_best = None
    if target.temperature is not None or recover_best:
        wants_best = (temperature == 0) | (is_rejected & recover_best)
    has_draft, draft_density = is_rejected & (draft is not None), None
    if draft is not None and decision.draft is not None:
        draft_temperature = draft.load_temperature(sequence)
        has_draft = is_rejected & (draft_temperature != 0)
        top, log_mass = (of_row(field) for field in decision.draft)
        draft_density = _Density(draft, inverse(draft_temperature), top, log_mass)
    excluded = jnp.where(is_rejected & ~has_draft, token, -1)
    top, log_mass = (of_row(field) for field in decision.target)
    return _Source(
        sequence,
        row,
        position,
        target=_Density(target, inverse(temperature), top, log_mass),
        draft=draft_density,
        is_rejected=is_rejected,
        has_draft=has_draft,
        wants_best=wants_best,
        excluded=excluded,
        joint=of_row(decision.joint),
        interpret=interpret,
    )


def _recover_kernel(inputs: _Inputs[Ref], out, *, recover_best: bool, tile_size: int, interpret: bool):
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
                chosen = source
            else:
                chosen = _choose(inputs, masses, sequence, source_of)
            drawn = _recovered(inputs, masses, chosen, partial(_draw, chosen), partial(_best, chosen))
            rows = chosen.target.rows
            at = rows.locate(sequence, chosen.position)
            _emit(inputs, verdict, chosen, drawn, lambda last: rows.load(at, jnp.maximum(last, 0), last >= 0))


def _candidate_kernel(
    inputs: _Inputs[Ref], out: Candidates[Ref], *, recover_best: bool, tile_size: int, interpret: bool
):
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    position = plgpu.load(inputs.decision.position.at[sequence, row])
    source = _source(inputs, sequence, row, position, recover_best=recover_best, interpret=interpret)
    pl.when(position >= 0)(lambda: _store_candidates(inputs, source, tile, out, tile_size))


def _choice_kernel(inputs, verdict: Verdict[Ref], *, recover_best: bool, part_size: int, interpret: bool):
    given, found = inputs
    sequence, row, masses = pl.program_id(0), pl.program_id(1), found.masses
    source_of = partial(_source, given, sequence, recover_best=recover_best, interpret=interpret)
    if given.decision.position.shape[1] == 1:
        source = source_of(row, plgpu.load(given.decision.position.at[sequence, row]))
    else:
        source = _choose(given, masses, sequence, source_of)
    blocks_of_part = pl.cdiv(part_size, BLOCK_SIZE)

    def token_of(block: Array, *_) -> Array:
        return plgpu.load(found.token.at[sequence, source.row, block]).astype(jnp.int32)

    def logit_of(last: Array) -> Array:
        block = last // part_size * blocks_of_part + last % part_size // BLOCK_SIZE
        inside = (last >= 0) & (block < found.token.shape[2])
        return plgpu.load(found.logit.at[sequence, source.row, block], mask=inside, other=-jnp.inf)

    _emit(given, verdict, source, _recovered(given, masses, source, token_of, token_of), logit_of)


def _count_needed(decision: Decision[Ref], sequence: Array) -> Array | int:
    """Count the rows of a sequence that are needed."""
    num_rows = decision.position.shape[1]
    if num_rows == 1:
        return 1
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_rows))
    positions = plgpu.load(decision.position.at[sequence, lane], mask=lane < num_rows, other=-1)
    return jnp.sum((positions >= 0).astype(jnp.float32)).astype(jnp.int32)


def _store_masses(source: _Source, tile: Array, out: _Masses[Ref], tile_size: int):
    """Store the masses of the blocks of a tile, or only their maxima where the argmax is wanted."""
    parts, blocks = in_blocks(tile, tile_size, source.target.rows.logits.dtype)
    at = source.sequence, source.row, blocks

    # On a GPU a maximum leaves NaN out, so that nobody has to look for it.
    keeps_nan = not source.interpret

    def store_weights():
        logits = [source.load(ids, keeps_nan=keeps_nan) for ids in parts]
        top = jnp.where(source.is_rejected, source.target.top, block_max([target for target, _ in logits]))
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
        plgpu.store(out.top.at[at], block_max([source.load_target(ids, keeps_nan=keeps_nan) for ids in parts]))


def _store_candidates(inputs: _Inputs[Ref], source: _Source, tile: Array, out: Candidates[Ref], tile_size: int):
    """For each block of a tile, store its mass and the token that a draw from it would return."""
    target, num_blocks = source.target, tile_size // BLOCK_SIZE
    block, inside = (jax.lax.broadcasted_iota(jnp.int32, (num_blocks, BLOCK_SIZE), axis) for axis in range(2))
    ids = target.rows.whole_ids(tile * tile_size + block * BLOCK_SIZE + inside)
    at = source.sequence, source.row, tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
    logits = source.load(ids)
    top = jnp.where(source.is_rejected, target.top, block_max([logits[0]]))
    plain, weights = source.weigh(logits, ids, over_blocks(finite(top), ids))
    residual = block_sum([weights])
    plgpu.store(out.masses.residual.at[at], residual)
    plgpu.store(out.masses.plain.at[at], block_sum([plain]))
    chosen = jnp.where(over_blocks(residual, ids) > 0, weights, plain)
    inner = _first_above_of_blocks(chosen, inputs.uniforms[source.sequence, inputs.uniforms.shape[1] - 1], inside)
    if source.wants_best is not None:
        highest = block_max([logits[0]])
        lowest = jnp.min(jnp.where(logits[0] == over_blocks(highest, ids), inside, BLOCK_SIZE), axis=1)
        top, inner = jnp.where(source.wants_best, highest, top), jnp.where(source.wants_best, lowest, inner)
    plgpu.store(out.masses.top.at[at], top)
    first = tile * tile_size + jax.lax.iota(jnp.int32, num_blocks) * BLOCK_SIZE
    token = target.rows.whole_ids(first + inner)
    plgpu.store(out.token.at[at], token.astype(jnp.float32))
    if out.logit is None:
        return
    listed = over_blocks(token, ids)
    if inputs.batch.bonus_tokens is not None:
        bonus = plgpu.load(inputs.batch.bonus_tokens.at[source.sequence]).astype(jnp.int32)
        has_bonus = jnp.max(jnp.where(ids == bonus, 1, 0), axis=1) * jnp.where(source.is_rejected, 0, 1)
        listed = jnp.where(over_blocks(has_bonus, ids) > 0, bonus, listed)
    plgpu.store(out.logit.at[at], jnp.max(jnp.where(ids == listed, logits[0], -jnp.inf), axis=1))


def _first_above_of_blocks(weights: Array, uniform: Array, inside: Array) -> Array:
    """Do as `first_above` does in each of N blocks, given the weights and the indices [N, BLOCK_SIZE] inside them."""
    total = jnp.cumsum(weights, axis=1)
    mass = jnp.max(total, axis=1)
    bound = jnp.minimum(uniform * mass, jnp.nextafter(mass, jnp.zeros_like(mass)))
    last = over_blocks(jnp.max(jnp.where(weights > 0, inside, 0), axis=1), weights)
    return jnp.min(jnp.where((weights > 0) & (total > over_blocks(bound, weights)), inside, last), axis=1)


def _choose(inputs: _Inputs[Ref], masses: _Masses[Ref], sequence: Array, source_of: Callable[..., _Source]) -> _Source:
    """Choose, under block verification, the row that the token comes from."""
    num_accepted = plgpu.load(inputs.decision.num_accepted.at[sequence])
    is_decided = num_accepted >= 0
    num_accepted = jax.lax.cond(
        is_decided,
        lambda: num_accepted,
        lambda: _longest_accepted_prefix(inputs.decision, masses, inputs.uniforms, sequence),
    )
    return source_of(jnp.where(is_decided, 0, num_accepted), num_accepted)


def _emit(
    inputs: _Inputs[Ref],
    out: Verdict[Ref],
    source: _Source,
    drawn_from: tuple[Array, Array, Array],
    logit_of: Callable[[Array], Array],
):
    """Write the verdict of a sequence.

    Args:
        inputs: of the kernel.
        out: where the verdict is written.
        source: the row that the last token comes from.
        drawn_from: the result of `_recovered`.
        logit_of: function of the last token, which may be a bonus token, to its logit in the row.
    """
    tokens, bonus_tokens, target = inputs.batch.tokens, inputs.batch.bonus_tokens, source.target
    assert tokens is not None, "without drafts nothing is recovered"
    sequence, num_accepted, num_drafts = source.sequence, source.position, tokens.shape[1]
    drawn, top, log_mass = drawn_from
    last = drawn
    if bonus_tokens is not None:
        last = jnp.where(source.is_rejected, last, plgpu.load(bonus_tokens.at[sequence]).astype(jnp.int32))
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_drafts + 1))
    accepted = plgpu.load(tokens.at[sequence, lane], mask=lane < num_accepted, other=-1).astype(jnp.int32)
    emitted = jnp.where(lane == num_accepted, last, accepted)
    plgpu.store(out.tokens.at[sequence, lane], emitted, mask=lane <= num_drafts)
    assert out.num_accepted is not None, "a verification counts"
    plgpu.store(out.num_accepted.at[sequence], num_accepted)
    if out.log_probs is None:
        return
    temperature = target.rows.load_temperature(sequence)
    logit = logit_of(last)
    # The temperature is 0 here, and stands for that number: a select between two Python scalars does not lower.
    greedy_log_prob = jnp.where((last == drawn) & (logit > -jnp.inf), temperature, -jnp.inf)
    last_log_prob = token_log_prob(logit, top, target.scale, log_mass)
    last_log_prob = jnp.where(temperature == 0, greedy_log_prob, last_log_prob)
    log_prob = plgpu.load(inputs.decision.log_prob.at[sequence, lane], mask=lane < num_accepted, other=0)
    log_prob = jnp.where(lane == num_accepted, last_log_prob, log_prob)
    plgpu.store(out.log_probs.at[sequence, lane], log_prob, mask=lane <= num_drafts)


def _recovered(
    inputs: _Inputs[Ref],
    masses: _Masses[Ref],
    source: _Source,
    draw: Callable[[Array, Array, Array, Array], Array],
    best: Callable[[Array], Array],
) -> tuple[Array, Array, Array]:
    """Return the `marked` token that is drawn from `source`, and the `top` and `log_mass` of its row, as in `_Density`.

    Args:
        inputs: of the kernel.
        masses: of all blocks.
        source: a row.
        draw: function of a block, whether the target row itself is drawn from, its `top`, and a uniform, to a token.
        best: function of the block of the argmax to the argmax.
    """
    if source.wants_best is None:
        return _drawn(inputs, masses, source, draw)
    return jax.lax.cond(
        source.wants_best,
        lambda: _best_of_blocks(masses, source, best),
        lambda: _drawn(inputs, masses, source, draw),
    )


def _best_of_blocks(
    masses: _Masses[Ref], source: _Source, best: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Return the result of `_recovered` for the argmax."""
    tops = _load_blocks(masses.top, source, -jnp.inf)
    token = best(jax.lax.argmax(tops, 0, jnp.int32))
    return marked(token, jnp.max(tops) == -jnp.inf), source.target.top, source.target.log_mass


def _drawn(
    inputs: _Inputs[Ref], masses: _Masses[Ref], source: _Source, draw: Callable[[Array, Array, Array, Array], Array]
) -> tuple[Array, Array, Array]:
    """Choose a block by inverse CDF and return the result of `_recovered`."""
    sequence, target, uniforms = source.sequence, source.target, inputs.uniforms
    num_drafts = uniforms.shape[1] - 2
    tops = _load_blocks(masses.top, source, -jnp.inf)
    top = finite(jnp.max(tops))
    factors = exp(tops - top, target.scale)  # these are 1 where the mass of the row was known before
    weights, plain = (_load_blocks(field, source, 0) * factors for field in (masses.residual, masses.plain))
    is_plain = ~(jnp.sum(weights) > 0)
    block = first_above(jnp.where(is_plain, plain, weights), uniforms[sequence, num_drafts])
    token, mass = draw(block, is_plain, top, uniforms[sequence, num_drafts + 1]), jnp.sum(plain)
    token = marked(token, is_plain & ~(mass > 0))
    return token, top, target.log_mass + jnp.log(jnp.where(source.is_rejected, 1, mass))


def _draw(source: _Source, block: Array, is_plain: Array, top: Array, uniform: Array) -> Array:
    """Draw a token from a block."""
    ids = block * BLOCK_SIZE + jax.lax.iota(jnp.int32, BLOCK_SIZE)
    plain, weights = source.weigh(source.load(ids), ids, top)
    inner = first_above(jnp.where(is_plain, plain, weights), uniform)
    return jnp.minimum(block * BLOCK_SIZE + inner, source.target.rows.vocab_size - 1)


def _best(source: _Source, block: Array) -> Array:
    """Return the lowest id of the largest target logit of a block."""
    first = block * BLOCK_SIZE
    logits = source.load_target(first + jax.lax.iota(jnp.int32, BLOCK_SIZE))
    return jnp.minimum(first + jax.lax.argmax(logits, 0, jnp.int32), source.target.rows.vocab_size - 1)


def _load_blocks(field: Ref, source: _Source, other: float) -> Array:
    """Load a field of the masses of all blocks of a row, and `other` past the last block."""
    size = field.shape[2]
    block = jax.lax.iota(jnp.int32, pl.next_power_of_2(size))
    return plgpu.load(field.at[source.sequence, source.row, block], mask=block < size, other=other)


def _longest_accepted_prefix(decision: Decision[Ref], masses: _Masses[Ref], uniforms: Ref, sequence: Array) -> Array:
    """Return the length of the longest prefix that block verification accepts, of those shorter than the drafts."""
    num_rows, size = masses.residual.shape[1:]
    shape = pl.next_power_of_2(num_rows), pl.next_power_of_2(size)
    lane = jax.lax.iota(jnp.int32, shape[0])  # row i holds the residual after i accepted drafts
    is_needed = plgpu.load(decision.position.at[sequence, lane], mask=lane < num_rows, other=-1) >= 0
    rows, blocks = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(is_needed[:, None], shape) & (blocks < size)
    residual = jnp.sum(plgpu.load(masses.residual.at[sequence, rows, blocks], mask=mask, other=0), axis=1)
    joint = plgpu.load(decision.joint.at[sequence, lane], mask=is_needed, other=0)
    uniform = plgpu.load(uniforms.at[sequence, jnp.maximum(lane - 1, 0)], mask=is_needed, other=1)
    return jnp.max(jnp.where(is_needed & (uniform < accept_prefix(residual, joint)), lane, 0))
