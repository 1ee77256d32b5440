"""Decoder layers with short convolutions over the tokens of a block, around the attention and the MLP, of DFlash2.

A convolution adds to each token some of the tokens before it in the block. Its weights are a table, plus what a matrix
makes of the token: one number for each group of channels. One matrix gives the weights for the input of a sublayer and
for its output, both from the input.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp

from specjax.models.linear import linear, rms_norm
from specjax.proposers import trunk
from specjax.types import Array

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig


def layer_shapes(config: "DecoderConfig", taps: int, group: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that the convolutions of a layer add.

    Args:
        config: sizes and options of the layer.
        taps: number of tokens that a convolution reads, the token itself among them.
        group: number of channels that share what depends on the token.
    """
    hidden = config.hidden_size
    outputs = 2 * taps * (hidden // group)
    tables = {f"{name}_conv": (2, taps, hidden) for name in ("attention", "mlp")}
    return tables | {
        f"{name}_conv_kernel": trunk.matrix_shape(config, hidden, outputs) for name in ("attention", "mlp")
    }


def run_layer(
    config: "DecoderConfig", params: trunk.Params, x: Array, call: trunk.Call, cache: dict
) -> tuple[Array, dict | None]:
    """Run a layer on one block of each row.

    Args:
        config: sizes and options of the layer.
        params: as `trunk.layer_shapes` and `layer_shapes` name them.
        x: [B, T, h], the residual stream of a block, from its first token on.
        call: what `trunk.call_of` returned.
        cache: keys and values of the layer.

    Returns:
        The residual stream after the layer [B, T, h], and the cache.
    """
    normed = rms_norm(x, (params["attention_norm"], config.norm_eps))
    read, finish = _around(config, params, "attention", normed)
    attended, new_cache = trunk.attention(config, params, read, None, call, cache)
    x = x + finish(trunk.product(config, params, "attention_out", attended))
    normed = rms_norm(x, (params["mlp_norm"], config.norm_eps))
    read, finish = _around(config, params, "mlp", normed)
    gated = trunk.gated_mlp(config, params, read, None)
    return x + finish(trunk.product(config, params, "mlp_out", gated)), new_cache


def _around(
    config: "DecoderConfig", params: trunk.Params, name: str, x: Array
) -> tuple[Array, Callable[[Array], Array]]:
    """Return the input of a sublayer after its convolution, and the convolution of the sublayer's output."""
    tables = params[f"{name}_conv"]
    kernel = linear(x, params[f"{name}_conv_kernel"], transposed=config.transposed)
    kernel = kernel.reshape(*x.shape[:2], 2, tables.shape[1], -1)
    kernel = jnp.repeat(kernel, tables.shape[2] // kernel.shape[-1], axis=-1)  # [B, T, 2, taps, h]
    before, after = (tables[side][None, None] + kernel[:, :, side] for side in (0, 1))
    return _convolve(x, before), partial(_convolve, weights=after)


def _convolve(x: Array, weights: Array) -> Array:
    """Return the sum over taps i of weights [B, T, taps, h] times the token i places before, 0 before the block."""
    taps, length = weights.shape[2], x.shape[1]
    shifted = [jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, :length] for i in range(taps)]
    return jnp.sum(weights * jnp.stack(shifted, axis=2), axis=2)
