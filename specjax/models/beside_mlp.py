"""An MLP and a mixture of experts side by side: an `ffn` of the one layer, as Gemma 4 has it."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.models.experts import Experts
from specjax.models.layer import GatedMLP, Params, Shapes, Sublayer, norm_of
from specjax.models.linear import AnyNorm, rms_norm, without_centred
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class BesideMLP:
    """The sum of an MLP and a mixture, both of the residual stream, each with a norm before and a norm after it."""

    mlp: GatedMLP
    experts: Experts

    def shapes(self, config: "DecoderConfig") -> Shapes:
        """Return the shapes of the parameters by name; the norm before the MLP is the layer's."""
        norms = dict.fromkeys(("mlp_sum_norm", "experts_norm", "experts_sum_norm"), (config.hidden_size,))
        return self.mlp.shapes(config) | self.experts.shapes(config) | norms

    def __call__(self, config: "DecoderConfig", params: Params, call: Sublayer) -> Array:
        """Return the residual stream after both [B, T, h]."""

        def norm(name: str) -> AnyNorm:
            return norm_of(params[name], config)

        nothing = jnp.zeros_like(call.x)
        y = self.mlp(config, params, Sublayer(call.x, call.norm, nothing, partial(rms_norm, norm=norm("mlp_sum_norm"))))
        finish = partial(rms_norm, norm=norm("experts_sum_norm"))
        x, of_experts = without_centred(call.x, norm("experts_norm"))
        y = self.experts(config, params, Sublayer(x, of_experts, y, finish))
        return call.residual + (y if call.finish is None else call.finish(y))
