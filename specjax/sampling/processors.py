"""Logits processors that requests may use beside their own."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.types import Array, Context, is_integer


@dataclass(frozen=True)
class ExactTopK:
    """Keeps exactly the k most likely tokens; of those that tie for the last place, the lowest ids.

    `SamplingParams.top_k` and `top_p` keep all ties of the last token, because they are a cut by value, which is stored
    beside the logits: a cut that parts equal logits would have to write all of them once more. This processor writes
    them, for the requests that ask for it. Like every processor it sees what the model gives, before the request's
    bias, masks and penalties.

    Args:
        k: number of tokens to keep, >= 1; all where the vocabulary has no more.

    Raises:
        ValueError: for another k.

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
        kept, ids = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))
        return jnp.full_like(logits, -jnp.inf).at[ids].set(kept)
