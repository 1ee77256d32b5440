"""Llama 2, 3 and 3.x, and the parts that the families which vary Llama share with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from specjax.models.channel_delta import ChannelDeltaNet
from specjax.models.config_file import ConfigFile
from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.models.delta_net import DeltaNet
from specjax.models.experts import Experts
from specjax.models.families import ropes
from specjax.models.latent_attention import LatentAttention
from specjax.models.layer import MLP, XIELU, Attention, GatedMLP, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.rope import Rope
from specjax.models.tensors import Tensors
from specjax.types import Array, Model, PyTree

MAX_LAYERS = 1024


class Mixture(Protocol):
    """How the files of a family name the tensors of experts."""

    def params(self, config: DecoderConfig, ffn: Any, tensors: Tensors, layer: str) -> dict[str, Any]:
        """Read the parameters of the experts of a layer, whose name is the prefix of the names of its tensors."""
        ...


@dataclass(frozen=True)
class OuterNames:
    """How the files of a family name the tensors outside the layers, and the layers."""

    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str | None = "norm"  # None for one without a scale, of which files have nothing
    head: str = "lm_head"


@dataclass(frozen=True)
class MLPNames:
    """How the files of a family name the matrices of an MLP: apart, or gate and up as one."""

    block: str = "mlp"
    parts: tuple[str, ...] = ("gate_proj", "up_proj")  # the last alone where an MLP has no gate
    whole: str = "gate_up_proj"
    out: str = "down_proj"


@dataclass(frozen=True)
class AttentionNames:
    """How the files of a family name attention, its last matrix, the norms of heads, and the first matrices as one."""

    out: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    block: str = "self_attn"
    whole: str = "qkv_proj"


@dataclass(frozen=True)
class DeltaNames:
    """How the files of a family name the tensors of a gated delta net."""

    parts: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")  # of queries, keys and values, and of the gate
    rates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    convolutions: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"


OUTER, ATTENTION, NAMES = OuterNames(), AttentionNames(), MLPNames()
OF_HEADS = DeltaNames(("in_proj_qkvz",), ("in_proj_ba",))
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
ACTIVATIONS = {  # by their names in config.json
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
}


def build(config: ConfigFile, tensors: Tensors, **options: Any) -> Model:
    """Build the model of a Llama checkpoint, given further options of `decoder`."""
    config.only("hidden_act", "silu")
    bias = config.get("attention_bias", bool, False)
    ffn = GatedMLP(has_bias=config.get("mlp_bias", bool, False))
    return decoder(config, tensors, (LayerConfig(Attention(has_bias=bias, has_out_bias=bias), ffn),), **options)


def decoder(
    config: ConfigFile,
    tensors: Tensors,
    layers: tuple[LayerConfig, ...],
    *,
    head_size: int | None = None,
    tie_embeddings: bool = False,
    norms: Mapping[str, str | None] = NORMS,
    ignored: tuple[str, ...] = (),
    mixture: Mixture | None = None,
    outer: OuterNames = OUTER,
    attention: AttentionNames = ATTENTION,
    mlp: MLPNames = NAMES,
    rope: Rope | Callable[[ConfigFile, int], Rope] = ropes.read,
    **options: Any,
) -> Model:
    """Build the model of a checkpoint with the network of `models/decoder.py`.

    Args:
        config: config.json, with the field names of Llama.
        tensors: tensors, with the names of Llama.
        layers: the description of each layer, or one of all layers.
        head_size: default of the field head_dim; None is hidden_size / num_attention_heads.
        tie_embeddings: default of the field tie_word_embeddings.
        norms: maps each norm's parameter of a layer to the name of its tensor in a layer; None for one without a scale.
        ignored: patterns of the names of tensors that the model does not need.
        mixture: reads the parameters of layers with experts; None where there are none.
        outer: the names of the tensors outside the layers.
        attention: the names of some tensors of attention.
        mlp: the names of the matrices of an MLP.
        rope: as `config_of` takes it.
        options: further fields of `DecoderConfig`.

    Returns:
        The model.

    Raises:
        ValueError: a field or tensor is missing, has a wrong value or shape, or is not supported.
    """
    options |= {"head_size": head_size, "tie_embeddings": tie_embeddings, "rope": rope}
    decoder_config = config_of(config, layers, transposed=tensors.on_one_gpu, **options)
    config.check_computation()
    names = {"norms": norms, "mixture": mixture, "attention": attention, "mlp": mlp}
    return decoder_model(decoder_config, _params(decoder_config, tensors, outer, ignored, **names))


def config_of(
    config: ConfigFile,
    layers: tuple[LayerConfig, ...],
    *,
    head_size: int | None = None,
    tie_embeddings: bool = False,
    rope: Rope | Callable[[ConfigFile, int], Rope] = ropes.read_fixed,
    **options: Any,
) -> DecoderConfig:
    """Return the sizes and options that config.json has under the names of Llama; the arguments are as in `decoder`.

    Args:
        config: config.json.
        layers: the description of each layer, or one of all layers.
        head_size: default of the field head_dim; None is hidden_size / num_attention_heads.
        tie_embeddings: default of the field tie_word_embeddings.
        rope: how the heads of layers turn that do not say it themselves, or a function that reads it, given config.json
            and the size of a head.
        options: further fields of `DecoderConfig`.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    num_heads, size = config.size("num_attention_heads"), size_of_head(config, head_size)
    turns = rope if isinstance(rope, Rope) else rope(config, size)
    fields = {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "num_layers": config.size("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": config.size("num_key_value_heads", num_heads),
        "head_size": size,
        "mlp_size": _mlp_size(config, layers),
        "max_length": config.size("max_position_embeddings"),
        "layers": layers,
        "rope_theta": turns.theta,
        "rope_scaling": turns.scaling,
        "rotary_size": turns.size,
        "rope_is_interleaved": turns.is_interleaved,
        "norm_eps": config.number("rms_norm_eps"),
        "tie_embeddings": config.get("tie_word_embeddings", bool, tie_embeddings),
    }
    try:
        return DecoderConfig(**fields, **options)
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error


def with_epsilon(config: ConfigFile, name: str) -> ConfigFile:
    """Return the fields with the epsilon of norms, which LayerNorms have in the field `name`, under Llama's name."""
    config.refuse_null(name)
    return config.replaced(rms_norm_eps=config.number(name, 1e-5))


def activation(config: ConfigFile, name: str, default: str) -> str:
    """Return the activation of MLPs that the field `name` says, given its default."""
    return ACTIVATIONS[config.choice(name, tuple(ACTIVATIONS), default)]


def size_of_head(config: ConfigFile, default: int | None = None) -> int:
    """Return the field head_dim, or its default; None is hidden_size / num_attention_heads."""
    if "head_dim" not in config and default is None:
        default = part_of_head(config)
    return config.size("head_dim", default)


def part_of_head(config: ConfigFile, hidden: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    """Return the hidden size / the number of heads, given the names of the two fields."""
    hidden_size, num_heads = config.size(hidden), config.size(heads)
    if hidden_size % num_heads:
        raise ValueError(f"{config.where(hidden)} must be a multiple of {heads} = {num_heads}, got {hidden_size}")
    return hidden_size // num_heads


def with_dense(layers: tuple[LayerConfig, ...], ffn: GatedMLP, is_dense: Sequence[bool]) -> tuple[LayerConfig, ...]:
    """Return the description of each layer, with `ffn` in place of its experts where `is_dense` says so."""
    if not any(is_dense):
        return layers
    each = layers if len(layers) > 1 else layers * len(is_dense)
    return tuple(replace(one, ffn=ffn) if dense else one for one, dense in zip(each, is_dense, strict=True))


def _mlp_size(config: ConfigFile, layers: tuple[LayerConfig, ...]) -> int:
    """Return the width of the MLPs; files of models whose layers all have experts may lack it."""
    if "intermediate_size" not in config and all(isinstance(layer.ffn, Experts) for layer in layers):
        return 0
    return config.size("intermediate_size")


def windowed(layer: LayerConfig, windows: Sequence[int | None]) -> tuple[LayerConfig, ...]:
    """Return the descriptions of layers with these windows that are alike otherwise; one if the windows are, too."""
    of_layers = windows if len(set(windows)) > 1 else windows[:1]
    return tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for window in of_layers)


def windows(config: ConfigFile, slides: Callable[[int], bool], default: int | None = 4096) -> tuple[int | None, ...]:
    """Return the window of each layer: sliding_window or None.

    Args:
        config: config.json. Its field layer_types, if present, says which layers have the window.
        slides: says it in the absence of that field, given the index of a layer.
        default: of the field sliding_window.

    Returns:
        One window for each layer; None for all layers if sliding_window is null.
    """
    window = config.size("sliding_window", config.unless_null("sliding_window", default))
    if window is None:
        return (None,) * config.size("num_hidden_layers", most=MAX_LAYERS)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types(config, slides))


