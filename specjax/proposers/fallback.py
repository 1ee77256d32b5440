"""Two proposers, of which the second drafts for the rows where the first has nothing."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.decoding.drafters import (
    Commit,
    InMemory,
    check_chains,
    check_draft_length,
    commit_of,
    in_memory,
    reads_memory,
    with_num_draft_tokens,
    writes_memory,
)
from specjax.proposers.none import Paused
from specjax.proposers.split import run_where, run_where_in_place
from specjax.types import Array, Categorical, Context, Draft, Memory, ModelInput, Proposer, PyTree, Verified
from specjax.verifiers.core import canonical, num_drafts


@partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=[])
@dataclass(frozen=True)
class Fallback(InMemory):
    """A proposer that drafts with `first`, and with `second` in the rows where `first` has no drafts."""

    first: Proposer
    second: Proposer

    @property
    def num_draft_tokens(self) -> int:
        return max(self.first.num_draft_tokens, self.second.num_draft_tokens)

    @property
    def takes_pages(self) -> bool:
        return all(getattr(proposer, "takes_pages", False) for proposer in (self.first, self.second))

    @property
    def takes_groups(self) -> bool:
        return all(getattr(proposer, "takes_groups", False) for proposer in (self.first, self.second))

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "Fallback | Paused":
        check_draft_length(num_draft_tokens)
        first, second = (
            with_num_draft_tokens(proposer, min(num_draft_tokens or most, most), may_pause=may_pause)
            for proposer in (self.first, self.second)
            for most in (proposer.num_draft_tokens,)
        )
        return Fallback(first, second) if num_draft_tokens else Paused(Fallback(first, second))

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        first, second = (own.init_memory(batch_size, num_pages, page_size) for own in self._both)
        return _joined(first, second, jnp.zeros(batch_size, bool))

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        *states, is_first = _parts(state)
        given = inputs, following, previous, features
        first, second = (own.prefill(*given, memory) for own, memory in zip(self._both, states, strict=True))
        return _joined(first, second, is_first)

    @property
    def reads_memory(self) -> bool:
        return any(reads_memory(own) for own in self._both)

    @property
    def writes_memory(self) -> bool:
        return any(writes_memory(own) for own in self._both)

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory, *memory: Memory) -> tuple:
        (one, two), (first, second, _) = self._both, _parts(state)
        draft, (first, *of_target) = self._propose(one, keys, context, sampling, (first, *memory))
        if draft.distribution is not None:
            raise ValueError("first must make deterministic drafts, whose distribution is None, got a distribution")
        is_first = num_drafts(draft) > 0
        rest = context._replace(active=context.active & ~is_first)
        propose = partial(self._propose, two)
        run, memories = run_where_in_place if writes_memory(two) else run_where, (second, *of_target)
        other, (second, *of_target) = run(rest.active, propose, keys, rest, sampling, memories)
        tokens = jnp.where(rest.active[:, None], other.tokens, draft.tokens)
        num_tokens = jnp.where(rest.active, num_drafts(other), num_drafts(draft))
        distribution = other.distribution
        if distribution is not None:
            temperature = 1.0 if distribution.temperature is None else distribution.temperature
            distribution = distribution._replace(temperature=jnp.where(is_first, 0, temperature).astype(jnp.float32))
        kept = of_target if self.writes_memory else ()
        return Draft(tokens, distribution, num_tokens), _joined(first, second, is_first), *kept

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        def only(rows: Array) -> Verified:
            return verified._replace(num_accepted=jnp.where(rows, verified.num_accepted, 0))

        (one, two), (first, second, is_first) = self._both, _parts(state)
        first = one.update(context, only(is_first), features, first)
        second = two.update(context, only(~is_first), features, second)
        return _joined(first, second, is_first)

    @property
    def commit(self) -> Commit | None:
        commits = [commit_of(own) for own in self._both]
        if not any(commits):
            return None

        def commit_both(state: Memory, inputs: ModelInput, path: Array, count: Array) -> Memory:
            *states, is_first = _parts(state)
            first, second = (
                memory if commit is None else commit(memory, inputs, path, count)
                for commit, memory in zip(commits, states, strict=True)
            )
            return _joined(first, second, is_first)

        return commit_both

    @property
    def _both(self) -> tuple[Any, Any]:
        return in_memory(self.first), in_memory(self.second)

    def _propose(
        self, proposer: Proposer, keys: Array, context: Context, sampling: Any, memories: tuple[Memory, ...]
    ) -> tuple[Draft, tuple[Memory, ...]]:
        """Make the draft of one proposer, padded to the number of drafts of the wider proposer.

        One memory belongs to the proposer and, if one of the two reads it, another to the target.
        """
        narrow, width = proposer.num_draft_tokens, self.num_draft_tokens
        own = memories if reads_memory(proposer) else memories[:1]
        draft, *new = proposer.propose(keys[:, : narrow + 1], context, sampling, *own)
        memories = *new, *memories[len(new) :]
        draft = canonical(draft)
        tokens = jnp.pad(draft.tokens, ((0, 0), (0, width - narrow)), constant_values=-1)
        distribution = draft.distribution
        if distribution is not None and narrow < width:
            distribution = _widened(distribution, width)
        return Draft(tokens, distribution, draft.num_tokens), memories


def _joined(first: Memory, second: Memory, is_first: Array) -> Memory:
    """Return one memory of both proposers, and whether the last drafts of each row [B] came from the first."""
    return Memory((first.pools, second.pools), (first.rows, second.rows, is_first))


def _parts(state: Memory) -> tuple[Memory, Memory, Array]:
    """Take a state of `_joined` apart."""
    first, second, is_first = state.rows
    return Memory(state.pools[0], first), Memory(state.pools[1], second), is_first


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
        second: any proposer of chains. The two may draft different numbers of tokens.

    Returns:
        A proposer.

    Raises:
        ValueError: an argument is no proposer of chains.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Context, proposers
        >>> proposer = proposers.fallback(proposers.ngram(2, min_n=2), proposers.ngram(3))
        >>> context = Context(jnp.array([[5, 6, 7, 5, 6], [1, 5, 9, 2, 5]]), jnp.array([5, 5]), jnp.array([True] * 2))
        >>> keys = jax.random.split(jax.random.key(0), (2, 4))
        >>> proposer.propose(keys, context, None, proposer.init_memory(2, 2, 5))[0].tokens
        Array([[ 7,  5, -1],
               [ 9,  2,  5]], dtype=int32)
    """
    check_chains("first", first)
    check_chains("second", second)
    if hasattr(second, "with_num_draft_tokens"):
        second = with_num_draft_tokens(second, second.num_draft_tokens, may_pause=True)
    return Fallback(first, second)
