"""Verification by the Pallas kernels: from specjax's records to arrays and back.

The rules and the random streams are the same as in the cores, so the tokens are the same, except where rounding
decides. The kernels work under jit, vmap and loops, and inside `jax.shard_map` that splits the batch or, with
`axis_name`, the vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.accept import MAX_DRAFT_TOKENS, accept
from pallas_kernels.recover import candidates, recover, recover_candidate
from pallas_kernels.rows import BLOCK_SIZE, Batch, Rows, in_parts, unsupported_dtype
from pallas_kernels.rules import Evidence, accept_by_ratio
from pallas_kernels.sample import choose_draws, draws, sample
from pallas_kernels.statistics import Part, Statistics, Streams, row_statistics
from specjax.keys import ACCEPT, NUM_PURPOSES, RESIDUAL, TARGET
from specjax.operations.dispatch import SMALL_VOCAB, as_rows
from specjax.parallel import shards
from specjax.types import Array, Categorical, Draft, Verified

STREAMS = Streams(ACCEPT, RESIDUAL, NUM_PURPOSES)


class Rule(NamedTuple):
    """A rule that accepts drafts by probability and recovers from the residual."""

    probability: Callable[[Evidence, Any], Array] | None  # of accepting each draft; None is block verification
    options: Any = None  # pytree of arrays, given to the function as references
    has_entropy: bool = False  # the function reads the entropy of the target rows
    recover_best: bool = False  # a rejected draft is replaced by the argmax of its row instead of a draw


REJECTION, BLOCK = Rule(accept_by_ratio), Rule(None)


def unsupported(draft: Draft, target: Categorical, axis_name: str | None = None) -> str | None:
    """Return why the kernels cannot verify a draft of these shapes and dtypes, or None where they can."""
    batch_size, num_draft_tokens = draft.tokens.shape
    if batch_size == 0:
        return "the kernels take at least one sequence, got none"
    if num_draft_tokens > MAX_DRAFT_TOKENS:
        return f"the kernels take at most {MAX_DRAFT_TOKENS} draft tokens, got {num_draft_tokens}"
    num_parts = shards.num_shards(axis_name)
    if num_parts > 1 and num_parts * target.logits.shape[-1] > shards.MAX_IDS:
        return f"the kernels take at most {shards.MAX_IDS} tokens that devices share, got {num_parts} times as many"
    reason = unsupported_dtype("target", target.logits)
    if reason is None and draft.distribution is not None:
        reason = unsupported_dtype("draft.distribution", draft.distribution.logits)
    return reason


def is_worthwhile(target: Categorical) -> bool:
    """Return whether the kernels are faster than XLA for a vocabulary of this size."""
    return target.logits.shape[-1] >= SMALL_VOCAB


def by_sample(
    keys: Array,
    draft: Draft,
    target: Categorical,
    *,
    bonus_tokens: Array | None,
    log_probs: bool,
    interpret: bool,
    axis_name: str | None = None,
) -> Verified:
    """Verify by exact match with a draw from every target row, as `match` does."""
    batch = as_batch(draft, target, bonus_tokens)
    if draft.tokens.shape[1] == 0:
        batch = batch._replace(tokens=None, num_tokens=None)
    options = {"purpose": TARGET, "log_probs": log_probs, "interpret": interpret}
    if axis_name is None:
        tokens, num_accepted, log_prob = sample(jax.random.key_data(keys), batch, **options)
    else:
        batch = with_first_id(batch, axis_name)
        num_blocks = -(-batch.target.vocab_size // BLOCK_SIZE)
        first_block = jnp.reshape(shards.first_id(num_blocks, axis_name), 1)
        own = draws(jax.random.key_data(keys), batch, first_block, **options)
        parts, _ = shards.join(own, (), axis_name, target.links)
        tokens, num_accepted, log_prob = choose_draws(without_logits(batch), parts, interpret=interpret)
    if num_accepted is None:
        num_accepted = jnp.zeros(draft.tokens.shape[:1], jnp.int32)
    return Verified(tokens, num_accepted, log_prob)


def by_residual(
    keys: Array,
    draft: Draft,
    target: Categorical,
    *,
    rule: Rule,
    bonus_tokens: Array | None,
    log_probs: bool,
    interpret: bool,
    axis_name: str | None = None,
) -> Verified:
    """Verify by a rule that accepts drafts by probability and recovers from the residual."""
    if draft.tokens.shape[1] == 0:
        # The kernels take at least one draft: one that no sequence has.
        rule = rule._replace(probability=accept_by_ratio, options=None)
        no_draft = Draft(jnp.full((draft.tokens.shape[0], 1), -1, jnp.int32))
        common = {"bonus_tokens": bonus_tokens, "log_probs": log_probs, "interpret": interpret}
        verified = by_residual(keys, no_draft, target, rule=rule, axis_name=axis_name, **common)
        return jax.tree.map(lambda field: field[:, :1] if field.ndim == 2 else field, verified)
    batch = as_batch(draft, target, bonus_tokens)
    if axis_name is not None:
        batch = with_first_id(batch, axis_name)
        where = axis_name, target.links
        return _by_residual_of_parts(keys, batch, rule, where, log_probs=log_probs, interpret=interpret)
    statistics = decision = None
    ranges = [(0, draft.tokens.shape[1])] if rule.probability is None else in_parts(batch.target, draft.tokens.shape[1])
    for first, end in ranges:
        part = Part(first, end, statistics, None if decision is None else decision.num_accepted)
        statistics = row_statistics(
            jax.random.key_data(keys), batch, streams=STREAMS, part=part, entropy=rule.has_entropy, interpret=interpret
        )
        decision = accept(batch, statistics, rule.options, rule=rule.probability, interpret=interpret)
    options = {"recover_best": rule.recover_best, "log_probs": log_probs, "interpret": interpret}
    assert statistics is not None and decision is not None, "there is at least one range"
    tokens, num_accepted, log_prob = recover(batch, statistics, decision, **options)
    assert num_accepted is not None, "a verification counts"
    return Verified(tokens, num_accepted, log_prob)


def _by_residual_of_parts(
    keys: Array,
    batch: Batch[Array],
    rule: Rule,
    where: tuple[str, Array | None],
    *,
    log_probs: bool,
    interpret: bool,
) -> Verified:
    """Do as `by_residual` does where each device has a part of the vocabulary, with two exchanges.

    All devices decide from equal tables alone. The kernels that decide get no logits, so they cannot do otherwise.
    `where` is the axis of the devices, and their links, as `shards.join` takes them.
    """
    own = row_statistics(
        jax.random.key_data(keys), batch, streams=STREAMS, entropy=rule.has_entropy, interpret=interpret
    )
    statistics = _joined(own, batch, *where)
    whole = without_logits(batch)
    decision = accept(whole, statistics, rule.options, rule=rule.probability, in_parts=True, interpret=interpret)
    options = {"recover_best": rule.recover_best, "interpret": interpret}
    found = candidates(batch, statistics.uniforms, decision, log_probs=log_probs, **options)
    found, _ = shards.join(found, (), *where)
    part_size = batch.target.vocab_size
    verdict = recover_candidate(whole, statistics.uniforms, decision, found, part_size=part_size, **options)
    tokens, num_accepted, log_prob = verdict
    assert num_accepted is not None, "a verification counts"
    return Verified(tokens, num_accepted, log_prob)


def _joined(own: Statistics[Array], batch: Batch[Array], axis_name: str, links: Array | None) -> Statistics[Any]:
    """Return the statistics of all parts."""
    assert batch.tokens is not None, "statistics are those of drafts"
    device = jax.lax.axis_index(axis_name)
    owner = jnp.clip(batch.tokens // batch.target.vocab_size, 0, shards.num_shards(axis_name) - 1)
    token = jnp.where(jnp.tile(owner == device, (1, 2)), own.token, 0)
    uniforms = jnp.where(device == 0, own.uniforms, 0)  # which all have
    (top, mass, weighted), (token, uniforms) = shards.join(
        (own.top, own.mass, own.weighted), (token, uniforms), axis_name, links
    )
    return Statistics(top, mass, weighted, token, uniforms)


def with_first_id(batch: Batch[Array], axis_name: str) -> Batch[Array]:
    """Return a batch whose rows know which part of the vocabulary they have."""
    first = jnp.reshape(shards.first_id(batch.target.vocab_size, axis_name), 1)
    draft = None if batch.draft is None else batch.draft._replace(first_id=first)
    return batch._replace(target=batch.target._replace(first_id=first), draft=draft)


def without_logits(batch: Batch[Array]) -> Batch[Array]:
    """Return a batch for kernels that know all they need of the logits, and so of the part."""

    def strip(rows: Rows[Array]) -> Rows[Array]:
        return rows._replace(logits=None, first_id=None)

    return batch._replace(target=strip(batch.target), draft=None if batch.draft is None else strip(batch.draft))


def by_draft(keys: Array, draft: Draft, target: Categorical, *, rule: Rule, **common: Any) -> Verified:
    """Verify by `by_residual` where drafts were sampled, and by `by_sample` where they are deterministic."""
    has_drafts = draft.tokens.shape[1] > 0
    if draft.distribution is None if has_drafts else common["bonus_tokens"] is None:
        return by_sample(keys, draft, target, **common)
    return by_residual(keys, draft, target, rule=rule, **common)


def as_batch(draft: Draft, target: Categorical, bonus_tokens: Array | None) -> Batch:
    """Return the arrays for the kernels, which find the log-normalizers of the target themselves."""
    return Batch(
        draft.tokens.astype(jnp.int32),
        draft.num_tokens,
        bonus_tokens,
        as_rows(target._replace(log_normalizer=None)),
        None if draft.distribution is None else as_rows(draft.distribution),
    )


rejection = partial(by_draft, rule=REJECTION)
block = partial(by_draft, rule=BLOCK)
