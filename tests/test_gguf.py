"""GGUF files: blocks against their formulas, models against checkpoints of the same floats, tokenizers, damage."""

import struct
import sys

import gguf_files as files
import jax
import numpy as np
import pytest
from smollm2_file import smollm2_file
from test_checkpoint import write
from test_quantized_checkpoints import logits, quantized_leaves

import specjax
from specjax import SamplingParams, models
from specjax.models.gguf.blocks import floats_of, matrix_of
from specjax.models.gguf.header import KINDS
from specjax.models.quantized import Quantized, dequantize

NAMES = {
    "attn_q": ("self_attn.q_proj", 64, 64),
    "attn_k": ("self_attn.k_proj", 32, 64),
    "attn_v": ("self_attn.v_proj", 32, 64),
    "attn_output": ("self_attn.o_proj", 64, 64),
    "ffn_gate": ("mlp.gate_proj", 256, 64),
    "ffn_up": ("mlp.up_proj", 256, 64),
    "ffn_down": ("mlp.down_proj", 64, 256),
}
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 16,
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GEMMA2 = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "NVFP4"])
def test_blocks_that_stay_codes(rng, kind):
    rows = files.random_blocks(rng, kind, 3, 512)
    weight, expected = matrix_of(rows, kind, np.dtype(np.float32)), files.value_of(rows, kind)
    found = np.asarray(dequantize(weight))
    np.testing.assert_array_equal(found, expected)
    assert weight.bits == (8 if kind == "Q8_0" else 4) and weight.group == (1, 16 if kind == "NVFP4" else 32)
    np.testing.assert_array_equal(floats_of(rows, kind), expected)


@pytest.mark.parametrize("kind", list(files.BLOCKS))
def test_blocks_against_the_package(rng, kind):
    gguf = pytest.importorskip("gguf")
    rows = files.random_blocks(rng, kind, 3, 512)
    np.testing.assert_array_equal(floats_of(rows, kind), gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))


