"""OPT: a network of its own with LayerNorm, learned positions, biases everywhere, and a ReLU MLP.

Its norms stand before attention and MLP, or after them in some sizes.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import attend, attend_to_cache, attention_mask, num_slots
from specjax.models.config_file import ConfigFile
from specjax.models.families.llama import MAX_LAYERS
from specjax.models.network import Taps, embed, network_model, without_padding
from specjax.models.tensors import Tensors
from specjax.types import Array, Model, ModelInput, ModelOutput, PyTree

POSITION_OFFSET = 2  # row of position 0 in the position embedding
NORM_EPS = 1e-5


@dataclass(frozen=True)
class OPTConfig:
    """Sizes and options of an OPT decoder."""

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
    axis_name: str | None = None  # mesh axis whose devices share it, as in `DecoderConfig`
    num_padding: int = 0  # ids of the vocabulary that are padding, likewise

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


class Affine(nnx.Module):
    """Affine map: x [B, T, in] @ weight [in, out] + bias [out]. With `axis_name` each device has some of the inputs."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, axis_name: str | None = None):
        self.axis_name = axis_name
        self.weight = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,)))

    def __call__(self, x: Array) -> Array:
        product = x @ self.weight[...]
        if self.axis_name is not None:
            product = jax.lax.psum(product, self.axis_name)
        return product + self.bias[...][None, None]


class LayerNorm(nnx.Module):
    """Normalise x [B, T, D] to zero mean and unit variance over its last axis in float32, then scale and shift it."""

    def __init__(self, size: int):
        self.scale = nnx.Param(jnp.ones((size,)))
        self.bias = nnx.Param(jnp.zeros((size,)))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + NORM_EPS)
        return (x32 * self.scale[...][None, None] + self.bias[...][None, None]).astype(x.dtype)


class Layer(nnx.Module):
    """Attention and MLP, each with a norm and a residual connection."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        self.config = config
        hidden, heads, axis_name = config.hidden_size, config.num_heads * config.head_size, config.axis_name
        self.attention_norm, self.mlp_norm = LayerNorm(hidden), LayerNorm(hidden)
        self.qkv, self.attention_out = Affine(hidden, 3 * heads, rngs), Affine(heads, hidden, rngs, axis_name)
        self.mlp_in = Affine(hidden, config.mlp_size, rngs)
        self.mlp_out = Affine(config.mlp_size, hidden, rngs, axis_name)

    def __call__(self, x: Array, inputs: ModelInput, mask: Array | None, cache: dict | None):
        """Run the layer on hidden states x [B, T, D]; return them with the layer's cache."""
        config = self.config
        batch_size, num_tokens, _ = x.shape
        qkv = self.qkv(self.attention_norm(x) if config.norm_first else x)
        qkv = qkv.reshape(batch_size, num_tokens, 3 * config.num_heads, config.head_size)
        query, key, value = jnp.split(qkv, 3, axis=2)
        if cache is None:
            attended = attend(query, key, value, mask)
        else:
            assert mask is not None, "with a cache no mask is left out"
            attended, cache = attend_to_cache(query, key, value, cache, inputs, mask)
        x = x + self.attention_out(attended.reshape(batch_size, num_tokens, -1))
        if not config.norm_first:
            x = self.attention_norm(x)
        hidden = self.mlp_in(self.mlp_norm(x) if config.norm_first else x)
        x = x + self.mlp_out(jax.nn.relu(hidden))
        if not config.norm_first:
            x = self.mlp_norm(x)
        return x, cache


class OPT(nnx.Module):
    """Embeddings, layers and the tied head. It computes in the dtype of its parameters; logits are float32."""

    def __init__(self, config: OPTConfig, rngs: nnx.Rngs):
        self.config = config
        init = partial(nnx.initializers.normal(0.02), rngs.params())
        self.embedding = nnx.Param(init((config.vocab_size, config.embedding_size)))
        self.position_embedding = nnx.Param(init((config.max_length + POSITION_OFFSET, config.hidden_size)))
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        if config.final_norm:
            self.norm = LayerNorm(config.hidden_size)
        if config.embedding_size != config.hidden_size:
            self.project_in = nnx.Param(init((config.embedding_size, config.hidden_size)))
            self.project_out = nnx.Param(init((config.hidden_size, config.embedding_size)))

    def __call__(
        self, inputs: ModelInput, cache: list | None = None, feature_layers: tuple[int, ...] = ()
    ) -> tuple[ModelOutput, list | None]:
        """Run the tokens of `inputs`, as `decoder.Decoder` does."""
        config = self.config
        # By default a GPU multiplies float32 in TF32, and logits then depend visibly on the number of tokens in a call.
        precision = "highest" if self.embedding.dtype == jnp.float32 else None
        with jax.default_matmul_precision(precision):
            x = embed(self.embedding[...], inputs.tokens, config.axis_name)
            if config.embedding_size != config.hidden_size:
                x = x @ self.project_in[...]
            x = x + self.position_embedding[...].at[inputs.positions + POSITION_OFFSET].get(mode="clip")
            mask = None if cache is None else attention_mask(inputs, num_slots(cache[0], inputs))
            new_cache, taps = [], Taps(feature_layers)
            taps.collect(0, x)
            for i, layer in enumerate(self.layers):
                x, layer_cache = layer(x, inputs, mask, None if cache is None else cache[i])
                new_cache.append(layer_cache)
                taps.collect(i + 1, x)
            hidden = self.norm(x) if config.final_norm else x
            projected = hidden @ self.project_out[...] if config.embedding_size != config.hidden_size else hidden
            logits = jnp.einsum("btd,vd->btv", projected, self.embedding[...], preferred_element_type=jnp.float32)
            logits = without_padding(logits, config.num_padding, config.axis_name)
        return ModelOutput(logits, taps.beside(hidden)), None if cache is None else new_cache


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OPT checkpoint."""
    config.only("activation_function", "relu")
    for name in ("enable_bias", "layer_norm_elementwise_affine", "tie_word_embeddings"):
        config.only(name, True)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(
            f"{config.where('hidden_size')} must be a multiple of num_attention_heads = {num_heads}, got {hidden_size}"
        )
    norm_first = config.get("do_layer_norm_before", bool, True)
    opt_config = OPTConfig(
        vocab_size=config.size("vocab_size"),
        embedding_size=config.size("word_embed_proj_dim", hidden_size),
        hidden_size=hidden_size,
        num_layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        head_size=hidden_size // num_heads,
        mlp_size=config.size("ffn_dim"),
        max_length=config.size("max_position_embeddings"),
        norm_first=norm_first,
        final_norm=norm_first and not config.get("_remove_final_layer_norm", bool, False),
    )
    config.check_computation()
    return network_model(OPT, opt_config, _params(opt_config, tensors))


def _params(config: OPTConfig, tensors: Tensors) -> PyTree:
    """Read the parameters as `OPT` holds them."""
    hidden, mlp = config.hidden_size, config.mlp_size

    def affine(inputs: int, outputs: dict[str, int]) -> dict[str, Array]:
        return {
            "weight": tensors.matrices(inputs, {f"{name}.weight": size for name, size in outputs.items()}),
            "bias": tensors.vectors({f"{name}.bias": size for name, size in outputs.items()}),
        }

    def norm(name: str) -> dict[str, Array]:
        return {
            "scale": tensors.vectors({f"{name}.weight": hidden}),
            "bias": tensors.vectors({f"{name}.bias": hidden}),
        }

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
            f"{decoder}.embed_positions.weight", config.max_length + POSITION_OFFSET, hidden
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