def mixers_by_type(
    config: ConfigFile, attention: Attention, types: Sequence[str], turns: Mapping[str, Rope], window: int
) -> dict[str, Attention]:
    """Return the mixers of the layers that attend, by the type of the layer.

    Args:
        config: config.json.
        attention: the mixer, which has no window and no rotation yet.
        types: of the layers. The field sliding_window counts where some are "sliding_attention".
        turns: how the heads of each type turn, as `ropes.read_types` gives it.
        window: default of the field sliding_window.
    """
    mixers = {"full_attention": replace(attention, rope=turns["full_attention"])}
    if "sliding_attention" not in types:
        config.ignore("sliding_window")  # some releases have 0
        return mixers
    config.refuse_null("sliding_window")
    size = config.size("sliding_window", window)
    return mixers | {"sliding_attention": replace(attention, window=size, rope=turns["sliding_attention"])}


def layer_types(config: ConfigFile, slides: Callable[[int], bool]) -> tuple[str, ...]:
    """Return "full_attention" or "sliding_attention" for each layer; `config` and `slides` are as in `windows`."""
    num_layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    types = config.get("layer_types", list, None)
    if types is None:
        return tuple("sliding_attention" if slides(i) else "full_attention" for i in range(num_layers))
    if len(types) != num_layers or not all(t in ("full_attention", "sliding_attention") for t in types):
        raise ValueError(
            f"{config.where('layer_types')} must be {num_layers} times 'full_attention' or 'sliding_attention', "
            f"got {types!r}"
        )
    return tuple(types)


