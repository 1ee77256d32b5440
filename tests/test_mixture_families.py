"""Families with mixtures, beyond their logits: pages, several devices, files as they are released, and bad fields."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ALL, LENGTHS, YARN, tokens, write
from paged import poisoned, random_table
from safetensors.numpy import load_file, save_file
from test_families import GOLDENS, TOLERANCE, difference, incremental_logits, whole_logits
from test_hybrid_steps import assert_exact

from specjax.models import Checkpoint, load, with_cache_dtype
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.experts import Experts, Shared, SigmoidTopK
from specjax.models.latent_attention import LatentAttention
from specjax.models.layer import LayerConfig
from specjax.models.quantize_files import write_quantized
from specjax.models.rope import NO_ROPE, Rope, YarnScaling
from specjax.testing import assert_model
from specjax.types import ModelInput

SCALING = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
V2 = {  # fields of DeepSeek V2 Lite, beside the sizes of "mistral4"
    "model_type": "deepseek_v2",
    "rope_parameters": None,
    "rope_scaling": SCALING,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
}
ALSO_RENAMED = {  # in files as they are released
    "laguna": {"gate.e_score": "experts.e_score"},
    "phimoe": {"mlp.experts.": "block_sparse_moe.experts."},
    "hy_v3": {"mlp.e_score_correction_bias": "mlp.expert_bias", "mlp.gate.weight": "mlp.router.gate.weight"},
}

pytestmark = pytest.mark.usefixtures("float32_products")


@pytest.fixture(scope="module")
def goldens():
    return np.load(GOLDENS / "logits.npz")


def two_devices():
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [3, 100])
def test_latents_in_pages(page_size, goldens, tmp_path):
    """Rows of different lengths in a pool of NaN, read whole or in blocks; the calls feed some tokens again."""
    model = load(write(tmp_path / "model", "deepseek_v3"))
    table = random_table((2, 5), 20)
    pool = poisoned(model.init_cache(20, page_size))
    logits = np.full((2, 12, model.vocab_size), np.nan, np.float32)
    apply, rows = jax.jit(model.apply), np.arange(2)[:, None]
    for starts in ((0, 0), (4, 2), (8, 5)):
        columns = np.array(starts)[:, None] + np.arange(4)
        inputs = ModelInput(jnp.asarray(tokens()[rows, columns]), jnp.asarray(columns), pages=jnp.asarray(table))
        output, pool = apply(model.params, inputs, pool)
        logits[rows, columns] = output.logits
    assert difference(logits, goldens["deepseek_v3"]) <= TOLERANCE
    others = np.setdiff1d(np.arange(20), table)
    assert all(np.isnan(np.asarray(leaf)[others]).all() for leaf in jax.tree.leaves(pool))
    assert {name for layer in pool for name in layer} == {"latent"}


@pytest.mark.slow
def test_calls_of_many_tokens_expand_latents():
    """They have the logits of calls of few tokens, which do not: a whole row, and a call to each kind of cache."""
    mixer = LatentAttention(rank=12, rope_size=4, key_size=6, value_size=9, scale=0.3)
    config = DecoderConfig(40, 16, 1, 2, 2, 4, 24, 2048, layers=(LayerConfig(mixer),))
    model = decoder_model(config, jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, init_params(config, 0)))
    row, apply = jax.random.randint(jax.random.key(1), (1, 20), 0, 40), jax.jit(model.apply)

    def call(cache, start, stop, pages=None):
        inputs = ModelInput(row[:, start:stop], jnp.arange(start, stop, dtype=jnp.int32)[None], pages=pages)
        output, cache = apply(model.params, inputs, cache)
        return output.logits[0], cache

    cache, logits = model.init_cache(1, 20), []
    for start in (0, 10):
        some, cache = call(cache, start, start + 10)
        logits.append(some)
    pool, table = poisoned(model.init_cache(300, 4)), jnp.asarray(random_table((1, 275), 300))  # read in blocks
    for (many, _), is_cached in ((call(None, 0, 20), False), (call(model.init_cache(1, 20), 0, 20), True)):
        np.testing.assert_allclose(many, jnp.concatenate(logits), atol=2e-5, err_msg=str(is_cached))
    np.testing.assert_allclose(call(pool, 0, 20, table)[0], jnp.concatenate(logits), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["glm4_moe_groups", "deepseek_v3", "cohere2_moe", "phimoe", "mimo_v2_flash"])
def test_devices_share_a_model(case, goldens, tmp_path):
    model = load(write(tmp_path / "model", case), mesh=two_devices())
    assert difference(whole_logits(model), goldens[case]) <= TOLERANCE
    if case == "deepseek_v3":
        assert difference(incremental_logits(model), goldens[case]) <= TOLERANCE
        latent = model.init_cache(2, 13)[0]["latent"]
        assert latent.addressable_shards[0].data.shape == latent.shape


@pytest.mark.slow
def test_calls_do_not_change_logits_of_latents():
    """Chains, trees, pages, and rows that are fed again."""
    mixer = LatentAttention(rank=12, rope_size=4, key_size=6, value_size=10, scale=0.3, query_rank=8)
    config = DecoderConfig(40, 32, 1, 4, 4, 4, 48, 64, layers=(LayerConfig(mixer),))
    assert_model(decoder_model(config, jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, init_params(config, 0))))


@pytest.mark.slow
def test_the_distribution_is_exact():
    """The tokens of a mixture choose different experts, with groups, a shared MLP and latents."""
    mixer = LatentAttention(rank=12, rope_size=4, key_size=6, value_size=10, scale=0.3, query_rank=8)
    ffn = Experts(SigmoidTopK(6, 2, scale=2.0, num_groups=3, num_chosen_groups=2), shared=Shared())
    config = DecoderConfig(3, 16, 2, 2, 2, 4, 16, 64, layers=(LayerConfig(mixer, ffn),), expert_size=8, shared_size=8)
    assert_exact(decoder_model(config, jax.tree.map(lambda x: 12 * x if x.ndim > 1 else x, init_params(config, 0))))


def test_latents_of_codes(tmp_path):
    """The matrix that is split by heads becomes floats when it is read."""
    directory = write(tmp_path / "model", "glm4_moe_lite")
    tensors, name = load_file(directory / "model.safetensors"), "model.layers.1.self_attn.kv_b_proj.weight"
    codes = tensors[name].astype(jnp.float8_e4m3fn)
    tensors |= {name: codes, f"{name}_scale_inv": np.full((1, 1), 0.5, np.float32)}
    save_file(tensors, directory / "model.safetensors")
    fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (directory / "config.json").write_text(json.dumps(ALL["glm4_moe_lite"] | fields))
    found = load(directory).params["layers"][1]["latent_up"]
    np.testing.assert_array_equal(found, 0.5 * codes.astype(np.float32))


def test_latents_are_not_rounded(tmp_path):
    model = load(write(tmp_path / "model", "glm4_moe_lite"))
    with pytest.raises(ValueError, match=r"cache_dtype must be None for a model that keeps latents .*got 'fp8'"):
        with_cache_dtype(model, "fp8")
    layers = LayerConfig(), model.apply.config.layers[0]
    with pytest.raises(ValueError, match="layers must all attend to latents, or none, got 1 of 2 that do"):
        replace(model.apply.config, layers=layers)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    directory = write(tmp_path / "model", "glm4_moe")
    plain, tensors = load(directory), load_file(directory / "model.safetensors")
    save_file(tensors | {"model.layers.2.enorm.weight": np.ones(32, np.float32)}, directory / "model.safetensors")
    model = load(directory)
    assert model.apply == plain.apply
    jax.tree.map(np.testing.assert_array_equal, model.params, plain.params)
    (directory / "config.json").write_text(json.dumps(ALL["glm4_moe"] | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"layers.2.enorm.weight in .* does not belong to a model of this config"):
        load(directory)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("glm4_moe", {"n_group": 4}, "config.json: num_groups must divide num_experts = 6, got 4"),
        ("glm4_moe", {"topk_group": 2}, r"config.json: num_chosen_groups must be in \[1, num_groups = 1\], got 2"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func in .* must be 'sigmoid'"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method in .* must be 'noaux_tc'"),
        ("glm4_moe", {"n_routed_experts": None}, "must have the field n_routed_experts"),
        ("glm4_moe", {"n_shared_experts": 0}, r"n_shared_experts in .* must be in \[1, 4096\], got 0"),
        ("glm4_moe", {"first_k_dense_replace": -1}, r"first_k_dense_replace in .* must be in \[0, 2\], got -1"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, r"num_nextn_predict_layers in .* must be in \[0, 1024\], got"),
        ("glm4_moe", {"router_scale": 2.0}, "router_scale in .* must be absent"),
        ("glm4_moe", {"rope_scaling": {"type": "fancy"}}, "rope_scaling.type in .* must be 'default' or"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func in .* must be 'noaux_tc' or 'sigmoid', .* got 'softmax'"),
        ("dots1", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu'"),
        ("dots1", {"layer_types": ["full_attention"]}, "layer_types in .* must be 2 times"),
        ("dots1", {"n_group": 3}, "num_groups must divide num_experts = 8, got 3"),
        ("cohere2_moe", {"expert_selection_fn": "top"}, "expert_selection_fn in .* must be 'softmax' or 'sigmoid'"),
        (
            "cohere2_moe",
            {"shared_expert_combination_strategy": "max"},
            "combination_strategy in .* must be 'average' or 'sum'",
        ),
        ("cohere2_moe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling in .* must be absent"),
        ("cohere2_moe", {"use_parallel_block": False}, "use_parallel_block in .* must be True, the only value"),
        ("cohere2_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types in .* must be 5 times 'dense' or 'sparse'"),
        ("cohere2_moe", {"prefix_dense_intermediate_size": None}, r"gate_proj.weight in .* must have shape \(48, 32\)"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias in .* must be False, the only value"),
        ("hy_v3", {"qk_norm": False}, "qk_norm in .* must be True, the only value"),
        ("hy_v3", {"num_shared_experts": 0}, r"num_shared_experts in .* must be in \[1, 4096\], got 0"),
        ("hy_v3", {"routed_scaling_factor": 2.0}, "routed_scaling_factor in .* must be absent or 1"),
        ("hy_v3", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types in .* must be 3 times 'dense' or 'sparse'"),
        ("flex_olmo", {"clip_qkv": 8.0}, "clip_qkv in .* must be absent"),
        ("flex_olmo", {"hidden_act": "gelu"}, "hidden_act in .* must be 'silu', the only value"),
        ("flex_olmo", {"num_experts_per_tok": 7}, r"num_experts_per_tok in .* must be in \[1, 6\], got 7"),
        ("sarvam_moe", {"score_function": "softmax"}, "score_function in .* must be 'sigmoid', the only value"),
        ("sarvam_moe", {"use_bias": True}, "use_bias in .* must be False, the only value"),
        ("sarvam_moe", {"num_experts": 6}, "num_experts in .* must be 8, the only value"),
        ("sarvam_moe", {"use_qkv_bias": False}, "use_qkv_bias in .* must be True, the only value"),
        ("sarvam_moe", {"n_group": 3}, "num_groups must divide num_experts = 8, got 3"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok in .* must be 2, the only value"),
        (
            "phimoe",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3}},
            "rope_scaling.long_mscale in .* must be short_mscale = 1.2, got 1.3",
        ),
        (
            "phimoe",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.2}},
            "must have the field rope_scaling.long_mscale",
        ),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type in .* must be 'default' or"),
        ("phimoe", {"lm_head_bias": False}, "lm_head.bias in .* does not belong to a model of this config"),
        ("mimo_v2_flash", {"v_head_dim": 20}, r"v_head_dim in .* must be in \[1, 16\], got 20"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias in .* must be False"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts in .* must be 0, the only value"),
        ("mimo_v2_flash", {"layer_types": 4 * ["full_attention"]}, r"k_proj.weight in .* must have shape \(32, 32\)"),
        ("mimo_v2_flash_default", {"swa_rope_theta": 5.0}, "swa_rope_theta in .* must be 10000.0, the only value"),
        ("mimo_v2_flash_default", {"rope_theta": 5.0}, "rope_theta in .* must be 5000000.0, the only value"),
        ("gemma4_moe", {"top_k_experts": 7}, r"top_k_experts in .* must be in \[1, 6\], got 7"),
        ("gemma4_moe", {"moe_intermediate_size": None}, "must have the field moe_intermediate_size"),
        ("gemma4_moe", {"num_experts": 5}, r"router.proj.weight in .* must have shape \(5, 32\), got \(6, 32\)"),
        ("gemma4_moe", {"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input in .* must be vocab_size = 64"),
        ("afmoe", {"score_func": "softmax"}, "score_func in .* must be 'sigmoid'"),
        ("afmoe", {"n_group": 2}, "n_group in .* must be 1, the only value"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias in .* must be False"),
        ("ernie4_5_moe", {"moe_k": 7}, r"moe_k in .* must be in \[1, 6\], got 7"),
        ("hunyuan_moe", {"moe_topk": [3]}, "moe_topk in .* must be one number, or the same number for each layer"),
        ("hunyuan_moe", {"moe_topk": [3, 2]}, "moe_topk in .* must be one number, or the same number for each layer"),
        ("hunyuan_moe", {"moe_intermediate_size": [24, 24]}, "moe_intermediate_size in .* must be 48, the only value"),
        ("laguna", {"gating": False}, "gating in .* must be True, 'per-head' or 'per-element', got False"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 7]},
            "num_attention_heads_per_layer in .* must be 2 multiples",
        ),
        ("laguna", {"moe_router_logit_softcapping": 2.0}, "moe_router_logit_softcapping in .* must be 0.0"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok in .* must be 1, the only value"),
        ("llama4", {"moe_layers": [3]}, r"moe_layers in .* must have indices in \[0, 3\), got \[3\]"),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, "layer_types in .* must be 3 times 'chunked_attention'"),
        ("llama4", {"attention_chunk_size": 0}, r"attention_chunk_size in .* must be in \[1, "),
        (
            "llama4",
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 3},
            "attention_chunk_size in .* must be a size, as layer_types has 'chunked_attention'",
        ),
        ("llama4", {"attn_temperature_tuning": "on"}, "attn_temperature_tuning in .* must be true, false or a number"),
        ("llama4", {"no_rope_layers": [1]}, r"no_rope_layers in .* must be at least 3 times 0 or 1, got \[1\]"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list in .* must have the value 1 for each layer"),
        ("minimax_m2", {"rotary_dim": 17}, r"rotary_dim in .* must be in \[1, 16\], got 17"),
        ("mistral4", {"n_group": 2}, "n_group in .* must be 1, the only value"),
        (
            "mistral4",
            V2 | {"topk_method": "group_limited_greedy"},
            "topk_method in .* must be 'greedy', the only value",
        ),
        ("mistral4", V2 | {"routed_scaling_factor": 16.0}, "routed_scaling_factor in .* must be 1.0, the only value"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv in .* must be absent"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 20}, r"gate_proj.weight in .* must have shape \(20, 32\)"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types in .* must be 2 times 'dense' or 'sparse'"),
        ("glm4_moe_lite", {"num_key_value_heads": 2}, "num_key_value_heads in .* must be 4, the only value"),
        ("deepseek_v3", {"q_lora_rank": 16}, r"q_a_proj.weight in .* must have shape \(16, 32\), got \(20, 32\)"),
        ("deepseek_v3", {"kv_lora_rank": None}, "must have the field kv_lora_rank"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob in .* must be absent or have a value, got null"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave in .* must be absent or have a value, got null"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "head_size must be even"),
        ("deepseek_v3", {"n_group": 8}, "num_groups must leave 2 experts or more for each group, got 8"),
        ("deepseek_v3", {"rope_scaling": {"type": "fancy"}}, "rope_scaling.type in .* must be 'default' or"),
        ("glm4_moe", {"n_routed_experts": 5}, r"mlp.gate.weight in .* must have shape \(5, 32\), got \(6, 32\)"),
    ],
)
def test_fields_that_are_refused(case, change, message, tmp_path):
    directory = write(tmp_path / "model", case)
    (directory / "config.json").write_text(json.dumps(ALL[case] | change))
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_deepseek_v2_is_mistral4_that_renormalises_nothing(tmp_path):
    fields = {"norm_topk_prob": False, "rope_parameters": SCALING | {"rope_theta": 500.0, "llama_4_scaling_beta": 0.0}}
    expected = load(write(tmp_path / "mistral4", "mistral4", config=ALL["mistral4"] | fields))
    model = load(write(tmp_path / "deepseek_v2", "mistral4", config=ALL["mistral4"] | V2))
    assert model.apply.config == expected.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_logits_of_deepseek_v2_are_those_of_transformers(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import reference

    fields = ALL["mistral4"] | V2 | {"q_lora_rank": None}
    theirs = reference.make_model({name: value for name, value in fields.items() if name != "rope_parameters"})
    theirs.save_pretrained(tmp_path)
    expected, model = reference.logits(theirs, tokens(), LENGTHS), load(tmp_path)
    assert difference(whole_logits(model), expected) <= TOLERANCE
    assert difference(incremental_logits(model), expected) <= TOLERANCE


def test_a_number_for_each_layer(tmp_path):
    """As the files of Hunyuan-A13B have it."""
    directory = write(tmp_path / "model", "hunyuan_moe")
    expected = load(directory).apply.config
    fields = {"moe_topk": [3, 3], "num_shared_expert": [1, 1], "moe_intermediate_size": [48, 48]}
    (directory / "config.json").write_text(json.dumps(ALL["hunyuan_moe"] | fields))
    assert load(directory).apply.config == expected


@pytest.mark.parametrize(
    ("case", "name", "released"),
    [
        ("hy_v3", "shared_experts", "shared_mlp"),
        ("ernie4_5_moe", "gate.moe_statics.", "moe_statics."),
        ("exaone_moe", "gate.e_score", "e_score"),
        ("laguna", "shared_experts.", "shared_expert."),
        ("minimax_m2", "mlp.", "block_sparse_moe."),
        ("phimoe", "mlp.router.", "block_sparse_moe.gate."),
        ("mimo_v2_flash", "sinks", "attention_sink_bias"),
    ],
)
def test_names_of_released_tensors(case, name, released, tmp_path):
    def renamed(of_tensor):
        for old, new in ALSO_RENAMED.get(case, {}).items():
            of_tensor = of_tensor.replace(old, new)
        return of_tensor.replace(name, released)

    plain = load(write(tmp_path / "plain", case))
    model = load(write(tmp_path / "released", case, renamed=renamed))
    for one, other in zip(*map(jax.tree.leaves, (model.params, plain.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_names_of_sarvam(tmp_path):
    """The files have one matrix for query, key and value, other names of tensors, and other names of fields."""
    expected = load(write(tmp_path / "plain", "sarvam_moe"))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".query_key_value.")] = np.concatenate(parts)
    renamed = {"embed_tokens": "word_embeddings", ".self_attn.": ".attention.", ".o_proj.": ".dense."}
    renamed |= {
        ".q_norm.": ".query_layernorm.",
        ".k_norm.": ".key_layernorm.",
        ".e_score_correction_bias": ".expert_bias",
    }
    for old, new in renamed.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    fields = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    directory = tmp_path / "released"
    directory.mkdir()
    config = {fields.get(name, name): value for name, value in ALL["sarvam_moe"].items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    model = load(directory)
    assert model.apply.config == expected.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    write_quantized(Checkpoint(directory), tmp_path / "codes", "int8")
    codes = load(tmp_path / "codes").params, load(directory, quantization="int8").params
    for one, other in zip(*map(jax.tree.leaves, codes), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", ["deepseek_v3", "ernie4_5_moe", "afmoe"])
def test_corrections_keep_their_bits(case, tmp_path):
    """They decide which experts a token has, and in bfloat16 numbers around 8 are 1 / 16 apart."""
    directory = write(tmp_path / "model", case)
    tensors = load_file(directory / "model.safetensors")
    corrections = {name: 8 + x for name, x in tensors.items() if name.endswith(("correction_bias", "expert_bias"))}
    save_file(tensors | corrections, directory / "model.safetensors")
    layers = load(directory, "bfloat16").params["layers"]
    read = [layer["router_correction"] for layer in layers.values() if "router_correction" in layer]
    assert len(read) == len(corrections) and read[0].dtype == np.float32
    for one, (_, other) in zip(read, sorted(corrections.items()), strict=True):
        np.testing.assert_array_equal(one, other.reshape(-1))


def test_factors_on_embeddings(tmp_path):
    """Trinity's is a number of Python in transformers, so that the product alone is rounded to 16 bits."""
    model = load(write(tmp_path / "model", "afmoe"), "bfloat16", feature_layers=(0,))
    ids = jnp.arange(64)[None]
    output, _ = jax.jit(model.apply)(model.params, ModelInput(ids, ids), None)
    expected = model.params["embedding"].astype(jnp.float32) * np.float32(32**0.5)
    np.testing.assert_array_equal(output.features.taps[0], expected.astype(jnp.bfloat16))


