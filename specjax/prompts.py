"""Feeding prompts to a model."""

import jax
import jax.numpy as jnp

from specjax.types import Context, Model, ModelInput, PyTree

CHUNK = 256  # tokens a call


def feed(model: Model, context: Context, cache: PyTree) -> PyTree:
    """Write the prompts of `context` to the cache, in calls of one static size; their logits are not used.

    Args:
        model: whose cache is filled.
        context: tokens [B, P] are the right-padded prompts, length [B] theirs.
        cache: of the model, for this batch.

    Returns:
        The cache; slots from each row's length on hold padding, which no query sees before it is overwritten.
    """
    batch_size, width = context.tokens.shape
    chunk = min(CHUNK, width)
    tokens = jnp.where(jnp.arange(width)[None] < context.length[:, None], context.tokens, 0)
    tokens = jnp.pad(tokens, ((0, 0), (0, -width % chunk)))

    def body(index, cache):
        start = index * chunk
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (batch_size, chunk))
        chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        return model.apply(model.params, ModelInput(chunk_tokens, positions), cache)[1]

    if width <= chunk:
        return body(0, cache)
    num_chunks = (jnp.max(context.length, initial=0) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, num_chunks, body, cache)
