"""GGUF files of several families, written by the package gguf, against checkpoints of the same floats."""

import gguf_files
import numpy as np
import pytest
from families import ALL, LENGTHS, LONGROPE, PARTIAL, YARN, shapes, tokens, write
from families import make_tensor as tensor_of
from test_families import TOLERANCE, difference, whole_logits
from test_gguf_hybrids import write_floats

from specjax.models import Checkpoint, load
from specjax.models.gguf.blocks import matrix_of
from specjax.models.gguf.header import read_header
from specjax.models.quantized import dequantize
from specjax.models.rope import Llama3Scaling, QueryScaling

gguf = pytest.importorskip("gguf")

SMALL = {"rope_scaling": None, "sliding_window": 5}
TURNS = {"rope_parameters": ALL["gemma4"]["rope_parameters"]}
GEMMA4 = {
    "add_sliding_window": 5,
    "add_sliding_window_pattern": [True, False],
    "add_shared_kv_layers": 0,
    "add_embedding_length_per_layer_input": 0,
    "add_key_length": 24,
    "add_value_length": 24,
    "add_key_length_swa": 16,
    "add_value_length_swa": 16,
}
LONG = {  # as files of Qwen3 for 128,000 positions have it
    "add_rope_scaling_type": gguf.RopeScalingType.YARN,
    "add_rope_scaling_factor": 4.0,
    "add_rope_scaling_orig_ctx_len": 16,
}
OF_LONG = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
LAGUNA = {
    "add_expert_count": 6,
    "add_expert_used_count": 3,
    "add_expert_feed_forward_length": 20,
    "add_expert_shared_feed_forward_length": 24,
    "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
    "add_expert_weights_norm": True,
}
OF_FALCON = {"add_layer_norm_eps": 1e-5, "add_tensor_data_layout": "jploski", "add_feed_forward_length": 48}
WHOLE = {"full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}
UNSCALED = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 64}
OF_LATENTS = {
    "add_head_count_kv": 1,
    "add_q_lora_rank": 20,
    "add_kv_lora_rank": 12,
    "add_key_length": 16,
    "add_value_length": 12,
    "add_key_length_mla": 10,
    "add_value_length_mla": 10,
    "add_rope_dimension_count": 4,
    "add_leading_dense_block_count": 1,
    "add_expert_count": 6,
    "add_expert_used_count": 3,
    "add_expert_feed_forward_length": 20,
    "add_expert_shared_count": 1,
    "add_expert_weights_scale": 1.5,
    "add_expert_weights_norm": True,
    "add_rope_scaling_type": gguf.RopeScalingType.YARN,
    "add_rope_scaling_factor": 4.0,
    "add_rope_scaling_orig_ctx_len": 16,
    "add_rope_scaling_yarn_beta_fast": 2.0,
    "add_rope_scaling_yarn_log_mul": 0.07,
}
# By architecture: the case of families.py, changes of its fields, and the calls of the writer with their values.
CASES = {
    "gemma3": (
        "gemma3",
        SMALL | {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 16},
        {"add_sliding_window": 5},
    ),
    "phi3": (
        "phi4_mini",
        {"rope_scaling": LONGROPE | PARTIAL | {"attention_factor": 1.25}, "original_max_position_embeddings": 8},
        {
            "add_rope_dimension_count": 6,
            "add_rope_scaling_orig_ctx_len": 8,
            "add_rope_scaling_attn_factors": 1.25,
            "add_rope_scaling_type": gguf.RopeScalingType.LONGROPE,
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "gemma4": ("gemma4", {}, GEMMA4 | {"add_head_count_kv": [2, 1], "add_final_logit_softcapping": 8.0}),
    "gemma4 small": (
        "gemma4_small",
        TURNS,
        GEMMA4
        | {
            "add_sliding_window_pattern": 2 * [True, True, False],
            "add_shared_kv_layers": 3,
            "add_embedding_length_per_layer_input": 6,
            "add_feed_forward_length": 3 * [48] + 3 * [96],
            "add_final_logit_softcapping": 8.0,
        },
    ),
    "gemma4 with experts": (
        "gemma4_moe",
        TURNS,
        GEMMA4 | {"add_expert_count": 6, "add_expert_used_count": 3, "add_expert_feed_forward_length": 20},
    ),
    "llama": ("mixtral", {"sliding_window": None}, {"add_expert_count": 4, "add_expert_used_count": 2}),
    "qwen3moe": (
        "qwen3_moe_normed",
        {"intermediate_size": 20},
        {"add_expert_count": 8, "add_expert_used_count": 3, "add_expert_feed_forward_length": 20},
    ),
    "qwen3 with yarn": (
        "qwen3",
        {"rope_scaling": OF_LONG["rope_scaling"] | {"attention_factor": 1.5}},
        LONG | {"add_rope_scaling_yarn_attn_factor": 1.5},
    ),
    "llama with yarn": ("llama", OF_LONG, LONG),
    "qwen3moe with yarn": (
        "qwen3_moe_normed",
        {"intermediate_size": 20} | OF_LONG,
        {"add_expert_count": 8, "add_expert_used_count": 3, "add_expert_feed_forward_length": 20} | LONG,
    ),
    "apertus": (
        "apertus",
        {"rope_scaling": {"rope_type": "default"}},
        {"add_xielu_beta": [0.5] * 2, "add_xielu_eps": [-1e-6] * 2},
    ),
    "glm4moe": (
        "glm4_moe_groups",
        {},
        {
            "add_expert_count": 8,
            "add_expert_used_count": 3,
            "add_expert_feed_forward_length": 20,
            "add_expert_shared_count": 2,
            "add_expert_group_count": 4,
            "add_expert_group_used_count": 2,
            "add_expert_weights_scale": 1.5,
            "add_expert_weights_norm": False,
            "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "add_leading_dense_block_count": 1,
            "add_nextn_predict_layers": 1,
            "add_rope_dimension_count": 4,
        },
    ),
    "dots1": (
        "dots1",
        {"sliding_window": None, "max_window_layers": 62},
        {
            "add_expert_count": 8,
            "add_expert_used_count": 3,
            "add_expert_feed_forward_length": 20,
            "add_expert_shared_count": 2,
            "add_expert_group_count": 4,
            "add_expert_group_used_count": 2,
            "add_expert_weights_scale": 1.5,
            "add_expert_weights_norm": True,
            "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "add_leading_dense_block_count": 1,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {"swiglu_limit": 7.0},
        {
            "add_expert_count": 4,
            "add_expert_used_count": 3,
            "add_expert_feed_forward_length": 48,
            "add_sliding_window": 5,
            "add_rope_scaling_type": gguf.RopeScalingType.YARN,
            "add_rope_scaling_factor": 4.0,
            "add_rope_scaling_orig_ctx_len": 16,
            "add_rope_scaling_yarn_beta_fast": 2.0,
        },
    ),
    "llama4": (
        "llama4",
        {
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "intermediate_size": 20,
            "intermediate_size_mlp": 48,
        },
        {"add_expert_count": 6, "add_expert_used_count": 1, "add_expert_feed_forward_length": 20}
        | {"add_feed_forward_length": 48, "add_interleave_moe_layer_step": 1},
    ),
    "mistral3": (
        "ministral3",
        {
            "sliding_window": None,
            "rope_parameters": ALL["ministral3"]["rope_parameters"] | {"truncate": True},
        },
        {
            "add_attn_temperature_scale": 0.5,
            "add_rope_scaling_type": gguf.RopeScalingType.YARN,
            "add_rope_scaling_factor": 4.0,
            "add_rope_scaling_orig_ctx_len": 4,
            "add_rope_scaling_yarn_beta_fast": 0.5,
            "add_rope_scaling_yarn_beta_slow": 0.1,
            "add_rope_scaling_yarn_log_mul": 1.0,
            "add_rope_freq_base": 500.0,
        },
    ),
    "mistral3 small": (
        "ministral3",
        {
            "model_type": "mistral",
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        {"add_rope_freq_base": 500.0},
    ),
    "glm4": ("glm4", {}, {"add_rope_dimension_count": 4}),
    "minimax-m2": (
        "minimax_m2",
        {},
        {
            "add_expert_count": 6,
            "add_expert_used_count": 3,
            "add_expert_feed_forward_length": 48,
            "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
            "add_rope_dimension_count": 8,
        },
    ),
    "olmo2 with windows": (
        "olmo3",
        {},
        {
            "add_sliding_window": 5,
            "add_sliding_window_pattern": [True, False],
            "add_rope_scaling_type": gguf.RopeScalingType.YARN,
            "add_rope_scaling_factor": 4.0,
            "add_rope_scaling_orig_ctx_len": 16,
            "add_rope_scaling_yarn_beta_fast": 2.0,
            "add_rope_freq_base": 500.0,
        },
    ),
    "seed_oss": ("seed_oss", {}, {}),
    "phi2": (
        "phi_default",
        {"hidden_act": "gelu_new", "rope_theta": 10000.0},
        {"add_layer_norm_eps": 1e-5, "add_rope_dimension_count": 4},
    ),
    "falcon": (
        "falcon",
        {},
        OF_FALCON | {"add_head_count_kv": 2, "add_feed_forward_length": 128} | {"add_layer_norm_eps": 1e-3},
    ),
    "falcon with one key head": ("falcon_multi_query", {}, OF_FALCON | {"add_head_count_kv": 1}),
    "olmo": (
        "olmo_plain",
        {"clip_qkv": 1.5, "hidden_act": "silu"},
        {"add_layer_norm_eps": 1e-5, "add_clamp_kqv": 1.5},
    ),
    "nemotron": (
        "nemotron_plain",
        {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
        {"add_layer_norm_eps": 1e-5, "add_rope_dimension_count": 4}
        | {"add_rope_scaling_type": gguf.RopeScalingType.NONE},
    ),
    "command-r": ("cohere", {}, {"add_layer_norm_eps": 1e-3, "add_logit_scale": 0.8333}),
    "cohere2": (
        "cohere2",
        {},
        {"add_layer_norm_eps": 1e-5, "add_logit_scale": 0.25, "add_sliding_window": 5, "add_rope_dimension_count": 8}
        | {"add_rope_scaling_type": gguf.RopeScalingType.NONE},
    ),
    "exaone4": (
        "exaone4",
        {},
        {"add_sliding_window": 5, "add_sliding_window_pattern": [True, False, True]},
    ),
    "exaone4 full": ("exaone4_full", {}, {}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {},
        {
            "add_expert_count": 6,
            "add_expert_used_count": 3,
            "add_expert_feed_forward_length": 20,
            "add_expert_shared_count": 2,
            "add_leading_dense_block_count": 1,
            "add_interleave_moe_layer_step": 1,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}, {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}, {}),
    "gemma": ("gemma", {}, {}),
    "chatglm": ("glm", {}, {"add_rope_dimension_count": 4}),
    "hunyuan-dense": ("hunyuan", {}, {"add_rope_freq_base": 500.0 * 50.0 ** (16 / 14)}),
    "hunyuan-moe": (
        "hunyuan_moe",
        {},
        {
            "add_expert_count": 6,
            "add_expert_used_count": 3,
            "add_expert_feed_forward_length": 48,
            "add_expert_shared_feed_forward_length": 48,
            "add_expert_shared_count": 1,
        },
    ),
    "qwen2moe": (
        "qwen2_moe",
        {"num_hidden_layers": 1, "mlp_only_layers": []},
        {
            "add_expert_count": 6,
            "add_expert_used_count": 2,
            "add_expert_feed_forward_length": 20,
            "add_expert_shared_feed_forward_length": 24,
        },
    ),
    "olmoe": ("olmoe", {}, {"add_expert_count": 6, "add_expert_used_count": 3}),
    "afmoe": (
        "afmoe",
        {},
        {
            "add_expert_count": 6,
            "add_expert_used_count": 2,
            "add_expert_feed_forward_length": 20,
            "add_expert_shared_count": 2,
            "add_expert_weights_norm": True,
            "add_expert_weights_scale": 1.5,
            "add_leading_dense_block_count": 1,
            "add_sliding_window": 5,
            "add_sliding_window_pattern": [True, False, True],
        },
    ),
    "laguna": (
        "laguna",
        {},
        LAGUNA
        | {
            "add_head_count": [4, 8],
            "add_sliding_window": 5,
            "add_rope_dimension_count": 8,
            "add_rope_freq_base_swa": 20.0,
            "add_rope_scaling_type": gguf.RopeScalingType.YARN,
            "add_rope_scaling_factor": 4.0,
            "add_rope_scaling_orig_ctx_len": 16,
            "add_rope_scaling_yarn_beta_fast": 2.0,
            "add_expert_weights_scale": 2.5,
            "add_leading_dense_block_count": 1,
        },
    ),
    "laguna of elements": (
        "laguna_elements",
        {"layer_types": 2 * ["full_attention"], "rope_parameters": WHOLE},
        LAGUNA,
    ),
    "mistral4": (
        "mistral4",
        {},
        OF_LATENTS
        | {
            "add_expert_shared_count": 2,
            "add_expert_weights_scale": 1.0,
            "add_attn_temperature_scale": 0.5,
            "add_rope_scaling_orig_ctx_len": 4,
            "add_rope_scaling_yarn_beta_fast": 0.5,
            "add_rope_scaling_yarn_beta_slow": 0.1,
            "add_rope_scaling_yarn_log_mul": 0.1,
        },
    ),
    "deepseek2 without corrections": (
        "mistral4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, **UNSCALED}},
        {name: value for name, value in OF_LATENTS.items() if "scaling" not in name}
        | {"add_expert_shared_count": 2, "add_expert_weights_scale": 1.0}
        | {"add_expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX},
    ),
    "qwen2vl": ("qwen2", {}, {"add_rope_dimension_sections": [1, 1, 2, 0]}),
    "qwen3vl": ("qwen3", {}, {"add_rope_dimension_sections": [4, 2, 2, 0]}),
    "qwen3vlmoe": (
        "qwen3_moe_normed",
        {"intermediate_size": 20},
        {"add_expert_count": 8, "add_expert_used_count": 3, "add_expert_feed_forward_length": 20},
    ),
    "granite": (
        "granite",
        {},
        {
            "add_embedding_scale": 12.0,
            "add_residual_scale": 0.22,
            "add_attention_scale": 0.5,
            "add_logit_scale": 3.0,
        },
    ),
}


FAST = "qwen3moe", "qwen3 with yarn", "gemma4", "laguna", "apertus", "olmo", "falcon"  # of these


def name_in(names, name):
    """The name of a tensor in a file, as converters find it."""
    if name.endswith("e_score_correction_bias"):
        return names.get_name(name.replace("gate.moe_statics", "moe_statics").removesuffix("_bias")) + ".bias"
    if name.endswith("expert_bias"):
        return names.get_name(name) + ".bias"
    if name.endswith(".sinks"):
        return names.get_name(name) + ".weight"
    if name.endswith(("router.scale", "router.per_expert_scale")):  # of Gemma 4
        of = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        return f"blk.{name.split('.')[2]}.{of}.scale"
    if name.endswith("layer_scalar"):
        return names.get_name(name) + ".weight"
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


def apart(tensors, architecture):
    """Tensors with the gates and the up projections of experts apart, and outputs before inputs, as converters do."""
    found = {}
    for name, values in tensors.items():
        if ".experts." not in name:
            found[name] = values
            continue
        if ".feed_forward." in name:  # of Llama 4
            values = values.swapaxes(1, 2)
        elif ".mlp." not in name and ".block_sparse_moe." not in name:  # of Gemma 4
            found[f"{name}.weight"] = values
            continue
        is_gpt_oss = f"{name.removesuffix('_bias').removesuffix('_proj')}_proj_bias" in tensors
        end = "bias" if name.endswith("_bias") else "weight"
        name = name.removesuffix("_bias")
        if is_gpt_oss and end == "weight":
            values = values.swapaxes(1, 2)
        if name.endswith("gate_up_proj") and architecture != "mistral4":
            gate, up = (values[:, ::2], values[:, 1::2]) if is_gpt_oss else np.split(values, 2, axis=1)
            whole = name.removesuffix("gate_up_proj")
            found |= {f"{whole}gate_proj.{end}": gate, f"{whole}up_proj.{end}": up}
        else:
            found[f"{name}.{end}"] = values
    return found


def write_gguf(path, architecture, config, tensors, fields, of_config=(), **kinds):
    """Write a file with the names of the package; `kinds` are types of tensors by a part of their names."""
    writer = gguf.GGUFWriter(path, architecture)
    known = "afmoe" if architecture == "laguna" else architecture  # of newer releases of the package alone
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    common = {
        "add_block_count": config["num_hidden_layers"] + fields.get("add_nextn_predict_layers", 0),
        "add_context_length": config["max_position_embeddings"],
        "add_embedding_length": config["hidden_size"],
        "add_feed_forward_length": config.get("intermediate_size", 0),
        "add_head_count": config["num_attention_heads"],
        "add_head_count_kv": config.get("num_key_value_heads", 0),
        "add_layer_norm_rms_eps": config.get("rms_norm_eps", 1.0),  # LayerNorms have the field of `fields`
        "add_rope_freq_base": config["rope_theta"],
    }
    if config.get("head_dim") is not None:
        common |= {"add_key_length": config["head_dim"], "add_value_length": config["head_dim"]}
    for name, value in (common | fields).items():
        getattr(writer, name)(value)
    for sign in "pn" if architecture == "apertus" else "":
        alphas = [float(values[0]) for name, values in tensors.items() if name.endswith(f"act_fn.alpha_{sign}")]
        getattr(writer, f"add_xielu_alpha_{sign}")(alphas)
    for name, values in apart(tensors, architecture).items():
        part = name.split(".")[-2]
        if part == "act_fn":
            continue
        if architecture == "laguna":
            name = name.replace(".g_proj.", ".gate_proj.").replace("post_attention_layernorm", "pre_mlp_layernorm")
        if part == "query_key_value":  # the ones of each key head lie together in transformers
            groups = values.reshape(fields["add_head_count_kv"], -1, 8, values.shape[1])
            parts = np.split(groups, [groups.shape[1] - 2, groups.shape[1] - 1], axis=1)
            values = np.concatenate([x.reshape(-1, values.shape[1]) for x in parts])
        # The halves of each head lie between each other.
        if architecture in ("llama", "mistral3", "smollm3", "granite", "olmo") and part in heads:
            values = values.reshape(heads[part], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma", "gemma3", "nemotron") and name.endswith("norm.weight"):
            values = values + 1
        kind = kinds.get(part) if name.endswith("weight") else None
        if part == "kv_b_proj" and "add_key_length_mla" in fields:  # keys are turned
            keys, values = np.split(values.reshape(4, -1, values.shape[1]), [config["qk_nope_head_dim"]], axis=1)
            of_keys = names.get_name(name.replace("kv_b", "k_b"), try_suffixes=(".weight",))
            writer.add_tensor(of_keys, np.ascontiguousarray(keys.swapaxes(1, 2)))
            name = name.replace("kv_b", "v_b")
        values = np.ascontiguousarray(values[0] if part == "shared_expert_gate" else values)
        writer.add_tensor(name_in(names, name), values if kind is None else gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in dict(of_config).items():
        writer.add_tensor(name, values)
    if architecture == "gemma4":
        turns = config["rope_parameters"]
        turned = round(turns["full_attention"]["partial_rotary_factor"] * 12)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (12 - turned), np.float32))
        writer.add_float32("gemma4.rope.freq_base_swa", turns["sliding_attention"]["rope_theta"])
    if architecture == "phi3":
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(PARTIAL[f"{kind}_factor"], np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


def is_beyond(name, config):
    """Whether a tensor belongs to a layer that the config does not have."""
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= config["num_hidden_layers"]


@pytest.mark.parametrize(
    "architecture",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_file_computes_what_its_floats_do(architecture, tmp_path):
    case, changes, fields = CASES[architecture]
    config = ALL[case] | changes
    stored = {name: shape for name, shape in shapes(case).items() if not is_beyond(name, config)}
    tensors = {name: tensor_of(name, shape) for name, shape in stored.items()}
    floats = load(write_floats(tmp_path / "floats", config, tensors))
    architecture = architecture.partition(" ")[0]
    model = load(write_gguf(tmp_path / "model.gguf", architecture, config, tensors, fields))
    assert difference(whole_logits(model), np.asarray(whole_logits(floats))) <= TOLERANCE


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"rope_type": "linear", "factor": 4.0}),
        ({"add_rope_scaling_type": gguf.RopeScalingType.YARN, "add_rope_scaling_orig_ctx_len": 16}, "yarn"),
    ],
)
@pytest.mark.parametrize("window", [0, 5])
def test_scalings_of_olmo(window, fields, expected, tmp_path):
    """OLMo 2 scales all layers, and OLMo 3 those without windows."""
    case, _, given = CASES["olmo2 with windows"]
    of_window = {name: value for name, value in given.items() if "sliding" in name} if window else {}
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    fields = of_window | {"add_rope_scaling_factor": 4.0} | fields
    path = write_gguf(tmp_path / "model.gguf", "olmo2", ALL[case], tensors, fields)
    config = Checkpoint(path).config
    found = config.get("rope_parameters", dict)["full_attention"] if window else config.get("rope_scaling", dict)
    assert found["rope_type"] == "yarn" if expected == "yarn" else found.items() >= expected.items()


@pytest.mark.parametrize(("number", "factor"), [(6, 16.0), (128, None)])
def test_llama4_scout_and_maverick(number, factor, tmp_path):
    """The file of Scout has factors of its scaling. Maverick lacks the norms of queries and keys, and its scaling."""
    case, changes, fields = CASES["llama4"]
    config = ALL[case] | changes | {"head_dim": 16, "num_local_experts": number, "rope_theta": 5e5}
    of_scaling = {}
    if factor is not None:
        turns = 8192 * 5e5 ** -(np.arange(0, 16, 2) / 16) / (2 * np.pi)
        of_scaling["rope_freqs.weight"] = np.where(turns < 1, factor, 1).astype(np.float32)
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    for name in [name for name in tensors if ".experts." in name or ".router." in name]:
        tensors[name] = np.resize(tensors[name], (number, *tensors[name].shape[1:]))
    path = write_gguf(
        tmp_path / "model.gguf", "llama4", config, tensors, fields | {"add_expert_count": number}, of_config=of_scaling
    )
    found = load(path).apply.config
    assert found.rope.scaling == (None if factor is None else Llama3Scaling(factor, 1.0, 1.0, 8192))
    assert all(layer.mixer.has_unit_norms == (number != 128) for layer in found.each_layer)


@pytest.mark.parametrize(
    ("architecture", "case", "changes", "fields"),
    [("chatglm", "glm", {}, {"add_rope_dimension_count": 4}), ("phi2", *CASES["phi2"])],
)
def test_queries_keys_and_values_in_one_tensor(architecture, case, changes, fields, tmp_path):
    """As files have them that were converted before transformers had the family."""
    config = ALL[case] | changes
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    whole, joined = load(write_floats(tmp_path / "floats", config, tensors)), {}
    for name, values in tensors.items():
        if ".q_proj." in name:
            parts = [values, *(tensors[name.replace("q_proj", f"{kind}_proj")] for kind in "kv")]
            joined[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            joined[name] = values
    model = load(write_gguf(tmp_path / "model.gguf", architecture, config, joined, fields))
    assert difference(whole_logits(model), np.asarray(whole_logits(whole))) <= TOLERANCE


def mlp_first(name):
    """The name of a tensor of two layers where the layer with an MLP comes first."""
    other = {"model.layers.0.mlp.": "model.layers.1.mlp.", "model.layers.1.mlp.": "model.layers.0.mlp."}
    return next((name.replace(*pair) for pair in other.items() if name.startswith(pair[0])), name)


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.F16])
def test_attention_on_latents(kind, tmp_path):
    """The matrix that makes keys and values lies in two tensors. Its file is as DeepSeek's and GLM-4.7-Flash's are."""
    case = "glm4_moe_lite"
    yarn = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7, "truncate": True}
    config = {name: x for name, x in ALL[case].items() if name != "mlp_layer_types"}
    config |= {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "rope_scaling": yarn}
    floats = load(write(tmp_path / "floats", case, config=config, renamed=mlp_first))
    tensors = {mlp_first(name): tensor_of(name, shape) for name, shape in shapes(case).items()}
    fields = OF_LATENTS | {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID, "add_nextn_predict_layers": 1}
    of_drafter = {"blk.2.nextn.enorm.weight": np.ones(32, np.float32)}
    path = tmp_path / "model.gguf"
    write_gguf(path, "deepseek2", config, tensors, fields, of_config=of_drafter, v_b_proj=kind)
    found = difference(whole_logits(load(path)), np.asarray(whole_logits(floats)))
    assert found <= (TOLERANCE if kind is None else 0.1)


def test_early_files_of_deepseek_v2_lite(tmp_path):
    """They have one matrix that makes keys and values, queries without latents, and say no kind of router."""
    config = ALL["mistral4"] | {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 2}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, **UNSCALED}}
    stored = {name: shape for name, shape in shapes("mistral4").items() if ".q_" not in name}
    stored |= {f"model.layers.{i}.self_attn.q_proj.weight": (40, 32) for i in range(2)}
    tensors = {name: tensor_of(name, shape) for name, shape in stored.items()}
    floats = load(write_floats(tmp_path / "floats", config, tensors))
    fields = {
        "add_head_count_kv": 4,
        "add_kv_lora_rank": 12,
        "add_key_length": 10,
        "add_value_length": 10,
        "add_rope_dimension_count": 4,
        "add_leading_dense_block_count": 1,
        "add_expert_count": 6,
        "add_expert_used_count": 3,
        "add_expert_feed_forward_length": 20,
        "add_expert_shared_count": 2,
        "add_expert_weights_scale": 1.0,
    }
    model = load(write_gguf(tmp_path / "model.gguf", "deepseek2", config, tensors, fields))
    assert difference(whole_logits(model), np.asarray(whole_logits(floats))) <= TOLERANCE


