"""Dense architectures in GGUF: the fields of config.json that are not alike in all files, and names of tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specjax.models.gguf.blocks import floats_of
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.names import renamed
from specjax.models.gguf.places import Place
from specjax.models.layer import XIELU_BETA, XIELU_EPSILON

POST_NORMS = ("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")
OF_GLM4 = (
    ("ffn_up", "mlp.gate_up_proj"),
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
)
OF_CHATGLM = ("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")
OF_APERTUS = ("attn_norm", "attention_layernorm"), ("ffn_norm", "feedforward_layernorm")
ALPHAS = ("xielu.alpha_p", "mlp.act_fn.alpha_p"), ("xielu.alpha_n", "mlp.act_fn.alpha_n")
OF_PHI = (
    *(("attn_qkv", "self_attn.qkv_proj"), ("attn_output", "self_attn.dense")),
    *(("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")),
)
WHOLE_OF_PHI = {"model.norm": "model.final_layernorm"}
OF_FALCON = (
    *(("attn_qkv", "self_attention.query_key_value"), ("attn_output", "self_attention.dense")),
    *(("ffn_up", "mlp.dense_h_to_4h"), ("ffn_down", "mlp.dense_4h_to_h"), ("attn_norm_2", "ln_attn")),
)
WHOLE_OF_FALCON = {"model.embed_tokens": "model.word_embeddings", "model.norm": "model.ln_f"}
OF_HUNYUAN = ("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")


def without_window(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return no more fields; raise ValueError where the file has windows."""
    fields.only("attention.sliding_window", 0)
    return {}


