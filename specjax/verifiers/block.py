"""Block verification, which accepts or rejects the drafts of a row jointly."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.rules import accept_prefix
from specjax import distributions
from specjax.distributions import Normalized
from specjax.types import Array, Categorical, Draft, Verified
from specjax.verifiers import kernels
from specjax.verifiers.core import Draw, canonical, emit, from_core, is_deterministic, log_ratio, num_drafts, recovery
from specjax.verifiers.match import accept_matches


@partial(from_core, kernel=kernels.block)
def block(
    draw: Draw,
    draft: Draft,
    target: Categorical,
    *,
    bonus_tokens: Array | None = None,
    log_probs: bool = False,
    axis_name: str | None = None,
) -> Verified:
    """Verify the drafts of a row jointly. Lossless: the output follows the target's distribution.

    Let P_0 = 1 and P_i = min(1, P_{i-1} * target(x_i) / draft(x_i)), and let S_i be the sum of
    max(P_i * target - draft, 0) over the next token. The prefix of i drafts is accepted with probability
    S_i / (S_i + 1 - P_i), and the prefix of all drafts with probability P_K. The longest accepted prefix, of n drafts,
    is kept even if a shorter one failed. The token after it is drawn from max(P_n * target - draft, 0), normalised, or
    from the target row after the last draft if all drafts are accepted.

    On average this accepts at least as many drafts as `rejection`, so it is the better choice for sampled drafts. It
    accepts equally many for one draft and for deterministic drafts.

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
        return accept_matches(draw, draft, target, bonus_tokens, log_probs, axis_name=axis_name)
    normalized_target = distributions.normalize(target, axis_name=axis_name)
    normalized_draft = distributions.normalize_drafts(draft.distribution, axis_name)
    draft = canonical(draft._replace(num_tokens=jnp.minimum(num_drafts(draft), num_usable_rows(normalized_target))))
    log_joint = jax.vmap(joint_log_ratio)(log_ratio(draft, normalized_draft, normalized_target))
    joint = jnp.exp(log_joint)
    index = jnp.arange(1, joint.shape[1] + 1, dtype=jnp.int32)[None]
    accepted = draw.flip(accept_prefixes(draft, normalized_draft, normalized_target, joint))
    accepted &= index <= num_drafts(draft)[:, None]
    num_accepted = jnp.max(jnp.where(accepted, index, 0), axis=1)
    log_scale = jnp.take_along_axis(jnp.pad(log_joint, ((0, 0), (1, 0))), num_accepted[:, None], axis=1)[:, 0]
    last = draw.pick(recovery(draft, normalized_draft, normalized_target, num_accepted, jnp.exp(log_scale)))
    return emit(draft, num_accepted, last, normalized_target if log_probs else None, bonus_tokens)


def num_usable_rows(target: Normalized) -> Array:
    """Return the number [B] of target rows before the first row without mass.

    Such rows can follow a stop token. Drafts from there on cannot be accepted, and must not change the verdict on the
    drafts before them.
    """
    has_mass, temperature = jnp.isfinite(target.log_mass), target.distribution.temperature
    if temperature is not None:
        has_mass |= temperature[:, None] == 0
    return jnp.sum(jnp.cumprod(has_mass.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def joint_log_ratio(log_ratio: Array) -> Array:
    """Compute log P_i [K] of one row, with P_i = min(1, P_{i-1} * ratio_i), from the log of the ratios [K]."""

    def step(carry, ratio):
        carry = jnp.minimum(carry + ratio, 0)
        return carry, carry

    return jax.lax.scan(step, jnp.zeros_like(log_ratio, shape=()), log_ratio)[1]


def accept_prefixes(draft: Draft, normalized_draft: Normalized, target: Normalized, joint: Array) -> Array:
    """Compute the acceptance probability [B, K] of each prefix, from P [B, K]."""
    num_draft_tokens = joint.shape[1]
    # Entry i is the mass of the residual after i + 1 drafts, of the target row and the draft row of the next token.
    next_target = distributions.take_rows(target, 1, num_draft_tokens)
    next_draft = distributions.take_rows(normalized_draft, 1, num_draft_tokens)
    mass = distributions.residual_mass(next_target, next_draft, joint[:, :-1])
    one_hot_mass = joint[:, :-1] * -jnp.expm1(distributions.token_log_prob(next_target, draft.tokens[:, 1:]))
    mass = jnp.where(is_deterministic(draft)[:, None], one_hot_mass, mass)
    accept = jax.vmap(acceptance_probabilities)(joint, mass, num_drafts(draft))
    temperature = target.distribution.temperature
    return accept if temperature is None else jnp.where(temperature[:, None] == 0, joint, accept)


def acceptance_probabilities(joint: Array, mass: Array, num_tokens: Array) -> Array:
    """Compute the acceptance probability [K] of each prefix of one row, from P [K] and the residual masses [K-1]."""
    inner = accept_prefix(jnp.pad(mass, (0, 1)), joint)
    return jnp.where(jnp.arange(1, joint.shape[0] + 1, dtype=jnp.int32) == num_tokens, joint, inner)
