"""DFlash2: blocks with convolutions, and drafts that a small table chooses among the best tokens of each row."""

from specjax.proposers.block_draft import BlockDraft, BlockHead, check_block
from specjax.proposers.drawing import draft_options
from specjax.types import Array, PyTree


def dflash2(
    head: BlockHead,
    params: PyTree,
    num_draft_tokens: int | None = None,
    *,
    temperature: float | Array | None = None,
) -> BlockDraft:
    """Draft as `dflash` does, with drafts drawn one after another among the best tokens of each row.

    The network runs once a step. Each row keeps its best `head.num_candidates` tokens; the token before the draft
    and the row's output change their logits. All other tokens have probability 0 in the distribution that is reported.
    Where a request's mask leaves none of the candidates, the drafts of the row end.

    Args:
        head: sizes and options of the network.
        params: its parameters, as `dflash` takes them.
        num_draft_tokens: K, at most `head.most_drafts`; None is that.
        temperature: the temperature of drafts, as `draft_model` takes it.

    Returns:
        A proposer. Its drafts are drawn from exactly the distribution that it reports, so lossless verifiers stay
        lossless.

    Raises:
        ValueError: a number is out of its range, or the head has no candidates.
    """
    most = head.config.vocab_size
    if not 1 <= head.num_candidates <= most:
        raise ValueError(f"head.num_candidates must be in [1, {most}], the draft vocabulary, got {head.num_candidates}")
    if head.markov_rank or head.confidence is not None:
        raise ValueError(
            "head.markov_rank must be 0 and head.confidence None for a head with candidates, got "
            f"{head.markov_rank} and {head.confidence!r}"
        )
    num_drafts = check_block(head, params, num_draft_tokens)
    values, is_greedy = draft_options(num_drafts, temperature)
    return BlockDraft(head, params, num_drafts, None, values, is_greedy=is_greedy)
