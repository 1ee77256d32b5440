"""Kimi Linear: Kimi Delta Attention in most layers, and attention on latents without positions in the others.

The released files have the names of Mixtral for experts and some fields of their own; transformers writes both for all
layers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.models.channel_delta import ChannelDeltaNet
from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.models.families import deepseek_v3, llama, mixtures, qwen3_next
from specjax.models.layer import LayerConfig
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model

RENAMED = {  # fields that have other names in the files than in the code
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
OF_EXPERTS = mixtures.Names(gate="w1", up="w3", down="w2")
BLOCK = "block_sparse_moe"  # in the files, of layers with experts or of all


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Kimi Linear checkpoint."""
    config = _renamed(config)
    config.only("moe_router_activation_func", "sigmoid")
    config.only("mla_use_nope", True)
    config.ignore("rope_theta")  # heads do not turn
    # transformers ties no head to embeddings, whatever the field says.
    config = config.replaced(rope_interleave=False, rope_scaling=None, rope_parameters=None, tie_word_embeddings=False)
    experts = mixtures.sigmoid_experts(config, scale=2.446)
    attends = deepseek_v3.with_latents(config, experts, query_rank=None)
    layers = mixtures.by_types(config, attends)
    recurs, number = _delta_net(config), config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    layers = layers if len(layers) == number else layers * number
    layers = tuple(
        one if kind == "full_attention" else replace(one, mixer=recurs)
        for one, kind in zip(layers, _kinds(config, number), strict=True)
    )
    sizes = llama.config_of(config, layers, transposed=tensors.on_one_gpu, rope=NO_ROPE, **mixtures.widths(config))
    config.check_computation()
    return decoder_model(sizes, llama.params_of_layers(sizes, tensors, partial(_params, sizes, tensors)))


def _renamed(config: ConfigFile) -> ConfigFile:
    """Return the fields under the names of DeepSeek V3."""
    found = {own: config.fields[name] for own, name in RENAMED.items() if name in config}
    for own, value in found.items():
        config.only(own, value)
    config.ignore(*RENAMED.values())
    return config.replaced(**found)


def _kinds(config: ConfigFile, number: int) -> list[str]:
    """Return the kind of each layer, which released files say by the numbers of layers, from 1 on."""
    table = config.table("linear_attn_config")
    attending, others = (table.get(name, list, None) for name in ("full_attn_layers", "kda_layers"))
    if attending is None or others is None:
        attending, others = range(5, number + 1, 4), ()
    return qwen3_next.kinds(config, [i in attending and i not in others for i in range(1, number + 1)])


def _delta_net(config: ConfigFile) -> ChannelDeltaNet:
    """Return the mixer of the recurrent layers."""
    table = config.table("linear_attn_config")
    heads = table.size("num_heads", config.size("linear_num_heads", 32))
    size = table.size("head_dim", config.size("linear_head_dim", 128))
    taps = table.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4))
    return ChannelDeltaNet(heads, heads, size, size, taps, rank=size)


def _params(config: DecoderConfig, tensors: Tensors, layer: LayerConfig, name: str) -> dict[str, Any]:
    """Read the parameters of a layer, as `LayerConfig.shapes` names them."""
    block = BLOCK if any(stored.startswith(f"{name}.{BLOCK}.") for stored in tensors.names()) else "mlp"
    names = OF_EXPERTS if f"{name}.{block}.experts.0.{OF_EXPERTS.gate}.weight" in tensors else mixtures.Names()
    mixture = replace(names, block=block)
    return llama.layer_params(config, layer, tensors, name, mixture=mixture, mlp=llama.MLPNames(block))
