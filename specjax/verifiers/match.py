"""Exact match, which samples the target at every position and accepts the drafts that agree."""

from functools import partial
from typing import Any

from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers import kernels
from specjax.verifiers.core import Draw, count_accepted, emit, from_core, take_row


def _kernel(keys: Array, draft: Draft, target: Categorical, *, bonus_tokens: Array | None, **options: Any) -> Verified:
    _check_bonus_tokens(bonus_tokens)
    return kernels.by_sample(keys, draft, target, bonus_tokens=None, **options)


@partial(from_core, kernel=_kernel)
def match(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    *,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    outcomes: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify by exact match with a sample of the target. Lossless: the output follows the target's distribution.

    The sample of position t is argmax(logits_t / temperature + Gumbel noise of t). Drafts are accepted while they equal
    the sample, and the sample of the first other position is emitted after them.

    With keys by absolute position the output equals the output of plain sampling with the same keys, whatever the
    drafts are. The draft's distribution is not read, and drafts need not be drawn from it. A drafter that draws with
    the same noise (`keys.TARGET`) is accepted more often. Verification takes one pass over the logits. `bonus_tokens`
    must be None, because the sample is the bonus token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Draft, verifiers
        >>> logits = jnp.log(jnp.array([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]]))
        >>> verifiers.match(jax.random.key(0), Draft(jnp.array([[1, 1]])), logits).tokens
        Array([[ 1,  0, -1]], dtype=int32)

    References:
        Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv:2408.07978.
    """
    _check_bonus_tokens(bonus_tokens)
    return accept_matches(draw, draft, target, None, log_probs, outcomes, axis_name)


def accept_matches(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    bonus_tokens: Array | None,
    log_probs: bool,
    outcomes: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify by exact match, the rule of `match` and, for deterministic drafts, of `rejection` and `block`."""
    sampled = draw.sample(target)
    agrees = sampled[:, :-1] == draft.tokens
    num_accepted = count_accepted(draft, agrees)
    last = take_row(sampled, num_accepted)
    normalized = distributions.normalize(target, axis_name=axis_name) if log_probs else None
    return emit(draft, num_accepted, last, normalized, bonus_tokens, agrees if outcomes else None)


def _check_bonus_tokens(bonus_tokens: Array | None) -> None:
    if bonus_tokens is not None:
        raise ValueError("bonus_tokens must be None: match emits its own sample of every position")
