"""The architectures that are read from GGUF files, and how the files of one differ from the files of others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specjax.models.gguf.fields import Fields
from specjax.models.gguf.header import Header

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
LAYERS_OF_27B = 46  # Gemma 2 of 27 billion parameters scales its queries by the width of a head in the hidden size


def _without_window(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    fields.only("attention.sliding_window", 0)
    return {}


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


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture store a model."""

    fields: Callable[[Fields, dict[str, Any]], dict[str, Any]] = _without_window  # more fields of config.json
    names: tuple[tuple[str, str], ...] = ()  # of tensors of a layer, where they differ from `OF_LAYER`
    has_halves_between: bool = False  # whether the halves of each head of queries and keys lie between each other
    has_norm_offset: bool = False  # whether the files store one more than the scale of a norm
    has_ordered_tokens: bool = False  # whether merges follow the ids of tokens and not their scores

    @property
    def of_layer(self) -> dict[str, str]:
        """The names of the tensors of a layer in transformers, by their names in GGUF."""
        return OF_LAYER | dict(self.names)


ARCHITECTURES = {
    "llama": Architecture(has_halves_between=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma2": Architecture(
        fields=_gemma2,
        names=(
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ),
        has_norm_offset=True,
        has_ordered_tokens=True,
    ),
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
