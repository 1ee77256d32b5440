"""Typical acceptance, which accepts the drafts that are likely enough under the target."""

from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.rows import marked
from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.validation import check_number
from specjax.verifiers import kernels
from specjax.verifiers.core import CoreVerifier, Draw, count_accepted, emit, evidence, num_drafts


def check_options(num_draft_tokens: int, **options: Any) -> None:
    """Raise ValueError for a threshold or a factor that is out of its range."""
    for name, most in (("posterior_threshold", 1), ("posterior_alpha", float("inf"))):
        check_number(name, options.get(name, 0), f"in [0, {most}]", 0, most)


def _kernel(
    keys: Array,
    draft: Draft,
    target: Categorical,
    *,
    posterior_threshold: float | Array,
    posterior_alpha: float | Array,
    **common_options: Any,
) -> Verified:
    check_options(draft.tokens.shape[1], posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha)
    options = jnp.array([posterior_threshold, posterior_alpha], jnp.float32)
    rule = kernels.Rule(_accept, options, has_entropy=True, recover_best=True)
    return kernels.by_residual(keys, draft._replace(distribution=None), target, rule=rule, **common_options)


def _accept(evidence: kernels.Evidence, options: Any) -> Array:
    """The acceptance probability of each draft, 0 or 1, from the threshold and its scale alpha."""
    assert evidence.entropy is not None, "the rule asks for it"
    return (jnp.exp(evidence.log_prob) > threshold(evidence.entropy, options[0], options[1])).astype(jnp.float32)


def threshold(entropy: Array, posterior_threshold: Any, posterior_alpha: Any) -> Array:
    """Return the probability above which a token is accepted, given the entropy of its target row in nats."""
    return jnp.minimum(posterior_threshold, posterior_alpha * jnp.exp(-entropy))


class Typical(CoreVerifier):
    """The verifier `typical`, with its options in the signature of the call."""

    def __call__(
        self,
        keys: Array,
        draft: Draft,
        target: Categorical | Array,
        *,
        posterior_threshold: float | Array = 0.09,
        posterior_alpha: float | Array = 0.3,
        bonus_tokens: Array | None = None,
        log_probs: bool = False,
        outcomes: bool = False,
        axis_name: str | None = None,
        implementation: str | None = None,
    ) -> Verified:
        """Verify by typical acceptance. `typical` describes its options, and `CoreVerifier` the other arguments."""
        return super().__call__(
            keys,
            draft,
            target,
            bonus_tokens=bonus_tokens,
            log_probs=log_probs,
            outcomes=outcomes,
            axis_name=axis_name,
            implementation=implementation,
            posterior_threshold=posterior_threshold,
            posterior_alpha=posterior_alpha,
        )


@partial(Typical, kernel=_kernel, check_options=check_options)
def typical(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    *,
    posterior_threshold: float | Array = 0.09,
    posterior_alpha: float | Array = 0.3,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    outcomes: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify by typical acceptance. LOSSY: the output does not follow the target's distribution.

    Draft x is accepted if target(x) > min(posterior_threshold, posterior_alpha * exp(-entropy of the target row)). The
    first rejected draft is replaced by the argmax of its target row. If no draft is rejected, a bonus token is drawn
    from the target row after the last draft. The draft's distribution is not read.

    Args:
        posterior_threshold: the probability in [0, 1] above which a draft is always accepted.
        posterior_alpha: the factor >= 0 of exp(-entropy), which lowers the threshold where the target is uncertain.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Draft, verifiers
        >>> target = jnp.log(jnp.array([[[0.6, 0.4], [0.99, 0.01], [0.0, 1.0]]]))
        >>> verifiers.typical(jax.random.key(0), Draft(jnp.array([[1, 1]])), target).tokens
        Array([[ 1,  0, -1]], dtype=int32)

    References:
        Cai et al., Medusa: Simple LLM Inference Acceleration Framework, arXiv:2401.10774, section 3.3.1.
    """
    check_options(draft.tokens.shape[1], posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha)
    normalized = distributions.normalize(target, argmax=True, axis_name=axis_name)
    known = evidence(draft, None, normalized, entropy=True)
    accepted = _accept(known, (posterior_threshold, posterior_alpha)) > 0
    num_accepted = count_accepted(draft, accepted)
    bonus = draw.pick(distributions.Residual(distributions.take_row(normalized, num_drafts(draft))))
    assert normalized.argmax is not None, "it was asked for"
    best = marked(normalized.argmax, normalized.log_mass == -jnp.inf)
    best = jnp.take_along_axis(best, num_accepted[:, None], axis=1)[:, 0]
    last = jnp.where(num_accepted == num_drafts(draft), bonus, best)
    return emit(
        draft, num_accepted, last, normalized if log_probs else None, bonus_tokens, accepted if outcomes else None
    )
