"""Multi-query scoring, which feeds all drafts of a sequence in one call."""

import jax.numpy as jnp

from specjax.decoding import tree_steps
from specjax.decoding.calls import run
from specjax.types import Context, Draft, DraftTree, Model, ModelInput, ModelOutput, PyTree


def mqa(model: Model, context: Context, draft: Draft | DraftTree, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    """Score a draft by one call with K+1 query tokens per sequence: its last committed token and the drafts.

    Args:
        model: the target.
        context: the sequences; the last committed token of each has not been fed yet.
        draft: the draft, tokens [B, K], or a tree of N nodes, whose tokens see their ancestors alone. Token 0 is fed in
            place of -1, to a cache slot that is overwritten later.
        cache: the target's cache.

    Returns:
        ModelOutput, whose logits [B, K+1, V] score the token at position context.length + j in row j, and the cache.
        The logits of a tree are [B, N, V], and score the token after each node.

    Raises:
        ValueError: the draft is a tree, and the target keeps a recurrent state or takes no pages.
    """
    if isinstance(draft, DraftTree):
        tree_steps.check_target(model)
    return run(model, fed(context, draft), cache)


def fed(context: Context, draft: Draft | DraftTree) -> ModelInput:
    """Return the target's input in a step: the last committed token of each sequence, and its drafts."""
    if isinstance(draft, DraftTree):
        return tree_steps.fed(context, draft)
    num_tokens = draft.tokens.shape[1] + 1
    start = jnp.maximum(context.length - 1, 0)[:, None]
    last = jnp.take_along_axis(context.tokens, start, axis=1)
    tokens = jnp.concatenate([last, jnp.maximum(draft.tokens, 0)], axis=1)
    positions = start + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    return ModelInput(tokens, positions, pages=context.pages)