def with_yarn(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of YaRN where the file has it."""
    scaling = fields.yarn()
    if scaling is not None:
        fields.only("rope.scaling.attn_factor", 1.0)
    return without_window(fields, config) | ({} if scaling is None else {"rope_scaling": scaling})


def as_qwen2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of the text part of Qwen2-VL and Qwen2.5-VL."""
    return with_yarn(fields, config) | {"model_type": "qwen2"}


def as_qwen3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of the text part of Qwen3-VL."""
    return with_yarn(fields, config) | {"model_type": "qwen3"}


def hunyuan(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of dense Hunyuan; the base of its rotation is stretched in the file."""
    return without_window(fields, config) | {"model_type": "hunyuan_v1_dense"}


def has_mlp_bias(fields: Fields) -> bool:
    """Return whether MLPs have biases."""
    return "blk.0.ffn_gate.bias" in fields.header.tensors


def layer_types(slides: Sequence[bool]) -> list[str]:
    """Return the kind of each layer, given which layers have windows."""
    return ["sliding_attention" if one else "full_attention" for one in slides]


def phi2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Phi-1, Phi-1.5 and Phi-2."""
    turned = fields.get("rope.dimension_count", int)
    return without_window(fields, config) | {
        "model_type": "phi",
        "layer_norm_eps": config["rms_norm_eps"],
        "partial_rotary_factor": turned / config["head_dim"],
    }


def of_phi(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    """Return the tensor of Phi that a tensor of a file holds."""
    yield renamed(name, WHOLE_OF_PHI), place


def falcon(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Falcon 7B, 40B and 180B."""
    fields.only("tensor_data_layout", "jploski")  # parts queries, keys and values of groups
    has_two_norms = "blk.0.attn_norm_2.weight" in fields.header.tensors
    if not has_two_norms and config["num_key_value_heads"] > 1:
        raise ValueError(
            f"falcon.attention.head_count_kv in {fields.header.path} must be 1 where layers have one norm, because "
            f"files of Falcon 2 lack the base of its rotation, got {config['num_key_value_heads']}"
        )
    return without_window(fields, config) | {
        "new_decoder_architecture": has_two_norms,
        "num_kv_heads": config["num_key_value_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


def of_falcon(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    """Return the tensor of Falcon that a tensor of a file holds, with the rows of each key head together."""
    name = renamed(name, WHOLE_OF_FALCON).replace("model.layers.", "model.h.")
    if config["new_decoder_architecture"]:
        name = name.replace("input_layernorm", "ln_mlp")
    if name.endswith("query_key_value.weight"):
        groups, size = config["num_kv_heads"], config["head_dim"]
        own = np.arange(groups * size).reshape(groups, -1)
        queries = np.arange(config["num_attention_heads"] * size)
        parts = queries.reshape(groups, -1), queries.size + own, queries.size + own.size + own
        place = replace(place, rows=np.concatenate(parts, axis=1).ravel())
    yield name, place


def olmo(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of OLMo 1, whose norms have one epsilon."""
    fields.only("attention.layer_norm_epsilon", float(np.float32(1e-5)))
    bound = fields.get("attention.clamp_kqv", float, None)
    return without_window(fields, config) | {"attention_bias": False, "clip_qkv": bound}


def nemotron(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Nemotron-4 and Minitron."""
    heads, size = config["num_attention_heads"], config["head_dim"]
    if heads * size != config["hidden_size"]:
        raise ValueError(
            f"nemotron.attention.key_length in {fields.header.path} must be embedding_length / head_count, because "
            f"files with other heads say wrongly how many of their numbers turn, got {size}"
        )
    found = {"norm_eps": config["rms_norm_eps"], "mlp_bias": "blk.0.ffn_up.bias" in fields.header.tensors}
    turned = fields.get("rope.dimension_count", int)
    return without_window(fields, config) | found | {"partial_rotary_factor": turned / size}


def three_of_four_slide(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the windows of layers; where the file does not say which layers have them, every fourth has none."""
    window, number = fields.get("attention.sliding_window", int, 0), config["num_hidden_layers"]
    slides = fields.slides(number, [(i + 1) % 4 != 0 for i in range(number)]) if window else [False] * number
    return {"sliding_window": window or None, "layer_types": layer_types(slides)}


def mistral3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Ministral 3 and Mistral Small 3."""
    scaling = with_yarn(fields, config).get("rope_scaling")
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


def chatglm(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of GLM-4-9B."""
    bias = config["attention_bias"] or "blk.0.attn_qkv.bias" in fields.header.tensors
    return glm4(fields, config) | {"model_type": "glm", "attention_bias": bias}


def glm4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of GLM-4-0414."""
    fields.only("nextn_predict_layers", 0)
    sections = f"{fields.architecture}.rope.dimension_sections"
    if sections in fields.header.fields:
        raise ValueError(
            f"{sections} in {fields.header.path} must be absent, because the queries and keys of GLM-4V have another "
            "order in GGUF, which is not read"
        )
    turned = fields.get("rope.dimension_count", int, config["head_dim"])
    return with_yarn(fields, config) | {"partial_rotary_factor": turned / config["head_dim"]}


def olmo2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of OLMo 2 and OLMo 3."""
    if not fields.get("attention.sliding_window", int, 0):
        return with_yarn(fields, config)
    fields.only("rope.scaling.attn_factor", 1.0)
    base, default = {"rope_theta": config["rope_theta"]}, {"rope_type": "default"}
    full = fields.yarn() or config["rope_scaling"] or default
    turns = {"full_attention": full, "sliding_attention": default}
    return three_of_four_slide(fields, config) | {
        "model_type": "olmo3",
        "rope_scaling": None,
        "rope_parameters": {kind: turn | base for kind, turn in turns.items()},
    }


def command_r(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Command R, Command R+ and Aya."""
    has_norms = "blk.0.attn_q_norm.weight" in fields.header.tensors
    found = _of_cohere(fields, config) | {"model_type": "cohere", "use_qk_norm": has_norms}
    return without_window(fields, config) | found


def cohere2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Command R7B and Command A."""
    number = config["num_hidden_layers"]
    slides = fields.slides(number, [(i + 1) % 4 != 0 for i in range(number)])
    windows = {"sliding_window": fields.get("attention.sliding_window", int), "layer_types": layer_types(slides)}
    return _of_cohere(fields, config) | windows


def _of_cohere(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the factor on logits and the epsilon of norms, under the names of Cohere."""
    return {"logit_scale": fields.get("logit_scale", float), "layer_norm_eps": config["rms_norm_eps"]}


def seed_oss(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Seed-OSS."""
    has_out_bias = "blk.0.attn_output.bias" in fields.header.tensors
    found = {"attention_out_bias": has_out_bias, "mlp_bias": has_mlp_bias(fields)}
    return without_window(fields, config) | found


def ernie4_5(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of dense ERNIE 4.5."""
    return without_window(fields, config) | {"use_bias": config["attention_bias"]}


def phi3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Phi-3 and Phi-4-mini."""
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


def apertus(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Apertus; raise ValueError where its activations have other constants."""
    for name, expected in (("xielu.beta", XIELU_BETA), ("xielu.eps", XIELU_EPSILON)):
        found = fields.numbers(name, config["num_hidden_layers"])
        if not np.allclose(found, expected, rtol=0.01, atol=0):  # in few bits
            raise ValueError(f"{name} in {fields.header.path} must be {expected} for each layer, got {found}")
    scaling = config["rope_scaling"] or {"rope_type": "default"}  # without a table Apertus has another one
    return without_window(fields, config) | {"rope_scaling": scaling}


def smollm3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of SmolLM3."""
    fields.only("attention.sliding_window", 0)
    return {"no_rope_layer_interval": 4, "mlp_bias": has_mlp_bias(fields)}


def granite(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of dense Granite."""
    fields.only("attention.sliding_window", 0)
    fields.only("rope.scaling.finetuned", True)  # false stands for layers without rotary positions
    return factors_of_granite(fields) | {"mlp_bias": has_mlp_bias(fields)}


def granite_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return more fields of config.json of Granite 3 with experts."""
    return granite(fields, config) | {
        "model_type": "granitemoeshared",
        "num_local_experts": fields.get("expert_count", int),
        "num_experts_per_tok": fields.get("expert_used_count", int),
        "shared_intermediate_size": fields.get("expert_shared_feed_forward_length", int, 0),
    }


def factors_of_granite(fields: Fields) -> dict[str, Any]:
    """Return the factors on embeddings, scores, sublayers and logits of Granite."""
    return {
        "attention_multiplier": fields.get("attention.scale", float),
        "embedding_multiplier": fields.get("embedding_scale", float, 1.0),
        "residual_multiplier": fields.get("residual_scale", float, 1.0),
        "logits_scaling": fields.get("logit_scale", float, 1.0),
    }
