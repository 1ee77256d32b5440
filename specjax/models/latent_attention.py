"""Attention on latents (MLA): a mixer of the one layer whose cache has one short vector of each token for all heads.

Keys and values are products with the latent of a token; `latent_heads` has the two forms of attention with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax.numpy as jnp

from specjax.models.latent_heads import HeadMatrices
from specjax.models.layer import Params, Shapes, Sublayer, join, matrix_shape, product, times
from specjax.models.linear import rms_norm
from specjax.models.recurrent import RowMixer
from specjax.models.rope import Rotation, rotate
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

NORM_EPS = 1e-6  # epsilon of the norms inside the attention, whatever epsilon the other norms have


class Latents(Protocol):
    """The latents that one layer attends to in a call, a pytree: sequences or a cache."""

    def attend_to_latents(self, query: Array, latent: Array, heads: HeadMatrices, scale: float) -> tuple[Array, Any]:
        """Attend from queries [B, T, H, k] to latents, which include the call's [B, T, D].

        Returns:
            The values that the heads attend to [B, T, H, v], and the record that replaces the layer's cache.
        """
        ...


@dataclass(frozen=True)
class LatentAttention:
    """Attention with keys and values made of latents, as DeepSeek V3 has it.

    A latent is `rank` numbers after a norm, of which the matrices of each head make a key and a value, and
    `rope_size` numbers that turn with the position and stand beside the keys of all heads.
    """

    rank: int
    rope_size: int
    key_size: int  # numbers of a key that do not turn
    value_size: int
    scale: float  # factor on the scores
    query_rank: int | None = None  # numbers between the two matrices of queries; None for one matrix
    has_bias: bool = False  # whether the matrices that read and write the residual stream have biases
    is_interleaved: bool = True  # whether numbers that turn together stand side by side in the products

    window: ClassVar[None] = None  # all positions are seen

    @property
    def latent_size(self) -> int:
        """D, the numbers of a token in the cache."""
        return self.rank + self.rope_size

    @property
    def query_size(self) -> int:
        """Numbers of a query."""
        return self.key_size + self.rope_size

    def shapes(self, config: "DecoderConfig", inputs: int) -> Shapes:
        """Return the shapes of the parameters by name, for attention that reads `inputs` numbers of a token."""
        heads, hidden = config.num_heads, config.hidden_size
        shapes: Shapes = {
            "query_up": matrix_shape(config, self.query_rank or inputs, heads * self.query_size),
            "latent_down": matrix_shape(config, inputs, self.latent_size),
            "latent_norm": (self.rank,),
            "latent_up": (heads * (self.key_size + self.value_size), self.rank),
            "attention_out": matrix_shape(config, heads * self.value_size, hidden),
        }
        if self.query_rank is not None:
            shapes |= {
                "query_down": matrix_shape(config, inputs, self.query_rank),
                "query_down_norm": (self.query_rank,),
            }
        if self.has_bias:
            shapes |= {"latent_down_bias": (self.latent_size,), "attention_out_bias": (hidden,)}
        if self.has_bias and self.query_rank is not None:
            shapes["query_down_bias"] = (self.query_rank,)
        return shapes

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation | None, memory: Latents
    ) -> tuple[Array, Any]:
        """Return the residual stream after the attention [B, T, h], and the layer's cache afterwards."""
        x = call.x if call.norm is None else rms_norm(call.x, call.norm)
        query = x
        if self.query_rank is not None:
            query = rms_norm(product(config, params, "query_down", x), (params["query_down_norm"], NORM_EPS))
        query = product(config, params, "query_up", query).reshape(*x.shape[:2], config.num_heads, self.query_size)
        if call.query_factor is not None:
            query = times(query, call.query_factor[..., None, None])
        query, turned = jnp.split(query, [self.key_size], axis=-1)
        latent, key = jnp.split(product(config, params, "latent_down", x), [self.rank], axis=-1)
        latent = rms_norm(latent, (params["latent_norm"], NORM_EPS))
        turned, key = (rotate(self._in_halves(one), turns) for one in (turned, key[:, :, None]))

        up = params["latent_up"].reshape(config.num_heads, -1, self.rank)
        to_key, to_value = jnp.split(up, [self.key_size], axis=1)
        query = jnp.concatenate([query, turned], axis=-1)
        latent = jnp.concatenate([latent, key[:, :, 0]], axis=-1)
        heads = HeadMatrices(to_key, to_value, self.rope_size)
        value, kept = memory.attend_to_latents(query, latent, heads, self.scale)
        return join(config, params, "attention_out", value.reshape(*x.shape[:2], -1), call), kept

    def _in_halves(self, heads: Array) -> Array:
        """Return queries or keys [B, T, H, D] with the numbers that turn together D / 2 apart."""
        if not self.is_interleaved:
            return heads
        return jnp.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)


@dataclass(frozen=True)
class InitLatents:
    """`Model.init_cache` for a decoder that attends to latents: for each layer that does so, [B, S, D] of zeros.

    Given the number of pages and their size, it makes a pool.
    """

    config: "DecoderConfig"
    dtype: str

    def __call__(self, batch_size: int, max_length: int) -> list[dict[str, Array]]:
        mixers = [layer.mixer for layer in self.config.each_layer]
        sizes = [one.latent_size if isinstance(one, LatentAttention) else None for one in mixers]
        return [
            {} if size is None else {"latent": jnp.zeros((batch_size, max_length, size), self.dtype)} for size in sizes
        ]


def latent_mixer(layers: Sequence[Any]) -> LatentAttention | None:
    """Return the attention on latents of layers, which all have it or none, but for recurrent ones.

    Raises:
        ValueError: some layers have it, others do not.
    """
    own = [layer.mixer for layer in layers if isinstance(layer.mixer, LatentAttention)]
    number = sum(not isinstance(layer.mixer, RowMixer) for layer in layers)
    if own and len(own) < number:
        raise ValueError(f"layers must all attend to latents, or none, got {len(own)} of {number} that do")
    return own[0] if own else None
