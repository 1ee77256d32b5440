"""EXAONE 4: changes OLMo 2 by norms of heads, and by windows in most layers; the others do not see positions.

K-EXAONE has such attention after a norm, and experts in all layers but the first.
"""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared
from specjax.models.families import llama, mixtures, olmo2
from specjax.models.layer import Attention, LayerConfig
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an EXAONE 4 checkpoint."""
    config.only("reorder_qk_norm", True)  # norms after the sublayers, and of heads
    layers = tuple(LayerConfig(mixer, has_norms=False, has_post_norms=True) for mixer in mixers(config))
    return llama.decoder(config, tensors, layers, norms=olmo2.NORMS)


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a K-EXAONE checkpoint, without its layers for multi-token prediction."""
    config.only("scoring_func", "sigmoid")
    router = mixtures.sigmoid_router(config, "num_experts", "num_local_experts", scale=2.5)
    ffns = [one.ffn for one in mixtures.by_types(config, LayerConfig(ffn=Experts(router, shared=Shared())))]
    attentions = mixers(config)
    layers = tuple(
        LayerConfig(mixer, ffn) for mixer, ffn in zip(attentions, ffns * (len(attentions) // len(ffns)), strict=True)
    )
    size = config.size("moe_intermediate_size")
    names = mixtures.Names()
    if not any(name.endswith(names.correction) for name in tensors.names()):  # the released files
        names = mixtures.Names(correction="e_score_correction_bias")
    return llama.decoder(
        config,
        tensors,
        layers,
        mixture=names,
        ignored=("mtp.*",),
        expert_size=size,
        shared_size=config.size("num_shared_experts", 1, most=mixtures.MAX_EXPERTS) * size,
    )


def mixers(config: ConfigFile) -> list[Attention]:
    """Return the attention of each layer."""
    config.only("hidden_act", "silu")
    attention = Attention(has_head_norms=True)
    window = config.size("sliding_window", config.unless_null("sliding_window", 4096))
    if window is None or "layer_types" in config:
        config.ignore("sliding_window_pattern")  # released files have letters for each layer beside layer_types
        types = llama.layer_types(config, lambda i: False)
    else:
        pattern = config.size("sliding_window_pattern", 4)
        types = llama.layer_types(config, lambda i: (i + 1) % pattern != 0)
    full = attention if window is None else replace(attention, rope=NO_ROPE)
    of_types = {"full_attention": full, "sliding_attention": replace(attention, window=window)}
    return [of_types[kind] for kind in types]
