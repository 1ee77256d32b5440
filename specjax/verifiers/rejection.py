"""Modified rejection sampling, which accepts or rejects the drafts one by one."""

from functools import partial

from pallas_kernels.rules import accept_by_ratio
from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers import kernels
from specjax.verifiers.core import Draw, count_accepted, emit, evidence, from_core, recovery
from specjax.verifiers.match import accept_matches


@partial(from_core, kernel=kernels.rejection)
def rejection(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    *,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    outcomes: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify by modified rejection sampling. Lossless: the output follows the target's distribution.

    Draft x is accepted with probability min(1, target(x) / draft(x)). The first rejected draft is replaced by a token
    drawn from max(target - draft, 0) / sum(max(target - draft, 0)). If no draft is rejected, a bonus token is drawn
    from the target row after the last draft.

    Deterministic drafts are verified by exact match, which has the same output distribution and takes one pass over the
    logits. Rows of temperature 0 accept only the argmax. A batch may mix sampled, greedy and deterministic rows.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from specjax import Categorical, Draft, verifiers
        >>> target = jnp.log(jnp.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]))
        >>> draft = Draft(jnp.array([[1, 1]]), Categorical.from_probs(jnp.array([[[0.5, 0.5], [0.5, 0.5]]])))
        >>> verifiers.rejection(jax.random.key(0), draft, target).tokens
        Array([[ 1,  0, -1]], dtype=int32)

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192.
        Chen et al., Accelerating Large Language Model Decoding with Speculative Sampling, arXiv:2302.01318.
    """
    if draft.distribution is None:
        return accept_matches(draw, draft, target, bonus_tokens, log_probs, outcomes, axis_name)
    normalized_target = distributions.normalize(target, axis_name=axis_name)
    normalized_draft = distributions.normalize_drafts(draft.distribution, axis_name)
    accepted = draw.flip(accept_by_ratio(evidence(draft, normalized_draft, normalized_target)))
    num_accepted = count_accepted(draft, accepted)
    last = draw.pick(recovery(draft, normalized_draft, normalized_target, num_accepted))
    return emit(
        draft,
        num_accepted,
        last,
        normalized_target if log_probs else None,
        bonus_tokens,
        accepted if outcomes else None,
    )
