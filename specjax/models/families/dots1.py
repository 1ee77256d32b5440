"""dots.llm1: changes GLM-4.5 by norms of heads, by heads that turn as a whole, and by windows in the last layers."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, mixtures
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a dots.llm1 checkpoint."""
    config.only("hidden_act", "silu")
    config.choice("scoring_func", ("noaux_tc", "sigmoid"), "sigmoid")  # two names of one function
    config = config.replaced(scoring_func="sigmoid").with_defaults(norm_topk_prob=False)
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True)
    each = mixtures.after_dense(config, LayerConfig(attention, mixtures.sigmoid_experts(config)), 0)
    first = config.size("max_window_layers", 62, least=0)
    windows = llama.windows(config, lambda i: i >= first)
    each *= len(windows) // len(each)
    layers = tuple(
        replace(one, mixer=replace(attention, window=window)) for one, window in zip(each, windows, strict=True)
    )
    return llama.decoder(config, tensors, layers, mixture=mixtures.Names(), **mixtures.widths(config))
