"""Decoder layers with short convolutions over the tokens of a block, around the attention and the MLP, of DFlash2.

A convolution adds to each token some of the tokens before it in the block. Its weights are a table, plus the product of
a matrix with the token: one number for each group of channels. One matrix gives the weights for the input of a sublayer
and for its output, both from the input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.models.layer import Params, Shapes, matrix_shape
from specjax.models.linear import linear
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


@dataclass(frozen=True)
class Convolutions:
    """The convolutions of a layer, an `Around` of `models/layer.py`. The tokens of a call are one block of each row."""

    taps: int  # number of tokens that a convolution reads, the token itself among them
    group: int  # number of channels that share the weights by the token

    def shapes(self, config: "DecoderConfig") -> Shapes:
        hidden = config.hidden_size
        kernel = matrix_shape(config, hidden, 2 * self.taps * (hidden // self.group))
        of_each = {"conv": (2, self.taps, hidden), "conv_kernel": kernel}
        return {f"{name}_{part}": shape for name in ("attention", "mlp") for part, shape in of_each.items()}

    def __call__(
        self, config: "DecoderConfig", params: Params, name: str, x: Array
    ) -> tuple[Array, Callable[[Array], Array]]:
        """Return the input of a sublayer after its convolution, and the convolution of the sublayer's output."""
        tables = params[f"{name}_conv"]
        kernel = linear(x, params[f"{name}_conv_kernel"], transposed=config.transposed)
        kernel = kernel.reshape(*x.shape[:2], 2, self.taps, -1)
        kernel = jnp.repeat(kernel, self.group, axis=-1)  # [B, T, 2, taps, h]
        before, after = (tables[side][None, None] + kernel[:, :, side] for side in (0, 1))
        return _convolve(x, before), partial(_convolve, weights=after)


def _convolve(x: Array, weights: Array) -> Array:
    """Return the sum over taps i of weights [B, T, taps, h] times the token i places before, 0 before the block."""
    taps, length = weights.shape[2], x.shape[1]
    shifted = [jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, :length] for i in range(taps)]
    return jnp.sum(weights * jnp.stack(shifted, axis=2), axis=2)
