"""Acceptance at given rates, for benchmarks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.validation import check_number, is_traced
from specjax.verifiers import kernels
from specjax.verifiers.core import CoreVerifier, Draw, count_accepted, emit, recovery


def _check_options(num_draft_tokens: int, **options: Any) -> None:
    _rates(options.get("acceptance_rates"), options.get("acceptance_length"), num_draft_tokens)


def _kernel(
    keys: Array,
    draft: Draft,
    target: Categorical,
    *,
    acceptance_rates: Sequence[float] | Array | None,
    acceptance_length: float | Array | None,
    **common_options: Any,
) -> Verified:
    rates = _conditional(_rates(acceptance_rates, acceptance_length, draft.tokens.shape[1]))
    return kernels.by_residual(keys, draft, target, rule=kernels.Rule(_accept, rates), **common_options)


def _accept(evidence: kernels.Evidence, rates: Any) -> Array:
    """The acceptance probability of each draft, and of the last draft in lanes past it."""
    return rates[jnp.minimum(evidence.lane, rates.shape[0] - 1)]


class Synthetic(CoreVerifier):
    """The verifier `synthetic`, with its options in the signature of the call."""

    def __call__(
        self,
        keys: Array,
        draft: Draft,
        target: Categorical | Array,
        *,
        acceptance_rates: Sequence[float] | Array | None = None,
        acceptance_length: float | Array | None = None,
        bonus_tokens: Array | None = None,
        log_probs: bool = False,
        axis_name: str | None = None,
        implementation: str | None = None,
    ) -> Verified:
        """Accept drafts at given rates. `synthetic` describes its options, and `CoreVerifier` the other arguments."""
        return super().__call__(
            keys,
            draft,
            target,
            bonus_tokens=bonus_tokens,
            log_probs=log_probs,
            axis_name=axis_name,
            implementation=implementation,
            acceptance_rates=acceptance_rates,
            acceptance_length=acceptance_length,
        )


@partial(Synthetic, kernel=_kernel, check_options=_check_options)
def synthetic(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    *,
    acceptance_rates: Sequence[float] | Array | None = None,
    acceptance_length: float | Array | None = None,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Accept drafts at given rates, for benchmarks. LOSSY: the output does not follow the target's distribution.

    Draft i is accepted with probability rate_i / rate_{i-1} if all drafts before it are (rate_0 = 1), whatever its
    token is. Recovered and bonus tokens are drawn as in `rejection`. Either `acceptance_rates` or `acceptance_length`
    must be given.

    Args:
        acceptance_rates: K numbers in [0, 1], the share of steps in which each draft is accepted; they must not
            increase.
        acceptance_length: the mean number of tokens per step, in [1, K+1].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Draft, verifiers
        >>> draft, target = Draft(jnp.array([[1, 1]])), jnp.zeros((1, 3, 2))
        >>> verifiers.synthetic(jax.random.key(0), draft, target, acceptance_length=2).num_accepted
        Array([1], dtype=int32)
    """
    num_draft_tokens = draft.tokens.shape[1]
    rates = _rates(acceptance_rates, acceptance_length, num_draft_tokens)
    accept = jnp.broadcast_to(_conditional(rates)[None], draft.tokens.shape)
    num_accepted = count_accepted(draft, draw.flip(accept))
    normalized_target = distributions.normalize(target, axis_name=axis_name)
    normalized_draft = (
        None if draft.distribution is None else distributions.normalize_drafts(draft.distribution, axis_name)
    )
    last = draw.pick(recovery(draft, normalized_draft, normalized_target, num_accepted))
    return emit(draft, num_accepted, last, normalized_target if log_probs else None, bonus_tokens)


def _rates(rates: Sequence[float] | Array | None, length: float | Array | None, num_draft_tokens: int) -> Array:
    """Return the share [K] of steps in which each draft is to be accepted."""
    if (rates is None) == (length is None):
        given = "neither" if rates is None else "both"
        raise ValueError(f"exactly one of acceptance_rates and acceptance_length must be given, got {given}")
    if length is not None:
        most = num_draft_tokens + 1
        check_number("acceptance_length", length, f"in [1, K+1 = {most}]", 1, most)
        return jnp.clip(length - 1 - jnp.arange(num_draft_tokens, dtype=jnp.float32), 0, 1)
    try:
        values = None if is_traced(rates) else np.asarray(rates, np.float32)  # while they are no constants of a trace
    except (TypeError, ValueError):
        raise ValueError(f"acceptance_rates must be numbers [K], got {rates!r}") from None
    rates = jnp.asarray(rates, jnp.float32)
    if rates.shape != (num_draft_tokens,):
        raise ValueError(f"acceptance_rates must have shape [K] = ({num_draft_tokens},), got {rates.shape}")
    if values is not None and not (np.all((values >= 0) & (values <= 1)) and np.all(np.diff(values) <= 0)):
        raise ValueError(f"acceptance_rates must be non-increasing and in [0, 1], got {values.tolist()}")
    return rates


def _conditional(rates: Array) -> Array:
    """Return the acceptance rate [K] of each draft in the steps where all drafts before it are accepted."""
    before = jnp.concatenate([jnp.ones((min(1, len(rates)),), jnp.float32), rates[:-1]])
    return jnp.where(before > 0, rates / jnp.where(before > 0, before, 1), 0)
