"""OLMo 3: changes OLMo 2 by windows in three of four layers, in which rotary positions are not scaled."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.families import llama, olmo2, ropes
from specjax.models.tensors import Tensors
from specjax.types import Model

THETA = 500000.0  # of rotary positions, unless the config says otherwise


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an OLMo 3 checkpoint."""
    full = olmo2.layer(config)
    types = llama.layer_types(config, lambda i: (i + 1) % 4 != 0)
    window = config.size("sliding_window", config.unless_null("sliding_window", 4096))
    size = llama.size_of_head(config)
    turns = ropes.read_types(config, dict.fromkeys(ropes.TYPES, size), dict.fromkeys(ropes.TYPES, THETA))
    sliding = replace(full, mixer=replace(full.mixer, window=window, rope=turns["sliding_attention"]))
    each = {"full_attention": full, "sliding_attention": sliding}
    layers = tuple(each[kind] for kind in types)
    return llama.decoder(config, tensors, layers, norms=olmo2.NORMS, rope=turns["full_attention"])
