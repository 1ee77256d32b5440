"""Drafters whose vocabulary is a part of the target's: the other tokens have probability 0."""

import jax.numpy as jnp
import numpy as np

from specjax.types import Array


def places_of(token_ids: np.ndarray, vocab_size: int, name: str) -> np.ndarray:
    """Return where each token of the target is in the vocabulary of the drafter.

    Args:
        token_ids: [D] integers, the target's id of each token of the drafter.
        vocab_size: V.
        name: of the ids, for messages.

    Returns:
        [V] int32; D for tokens that the drafter does not have.

    Raises:
        ValueError: an id is out of range, or there twice.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or not 0 <= ids.min() <= ids.max() < vocab_size:
        got = f"{ids.min()} to {ids.max()}" if ids.size else "none"
        raise ValueError(f"{name} must be ids [D] in [0, V = {vocab_size}), got {got}, {ids.dtype} {ids.shape}")
    places = np.full(vocab_size, len(ids), np.int32)
    places[ids] = np.arange(len(ids), dtype=np.int32)
    if (places[ids] != np.arange(len(ids))).any():
        raise ValueError(f"{name} must have each id once, got {len(ids) - len(np.unique(ids))} of {len(ids)} again")
    return places


def widen(logits: Array, places: Array | None) -> Array:
    """Return logits [B, T, V] over the target's vocabulary, given those of the drafter [B, T, D].

    Tokens that the drafter does not have get -inf, so that the distribution is exactly the one that drafts are drawn
    from. `places` are those of `places_of`; None means that the vocabularies are the same.
    """
    return logits if places is None else logits.at[:, :, places].get(mode="fill", fill_value=-jnp.inf)
