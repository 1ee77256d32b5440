"""Multi-query-attention scoring: all drafts of a sequence in one call."""

import jax.numpy as jnp

from specjax.calls import run
from specjax.types import Context, Draft, Model, ModelInput, ModelOutput, PyTree


def mqa(model: Model, context: Context, draft: Draft, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    """Score a draft by one call of K+1 query tokens a sequence: the last committed token and the drafts.

    Args:
        model: the target.
        context: whose last committed token has not been fed yet.
        draft: token 0 is fed where it has -1; what that writes is overwritten later.
        cache: of the target.

    Returns:
        ModelOutput, row j for the position context.length + j, and the cache.
    """
    num_tokens = draft.tokens.shape[1] + 1
    start = jnp.maximum(context.length - 1, 0)[:, None]
    last = jnp.take_along_axis(context.tokens, start, axis=1)
    tokens = jnp.concatenate([last, jnp.maximum(draft.tokens, 0)], axis=1)
    return run(model, ModelInput(tokens, start + jnp.arange(num_tokens)[None]), cache)
