"""Two proposers, of which the second drafts for the rows where the first has nothing."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.proposers.draft_model import DraftModel
from specjax.proposers.p_eagle import ParallelEagle
from specjax.proposers.split import run_where
from specjax.types import Array, Categorical, Chunk, Context, Draft, Proposer, PyTree, Verified
from specjax.verifiers.core import canonical, num_drafts


class Both(NamedTuple):
    """The states of both proposers."""

    first: PyTree
    second: PyTree
    is_first: Array  # [B] bool, whether the last drafts of the row came from the first proposer


@partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=[])
@dataclass(frozen=True)
class Fallback:
    """A proposer that drafts with `first`, and with `second` in the rows where `first` has no drafts."""

    first: Proposer
    second: Proposer

    @property
    def num_draft_tokens(self) -> int:
        return max(self.first.num_draft_tokens, self.second.num_draft_tokens)

    @property
    def takes_pages(self) -> bool:
        return all(getattr(proposer, "takes_pages", False) for proposer in (self.first, self.second))

    def init(self, batch_size: int, max_length: int, pool: tuple[int, int] | None = None) -> Both:
        first, second = (proposer.init(batch_size, max_length, pool) for proposer in (self.first, self.second))
        return Both(first, second, jnp.zeros(batch_size, bool))

    def prefill(self, chunk: Chunk, features: Any, state: Both) -> Both:
        first = self.first.prefill(chunk, features, state.first)
        return Both(first, self.second.prefill(chunk, features, state.second), state.is_first)

    def propose(self, keys: Array, context: Context, sampling: Any, state: Both) -> tuple[Draft, Both]:
        draft, first = self._propose(self.first, keys, context, sampling, state.first)
        if draft.distribution is not None:
            raise ValueError("first must make deterministic drafts, whose distribution is None, got a distribution")
        is_first = num_drafts(draft) > 0
        rest = context._replace(active=context.active & ~is_first)
        propose = partial(self._propose, self.second)
        other, second = run_where(rest.active, propose, keys, rest, sampling, state.second)
        tokens = jnp.where(rest.active[:, None], other.tokens, draft.tokens)
        num_tokens = jnp.where(rest.active, num_drafts(other), num_drafts(draft))
        distribution = other.distribution
        if distribution is not None:
            temperature = 1.0 if distribution.temperature is None else distribution.temperature
            distribution = distribution._replace(temperature=jnp.where(is_first, 0, temperature).astype(jnp.float32))
        return Draft(tokens, distribution, num_tokens), Both(first, second, is_first)

    def update(self, context: Context, verified: Verified, features: Any, state: Both) -> Both:
        def only(rows: Array) -> Verified:
            return verified._replace(num_accepted=jnp.where(rows, verified.num_accepted, 0))

        first = self.first.update(context, only(state.is_first), features, state.first)
        second = self.second.update(context, only(~state.is_first), features, state.second)
        return state._replace(first=first, second=second)

    def _propose(
        self, proposer: Proposer, keys: Array, context: Context, sampling: Any, state: PyTree
    ) -> tuple[Draft, PyTree]:
        """Make the draft of one proposer, padded to the number of drafts of the wider proposer."""
        narrow, width = proposer.num_draft_tokens, self.num_draft_tokens
        draft, state = proposer.propose(keys[:, : narrow + 1], context, sampling, state)
        draft = canonical(draft)
        tokens = jnp.pad(draft.tokens, ((0, 0), (0, width - narrow)), constant_values=-1)
        distribution = draft.distribution
        if distribution is not None and narrow < width:
            distribution = _widened(distribution, width)
        return Draft(tokens, distribution, draft.num_tokens), state


def _widened(distribution: Categorical, width: int) -> Categorical:
    """Return the distribution with `width` rows per sequence, which repeat the last row without copying its logits."""
    packed = distributions.pack(distribution)
    assert packed.rows is not None, "packed logits have rows"
    index = jnp.minimum(jnp.arange(width, dtype=jnp.int32), packed.rows.shape[1] - 1)
    return packed._replace(rows=packed.rows[:, index])


def fallback(first: Proposer, second: Proposer) -> Fallback:
    """Draft with `first`, and with `second` in the rows where `first` has no drafts.

    A typical pair is an n-gram lookup and a draft model. The committed tokens alone decide which proposer drafts for a
    row, so a lossless verifier stays lossless. The second proposer does not run in steps where every row has drafts of
    the first.

    Args:
        first: a proposer of deterministic drafts, such as `proposers.ngram`.
        second: any proposer. The two may draft different numbers of tokens.

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
    if isinstance(second, DraftModel | ParallelEagle):
        second = replace(second, may_pause=True)
    return Fallback(first, second)
