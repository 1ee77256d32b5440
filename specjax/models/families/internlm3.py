"""InternLM3: Llama with other names for the fields of its biases."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an InternLM3 checkpoint."""
    config.only("hidden_act", "silu")
    of_heads = config.get("qkv_bias", bool, config.get("attention_bias", bool, False))
    of_others = config.get("bias", bool, config.get("mlp_bias", bool, False))
    layer = LayerConfig(Attention(has_bias=of_heads, has_out_bias=of_others), GatedMLP(has_bias=of_others))
    return llama.decoder(config, tensors, (layer,), head_size=128)
