"""Two proposers: the first drafts where it can, the second in the other rows."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.proposers.draft_model import DraftModel, run_where
from specjax.types import Array, Categorical, Context, Draft, Proposer, PyTree, Verified
from specjax.verifiers import canonical


class Both(NamedTuple):
    """The states of the two, and which rows [B] bool the first drafted for."""

    first: PyTree
    second: PyTree
    is_first: Array


@partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=[])
@dataclass(frozen=True)
class Fallback:
    """Drafts of `first` in the rows where it has any, of `second` in the others."""

    first: Proposer
    second: Proposer

    @property
    def num_draft_tokens(self) -> int:
        return max(self.first.num_draft_tokens, self.second.num_draft_tokens)

    def init(self, batch_size: int, max_length: int) -> Both:
        states = (proposer.init(batch_size, max_length) for proposer in (self.first, self.second))
        return Both(*states, jnp.zeros(batch_size, bool))

    def prefill(self, context: Context, features: Any, state: Both) -> Both:
        first = self.first.prefill(context, features, state.first)
        return Both(first, self.second.prefill(context, features, state.second), state.is_first)

    def propose(self, keys: Array, context: Context, sampling: Any, state: Both) -> tuple[Draft, Both]:
        draft, first = self._propose(self.first, keys, context, sampling, state.first)
        if draft.distribution is not None:
            raise ValueError("first must make deterministic drafts, whose distribution is None, got a distribution")
        is_first = draft.num_tokens > 0
        rest = context._replace(active=context.active & ~is_first)
        propose = partial(self._propose, self.second)
        other, second = run_where(rest.active, propose, keys, rest, sampling, state.second)
        tokens = jnp.where(rest.active[:, None], other.tokens, draft.tokens)
        num_tokens = jnp.where(rest.active, other.num_tokens, draft.num_tokens)
        distribution = other.distribution
        if distribution is not None:
            temperature = 1.0 if distribution.temperature is None else distribution.temperature
            distribution = distribution._replace(temperature=jnp.where(is_first, 0, temperature).astype(jnp.float32))
        return Draft(tokens, distribution, num_tokens), Both(first, second, is_first)

    def update(self, context: Context, verified: Verified, features: Any, state: Both) -> Both:
        def of(rows: Array) -> Verified:
            return verified._replace(num_accepted=jnp.where(rows, verified.num_accepted, 0))

        first = self.first.update(context, of(state.is_first), features, state.first)
        return state._replace(
            first=first, second=self.second.update(context, of(~state.is_first), features, state.second)
        )

    def _propose(
        self, proposer: Proposer, keys: Array, context: Context, sampling: Any, state: PyTree
    ) -> tuple[Draft, PyTree]:
        """The draft of one of the two, at the width of the wider."""
        narrow, width = proposer.num_draft_tokens, self.num_draft_tokens
        draft, state = proposer.propose(keys[:, : narrow + 1], context, sampling, state)
        draft = canonical(draft)
        tokens = jnp.pad(draft.tokens, ((0, 0), (0, width - narrow)), constant_values=-1)
        distribution = draft.distribution
        if distribution is not None and narrow < width:
            distribution = _widened(distribution, width)
        return Draft(tokens, distribution, draft.num_tokens), state


def _widened(distribution: Categorical, width: int) -> Categorical:
    """The distribution with more rows [B, width], copies of the last one that take no memory."""
    packed = distributions.pack(distribution)
    index = jnp.minimum(jnp.arange(width), packed.rows.shape[1] - 1)
    return packed._replace(rows=packed.rows[:, index])


def fallback(first: Proposer, second: Proposer) -> Fallback:
    """Draft with `first`, and with `second` in the rows where `first` has nothing: n-grams, then a draft model.

    Which of the two drafts for a row is decided by the tokens committed so far alone, so that the output's law is the
    target's, as with each of them. The second does not run where every row has drafts of the first.

    Args:
        first: makes deterministic drafts, as `proposers.ngram`.
        second: any proposer; the two may draft different numbers of tokens.

    Returns:
        A proposer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Context, proposers
        >>> proposer = proposers.fallback(proposers.ngram(2, min_n=2), proposers.ngram(3))
        >>> context = Context(jnp.array([[5, 6, 7, 5, 6], [1, 5, 9, 2, 5]]), jnp.array([5, 5]), jnp.array([True] * 2))
        >>> keys = jax.random.split(jax.random.key(0), (2, 4))
        >>> proposer.propose(keys, context, None, proposer.init(2, 5))[0].tokens
        Array([[ 7,  5, -1],
               [ 9,  2,  5]], dtype=int32)
    """
    if isinstance(second, DraftModel):
        second = replace(second, may_pause=True)
    return Fallback(first, second)
