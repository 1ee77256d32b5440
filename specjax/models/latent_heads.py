"""The heads of attention on latents, in two forms, of which a call takes the one with fewer products.

Keys and values are products with the latent of a token. Calls of few tokens move these products to the queries and to
the result (the absorbed form), so that all heads attend to the latents themselves, as to one key head. Calls of many
tokens make the keys and the values of each head (the expanded form), which are shorter than a latent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from specjax.types import Array

# (latents [B, S, 1, D]) -> keys and values [B, S, H, W]
Expand = Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class HeadMatrices:
    """The matrices that make a key and a value of a latent for each of H heads, and two ways to attend with them.

    Args:
        to_key: [H, k, r], for the numbers of a key that do not turn.
        to_value: [H, v, r].
        rope_size: the numbers of a latent that turn, which follow the other r.
    """

    to_key: Array
    to_value: Array
    rope_size: int

    @property
    def width(self) -> int:
        """W, the numbers of a key and of a value in the expanded form: the shorter one is filled up with zeros."""
        return max(self.to_key.shape[1] + self.rope_size, self.to_value.shape[1])

    def is_for_many(self, num_tokens: int) -> bool:
        """Return whether the expanded form takes fewer products for so many tokens of a row.

        For each head and slot it makes a key and a value once, and saves some of the two products of each token.
        """
        _, size, rank = self.to_key.shape
        saved = 2 * (rank + self.rope_size - self.width)
        return num_tokens * saved > (size + self.to_value.shape[1]) * rank

    def attend(self, query: Array, attend: Callable[[Array, Expand | None], Array]) -> Array:
        """Return the values [B, T, H, v] that queries [B, T, H, k] attend to.

        Args:
            query: the numbers that turn follow the others.
            attend: is given queries and what makes keys and values of latents: None where the latents are both.
        """
        if self.is_for_many(query.shape[1]):
            return attend(self._filled_up(query), self._expand)[..., : self.to_value.shape[1]]
        still, turned = jnp.split(query, [self.to_key.shape[1]], axis=-1)
        query = jnp.concatenate([jnp.einsum("bthk,hkr->bthr", still, self.to_key), turned], axis=-1)
        attended = attend(query, None)[..., : self.to_key.shape[2]]
        return jnp.einsum("bthr,hvr->bthv", attended, self.to_value)

    def _expand(self, latent: Array) -> tuple[Array, Array]:
        inner, turned = jnp.split(latent[:, :, 0], [self.to_key.shape[2]], axis=-1)
        key, value = (jnp.einsum("bsr,hkr->bshk", inner, matrix) for matrix in (self.to_key, self.to_value))
        turned = jnp.broadcast_to(turned[:, :, None], (*key.shape[:3], self.rope_size))
        return self._filled_up(jnp.concatenate([key, turned], axis=-1)), self._filled_up(value)

    def _filled_up(self, heads: Array) -> Array:
        return jnp.pad(heads, [(0, 0)] * 3 + [(0, self.width - heads.shape[-1])])
