"""OLMoE: changes Llama by mixtures of experts in all layers, and by norms of queries and keys."""

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, SoftmaxTopK
from specjax.models.families import llama, mixtures
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OLMoE checkpoint."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    renormalized = config.get("norm_topk_prob", bool, False)
    experts = Experts(mixtures.made(config, SoftmaxTopK, *sizes, is_renormalized=renormalized))
    layer = LayerConfig(Attention(has_bias=bias, has_out_bias=bias, has_wide_norms=True), experts)
    size = config.size("intermediate_size")
    return llama.decoder(config, tensors, (layer,), mixture=mixtures.Names(), expert_size=size)
