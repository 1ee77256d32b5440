"""The gated short convolutions of LFM2: a mixer of the one layer, which keeps its last inputs alone.

A projection gives B, C and x of a token. The convolution reads B x of the token and of a few before it, and C
multiplies its result. Source: https://arxiv.org/abs/2511.23404.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.models.layer import Params, Shapes, Sublayer, join, matrix_shape, product
from specjax.models.recurrent import RowMemory, RowMixer
from specjax.models.rope import Rotation
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class ShortConv(RowMixer):
    """A convolution over a few tokens of each channel, between two gates."""

    num_channels: int
    conv_size: int = 3
    has_bias: bool = False  # whether the projections and the convolution have biases

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return self.num_channels

    def shapes(self, config: "DecoderConfig", inputs: int) -> Shapes:
        """Return the shapes of the parameters by name."""
        size = self.num_channels
        shapes: Shapes = {
            "conv_in": matrix_shape(config, inputs, 3 * size),
            "conv_taps": (size, 1, self.conv_size),
            "conv_out": matrix_shape(config, size, config.hidden_size),
        }
        if self.has_bias:
            shapes |= {"conv_in_bias": (3 * size,), "conv_taps_bias": (size,), "conv_out_bias": (config.hidden_size,)}
        return shapes

    def __call__(
        self, config: "DecoderConfig", params: Params, call: Sublayer, turns: Rotation | None, memory: RowMemory
    ) -> tuple[Array, dict[str, Array] | None]:
        """Return the residual stream after the mixer [R, T, h], and the layer's rows afterwards."""
        before, after, x = jnp.split(product(config, params, "conv_in", call.x, norm=call.norm), 3, axis=-1)
        inputs, convolution = before * x, (params["conv_taps"], params.get("conv_taps_bias"))
        if memory.held is None:
            window = jnp.zeros((len(inputs), self.conv_size - 1, self.channels), inputs.dtype)
        else:
            window = self.window_before(memory)
        gated = after * self.convolved(convolution, window, inputs).astype(after.dtype)
        kept = None if memory.held is None else {"inputs": self.inputs_after(memory, window, inputs)}
        return join(config, params, "conv_out", gated, call), kept