def test_sizes_of_types():
    gguf = pytest.importorskip("gguf")
    known = {kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    for number, kind in KINDS.items():
        assert (number, kind.block, kind.size) == known[kind.name]


def test_types_without_the_package(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"the package gguf is missing, install it with: .*\[gguf\]"):
        floats_of(files.random_blocks(rng, "Q6_K", 1, 256), "Q6_K")


def make(rng, architecture, kinds):
    """Return tensors for a file, and the floats for which they stand by the names of transformers."""
    tensors, stored = {}, {}

    def add(name, other, n, k, kind, permute=None):
        if kind in ("F32", "F16"):
            w = rng.normal(0, 0.1, (n, k)).astype(np.float32 if kind == "F32" else np.float16)
            tensors[name], w = files.floats(w, kind), w.astype(np.float32)
        else:
            rows = files.random_blocks(rng, kind, n, k)
            tensors[name], w = (kind, (n, k), rows.tobytes()), files.value_of(rows, kind)
        if permute:  # converters put the two halves of each head between each other
            w = w.reshape(permute, -1, 2, k).swapaxes(1, 2).reshape(n, k)
        stored[other] = w

    add("token_embd.weight", "model.embed_tokens.weight", 99, 64, kinds.get("token_embd", "F32"))
    for i in range(2):
        for name, (other, n, k) in NAMES.items():
            heads = {"attn_q": 4, "attn_k": 2}.get(name) if architecture == "llama" else None
            full = f"model.layers.{i}.{other}"
            add(f"blk.{i}.{name}.weight", f"{full}.weight", n, k, kinds.get(name, "F32"), heads)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                bias = rng.normal(0, 0.1, n).astype(np.float32)
                tensors[f"blk.{i}.{name}.bias"], stored[f"{full}.bias"] = files.floats(bias), bias
        norms = GEMMA2 if architecture == "gemma2" else NORMS
        sizes = dict.fromkeys(norms.items(), 64)
        if architecture == "qwen3":
            sizes |= {("attn_q_norm", "self_attn.q_norm"): 16, ("attn_k_norm", "self_attn.k_norm"): 16}
        for (name, other), size in sizes.items():
            scale = rng.uniform(0.5, 1.5, size).astype(np.float32)
            tensors[f"blk.{i}.{name}.weight"] = files.floats(scale)
            stored[f"model.layers.{i}.{other}.weight"] = scale - (architecture == "gemma2")
    scale = rng.uniform(0.5, 1.5, 64).astype(np.float32)
    tensors["output_norm.weight"] = files.floats(scale)
    stored["model.norm.weight"] = scale - np.float32(architecture == "gemma2")
    return tensors, stored


def both(folder, rng, architecture="llama", kinds=None, tokenizer=None, **changes):
    """Write a GGUF file, and a checkpoint of the floats for which it stands."""
    tensors, stored = make(rng, architecture, kinds or {})
    fields = files.architecture(architecture, **changes) | (tokenizer or files.byte_level())
    path = files.write(folder / "model.gguf", fields, tensors)
    config = {"model_type": architecture, "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 256}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    if architecture == "gemma2":
        config |= {"sliding_window": 4096, "query_pre_attn_scalar": 16}
    (folder / "floats").mkdir()
    return path, write(folder / "floats", config, {name: w.astype(np.float32) for name, w in stored.items()})


Q4_K = {"ffn_down": "Q4_K"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kinds", "num_codes"),
    [
        ("llama", dict.fromkeys(NAMES, "Q4_1") | {"token_embd": "Q8_0"}, 9),
        ("llama", dict.fromkeys(NAMES, "Q4_0") | Q4_K, 8),
        ("llama", dict.fromkeys(NAMES, "Q8_0") | {"attn_v": "Q4_0", "ffn_up": "F16"}, 4),
        ("llama", dict.fromkeys(NAMES, "Q4_0") | {"ffn_down": "IQ4_NL"}, 6),
        ("llama", dict.fromkeys(NAMES, "NVFP4"), 8),
        ("qwen2", dict.fromkeys(NAMES, "Q8_0"), 8),
        ("qwen3", dict.fromkeys(NAMES, "Q4_0"), 8),
        ("gemma2", dict.fromkeys(NAMES, "Q8_0") | {"token_embd": "Q8_0"}, 9),
        ("llama", {}, 0),
    ],
)
def test_a_file_computes_what_its_floats_do(tmp_path, rng, architecture, kinds, num_codes):
    path, floats = both(tmp_path, rng, architecture, kinds)
    model, expected = models.load(path), logits(models.load(floats))
    assert len(quantized_leaves(model)) == num_codes
    np.testing.assert_allclose(logits(model), expected, atol=3e-5 * np.abs(expected).max())


def test_scales_of_matrices_in_nvfp4(tmp_path, rng):
    """A matrix may have a factor on all its scales, and one of its inputs, which nothing reads."""
    tensors, stored = make(rng, "llama", {"ffn_up": "NVFP4", "attn_q": "NVFP4"})
    fields = files.architecture() | files.byte_level()
    whole = models.load(files.write(tmp_path / "whole.gguf", fields, tensors)).params["layers"][1]
    for name, factor in (("ffn_up", 2.5), ("attn_q", 0.5)):
        tensors[f"blk.1.{name}.scale"] = files.floats(np.float32([factor]))
        tensors[f"blk.1.{name}.input_scale"] = files.floats(np.float32([3]))
    scaled = models.load(files.write(tmp_path / "scaled.gguf", fields, tensors)).params["layers"][1]
    outputs = stored["model.layers.1.mlp.up_proj.weight"].shape[0]
    np.testing.assert_array_equal(scaled["gate_up"][:, -outputs:], 2.5 * whole["gate_up"][:, -outputs:])
    np.testing.assert_array_equal(scaled["gate_up"][:, :-outputs], whole["gate_up"][:, :-outputs])
    np.testing.assert_array_equal(scaled["qkv"][:, :64], 0.5 * whole["qkv"][:, :64])
    tensors["blk.1.ffn_up.scale"] = files.floats(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"blk.1.ffn_up.scale in .* must be floats of shape \(1,\), got F32"):
        models.load(files.write(tmp_path / "wrong.gguf", fields, tensors))


def test_scales_of_experts_in_nvfp4(tmp_path, rng):
    """Each expert has one."""
    tensors, _ = make(rng, "llama", {})
    tensors = {name: x for name, x in tensors.items() if ".ffn_" not in name or "norm" in name}
    fields = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 256}
    expected = {}
    for i in range(2):
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = files.floats(rng.normal(0, 1, (2, 64)).astype(np.float32))
        for name, shape in (("gate", (2, 256, 64)), ("up", (2, 256, 64)), ("down", (2, 64, 256))):
            rows = files.random_blocks(rng, "NVFP4", shape[0] * shape[1], shape[2])
            tensors[f"blk.{i}.ffn_{name}_exps.weight"] = "NVFP4", shape, rows.tobytes()
            tensors[f"blk.{i}.ffn_{name}_exps.scale"] = files.floats(np.float32([0.5, 4]))
            expected[i, name] = files.value_of(rows, "NVFP4").reshape(shape) * np.float32([0.5, 4])[:, None, None]
    fields = files.architecture("llama", **fields) | files.byte_level()
    layers = models.load(files.write(tmp_path / "model.gguf", fields, tensors)).params["layers"]
    for i, layer in layers.items():
        gate_up = np.concatenate([expected[i, "gate"], expected[i, "up"]], axis=1)
        np.testing.assert_array_equal(dequantize(layer["experts_gate_up"]), gate_up)
        np.testing.assert_array_equal(dequantize(layer["experts_out"]), expected[i, "down"])


@pytest.mark.slow
def test_an_llm_of_a_file(tmp_path, rng):
    path, _ = both(tmp_path, rng, kinds=dict.fromkeys(NAMES, "Q8_0"))
    llm = specjax.LLM(path, path, num_draft_tokens=2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    result = llm.generate("hello", params)[0]
    assert result.token_ids == llm.plain().generate("hello", params)[0].token_ids
    assert result.metrics.num_accepted == result.metrics.num_drafted > 0
    assert llm.eos_token_ids == (0,)
    assert llm.encode_chat([{"role": "user", "content": "hel"}]) == llm.tokenizer.encode("hel").ids


def test_floats_of_a_file_are_rounded(tmp_path, rng):
    path, _ = both(tmp_path, rng)
    assert len(quantized_leaves(models.load(path, quantization="int8"))) == 8


def test_codes_of_a_file_are_not_rounded_again(tmp_path, rng):
    path, _ = both(tmp_path, rng, kinds={"attn_q": "Q8_0"})
    with pytest.raises(ValueError, match="quantization must be None for weights that are quantised already"):
        models.load(path, quantization="int8")


def test_linear_scaling():
    """As llama.cpp reads it: a file without a type has this one."""
    from specjax.models.gguf.config import _scaling
    from specjax.models.gguf.fields import Fields
    from specjax.models.gguf.header import Header

    def scaling(tensors=None, **fields):
        fields = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
        return _scaling(Fields(Header("model.gguf", fields | {"general.architecture": "llama"}, tensors or {})), 8, ())

    assert scaling(factor=4.0) == scaling(factor=4.0, type="linear") == {"rope_type": "linear", "factor": 4.0}
    assert scaling(factor=4.0, type="none") is None
    with pytest.raises(ValueError, match=r"llama.rope.scaling.factor in .* must be 1 or absent beside .* got 4.0"):
        scaling({"rope_freqs.weight": ()}, factor=4.0)


def test_templates_by_name(tmp_path, rng):
    """As files of Hermes 3 have them."""
    path, _ = both(tmp_path, rng, tokenizer=files.byte_level())
    assert models.Checkpoint(path).tool_template is None
    tokenizer = files.byte_level(**{"tokenizer.chat_template.tool_use": "{{ tools }}"})
    tensors, _ = make(rng, "llama", {})
    path = files.write(tmp_path / "named.gguf", files.architecture() | tokenizer, tensors)
    checkpoint = models.Checkpoint(path)
    assert checkpoint.chat_template == tokenizer["tokenizer.chat_template"]
    assert checkpoint.tool_template == "{{ tools }}"


def test_tokens_that_end_a_sequence():
    from specjax.models.gguf.config import settings_of
    from specjax.models.gguf.header import Header

    ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eos", "eot", "eom"))}
    settings = settings_of(Header("model.gguf", ids | {"tokenizer.ggml.tokens": ["a", "b", "c", "d"]}, {}))
    assert settings["generation_config.json"] == {"eos_token_id": [0, 1, 2]}


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<pad>", "<eos>", "a", "<end_of_turn>"], [1, 3]),  # Gemma 3
        (["a", "<|endoftext|>", "<|end|>", "<|user|>"], [1, 2]),  # Phi-4-mini
        (["a", "<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"], [1, 4]),  # gpt-oss, whose <|end|> ends a message
    ],
)
def test_tokens_that_end_a_turn_by_their_text(tokens, ends):
    """Files name the token that ends a text, and llama.cpp finds the others by their texts."""
    from specjax.models.gguf.config import settings_of
    from specjax.models.gguf.header import Header

    settings = settings_of(Header("m", {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1}, {}))
    assert settings["generation_config.json"] == {"eos_token_id": ends}


