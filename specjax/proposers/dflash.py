"""DFlash: all drafts from one pass over a block of mask tokens, independently of each other."""

from specjax.proposers.block_draft import BlockDraft, BlockHead, check_block
from specjax.proposers.drawing import Reduced, draft_options
from specjax.types import Array, PyTree


def dflash(
    head: BlockHead,
    params: PyTree,
    num_draft_tokens: int | None = None,
    *,
    reduced: Reduced | None = None,
    temperature: float | Array | None = None,
) -> BlockDraft:
    """Draft with a network that reads the target's features and fills a block of mask tokens in one pass.

    A step runs a block of as many tokens as it needs, which may be fewer than in training. The drafts of a row are
    drawn independently of each other. A sequence of one token gets no drafts, because it has no features.

    Args:
        head: sizes and options of the network.
        params: its parameters, of the shapes that `head.shapes()` gives, and `embedding` [V, h] and `lm_head` [D, h],
            which are mostly the target's own.
        num_draft_tokens: K, at most `head.most_drafts`; None is that.
        reduced: the draft vocabulary; None where it is the target's.
        temperature: the temperature of drafts, as `draft_model` takes it.

    Returns:
        A proposer. Its drafts are drawn from exactly the distribution that it reports, so lossless verifiers stay
        lossless.

    Raises:
        ValueError: a number is out of its range, or the head makes drafts depend on each other, as the head of `dspark`
            does.

    References:
        Chen et al., DFlash: Block Diffusion for Flash Speculative Decoding, 2026.
    """
    if head.markov_rank:
        raise ValueError(f"head.markov_rank must be 0 (proposers.dspark takes others), got {head.markov_rank}")
    if head.num_candidates:
        raise ValueError(f"head.num_candidates must be 0 (proposers.dflash2 takes others), got {head.num_candidates}")
    num_drafts = check_block(head, params, num_draft_tokens)
    values, is_greedy = draft_options(num_drafts, temperature)
    return BlockDraft(head, params, num_drafts, reduced, values, is_greedy=is_greedy)
