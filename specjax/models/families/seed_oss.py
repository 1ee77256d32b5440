"""Seed-OSS: changes Llama by biases of query, key and value, and by heads whose size is a field."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Seed-OSS checkpoint."""
    config.only("hidden_act", "silu")
    attention = Attention(
        has_bias=config.get("attention_bias", bool, True),
        has_out_bias=config.get("attention_out_bias", bool, False),
    )
    ffn = GatedMLP(has_bias=config.get("mlp_bias", bool, False))
    size = config.unless_null("head_dim", 128)
    return llama.decoder(config, tensors, (LayerConfig(attention, ffn),), head_size=size)
