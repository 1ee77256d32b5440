"""The architectures that are read from GGUF files, and how the files of one differ from the files of others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specjax.models.gguf import delta_nets, dense, gemmas, latents, mamba, mixtures, short_conv
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
OF_LAYER_NORM = "attention.layer_norm_epsilon"  # the field with the epsilon of norms that subtract the mean


def _as_stored(name: str, place: Place, config: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    yield name, place


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture store a model."""

    fields: Callable[[Fields, dict[str, Any]], dict[str, Any]] = dense.without_window  # more fields of config.json
    names: tuple[tuple[str, str], ...] = ()  # of tensors of a layer, where they differ from `OF_LAYER`
    numbers: tuple[tuple[str, str], ...] = ()  # fields with a number for each layer, and its vectors that they are
    has_halves_between: bool = False  # whether the halves of each head of queries and keys lie between each other
    epsilon: str = "attention.layer_norm_rms_epsilon"  # the field with the epsilon of norms
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


QWEN3_MOE = Architecture(fields=mixtures.qwen3_moe, names=mixtures.OF_EXPERTS, scalings=("yarn",), has_experts=True)
QWEN35 = Architecture(
    fields=delta_nets.qwen3_5,
    names=delta_nets.OF_LAYER,
    has_norm_offset=True,
    has_partial_rotary=True,
    holds=partial(delta_nets.in_order, is_tiled=True),
)
QWEN35_MOE = replace(
    QWEN35, fields=delta_nets.qwen3_5_moe, names=mixtures.OF_EXPERTS + delta_nets.OF_LAYER, has_experts=True
)
LATENTS = Architecture(
    fields=latents.deepseek2,
    names=mixtures.OF_EXPERTS + latents.OF_LAYER,
    has_partial_rotary=True,
    has_experts=True,
    has_latents=True,
    has_own_rope=True,
)
NEMOTRON_H = Architecture(
    fields=mamba.sizes_of_nemotron,
    names=mamba.OF_NEMOTRON,
    has_halves_between=True,
    has_partial_rotary=True,  # heads do not turn, and the field says something else
    has_experts=True,
    has_own_rope=True,
    has_kinds_of_layers=True,
    holds=partial(mamba.as_named, names=mamba.WHOLE_OF_NEMOTRON),
)
LFM2 = Architecture(
    fields=short_conv.lfm2,
    names=short_conv.OF_LAYER,
    has_kinds_of_layers=True,
    holds=short_conv.in_three_axes,
)
ARCHITECTURES = {
    "llama": Architecture(
        fields=mixtures.llama,
        names=mixtures.OF_MIXTRAL,
        has_halves_between=True,
        scalings=("yarn",),
        has_experts=True,
    ),
    "llama4": Architecture(fields=mixtures.llama4, names=mixtures.OF_LLAMA4, has_experts=True),
    "afmoe": Architecture(fields=mixtures.afmoe, names=mixtures.OF_EXPERTS + mixtures.OF_AFMOE, has_experts=True),
    "laguna": Architecture(
        fields=mixtures.laguna,
        names=mixtures.OF_EXPERTS + mixtures.OF_LAGUNA,
        has_partial_rotary=True,
        has_experts=True,
        has_own_rope=True,
        has_sizes_of_layers=True,
    ),
    "minimax-m2": Architecture(
        fields=mixtures.minimax_m2, names=mixtures.OF_MINIMAX, has_partial_rotary=True, has_experts=True
    ),
    "mistral3": Architecture(fields=dense.mistral3, has_halves_between=True, scalings=("yarn",)),
    "qwen2": Architecture(fields=dense.with_yarn, scalings=("yarn",)),
    "qwen2vl": Architecture(fields=dense.as_qwen2, scalings=("yarn",)),
    "qwen2moe": Architecture(
        fields=mixtures.qwen2_moe,
        names=mixtures.OF_EXPERTS + mixtures.OF_QWEN2,
        scalings=("yarn",),
        has_experts=True,
        holds=partial(mixtures.as_row, ending=".shared_expert_gate.weight"),
    ),
    "qwen3": Architecture(fields=dense.with_yarn, scalings=("yarn",)),
    "qwen3vl": Architecture(fields=dense.as_qwen3, scalings=("yarn",)),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": replace(QWEN35_MOE, holds=partial(delta_nets.in_order, is_tiled=False)),
    "chatglm": Architecture(fields=dense.chatglm, names=dense.OF_CHATGLM, has_partial_rotary=True, scalings=("yarn",)),
    "glm4": Architecture(fields=dense.glm4, names=dense.OF_GLM4, has_partial_rotary=True, scalings=("yarn",)),
    "glm4moe": Architecture(
        fields=mixtures.glm4_moe, names=mixtures.OF_EXPERTS + mixtures.OF_GLM, has_partial_rotary=True, has_experts=True
    ),
    "dots1": Architecture(fields=mixtures.dots1, names=mixtures.OF_EXPERTS + mixtures.OF_DOTS, has_experts=True),
    "deepseek2": LATENTS,
    "mistral4": replace(LATENTS, fields=latents.mistral4),
    "gpt-oss": Architecture(
        fields=mixtures.gpt_oss, names=mixtures.OF_EXPERTS + mixtures.OF_GPT_OSS, scalings=("yarn",), has_experts=True
    ),
    "gemma": Architecture(has_norm_offset=True, has_ordered_tokens=True),
    "gemma2": Architecture(
        fields=gemmas.gemma2,
        names=gemmas.GEMMA_NORMS,
        has_norm_offset=True,
        has_ordered_tokens=True,
    ),
    "gemma3": Architecture(
        fields=gemmas.gemma3, names=gemmas.GEMMA_NORMS, has_norm_offset=True, has_ordered_tokens=True
    ),
    "gemma4": Architecture(
        fields=gemmas.gemma4,
        names=gemmas.OF_GEMMA4,
        has_partial_rotary=True,
        has_experts=True,
        has_own_rope=True,
        has_sizes_of_layers=True,
    ),
    "granite": Architecture(fields=dense.granite, has_halves_between=True),
    "granitemoe": Architecture(
        fields=dense.granite_moe,
        names=mixtures.OF_MIXTRAL + mamba.OF_GRANITE,
        has_halves_between=True,
        has_experts=True,
    ),
    "granitehybrid": Architecture(
        fields=mamba.granite_hybrid,
        names=mixtures.OF_MIXTRAL + mamba.OF_GRANITE,
        has_halves_between=True,
        has_experts=True,
        has_kinds_of_layers=True,
        holds=mamba.as_vectors,
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "falcon-h1": Architecture(
        fields=mamba.falcon_h1,
        names=mamba.OF_FALCON,
        holds=partial(mamba.as_named, names=mamba.WHOLE_OF_FALCON),
    ),
    "lfm2": LFM2,
    "lfm2moe": replace(LFM2, fields=short_conv.lfm2_moe, has_experts=True),
    "command-r": Architecture(fields=dense.command_r, epsilon=OF_LAYER_NORM),
    "cohere2": Architecture(fields=dense.cohere2, epsilon=OF_LAYER_NORM),
    "exaone4": Architecture(fields=dense.three_of_four_slide, names=dense.POST_NORMS),
    "ernie4_5": Architecture(fields=dense.ernie4_5),
    "ernie4_5-moe": Architecture(
        fields=mixtures.ernie4_5_moe,
        names=mixtures.OF_EXPERTS + mixtures.OF_ERNIE,
        has_experts=True,
        holds=partial(mixtures.as_row, ending=".e_score_correction_bias"),
    ),
    "hunyuan-dense": Architecture(fields=dense.hunyuan, names=dense.OF_HUNYUAN),
    "hunyuan-moe": Architecture(
        fields=mixtures.hunyuan,
        names=mixtures.OF_EXPERTS + mixtures.OF_HUNYUAN + dense.OF_HUNYUAN,
        has_experts=True,
    ),
    "olmo": Architecture(fields=dense.olmo, has_halves_between=True, epsilon=OF_LAYER_NORM),
    "nemotron": Architecture(
        fields=dense.nemotron, epsilon=OF_LAYER_NORM, has_norm_offset=True, has_partial_rotary=True
    ),
    "olmoe": Architecture(fields=mixtures.olmoe, names=mixtures.OF_EXPERTS, has_experts=True),
    "olmo2": Architecture(fields=dense.olmo2, names=dense.POST_NORMS, scalings=("yarn",)),
    "seed_oss": Architecture(fields=dense.seed_oss, names=dense.POST_NORMS[:1]),
    "apertus": Architecture(fields=dense.apertus, names=dense.OF_APERTUS, numbers=dense.ALPHAS),
    "phi2": Architecture(
        fields=dense.phi2, names=dense.OF_PHI, epsilon=OF_LAYER_NORM, has_partial_rotary=True, holds=dense.of_phi
    ),
    "falcon": Architecture(fields=dense.falcon, names=dense.OF_FALCON, epsilon=OF_LAYER_NORM, holds=dense.of_falcon),
    "phi3": Architecture(
        fields=dense.phi3,
        names=(("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")),
        has_partial_rotary=True,
        scalings=("longrope",),
    ),
    "smollm3": Architecture(fields=dense.smollm3, has_halves_between=True),
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
