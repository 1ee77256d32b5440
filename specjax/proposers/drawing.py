"""Drafts drawn from logits by the sampling parameters of each request, and the distribution that they report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.keys import DRAFT, stream
from specjax.parallel.loops import as_carry
from specjax.sampling import Sampling
from specjax.sampling.logits import adjust, reads_token_ids, with_cut
from specjax.types import Array, Categorical, Context, Draft, PyTree
from specjax.validation import is_integer

MOST_UNROLLED = 16  # drafts after the first that are straight code; more take a loop, which compiles in the same time


class Reduced(NamedTuple):
    """A draft vocabulary of D tokens of the target's V."""

    target_ids: Array  # [D] int32, the token of the target that each draft token is
    draft_ids: Array  # [V] int32, the draft token that each token of the target is; D where it is none


def reduced_vocabulary(target_ids: np.ndarray, vocab_size: int) -> Reduced:
    """Return the draft vocabulary that consists of these tokens of the target, [D] different ids in [0, V)."""
    draft_ids = np.full(vocab_size, len(target_ids), np.int32)
    draft_ids[target_ids] = np.arange(len(target_ids), dtype=np.int32)
    return Reduced(jnp.asarray(target_ids, jnp.int32), jnp.asarray(draft_ids))


def widen(logits: Array, reduced: Reduced | None) -> Array:
    """Return logits [B, T, D] of a draft vocabulary as logits [B, T, V], with -inf for tokens that it lacks."""
    if reduced is None:
        return logits
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    return padded[..., reduced.draft_ids]


def draft_options(num_draft_tokens: int, temperature: float | Array | None) -> tuple[Array | None, bool]:
    """Check the options of a proposer that draws its drafts.

    Args:
        num_draft_tokens: K >= 1.
        temperature: the temperature of drafts, for requests that are not greedy. None takes the temperature of the
            request. A number, or one number per row [B], replaces it. 0 makes greedy drafts for all requests.

    Returns:
        The temperature as `draft_sampling` takes it, and whether all drafts are greedy.

    Raises:
        ValueError: a number is out of its range.
    """
    if not (is_integer(num_draft_tokens) and num_draft_tokens >= 1):
        raise ValueError(f"num_draft_tokens must be >= 1 (use proposers.none() for 0), got {num_draft_tokens!r}")
    if temperature is None:
        return None, False
    values = np.asarray(temperature)
    is_number = values.ndim <= 1 and np.issubdtype(values.dtype, np.number)
    if not is_number or not np.all((values >= 0) & np.isfinite(values)):
        raise ValueError(f"temperature must be None, or a number or numbers [B], finite and >= 0, got {temperature!r}")
    return (jnp.asarray(values, jnp.float32), False) if values.any() else (None, True)


def draft_sampling(sampling: Sampling, temperature: Array | None, is_greedy: bool) -> Sampling:
    """Return the sampling parameters of drafts, given the parameters of the requests.

    Args:
        sampling: the parameters of the requests.
        temperature: temperature of drafts, [] or [B], for requests that are not greedy; None is the request's own.
        is_greedy: whether all drafts are greedy.

    Raises:
        ValueError: there are as many temperatures as another batch has rows.
    """
    if is_greedy:
        return sampling._replace(temperature=None, top_k=None, top_p=None, min_p=None)
    if temperature is None:
        return sampling
    rows = sampling.max_tokens.shape
    if temperature.shape not in ((), rows):
        raise ValueError(f"temperature must be one number or have shape [B] = {rows}, got {temperature.shape}")
    temperature = jnp.broadcast_to(temperature, rows)
    if sampling.temperature is not None:
        temperature = jnp.where(sampling.temperature > 0, temperature, 0)
    return sampling._replace(temperature=temperature)


def drawer_of(
    proposer: Any,
    keys: Array,
    context: Context,
    sampling: Sampling,
    reduced: Reduced | None = None,
    is_partial: bool = False,
) -> "Drawer":
    """Return the drawer of the drafts of a step, given the arguments of `Proposer.propose`.

    Args:
        proposer: has `num_draft_tokens`, and `temperature` and `is_greedy` as `draft_options` returns them.
        keys: [B] or [B, K+1], as `propose` gets them.
        context: the tokens before the drafts.
        sampling: the parameters of the requests.
        reduced: the draft vocabulary; None is the target's.
        is_partial: whether only some tokens of the target's vocabulary have logits above -inf.
    """
    keys = stream(keys[:, :1], DRAFT, jnp.arange(proposer.num_draft_tokens, dtype=jnp.int32)[None])
    sampling = draft_sampling(sampling, proposer.temperature, proposer.is_greedy)
    return Drawer(keys, context, sampling, proposer.is_greedy, reduced, is_partial)


class _Drawn(NamedTuple):
    """Record of one draft of each row."""

    row: Categorical | None  # distribution over D tokens of the draw, without the temperature, which all share
    is_possible: Array | None  # [B, 1] bool, whether some token of the draft vocabulary is allowed; None: it always is


