"""Arcee (AFM-4.5B): changes Llama by MLPs without a gate, of squared positive parts."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an Arcee checkpoint."""
    config.only("mlp_bias", False)
    bias = config.get("attention_bias", bool, False)
    ffn = MLP(config.choice("hidden_act", ("relu2", "silu"), default="relu2"))
    return llama.decoder(config, tensors, (LayerConfig(Attention(has_bias=bias, has_out_bias=bias), ffn),))
