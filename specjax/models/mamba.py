"""Mamba-2, the recurrent layers of Granite 4 H, Nemotron-H and Falcon-H1: a mixer of the one layer.

Token t changes the state S to exp(g) S + B (dt x)^T, where g = -exp(a) dt, and its output is S^T C + D x. So B is the
key of `recurrent.Recurrent`, C the query and x the value. Source: Dao and Gu, https://arxiv.org/abs/2405.21060.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.layer import Params, Shapes, Sublayer, join, matrix_shape, product, times
from specjax.models.recurrent import Recurrent, RowMemory, decay_factors
from specjax.models.rope import Rotation
from specjax.parallel.links import sum_over
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """A layer of Mamba-2; its groups are the key heads, its heads the value heads, and its state size the key size."""

    has_bias: bool = False  # whether the first projection has a bias
    has_out_bias: bool = False  # whether the last projection has one
    has_conv_bias: bool = True  # whether the convolution has one
    has_norm: bool = True  # whether the heads of each group pass through a norm
    is_gated_first: bool = True  # whether the gate multiplies the heads before that norm, and not after it
    factors: tuple[float, ...] | None = None  # on the gate, on x, B and C, and on dt before its bias; None for none
    num_sharing: int = 1  # devices that share a group, each with some of its heads

    @property
    def width(self) -> int:
        """Numbers of a token in all heads."""
        return self.num_value_heads * self.value_size

    def shapes(self, config: "DecoderConfig", inputs: int) -> Shapes:
        """Return the shapes of the parameters by name."""
        heads, outputs = self.num_value_heads, self.width + self.channels + self.num_value_heads
        shapes: Shapes = {
            "mamba_in": matrix_shape(config, inputs, outputs),
            "mamba_conv": (self.channels, 1, self.conv_size),
            "mamba_decay": (heads,),
            "mamba_step_bias": (heads,),
            "mamba_skip": (heads,),
            "mamba_out": matrix_shape(config, self.width, config.hidden_size),
        }
        if self.has_norm:
            shapes["mamba_scale"] = (self.width,)
        if self.has_bias:
            shapes["mamba_in_bias"] = (outputs,)
        if self.has_out_bias:
            shapes["mamba_out_bias"] = (config.hidden_size,)
        return shapes | ({"mamba_conv_bias": (self.channels,)} if self.has_conv_bias else {})

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation | None, memory: RowMemory
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the residual stream after the mixer [R, T, h], and the layer's rows afterwards."""
        mixed = product(config, params, "mamba_in", call.x, norm=call.norm)
        if self.factors is not None:
            keys = self.num_key_heads * self.key_size
            sizes = self.width, self.width, keys, keys, self.num_value_heads
            mixed = times(mixed, jnp.asarray(np.repeat(np.array(self.factors, np.float32), sizes))[None, None])
        gate, inputs, raw = jnp.split(mixed, [self.width, self.width + self.channels], axis=-1)
        decay, bias, skip = (
            params[name].astype(jnp.float32)[None, None] for name in ("mamba_decay", "mamba_step_bias", "mamba_skip")
        )
        step = jax.nn.softplus(raw.astype(jnp.float32) + bias)
        rates = step, jnp.broadcast_to(skip, step.shape), -jnp.exp(decay) * step
        convolution = params["mamba_conv"], params.get("mamba_conv_bias")
        run = self.step_by_xla if memory.is_step else self.prompt
        output, kept = run(convolution, memory, inputs, rates)
        y, factors = output.reshape(gate.shape), jax.nn.silu(gate.astype(jnp.float32))
        if self.is_gated_first:
            y = self._normed(config, params, y * factors)
        else:
            y = self._normed(config, params, y) * factors
        return join(config, params, "mamba_out", y.astype(call.residual.dtype), call), kept

    def _normed(self, config: "DecoderConfig", params: Params, y: Array) -> Array:
        """Return the heads [R, T, H D] after the norm of each group, if they have one."""
        if not self.has_norm:
            return y
        groups = y.reshape(*y.shape[:2], self.num_key_heads, -1)
        groups *= jax.lax.rsqrt(self._mean_squares(config, params, groups) + config.norm_eps)
        return groups.reshape(y.shape) * params["mamba_scale"].astype(jnp.float32)[None, None]

    def _mean_squares(self, config: "DecoderConfig", params: Params, groups: Array) -> Array:
        """Return the mean squares [R, T, groups, 1] of whole groups, given this device's numbers [R, T, groups, n].

        Where devices share the groups, one sum over all devices has a place for each group.
        """
        own = jnp.mean(groups * groups, axis=-1, keepdims=True)
        if self.num_sharing == 1:
            return own
        assert config.axis_name is not None, "several devices share the layer"
        number = jax.lax.axis_size(config.axis_name) // self.num_sharing
        group = jax.lax.axis_index(config.axis_name) // self.num_sharing
        is_own = (jnp.arange(number, dtype=jnp.int32) == group)[None, None, :, None]
        total = sum_over(jnp.where(is_own, own, 0), config.axis_name, params.get("links"))
        return jnp.sum(jnp.where(is_own, total, 0), axis=2, keepdims=True) / self.num_sharing

    def heads_of(self, mixed: Array) -> tuple[Array, Array, Array]:
        """Return C, B and x, which lie in the opposite order."""
        value, *both = jnp.split(mixed, [self.width, self.width + self.num_key_heads * self.key_size], axis=-1)
        key, query = (x.reshape(*x.shape[:2], self.num_key_heads, self.key_size) for x in both)
        return query, key, value.reshape(*value.shape[:2], self.num_value_heads, self.value_size)

    def output_and_changes(self, state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return the outputs of a chunk, and dt x of its tokens; the rates are dt, D and g."""
        query, key, value, step, skip, g = parts
        between, grown = decay_factors(g)
        changes = value * step[..., None]
        seen = (query * grown) @ state + (query @ key.swapaxes(-1, -2) * between) @ changes
        return seen + value * skip[..., None], changes