def test_byte_level_tokenizers():
    from specjax.models.gguf.header import Header
    from specjax.models.gguf.tokenizer import tokenizer_of

    def tokens(text, **changes):
        tokenizer = tokenizer_of(Header("model.gguf", files.byte_level(**changes), {}))
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        return encoded.tokens

    assert tokens("hello<|end|>") == ["hel", "l", "o", "<|end|>"]
    for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2"):
        assert tokens("hel 12!", pre=pre) == ["hel", "Ġ", "1", "2", "!"]
    for pre, words in (
        ("qwen2", ["\u0e04", "\u0e31\u0e1a"]),
        ("qwen35", ["\u0e04\u0e31\u0e1a"]),
    ):
        split = tokenizer_of(Header("model.gguf", files.byte_level(pre=pre), {})).pre_tokenizer
        assert [end - start for _, (start, end) in split.pre_tokenize_str("".join(words))] == list(map(len, words))
    kinds = {
        "gpt-4o": ["He", "LLo's", " ", "123", "4", "!/"],  # of gpt-oss and Phi-4-mini
        "tekken": ["He", "LLo", "'s", " ", "1", "2", "3", "4", "!/"],  # of Mistral Small 3
        "glm4": ["HeLLo", "'s", " ", "123", "4", "!/"],
    }
    kinds["dbrx"] = kinds["glm4"]  # of OLMo 2 and Granite 4
    kinds["pixtral"] = kinds["tekken"]  # of Nemotron
    for pre, words in kinds.items():
        split = tokenizer_of(Header("model.gguf", files.byte_level(pre=pre), {})).pre_tokenizer
        places = [place for _, place in split.pre_tokenize_str("HeLLo's 1234!/")]
        assert ["HeLLo's 1234!/"[start:end] for start, end in places] == words, pre
    begin = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    tokenizer = tokenizer_of(Header("model.gguf", files.byte_level(**begin), {}))
    assert tokenizer.encode("hel").tokens == ["<|end|>", "hel"]
    for pre, expected in (
        ("llama-bpe", [0]),
        ("tekken", [0]),
        ("lfm2", [0]),
        ("minicpm5", []),
        ("qwen2", []),
    ):  # of files that do not say it
        named = files.byte_level(pre=pre, **{"tokenizer.ggml.bos_token_id": 0})
        assert tokenizer_of(Header("model.gguf", named, {})).encode("").ids == expected, pre
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre in .* must be one of llama-bpe, .* got 'viking'"):
        tokens("a", pre="viking")
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model in .* must be 'gpt2', 'llama' or 'gemma4', got 'rwkv'"):
        tokens("a", **{"tokenizer.ggml.model": "rwkv"})


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-v3", "say 12345我想Hi(x\n\n y", ["say", " ", "123", "45", "我想", "Hi", "(x", "\n\n", " y"]),
        ("hunyuan-dense", "I'm 1.5%\n", ["I", "'m", " ", "1", ".", "5", "%\n"]),
        ("deepseek-coder", "int x1 = 12;\n\tgo", ["int", " x", "1", " = ", "1", "2", ";", "\n", "\tgo"]),
        ("deepseek-coder", "f你好。", ["f", "你好", "。"]),
        ("deepseek-llm", "Go 12 你好。 xÜ  ", ["Go", " ", "1", "2", " ", "你好", "。", " x", "Ü", "  "]),
        ("kimi-k2", "HeLLo's我想Hi 1234/\nかな想", ["He", "LLo's", "我想", "Hi", " ", "123", "4", "/\n", "かな", "想"]),
        ("afmoe", "a 1234567, 12 日本x\n", ["a", " ", "1", "234", "567", ",", " ", "12", " ", "日本", "x", "\n"]),
        ("laguna", "x = 12\n\n  y", ["x", " =", " ", "1", "2", "\n\n", " ", " y"]),
        ("minicpm5", "we'll 12345", ["we", "'ll", " ", "123", "45"]),
        ("hunyuan", "don't 12\n", ["don", "'t", " ", "1", "2", "\n"]),
        ("falcon3", "don't 1234", ["don", "'t", " ", "123", "4"]),
        ("kanana2", "HeLLo's", ["He", "LLo's"]),
        ("minerva-7b", "I'm 12", ["I", "'m", " ", "1", "2"]),
        ("olmo", "I'm 12!!", ["I", "'m", " 12", "!!"]),
    ],
)
def test_words_of_kinds(pre, text, words):
    """A text is parted as the tokenizer of the model does it whose file has this kind."""
    from specjax.models.gguf.header import Header
    from specjax.models.gguf.tokenizer import tokenizer_of

    split = tokenizer_of(Header("model.gguf", files.byte_level(pre=pre), {})).pre_tokenizer
    assert [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("pre", "tokens"), [("llama-bpe", ["hello"]), ("minicpm5", ["hello"]), ("qwen2", ["hel", "l", "o"])]
)
def test_words_that_no_merge_makes(pre, tokens):
    from specjax.models.gguf.header import Header
    from specjax.models.gguf.tokenizer import tokenizer_of

    fields = files.byte_level(pre=pre)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "hello"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    assert tokenizer_of(Header("model.gguf", fields, {})).encode("hello").tokens == tokens


