"""Turn the fields of a GGUF file into the fields of config.json and of the other files of a checkpoint."""

from typing import Any

import numpy as np

from specjax.models.gguf.architectures import architecture_of
from specjax.models.gguf.blocks import floats_of
from specjax.models.gguf.fields import Fields
from specjax.models.gguf.header import Header
from specjax.models.rope import Llama3Scaling

SIZES = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
}
LLAMA3_SCALINGS = (  # of Llama 3.1, Llama 3.2, EXAONE 4 and Llama 4 Scout
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
    Llama3Scaling(32.0, 1.0, 4.0, 8192),
    Llama3Scaling(16.0, 1.0, 4.0, 8192),
    Llama3Scaling(16.0, 1.0, 1.0, 8192),
)
MAX_LAYERS = 1024
ENDS = "eos", "eot", "eom"  # of the tokens that end a text, a turn, and a message to a tool
# Tokens that end a text or a turn wherever a vocabulary has them, as llama.cpp has it. Files of Gemma 3 and Phi-4-mini
# name no other token than the one that ends a text.
TEXTS_OF_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
    *("<turn|>", "<|tool_response>"),
)
TEMPLATES = {"default": "chat_template", "tool_use": "chat_template.tool_use"}  # fields of templates by their names
OF_HARMONY = "<|return|>", "<|call|>"  # tokens of gpt-oss, whose <|end|> ends no turn but a message in it


def config_of(header: Header) -> dict[str, Any]:
    """Return the fields that config.json of the model would have.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    architecture, fields = architecture_of(header), Fields(header)
    config: dict[str, Any] = {name: fields.get(field, int) for name, field in SIZES.items()}
    # Files of mixtures without an MLP may lack its width.
    expert_size = fields.get("expert_feed_forward_length", int, None) if architecture.has_experts else None
    number = config["num_hidden_layers"]
    if not 1 <= number <= MAX_LAYERS:
        place = f"{fields.architecture}.block_count in {header.path}"
        raise ValueError(f"{place} must be in [1, {MAX_LAYERS}], got {number}")
    widths = fields.of_layers("feed_forward_length", number, *([expert_size] if expert_size else []))
    each_heads = fields.of_layers("attention.head_count", number)
    heads = config["num_attention_heads"] = each_heads[0]
    kv_heads = fields.of_layers("attention.head_count_kv", number, heads)
    if architecture.has_kinds_of_layers:  # 0 is of a layer without attention, or without an MLP
        kv_heads, widths = ([size for size in sizes if size] or [0] for sizes in (kv_heads, widths))
    if min(each_heads) < 1 or "token_embd.weight" not in header.tensors:
        raise ValueError(f"{header.path} must have heads and the tensor token_embd.weight, got {min(each_heads)} heads")
    if min(kv_heads) < 1:
        place = f"{fields.architecture}.attention.head_count_kv in {header.path}"
        raise ValueError(f"{place} must be at least 1, got {min(kv_heads)}")
    if not architecture.has_sizes_of_layers and len({*kv_heads}) + len({*widths}) + len({*each_heads}) > 3:
        raise ValueError(
            f"{fields.architecture}.attention.head_count, head_count_kv and feed_forward_length in {header.path} must "
            f"be the same for all layers, got {each_heads}, {kv_heads} and {widths}"
        )
    head_size = fields.get("attention.key_length", int, config["hidden_size"] // heads)
    if head_size < 1:
        raise ValueError(
            f"{fields.architecture}.attention.key_length in {header.path}, or else embedding_length / head_count, must "
            f"be at least 1, got {head_size}"
        )
    if not architecture.has_latents:
        fields.only("attention.value_length", head_size)
    fields.only("attention.causal", True)
    if not architecture.has_partial_rotary:
        fields.only("rope.dimension_count", head_size)
    if not architecture.has_experts:
        fields.only("expert_count", 0)
    config |= {
        "model_type": fields.architecture,
        "num_key_value_heads": kv_heads[0],
        "intermediate_size": widths[0],
        "head_dim": head_size,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": fields.get(architecture.epsilon, float),
        "rope_theta": fields.get("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "rope_scaling": None if architecture.has_own_rope else _scaling(fields, head_size, architecture.scalings),
        "dtype": "bfloat16",
    }
    return config | architecture.fields(fields, config)


def _scaling(fields: Fields, head_size: int, others: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the field rope_scaling; the architecture reads the fields of other kinds than linear."""
    fields.only("rope.scaling.type", "none", "linear", *others)
    factor = fields.get("rope.scaling.factor", float, fields.get("rope.scale_linear", float, 1.0))
    is_scaled = factor not in (0.0, 1.0) and fields.get("rope.scaling.type", str, "linear") != "none"
    entry = fields.header.tensors.get("rope_freqs.weight")
    if entry is None:
        return {"rope_type": "linear", "factor": factor} if is_scaled else None
    if is_scaled:
        raise ValueError(
            f"{fields.architecture}.rope.scaling.factor in {fields.header.path} must be 1 or absent beside the tensor "
            f"rope_freqs.weight, got {factor}"
        )
    found = floats_of(fields.header.bytes_of(entry), entry.kind.name).ravel()
    frequencies = fields.get("rope.freq_base", float, 10000.0) ** -(np.arange(0, head_size, 2) / head_size)
    for scaling in LLAMA3_SCALINGS:
        scaled = np.asarray(scaling(frequencies.astype(np.float32)))
        if found.shape == frequencies.shape and np.allclose(frequencies / scaled, found, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original_length,
            }
    raise ValueError(
        f"tensor rope_freqs.weight in {fields.header.path} must be the factors of Llama 3.1, 3.2 or 4, or of EXAONE 4, "
        "got others"
    )


def settings_of(header: Header) -> dict[str, dict[str, Any]]:
    """Return the fields that generation_config.json and tokenizer_config.json of the model would have, by the file.

    Raises:
        ValueError: a field has a wrong value.
    """
    tokens = header.fields.get("tokenizer.ggml.tokens")
    ids = {}
    for name in ("bos", *ENDS, "unknown", "padding"):
        value = header.fields.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if type(value) is not int or not isinstance(tokens, list) or not 0 <= value < len(tokens):
            raise ValueError(f"tokenizer.ggml.{name}_token_id in {header.path} must be a token's id, got {value!r}")
        ids[name] = value
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts = {field: tokens[ids[name]] for field, name in named.items() if tokens and name in ids}
    templates = {name: header.fields.get(f"tokenizer.{field}") for name, field in TEMPLATES.items()}
    templates = {name: template for name, template in templates.items() if template is not None}
    for name, template in templates.items():
        if not isinstance(template, str):
            got = f"{header.path} must be a string, got {type(template).__name__}"
            raise ValueError(f"tokenizer.{TEMPLATES[name]} in {got}")
    if list(templates) == ["default"]:
        texts["chat_template"] = templates["default"]
    elif templates:
        texts["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    ends = [ids[name] for name in ENDS if name in ids]
    ends += [i for i in _ends_by_text(tokens) if i not in ends]
    return {"generation_config.json": {"eos_token_id": ends}, "tokenizer_config.json": texts}


def _ends_by_text(tokens: Any) -> list[int]:
    """Return the ids of the tokens whose text says that they end a text or a turn."""
    tokens = tokens if isinstance(tokens, list) else []
    message = ("<|end|>",) if all(token in tokens for token in OF_HARMONY) else ()
    return [i for i, token in enumerate(tokens) if token in TEXTS_OF_ENDS and token not in message]
