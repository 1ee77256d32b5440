"""A budget of verified drafts that the rows of a step share, spent on the drafts that are likeliest to count."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.admission import admitted
from specjax.decoding.drafters import (
    Commit,
    InMemory,
    check_chains,
    commit_of,
    in_memory,
    reads_memory,
    with_num_draft_tokens,
    writes_memory,
)
from specjax.distributions import likeliest_probability, sampled
from specjax.proposers.drawing import only_in
from specjax.proposers.none import Paused
from specjax.types import Array, Categorical, Context, Memory, ModelInput, Proposer, PyTree, Verified
from specjax.validation import is_integer
from specjax.verifiers.core import canonical, num_drafts

LEVELS = (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98)  # bounds of the probability of the likeliest token, between levels
NUM_LEVELS = len(LEVELS) + 1
FADE = 0.97  # factor on the counts of a row at each step
PRIOR_TRIALS = 2.0  # trials that the rate of the rows together weighs beside the row's own
PRIOR_RATES = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the levels, before anything was counted


class Counts(NamedTuple):
    """The outcomes of the drafts of each row, up to its first rejection, and the drafts of the step before."""

    trials: Array  # [B, levels] float32, drafts that were tested
    accepted: Array  # [B, levels] float32, those that were accepted
    level: Array  # [B, K] int32, of each draft of the last step
    num_drafts: Array  # [B] int32, admitted in the last step


@partial(jax.tree_util.register_dataclass, data_fields=["proposer"], meta_fields=["drafts_per_row"])
@dataclass(frozen=True)
class WithinBudget(InMemory):
    """A proposer whose rows share a budget of drafts, as `within_budget` makes it."""

    proposer: Any
    drafts_per_row: int

    @property
    def num_draft_tokens(self) -> int:
        return self.proposer.num_draft_tokens

    @property
    def is_shared(self) -> bool:
        """Whether the budget leaves drafts out. Otherwise rows have all their drafts, and nothing is counted."""
        return self.drafts_per_row < self.num_draft_tokens

    @property
    def takes_pages(self) -> bool:
        return self._inner.takes_pages

    @property
    def takes_groups(self) -> bool:
        return getattr(self.proposer, "takes_groups", False)

    @property
    def reads_memory(self) -> bool:
        return reads_memory(self._inner)

    @property
    def writes_memory(self) -> bool:
        return writes_memory(self._inner)

    @property
    def _inner(self) -> Proposer:
        return in_memory(self.proposer)

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "WithinBudget | Paused":
        inner = with_num_draft_tokens(self.proposer, num_draft_tokens or self.num_draft_tokens, may_pause=may_pause)
        changed = replace(self, proposer=inner)
        return changed if num_draft_tokens else Paused(changed)

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        state = self._inner.init_memory(batch_size, num_pages, page_size)
        none = jnp.zeros((batch_size, NUM_LEVELS), jnp.float32)
        level = jnp.zeros((batch_size, self.num_draft_tokens), jnp.int32)
        return _beside(state, Counts(none, none, level, jnp.zeros(batch_size, jnp.int32)))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        inner, counts = _parts(state)
        inner = self._inner.prefill(inputs, following, previous, features, inner)
        fed = Memory(rows=counts).take(inputs.sequences).rows
        fed = fed._replace(trials=jnp.zeros_like(fed.trials), accepted=jnp.zeros_like(fed.accepted))
        return _beside(inner, Memory(rows=counts).put(inputs.sequences, Memory(rows=fed)).rows)

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory, *memory: Memory) -> tuple:
        inner, counts = _parts(state)
        draft, inner, *written = self._inner.propose(keys, context, sampling, inner, *memory)
        if not self.is_shared:
            return draft, _beside(inner, counts), *written
        draft = canonical(draft)
        level = levels(draft.distribution, *draft.tokens.shape)
        index = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        is_draft = context.active[:, None] & (index < num_drafts(draft)[:, None])
        confidences = jnp.where(is_draft, jnp.take_along_axis(_rates(counts, context.active), level, axis=1), 0)
        number = admitted(confidences, self.drafts_per_row * draft.tokens.shape[0])
        number = jnp.minimum(number, num_drafts(draft))
        kept = jnp.pad(level, ((0, 0), (0, counts.level.shape[1] - level.shape[1])))
        draft = only_in(context.active, draft._replace(num_tokens=number))
        return draft, _beside(inner, counts._replace(level=kept, num_drafts=num_drafts(draft))), *written

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        inner, counts = _parts(state)
        inner = self._inner.update(context, verified, features, inner)
        if not self.is_shared:
            return _beside(inner, counts)
        index = jnp.arange(counts.level.shape[1], dtype=jnp.int32)[None]
        accepted = jnp.minimum(verified.num_accepted, counts.num_drafts)
        is_tried = index < jnp.minimum(accepted + 1, counts.num_drafts)[:, None]
        at_level = jax.nn.one_hot(counts.level, NUM_LEVELS)  # [B, K, levels]
        trials = jnp.sum(jnp.where(is_tried[..., None], at_level, 0), axis=1)
        hits = jnp.sum(jnp.where((index < accepted[:, None])[..., None], at_level, 0), axis=1)
        nothing = jnp.zeros_like(counts.num_drafts)
        new = FADE * counts.trials + trials, FADE * counts.accepted + hits
        return _beside(inner, counts._replace(trials=new[0], accepted=new[1], num_drafts=nothing))

    @property
    def commit(self) -> Commit | None:
        commit = commit_of(self._inner)
        if commit is None:
            return None

        def commit_inner(state: Memory, inputs: ModelInput, path: Array, count: Array) -> Memory:
            inner, counts = _parts(state)
            return _beside(commit(inner, inputs, path, count), counts)

        return commit_inner


def _beside(state: Memory, counts: Counts) -> Memory:
    return Memory(state.pools, {"proposer": state.rows, "counts": counts})


def _parts(state: Memory) -> tuple[Memory, Counts]:
    return Memory(state.pools, state.rows["proposer"]), state.rows["counts"]


def levels(distribution: Categorical | None, num_rows: int, num_drafts: int) -> Array:
    """Return the level of each draft, [B, K] int32: how likely the likeliest token of its distribution is.

    Rows of temperature 0 count as at temperature 1. The level does not depend on the draft itself. Without a
    distribution it is the place of the draft, from the highest level on.
    """
    if distribution is None:
        place = jnp.maximum(NUM_LEVELS - 1 - jnp.arange(num_drafts, dtype=jnp.int32), 0)
        return jnp.broadcast_to(place[None], (num_rows, num_drafts))
    likeliest = likeliest_probability(sampled(distribution))
    return jnp.sum(likeliest[..., None] >= jnp.array(LEVELS)[None, None], axis=-1, dtype=jnp.int32)


def _rates(counts: Counts, active: Array) -> Array:
    """Return the acceptance rate [B, levels] of each level, close to the rate of all rows where trials are few."""
    trials, accepted = (jnp.sum(jnp.where(active[:, None], x, 0), axis=0) for x in (counts.trials, counts.accepted))
    together = (accepted + PRIOR_TRIALS * jnp.array(PRIOR_RATES)) / (trials + PRIOR_TRIALS)
    return (counts.accepted + PRIOR_TRIALS * together[None]) / (counts.trials + PRIOR_TRIALS)


def within_budget(proposer: Proposer, drafts_per_row: int) -> WithinBudget:
    """Let the rows of a step share a budget of verified drafts, which goes to the drafts that are likeliest to count.

    A row may have more drafts than another, and none at all. The chance of a draft is the product of the acceptance
    rates of the places up to its own. These rates are counted in earlier steps, up to the first rejection, by how
    likely the likeliest token is in the distribution of the draft. So every lossless verifier stays lossless. The
    tokens of a row depend on the rows beside it, except under `verifiers.match`.

    A target with `takes_ragged`, as the built-in ones without recurrent layers have it, computes the pending tokens of
    R rows and `drafts_per_row` R drafts in a step. Another target computes all K drafts of each row.

    Args:
        proposer: a proposer of chains, which makes K drafts in each row.
        drafts_per_row: the most drafts that a step verifies, for each of its rows, an integer in [1, K].

    Returns:
        A proposer.

    Raises:
        ValueError: the number is out of its range, or the proposer is none, makes no drafts, or drafts trees.

    Example:
        >>> from specjax import proposers
        >>> proposers.within_budget(proposers.ngram(8), drafts_per_row=2).num_draft_tokens
        8
    """
    check_chains("proposer", proposer)
    most = proposer.num_draft_tokens
    if not most:
        raise ValueError(f"proposer must make drafts, of which a budget verifies some, got {type(proposer).__name__}")
    if not (is_integer(drafts_per_row) and 1 <= drafts_per_row <= most):
        raise ValueError(
            f"drafts_per_row must be an integer in [1, {most}], the drafts of a row, got {drafts_per_row!r}"
        )
    return WithinBudget(proposer, int(drafts_per_row))