def test_composed_texts():
    from specjax.models.gguf.header import Header
    from specjax.models.gguf.tokenizer import tokenizer_of

    kinds = dict.fromkeys(("qwen2", "hunyuan", "olmo", "mpt", "command-r"), True)
    for pre, is_composed in (kinds | {"grok-2": False, "deepseek-v3": False}).items():
        normalizer = tokenizer_of(Header("model.gguf", files.byte_level(pre=pre), {})).normalizer
        assert (normalizer is not None) == is_composed, pre


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_type", 1, "token_type in .* must be list, got int"),
        ("pre", ["smollm"], r"pre in .* must be one of .*, got \['smollm'\]"),
    ],
)
def test_fields_of_tokenizers_of_other_types(name, value, message):
    from specjax.models.gguf.header import Header
    from specjax.models.gguf.tokenizer import tokenizer_of

    fields = files.byte_level(**{f"tokenizer.ggml.{name}": value})
    with pytest.raises(ValueError, match=message):
        tokenizer_of(Header("model.gguf", fields, {}))


def test_sentence_piece_tokenizers():
    from specjax.models.gguf.header import Header
    from specjax.models.gguf.tokenizer import tokenizer_of

    llama = {"general.architecture": "llama"}
    tokenizer = tokenizer_of(Header("model.gguf", llama | files.sentence_piece(), {}))
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer.encode("hello ß").tokens[2:] == ["▁", "<0xC3>", "<0x9F>"]
    assert tokenizer.decode(tokenizer.encode("hello ß").ids) == "hello ß"
    plain = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = tokenizer_of(Header("model.gguf", llama | files.sentence_piece(**plain), {}))
    assert tokenizer.encode("hello").tokens == ["he", "llo"]
    # Gemma 4 has merges, as byte-level files have them, scores of no use, and a token at the beginning in any case.
    gemma = plain | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.scores": [0.0] * 270}
    gemma |= {"tokenizer.ggml.merges": ["▁ h", "l l", "h e"]}
    tokenizer = tokenizer_of(
        Header("model.gguf", {"general.architecture": "gemma4"} | files.sentence_piece(**gemma), {})
    )
    assert tokenizer.encode("hello hello").tokens == ["<s>", "he", "ll", "o", "▁h", "e", "ll", "o"]
    assert tokenizer.decode(tokenizer.encode("hello ß").ids) == "hello ß"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "mamba"}, r"general.architecture in .* must be one of llama, .* got 'mamba'"),
        ({"split.count": 3}, r"must be the first part of its model, in a file named NAME-00001-of-00003.gguf"),
        ({"llama.expert_count": 8}, r"llama.expert_used_count in .* must be int, got no such field"),
        ({"llama.rope.scaling.type": "su"}, r"rope.scaling.type in .* must be 'none' or 'linear' or 'yarn' or absent"),
        (YARN | {"llama.rope.scaling.attn_factor": 2.0}, r"rope.scaling.attn_factor in .* must be 1.0 or absent"),
        ({"llama.attention.sliding_window": 64}, r"sliding_window in .* must be 0 or absent"),
        ({"llama.block_count": "two"}, r"llama.block_count in .* must be int, got 'two'"),
        ({"llama.embedding_length": 96}, r"must have shape"),
        ({"llama.attention.head_count_kv": 0}, r"head_count_kv in .* must be at least 1, got 0"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"be the same for all layers, got \[4, 4\], \[2, 1\] and"),
        (
            {"llama.attention.head_count": [4, 2]},
            r"head_count, head_count_kv and feed_forward_length in .* \[4, 2\], \[2,",
        ),
        (
            {"llama.feed_forward_length": [256]},
            r"feed_forward_length in .* must be an integer, or 2 of them, got",
        ),
        ({"llama.block_count": 0}, r"llama.block_count in .* must be in \[1, 1024\], got 0"),
        ({"llama.block_count": 2**31}, r"llama.block_count in .* must be in \[1, 1024\], got 2147483648"),
        ({"llama.attention.causal": False}, r"llama.attention.causal in .* must be True or absent, got False"),
        ({"split.count": "two"}, r"split.count in .* must be a number of files, got 'two'"),
        ({"general.alignment": 3}, r"general.alignment is 3"),
        ({"tokenizer.ggml.eos_token_id": 1000}, r"eos_token_id in .* must be a token's id, got 1000"),
    ],
)
def test_fields_that_are_wrong(tmp_path, rng, fields, message):
    tensors, _ = make(rng, "llama", {})
    path = files.write(tmp_path / "model.gguf", files.architecture() | files.byte_level() | fields, tensors)
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_a_model_in_parts(tmp_path, rng):
    """The first part has the fields and no tensors, as llama.cpp's command splits a model."""
    whole, _ = both(tmp_path, rng, kinds=dict.fromkeys(NAMES, "Q8_0"))
    tensors, _ = make(np.random.default_rng(0), "llama", dict.fromkeys(NAMES, "Q8_0"))
    fields, names = files.architecture() | files.byte_level(), list(tensors)

    def write(number, fields, names, count=3):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        path = tmp_path / f"model-{number + 1:05d}-of-00003.gguf"
        return files.write(path, fields | own, {name: tensors[name] for name in names})

    first, second, third = write(0, fields, []), write(1, {}, names[:5]), write(2, {}, names[5:])
    for x, y in zip(*(jax.tree.leaves(models.load(path)) for path in (first, whole)), strict=True):
        np.testing.assert_array_equal(x, y)

    def refused(message, error=ValueError):
        with pytest.raises(error, match=message):
            models.load(first)

    with pytest.raises(ValueError, match=r"00002-of-00003.gguf must be the first part .* got part 1 \(from 0\) of 3"):
        models.load(second)
    write(2, {}, names[4:])
    refused(f"must each have other tensors, got {names[4]} twice")
    write(2, {}, names[6:])
    refused(f"must have {len(tensors)} tensors together, got {len(tensors) - 1}")
    write(2, {}, names[5:], count=4)
    refused(r"00003-of-00003.gguf must be part 2 \(from 0\) of 3, got part 2 of 4")
    third.unlink()
    refused("00003-of-00003.gguf must be a GGUF file, and there is no such file", FileNotFoundError)