def test_laguna_without_windows(tmp_path):
    """Some releases have a window of 0, which no layer has. The tables alone say which part of a head turns."""
    whole = {"rope_type": "default", "rope_theta": 20.0}
    fields = {"sliding_window": 0, "partial_rotary_factor": 0.5, "rope_parameters": {"full_attention": whole}}
    config = load(write(tmp_path / "model", "laguna_elements", config=ALL["laguna_elements"] | fields)).apply.config
    assert config.windows == (None, None) and config.rope == Rope(20.0)


def test_an_empty_table_is_as_none(tmp_path):
    config = load(write(tmp_path / "model", "gpt_oss", config=ALL["gpt_oss"] | {"rope_scaling": {}})).apply.config
    assert config.rope_scaling.factor == 32.0


def test_windows_of_mixtures(tmp_path):
    """In transformers, gpt-oss has another default, and Qwen's mixtures read max_window_layers otherwise or not."""
    fields = {name: value for name, value in ALL["gpt_oss"].items() if name != "sliding_window"}
    assert load(write(tmp_path / "gpt_oss", "gpt_oss", config=fields)).apply.config.windows == (128, None)
    fields = ALL["qwen3_moe"] | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    assert load(write(tmp_path / "qwen3_moe", "qwen3_moe", config=fields)).apply.config.windows == (5, 5)
    fields = ALL["qwen2_moe"] | {"use_sliding_window": True, "sliding_window": 5}
    assert load(write(tmp_path / "qwen2_moe", "qwen2_moe", config=fields)).apply.config.windows == (5, None)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (None, 5)),
        ({"max_window_layers": None}, (None, None)),
        ({"max_window_layers": 0, "sliding_window": "absent"}, (4096, 4096)),
        ({"max_window_layers": 0, "sliding_window": None}, (None, None)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (5, None)),
    ],
)
def test_windows_of_dots(change, windows, tmp_path):
    """The last layers have windows, beside the layers without experts, which are the first ones."""
    fields = {name: value for name, value in (ALL["dots1"] | change).items() if value != "absent"}
    config = load(write(tmp_path / "model", "dots1", config=fields | {"scoring_func": "noaux_tc"})).apply.config
    assert config.windows == windows
    assert [isinstance(layer.ffn, Experts) for layer in config.each_layer] == [False, True]