def outer_params(config: DecoderConfig, tensors: Tensors, names: OuterNames) -> dict[str, Any]:
    """Read the parameters outside the layers."""
    table, embedding = (config.vocab_size, config.hidden_size), f"model.{names.embedding}.weight"
    params = {"embedding": tensors.table(embedding, *table)}
    params |= norm_params(config, tensors, "norm", "model", names.norm)
    if config.head_has_bias:
        params["head_bias"] = tensors.vectors({f"{names.head}.bias": config.vocab_size})
    if not config.tie_embeddings:
        return params | {"head": tensors.table(f"{names.head}.weight", *table)}
    tensors.check_same(f"{names.head}.weight", embedding, *table)
    return params


def norm_params(config: DecoderConfig, tensors: Tensors, param: str, block: str, name: str | None) -> dict[str, Array]:
    """Read the parameters of a norm of the stream, given their name, and the name of the norm in a block of the files.

    A norm without a name is not in the files and has the scale 1.
    """
    if name is None:
        return {param: tensors.ones(config.hidden_size)}
    params = {param: tensors.vectors({f"{block}.{name}.weight": config.hidden_size})}
    if config.norms_have_biases:
        params[f"{param}_bias"] = tensors.vectors({f"{block}.{name}.bias": config.hidden_size})
    return params


