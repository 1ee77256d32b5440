"""A decoder of the Llama family in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.decode_attention import decode_attention, is_supported
from specjax.types import Array, Model, ModelInput, ModelOutput, PyTree


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. `num_heads` must be a multiple of `num_kv_heads`; `head_size` must be even."""

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

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size must be even (rotary positions turn pairs), got {self.head_size}")


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Scale x to unit root mean square over its last axis, in float32, then by `scale`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Turn the halves of each head of x [B, T, H, D] by the angles of its positions [B, T] (RoPE)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]  # [B, T, 1, D / 2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention_mask(inputs: ModelInput, num_slots: int) -> Array:
    """Which cache slots each query sees [B, 1, T, S]: those before the call, and in it those of its mask."""
    batch_size, num_tokens = inputs.tokens.shape
    start = inputs.positions[:, :1, None]  # [B, 1, 1]
    offset = jnp.arange(num_slots)[None, None] - start  # [B, 1, S]: the slot's index inside the call
    query = jnp.arange(num_tokens)[None, :, None]
    if inputs.mask is None:
        return (offset <= query)[:, None]
    inside = jnp.take_along_axis(
        inputs.mask, jnp.broadcast_to(jnp.clip(offset, 0, num_tokens - 1), (batch_size, num_tokens, num_slots)), axis=2
    )
    return ((offset < 0) | ((offset < num_tokens) & inside))[:, None]


def attend_and_update(
    query: Array, key: Array, value: Array, cache: dict, inputs: ModelInput, mask: Array
) -> tuple[Array, dict]:
    """Write the keys and values [B, T, H, D] of a call to its slots, none past the end, and attend to the cache."""

    def kernel(query, key, value, key_cache, value_cache, start, mask):
        return decode_attention(query, key, value, key_cache, value_cache, start)

    def xla(query, key, value, key_cache, value_cache, start, mask):
        row = jnp.arange(query.shape[0])[:, None]
        slot = start[:, None] + jnp.arange(query.shape[1])[None]
        key_cache = key_cache.at[row, slot].set(key.astype(key_cache.dtype), mode="drop")
        value_cache = value_cache.at[row, slot].set(value.astype(value_cache.dtype), mode="drop")
        return jax.nn.dot_product_attention(query, key_cache, value_cache, mask=mask), key_cache, value_cache

    operands = query, key, value, cache["key"], cache["value"], inputs.positions[:, 0], mask
    if inputs.mask is None and is_supported(query, cache["key"]):
        attended, key, value = jax.lax.platform_dependent(*operands, cuda=kernel, default=xla)
    else:
        attended, key, value = xla(*operands)
    return attended, {"key": key, "value": value}


