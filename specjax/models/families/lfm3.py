"""LFM3: changes LFM2 by layers that attend inside a window, by gates on heads, and by norms after both sublayers."""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import lfm2, llama, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig, OutputGate
from specjax.models.tensors import Tensors
from specjax.types import Model

THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
ROPES = {  # how heads turn where a file does not say it
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
KINDS = "conv", "full_attention", "sliding_attention"
POST_NORMS = {"attention_post_norm": "post_operator_norm", "mlp_post_norm": "post_ffn_norm"}
HEAD_SIZE = 128


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an LFM3 checkpoint."""
    config = config.with_defaults(rope_parameters=ROPES)
    sizes = dict.fromkeys(THETAS, llama.size_of_head(config, HEAD_SIZE))
    kinds = (*ropes.FIXED, "proportional")
    turns = ropes.read_types(config, sizes, THETAS, rotary_factor=1.0, kinds=kinds)
    bias, has_gate = config.get("attention_bias", bool, False), config.get("use_attention_gate", bool, True)
    gate = OutputGate("sigmoid", by_head=True) if has_gate else None
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True, output_gate=gate)
    types = _types(config)
    mixers: dict[str, Any] = {"conv": lfm2.convolution(config, size=7)}
    mixers |= llama.mixers_by_type(config, attention, types, turns, 256)
    has_post_norms = config.get("use_sandwich_norm", bool, True)
    layers = tuple(LayerConfig(mixers[kind], GatedMLP(), has_post_norms=has_post_norms) for kind in types)
    options = {"head_size": HEAD_SIZE, "rope": turns["full_attention"]}
    norms = lfm2.NORMS | (POST_NORMS if has_post_norms else {})
    return lfm2.model(config, tensors, layers, norms, llama.ATTENTION, **options)


def _types(config: ConfigFile) -> list[str]:
    """Return the kind of each layer."""
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    of_four = {2: "full_attention", 0: "sliding_attention"}
    default = [of_four.get(i % 4, "conv") if i else "conv" for i in range(number)]
    types = config.strings("layer_types", default)
    if len(types) != number or not {"full_attention"} <= set(types) <= set(KINDS):
        raise ValueError(
            f"{config.where('layer_types')} must be {number} times 'full_attention', 'sliding_attention' or 'conv', "
            f"the first at least once, got {types!r}"
        )
    return types
