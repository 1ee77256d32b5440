"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, attention without positions, an MLP, or experts.

MLPs and experts have no gate. The names of layers count all kinds, and so do the layers that a drafter reads. The times
of Mamba-2 are as time_step_limit says; transformers also raises them to time_step_min in prompts, but not in steps.
"""

from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.models.experts import Experts, Shared, Ungated
from specjax.models.families import granite, llama, mixtures
from specjax.models.layer import MLP, Attention, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.rope import NO_ROPE
from specjax.models.tensors import Tensors
from specjax.types import Model, PyTree

PREFIX = "backbone."  # in place of "model.", in the released files
OUTER = llama.OuterNames("embeddings", norm="norm_f")
MTP_LAYERS = "mtp.*"  # names of the tensors of the drafter
EXPERTS = (  # fields that say nothing where no layer has experts
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "moe_latent_size"),
    "routed_scaling_factor",
)
KINDS = {  # of layers, by their names and by their signs in hybrid_override_pattern
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Nemotron-H checkpoint, without its layers for multi-token prediction."""
    if any(name.startswith(PREFIX) for name in tensors.names()):
        tensors = tensors.inside(PREFIX)
    kinds = _kinds(config)
    layers = {"*": LayerConfig(Attention(), None), "M": LayerConfig(_mamba(config), None)}
    layers |= {kind: LayerConfig(None, ffn(config, kind)) for kind in set("-E") & set(kinds)}
    decoder_config = config_of(config, tuple(layers[kind] for kind in kinds), tensors.on_one_gpu)
    config.check_computation()
    return decoder_model(decoder_config, _params(decoder_config, tensors))


def ffn(config: ConfigFile, kind: str) -> MLP | Experts:
    """Return the MLP "-" or the experts "E" of a layer."""
    activation = config.choice("mlp_hidden_act", ("relu2", "silu"), default="relu2")
    return MLP(activation) if kind == "-" else _experts(config, activation)


def config_of(config: ConfigFile, layers: tuple[LayerConfig, ...], transposed: bool) -> DecoderConfig:
    """Return the sizes and options of a decoder of these layers."""
    options: dict[str, Any] = {"rope": NO_ROPE, "transposed": transposed}
    if any(isinstance(layer.ffn, Experts) for layer in layers):
        options["expert_size"] = config.size("moe_intermediate_size")
        options["shared_size"] = config.size("moe_shared_expert_intermediate_size")
    else:
        config.ignore(*EXPERTS, *mixtures.TRAINING)
    for name in ("attention_bias", "mlp_bias", "residual_in_fp32"):
        config.only(name, False)
    config.ignore("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")  # heads do not turn
    fields = {
        "num_hidden_layers": len(layers),
        "intermediate_size": config.size("intermediate_size", 21504),
        "num_key_value_heads": config.size("num_key_value_heads", 8),
        "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "head_dim": config.size("head_dim", config.size("attention_head_dim", 128)),
    }
    return llama.config_of(config.replaced(**fields), layers, **options)


def _kinds(config: ConfigFile) -> str:
    """Return the sign of each layer's kind."""
    name = next((one for one in ("hybrid_override_pattern", "layers_block_type") if one in config), "layer_types")
    given = config.get(name, str if name == "hybrid_override_pattern" else list)
    kinds = signs_of(given)
    number = config.size("num_hidden_layers", len(kinds), most=llama.MAX_LAYERS)
    if len(kinds) != number or not {"*"} <= set(kinds) <= set(KINDS.values()):
        raise ValueError(
            f"{config.where(name)} must say of {number} layers whether they are Mamba-2, attention, an MLP or experts, "
            f"the second at least once, got {given!r}"
        )
    return kinds


def signs_of(given: str | list) -> str:
    """Return the sign of each layer's kind, given a pattern of signs or the names of kinds; "?" stands for others."""
    return given.replace("|", "") if isinstance(given, str) else "".join(KINDS.get(str(kind), "?") for kind in given)


