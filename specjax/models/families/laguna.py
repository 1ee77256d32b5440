"""Laguna: changes Qwen3-MoE by gates on heads, by layers of different numbers of heads, and by routers of sigmoids."""

from dataclasses import replace

from specjax.models.config_file import ConfigFile
from specjax.models.experts import Experts, Shared, SigmoidTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, LayerConfig, OutputGate
from specjax.models.tensors import Tensors
from specjax.types import Model

ROPES = {  # how heads turn where a file does not say it
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
THETAS = {"full_attention": 5e5, "sliding_attention": 1e4}
HEAD_SIZE = 128


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Laguna checkpoint."""
    config.only("hidden_act", "silu")
    config.only("moe_apply_router_weight_on_input", False)
    config.only("moe_router_logit_softcapping", 0.0)
    config.only("norm_topk_prob", True)
    config = config.with_defaults(rope_parameters=ROPES).replaced(partial_rotary_factor=None)  # the tables say it
    turns = ropes.read_types(
        config, dict.fromkeys(ropes.TYPES, llama.size_of_head(config, HEAD_SIZE)), THETAS, rotary_factor=1.0
    )
    sizes = mixtures.counts(config, "num_experts", "num_local_experts")
    router = mixtures.made(config, SigmoidTopK, *sizes, scale=config.number("moe_routed_scaling_factor", 1.0))
    bias = config.get("attention_bias", bool, False)
    attention = Attention(has_bias=bias, has_out_bias=bias, has_head_norms=True, output_gate=_gate(config))
    types = llama.layer_types(config, lambda i: False)
    mixers = llama.mixers_by_type(config, attention, types, turns, 512)
    experts = mixtures.by_types(config, LayerConfig(ffn=Experts(router, shared=Shared())))
    experts = experts if len(experts) > 1 else experts * len(types)
    layers = tuple(
        replace(layer, mixer=replace(mixers[kind], num_heads=heads))
        for layer, kind, heads in zip(experts, types, _heads(config), strict=True)
    )
    return llama.decoder(
        config,
        tensors,
        layers,
        head_size=HEAD_SIZE,
        mixture=_names(tensors),
        expert_size=config.size("moe_intermediate_size", 512),
        shared_size=config.size("shared_expert_intermediate_size", 512),
        rope=turns["full_attention"],
    )


def _gate(config: ConfigFile) -> OutputGate:
    """Return the gate on the output of attention, which has a number for each head or each number of a head."""
    kind = config.fields.get("gating")
    config.ignore("gating")
    if kind is not None and kind is not True and kind not in ("per-head", "per-element"):
        raise ValueError(f"{config.where('gating')} must be True, 'per-head' or 'per-element', got {kind!r}")
    return OutputGate("softplus", by_head=kind != "per-element")


def _heads(config: ConfigFile) -> list[int]:
    """Return the number of query heads of each layer."""
    number, most = config.size("num_hidden_layers", most=llama.MAX_LAYERS), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", most)
    found = config.get("num_attention_heads_per_layer", list, [most] * number)
    if len(found) != number or not all(type(n) is int and n > 0 and n % kv_heads == 0 for n in found):
        raise ValueError(
            f"{config.where('num_attention_heads_per_layer')} must be {number} multiples of num_key_value_heads = "
            f"{kv_heads}, got {found!r}"
        )
    return found


def _names(tensors: Tensors) -> mixtures.Names:
    """Return the names of the tensors of experts; released files have others than transformers has in memory."""
    correction = "experts.e_score_correction_bias"
    if any(name.endswith(f"mlp.{correction}") for name in tensors.names()):
        return mixtures.Names(shared="shared_expert", correction=correction)
    return mixtures.Names()
