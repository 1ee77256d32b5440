"""Feed prompts to a model."""

import jax
import jax.numpy as jnp

from specjax.calls import run
from specjax.log_probs import LogProbs, record
from specjax.types import Context, Model, ModelInput, PyTree

CHUNK = 256  # tokens in each call


def feed(
    model: Model, context: Context, cache: PyTree, log_probs: LogProbs | None = None
) -> tuple[PyTree, LogProbs | None]:
    """Feed the prompts of `context` to a model, in calls of one static size.

    The logits are used only for the log-probabilities of the prompt; without `log_probs` nothing reads them.

    Args:
        model: the model whose cache is filled.
        context: `tokens` [B, P] are the right-padded prompts and `length` [B] their lengths.
        cache: the model's cache for this batch.
        log_probs: a buffer that gets the log-probability of prompt token i under the model in slot i, for i >= 1.

    Returns:
        The filled cache and the buffer. From each row's length on, the cache holds padding, which is overwritten before
        any token sees it.
    """
    batch_size, width = context.tokens.shape
    chunk = min(CHUNK, width)
    tokens = jnp.where(jnp.arange(width)[None] < context.length[:, None], context.tokens, -1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1 + -width % chunk)), constant_values=-1)

    def body(index, carry):
        cache, log_probs = carry
        start = index * chunk
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (batch_size, chunk))
        fed, following = (jax.lax.dynamic_slice_in_dim(tokens, start + i, chunk, axis=1) for i in range(2))
        output, cache = run(model, ModelInput(jnp.maximum(fed, 0), positions), cache)
        if log_probs is not None:
            log_probs = record(log_probs, positions + 1, following, output.logits)
        return cache, log_probs

    if width <= chunk:
        return body(0, (cache, log_probs))
    num_chunks = (jnp.max(context.length, initial=0) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, num_chunks, body, (cache, log_probs))
