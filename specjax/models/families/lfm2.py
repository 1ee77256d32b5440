"""LFM2, dense and with experts: gated short convolutions in most layers, attention with norms in the others."""

from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.models.experts import Experts, SigmoidTopK
from specjax.models.families import llama, mixtures, ropes
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.short_conv import ShortConv
from specjax.models.tensors import Tensors
from specjax.types import Model

NORMS = {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"}
OF_ATTENTION = llama.AttentionNames("out_proj", "q_layernorm", "k_layernorm")
OF_MLP = llama.MLPNames("feed_forward", ("w1", "w3"), "w13", "w2")
OF_EXPERTS = mixtures.Names("feed_forward", gate="w1", up="w3", down="w2", correction="expert_bias")
# Fields of the files of the first release, which say how weights began.
STARTS = "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"
EPSILON = 1e-6  # added to the sum that the weights of experts are divided by


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of an LFM2 checkpoint."""
    config.only("block_use_swiglu", True)
    config.ignore(*STARTS)
    for name, own in (("block_dim", "hidden_size"), ("conv_dim", "hidden_size"), ("conv_dim_out", "hidden_size")):
        config.only(name, config.size(own))
    config.only("num_heads", config.size("num_attention_heads"))
    config.only("block_norm_eps", config.number("norm_eps", 1e-5))
    each, size = _layers(config, GatedMLP()), _mlp_size(config)
    return model(config.replaced(intermediate_size=size), tensors, each)


def build_moe(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a checkpoint of LFM2 with experts."""
    config.only("use_expert_bias", True)
    router = mixtures.made(
        config,
        SigmoidTopK,
        *mixtures.counts(config, "num_experts", "num_local_experts"),
        is_renormalized=config.get("norm_topk_prob", bool, True),
        scale=config.number("routed_scaling_factor", 1.0),
        epsilon=EPSILON,
    )
    each = _layers(config, Experts(router))
    number = config.size("num_dense_layers", 2, least=0, most=len(each))
    each = llama.with_dense(each, GatedMLP(), [i < number for i in range(len(each))])
    return model(config, tensors, each, expert_size=config.size("moe_intermediate_size"))


def _mlp_size(config: ConfigFile) -> int:
    """Return the width of the MLPs, which the files say before it is made smaller and rounded up."""
    size = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    multiple = config.size("block_multiple_of", 256)
    factor = config.number("block_ffn_dim_multiplier", config.unless_null("block_ffn_dim_multiplier", 1.0))
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return size
    size = 2 * size // 3
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def _layers(config: ConfigFile, ffn: GatedMLP | Experts) -> tuple[LayerConfig, ...]:
    """Return the description of each layer."""
    config.only("use_pos_enc", True)
    number = config.size("num_hidden_layers", most=llama.MAX_LAYERS)
    attending = config.get("full_attn_idxs", list, list(range(number)))
    default = ["full_attention" if i in attending else "conv" for i in range(number)]
    types = config.strings("layer_types", default)
    if len(types) != number or not {"full_attention"} <= set(types) <= {"full_attention", "conv"}:
        raise ValueError(
            f"{config.where('layer_types')} must be {number} times 'full_attention' or 'conv', the first at least "
            f"once, got {types!r}"
        )
    mixers = {"conv": convolution(config, size=3), "full_attention": Attention(has_head_norms=True)}
    return tuple(LayerConfig(mixers[kind], ffn) for kind in types)


def convolution(config: ConfigFile, size: int) -> ShortConv:
    """Return the mixer of a layer that convolves, given the default of conv_L_cache."""
    tokens = config.size("conv_L_cache", size, least=2)
    return ShortConv(config.size("hidden_size"), tokens, config.get("conv_bias", bool, False))


def model(
    config: ConfigFile,
    tensors: Tensors,
    each: tuple[LayerConfig, ...],
    norms: dict[str, str] = NORMS,
    of_attention: llama.AttentionNames = OF_ATTENTION,
    **options: Any,
) -> Model:
    """Build the model of these layers.

    Args:
        config: config.json.
        tensors: the tensors.
        each: the description of each layer.
        norms: maps each norm's parameter of a layer to the name of its tensor in a layer.
        of_attention: the names of tensors of attention.
        options: more of `llama.config_of`.
    """
    is_tied = config.get("tie_embedding", bool, config.get("tie_word_embeddings", bool, True))
    fields = {"rms_norm_eps": config.number("norm_eps", 1e-5), "tie_word_embeddings": is_tied}
    options = {"transposed": tensors.on_one_gpu, "rope": partial(ropes.read, theta=1e6)} | options
    config = config.replaced(**fields)
    sizes = llama.config_of(config, each, **options)
    config.check_computation()
    read, outer = partial(_params, sizes, tensors, norms, of_attention), llama.OuterNames(norm="embedding_norm")
    return decoder_model(sizes, llama.params_of_layers(sizes, tensors, read, outer))


def _params(
    config: DecoderConfig,
    tensors: Tensors,
    norms: dict[str, str],
    of_attention: llama.AttentionNames,
    layer: LayerConfig,
    name: str,
) -> dict[str, Any]:
    """Read the parameters of a layer, as `LayerConfig.shapes` names them."""
    hidden = config.hidden_size
    params = {param: tensors.vectors({f"{name}.{norm}.weight": hidden}) for param, norm in norms.items()}
    if isinstance(layer.mixer, ShortConv):
        params |= _conv_params(config, layer.mixer, tensors, f"{name}.conv")
    else:
        params |= llama.attention_params(config, layer.mixer, tensors, f"{name}.self_attn", hidden, of_attention)
    if isinstance(layer.ffn, Experts):
        return params | OF_EXPERTS.params(config, layer.ffn, tensors, name)
    return params | llama.mlp_params(config, GatedMLP(), tensors, name, OF_MLP)


def _conv_params(config: DecoderConfig, mixer: ShortConv, tensors: Tensors, name: str) -> dict[str, Any]:
    """Read the parameters of a short convolution."""
    hidden, size, turned = config.hidden_size, mixer.channels, config.transposed
    params = {
        "conv_in": tensors.matrices(hidden, {f"{name}.in_proj.weight": 3 * size}, transposed=turned),
        "conv_taps": tensors.table(f"{name}.conv.weight", size, 1, mixer.conv_size),
        "conv_out": tensors.matrices(size, {f"{name}.out_proj.weight": hidden}, transposed=turned),
    }
    if mixer.has_bias:
        sizes = {"conv_in": ("in_proj", 3 * size), "conv_taps": ("conv", size), "conv_out": ("out_proj", hidden)}
        params |= {f"{own}_bias": tensors.vectors({f"{name}.{part}.bias": n}) for own, (part, n) in sizes.items()}
    return params
