"""Modified rejection sampling, token by token."""

from functools import partial

import jax.numpy as jnp

from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers import core as common
from specjax.verifiers import kernels
from specjax.verifiers.match import accept_matches


@partial(common.from_core, kernel=kernels.rejection)
def rejection(
    draw: common.Draw,
    draft: Draft,
    target: Categorical,
    *,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    outcomes: bool = False,
) -> Verified:
    """Verify by modified rejection sampling. Lossless: emits the target's law.

    A draft is accepted with probability min(1, target / draft). The first rejected one is replaced by a draw from the
    normalised residual max(target - draft, 0); if none is rejected a bonus token is drawn from the next target row.
    Deterministic drafts are verified by exact match (the same law, in one pass); rows of temperature 0 accept the
    argmax alone. Random, greedy, sampled and deterministic rows mix.

    Args:
        keys: typed threefry keys [], [B] (one fresh key a row a step) or [B, K+1] (by absolute position).
        draft: tokens [B, K], -1 where a row has fewer, and the distribution they were drawn from.
        target: Categorical or logits [B, K+1, V]; row i is the law of the token at draft i.
        bonus_tokens: [B] int32, emitted instead of a draw where all drafts of a row are accepted. Lossless iff drawn
            from that row of the target independently of the draft and of these keys.
        log_probs: fill `Verified.log_probs`.
        outcomes: fill `Verified.is_accepted`, by XLA.
        implementation: "xla", "pallas", "interpret", or None: the kernels on CUDA where they support the case.

    Returns:
        Verified.

    Raises:
        NotImplementedError: if the named implementation does not support the case.
        ValueError: for wrong shapes, dtypes or keys.

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
        return accept_matches(draw, draft, target, bonus_tokens, log_probs, outcomes)
    law = distributions.normalize(target)
    draft_law = distributions.of_drafts(draft.distribution)
    accept = jnp.exp(jnp.minimum(common.log_ratio(draft, draft_law, law), 0))
    if target.temperature is not None:
        is_best = draft.tokens == law.argmax[:, :-1]
        accept = jnp.where(target.temperature[:, None] == 0, is_best.astype(accept.dtype), accept)
    accepted = draw.flip(accept)
    num_accepted = common.count_accepted(draft, accepted)
    last = draw.pick(common.recovery(draft, draft_law, law, num_accepted))
    return common.emit(
        draft, num_accepted, last, law if log_probs else None, bonus_tokens, accepted if outcomes else None
    )
