"""DeepSeek V3, Kimi K2 and GLM-4.7-Flash: change GLM-4.5 by attention on latents. Youtu-LLM has no experts."""

import math

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts
from specjax.models.families import llama, mixtures
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.latent_attention import LatentAttention
from specjax.models.layer import GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a DeepSeek V3 checkpoint, without its layers for multi-token prediction."""
    return _decoder(config, tensors, mixtures.after_dense(config, layer(config), 3))


def build_text(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Kimi K2.5 checkpoint, without the tensors of its images."""
    text, tensors = text_part(config, tensors)
    text.choice("model_type", ("kimi_k2", "deepseek_v3"), "deepseek_v3")
    return _decoder(text, tensors, mixtures.after_dense(text, layer(text), 3), OTHERS)


def build_lite(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a GLM-4.7-Flash checkpoint, without its layers for multi-token prediction."""
    return _decoder(config, tensors, mixtures.by_types(config, layer_lite(config)))


def build_dense(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Youtu-LLM checkpoint."""
    layer = with_latents(config, GatedMLP(), query_rank=1536)
    return llama.decoder(config, tensors, (layer,), tie_embeddings=True)


def layer(config: ConfigFile) -> LayerConfig:
    """Return the description of the layers of DeepSeek V3 with experts."""
    experts = mixtures.sigmoid_experts(config, scale=2.5, num_groups=8, num_chosen_groups=4)
    return with_latents(config, experts, query_rank=1536)


def layer_lite(config: ConfigFile) -> LayerConfig:
    """Return the description of the layers of GLM-4.7-Flash with experts."""
    return with_latents(config, mixtures.sigmoid_experts(config, scale=1.8), query_rank=768)


def with_latents(config: ConfigFile, ffn: Experts | GatedMLP, *, query_rank: int | None) -> LayerConfig:
    """Return a layer that attends to latents, and set the field head_dim to the part of a head that turns.

    Args:
        config: config.json.
        ffn: of the layer.
        query_rank: default of the field q_lora_rank.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    config.only("hidden_act", "silu")
    config.only("num_key_value_heads", config.size("num_attention_heads"))
    config.refuse_null("rope_interleave")
    key_size, rope_size = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    mixer = LatentAttention(
        rank=config.size("kv_lora_rank"),
        rope_size=rope_size,
        key_size=key_size,
        value_size=config.size("v_head_dim"),
        scale=(key_size + rope_size) ** -0.5 * _gain(config) ** 2,
        query_rank=config.size("q_lora_rank", config.unless_null("q_lora_rank", query_rank)),
        has_bias=config.get("attention_bias", bool, False),
        is_interleaved=config.get("rope_interleave", bool, True),
    )
    config.fields["head_dim"] = rope_size  # whatever the file says
    return LayerConfig(mixer, ffn)


def _gain(config: ConfigFile) -> float:
    """Return the factor that YaRN has on queries and on keys beside that on their parts that turn."""
    rope = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    of_all = rope.number("mscale_all_dim", None, may_be_zero=True)
    factor = rope.number("factor") if of_all else 1.0
    return 0.1 * of_all * math.log(factor) + 1 if factor > 1 else 1.0


def _decoder(
    config: ConfigFile, tensors: Tensors, layers: tuple[LayerConfig, ...], others: tuple[str, ...] = ()
) -> Model:
    return llama.decoder(
        config,
        tensors,
        layers,
        mixture=mixtures.Names(),
        ignored=(*mixtures.mtp_layers(config), *others),
        **mixtures.widths(config),
    )
