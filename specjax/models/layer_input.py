"""Numbers that each token gives to every layer, beside the residual stream: a third sublayer, as small Gemma 4 has."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.models.layer import ACTIVATIONS, Params, Shapes, matrix_shape, norm_of, product, times
from specjax.models.linear import lookup, rms_norm
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class LayerInput:
    """The sum of the stream and a norm of out(activation(gate(stream)) * numbers of the token for this layer)."""

    size: int  # numbers that a token gives to a layer
    activation: str  # of the gate, one of ACTIVATIONS

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters of a layer by name."""
        return {
            "input_gate": matrix_shape(config, config.hidden_size, self.size),
            "input_out": matrix_shape(config, self.size, config.hidden_size),
            "input_norm": (config.hidden_size,),
        }

    def shapes_of_all(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters that make the numbers of all layers, by name."""
        width = config.num_layers * self.size
        return {
            "input_embedding": (config.vocab_size, width),
            "input_projection": matrix_shape(config, config.hidden_size, width),
            "input_projection_norm": (self.size,),
        }

    def of_all(self, config: "DecoderConfig", params: Params, tokens: Array, x: Array) -> Array:
        """Return the numbers [B, T, layers, size] of tokens [B, T], given their embeddings x [B, T, h]."""
        shape = (*tokens.shape, config.num_layers, self.size)
        projected = times(product(config, params, "input_projection", x), config.hidden_size**-0.5).reshape(shape)
        projected = rms_norm(projected, norm_of(params["input_projection_norm"], config))
        own = lookup(params["input_embedding"], tokens).reshape(shape) * jnp.asarray(self.size**0.5, x.dtype)
        return (projected + own) * jnp.asarray(2**-0.5, x.dtype)

    def __call__(self, config: "DecoderConfig", params: Params, x: Array, given: Array) -> Array:
        """Return the residual stream after the sublayer [B, T, h], given the numbers of its layer [B, T, size]."""
        gate = ACTIVATIONS[self.activation](product(config, params, "input_gate", x))
        return x + rms_norm(product(config, params, "input_out", gate * given), norm_of(params["input_norm"], config))