def layer_params(
    config: DecoderConfig,
    layer: LayerConfig,
    tensors: Tensors,
    name: str,
    norms: Mapping[str, str | None] = NORMS,
    inputs: int | None = None,
    mixture: Mixture | None = None,
    attention: AttentionNames = ATTENTION,
    mlp: MLPNames = NAMES,
    delta: DeltaNames | None = None,
) -> dict[str, Array]:
    """Read the parameters of a layer as `LayerConfig.shapes` names them, with projections of one input concatenated.

    Args:
        config: sizes and options.
        layer: the kinds and options of the layer.
        tensors: the tensors, with the names of Llama.
        name: of the layer, the prefix of the names of its tensors.
        norms: as `decoder` takes them.
        inputs: numbers of a token that attention reads; None is the hidden size.
        mixture: as `decoder` takes it.
        attention: as `decoder` takes it.
        mlp: as `decoder` takes it.
        delta: the names of the tensors of a gated delta net; None is as Qwen's hybrids have them.
    """
    hidden, params = config.hidden_size, {}
    for param, norm in norms.items():
        params |= norm_params(config, tensors, param, name, norm)
    if isinstance(layer.mixer, ChannelDeltaNet):
        params |= _channel_delta_params(config, layer.mixer, tensors, f"{name}.self_attn")
    elif isinstance(layer.mixer, DeltaNet):
        names = delta or (OF_HEADS if layer.mixer.by_heads else DeltaNames())
        params |= _delta_params(config, layer.mixer, tensors, f"{name}.linear_attn", names)
    elif isinstance(layer.mixer, Mamba2):
        params |= mamba_params(config, layer.mixer, tensors, f"{name}.mamba")
    elif isinstance(layer.mixer, LatentAttention):
        params |= _latent_params(config, layer.mixer, tensors, f"{name}.self_attn")
    else:
        block = f"{name}.{attention.block}"
        params |= attention_params(config, layer.mixer, tensors, block, inputs or hidden, attention)
    if isinstance(layer.beside, Mamba2):
        params |= mamba_params(config, layer.beside, tensors, f"{name}.mamba")
    if isinstance(layer.ffn, GatedMLP):
        params |= mlp_params(config, layer.ffn, tensors, name, mlp)
    elif isinstance(layer.ffn, MLP):
        params |= ungated_params(
            config, tensors, f"{name}.{mlp.block}", config.mlp_size, mlp, has_bias=layer.ffn.has_bias
        )
        if layer.ffn.activation == XIELU:
            params["mlp_alphas"] = tensors.vectors({f"{name}.mlp.act_fn.alpha_{sign}": 1 for sign in "pn"})
    elif mixture is not None:
        params |= mixture.params(config, layer.ffn, tensors, name)
    if layer.has_scale:
        params["layer_scale"] = tensors.vectors({f"{name}.layer_scalar": 1})
    if layer.input is not None:
        size, matrices = layer.input.size, partial(tensors.matrices, transposed=config.transposed)
        params["input_gate"] = matrices(hidden, {f"{name}.per_layer_input_gate.weight": size})
        params["input_out"] = matrices(size, {f"{name}.per_layer_projection.weight": hidden})
        params["input_norm"] = tensors.vectors({f"{name}.post_per_layer_input_norm.weight": hidden})
    return params


