"""The Llama decoder in Flax NNX: RMSNorm, rotary positions, grouped-query attention and a gated MLP.

Families that vary it set options of `DecoderConfig`; a network with another structure has a file of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import network
from specjax.models.attention import attend, attend_to_cache, attention_mask, num_slots
from specjax.models.linear import Norm, linear, rms_norm
from specjax.models.rope import RopeScaling, Rotation, rotate, rotation
from specjax.types import Array, Model, ModelInput, ModelOutput, PyTree

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`, or `head_size` is odd.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    max_length: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] | None = None  # window of each layer: positions that a token sees, with its own
    qkv_bias: bool = False  # whether the query, key and value projections have biases
    attention_out_bias: bool = False  # whether the output projection of attention has a bias
    mlp_bias: bool = False  # whether the gate, up and down projections have biases
    head_norms: bool = False  # whether each query and key head passes through an RMSNorm
    post_norms: bool = False  # whether the outputs of attention and MLP pass through an RMSNorm
    norm_offset: float = 0.0  # number added to the scale of every norm
    activation: str = "silu"  # activation of the gate, one of ACTIVATIONS
    scale_embedding: bool = False  # whether embeddings are multiplied by sqrt(hidden_size)
    attention_scale: float | None = None  # factor on the attention scores; None is 1 / sqrt(head_size)
    attention_softcap: float | None = None  # cap c that turns an attention score s into c tanh(s / c)
    logit_softcap: float | None = None  # cap on the logits, likewise
    transposed: bool = False  # whether matrices are [out, in]: faster on GPUs for one token, slower on CPUs for a few
    axis_name: str | None = None  # mesh axis whose devices share the decoder; sizes are then those of one device's part
    num_padding: int = 0  # ids of the vocabulary that are padding, after the others on the last devices

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size must be even (rotary positions turn pairs), got {self.head_size}")


class Layer(nnx.Module):
    """Attention and gated MLP, each with a norm before it and a residual connection.

    Query, key and value projections are one matrix, and so are the gate and up projections.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        hidden, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size
        init = partial(nnx.initializers.normal(0.02), rngs.params())
        small = partial(nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5), rngs.params())

        def matrix(init: Callable[[tuple[int, int]], Array], inputs: int, outputs: int) -> nnx.Param:
            return nnx.Param(init((outputs, inputs) if config.transposed else (inputs, outputs)))

        def norm(size: int) -> nnx.Param:
            return nnx.Param(jnp.full((size,), 1 - config.norm_offset, jnp.float32))

        self.attention_norm = norm(hidden)
        self.qkv = matrix(init, hidden, (heads + 2 * kv_heads) * size)
        self.attention_out = matrix(small, heads * size, hidden)
        self.mlp_norm = norm(hidden)
        self.gate_up = matrix(init, hidden, 2 * config.mlp_size)
        self.mlp_out = matrix(small, config.mlp_size, hidden)
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(((heads + 2 * kv_heads) * size,)))
        if config.attention_out_bias:
            self.attention_out_bias = nnx.Param(jnp.zeros((hidden,)))
        if config.mlp_bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((2 * config.mlp_size,)))
            self.mlp_out_bias = nnx.Param(jnp.zeros((hidden,)))
        if config.head_norms:
            self.query_norm, self.key_norm = norm(size), norm(size)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(hidden), norm(hidden)

    @partial(jax.jit, static_argnames="window")  # under jit, layers with equal configs and shapes are traced once
    def __call__(
        self,
        x: Array,
        inputs: ModelInput,
        rotation: Rotation,
        mask: Array | None,
        window: int | None,
        cache: dict | None,
    ) -> tuple[Array, dict | None]:
        """Run the layer on hidden states x [B, T, D]; return them with the layer's cache."""
        attended, cache = self._attend(x, inputs, rotation, mask, window, cache)
        x = self._add(x, attended, "attention")
        return self._add(x, self._gate(x), "mlp"), cache

    def _gate(self, x: Array) -> Array:
        """Return activation(gate projection of x) * (up projection of x)."""
        activation, product = ACTIVATIONS[self.config.activation], partial(self._product, x, self.gate_up)
        norm, has_bias = self._norm("mlp_norm"), self.config.mlp_bias
        if not has_bias and self.config.activation != "gelu":
            return product(norm=norm, activation=activation)
        # `linear` adds its residual after the activation, a bias comes before it. Its kernels have no error function.
        bias = self.gate_up_bias[...][None, None] if has_bias else None
        gate, up = jnp.split(product(norm=norm, residual=bias), 2, axis=-1)
        return activation(gate) * up

    def _product(self, x: Array, weight: nnx.Param, **options: Any) -> Array:
        return linear(x, weight[...], transposed=self.config.transposed, **options)

    def _norm(self, name: str) -> Norm:
        return norm_of(getattr(self, name)[...], self.config)

    def _add(self, x: Array, y: Array, name: str) -> Array:
        """Return the residual connection x + output projection of y, for `name` "attention" or "mlp"."""
        weight = getattr(self, f"{name}_out")
        bias = getattr(self, f"{name}_out_bias", None)
        bias = None if bias is None else bias[...][None, None]
        if self.config.post_norms:
            return x + rms_norm(self._sum_of_parts(y, weight, bias), self._norm(f"{name}_post_norm"))
        return self._sum_of_parts(y, weight, x if bias is None else x + bias)

    def _sum_of_parts(self, y: Array, weight: nnx.Param, residual: Array | None) -> Array:
        """Return the product of y and a weight, of which each device has some rows, with the residual added."""
        if self.config.axis_name is None:
            return self._product(y, weight, residual=residual)
        product = jax.lax.psum(self._product(y, weight), self.config.axis_name)
        return product if residual is None else residual + product

    def _attend(
        self,
        x: Array,
        inputs: ModelInput,
        rotation: Rotation,
        mask: Array | None,
        window: int | None,
        cache: dict | None,
    ) -> tuple[Array, dict | None]:
        """Return the concatenated outputs [B, T, heads * head size] of all heads, and the layer's cache."""
        config = self.config
        batch_size, num_tokens, _ = x.shape
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size

        bias = self.qkv_bias[...][None, None] if config.qkv_bias else None
        qkv = self._product(x, self.qkv, norm=self._norm("attention_norm"), residual=bias)
        qkv = qkv.reshape(batch_size, num_tokens, heads + 2 * kv_heads, size)
        query, key, value = jnp.split(qkv, (heads, heads + kv_heads), axis=2)
        if config.head_norms:
            query, key = rms_norm(query, self._norm("query_norm")), rms_norm(key, self._norm("key_norm"))
        scale, softcap = config.attention_scale, config.attention_softcap
        if cache is None:
            attended = attend(rotate(query, rotation), rotate(key, rotation), value, mask, scale, softcap)
        else:
            assert mask is not None, "with a cache no mask is left out"
            attended, cache = attend_to_cache(query, key, value, cache, inputs, mask, rotation, window, scale, softcap)
        return attended.reshape(batch_size, num_tokens, heads * size), cache


