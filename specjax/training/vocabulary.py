"""Reduced draft vocabularies: the tokens of the target that a drafter can propose, chosen by how often they occur."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.types import Array
from specjax.validation import is_integer


class Vocabulary(NamedTuple):
    """The D tokens of a target vocabulary V that a drafter can propose, in increasing order."""

    ids: Array | np.ndarray  # [D] int32, the target's id of each draft token
    d2t: Array | np.ndarray  # [D] int32, ids - arange(D), as checkpoints of EAGLE-3 store it
    t2d: Array | np.ndarray  # [V] bool, whether the draft vocabulary holds a token of the target


def vocabulary(counts: ArrayLike, size: int) -> Vocabulary:
    """Choose the tokens that occur most often.

    Among tokens of equal count, those with the lower id come first. So where fewer than `size` tokens occur, the lowest
    ids that do not occur fill the vocabulary.

    Args:
        counts: [V] integers >= 0, how often each token occurs in the text for the drafter's training.
        size: D, in [1, V].

    Returns:
        The vocabulary, of NumPy arrays.

    Raises:
        ValueError: counts are not a row of integers >= 0, or the size is out of its range.

    Example:
        >>> vocabulary([5, 0, 7, 0, 5], 3).ids
        array([0, 2, 4], dtype=int32)
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
        raise ValueError(f"counts must be [V] integers >= 0, got shape {counts.shape} of {counts.dtype}")
    if not is_integer(size) or not 1 <= size <= len(counts):
        raise ValueError(f"size must be an integer in [1, V = {len(counts)}], got {size!r}")
    ids = np.sort(np.argsort(-counts.astype(np.int64), kind="stable")[:size]).astype(np.int32)
    is_held = np.zeros(len(counts), bool)
    is_held[ids] = True
    return Vocabulary(ids, ids - np.arange(size, dtype=np.int32), is_held)