def test_dots_renormalises_no_weights_by_default(tmp_path):
    for given, expected in ((None, False), (True, True)):
        fields = ALL["dots1_default"] | {"norm_topk_prob": given}
        config = load(write(tmp_path / str(given), "dots1_default", config=fields)).apply.config
        assert config.layers[0].ffn.router.is_renormalized is expected


def test_layers_of_command_by_number(tmp_path):
    """The first layers have an MLP and their own pattern of windows; the full ones among them turn where it is 1."""
    config = load(write(tmp_path / "model", "cohere2_moe")).apply.config
    assert config.windows == (None, None, 5, None, 5)
    assert [layer.mixer.rope == NO_ROPE for layer in config.each_layer] == [False, False, False, True, False]
    assert [isinstance(layer.ffn, Experts) for layer in config.each_layer] == [False, False, True, True, True]
    fields = ALL["cohere2_moe"] | {"prefix_dense_sliding_window_pattern": 2}
    config = load(write(tmp_path / "other", "cohere2_moe", config=fields)).apply.config
    assert config.windows == (5, None, 5, None, 5)
    assert [layer.mixer.rope == NO_ROPE for layer in config.each_layer] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("case", "absent", "theta", "scaling"),
    [
        ("mixtral", ["rope_theta"], 1e6, None),
        ("gpt_oss", ["rope_theta"], 150000.0, YarnScaling(4.0, 16, 150000.0, 2.0, 1.0, False, 1.138629436111989)),
        ("gpt_oss", ["rope_scaling"], 500.0, YarnScaling(32.0, 4096, 500.0, 32.0, 1.0, False, 1.3465735902799727)),
    ],
)
def test_turns_that_files_do_not_tell(case, absent, theta, scaling, tmp_path):
    """The values are the defaults of transformers."""
    fields = {name: value for name, value in ALL[case].items() if name not in absent}
    config = load(write(tmp_path / case, case, config=fields)).apply.config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)
