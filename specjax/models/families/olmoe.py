"""OLMoE: changes Llama by mixtures of experts in all layers, and by norms of queries and keys.

FlexOLMo has its experts in the layers of OLMo 2.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SoftmaxTopK
from specjax.models.families import llama, mixtures, olmo2, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OLMoE checkpoint."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    return _decoder(config, tensors, LayerConfig(Attention(has_bias=bias, has_out_bias=bias, has_wide_norms=True)))


def build_flex(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a FlexOLMo checkpoint."""
    rope = partial(ropes.read, theta=5e5)
    return _decoder(config, tensors, olmo2.layer(config), norms=olmo2.NORMS, rope=rope)


def _decoder(config: ConfigFile, tensors: Tensors, layer: LayerConfig, **options: Any) -> Model:
    """Build the model, given a layer that has no experts yet, and more options of `llama.decoder`."""
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    renormalized = config.get("norm_topk_prob", bool, False)
    experts = Experts(mixtures.made(config, SoftmaxTopK, *sizes, is_renormalized=renormalized))
    options |= {"mixture": mixtures.Names(), "expert_size": config.size("intermediate_size")}
    return llama.decoder(config, tensors, (replace(layer, ffn=experts),), **options)
