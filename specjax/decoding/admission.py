"""Which drafts of a step are verified, where all sequences share a budget of verified drafts."""

import jax
import jax.numpy as jnp

from specjax.types import Array


def admitted(confidences: Array, budget: int) -> Array:
    """Return how many drafts of each row are verified: those that are the likeliest to be reached and accepted.

    The survival of a draft is the product of the confidences up to its own place, so it never increases along a row. A
    tie goes to the lower place, then to the lower row. So the admitted drafts of a row are its first ones, and no later
    place of a row decides whether a draft is admitted. With confidences that do not depend on the draft itself the
    choice keeps every lossless verifier lossless.

    Args:
        confidences: [B, K] float in [0, 1], of each draft, given the tokens before it.
        budget: the most drafts of all rows together, an integer >= 0.

    Returns:
        [B] int32, the number of admitted drafts of each row.

    Example:
        >>> import jax.numpy as jnp
        >>> admitted(jnp.array([[0.9, 0.9, 0.1], [0.5, 0.5, 0.5]]), budget=3)
        Array([2, 1], dtype=int32)
    """
    # Products in another order than the places might increase by a rounding.
    survival = jax.lax.cummin(jnp.cumprod(confidences, axis=1), axis=1)
    by_place = survival.T.reshape(-1)  # in the order of places, and of rows within a place, which a stable sort keeps
    rank = jnp.argsort(jnp.argsort(by_place, descending=True, stable=True), stable=True)
    is_admitted = (rank < budget).reshape(survival.shape[::-1])
    return jnp.sum(is_admitted, axis=0, dtype=jnp.int32)