class Layer(nnx.Module):
    """Attention and SwiGLU, each behind a norm and added to the stream. Projections of one input are one matrix."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        hidden, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size
        init = partial(nnx.initializers.normal(0.02), rngs.params())
        small = partial(nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5), rngs.params())
        self.attention_norm = nnx.Param(jnp.ones((hidden,)))
        self.qkv = nnx.Param(init((hidden, (heads + 2 * kv_heads) * size)))
        self.attention_out = nnx.Param(small((heads * size, hidden)))
        self.mlp_norm = nnx.Param(jnp.ones((hidden,)))
        self.gate_up = nnx.Param(init((hidden, 2 * config.mlp_size)))
        self.mlp_out = nnx.Param(small((config.mlp_size, hidden)))

    def __call__(self, x: Array, inputs: ModelInput, mask: Array | None, cache: dict | None):
        config = self.config
        batch_size, num_tokens, _ = x.shape
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size

        qkv = rms_norm(x, self.attention_norm[...], config.norm_eps) @ self.qkv[...]
        qkv = qkv.reshape(batch_size, num_tokens, heads + 2 * kv_heads, size)
        query, key, value = jnp.split(qkv, (heads, heads + kv_heads), axis=2)
        query = rotate(query, inputs.positions, config.rope_theta)
        key = rotate(key, inputs.positions, config.rope_theta)
        if cache is None:
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        else:
            attended, cache = attend_and_update(query, key, value, cache, inputs, mask)
        x = x + attended.reshape(batch_size, num_tokens, heads * size) @ self.attention_out[...]

        gate, up = jnp.split(rms_norm(x, self.mlp_norm[...], config.norm_eps) @ self.gate_up[...], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ self.mlp_out[...], cache


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Computes in the dtype of its parameters; logits are float32."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size))
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones((config.hidden_size,)))
        if not config.tie_embeddings:
            self.head = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size)))

    def __call__(self, inputs: ModelInput, cache: list | None = None) -> tuple[ModelOutput, list | None]:
        """Run the tokens of `inputs`. Without a cache they are whole sequences from position 0, attended causally."""
        if cache is not None and inputs.tokens.shape == (1, 1) and jax.default_backend() == "gpu":
            # XLA multiplies two rows by a matrix faster than one. The second token is never seen.
            pair = ModelInput(jnp.pad(inputs.tokens, ((0, 0), (0, 1))), inputs.positions + jnp.arange(2)[None])
            output, cache = self(pair, cache)
            return jax.tree.map(lambda x: x[:, :1], output), cache
        # float32 means float32: without this a GPU multiplies in TF32, and one token and K+1 tokens differ by 1e-3.
        precision = "highest" if self.embedding.dtype == jnp.float32 else None
        with jax.default_matmul_precision(precision):
            x = self.embedding[...][inputs.tokens]
            mask = None if cache is None else attention_mask(inputs, cache[0]["key"].shape[1])
            new_cache = None if cache is None else []
            for i, layer in enumerate(self.layers):
                x, layer_cache = layer(x, inputs, mask, None if cache is None else cache[i])
                if cache is not None:
                    new_cache.append(layer_cache)
            features = rms_norm(x, self.norm[...], self.config.norm_eps)
            head = self.embedding if self.config.tie_embeddings else self.head
            logits = jnp.einsum("btd,vd->btv", features, head[...], preferred_element_type=jnp.float32)
        return ModelOutput(logits, features), new_cache


@cache
def _abstract(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))


def init_params(config: DecoderConfig, seed: int) -> PyTree:
    """Random float32 parameters: a nested dict with the names of `param_shapes`."""
    return nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(seed)))[1])


def param_shapes(config: DecoderConfig) -> PyTree:
    """A nested dict of `jax.ShapeDtypeStruct`: the parameters that a decoder of this config takes."""
    return nnx.to_pure_dict(_abstract(config)[1])


@dataclass(frozen=True)
class Apply:
    """`Model.apply` of a decoder; two of equal configs are equal, so a model built again does not retrace."""

    config: DecoderConfig

    def __call__(self, params: PyTree, inputs: ModelInput, cache: list | None) -> tuple[ModelOutput, list | None]:
        graph, state = _abstract(self.config)
        state = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(inputs, cache)


@dataclass(frozen=True)
class InitCache:
    """`Model.init_cache` of a decoder: per layer, keys and values [B, S, kv heads, head size] of zeros."""

    config: DecoderConfig
    dtype: str

    def __call__(self, batch_size: int, max_length: int) -> list[dict[str, Array]]:
        shape = (batch_size, max_length, self.config.num_kv_heads, self.config.head_size)
        return [
            {"key": jnp.zeros(shape, self.dtype), "value": jnp.zeros(shape, self.dtype)}
            for _ in range(self.config.num_layers)
        ]


def decoder_model(config: DecoderConfig, params: PyTree) -> Model:
    """The `Model` of a decoder with these parameters; its cache has their dtype."""
    return Model(
        params=params,
        apply=Apply(config),
        init_cache=InitCache(config, str(params["embedding"].dtype)),
        vocab_size=config.vocab_size,
        max_length=config.max_length,
    )
