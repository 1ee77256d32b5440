"""Gemma 4 without experts: changes Gemma 3 by larger heads in full layers, and by norms of values.

Checkpoints that also take images or audio are read without the tensors of these. The small releases, whose layers have
embeddings of their own and share keys and values, are refused.
"""

from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.families import gemma, llama, ropes
from specjax.models.families.gemma import ACTIVATIONS, NORMS
from specjax.models.families.text_part import OTHERS, text_part
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

FULL, SLIDING = ropes.TYPES
TURNS: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Gemma 4 checkpoint without experts."""
    text, tensors = text_part(config, tensors)
    text = text.with_defaults(rope_parameters=TURNS)
    _refuse(text)
    activation = text.choice("hidden_activation", tuple(ACTIVATIONS), default="gelu_pytorch_tanh")
    *types, _ = llama.layer_types(text, lambda i: (i + 1) % 6 != 0)
    types.append(FULL)  # the last layer always attends to all positions
    sizes = {FULL: text.size("global_head_dim", 512), SLIDING: text.size("head_dim", 256)}
    shares_values = text.get("attention_k_eq_v", bool, False)
    kv_heads = text.size("num_global_key_value_heads", None)
    turns = ropes.read_types(
        text,
        sizes,
        {FULL: 1e6, SLIDING: 1e4},
        rotary_factor=1.0,
        kinds=(*ropes.KINDS, "proportional"),
    )
    shared: dict[str, Any] = {"scale": 1.0, "has_head_norms": True, "has_value_norm": True}
    mixers = {
        FULL: Attention(
            rope=turns[FULL],
            head_size=sizes[FULL],
            num_kv_heads=kv_heads if shares_values else None,
            has_values=not shares_values,
            **shared,
        ),
        SLIDING: Attention(window=text.size("sliding_window", 512), **shared),
    }
    ffn = GatedMLP(ACTIVATIONS[activation])
    return gemma.decoder(
        text,
        tensors,
        tuple(LayerConfig(mixers[kind], ffn, has_post_norms=True, has_scale=True) for kind in types),
        norms=NORMS,
        norm_offset=0.0,
        logit_softcap=text.number("final_logit_softcapping", None),
        rope=turns[SLIDING],
        ignored=OTHERS,
    )


def _refuse(config: ConfigFile) -> None:
    """Raise ValueError for the parts of other releases: experts, embeddings of layers, and shared keys and values."""
    config.only("enable_moe_block", False)
    for name, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if (found := config.get(name, int, default)) != 0:
            raise ValueError(f"{config.where(name)} must be 0, because specjax does not have this part, got {found}")
    if config.fields.get("use_bidirectional_attention") == "vision":
        config.fields["use_bidirectional_attention"] = None  # text is causal
    config.ignore("num_experts", "top_k_experts", "moe_intermediate_size", "use_double_wide_mlp")
