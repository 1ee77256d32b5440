"""Kimi Delta Attention: gated delta nets in which each number of a key has its own decay, a mixer of the one layer.

XLA computes it. Source: https://arxiv.org/abs/2510.26692.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.models.delta_net import DeltaNet
from specjax.models.layer import Params, Shapes, Sublayer, join, matrix_shape, product
from specjax.models.linear import rms_norm
from specjax.models.recurrent import RowMemory, by_chunks
from specjax.models.rope import Rotation
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

CHUNK = 16  # tokens of a chunk, each pair of which has a factor for each number of a key


@dataclass(frozen=True)
class ChannelDeltaNet(DeltaNet):
    """A delta net whose decays, and whose gate, are each made by two matrices with `rank` numbers between them."""

    rank: int = 0

    decays_by_key: ClassVar[bool] = True

    def shapes(self, config: "DecoderConfig", inputs: int) -> Shapes:
        """Return the shapes of the parameters by name."""
        heads, width = self.num_value_heads, self.num_value_heads * self.value_size
        decays = heads * self.key_size
        return {
            "delta_qkv": matrix_shape(config, inputs, self.channels),
            "delta_beta": matrix_shape(config, inputs, heads),
            "delta_decay_down": matrix_shape(config, inputs, self.rank),
            "delta_decay_up": matrix_shape(config, self.rank, decays),
            "delta_gate_down": matrix_shape(config, inputs, self.rank),
            "delta_gate_up": matrix_shape(config, self.rank, width),
            "delta_conv": (self.channels, 1, self.conv_size),
            "delta_decay": (heads,),
            "delta_channel_bias": (decays,),
            "delta_scale": (self.value_size,),
            "delta_out": matrix_shape(config, width, config.hidden_size),
        }

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation | None, memory: RowMemory
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the residual stream after the mixer [R, T, h], and the layer's rows afterwards."""
        x, of = call.x if call.norm is None else rms_norm(call.x, call.norm), partial(product, config, params)
        beta = jax.nn.sigmoid(of("delta_beta", x).astype(jnp.float32))
        raw, gate = (
            of(f"delta_{name}_up", of(f"delta_{name}_down", x)).astype(jnp.float32) for name in ("decay", "gate")
        )
        decay, bias = (params[name].astype(jnp.float32) for name in ("delta_decay", "delta_channel_bias"))
        steps = jax.nn.softplus(raw + bias[None, None]).reshape(*x.shape[:2], -1, self.key_size)
        run = self.step_by_xla if memory.is_step else self.prompt
        rates = beta, -jnp.exp(decay)[None, None, :, None] * steps
        attended, kept = run((params["delta_conv"], None), memory, of("delta_qkv", x), rates)
        normed = rms_norm(attended, (params["delta_scale"], config.norm_eps))
        gated = normed.reshape(gate.shape) * jax.nn.sigmoid(gate)
        return join(config, params, "delta_out", gated.astype(call.residual.dtype), call), kept

    def run_chunks(self, state: Array, tokens: tuple[Array, ...], dtype: Any) -> tuple[Array, Array]:
        """Run tokens of prompts."""
        return by_chunks(self.output_and_changes, state, *tokens, chunk_size=CHUNK)