@dataclass(frozen=True)
class Drawer:
    """Draws K drafts for each row.

    Greedy drafts are deterministic, and so have no distribution. Where a mask leaves no token that can be drafted, the
    drafts of the row end.
    """

    keys: Array  # [B, K], one for the noise of each draft
    context: Context  # the tokens before the drafts
    sampling: Sampling  # as `draft_sampling` returns it
    is_greedy: bool = False
    reduced: Reduced | None = None  # None: logits are of the target's vocabulary
    is_partial: bool = False  # whether only some tokens of the target's vocabulary have logits above -inf

    def chain(
        self,
        logits: Array,
        advance: Callable[[Array, Any, PyTree], tuple[Array, PyTree]],
        carry: PyTree,
        is_static: bool = False,
    ) -> tuple[Draft, PyTree]:
        """Draw drafts one after another, each from logits that depend on the drafts before.

        Args:
            logits: [B, 1, D], of the first draft.
            advance: function of draft i - 1 of each row [B, 1], of i and of the carry, which returns the logits [B, 1,
                D] of draft i and the carry.
            carry: any pytree.
            is_static: whether i is an integer of Python, for functions that use other weights for each draft. They are
                traced K-1 times.

        Returns:
            The draft, and the last carry.
        """
        batch_size, width = self.keys.shape
        drafts = jnp.full((batch_size, width), -1, jnp.int32)
        token, first = self._draw(self.keys[:, :1], logits, drafts, 0)
        drafts = drafts.at[:, :1].set(token)
        drawn = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, width - 1), (0, 0))[: x.ndim]), first)

        def body(state: Any, index: Array | int) -> tuple[Any, None]:
            drafts, drawn, carry = state
            last = jax.lax.dynamic_slice_in_dim(drafts, index - 1, 1, axis=1)
            logits, carry = advance(last, index, carry)
            key = jax.lax.dynamic_slice_in_dim(self.keys, index, 1, axis=1)
            token, one = self._draw(key, logits, drafts, index)
            drafts = jax.lax.dynamic_update_slice_in_dim(drafts, token, index, axis=1)
            drawn = jax.tree.map(
                lambda all_rows, row: jax.lax.dynamic_update_slice_in_dim(all_rows, row, index, axis=1), drawn, one
            )
            return (drafts, drawn, carry), None

        state = drafts, drawn, carry
        if is_static:
            for index in range(1, width):
                state, _ = body(state, index)
        else:
            # The scan traces `advance` once, a Python loop would trace it K-1 times. It is unrolled because the trip
            # count is small, as a rule: straight code needs no loop on the device inside the loop of steps.
            index = jnp.arange(1, width, dtype=jnp.int32)
            state = as_carry(lambda state: body(state, 1)[0], state, self.keys)
            state, _ = jax.lax.scan(body, state, index, unroll=max(1, min(width - 1, MOST_UNROLLED)))
        drafts, drawn, carry = state
        return self._draft(drafts, drawn), carry

    def parallel(self, logits: Array) -> Draft:
        """Draw all drafts from logits [B, K, D] that do not depend on the other drafts."""
        if reads_token_ids(self.sampling):  # a penalty or a grammar makes a draft depend on the drafts before it

            def row_of(last: Array, index: Array, carry: tuple) -> tuple[Array, tuple]:
                return jax.lax.dynamic_slice_in_dim(logits, index, 1, axis=1), carry

            return self.chain(logits[:, :1], row_of, ())[0]
        drafts = jnp.full(self.keys.shape, -1, jnp.int32)
        return self._draft(*self._draw(self.keys, logits, drafts, 0))

    def _draw(self, keys: Array, logits: Array, drafts: Array, first: Array | int) -> tuple[Array, _Drawn]:
        """Draw a token [B, T] from each row of logits [B, T, D], of which row 0 is for the draft `first`.

        The noise of a token belongs to its place among the candidates. So all rows draw from the D tokens in
        every step: the draft of a row does not depend on the parameters of the other rows of its batch.
        """
        is_possible = None
        if reads_token_ids(self.sampling):
            logits = adjust(self.sampling, widen(logits, self.reduced), self.context, drafts, first)
            if self.reduced is not None:
                logits = logits[..., self.reduced.target_ids]
            if self.is_partial or self.reduced is not None:
                is_possible = jnp.any(logits > -jnp.inf, axis=-1)
        row = with_cut(self.sampling, logits)
        if self.is_greedy:
            token, kept = distributions.argmax(row), None
        else:
            token, kept = distributions.sample(keys, row), row._replace(temperature=None)
        if self.reduced is not None:
            token = self.reduced.target_ids[token]
        return token, _Drawn(kept, is_possible)

    def _draft(self, tokens: Array, drawn: _Drawn) -> Draft:
        row, is_possible = drawn
        if row is not None:
            row = row._replace(logits=widen(row.logits, self.reduced), temperature=self.sampling.temperature)
        if is_possible is None:
            return Draft(tokens, row)
        return Draft(tokens, row, jnp.sum(jnp.cumprod(is_possible, axis=1), axis=1).astype(jnp.int32))


def last_token(context: Context) -> Array:
    """Return the last committed token of each row, [B, 1] int32."""
    return jnp.take_along_axis(context.tokens, jnp.maximum(context.length - 1, 0)[:, None], axis=1)


def only_in(rows: Array, draft: Draft) -> Draft:
    """Return the draft with no tokens outside `rows` [B] bool, and -1 past the end of each row."""
    width = draft.tokens.shape[1]
    count = jnp.where(rows, width if draft.num_tokens is None else draft.num_tokens, 0).astype(jnp.int32)
    tokens = jnp.where(jnp.arange(width, dtype=jnp.int32)[None] < count[:, None], draft.tokens, -1)
    return Draft(tokens, draft.distribution, count)
