"""Gemma 4: changes Gemma 3 by larger heads in full layers, by norms of values, and by experts beside the MLP.

Checkpoints that also take images or audio are read without their tensors. The small releases, whose layers have
embeddings of their own and share keys and values, are refused.
"""

from dataclasses import dataclass
from typing import Any

from specjax.models.beside_mlp import BesideMLP
from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Experts, Gated, SoftmaxTopK
from specjax.models.families import gemma, llama, mixtures, ropes
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
    """Build the model of a Gemma 4 checkpoint."""
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
    ffn: Any = GatedMLP(ACTIVATIONS[activation])
    options: dict[str, Any] = {}
    if text.get("enable_moe_block", bool, False):
        ffn = BesideMLP(ffn, _experts(text, ACTIVATIONS[activation]))
        options |= {"expert_size": text.size("moe_intermediate_size"), "mixture": Names()}
    else:
        text.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    return gemma.decoder(
        text,
        tensors,
        tuple(LayerConfig(mixers[kind], ffn, has_post_norms=True, has_scale=True) for kind in types),
        norms=NORMS,
        norm_offset=0.0,
        logit_softcap=text.number("final_logit_softcapping", None),
        rope=turns[SLIDING],
        ignored=OTHERS,
        **options,
    )


def _experts(config: ConfigFile, activation: str) -> Experts:
    sizes = mixtures.counts(config, "num_experts", "num_local_experts", chosen="top_k_experts")
    router = mixtures.made(config, SoftmaxTopK, *sizes, has_scales=True)
    return Experts(router, Gated(activation), has_router_norm=True)


@dataclass(frozen=True)
class Names:
    """The names of the tensors of the MLP and the experts of a layer."""

    def params(self, config: DecoderConfig, ffn: BesideMLP, tensors: Tensors, layer: str) -> dict[str, Any]:
        """Read the parameters of both, as `BesideMLP.shapes` names them."""
        number, hidden, size = ffn.experts.router.num_experts, config.hidden_size, config.expert_size
        norms = {
            "mlp_sum_norm": "post_feedforward_layernorm_1.weight",
            "experts_norm": "pre_feedforward_layernorm_2.weight",
            "experts_sum_norm": "post_feedforward_layernorm_2.weight",
            "router_norm": "router.scale",
        }
        params = {param: tensors.vectors({f"{layer}.{name}": hidden}) for param, name in norms.items()}
        return params | {
            **llama.mlp_params(config, ffn.mlp, tensors, layer),
            "router": tensors.table(f"{layer}.router.proj.weight", number, hidden),
            "router_scale": tensors.vectors({f"{layer}.router.per_expert_scale": number}),
            "experts_gate_up": tensors.stacked(f"{layer}.experts.gate_up_proj", number, 2 * size, hidden),
            "experts_out": tensors.stacked(f"{layer}.experts.down_proj", number, hidden, size),
        }


def _refuse(config: ConfigFile) -> None:
    """Raise ValueError for the parts of small releases: embeddings of layers, and shared keys and values."""
    for name, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if (found := config.get(name, int, default)) != 0:
            raise ValueError(f"{config.where(name)} must be 0, because specjax does not have this part, got {found}")
    if config.fields.get("use_bidirectional_attention") == "vision":
        config.fields["use_bidirectional_attention"] = None  # text is causal
    config.ignore("use_double_wide_mlp")