def _mamba(config: ConfigFile) -> Mamba2:
    """Return the mixer of the recurrent layers."""
    heads, groups = config.size("mamba_num_heads", 128), config.size("n_groups", 8)
    if heads % groups:
        raise ValueError(f"{config.where('mamba_num_heads')} must be a multiple of n_groups = {groups}, got {heads}")
    config.only("mamba_hidden_act", "silu")
    granite.check_steps(config)
    has_bias = config.get("use_bias", bool, False)
    return Mamba2(
        num_key_heads=groups,
        num_value_heads=heads,
        key_size=config.size("ssm_state_size", 128),
        value_size=config.size("mamba_head_dim", 64),
        conv_size=config.size("conv_kernel", 4),
        has_bias=has_bias,
        has_out_bias=has_bias,
        has_conv_bias=config.get("use_conv_bias", bool, True),
    )


def _experts(config: ConfigFile, activation: str) -> Experts:
    """Return the mixture, whose router is DeepSeek's, beside an MLP that every token passes through."""
    config.only("n_shared_experts", 1)
    config.ignore("moe_shared_expert_overlap")  # says when engines compute it
    router = mixtures.sigmoid_router(config, "n_routed_experts", "num_local_experts", scale=1.0)
    latent_size = config.size("moe_latent_size", None)
    return Experts(router, Ungated(activation), shared=Shared(activation, num_parts=1), latent_size=latent_size)


def _params(config: DecoderConfig, tensors: Tensors) -> PyTree:
    """Read the parameters as `decoder.param_shapes` names them."""

    def read(layer: LayerConfig, name: str) -> dict[str, Any]:
        return layer_params(config, layer, tensors, name)

    return llama.params_of_layers(config, tensors, read, OUTER, (MTP_LAYERS,))


def layer_params(config: DecoderConfig, layer: LayerConfig, tensors: Tensors, name: str) -> dict[str, Any]:
    """Read the parameters of a layer, as `LayerConfig.shapes` names them."""
    hidden, block = config.hidden_size, f"{name}.mixer"
    norm = tensors.vectors({f"{name}.norm.weight": hidden})
    if isinstance(layer.mixer, Mamba2):
        return {"attention_norm": norm, **llama.mamba_params(config, layer.mixer, tensors, block)}
    if layer.mixer is not None:
        return {"attention_norm": norm, **llama.attention_params(config, layer.mixer, tensors, block, hidden)}
    if isinstance(layer.ffn, Experts):
        return {"mlp_norm": norm, **_mixture_params(config, layer.ffn, tensors, block)}
    return {"mlp_norm": norm, **llama.ungated_params(config, tensors, block, config.mlp_size)}


def _mixture_params(config: DecoderConfig, ffn: Experts, tensors: Tensors, block: str) -> dict[str, Any]:
    """Read the parameters of a mixture; the files have a tensor for each matrix of each expert, or one for all."""
    hidden, size, number, experts = config.hidden_size, config.expert_size, ffn.router.num_experts, f"{block}.experts"
    read, latents = hidden if ffn.latent_size is None else ffn.latent_size, {}
    if ffn.latent_size is not None:
        matrices = partial(tensors.matrices, transposed=config.transposed)
        latents["latent_in"] = matrices(hidden, {f"{block}.fc1_latent_proj.weight": read})
        latents["latent_out"] = matrices(read, {f"{block}.fc2_latent_proj.weight": hidden})
    if f"{experts}.up_proj" in tensors:
        up = tensors.stacked(f"{experts}.up_proj", number, size, read)
        out = tensors.stacked(f"{experts}.down_proj", number, read, size)
    else:
        up = tensors.stack(read, [{f"{experts}.{i}.up_proj.weight": size} for i in range(number)])
        out = tensors.stack(size, [{f"{experts}.{i}.down_proj.weight": read} for i in range(number)])
    shared = llama.ungated_params(config, tensors, f"{block}.shared_experts", config.shared_size)
    return latents | {
        "router": tensors.table(f"{block}.gate.weight", number, hidden),
        "router_correction": tensors.in_float32().vectors({f"{block}.gate.e_score_correction_bias": number}),
        "experts_gate_up": up,
        "experts_out": out,
        "shared_gate_up": shared["mlp_in"],
        "shared_out": shared["mlp_out"],
    }
