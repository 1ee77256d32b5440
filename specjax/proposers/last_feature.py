"""The target's final hidden state of the last token that it was fed, which heads without a cache read.

The target has been fed all of L committed tokens but the last, which is pending: the state belongs to token L-2, from
which the target's own head drew the pending token. Prefill feeds the pending token too, without a use for its output,
so that all steps are alike.
"""

from typing import Any

import jax.numpy as jnp

from specjax.operations.pieces import at_token
from specjax.proposers.feature_draft import committed, row_of
from specjax.proposers.trunk import hidden_of
from specjax.types import Context, Memory, ModelInput, PyTree, Verified


def prefill(inputs: ModelInput, previous: PyTree, features: Any, state: Memory) -> Memory:
    """Return the hidden state [B, H] of the token before the last one of each prompt, as far as it has been fed."""
    held, counts = state.take(inputs.sequences).rows, inputs.counts
    hidden = hidden_of(features, held.shape[-1])
    index = counts - 2
    inside = at_token(inputs, hidden, jnp.maximum(index, 0))
    last = jnp.where(index[:, None] >= 0, inside, previous.hidden).astype(held.dtype)
    return state.put(inputs.sequences, Memory(rows=jnp.where(counts[:, None] > 0, last, held)))


def update(context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
    """Return the hidden state [B, H] of the last token that was fed and committed: the last accepted draft.

    The verified tokens say which it is, whoever drafted them.
    """
    hidden = hidden_of(features, state.rows.shape[-1])
    last = row_of(hidden, committed(context, verified)[1])[:, 0].astype(state.rows.dtype)
    return Memory(rows=jnp.where(context.active[:, None], last, state.rows))
