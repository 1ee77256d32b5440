"""GLM-4.5: changes Llama by mixtures of experts in all layers but the first, and by heads that turn in part."""

from collections.abc import Callable
from functools import partial

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, mixtures, ropes
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import Attention, LayerConfig
from specjax.models.rope import Rope
from specjax.models.tensors import Tensors
from specjax.types import Model

read_rope = partial(ropes.read, rotary_factor=0.5)


def build(
    config: ConfigFile,
    tensors: Tensors,
    others: tuple[str, ...] = (),
    rope: Callable[[ConfigFile, int], Rope] = read_rope,
) -> Model:
    """Build the model of a GLM-4.5 checkpoint, without its layers for multi-token prediction and other tensors."""
    return llama.decoder(
        config,
        tensors,
        mixtures.after_dense(config, layer(config), 1),
        mixture=mixtures.Names(),
        rope=rope,
        ignored=(*mixtures.mtp_layers(config), *others),
        **mixtures.widths(config),
    )


def build_text(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of the text part of a GLM-4.5V checkpoint, which is read without the tensors of its images."""
    text, tensors = text_part(config, tensors)
    text.only("use_qk_norm", False)
    return build(text.with_defaults(attention_bias=True), tensors, OTHERS)


def layer(config: ConfigFile) -> LayerConfig:
    """Return the description of the layers with experts."""
    config.only("hidden_act", "silu")
    attention = Attention(
        has_bias=config.get("attention_bias", bool, False),
        has_head_norms=config.get("use_qk_norm", bool, False),
    )
    return LayerConfig(attention, mixtures.sigmoid_experts(config))
