"""Logits processors that requests may use in addition to their own."""

from dataclasses import dataclass

import jax.numpy as jnp

from specjax.operations.top_k import top_k
from specjax.types import Array, Context
from specjax.validation import is_integer


@dataclass(frozen=True)
class ExactTopK:
    """A logits processor that keeps exactly the k most likely tokens; of equally likely tokens, the lower ids stay.

    `SamplingParams.top_k` and `top_p` also keep all tokens that are as likely as the last one. They are
    stored as the smallest kept logit of a row; to separate equal logits, all logits would have to be written once more.
    This processor writes them, for the requests that use it. Like every processor it gets the model's logits, before
    the request's bias, masks and penalties.

    Args:
        k: the number of tokens to keep, >= 1. A vocabulary with fewer tokens keeps all.

    Raises:
        ValueError: k is not an integer >= 1.

    Example:
        >>> from specjax import SamplingParams
        >>> params = SamplingParams(logits_processors=[ExactTopK(2)])
        >>> ExactTopK(2)(jnp.array([1.0, 3.0, 1.0, 1.0]), None)
        Array([  1.,   3., -inf, -inf], dtype=float32)
    """

    k: int

    def __post_init__(self):
        if not (is_integer(self.k) and self.k >= 1):
            raise ValueError(f"k must be an integer >= 1, got {self.k!r}")

    def __call__(self, logits: Array, context: Context) -> Array:
        kept, ids = top_k(logits, min(self.k, logits.shape[-1]))
        return jnp.full_like(logits, -jnp.inf).at[ids].set(kept)
