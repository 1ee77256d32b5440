"""Sizes of mixed steps, which decode and feed prompts in one program, and where these pay.

A product takes the time of reading its weights up to some number of rows, the *ridge*, and beyond it the time of its
arithmetic. Where the rows that decode or the tokens of prompts alone are below the ridge, both together read the
weights once instead of twice. Tokens of prompts choose nearly all experts of a mixture, so there it always pays. Beside
steps with drafts, which have more rows, loads of a dense model got no more tokens by it.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import jax

from specjax.decoding.drafters import num_fed
from specjax.engine.slot_calls import takes_packed
from specjax.models.quantized import Quantized
from specjax.parallel import of_one_device
from specjax.types import Model, Proposer
from specjax.validation import is_integer

RIDGE = 200  # rows, of weights of 16 bits, on GPUs of data centres
FEW = 8  # slots of the smaller mixed steps

Sizes = tuple[tuple[int, int], ...]  # pairs of the slots of a step and the tokens of prompts that it feeds


def mixed_sizes_of(
    model: Model, proposer: Proposer, step_sizes: Sequence[int], num_slots: int, prompt_sizes: Sequence[int]
) -> Sizes:
    """Return the sizes of mixed steps that pay: of all slots, and of the smallest of `step_sizes` from `FEW` on.

    Args:
        model: the target.
        proposer: the proposer.
        step_sizes: the numbers of slots below `num_slots` that a step may compute.
        num_slots: the number of slots.
        prompt_sizes: numbers of tokens of the calls that feed prompts, at most a chunk.
    """
    if jax.default_backend() == "cpu" or not takes_packed(model, proposer):
        return ()
    few = [size for size in sorted(step_sizes) if size >= FEW][:1]
    ridge, num_rows = _ridge(model), num_fed(proposer)
    pairs = [(slots, tokens) for slots in (*few, num_slots) for tokens in prompt_sizes]
    if num_rows > 1 and ridge < inf:
        return ()
    return tuple((slots, tokens) for slots, tokens in pairs if min(slots, tokens) < ridge)


def thrifty_tokens(model: Model, sizes: Sizes) -> dict[int, int]:
    """Return the tokens of prompts that cost least beside so many slots: the most that are below the ridge with them.

    Numbers of slots without such a size are left out, and all of a mixture, whose ridge no step reaches.
    """
    ridge = _ridge(model) if sizes else inf
    return {} if ridge == inf else {slots: tokens for slots, tokens in sorted(sizes) if slots + tokens <= ridge}


def _ridge(model: Model) -> float:
    """Return the ridge of the products of a model, by the bits of a weight; of a mixture infinity."""
    config: Any = getattr(of_one_device(model), "config", None)
    if getattr(config, "expert_size", 0):
        return inf
    weights = jax.tree.leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return RIDGE * num_bytes / max(sum(2 * weight.size for weight in weights), 1)


def checked_mixed_sizes(sizes: Any, step_sizes: Sequence[int], num_slots: int, prompt_sizes: Sequence[int]) -> Sizes:
    """Return the argument `mixed_sizes` of an engine as pairs, each once.

    Raises:
        ValueError: they are no pairs of a number of slots and a number of tokens that the other sizes have.
    """
    pairs = list(sizes) if isinstance(sizes, Sequence) and not isinstance(sizes, str) else [sizes]
    for pair in pairs:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_integer, pair))
        if not is_pair or pair[0] not in (*step_sizes, num_slots) or pair[1] not in prompt_sizes:
            expected = f"slots of {[*step_sizes, num_slots]} and tokens of {list(prompt_sizes)}, up to chunk_size"
            raise ValueError(f"mixed_sizes must be pairs of numbers, of {expected}, got {pair!r}")
    return tuple(sorted({(int(slots), int(tokens)) for slots, tokens in pairs}))
