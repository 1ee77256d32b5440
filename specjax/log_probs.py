"""Log-probabilities of chosen and of the most likely tokens, for callers that report them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.types import Array, Categorical
from specjax.verifiers import core as common

__all__ = ["LogProbs", "logprobs"]


class LogProbs(NamedTuple):
    """Log-probabilities of chosen tokens, and the n most likely tokens of each row."""

    chosen: Array  # [B, T] float32; 0 where the token is -1
    rank: Array  # [B, T] int32, 1 for the most likely token; 0 where the token is -1
    top_ids: Array  # [B, T, n] int32, the most likely first, the lower id first where two tie
    top: Array  # [B, T, n] float32


def logprobs(logits: Array, tokens: Array, n: int = 0) -> LogProbs:
    """Compute log-probabilities of chosen tokens, and the n most likely tokens of each row.

    They are of the logits as given: raw ones from a model's output, processed ones after `sampling.process`.

    Args:
        logits: [B, T, V] float32 or bfloat16; -inf excludes a token.
        tokens: [B, T] int32, such as `Verified.tokens`; -1 for none.
        n: how many of the most likely tokens to list, static.

    Returns:
        LogProbs.

    Raises:
        ValueError: for wrong shapes or dtypes, or n outside [0, V].

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.log(jnp.array([[[0.5, 0.125, 0.375], [0.25, 0.25, 0.5]]]))
        >>> result = logprobs(logits, jnp.array([[2, -1]]), n=2)
        >>> round(float(result.chosen[0, 0]), 3), result.rank
        (-0.981, Array([[2, 0]], dtype=int32))
        >>> result.top_ids
        Array([[[0, 2],
                [2, 0]]], dtype=int32)
    """
    common.check_array("logits", logits, "[B, T, V]", (None, None, None), jnp.floating)
    common.check_array("tokens", tokens, "[B, T]", logits.shape[:2], jnp.integer)
    if not 0 <= n <= logits.shape[-1]:
        raise ValueError(f"n must be in [0, V = {logits.shape[-1]}], got {n}")
    law = distributions.normalize(Categorical(logits))
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top_ids = jax.lax.top_k(logits, n)[1]
    has_token = tokens >= 0
    return LogProbs(
        chosen=jnp.where(has_token, distributions.token_log_prob(law, tokens), 0).astype(jnp.float32),
        rank=jnp.where(has_token, rank, 0),
        top_ids=top_ids,
        top=distributions.log_probs(law, top_ids).astype(jnp.float32),
    )
