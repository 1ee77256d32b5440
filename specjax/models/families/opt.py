"""OPT: a separate network with LayerNorm, learned positions, biases everywhere, and an MLP without a gate.

Its norms stand before attention and MLP, or after them in some sizes. GPT-2 has this network, too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.attention import KeyValues, cache_scales, memories
from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import ACTIVATIONS
from specjax.models.linear import linear
from specjax.models.network import Network, Taps, by_group, embed, network_model, without_padding
from specjax.models.tensors import Tensors
from specjax.types import Array, Model, ModelInput, ModelOutput, PyTree


@dataclass(frozen=True)
class OPTConfig:
    """Sizes and options of a decoder of OPT or GPT-2."""

    vocab_size: int
    embedding_size: int  # size of the embeddings; if it differs from hidden_size, projections convert between them
    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    mlp_size: int
    max_length: int
    norm_first: bool = True  # whether norms stand before attention and MLP, rather than after
    final_norm: bool = True  # whether a norm follows the last layer
    norm_eps: float = 1e-5
    activation: str = "relu"  # of the MLP, one of ACTIVATIONS
    position_offset: int = 2  # row of position 0 in the position embedding
    tie_embeddings: bool = True
    axis_name: str | None = None  # mesh axis whose devices share it, as in `DecoderConfig`
    num_padding: int = 0  # ids of the vocabulary that are padding, likewise

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


def _layer_shapes(config: OPTConfig) -> PyTree:
    """Return the shapes of the parameters of a layer."""
    hidden, heads, mlp = config.hidden_size, config.num_heads * config.head_size, config.mlp_size
    norm = {"scale": (hidden,), "bias": (hidden,)}
    matrices = {
        "qkv": (hidden, 3 * heads),
        "attention_out": (heads, hidden),
        "mlp_in": (hidden, mlp),
        "mlp_out": (mlp, hidden),
    }
    affine = {name: {"weight": shape, "bias": shape[1:]} for name, shape in matrices.items()}
    return {"attention_norm": norm, "mlp_norm": norm, **affine}


def _init(config: OPTConfig, seed: int) -> PyTree:
    """Return random parameters: normal matrices, norms that scale by 1, and biases of zeros."""
    hidden, size = config.hidden_size, config.embedding_size
    shapes: PyTree = {
        "embedding": (config.vocab_size, size),
        "position_embedding": (config.max_length + config.position_offset, hidden),
        "layers": {i: _layer_shapes(config) for i in range(config.num_layers)},
    }
    if config.final_norm:
        shapes["norm"] = {"scale": (hidden,), "bias": (hidden,)}
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, size)
    if size != hidden:
        shapes |= {"project_in": (size, hidden), "project_out": (hidden, size)}
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))

    def param(path: tuple, shape: tuple[int, ...], key: Array) -> Array:
        if len(shape) > 1:
            return 0.02 * jax.random.normal(key, shape)
        return jnp.ones(shape) if path[-1].key == "scale" else jnp.zeros(shape)

    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([param(path, shape, key) for (path, shape), key in zip(leaves, keys, strict=True)])


def _affine(params: PyTree, x: Array, axis_name: str | None = None) -> Array:
    """Return x [B, T, in] @ weight [in, out] + bias [out]. With `axis_name` each device has some of the inputs."""
    product = linear(x, params["weight"])
    if axis_name is not None:
        product = jax.lax.psum(product, axis_name)
    return product + params["bias"][None, None]


def _norm(config: OPTConfig, params: PyTree, x: Array) -> Array:
    """Normalise x [B, T, D] to zero mean and unit variance over its last axis in float32, then scale and shift it."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_eps)
    return (x32 * params["scale"][None, None] + params["bias"][None, None]).astype(x.dtype)


@partial(jax.jit, static_argnames="config")  # under jit, the layers are traced once
def _run_layer(config: OPTConfig, params: PyTree, x: Array, memory: KeyValues) -> tuple[Array, Any]:
    """Run a layer on hidden states x [B, T, D]; return them, and the layer's cache afterwards."""
    qkv = _affine(params["qkv"], _norm(config, params["attention_norm"], x) if config.norm_first else x)
    qkv = qkv.reshape(*x.shape[:2], 3 * config.num_heads, config.head_size)
    query, key, value = jnp.split(qkv, 3, axis=2)
    attended, kept = memory.attend(query, key, value, None, None, None)
    x = x + _affine(params["attention_out"], attended.reshape(*x.shape[:2], -1), config.axis_name)
    if not config.norm_first:
        x = _norm(config, params["attention_norm"], x)
    hidden = _affine(params["mlp_in"], _norm(config, params["mlp_norm"], x) if config.norm_first else x)
    x = x + _affine(params["mlp_out"], ACTIVATIONS[config.activation](hidden), config.axis_name)
    return x if config.norm_first else _norm(config, params["mlp_norm"], x), kept