@pytest.mark.slow
def test_routers_of_deepseek_v2_lite_are_those_of_transformers(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import reference

    dropped = "model_type", "rope_parameters", "norm_topk_prob", "q_lora_rank"
    config = {name: x for name, x in ALL["mistral4"].items() if name not in dropped}
    config |= {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    config |= {"rope_theta": 500.0, "norm_topk_prob": False}
    model = reference.make_model(config)
    tensors = {name: x.numpy() for name, x in model.state_dict().items()}
    fields = {name: x for name, x in OF_LATENTS.items() if "scaling" not in name and "q_lora" not in name}
    fields |= {"add_expert_shared_count": 2, "add_expert_weights_scale": 1.0, "add_expert_weights_norm": False}
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", config, tensors, fields)
    expected = reference.logits(model, tokens(), LENGTHS)
    assert difference(whole_logits(load(path)), expected) <= TOLERANCE


@pytest.mark.parametrize(
    "left_out, more, message",
    [
        (
            "correction",
            {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID},
            "deepseek2.expert_gating_func in .* must be 1 or absent, got 2",
        ),
        (
            "-",
            {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 2.0},
            "deepseek2.rope.scaling.type in .* must be 'none' or 'yarn' or absent, got 'linear'",
        ),
    ],
)
def test_latents_that_are_refused(left_out, more, message, tmp_path):
    fields = {"add_head_count_kv": 1, "add_key_length": 16, "add_value_length": 12, "add_rope_dimension_count": 4}
    fields |= {"add_kv_lora_rank": 12} | more
    stored = {name: shape for name, shape in shapes("glm4_moe_lite").items() if left_out not in name}
    tensors = {mlp_first(name): tensor_of(name, shape) for name, shape in stored.items()}
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", ALL["glm4_moe_lite"], tensors, fields)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize(("architecture", "beta"), [("mistral4", 0.1), ("deepseek2", 0.0)])
def test_scaled_queries_that_files_do_not_tell(architecture, beta, tmp_path):
    """Files of Mistral Small 4 leave out that its queries are scaled by position, and others have none that are."""
    case, changes, fields = CASES["mistral4"]
    fields = {name: value for name, value in fields.items() if name != "add_attn_temperature_scale"}
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    path = write_gguf(tmp_path / "model.gguf", architecture, ALL[case] | changes, tensors, fields)
    table = Checkpoint(path).config.get("rope_parameters", dict)
    assert (table["llama_4_scaling_beta"], table["original_max_position_embeddings"]) == (beta, 4)
    scaling = load(path).apply.config.query_scaling
    assert scaling == (QueryScaling(beta, 4) if beta else None)


def test_experts_in_mxfp4_stay_so(tmp_path):
    """The codes stand for the floats that the package gguf reads."""
    case, changes, fields = CASES["gpt-oss"]
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    kinds = {"gate_proj": mxfp4, "up_proj": mxfp4}
    path = write_gguf(tmp_path / "model.gguf", "gpt-oss", ALL[case] | changes, tensors, fields, **kinds)
    for i, layer in load(path).params["layers"].items():
        assert layer["experts_gate_up"].code == "e2m1"
        stored = tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
        parts = [gguf.quantize(np.ascontiguousarray(stored[:, j::2]), mxfp4) for j in range(2)]
        expected = np.concatenate([gguf.dequantize(part, mxfp4) for part in parts], axis=1)
        np.testing.assert_array_equal(dequantize(layer["experts_gate_up"]), expected)
    blocks = np.random.default_rng(0).integers(0, 256, (4, 3 * 17), np.uint8)
    blocks[:, ::17] = [[2, 127, 250]] * 4
    expected = gguf.dequantize(blocks, mxfp4)
    np.testing.assert_array_equal(dequantize(matrix_of(blocks, "MXFP4", np.dtype(np.float32))), expected)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "granite",
            {"add_rope_scaling_finetuned": False},
            "rope.scaling.finetuned in .* must be True or absent",
        ),
        *(
            (
                architecture,
                {"add_expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX},
                "gating_func in .* must be 2",
            )
            for architecture in ("glm4moe", "dots1", "afmoe", "laguna")
        ),
        ("apertus", {"add_xielu_beta": [0.5, 0.25]}, "xielu.beta in .* must be 0.5 for each layer, got .0.5, 0.25."),
        ("apertus", {"add_xielu_eps": [-1e-6]}, "xielu.eps in .* must be 2 numbers, got .-9.9"),
        ("dots1", {"add_sliding_window": 5}, "sliding_window in .* must be 0 or absent, got 5"),
        ("mistral4", {"add_expert_group_count": 4}, "n_group in .* must be 1, the only value"),
        ("glm4", {"add_rope_dimension_sections": [1, 1, 0, 0]}, "glm4.rope.dimension_sections in .* must be absent"),
        ("hunyuan-moe", {"add_expert_shared_feed_forward_length": 96}, "shared_feed_forward_length in .* must be 48"),
        ("laguna", {"add_sliding_window_pattern": [True]}, "sliding_window_pattern in .* must be 2 times true or"),
        (
            "gemma4",
            {"add_sliding_window_pattern": [True]},
            "sliding_window_pattern in .* must be 2 times true or",
        ),
        ("gemma4", {"add_key_length": 20, "add_value_length": 20}, "rope_freqs.weight in .* must be 10 numbers, 1 for"),
        ("gemma4", {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR}, "gemma4.rope.scaling.type in .* must be"),
        ("qwen3moe", {"add_expert_used_count": 9}, r"num_experts_per_tok in .* must be in \[1, 8\], got 9"),
        ("qwen3moe", {"add_expert_count": 7}, r"mlp.gate.weight in .* must have shape \(7, 32\), got \(8, 32\)"),
        ("cohere2", {"add_sliding_window": 0}, r"sliding_window in .* must be in \[1, .*\], got 0"),
        ("olmo", {"add_layer_norm_eps": 1e-3}, "olmo.attention.layer_norm_epsilon in .* must be .* or absent, got"),
        ("nemotron", {"add_key_length": 12, "add_value_length": 12}, "nemotron.attention.key_length in .* must be"),
        ("falcon with one key head", {"add_head_count_kv": 2}, "falcon.attention.head_count_kv in .* must be 1 where"),
        ("falcon", {"add_tensor_data_layout": "other"}, "falcon.tensor_data_layout in .* must be 'jploski' or absent"),
        ("olmo2", {"add_expert_count": 4}, "olmo2.expert_count in .* must be 0 or absent, got 4"),
        ("phi3", {"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "phi3.rope.scaling.type in .* must be"),
        ("phi3", {"add_head_count": 64}, "phi3.attention.key_length in .* must be at least 1, got 0"),
        ("smollm3", {"add_rope_dimension_count": 4}, "smollm3.rope.dimension_count in .* must be 8 or absent, got 4"),
    ],
)
def test_fields_that_are_refused(architecture, fields, message, tmp_path):
    case, changes, usual = CASES[architecture]
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    name = architecture.partition(" ")[0]
    path = write_gguf(tmp_path / "model.gguf", name, ALL[case] | changes, tensors, usual | fields)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("kept", ["short", None])
def test_factors_of_rotary_positions_that_are_missing(kept, tmp_path):
    case, changes, fields = CASES["phi3"]
    tensors = {name: tensor_of(name, shape) for name, shape in shapes(case).items()}
    header = read_header(write_gguf(tmp_path / "whole.gguf", "phi3", ALL[case] | changes, tensors, fields))
    stored = {
        name: (entry.kind.name, entry.shape, header.bytes_of(entry).tobytes())
        for name, entry in header.tensors.items()
        if not name.startswith("rope_factors") or name == f"rope_factors_{kept}.weight"
    }
    path = gguf_files.write(tmp_path / "model.gguf", header.fields, stored)
    with pytest.raises(ValueError, match=r"tensor rope_factors_(short|long).weight is missing from .*model.gguf"):
        load(path)
