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
from specjax.verifiers.core import Draw, count_accepted, emit, from_core, recovery


def _check_options(num_draft_tokens: int, **options: Any) -> None:
    _rates(options.get("acceptance_rates"), options.get("acceptance_length"), num_draft_tokens)


def _kernel(
    keys: Array,
    draft: Draft,
    target: Categorical,
    *,
    acceptance_rates: Sequence[float] | Array | None = None,
    acceptance_length: float | None = None,
    **common_options: Any,
) -> Verified:
    rates = _conditional(_rates(acceptance_rates, acceptance_length, draft.tokens.shape[1]))
    return kernels.by_residual(keys, draft, target, rule=kernels.Rule(_accept, rates), **common_options)


def _accept(evidence: kernels.Evidence, rates: Any) -> Array:
    """The acceptance probability of each draft, and of the last draft in lanes past it."""
    return rates[jnp.minimum(evidence.lane, rates.shape[0] - 1)]


@partial(from_core, kernel=_kernel, check_options=_check_options)
def synthetic(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    *,
    acceptance_rates: Sequence[float] | Array | None = None,
    acceptance_length: float | None = None,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Accept drafts at given rates, for benchmarks. LOSSY: the output does not follow the target's distribution.

    Draft i is accepted with probability rate_i / rate_{i-1} if all drafts before it are (rate_0 = 1), whatever its
    token is. Recovered and bonus tokens are drawn as in `rejection`. Either `acceptance_rates` or `acceptance_length`
    must be given.

    Args:
        keys: typed threefry keys, one for the step [], one for each row [B], or one for each absolute position
            [B, K+1] (`specjax.keys.positions`). Keys [] and [B] must be fresh in every step.
        draft: the tokens [B, K], -1 where a row has fewer, and the distribution that they were drawn from.
        target: a Categorical, or logits [B, K+1, V]; row i is the distribution of the token at the place of draft i,
            and the one after the last draft of a sequence that of its bonus token.
        acceptance_rates: K numbers in [0, 1], the share of steps in which each draft is accepted; they must not
            increase.
        acceptance_length: the mean number of tokens per step, in [1, K+1].
        bonus_tokens: [B] int32, emitted in place of a draw where all drafts of a row are accepted.
        log_probs: whether to fill `Verified.log_probs`, static.
        axis_name: the axis of a `jax.shard_map` whose devices share the vocabulary, static. Each then gives its part
            [..., V / n] of the logits of target and draft, and all get the same result. None is a whole vocabulary.
        implementation: "xla", "pallas" or "interpret", which interprets the kernels. None takes the kernels on CUDA
            where they support the case, and XLA elsewhere.

    Returns:
        Verified: tokens [B, K+1] int32 and num_accepted [B] int32.

    Raises:
        NotImplementedError: the named implementation does not support the case.
        ValueError: an argument has a wrong shape or dtype, the keys are of another kind, not exactly one of the two
            options is given, or rates have a wrong length, range or order.

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


def _rates(rates: Sequence[float] | Array | None, length: float | None, num_draft_tokens: int) -> Array:
    """Return the share [K] of steps in which each draft is to be accepted."""
    if (rates is None) == (length is None):
        given = "neither" if rates is None else "both"
        raise ValueError(f"exactly one of acceptance_rates and acceptance_length must be given, got {given}")
    if length is not None:
        most = num_draft_tokens + 1
        check_number("acceptance_length", length, f"in [1, K+1 = {most}]", 1, most)
        return jnp.clip(length - 1 - jnp.arange(num_draft_tokens, dtype=jnp.float32), 0, 1)
    has_values = not is_traced(rates)
    rates = jnp.asarray(rates, jnp.float32)
    if rates.shape != (num_draft_tokens,):
        raise ValueError(f"acceptance_rates must have shape [K] = ({num_draft_tokens},), got {rates.shape}")
    if has_values:
        values = np.asarray(rates)
        if not (np.all((values >= 0) & (values <= 1)) and np.all(np.diff(values) <= 0)):
            raise ValueError(f"acceptance_rates must be non-increasing and in [0, 1], got {values.tolist()}")
    return rates


def _conditional(rates: Array) -> Array:
    """Return the acceptance rate [K] of each draft in the steps where all drafts before it are accepted."""
    before = jnp.concatenate([jnp.ones((min(1, len(rates)),), jnp.float32), rates[:-1]])
    return jnp.where(before > 0, rates / jnp.where(before > 0, before, 1), 0)
