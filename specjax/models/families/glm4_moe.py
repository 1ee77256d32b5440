"""GLM-4.5: changes Llama by mixtures of experts in all layers but the first, and by heads that turn in part."""

from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

read_rope = partial(ropes.read, rotary_factor=0.5)


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a GLM-4.5 checkpoint, without its layers for multi-token prediction."""
    return llama.decoder(
        config,
        tensors,
        mixtures.after_dense(config, layer(config), 1),
        mixture=mixtures.Names(),
        rope=read_rope,
        ignored=mixtures.mtp_layers(config),
        **mixtures.widths(config),
    )


def layer(config: ConfigFile) -> LayerConfig:
    """Return the description of the layers with experts."""
    config.only("hidden_act", "silu")
    attention = Attention(
        has_bias=config.get("attention_bias", bool, False),
        has_head_norms=config.get("use_qk_norm", bool, False),
    )
    return LayerConfig(attention, mixtures.sigmoid_experts(config))
