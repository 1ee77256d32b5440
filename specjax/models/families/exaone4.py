"""EXAONE 4: changes OLMo 2 by norms of heads, and by windows in most layers; the others do not see positions."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, olmo2
from specjax.models.layer import Attention, LayerConfig
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an EXAONE 4 checkpoint."""
    config.only("hidden_act", "silu")
    config.only("reorder_qk_norm", True)  # norms after the sublayers, and of heads
    attention = Attention(has_head_norms=True)
    window = config.size("sliding_window", config.unless_null("sliding_window", 4096))
    if window is None or "layer_types" in config:
        config.ignore("sliding_window_pattern")  # released files have letters for each layer beside layer_types
        types = llama.layer_types(config, lambda i: False)
    else:
        pattern = config.size("sliding_window_pattern", 4)
        types = llama.layer_types(config, lambda i: (i + 1) % pattern != 0)
    full = attention if window is None else replace(attention, rope=NO_ROPE)
    mixers = {"full_attention": full, "sliding_attention": replace(attention, window=window)}
    layers = tuple(LayerConfig(mixers[kind], has_norms=False, has_post_norms=True) for kind in types)
    return llama.decoder(config, tensors, layers, norms=olmo2.NORMS)
