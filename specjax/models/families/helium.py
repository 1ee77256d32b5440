"""Helium: changes Llama by heads whose numbers that turn together stand side by side."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Helium checkpoint."""
    config.only("hidden_act", "silu")
    attention = Attention(has_bias=config.get("attention_bias", bool, False))
    ffn = GatedMLP(has_bias=config.get("mlp_bias", bool, False))
    turns = partial(ropes.read_side_by_side, theta=1e5)
    return llama.decoder(config, tensors, (LayerConfig(attention, ffn),), head_size=128, rope=turns)
