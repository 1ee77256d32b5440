"""Exact match: sample the target at every position, accept while the draft agrees."""

from functools import partial
from typing import Any

from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers import core as common
from specjax.verifiers import kernels


def _kernel(keys: Array, draft: Draft, target: Categorical, *, bonus_tokens: Array | None, **options: Any) -> Verified:
    _check_bonus_tokens(bonus_tokens)
    return kernels.by_sample(keys, draft, target, bonus_tokens=None, **options)


@partial(common.from_core, kernel=_kernel)
def match(
    draw: common.Draw,
    draft: Draft,
    target: Categorical,
    *,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    outcomes: bool = False,
) -> Verified:
    """Verify by exact match with the target's own sample. Lossless for every drafter.

    A token is drawn from every target row with the noise of its own position; drafts are accepted while they equal it,
    and the sample is emitted either way. With keys by absolute position the output is exactly what plain sampling emits
    with the same keys, whatever the drafter. The draft's distribution is not read: a drafter that uses the same noise
    (stream TARGET) is accepted more often. One pass over the logits, no normaliser.

    Args:
        keys: typed threefry keys [], [B] (one fresh key a row a step) or [B, K+1] (by absolute position).
        draft: tokens [B, K], -1 where a row has fewer.
        target: Categorical or logits [B, K+1, V]; row i is the law of the token at draft i.
        bonus_tokens: must be None.
        log_probs: fill `Verified.log_probs`.
        outcomes: fill `Verified.is_accepted`, by XLA.
        implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they support the case.

    Returns:
        Verified.

    Raises:
        NotImplementedError: if the named implementation does not support the case.
        ValueError: for wrong shapes, dtypes or keys, or if bonus_tokens is given.

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
    return accept_matches(draw, draft, target, None, log_probs, outcomes)


def accept_matches(
    draw: common.Draw,
    draft: Draft,
    target: Categorical,
    bonus_tokens: Array | None,
    log_probs: bool,
    outcomes: bool = False,
) -> Verified:
    """The rule of `match`, which is also rejection and block verification of deterministic drafts."""
    sampled = draw.sample(target)
    agrees = sampled[:, :-1] == draft.tokens
    num_accepted = common.count_accepted(draft, agrees)
    last = common.take_row(sampled, num_accepted)
    law = distributions.normalize(target) if log_probs else None
    return common.emit(draft, num_accepted, last, law, bonus_tokens, agrees if outcomes else None)


def _check_bonus_tokens(bonus_tokens: Array | None) -> None:
    if bonus_tokens is not None:
        raise ValueError("bonus_tokens must be None: match emits its own sample of every position")
