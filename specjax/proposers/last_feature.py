"""The target's final hidden state of the last token that it was fed, which heads without a cache read.

Of L committed tokens the target has been fed all but the last, which is pending: the state is that of token L-2, from
which the target's own head drew the pending token. Prefill feeds the pending token too, without a use for what comes
out, so that all steps are alike.
"""

from typing import Any

import jax.numpy as jnp

from specjax.types import Array, Chunk, Context, Features, Verified
from specjax.validation import check_array


def hidden_of(features: Any, size: int) -> Array:
    """Return the hidden states [B, T, H] of a target's features.

    Args:
        features: what the target returned.
        size: H, the hidden size that the drafter reads.

    Raises:
        ValueError: the target returns no `Features`, or has another hidden size.
    """
    if not isinstance(features, Features):
        raise ValueError(
            "features must be Features(hidden, taps), which the built-in models return, for a drafter that reads them, "
            f"got {type(features).__name__}"
        )
    check_array("features.hidden", features.hidden, "[B, T, H]", (None, None, size), jnp.floating)
    return features.hidden


def prefill(chunk: Chunk, features: Any, state: Array) -> Array:
    """Return the hidden state [B, H] of the token before the last one of each prompt, as far as it has been fed."""
    hidden = hidden_of(features, state.shape[-1])
    index = chunk.num_tokens[:, None, None] - 2
    inside = jnp.take_along_axis(hidden, jnp.maximum(index, 0), axis=1)[:, 0]
    last = jnp.where(index[:, 0] >= 0, inside, chunk.previous.hidden).astype(state.dtype)
    rows = jnp.arange(state.shape[0]) if chunk.rows is None else chunk.rows
    last = jnp.where(chunk.num_tokens[:, None] > 0, last, state.at[rows].get(mode="fill", fill_value=0))
    return state.at[rows].set(last, mode="drop")


def update(context: Context, verified: Verified, features: Any, state: Array) -> Array:
    """Return the hidden state [B, H] of the last token that was fed and committed: the last accepted draft.

    The verified tokens say which it is, whoever drafted them.
    """
    hidden = hidden_of(features, state.shape[-1])
    index = jnp.maximum(jnp.sum(verified.tokens >= 0, axis=1) - 1, 0)
    last = jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0].astype(state.dtype)
    return jnp.where(context.active[:, None], last, state)