def _apply(
    config: OPTConfig, params: PyTree, inputs: ModelInput, cache: list | None, feature_layers: tuple[int, ...]
) -> tuple[ModelOutput, list | None]:
    """Run the tokens of `inputs`, as the network of `models/decoder.py` does."""
    embedding = params["embedding"]
    # By default a GPU multiplies float32 in TF32, and logits then depend visibly on the number of tokens in a call.
    precision = "highest" if embedding.dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        x = embed(embedding, inputs.tokens, config.axis_name)
        if "project_in" in params:
            x = linear(x, params["project_in"])
        x = x + params["position_embedding"].at[inputs.positions + config.position_offset].get(mode="clip")
        scales = [cache_scales(params["layers"][i]) for i in range(config.num_layers)]
        new_cache, taps = [], Taps(feature_layers)
        taps.collect(0, x)
        for i, memory in enumerate(memories(inputs, cache, (None,) * config.num_layers, scales=scales)):
            x, kept = _run_layer(config, params["layers"][i], x, memory)
            new_cache.append(kept)
            taps.collect(i + 1, x)
        hidden = _norm(config, params["norm"], x) if config.final_norm else x
        projected = linear(hidden, params["project_out"]) if "project_out" in params else hidden

        def head(part: Array) -> Array:
            logits = linear(part, params.get("head", embedding), transposed=True, dtype=jnp.float32)
            return without_padding(logits, config.num_padding, config.axis_name)

        logits = by_group(inputs, projected, head)
    return ModelOutput(logits, taps.beside(hidden)), None if cache is None else new_cache


NETWORK = Network(_init, _apply)


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OPT checkpoint."""
    config.only("activation_function", "relu")
    for name in ("enable_bias", "layer_norm_elementwise_affine", "tie_word_embeddings"):
        config.only(name, True)
    hidden_size = config.size("hidden_size")
    norm_first = config.get("do_layer_norm_before", bool, True)
    opt_config = OPTConfig(
        vocab_size=config.size("vocab_size"),
        embedding_size=config.size("word_embed_proj_dim", hidden_size),
        hidden_size=hidden_size,
        num_layers=config.size("num_hidden_layers", most=llama.MAX_LAYERS),
        num_heads=config.size("num_attention_heads"),
        head_size=llama.part_of_head(config),
        mlp_size=config.size("ffn_dim"),
        max_length=config.size("max_position_embeddings"),
        norm_first=norm_first,
        final_norm=norm_first and not config.get("_remove_final_layer_norm", bool, False),
    )
    config.check_computation()
    return network_model(NETWORK, opt_config, _params(opt_config, tensors))


def norm_params(tensors: Tensors, name: str, size: int) -> dict[str, Array]:
    """Read the scale and the bias [size] of a norm."""
    return {"scale": tensors.vectors({f"{name}.weight": size}), "bias": tensors.vectors({f"{name}.bias": size})}


def _params(config: OPTConfig, tensors: Tensors) -> PyTree:
    """Read the parameters as `_init` names them."""
    hidden, mlp = config.hidden_size, config.mlp_size

    def affine(inputs: int, outputs: dict[str, int]) -> dict[str, Array]:
        return {
            "weight": tensors.matrices(inputs, {f"{name}.weight": size for name, size in outputs.items()}),
            "bias": tensors.vectors({f"{name}.bias": size for name, size in outputs.items()}),
        }

    def norm(name: str) -> dict[str, Array]:
        return norm_params(tensors, name, hidden)

    def layer(name: str) -> PyTree:
        return {
            "attention_norm": norm(f"{name}.self_attn_layer_norm"),
            "qkv": affine(hidden, {f"{name}.self_attn.{kind}_proj": hidden for kind in "qkv"}),
            "attention_out": affine(hidden, {f"{name}.self_attn.out_proj": hidden}),
            "mlp_norm": norm(f"{name}.final_layer_norm"),
            "mlp_in": affine(hidden, {f"{name}.fc1": mlp}),
            "mlp_out": affine(mlp, {f"{name}.fc2": hidden}),
        }

    decoder = "model.decoder"
    embedding = f"{decoder}.embed_tokens.weight", config.vocab_size, config.embedding_size
    params = {
        "embedding": tensors.table(*embedding),
        "position_embedding": tensors.table(
            f"{decoder}.embed_positions.weight", config.max_length + config.position_offset, hidden
        ),
        "layers": {i: layer(f"{decoder}.layers.{i}") for i in range(config.num_layers)},
    }
    if config.final_norm:
        params["norm"] = norm(f"{decoder}.final_layer_norm")
    if config.embedding_size != hidden:
        params["project_in"] = tensors.matrices(config.embedding_size, {f"{decoder}.project_in.weight": hidden})
        params["project_out"] = tensors.matrices(hidden, {f"{decoder}.project_out.weight": config.embedding_size})
    tensors.check_same("lm_head.weight", *embedding)
    tensors.check_all_read("*decoder.version")
    return params
