"""Block verification: the drafts of a row accepted or rejected together."""

from functools import partial

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers import core as common
from specjax.verifiers import kernels
from specjax.verifiers.match import accept_matches


@partial(common.from_core, kernel=kernels.block)
def block(
    draw: common.Draw, draft: Draft, target: Categorical, *, bonus_tokens: Array | None = None, log_probs: bool = False
) -> Verified:
    """Verify the drafts of a row jointly. Lossless: emits the target's law, on average in no more steps than rejection.

    Each prefix of the drafts gets an acceptance probability of its own, and the longest accepted one is kept, also past
    a prefix that failed. The better default for sampled drafts in a chain; the same as rejection for one draft and for
    deterministic drafts.

    Args:
        keys: typed threefry keys [], [B] (one fresh key a row a step) or [B, K+1] (by absolute position).
        draft: tokens [B, K], -1 where a row has fewer, and the distribution they were drawn from.
        target: Categorical or logits [B, K+1, V]; row i is the law of the token at draft i.
        bonus_tokens: [B] int32, emitted instead of a draw where all drafts of a row are accepted. Lossless iff drawn
            from that row of the target independently of the draft and of these keys.
        log_probs: fill `Verified.log_probs`.
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
        >>> draft = Draft(jnp.array([[1, 0]]), Categorical.from_probs(jnp.array([[[0.5, 0.5], [0.5, 0.5]]])))
        >>> verifiers.block(jax.random.key(0), draft, target).tokens
        Array([[1, 0, 1]], dtype=int32)

    References:
        Sun et al., Block Verification Accelerates Speculative Decoding, arXiv:2403.10444, Algorithm 2.
    """
    if draft.distribution is None:
        return accept_matches(draw, draft, target, bonus_tokens, log_probs)
    num_draft_tokens = draft.tokens.shape[1]
    law = distributions.normalize(target)
    draft = common.canonical(draft._replace(num_tokens=jnp.minimum(draft.num_tokens, num_usable_rows(law))))
    draft_law = distributions.of_drafts(draft.distribution)
    log_joint = jax.vmap(joint_log_ratio)(common.log_ratio(draft, draft_law, law))
    joint = jnp.exp(log_joint)

    # Row i of these is the residual after i + 1 drafts: the next target row against the next draft row.
    next_target = distributions.slice_law(law, 1, num_draft_tokens)
    mass = distributions.residual_mass(
        next_target, distributions.slice_law(draft_law, 1, num_draft_tokens), joint[:, :-1]
    )
    one_hot_mass = joint[:, :-1] * -jnp.expm1(distributions.token_log_prob(next_target, draft.tokens[:, 1:]))
    mass = jnp.where(common.is_deterministic(draft)[:, None], one_hot_mass, mass)
    accept = jax.vmap(acceptance_probabilities)(joint, mass, draft.num_tokens)
    if target.temperature is not None:
        is_best = (draft.tokens == law.argmax[:, :-1]).astype(jnp.int32)
        greedy = jnp.cumprod(is_best, axis=1).astype(accept.dtype)
        accept = jnp.where(target.temperature[:, None] == 0, greedy, accept)

    index = jnp.arange(1, num_draft_tokens + 1, dtype=jnp.int32)[None]
    accepted = draw.flip(accept) & (index <= draft.num_tokens[:, None])
    num_accepted = jnp.max(jnp.where(accepted, index, 0), axis=1)
    log_scale = jnp.take_along_axis(jnp.pad(log_joint, ((0, 0), (1, 0))), num_accepted[:, None], axis=1)[:, 0]
    last = draw.pick(common.recovery(draft, draft_law, law, num_accepted, jnp.exp(log_scale)))
    return common.emit(draft, num_accepted, last, law if log_probs else None, bonus_tokens)


def num_usable_rows(law: distributions.Law) -> Array:
    """Target rows [B] before the first without mass, as there is one after a stop token: looking ahead ends there."""
    has_mass, temperature = jnp.isfinite(law.log_mass), law.distribution.temperature
    if temperature is not None:
        has_mass |= temperature[:, None] == 0
    return jnp.sum(jnp.cumprod(has_mass.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def joint_log_ratio(log_ratio: Array) -> Array:
    """Of one row: log of P_i = min(1, P_{i-1} target / draft), from log target / draft [K]."""

    def step(carry, ratio):
        carry = jnp.minimum(carry + ratio, 0)
        return carry, carry

    return jax.lax.scan(step, jnp.zeros_like(log_ratio, shape=()), log_ratio)[1]


def acceptance_probabilities(joint: Array, mass: Array, num_tokens: Array) -> Array:
    """Of one row: the probability [K] that each prefix is accepted, from P [K] and residual masses [K-1]."""
    mass = jnp.pad(mass, (0, 1))
    rest = mass + (1 - joint)
    inner = jnp.where(rest > 0, mass / jnp.where(rest > 0, rest, 1), 1)
    return jnp.where(jnp.arange(1, joint.shape[0] + 1) == num_tokens, joint, inner)