def attention_params(
    config: DecoderConfig,
    mixer: Attention,
    tensors: Tensors,
    name: str,
    inputs: int,
    names: AttentionNames = ATTENTION,
) -> dict[str, Array]:
    """Read the parameters of attention that reads `inputs` numbers of a token."""
    config = mixer.sized(config)
    size, matrices = config.head_size, partial(tensors.matrices, transposed=config.transposed)
    query, key_value, value_size = config.num_heads * size, config.num_kv_heads * size, mixer.value_size or size
    widths = {"q_proj": mixer.query_parts * query, "k_proj": key_value, "v_proj": config.num_kv_heads * value_size}
    absent = ["k_proj", "v_proj"] if mixer.keys_of is not None else [] if mixer.has_values else ["v_proj"]
    widths = {part: width for part, width in widths.items() if part not in absent}
    widths = _stored(tensors, name, widths, names.whole)
    params = {
        "qkv": matrices(inputs, {f"{part}.weight": width for part, width in widths.items()}),
        "attention_out": matrices(config.num_heads * value_size, {f"{name}.{names.out}.weight": config.hidden_size}),
    }
    if mixer.output_gate is not None:
        stored = "g_proj" if f"{name}.g_proj.weight" in tensors else "gate_proj"
        width = config.num_heads * mixer.output_gate.size(size)
        params["attention_gate"] = matrices(inputs, {f"{name}.{stored}.weight": width})
    if mixer.has_bias:
        params["qkv_bias"] = tensors.vectors({f"{part}.bias": width for part, width in widths.items()})
    if mixer.has_out_bias:
        params["attention_out_bias"] = tensors.vectors({f"{name}.{names.out}.bias": config.hidden_size})
    if mixer.has_sinks:
        params["sinks"] = tensors.vectors({f"{name}.sinks": config.num_heads})
    if mixer.has_head_norms:
        of_query, of_key = names.query_norm, names.key_norm
        if mixer.norms_turned:
            of_query, of_key = "query_layernorm", "key_layernorm"

        def scale(stored: str, heads: int) -> Array:
            if mixer.norms_by_head and f"{name}.{stored}.norms.0.weight" in tensors:
                return tensors.rows([f"{name}.{stored}.norms.{i}.weight" for i in range(heads)], size)
            if mixer.norms_by_head:
                return tensors.table(f"{name}.{stored}.weight", heads, size)
            return tensors.vectors({f"{name}.{stored}.weight": size})

        params["query_norm"] = scale(of_query, config.num_heads)
        if mixer.keys_of is None:
            params["key_norm"] = scale(of_key, config.num_kv_heads)
        if mixer.norms_have_biases:
            params["query_norm_bias"] = tensors.vectors({f"{name}.{of_query}.bias": size})
            params["key_norm_bias"] = tensors.vectors({f"{name}.{of_key}.bias": size})
    if mixer.has_wide_norms:
        params["query_norm"] = tensors.vectors({f"{name}.q_norm.weight": query})
        params["key_norm"] = tensors.vectors({f"{name}.k_norm.weight": key_value})
    return params


def _stored(tensors: Tensors, name: str, parts: dict[str, int], whole: str) -> dict[str, int]:
    """Return the outputs of matrices of one input by their names in the files, which may have one for all parts."""
    if f"{name}.{whole}.weight" in tensors:
        return {f"{name}.{whole}": sum(parts.values())}
    return {f"{name}.{part}": width for part, width in parts.items()}


def _delta_params(
    config: DecoderConfig, mixer: DeltaNet, tensors: Tensors, name: str, names: DeltaNames
) -> dict[str, Array]:
    """Read the parameters of a gated delta net."""
    hidden, heads, key = config.hidden_size, mixer.num_value_heads, mixer.num_key_heads * mixer.key_size
    width, matrices = heads * mixer.value_size, partial(tensors.matrices, transposed=config.transposed)
    # Sizes by the number of tensors that the files have.
    sizes = {1: (mixer.channels + width,), 2: (mixer.channels, width), 4: (key, key, width, width)}
    rates = {1: (2 * heads,), 2: (heads, heads)}
    convolutions = [f"{name}.{part}.weight" for part in names.convolutions]

    def named(parts: tuple[str, ...], sizes: dict[int, tuple[int, ...]]) -> dict[str, int]:
        return {f"{name}.{part}.weight": size for part, size in zip(parts, sizes[len(parts)], strict=True)}

    return {
        "delta_in": matrices(hidden, named(names.parts, sizes)),
        "delta_rates": matrices(hidden, named(names.rates, rates)),
        "delta_conv": tensors.taps(convolutions, mixer.channels, mixer.conv_size),
        "delta_decay": tensors.vectors({f"{name}.A_log": heads}),
        "delta_decay_bias": tensors.vectors({f"{name}.dt_bias": heads}),
        "delta_scale": tensors.vectors({f"{name}.{names.norm}.weight": mixer.value_size}),
        "delta_out": matrices(width, {f"{name}.{names.out}.weight": hidden}),
    }


