"""The drawing of drafts one after another, each from logits that may depend on the drafts before it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.keys import DRAFT, stream
from specjax.sampling import Sampling, process
from specjax.types import Array, Categorical, Context, Draft
from specjax.validation import is_integer

# (index of the draft, token before it [B, 1], carry) -> (logits [B, 1, V], carry)
NextLogits = Callable[[int, Array, Any], tuple[Array, Any]]


class Chain(NamedTuple):
    """K drafts of every row."""

    tokens: Array  # [B, K] int32
    distribution: Categorical | None  # what each was drawn from; None where drafts are greedy
    is_possible: Array | None  # [B, K] bool, whether the distribution has any token; None: it always has
    carry: Any  # what the last call of the function of logits returned


def draft_sampling(sampling: Sampling, temperature: Array | None, is_greedy: bool) -> Sampling:
    """Return the sampling parameters that shape the drafts of each request.

    Args:
        sampling: the parameters of the requests.
        temperature: [] or [B] float32, the temperature of the drafts of requests that are not greedy; None is the
            request's own.
        is_greedy: whether all drafts are greedy, and so deterministic.
    """
    if is_greedy:
        return sampling._replace(temperature=None, top_k=None, top_p=None, min_p=None)
    if temperature is None:
        return sampling
    temperature = jnp.broadcast_to(temperature, sampling.max_tokens.shape)
    if sampling.temperature is not None:
        temperature = jnp.where(sampling.temperature > 0, temperature, 0)
    return sampling._replace(temperature=temperature)


def last_token(context: Context) -> Array:
    """Return the last committed token of each row, [B, 1] int32."""
    return jnp.take_along_axis(context.tokens, jnp.maximum(context.length - 1, 0)[:, None], axis=1)


def draw_chain(
    keys: Array,
    context: Context,
    sampling: Sampling,
    next_logits: NextLogits,
    carry: Any = None,
    *,
    num_draft_tokens: int,
    is_greedy: bool = False,
    is_reduced: bool = False,
) -> Chain:
    """Draw K drafts for every row.

    Args:
        keys: [B, K+1], the keys of the step.
        context: the sequences of the batch.
        sampling: the parameters that shape the drafts, as `draft_sampling` returns them.
        next_logits: function that returns the logits of one draft; the token before draft 0 is the last committed one.
        carry: what the first call of it gets.
        num_draft_tokens: K.
        is_greedy: whether drafts are the most likely tokens, which are deterministic and have no distribution.
        is_reduced: whether the logits leave tokens out, so that the masks of a request may leave nothing.
    """
    draft_keys = stream(keys[:, :1], DRAFT, jnp.arange(num_draft_tokens)[None])
    drafts = jnp.full((keys.shape[0], num_draft_tokens), -1, jnp.int32)
    token, rows, is_possible = last_token(context), None, []
    for i in range(num_draft_tokens):
        logits, carry = next_logits(i, token, carry)
        row = process(sampling, logits, context, drafts, i)
        if is_reduced:
            is_possible.append(jnp.max(row.logits, axis=-1) > -jnp.inf)
        if is_greedy:
            token = distributions.normalize(row, argmax=True).argmax
            assert token is not None, "it was asked for"
        else:
            token = distributions.sample(draft_keys[:, i : i + 1], row)
            rows = _place(rows, row._replace(temperature=None), i, num_draft_tokens)
        drafts = drafts.at[:, i : i + 1].set(token)
    distribution = None if rows is None else rows._replace(temperature=sampling.temperature)
    return Chain(drafts, distribution, jnp.concatenate(is_possible, axis=1) if is_reduced else None, carry)


def _place(rows: Categorical | None, row: Categorical, index: int, num_rows: int) -> Categorical:
    """Put a row [B, 1, ...] at its place among all rows [B, K, ...], which are updated in place."""
    if rows is None:
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, num_rows - 1), (0, 0))[: x.ndim]), row)
    return jax.tree.map(lambda all_rows, one: all_rows.at[:, index : index + 1].set(one), rows, row)


def as_draft(chain: Chain, rows: Array) -> Draft:
    """Return the draft of a chain: nothing in rows that are false in `rows` [B], and elsewhere what could be drawn."""
    num_drafts = chain.tokens.shape[1]
    index = jnp.arange(num_drafts)[None]
    num_tokens = jnp.full(rows.shape, num_drafts)
    if chain.is_possible is not None:
        num_tokens = jnp.sum(jnp.cumprod(chain.is_possible, axis=1), axis=1)
    num_tokens = jnp.where(rows, num_tokens, 0).astype(jnp.int32)
    tokens = jnp.where(index < num_tokens[:, None], chain.tokens, -1)
    return Draft(tokens, chain.distribution, num_tokens)


def of_drafts(temperature: float | Array | None) -> tuple[Array | None, bool]:
    """Return the temperature of drafts as `draft_sampling` takes it, and whether all drafts are greedy.

    Raises:
        ValueError: the temperature is neither None nor one or more numbers >= 0.
    """
    if temperature is None:
        return None, False
    values = np.asarray(temperature)
    is_number = values.ndim <= 1 and np.issubdtype(values.dtype, np.number)
    if not is_number or not np.all((values >= 0) & np.isfinite(values)):
        raise ValueError(f"temperature must be None, or a number or numbers [B], finite and >= 0, got {temperature!r}")
    return (jnp.asarray(values, jnp.float32), False) if values.any() else (None, True)


def check_num_drafts(num_draft_tokens: int | None, most: int, what: str) -> int:
    """Return K, by default the most drafts that a drafter makes; `what` says what bounds them.

    Raises:
        ValueError: K is out of its range.
    """
    if num_draft_tokens is None:
        return most
    if not (is_integer(num_draft_tokens) and 1 <= num_draft_tokens <= most):
        raise ValueError(f"num_draft_tokens must be in [1, {most}], {what}, got {num_draft_tokens!r}")
    return num_draft_tokens
