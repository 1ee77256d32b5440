"""OLMo Hybrid: gated delta nets after a norm, and in some layers the attention of OLMo 2, before norms.

The files of the releases have other names for two norms than transformers, and so have files that it writes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.models.delta_net import DeltaNet
from specjax.models.families import llama, olmo2, qwen3_next, ropes
from specjax.models.layer import LayerConfig
from specjax.models.rope import NO_ROPE, Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

OF_NET = llama.DeltaNames(
    parts=("q_proj", "k_proj", "v_proj", "g_proj"), rates=("b_proj", "a_proj"), norm="o_norm", out="o_proj"
)
THREE = replace(OF_NET, convolutions=("q_conv1d", "k_conv1d", "v_conv1d"))  # in the files that are released
RENAMED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
EPSILON = 1e-5  # of the norms of the heads of delta nets, whatever others have


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OLMo Hybrid checkpoint."""
    attends, recurs = olmo2.layer(config), LayerConfig(_delta_net(config))
    layers = tuple(attends if kind == "full_attention" else recurs for kind in _kinds(config))
    decoder_config = llama.config_of(config, layers, transposed=tensors.on_one_gpu, rope=_rope)
    config.check_computation()
    read = partial(_params, decoder_config, tensors)
    return decoder_model(decoder_config, llama.params_of_layers(decoder_config, tensors, read))


def _kinds(config: ConfigFile) -> list[str]:
    """Return the kind of each layer."""
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    attending = [*range(3, number, 4)] or [number - 1]
    return qwen3_next.kinds(config, [i in attending for i in range(number)])


def _delta_net(config: ConfigFile) -> DeltaNet:
    """Return the mixer of the recurrent layers."""
    heads = config.size("num_attention_heads")
    key_heads = config.size("linear_num_key_heads", heads)
    key_size = config.size("linear_key_head_dim", int(0.75 * config.size("hidden_size") / key_heads))
    return qwen3_next.delta_net(
        config,
        heads=(key_heads, heads),
        sizes=(key_size, 2 * key_size),
        beta_factor=2.0 if config.get("linear_allow_neg_eigval", bool, True) else 1.0,
        norm_eps=EPSILON,
    )


def _rope(config: ConfigFile, head_size: int) -> Rope:
    """Return how heads turn; they do not where the base of the rotation is null."""
    table = config.get("rope_scaling", dict, {}) or config.get("rope_parameters", dict, {})
    if (table if "rope_theta" in table else config.fields).get("rope_theta", 0) is None:
        config.ignore("rope_theta", "rope_parameters")
        return NO_ROPE
    return ropes.read(config, head_size)


def _params(config: DecoderConfig, tensors: Tensors, layer: LayerConfig, name: str) -> dict[str, Any]:
    """Read the parameters of a layer, as `LayerConfig.shapes` names them."""
    norms = llama.NORMS if isinstance(layer.mixer, DeltaNet) else olmo2.NORMS
    norms = {
        param: RENAMED[norm] if norm in RENAMED and f"{name}.{RENAMED[norm]}.weight" in tensors else norm
        for param, norm in norms.items()
    }
    names = THREE if f"{name}.linear_attn.{THREE.convolutions[0]}.weight" in tensors else OF_NET
    return llama.layer_params(config, layer, tensors, name, norms, delta=names)
