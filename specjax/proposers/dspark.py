"""DSpark: all rows of a block from one pass, and drafts that depend on the token before each of them."""

import jax.numpy as jnp

from specjax.proposers.block_draft import BlockDraft, BlockHead, check_block
from specjax.proposers.drawing import Reduced, draft_options
from specjax.types import Array, PyTree
from specjax.validation import check_number


def dspark(
    head: BlockHead,
    params: PyTree,
    num_draft_tokens: int | None = None,
    *,
    reduced: Reduced | None = None,
    temperature: float | Array | None = None,
    min_confidence: float | Array | None = None,
) -> BlockDraft:
    """Draft as `dflash` does, with logits to which a small table adds numbers by the token before each draft.

    The network runs once a step; the drafts are then drawn one after another.

    Args:
        head: sizes and options of the network.
        params: its parameters, as `dflash` takes them.
        num_draft_tokens: K, at most `head.most_drafts`; None is that.
        reduced: the draft vocabulary; None where it is the target's.
        temperature: the temperature of drafts, as `draft_model` takes it.
        min_confidence: a number in [0, 1]: the drafts of a row end before the first one that the head expects to be
            accepted with a smaller probability. The head says so before the draft is drawn, so the output keeps its
            distribution. None drafts K tokens always.

    Returns:
        A proposer. Its drafts are drawn from exactly the distribution that it reports, so lossless verifiers stay
        lossless.

    Raises:
        ValueError: a number is out of its range, or there is a `min_confidence` for a head without confidences.
    """
    if head.num_candidates:
        raise ValueError(f"head.num_candidates must be 0 (proposers.dflash2 takes others), got {head.num_candidates}")
    num_drafts = check_block(head, params, num_draft_tokens)
    values, is_greedy = draft_options(num_drafts, temperature)
    if min_confidence is not None:
        check_number("min_confidence", min_confidence, "None or a number in [0, 1]", 0, 1)
        if head.confidence is None:
            raise ValueError(f"min_confidence must be None for a head without confidences, got {min_confidence!r}")
        min_confidence = jnp.asarray(min_confidence, jnp.float32)
    return BlockDraft(head, params, num_drafts, reduced, values, min_confidence, is_greedy)
