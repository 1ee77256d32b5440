"""The architectures that are read from GGUF files, and how the files of one differ from the files of others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specjax.models.gguf import delta_nets, latents, mamba
from specjax.models.gguf.blocks import floats_of
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.header import Header
from specjax.models.gguf.places import Place

OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
LAYERS_OF_GEMMA3_27B = 62
CHUNK_OF_LLAMA4 = 8192  # tokens of a part of a sequence, which files do not say
EXPERTS_OF_MAVERICK = 128  # Llama 4 Maverick lacks the norms of queries and keys of Scout
LAYERS_OF_27B = 46  # Gemma 2 of 27 billion parameters scales its queries by the width of a head in the hidden size


def _without_window(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention.sliding_window", 0)
    return {}


def _with_yarn(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    scaling = fields.yarn()
    if scaling is not None:
        fields.only("rope.scaling.attn_factor", 1.0)
    return _without_window(fields, config) | ({} if scaling is None else {"rope_scaling": scaling})


def _gemma2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == LAYERS_OF_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "sliding_window": fields.get("attention.sliding_window", int, 4096),
        "attn_logit_softcapping": fields.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": fields.get("final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": float(width),
        "attention_bias": False,
    }


def _gemma3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == LAYERS_OF_GEMMA3_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "model_type": "gemma3_text",
        "sliding_window": fields.get("attention.sliding_window", int),
        "rope_theta": fields.get("rope.freq_base", float, 1e6),
        "rope_local_base_freq": fields.get("rope.freq_base_swa", float, 1e4),
        "final_logit_softcapping": fields.get("final_logit_softcapping", float, None),
        "query_pre_attn_scalar": float(width),
    }


def _gemma4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    number, header = config["num_hidden_layers"], fields.header
    slides = fields.slides(number)
    kv_heads, widths = (fields.of_layers(name, number) for name in ("attention.head_count_kv", "feed_forward_length"))
    num_own = number - fields.get("attention.shared_kv_layers", int, 0)
    full = [i for i, one in enumerate(slides) if not one]
    sliding = [i for i, one in enumerate(slides) if one] or full
    size = fields.get("attention.key_length", int)
    return {
        "model_type": "gemma4_text",
        "layer_types": _layer_types(slides),
        "sliding_window": fields.get("attention.sliding_window", int),
        "head_dim": fields.get("attention.key_length_swa", int, size),
        "global_head_dim": size,
        "num_key_value_heads": kv_heads[sliding[0]],
        "num_global_key_value_heads": kv_heads[full[0]] if full else None,
        "attention_k_eq_v": any(i < num_own and f"blk.{i}.attn_v.weight" not in header.tensors for i in full),
        "num_kv_shared_layers": number - num_own,
        "use_double_wide_mlp": len({*widths}) > 1,
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": fields.get("final_logit_softcapping", float, None),
        "rope_parameters": _turns_of_gemma4(fields, size),
        **_experts_of_gemma4(fields),
    }


def _turns_of_gemma4(fields: Fields, size: int) -> dict[str, Any]:
    """Return how heads turn; those that see all turn in part, which a tensor says by factors of frequencies."""
    fields.only("rope.scaling.type", "none")
    entry = fields.header.tensors.get("rope_freqs.weight")
    if entry is None:
        raise ValueError(f"tensor rope_freqs.weight is missing from {fields.header.path}")
    factors = floats_of(fields.header.bytes_of(entry), entry.kind.name).ravel()
    turned = int((factors == 1).sum())
    if len(factors) != size // 2 or not (factors[:turned] == 1).all() or (factors[turned:] < 1e29).any():
        raise ValueError(
            f"tensor rope_freqs.weight in {fields.header.path} must be {size // 2} numbers, 1 for frequencies that are "
            "kept and then 1e30 for others, got others"
        )
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turned / size,
            "rope_theta": fields.get("rope.freq_base", float, 1e6),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": fields.get("rope.freq_base_swa", float, 1e4)},
    }


def _experts_of_gemma4(fields: Fields) -> dict[str, Any]:
    if not fields.get("expert_count", int, 0):
        return {}
    found = _experts(fields)
    return {"enable_moe_block": True, "top_k_experts": found.pop("num_experts_per_tok"), **found}


def _phi3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    rotary = fields.get("rope.dimension_count", int, config["head_dim"])
    lists = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    found = {
        "sliding_window": fields.get("attention.sliding_window", int, 0) or None,
        "partial_rotary_factor": rotary / config["head_dim"],
    }
    header = fields.header
    is_scaled = fields.get("rope.scaling.type", str, "none") == "longrope"
    if not (is_scaled or any(tensor in header.tensors for tensor in lists.values())):
        return found
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "attention_factor": fields.get("rope.scaling.attn_factor", float),
    }
    for name, tensor in lists.items():
        if tensor not in header.tensors:
            raise ValueError(f"tensor {tensor} is missing from {header.path}")
        entry = header.tensors[tensor]
        scaling[name] = floats_of(header.bytes_of(entry), entry.kind.name).ravel().tolist()
    length = fields.get("rope.scaling.original_context_length", int)
    return found | {"rope_scaling": scaling, "original_max_position_embeddings": length}


def _smollm3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention.sliding_window", 0)
    return {"no_rope_layer_interval": 4, "mlp_bias": _has_mlp_bias(fields)}


def _granite(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention.sliding_window", 0)
    fields.only("rope.scaling.finetuned", True)  # false stands for layers without rotary positions
    return _factors_of_granite(fields) | {"mlp_bias": _has_mlp_bias(fields)}


def _granite_hybrid(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "granitemoehybrid",
        **mamba.sizes_of_granite(fields, config),
        **_factors_of_granite(fields),
    }


def _factors_of_granite(fields: Fields) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.get("attention.scale", float),
        "embedding_multiplier": fields.get("embedding_scale", float, 1.0),
        "residual_multiplier": fields.get("residual_scale", float, 1.0),
        "logits_scaling": fields.get("logit_scale", float, 1.0),
    }


def _experts(fields: Fields, number: str = "num_experts") -> dict[str, Any]:
    """Return the sizes of experts; the field of config.json with their number has the name `number`."""
    size = fields.get("expert_feed_forward_length", int, None) or fields.get("feed_forward_length", int)
    return {
        number: fields.get("expert_count", int),
        "num_experts_per_tok": fields.get("expert_used_count", int),
        "moe_intermediate_size": size,
    }


def _llama(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    common = _with_yarn(fields, config)
    if not fields.get("expert_count", int, 0):
        return common
    found = common | _experts(fields, "num_local_experts")
    return found | {"model_type": "mixtral", "intermediate_size": found.pop("moe_intermediate_size")}


def _llama4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention.sliding_window", CHUNK_OF_LLAMA4)
    found = _experts(fields, "num_local_experts")
    return found | {
        "model_type": "llama4_text",
        "intermediate_size": found.pop("moe_intermediate_size"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": fields.get("interleave_moe_layer_step", int, 1),
        "attention_chunk_size": CHUNK_OF_LLAMA4,
        "use_qk_norm": found["num_local_experts"] != EXPERTS_OF_MAVERICK,
    }


def _mistral3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    scaling = _with_yarn(fields, config).get("rope_scaling")
    if scaling is None:  # Mistral Small 3
        fields.only("attention.temperature_scale", 0.0)
        return {"model_type": "mistral", "sliding_window": None}
    table = scaling | {
        "rope_theta": config["rope_theta"],
        "llama_4_scaling_beta": fields.get("attention.temperature_scale", float, 0.0),
        "mscale": 1.0,
        "mscale_all_dim": fields.get("rope.scaling.yarn_log_multiplier", float, 0.0),
    }
    return {"model_type": "ministral3", "rope_scaling": None, "rope_parameters": table}


def _minimax_m2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("expert_gating_func", 2)  # sigmoids
    found = _without_window(fields, config) | _experts(fields, "num_local_experts")
    return found | {
        "model_type": "minimax_m2",
        "intermediate_size": found.pop("moe_intermediate_size"),
        "rotary_dim": fields.get("rope.dimension_count", int, config["head_dim"]),
    }


def _qwen3_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return _with_yarn(fields, config) | _experts(fields) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def _olmo2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    if not fields.get("attention.sliding_window", int, 0):
        return _with_yarn(fields, config)
    fields.only("rope.scaling.attn_factor", 1.0)
    base, default = {"rope_theta": config["rope_theta"]}, {"rope_type": "default"}
    full = fields.yarn() or config["rope_scaling"] or default
    turns = {"full_attention": full, "sliding_attention": default}
    return _three_of_four_slide(fields, config) | {
        "model_type": "olmo3",
        "rope_scaling": None,
        "rope_parameters": {kind: turn | base for kind, turn in turns.items()},
    }


def _three_of_four_slide(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the windows of layers; where the file does not say which layers have them, every fourth has none."""
    window, number = fields.get("attention.sliding_window", int, 0), config["num_hidden_layers"]
    slides = fields.slides(number, [(i + 1) % 4 != 0 for i in range(number)]) if window else [False] * number
    return {"sliding_window": window or None, "layer_types": _layer_types(slides)}


