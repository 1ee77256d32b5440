"""MiMo-V2-Flash: changes GLM-4.5 by windows with sinks and more key heads, and by values smaller than keys."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

THETAS = {"full_attention": 5e6, "sliding_attention": 1e4}
TURNING = 0.334  # part of a head
ROPES = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": TURNING}
    for kind, theta in THETAS.items()
}
HEAD_SIZE = 192
WINDOW = 129
MTP_LAYERS = "model.mtp.*"  # names of the tensors of the drafter
AS_HERE = {  # fields that say how all models of this type are
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "hidden_act": "silu",
    "n_shared_experts": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of MiMo-V2-Flash, without its layers for multi-token prediction."""
    for name, value in AS_HERE.items():
        config.only(name, value)
    if "rope_parameters" not in config:
        config.only("rope_theta", THETAS["full_attention"])  # transformers does not read these fields
        config.only("swa_rope_theta", THETAS["sliding_attention"])
        config.only("partial_rotary_factor", TURNING)
    config.ignore("moe_layer_freq", "attention_chunk_size")  # tensors show the first, and no layer has the second
    config = config.with_defaults(rope_parameters=ROPES, rms_norm_eps=1e-5, head_dim=HEAD_SIZE)
    config = config.replaced(partial_rotary_factor=None)  # the tables say it
    if "sliding_window_size" in config:
        config = config.replaced(sliding_window=config.size("sliding_window_size") + 1)
    types = llama.layer_types(config, lambda i: i != 0 and (i + 1) % 6 != 0)
    turns = ropes.read_types(config, dict.fromkeys(ropes.TYPES, config.size("head_dim")), THETAS, rotary_factor=TURNING)
    mixers = llama.mixers_by_type(config, _attention(config), types, turns, WINDOW)
    if "sliding_attention" in mixers:
        number = 2 * config.size("num_key_value_heads")
        mixers["sliding_attention"] = replace(mixers["sliding_attention"], has_sinks=True, num_kv_heads=number)
    router = mixtures.sigmoid_router(config, "n_routed_experts", "num_local_experts", scale=1.0)
    layers = mixtures.by_types(config, LayerConfig(ffn=Experts(router)))
    layers *= len(types) // len(layers)
    return llama.decoder(
        config,
        tensors.renamed({"self_attn.sinks": "self_attn.attention_sink_bias"}),
        tuple(replace(layer, mixer=mixers[kind]) for layer, kind in zip(layers, types, strict=True)),
        mixture=mixtures.Names(),
        expert_size=config.size("moe_intermediate_size"),
        ignored=(MTP_LAYERS,),
        rope=turns["full_attention"],
    )


def _attention(config: ConfigFile) -> Attention:
    """Return the mixer of full layers."""
    size = config.size("head_dim")
    value_size = config.size("v_head_dim", 128, most=size)
    factor = config.number("attention_value_scale", config.unless_null("attention_value_scale", 0.707))
    return Attention(
        has_bias=config.get("attention_bias", bool, False),
        value_size=None if value_size == size else value_size,
        value_factor=1.0 if factor is None else factor,
    )
