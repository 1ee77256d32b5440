"""Decoder layers on the target's features: what the drafters that read them share.

A drafter keeps in slot s of its cache what it makes of token s and the target's feature of token s-1. Slot 0 has no
feature, and no other token sees it. Positions are those of the slots: a rotation depends on distances alone, so it does
not matter where a reference begins to count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.models.attention import attend, attend_to_cache, attention_mask, num_slots
from specjax.models.linear import Norm, linear, rms_norm
from specjax.models.rope import Rotation, rotate, rotation
from specjax.types import Array, Features, ModelInput, PyTree

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

NUM_HIDDEN = 1  # slots without a feature
Params = Mapping[str, Any]


def in_full_precision(params: Params) -> Any:
    """Return a context in which products of float32 parameters are exact on a GPU, too, as those of the target are."""
    return jax.default_matmul_precision("highest" if params["embedding"].dtype == jnp.float32 else None)


@dataclass(frozen=True)
class Call:
    """What the layers of one call share."""

    inputs: ModelInput
    turns: Rotation
    mask: Array | None  # [B, 1, T, S] bool; None is causal
    window: int | None = None
    num_hidden: int = NUM_HIDDEN


def call_of(
    config: "DecoderConfig",
    inputs: ModelInput,
    cache: list | None,
    window: int | None = None,
    num_hidden: int = NUM_HIDDEN,
) -> Call:
    """Return what the layers share in a call with these inputs.

    Without a cache, tokens see those of the call alone: by `inputs.mask`, or causally. In training, records with a
    method `attend` may stand in the place of each layer's cache; they say what a token sees.

    Args:
        config: sizes and options of the layers.
        inputs: the tokens of the call.
        cache: the cache of the layers; None computes without one.
        window: number of positions that a token sees in the cache, its own included; None is all.
        num_hidden: number of slots, from the first on, that no other token sees.
    """
    turns = rotation(inputs.positions, config.head_size, config.rope_theta, config.rope_scaling)
    if cache is None or not isinstance(cache[0], dict):
        return Call(inputs, turns, None if inputs.mask is None else inputs.mask[:, None])
    size = num_slots(cache[0], inputs)
    window = None if window is None or window >= size else window
    return Call(inputs, turns, attention_mask(inputs, size, window, num_hidden), window, num_hidden)


def run_layers(
    config: "DecoderConfig",
    params: Mapping[int, Params],
    x: Array,
    call: Call,
    cache: list | None,
    residual: Array | None = None,
) -> tuple[Array, list | None]:
    """Run all layers, the first of which has no norm of its own before attention.

    Args:
        config: sizes and options of the layers.
        params: those of each layer, as `layer_shapes` names them, with `attention_norm` [h] but for the first.
        x: [B, T, ...], what the attention of the first layer reads.
        call: what `call_of` returned.
        cache: keys and values of each layer; None runs without a cache.
        residual: [B, T, h], the residual stream before the first layer; None is `x`.

    Returns:
        The residual stream after the last layer [B, T, h], and the cache.
    """
    new_cache, stream = [], x if residual is None else residual
    for i in range(config.num_layers):
        norm = (params[i]["attention_norm"], config.norm_eps) if i else None
        stream, one = run_layer(config, params[i], x, stream, call, None if cache is None else cache[i], norm)
        x = stream
        new_cache.append(one)
    return stream, None if cache is None else new_cache


def run_layer(
    config: "DecoderConfig",
    params: Params,
    x: Array,
    residual: Array,
    call: Call,
    cache: dict | None,
    norm: Norm | None,
) -> tuple[Array, dict | None]:
    """Run a decoder layer whose attention may read other numbers than the residual stream has.

    Args:
        config: sizes and options of the layer.
        params: as `layer_shapes` names them.
        x: [B, T, ...], what attention reads.
        residual: [B, T, h], what its output is added to.
        call: what `call_of` returned.
        cache: keys and values of the layer; None runs without a cache.
        norm: norm of `x`, None for none.

    Returns:
        The residual stream after the layer [B, T, h], and the cache.
    """
    attended, cache = attention(config, params, x, norm, call, cache)
    x = _add(config, params, residual, attended, "attention_out")
    gated = gated_mlp(config, params, x, (params["mlp_norm"], config.norm_eps))
    return _add(config, params, x, gated, "mlp_out"), cache


def gated_mlp(config: "DecoderConfig", params: Params, x: Array, norm: Norm | None) -> Array:
    """Return what the last matrix of the MLP reads: SiLU of one half of a product, times the other half."""
    gate = partial(product, config, params, "gate_up", x, norm=norm)
    if not config.mlp_bias:
        return gate(activation=jax.nn.silu)
    first, up = jnp.split(gate(), 2, axis=-1)
    return jax.nn.silu(first) * up


def attention(
    config: "DecoderConfig", params: Params, x: Array, norm: Norm | None, call: Call, cache: dict | None
) -> tuple[Array, dict | None]:
    """Return what all heads attend to, concatenated [B, T, heads * head size], and the cache."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    qkv = product(config, params, "qkv", x, norm=norm).reshape(*x.shape[:2], heads + 2 * kv_heads, size)
    query, key, value = jnp.split(qkv, (heads, heads + kv_heads), axis=2)
    if config.head_norms:
        query, key = (
            rms_norm(part, (params[name], config.norm_eps)) for part, name in ((query, "query_norm"), (key, "key_norm"))
        )
    if cache is None:
        attended = attend(rotate(query, call.turns), rotate(key, call.turns), value, call.mask)
    elif not isinstance(cache, dict):
        attended, cache = cache.attend(rotate(query, call.turns), rotate(key, call.turns), value)
    else:
        assert call.mask is not None, "with a cache there is a mask"
        options = {"window": call.window, "num_hidden": call.num_hidden}
        attended, cache = attend_to_cache(query, key, value, cache, call.inputs, call.mask, call.turns, **options)
    return attended.reshape(*x.shape[:2], heads * size), cache