def norm_of(scale: Array, config: DecoderConfig) -> Norm:
    """Return the scale [D] of a norm with its offset added, and epsilon, as `rms_norm` takes them."""
    if config.norm_offset:
        scale = scale.astype(jnp.float32) + config.norm_offset
    return scale, config.norm_eps


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. It computes in the dtype of its parameters; logits are float32."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size))
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.full((config.hidden_size,), 1 - config.norm_offset, jnp.float32))
        if not config.tie_embeddings:
            self.head = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size)))

    def __call__(
        self, inputs: ModelInput, cache: list | None = None, feature_layers: tuple[int, ...] = ()
    ) -> tuple[ModelOutput, list | None]:
        """Run the tokens of `inputs`.

        Args:
            inputs: tokens and positions [B, T]. Without a cache they are whole sequences from position 0, attended
                causally or as `inputs.mask` says.
            cache: keys and values of each layer; None computes without a cache.
            feature_layers: layers of `Features.taps`, static.

        Returns:
            Logits [B, T, V] float32 with `Features`, and the new cache.
        """
        config = self.config
        # By default a GPU multiplies float32 in TF32, and logits then depend visibly on the number of tokens in a call.
        precision = "highest" if self.embedding.dtype == jnp.float32 else None
        with jax.default_matmul_precision(precision):
            x = network.embed(self.embedding[...], inputs.tokens, config.axis_name)
            if config.scale_embedding:
                x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
            size = inputs.tokens.shape[1] if cache is None else num_slots(cache[0], inputs)
            windows = [
                window if window is not None and window < size else None
                for window in config.windows or (None,) * config.num_layers
            ]
            is_causal = cache is None and inputs.mask is None
            masks = {  # a mask of None is causal
                window: None if is_causal and window is None else attention_mask(inputs, size, window)
                for window in dict.fromkeys(windows)
            }
            new_cache, taps = [], network.Taps(feature_layers)
            taps.collect(0, x)
            head = (self.embedding if config.tie_embeddings else self.head)[...]
            turns = rotation(inputs.positions, config.head_size, config.rope_theta, config.rope_scaling)
            for i, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
                layer_cache = None if cache is None else cache[i]
                x, layer_cache = layer(x, inputs, turns, masks[window], window, layer_cache)
                new_cache.append(layer_cache)
                taps.collect(i + 1, x)
            norm = norm_of(self.norm[...], config)
            features = taps.beside(rms_norm(x, norm))
            logits = linear(x, head, transposed=True, norm=norm, dtype=jnp.float32)
            if config.logit_softcap is not None:
                logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
            logits = network.without_padding(logits, config.num_padding, config.axis_name)
        return ModelOutput(logits, features), None if cache is None else new_cache


def init_params(config: DecoderConfig, seed: int) -> PyTree:
    """Return random float32 parameters, a nested dict with the names and shapes of `param_shapes`."""
    return network.init_params(Decoder, config, seed)


def param_shapes(config: DecoderConfig) -> PyTree:
    """Return the names, shapes and dtypes of the parameters: a nested dict of `jax.ShapeDtypeStruct`."""
    return network.param_shapes(Decoder, config)


def decoder_model(config: DecoderConfig, params: PyTree, feature_layers: Sequence[int] = ()) -> Model:
    """Return the `Model` of a decoder with these parameters; its cache has their dtype.

    Args:
        config: sizes and options.
        params: the parameters, as `init_params` names them.
        feature_layers: as `models.with_feature_layers` takes them.
    """
    return network.network_model(Decoder, config, params, feature_layers)