def test_files_that_are_damaged(tmp_path, rng):
    path, _ = both(tmp_path, rng)
    content = path.read_bytes()

    def refused(changed, message):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=message):
            models.load(path)

    refused(content[:-100], "must be a whole GGUF file.*the tensor output_norm.weight is at bytes")
    for size in (30, 100, 1000, 3000):
        refused(content[:size], "must be a whole GGUF file.*its header asks for|the field")
    refused(content[:10], "got a file of 10 bytes")
    refused(b"GGML" + content[4:], "begins with GGUF")
    refused(content[:4] + struct.pack(">I", 3) + content[8:], "little-endian")
    refused(content[:8] + struct.pack("<Q", 2**60) + content[16:], "must be a whole GGUF file")
    refused(content[:16] + struct.pack("<Q", 2**60) + content[24:], "must be a whole GGUF file")
    place = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    refused(content[:place] + struct.pack("<Q", 2**50) + content[place + 8 :], "strings, more than the file can hold")
    place = content.index(b"output_norm.weight") + len("output_norm.weight")
    refused(content[: place + 4] + struct.pack("<Q", 2**50) + content[place + 12 :], "has the shape")
    refused(content[: place + 12] + struct.pack("<I", 99) + content[place + 16 :], "got type 99 of GGUF")
    refused(content[: place + 16] + struct.pack("<Q", 2**62) + content[place + 24 :], "is at bytes")
    refused(content.replace(b"output_norm.weight", b"blk.9.other.weight"), "tensor model.norm.weight is missing")
    with pytest.raises(FileNotFoundError, match="no such file"):
        models.load(tmp_path / "other.gguf")


@pytest.mark.slow
def test_a_model_that_people_use():
    """SmolLM2-135M-Instruct in Q4_1 keeps its codes; tests/test_smollm2_parity.py compares its texts."""
    assert sum(isinstance(x, Quantized) for x in quantized_leaves(models.load(smollm2_file()))) == 4 * 30 + 1