def _channel_delta_params(
    config: DecoderConfig, mixer: ChannelDeltaNet, tensors: Tensors, name: str
) -> dict[str, Array]:
    """Read the parameters of a delta net with a decay of each number of a key."""
    hidden, heads, rank = config.hidden_size, mixer.num_value_heads, mixer.rank
    key, width = mixer.num_key_heads * mixer.key_size, heads * mixer.value_size
    decays, conv = f"{name}.forget_gate", [f"{name}.{part}_conv1d.weight" for part in "qkv"]
    decays = decays if f"{decays}.A_log" in tensors else name
    conv = conv if conv[0] in tensors else [f"{name}.conv1d.weight"]

    def matrix(inputs: int, outputs: dict[str, int]) -> Array:
        named = {f"{part}.weight": size for part, size in outputs.items()}
        return tensors.matrices(inputs, named, transposed=config.transposed)

    return {
        "delta_qkv": matrix(hidden, {f"{name}.q_proj": key, f"{name}.k_proj": key, f"{name}.v_proj": width}),
        "delta_beta": matrix(hidden, {f"{name}.b_proj": heads}),
        "delta_decay_down": matrix(hidden, {f"{decays}.f_a_proj": rank}),
        "delta_decay_up": matrix(rank, {f"{decays}.f_b_proj": heads * mixer.key_size}),
        "delta_gate_down": matrix(hidden, {f"{name}.g_a_proj": rank}),
        "delta_gate_up": matrix(rank, {f"{name}.g_b_proj": width}),
        "delta_conv": tensors.taps(conv, mixer.channels, mixer.conv_size),
        "delta_decay": tensors.row(f"{decays}.A_log", 1, 1, heads, 1),
        "delta_channel_bias": tensors.vectors({f"{decays}.dt_bias": heads * mixer.key_size}),
        "delta_scale": tensors.vectors({f"{name}.o_norm.weight": mixer.value_size}),
        "delta_out": matrix(width, {f"{name}.o_proj": hidden}),
    }


def mamba_params(config: DecoderConfig, mixer: Mamba2, tensors: Tensors, name: str) -> dict[str, Array]:
    """Read the parameters of a layer of Mamba-2."""
    hidden, heads, width = config.hidden_size, mixer.num_value_heads, mixer.width
    outputs, matrices = width + mixer.channels + heads, partial(tensors.matrices, transposed=config.transposed)
    params = {
        "mamba_in": matrices(hidden, {f"{name}.in_proj.weight": outputs}),
        "mamba_conv": tensors.table(f"{name}.conv1d.weight", mixer.channels, 1, mixer.conv_size),
        "mamba_decay": tensors.vectors({f"{name}.A_log": heads}),
        "mamba_step_bias": tensors.vectors({f"{name}.dt_bias": heads}),
        "mamba_skip": tensors.vectors({f"{name}.D": heads}),
        "mamba_out": matrices(width, {f"{name}.out_proj.weight": hidden}),
    }
    if mixer.has_norm:
        params["mamba_scale"] = tensors.vectors({f"{name}.norm.weight": width})
    if mixer.has_bias:
        params["mamba_in_bias"] = tensors.vectors({f"{name}.in_proj.bias": outputs})
    if mixer.has_out_bias:
        params["mamba_out_bias"] = tensors.vectors({f"{name}.out_proj.bias": hidden})
    if mixer.has_conv_bias:
        params["mamba_conv_bias"] = tensors.vectors({f"{name}.conv1d.bias": mixer.channels})
    return params


def _latent_params(config: DecoderConfig, mixer: LatentAttention, tensors: Tensors, name: str) -> dict[str, Array]:
    """Read the parameters of attention on latents."""
    hidden, heads, rank = config.hidden_size, config.num_heads, mixer.query_rank
    size, latent = heads * mixer.query_size, mixer.latent_size

    def matrix(part: str, inputs: int, outputs: int) -> Array:
        return tensors.matrices(inputs, {f"{name}.{part}.weight": outputs}, transposed=config.transposed)

    params = {
        "latent_down": matrix("kv_a_proj_with_mqa", hidden, latent),
        "latent_norm": tensors.vectors({f"{name}.kv_a_layernorm.weight": mixer.rank}),
        "latent_up": tensors.floats(
            f"{name}.kv_b_proj.weight", heads * (mixer.key_size + mixer.value_size), mixer.rank
        ),
        "attention_out": matrix("o_proj", heads * mixer.value_size, hidden),
    }
    if rank is None:
        params["query_up"] = matrix("q_proj", hidden, size)
    else:
        params["query_down"] = matrix("q_a_proj", hidden, rank)
        params["query_down_norm"] = tensors.vectors({f"{name}.q_a_layernorm.weight": rank})
        params["query_up"] = matrix("q_b_proj", rank, size)
    if mixer.has_bias:
        params["latent_down_bias"] = tensors.vectors({f"{name}.kv_a_proj_with_mqa.bias": latent})
        params["attention_out_bias"] = tensors.vectors({f"{name}.o_proj.bias": hidden})
    if mixer.has_bias and rank is not None:
        params["query_down_bias"] = tensors.vectors({f"{name}.q_a_proj.bias": rank})
    return params


