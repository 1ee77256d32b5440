"""MiMo: Qwen2 with layers for multi-token prediction, which `specjax.proposers.mtp` loads as a drafter."""

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, qwen2
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

MTP_LAYERS = "model.mtp_layers.*"  # names of the tensors of the drafter


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a MiMo checkpoint, without its layers for multi-token prediction."""
    config.only("hidden_act", "silu")
    layer = LayerConfig(Attention(has_bias=config.get("attention_bias", bool, True)))
    return llama.decoder(config, tensors, llama.windowed(layer, qwen2.windows(config)), ignored=(MTP_LAYERS,))