def _seed_oss(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    has_out_bias = "blk.0.attn_output.bias" in fields.header.tensors
    found = {"attention_out_bias": has_out_bias, "mlp_bias": _has_mlp_bias(fields)}
    return _without_window(fields, config) | found


def _ernie4_5(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return _without_window(fields, config) | {"use_bias": config["attention_bias"]}


def _ernie4_5_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    found = _without_window(fields, config) | _experts(fields, "moe_num_experts")
    return found | {
        "model_type": "ernie4_5_moe",
        "moe_k": found.pop("num_experts_per_tok"),
        "moe_num_shared_experts": fields.get("expert_shared_count", int, 0),
        "moe_layer_start_index": fields.get("leading_dense_block_count", int, 0),
        "moe_layer_interval": fields.get("interleave_moe_layer_step", int, 1),
    }


def _layer_types(slides: Sequence[bool]) -> list[str]:
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _glm4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    turned = fields.get("rope.dimension_count", int, config["head_dim"])
    return _with_yarn(fields, config) | {"partial_rotary_factor": turned / config["head_dim"]}


def _glm4_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention.sliding_window", 0)
    fields.only("expert_gating_func", 2)  # sigmoids
    number = fields.get("nextn_predict_layers", int, 0)
    return _experts(fields, "n_routed_experts") | {
        "model_type": "glm4_moe",
        "num_hidden_layers": config["num_hidden_layers"] - number,
        "num_nextn_predict_layers": number,
        "n_shared_experts": fields.get("expert_shared_count", int, 1),
        "first_k_dense_replace": fields.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
        "n_group": fields.get("expert_group_count", int, 1),
        "topk_group": fields.get("expert_group_used_count", int, 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.header.tensors,
        "partial_rotary_factor": fields.get("rope.dimension_count", int, config["head_dim"]) / config["head_dim"],
    }


def _deepseek2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("expert_gating_func", 2)  # sigmoids
    number = config["num_hidden_layers"]
    if f"blk.{number - 1}.exp_probs_b.bias" not in fields.header.tensors:
        raise ValueError(
            f"{fields.header.path} must have routers of sigmoids with corrections, as DeepSeek V3 has them, got none"
        )
    return {
        **latents.sizes(fields, config),
        **_experts(fields, "n_routed_experts"),
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        "n_shared_experts": fields.get("expert_shared_count", int),
        "first_k_dense_replace": fields.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": fields.get("expert_weights_scale", float, 1.0),
        "norm_topk_prob": fields.get("expert_weights_norm", bool, False),
        "n_group": fields.get("expert_group_count", int, 1),
        "topk_group": fields.get("expert_group_used_count", int, 1),
    }


def _gpt_oss(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    sizes = _experts(fields, "num_local_experts")
    found = sizes | {
        "model_type": "gpt_oss",
        "intermediate_size": sizes.pop("moe_intermediate_size"),
        "sliding_window": fields.get("attention.sliding_window", int),
    }
    scaling = fields.yarn()
    return found if scaling is None else found | {"rope_scaling": scaling | {"truncate": False}}  # files do not say it


def _qwen3_5(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text", **delta_nets.sizes(fields, config)}


def _qwen3_5_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("expert_weights_norm", True)
    return {
        **delta_nets.sizes(fields, config),
        **_experts(fields),
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": fields.get("expert_shared_feed_forward_length", int),
    }


def _as_stored(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    yield name, place


def _corrections_as_row(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    is_row = name.endswith("e_score_correction_bias")
    yield name, replace(place, own_shape=(1, place.entry.shape[-1])) if is_row else place


def _has_mlp_bias(fields: Fields) -> bool:
    return "blk.0.ffn_gate.bias" in fields.header.tensors


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture store a model."""

    fields: Callable[[Fields, dict[str, Any]], dict[str, Any]] = _without_window  # more fields of config.json
    names: tuple[tuple[str, str], ...] = ()  # of tensors of a layer, where they differ from `OF_LAYER`
    has_halves_between: bool = False  # whether the halves of each head of queries and keys lie between each other
    has_norm_offset: bool = False  # whether the files store one more than the scale of a norm
    has_partial_rotary: bool = False  # whether a part of each head may turn
    scalings: tuple[str, ...] = ()  # kinds of rotary scaling beside linear, whose fields `fields` reads
    has_experts: bool = False  # whether layers may have experts, as one tensor of all
    has_latents: bool = False  # whether keys and values are made of latents, and have other sizes
    has_own_rope: bool = False  # whether `fields` reads how heads turn
    has_kinds_of_layers: bool = False  # whether layers may lack attention or an MLP
    has_sizes_of_layers: bool = False  # whether layers may have different numbers of heads and widths
    has_ordered_tokens: bool = False  # whether merges follow the ids of tokens and not their scores
    # The tensors of transformers that a tensor with such a name holds, given config.json.
    holds: Callable[[str, Place, dict[str, Any]], Iterator[tuple[str, Place]]] = _as_stored

    @property
    def of_layer(self) -> dict[str, str]:
        """The names of the tensors of a layer in transformers, by their names in GGUF."""
        return OF_LAYER | dict(self.names)

    def parts(self, name: str, place: Place, config: dict[str, Any]) -> dict[str, Place]:
        """Return the tensors of transformers that a tensor holds, by name."""
        return dict(self.holds(name, place, config))


POST_NORMS = ("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")
GEMMA_NORMS = (("ffn_norm", "pre_feedforward_layernorm"), *POST_NORMS)
OF_LLAMA4 = (
    *((f"ffn_{name}", f"feed_forward.{name}_proj") for name in ("gate", "up", "down")),
    *((f"ffn_{name}_exps", f"feed_forward.experts.*.{name}_proj") for name in ("gate", "up", "down")),
    *((f"ffn_{name}_shexp", f"feed_forward.shared_expert.{name}_proj") for name in ("gate", "up", "down")),
    ("ffn_gate_inp", "feed_forward.router"),
)
# The star stands for the number of an expert.
OF_EXPERTS = (
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.*.gate_proj"),
    ("ffn_up_exps", "mlp.experts.*.up_proj"),
    ("ffn_down_exps", "mlp.experts.*.down_proj"),
)
OF_MIXTRAL = (
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.*.w1"),
    ("ffn_up_exps", "block_sparse_moe.experts.*.w3"),
    ("ffn_down_exps", "block_sparse_moe.experts.*.w2"),
)
OF_MINIMAX = (*OF_MIXTRAL, ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"))
OF_GEMMA4 = (
    *GEMMA_NORMS,
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("layer_output_scale.weight", "layer_scalar"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("ffn_gate_inp", "router.proj"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps", "experts.*.gate_up_proj"),
    ("ffn_down_exps", "experts.*.down_proj"),
)
OF_SHARED = tuple((f"ffn_{name}_shexp", f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down"))
OF_GLM = (
    *(("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"), POST_NORMS[0]),
    *OF_SHARED,
    *((f"nextn.{name}", name) for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")),
    *((f"nextn.shared_head_{name}", f"shared_head.{name}") for name in ("head", "norm")),
)
OF_GLM4 = (
    ("ffn_up", "mlp.gate_up_proj"),
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
)
OF_ERNIE = (("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias"), *OF_SHARED)
OF_GPT_OSS = (
    ("attn_sinks.weight", "self_attn.sinks"),
    POST_NORMS[0],
    *((f"ffn_{name}_exps.bias", f"mlp.experts.{name}_proj_bias") for name in ("gate", "up", "down")),
    ("ffn_gate_inp", "mlp.router"),
)
QWEN35 = Architecture(
    fields=_qwen3_5,
    names=delta_nets.OF_LAYER,
    has_norm_offset=True,
    has_partial_rotary=True,
    holds=partial(delta_nets.in_order, is_tiled=True),
)
QWEN35_MOE = replace(QWEN35, fields=_qwen3_5_moe, names=OF_EXPERTS + delta_nets.OF_LAYER, has_experts=True)
NEMOTRON_H = Architecture(
    fields=mamba.sizes_of_nemotron,
    names=mamba.OF_NEMOTRON,
    has_halves_between=True,
    has_partial_rotary=True,  # heads do not turn, and the field says something else
    has_experts=True,
    has_own_rope=True,
    has_kinds_of_layers=True,
    holds=mamba.of_nemotron,
)
ARCHITECTURES = {
    "llama": Architecture(
        fields=_llama,
        names=OF_MIXTRAL,
        has_halves_between=True,
        scalings=("yarn",),
        has_experts=True,
    ),
    "llama4": Architecture(fields=_llama4, names=OF_LLAMA4, has_experts=True),
    "minimax-m2": Architecture(fields=_minimax_m2, names=OF_MINIMAX, has_partial_rotary=True, has_experts=True),
    "mistral3": Architecture(fields=_mistral3, has_halves_between=True, scalings=("yarn",)),
    "qwen2": Architecture(fields=_with_yarn, scalings=("yarn",)),
    "qwen3": Architecture(fields=_with_yarn, scalings=("yarn",)),
    "qwen3moe": Architecture(fields=_qwen3_moe, names=OF_EXPERTS, scalings=("yarn",), has_experts=True),
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": replace(QWEN35_MOE, holds=partial(delta_nets.in_order, is_tiled=False)),
    "glm4": Architecture(fields=_glm4, names=OF_GLM4, has_partial_rotary=True, scalings=("yarn",)),
    "glm4moe": Architecture(fields=_glm4_moe, names=OF_EXPERTS + OF_GLM, has_partial_rotary=True, has_experts=True),
    "deepseek2": Architecture(
        fields=_deepseek2,
        names=OF_EXPERTS + latents.OF_LAYER,
        has_partial_rotary=True,
        has_experts=True,
        has_latents=True,
        has_own_rope=True,
    ),
    "gpt-oss": Architecture(fields=_gpt_oss, names=OF_EXPERTS + OF_GPT_OSS, scalings=("yarn",), has_experts=True),
    "gemma2": Architecture(
        fields=_gemma2,
        names=GEMMA_NORMS,
        has_norm_offset=True,
        has_ordered_tokens=True,
    ),
    "gemma3": Architecture(fields=_gemma3, names=GEMMA_NORMS, has_norm_offset=True, has_ordered_tokens=True),
    "gemma4": Architecture(
        fields=_gemma4,
        names=OF_GEMMA4,
        has_partial_rotary=True,
        has_experts=True,
        has_own_rope=True,
        has_sizes_of_layers=True,
    ),
    "granite": Architecture(fields=_granite, has_halves_between=True),
    "granitehybrid": Architecture(
        fields=_granite_hybrid,
        names=OF_MIXTRAL + mamba.OF_GRANITE,
        has_halves_between=True,
        has_experts=True,
        has_kinds_of_layers=True,
        holds=mamba.as_vectors,
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "exaone4": Architecture(fields=_three_of_four_slide, names=POST_NORMS),
    "ernie4_5": Architecture(fields=_ernie4_5),
    "ernie4_5-moe": Architecture(
        fields=_ernie4_5_moe,
        names=OF_EXPERTS + OF_ERNIE,
        has_experts=True,
        holds=_corrections_as_row,
    ),
    "olmo2": Architecture(fields=_olmo2, names=POST_NORMS, scalings=("yarn",)),
    "seed_oss": Architecture(fields=_seed_oss, names=POST_NORMS[:1]),
    "phi3": Architecture(
        fields=_phi3,
        names=(("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")),
        has_partial_rotary=True,
        scalings=("longrope",),
    ),
    "smollm3": Architecture(fields=_smollm3, has_halves_between=True),
}


def architecture_of(header: Header) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ValueError: the file names none, or one that is not known.
    """
    name = header.fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture in {header.path} must be one of {', '.join(ARCHITECTURES)}, which are "
            f"read from GGUF, got {name!r}"
        )
    return ARCHITECTURES[name]