def mlp_params(
    config: DecoderConfig, ffn: GatedMLP, tensors: Tensors, name: str, names: MLPNames = NAMES
) -> dict[str, Array]:
    """Read the parameters of the MLP of a layer, whose name is the prefix of the names of its tensors."""
    hidden, size, turned, block = config.hidden_size, ffn.width(config), config.transposed, f"{name}.{names.block}"
    gate_up = _stored(tensors, block, dict.fromkeys(names.parts, size), names.whole)
    params = {
        "gate_up": tensors.matrices(hidden, {f"{one}.weight": n for one, n in gate_up.items()}, transposed=turned),
        "mlp_out": tensors.matrices(size, {f"{block}.{names.out}.weight": hidden}, transposed=turned),
    }
    if ffn.has_bias:
        params["gate_up_bias"] = tensors.vectors({f"{one}.bias": n for one, n in gate_up.items()})
        params["mlp_out_bias"] = tensors.vectors({f"{block}.{names.out}.bias": hidden})
    return params


def ungated_params(
    config: DecoderConfig, tensors: Tensors, block: str, size: int, names: MLPNames = NAMES, *, has_bias: bool = False
) -> dict[str, Array]:
    """Read the parameters of an MLP of some width without a gate, whose name is the prefix of the names."""
    hidden, turned = config.hidden_size, config.transposed
    up, out = f"{block}.{names.parts[-1]}", f"{block}.{names.out}"
    params = {
        "mlp_in": tensors.matrices(hidden, {f"{up}.weight": size}, transposed=turned),
        "mlp_out": tensors.matrices(size, {f"{out}.weight": hidden}, transposed=turned),
    }
    if has_bias:
        params["mlp_in_bias"] = tensors.vectors({f"{up}.bias": size})
        params["mlp_out_bias"] = tensors.vectors({f"{out}.bias": hidden})
    return params


def _params(
    config: DecoderConfig,
    tensors: Tensors,
    outer: OuterNames,
    ignored: tuple[str, ...],
    **names: Any,
) -> PyTree:
    """Read the parameters as `decoder.param_shapes` names them, given further arguments of `layer_params`."""

    def read(layer: LayerConfig, name: str) -> dict[str, Any]:
        return layer_params(config, layer, tensors, name, **names)

    # Old checkpoints store the constants of the rotation.
    return params_of_layers(config, tensors, read, outer, ("*.rotary_emb.inv_freq", *ignored))


def params_of_layers(
    config: DecoderConfig,
    tensors: Tensors,
    read: Callable[[LayerConfig, str], dict[str, Any]],
    outer: OuterNames = OUTER,
    ignored: tuple[str, ...] = (),
) -> PyTree:
    """Read the parameters of the layers and outside them, and check that the files have no others.

    Args:
        config: the sizes.
        tensors: the tensors.
        read: function of the description and the name of a layer that returns its parameters.
        outer: the names of the tensors outside the layers, and of the layers.
        ignored: as `decoder` takes them.
    """
    params = outer_params(config, tensors, outer)
    params["layers"] = {i: read(layer, f"model.{outer.layers}.{i}") for i, layer in enumerate(config.each_layer)}
    if config.input is not None:
        width = config.num_layers * config.input.size
        names = {"model.per_layer_model_projection.weight": width}
        params["input_embedding"] = tensors.table("model.embed_tokens_per_layer.weight", config.vocab_size, width)
        params["input_projection"] = tensors.matrices(config.hidden_size, names, transposed=config.transposed)
        params["input_projection_norm"] = tensors.vectors({"model.per_layer_projection_norm.weight": config.input.size})
    tensors.check_all_read(*ignored)
    return params
