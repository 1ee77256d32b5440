"""The residual of the rows that the next token may come from, as masses of blocks of the vocabulary.

Bound by memory: one target row and one draft row a sequence are read once; under block verification those of every
prefix that may yet be accepted.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.accept import Decision
from pallas_kernels.rows import BLOCK_SIZE, Rows, call, default_tile_size, exp, finite, inverse


class Residuals(NamedTuple):
    """Of the M rows of a decision, N tiles, and P blocks: those of the vocabulary after padding the tiles.

    Rows that are not needed are not written.
    """

    top: Array  # [B, M, N] what the weights of the tile are relative to, a logit
    residual: Array  # [B, M, P] mass of max(joint * target - draft, 0) in each block
    plain: Array  # [B, M, P] mass of the target row in each block
    best: Array | None  # [B, N] largest logit of the tile, of rows that take the argmax
    best_id: Array | None  # [B, N] int32, the lowest id that has it


def residual_masses(
    tokens: Array,
    target: Rows,
    draft: Rows | None,
    decision: Decision,
    *,
    recover_best: bool = False,
    tile_size: int | None = None,
    num_warps: int = 4,
    interpret: bool = False,
) -> Residuals:
    """Reduce the residuals.

    Args:
        tokens: [B, K] int32.
        target: of K+1 rows a sequence.
        draft: of K rows, or None for deterministic drafts.
        decision: about these.
        recover_best: a rejected token is replaced by the argmax of its row.
        tile_size: tokens a program, a power of two, a multiple of BLOCK_SIZE.
    """
    batch_size, num_rows = decision.position.shape
    if tile_size is None:
        tile_size = max(BLOCK_SIZE, default_tile_size(batch_size * num_rows, target.vocab_size))
    num_tiles = pl.cdiv(target.vocab_size, tile_size)

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    has_best = recover_best or target.temperature is not None
    blocks = array(num_rows, num_tiles * (tile_size // BLOCK_SIZE))
    outputs = Residuals(
        top=array(num_rows, num_tiles),
        residual=blocks,
        plain=blocks,
        best=array(num_tiles) if has_best else None,
        best_id=array(num_tiles, dtype=jnp.int32) if has_best else None,
    )
    return call(
        partial(_residual_kernel, recover_best=recover_best, tile_size=tile_size),
        outputs,
        (tokens, target, draft, decision),
        grid=(batch_size, num_rows, num_tiles),
        num_warps=num_warps,
        interpret=interpret,
    )


def _residual_kernel(inputs, out: Residuals, *, recover_best: bool, tile_size: int):
    tokens, target, draft, decision = inputs
    num_drafts = tokens.shape[1]
    sequence, row, tile = (pl.program_id(axis) for axis in range(3))
    position = plgpu.load(decision.position.at[sequence, row])
    is_rejected = position < plgpu.load(decision.count.at[sequence])
    temperature = target.load_temperature(sequence)
    wants_best = (temperature == 0) | (is_rejected & recover_best)
    top = plgpu.load(decision.top.at[sequence, row])
    ids = tile * tile_size + jax.lax.iota(jnp.int32, tile_size)

    if out.best is not None:

        @pl.when((position >= 0) & wants_best)
        def _():
            logits = target.load(target.at(sequence, position), ids)
            logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
            plgpu.store(out.top.at[sequence, row, tile], top)
            plgpu.store(out.best.at[sequence, tile], jnp.max(logits))
            plgpu.store(out.best_id.at[sequence, tile], tile * tile_size + jax.lax.argmax(logits, 0, jnp.int32))

    @pl.when((position >= 0) & ~wants_best)
    def _():
        draft_position = jnp.minimum(position, num_drafts - 1)
        logits = target.load(target.at(sequence, position), ids)
        if draft is not None:
            draft_temperature = draft.load_temperature(sequence)
            has_draft = is_rejected & (draft_temperature != 0)
            draft_logits = draft.load(draft.at(sequence, draft_position), ids, has_draft)
        is_one_hot = is_rejected if draft is None else is_rejected & (draft_temperature == 0)
        excluded = jnp.where(is_one_hot, plgpu.load(tokens.at[sequence, draft_position]), -1)
        shift = jnp.where(is_rejected, top, finite(jnp.max(logits)))
        plain = exp(logits - shift, inverse(temperature), plgpu.load(decision.log_mass.at[sequence, row]))
        weights = jnp.where(ids == excluded, 0, plgpu.load(decision.joint.at[sequence, row]) * plain)
        if draft is not None:
            draft_logits = draft_logits - plgpu.load(decision.draft_shift.at[sequence, row])
            draft_log_mass = plgpu.load(decision.draft_log_mass.at[sequence, row])
            probs = exp(draft_logits, inverse(draft_temperature), draft_log_mass)
            weights = jnp.where(has_draft, weights - probs, weights)
        plgpu.store(out.top.at[sequence, row, tile], shift)
        num_blocks = tile_size // BLOCK_SIZE
        blocks = tile * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
        for ref, values in ((out.plain, plain), (out.residual, weights)):
            values = jnp.where(values > 0, values, 0)
            plgpu.store(ref.at[sequence, row, blocks], jnp.sum(values.reshape(num_blocks, BLOCK_SIZE), axis=1))