def product(config: "DecoderConfig", params: Params, name: str, x: Array, **options: Any) -> Array:
    """Return the product of x with a matrix, plus its bias, if it has one."""
    bias = params.get(f"{name}_bias")
    if bias is not None:
        options["residual"] = bias[None, None]
    return linear(x, params[name], transposed=config.transposed, **options)


def _add(config: "DecoderConfig", params: Params, residual: Array, x: Array, name: str) -> Array:
    """Return the residual connection: x times a matrix, plus its bias, plus the residual."""
    bias = params.get(f"{name}_bias")
    residual = residual if bias is None else residual + bias[None, None]
    return linear(x, params[name], transposed=config.transposed, residual=residual)


def init_cache(config: "DecoderConfig", num_pages: int, page_size: int, dtype: DTypeLike) -> list:
    """Return a pool of zeros, or the dense cache of `num_pages` rows with `page_size` slots."""
    shape = num_pages, page_size, config.num_kv_heads, config.head_size
    return [{name: jnp.zeros(shape, dtype) for name in ("key", "value")} for _ in range(config.num_layers)]


def layer_shapes(config: "DecoderConfig", inputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a layer whose attention reads `inputs` numbers of a token."""
    hidden, mlp, size = config.hidden_size, config.mlp_size, config.head_size
    width = (config.num_heads + 2 * config.num_kv_heads) * size
    shapes = {
        "qkv": matrix_shape(config, inputs, width),
        "attention_out": matrix_shape(config, config.num_heads * size, hidden),
        "mlp_norm": (hidden,),
        "gate_up": matrix_shape(config, hidden, 2 * mlp),
        "mlp_out": matrix_shape(config, mlp, hidden),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = (width,)
    if config.attention_out_bias:
        shapes["attention_out_bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"gate_up_bias": (2 * mlp,), "mlp_out_bias": (hidden,)}
    if config.head_norms:
        shapes |= {"query_norm": (size,), "key_norm": (size,)}
    return shapes


def matrix_shape(config: "DecoderConfig", inputs: int, outputs: int) -> tuple[int, int]:
    """Return the shape of a matrix, which is [outputs, inputs] where the config says that matrices are transposed."""
    return (outputs, inputs) if config.transposed else (inputs, outputs)


def random_params(shapes: PyTree, key: Array, dtype: DTypeLike = jnp.float32) -> PyTree:
    """Return random parameters of these shapes: norms of ones, biases of zeros and normal matrices.

    Args:
        shapes: a nested dict of shapes, such as `Eagle3Head.shapes` returns.
        key: a typed key.
        dtype: of the parameters.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))

    def make(path: tuple, shape: tuple[int, ...], key: Array) -> Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name.endswith("norm"):
            return jnp.ones(shape, dtype)
        return jnp.zeros(shape, dtype) if len(shape) == 1 else 0.02 * jax.random.normal(key, shape, dtype)

    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([make(path, shape, k) for (path, shape), k in zip(leaves, keys, strict=True)])


def logits(params: Params, output: Array, norm: Norm | None = None) -> Array:
    """Return the logits [B, T, D] float32 of outputs [B, T, h], after a norm if there is one."""
    with in_full_precision(params):
        return linear(output, params["lm_head"], transposed=True, norm=norm, dtype=jnp.float32)


def hidden_of(features: Any, size: int) -> Array:
    """Return the target's final hidden states [B, T, H].

    Raises:
        ValueError: the target gives none of this size.
    """
    if not isinstance(features, Features):
        raise ValueError(f"the target must give its hidden states, ModelOutput.features, got {_kind(features)}")
    if features.hidden.shape[-1] != size:
        raise ValueError(f"features.hidden must be of H = {size} numbers a token, got {features.hidden.shape[-1]}")
    return features.hidden


def taps_of(features: Any, count: int, size: int) -> Array:
    """Return the target's residual stream at `count` layers, [B, T, count * H].

    Raises:
        ValueError: the target does not give it, or for another number of layers.
    """
    taps = features.taps if isinstance(features, Features) else None
    if taps is None:
        raise ValueError(
            f"the target must give its residual stream at {count} layers, features.taps, which "
            f"models.with_feature_layers asks for, got {'none' if isinstance(features, Features) else _kind(features)}"
        )
    if taps.shape[-1] != count * size:
        raise ValueError(
            f"features.taps must be of {count} layers with H = {size}, {count * size} numbers a token, "
            f"got {taps.shape[-1]}: ask models.with_feature_layers for the layers of this drafter"
        )
    return taps


def _kind(features: Any) -> str:
    return "None" if features is None else type(features).__name__
