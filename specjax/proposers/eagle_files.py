"""Read the checkpoints of EAGLE heads, in the layouts of those who train them.

The weights lie flat beside a config of Llama (the authors, SpecForge, SGLang, ModelOpt, DeepSpec), or the config of the
layers is a separate table (speculators, files converted for vLLM). Sizes and options that the tensors show are read
from them, because configs are often copies of another model's.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.models.directory import Checkpoint
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.proposers import files
from specjax.proposers.drawing import Reduced
from specjax.proposers.eagle import EagleHead, eagle
from specjax.proposers.eagle3 import Eagle3Head, eagle3
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.p_eagle import ParallelEagle, p_eagle
from specjax.types import Array, Model, PyTree
from specjax.validation import is_integer

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.decoder import DecoderConfig
    from specjax.models.tensors import Tensors

NORMS = {"mlp_norm": "post_attention_layernorm"}  # of the first layer, which has no separate norm before attention
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MODEL_TYPES = "llama", "mistral", "qwen2", "qwen3"  # whose layers these are
MASK_TOKENS = "mask_token_id", "ptd_token_id", "pard_token"
CHANGING = "*norm*", "*residual*", "*mtp*", "*parallel*", "fusion*", "*sliding*", "truncated_vocab_size"


def kind_of(fields: Mapping[str, Any], names: list[str]) -> str | None:
    """Return "eagle", "eagle3" or "p_eagle" for the config.json and the tensors of such a head, and None for others."""
    found = {name.removeprefix("model.") for name in names}
    if "mask_hidden" in found:
        return "p_eagle"
    of_eagle3 = {"midlayer.self_attn.q_proj.weight", "layers.0.hidden_norm.weight"}
    if of_eagle3 & found or isinstance(fields.get("eagle_config"), dict):
        return "eagle3"
    if {"fusion_fc.weight", "transformer.self_attn.q_proj.weight"} <= found:
        return "eagle"
    is_eagle = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= found and "hidden_norm.weight" not in found
    return "eagle" if is_eagle else None


def feature_layers(config: "ConfigFile", tensors: "Tensors", target: Model) -> tuple[int, ...]:
    """Return the layers of the target that an EAGLE-3 head reads.

    Ids count layers whose input is read, so that j is the residual stream after j layers; but where the first one is 1,
    they count layers whose output is read, and `target_layer_ids` always do. Files without ids mean 2, n / 2 and n - 3.
    """
    count, num_layers = _num_taps(config, tensors, target), files.num_layers(target)
    if not count:
        return ()
    by_output = config.get("target_layer_ids", list, None)
    place = config.table("eagle_config") if LAYER_IDS in config.table("eagle_config") else config
    ids = by_output or place.get(LAYER_IDS, list, None)
    name = config.where("target_layer_ids") if by_output else place.where(LAYER_IDS)
    if not ids:
        ids = [2, num_layers // 2, num_layers - 3]
    elif not all(type(layer) is int for layer in ids):
        raise ValueError(f"{name} must be integers, got {ids!r}")
    elif by_output or ids[0] == 1:
        ids = [layer + 1 for layer in ids]
    if len(ids) != count:
        size = files.target_weights(target).hidden_size
        raise files.other_target(
            f"{name} must be {count} layers, those of fc.weight for H = {size}, the hidden size of the target, "
            f"got {len(ids)}"
        )
    if not all(0 <= layer <= num_layers for layer in ids):
        raise files.other_target(f"{name} must be layers of the target, which has {num_layers}, got {ids}")
    return tuple(ids)


def load_eagle(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> FeatureDraft:
    """Load a head of EAGLE, EAGLE-2 or HASS; see `proposers.load`."""
    config, tensors = files.open_directory(directory, target, fields)
    inner, first, fc = config, "model.layers.0", "model.fc"
    if config.get("model_type", str, None) == "eagle":
        inner = config.table("model")
    elif "speculators_model_type" in config:
        config.choice("speculators_model_type", ("eagle",))
        config.only("layernorms", False)
        inner, first, fc = config.table("transformer_layer_config"), "transformer", "fusion_fc"
    layers = _read_layers(inner, tensors, first, rope_theta)
    if first == "transformer":  # the one layer; the config may be the target's, with its number of layers
        layers = replace(layers, num_layers=1)
    has_bias = any((f"{fc}.bias" in tensors, *(config.get(name, bool, False) for name in ("bias", "fusion_bias"))))
    hidden = layers.hidden_size
    weights = files.target_weights(target)
    files.expect(inner.where("hidden_size"), hidden, weights.hidden_size, "the hidden size of the target")
    files.expect(inner.where("vocab_size"), layers.vocab_size, target.vocab_size, "the vocabulary of the target")
    _refuse_unread(config, inner)
    params = {
        "fc": tensors.matrices(2 * hidden, {f"{fc}.weight": hidden}, transposed=layers.transposed),
        "layers": _layer_params(layers, tensors, first, hidden),
        **_tables(layers, tensors, target, None),
    }
    if has_bias:
        params["fc_bias"] = tensors.vectors({f"{fc}.bias": hidden})
    tensors.check_all_read("*.rotary_emb.inv_freq")
    return eagle(EagleHead(layers, has_bias), params, files.num_drafts(num_draft_tokens), temperature=temperature)


def load_eagle3(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> FeatureDraft | ParallelEagle:
    """Load a head of EAGLE-3, EAGLE-3.1 or P-EAGLE; see `proposers.load`."""
    config, tensors = files.open_directory(directory, target, fields)
    if "model.mask_hidden" in tensors:
        config.ignore("parallel_drafting")
    layer_ids = feature_layers(config, tensors, target)
    if target.feature_layers != layer_ids:
        raise ValueError(
            f"target must have feature_layers = {layer_ids}, those of the head in {config.path.parent}, which "
            f"models.load or models.with_feature_layers gives it, got {target.feature_layers}"
        )
    head, first = _read_head(config, tensors, target, rope_theta)
    name = "model.lm_head.weight"
    rows = tensors.shape(name)[0] if name in tensors else target.vocab_size
    size = config.size("draft_vocab_size", rows, most=target.vocab_size)
    reduced = _vocabulary(tensors, size, target.vocab_size)
    head = replace(head, config=replace(head.config, vocab_size=size))
    mask_token = None
    if "model.mask_hidden" in tensors:
        name = next((name for name in MASK_TOKENS if name in config), MASK_TOKENS[0])
        mask_token = config.get(name, int)
        num_draft_tokens = _checked_depth(config, num_draft_tokens)
    params = _head_params(head, tensors, target, first, reduced)
    tensors.check_all_read("*.rotary_emb.inv_freq")
    options = {"reduced": reduced, "temperature": temperature}
    if mask_token is None:
        return eagle3(head, params, files.num_drafts(num_draft_tokens), **options)
    return p_eagle(head, params, files.num_drafts(num_draft_tokens), mask_token=mask_token, **options)


def _checked_depth(config: "ConfigFile", num_draft_tokens: int | None) -> int | None:
    """Return K, by default the number of drafts that a head was trained with, if the file says so.

    Raises:
        ValueError: K is more than that number.
    """
    about = config.table("speculators_config")
    methods = about.get("proposal_methods", list, [])
    depth = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
    if depth is None or not is_integer(depth):
        return num_draft_tokens
    return files.check_depth(num_draft_tokens, depth, about.where("proposal_methods[0].speculative_tokens"))


def _num_taps(config: "ConfigFile", tensors: "Tensors", target: Model) -> int:
    """Return how many layers of the target `fc` reads; 0 where there is no `fc`, and the head reads the last one."""
    if config.table("eagle_config").get("use_aux_hidden_state", bool, True) is False:
        return 0
    inputs, size = tensors.shape("model.fc.weight")[-1], files.target_weights(target).hidden_size
    if inputs % size:
        raise ValueError(
            f"tensor fc.weight of {config.path.parent} must have a multiple of H = {size} columns, the hidden size of "
            f"the target, got {inputs}"
        )
    return inputs // size


def _read_head(
    config: "ConfigFile", tensors: "Tensors", target: Model, rope_theta: float | None
) -> tuple[Eagle3Head, str]:
    """Return the head as the files describe it, and the name of its first layer."""
    is_nested = "speculators_model_type" in config
    inner = config.table("transformer_layer_config") if is_nested else config
    first = "model.midlayer" if "model.midlayer.self_attn.q_proj.weight" in tensors else "model.layers.0"
    layers = _read_layers(inner, tensors, first, rope_theta)
    size = files.target_weights(target).hidden_size
    given = config if "target_hidden_size" in config else inner
    target_size = given.size("target_hidden_size", layers.hidden_size)
    name = "target_hidden_size" if "target_hidden_size" in given else "hidden_size"
    files.expect(given.where(name), target_size, size, "the hidden size of the target")
    files.expect(inner.where("vocab_size"), layers.vocab_size, target.vocab_size, "the vocabulary of the target")
    if is_nested:
        config.choice("speculators_model_type", ("eagle3", "peagle"))
    head = Eagle3Head(
        layers,
        size,
        _num_taps(config, tensors, target),
        tap_norms=_tap_norms(config, tensors),
        has_feature_norm=f"{first}.hidden_norm.weight" in tensors,
        # The layouts with a table of layers have had either default, so the file must say.
        norm_before_residual=config.get("norm_before_residual", bool, *(() if is_nested else (False,))),
        norm_output=config.get("norm_output", bool, False),
    )
    options = config.table("eagle_config")
    options.ignore("use_aux_hidden_state", LAYER_IDS)
    for name, value in (("use_input_layernorm_in_first_layer", True), ("use_last_layernorm", True)):
        options.only(name, value)
    options.only("next_layer_regular", True)
    options.only("parallel_draft_step", 1)
    options.ignore("parallel_draft_heads_num_layers")  # of the heads for further steps
    files.refuse_unread(options, *CHANGING)
    _refuse_unread(config, inner)
    return head, first


def _tap_norms(config: "ConfigFile", tensors: "Tensors") -> str | None:
    each = config.get("fc_norm", bool, False) or "model.fc_norm.0.weight" in tensors
    whole = config.get("norm_before_fc", bool, False) or "model.input_norm.weight" in tensors
    if each and whole:
        raise ValueError(f"{config.where('fc_norm')} must be False where norm_before_fc is True, got both")
    return "each" if each else "all" if whole else None


def _read_layers(config: "ConfigFile", tensors: "Tensors", first: str, rope_theta: float | None) -> "DecoderConfig":
    """Return sizes and options of the layers. A head has the biases and norms in its files."""
    from specjax.models.families.llama import config_of

    config.choice("model_type", MODEL_TYPES, MODEL_TYPES[0])
    config.only("hidden_act", "silu")
    attention = f"{first}.self_attn"
    mixer = Attention(
        has_bias=config.get("attention_bias", bool, False) or f"{attention}.q_proj.bias" in tensors,
        has_out_bias=f"{attention}.o_proj.bias" in tensors,
        has_head_norms=f"{attention}.q_norm.weight" in tensors,
    )
    ffn = GatedMLP(has_bias=config.get("mlp_bias", bool, False) or f"{first}.mlp.up_proj.bias" in tensors)
    layers = config_of(config, (LayerConfig(mixer, ffn),), transposed=tensors.on_one_gpu)
    return layers if rope_theta is None else replace(layers, rope_theta=float(rope_theta))


def _refuse_unread(config: "ConfigFile", inner: "ConfigFile") -> None:
    """Raise ValueError for fields that may change the computation and that nothing has read."""
    for one in (config, inner):
        if not one.get("use_sliding_window", bool, False):  # a config of Qwen has a window that it does not use
            one.ignore("sliding_window", "max_window_layers")
        one.check_computation()
        files.refuse_unread(one, *CHANGING)


def _layer_params(layers: "DecoderConfig", tensors: "Tensors", first: str, inputs: int) -> dict[int, PyTree]:
    from specjax.models.families import llama

    start, *rest = layers.each_layer
    params = {0: llama.layer_params(layers, start, tensors, first, NORMS, inputs)}
    for i, layer in enumerate(rest, 1):
        params[i] = llama.layer_params(layers, layer, tensors, f"model.layers.{i}")
    return params


def _head_params(head: Eagle3Head, tensors: "Tensors", target: Model, first: str, reduced: Reduced | None) -> PyTree:
    """Read the parameters as `Eagle3Head.shapes` names them, and the tables."""
    layers, hidden = head.config, head.hidden_size
    width = head.num_taps * head.target_size
    params = {
        "embedding_norm": tensors.vectors({f"{first}.input_layernorm.weight": hidden}),
        "layers": _layer_params(layers, tensors, first, 2 * hidden),
        "norm": tensors.vectors({"model.norm.weight": hidden}),
        **_tables(layers, tensors, target, reduced),
    }
    if head.has_feature_norm:
        params["feature_norm"] = tensors.vectors({f"{first}.hidden_norm.weight": hidden})
    if head.num_taps:
        params["fc"] = tensors.matrices(width, {"model.fc.weight": hidden}, transposed=layers.transposed)
    if head.tap_norms == "each":
        params["tap_norm"] = tensors.vectors(
            {f"model.fc_norm.{i}.weight": head.target_size for i in range(head.num_taps)}
        )
    elif head.tap_norms == "all":
        params["tap_norm"] = tensors.vectors({"model.input_norm.weight": width})
    if "model.mask_hidden" in tensors:
        params["mask_taps"] = tensors.table("model.mask_hidden", 1, 1, width)[0, 0]
    return params


def _tables(layers: "DecoderConfig", tensors: "Tensors", target: Model, reduced: Reduced | None) -> dict[str, Array]:
    """Return the embedding and the head of a drafter: its own, or else the target's."""
    own, hidden = files.target_weights(target), layers.hidden_size
    tables = {}
    if "model.embed_tokens.weight" in tensors:
        tables["embedding"] = tensors.table("model.embed_tokens.weight", target.vocab_size, hidden)
    elif hidden == own.hidden_size:
        tables["embedding"] = own.embedding
    else:
        raise ValueError(
            f"the files must hold the tensor embed_tokens.weight, as the head has {hidden} numbers a token and the "
            f"target {own.hidden_size}, got none"
        )
    if "model.lm_head.weight" in tensors:
        tables["lm_head"] = tensors.table("model.lm_head.weight", layers.vocab_size, hidden)
    elif layers.tie_embeddings and "model.embed_tokens.weight" in tensors:
        tables["lm_head"] = tables["embedding"]
    else:
        files.expect("hidden_size of a head without lm_head.weight", hidden, own.hidden_size, "that of the target")
        tables["lm_head"] = own.head
    if reduced is not None and tables["lm_head"].shape[0] != layers.vocab_size:
        tables["lm_head"] = tables["lm_head"][reduced.target_ids]
    return tables


def _vocabulary(tensors: "Tensors", size: int, vocab_size: int) -> Reduced | None:
    """Return the draft vocabulary, which d2t tells by offsets, and t2d by the tokens that it has."""
    offsets = tensors.integers("model.d2t", size) if "model.d2t" in tensors else None
    is_in = tensors.integers("model.t2d", vocab_size).astype(bool) if "model.t2d" in tensors else None
    if is_in is not None and is_in.sum() != size:
        raise ValueError(f"tensor t2d must name D = {size} tokens, got {is_in.sum()}")
    ids = None if is_in is None else np.flatnonzero(is_in)
    if offsets is not None:
        own = np.arange(size) + offsets
        if ids is not None and not np.array_equal(np.sort(own), ids):
            raise ValueError("tensors d2t and t2d must name the same tokens, got different ones")
        ids = own
    if ids is not None and size == vocab_size and np.array_equal(ids, np.arange(size)):
        return None
    return files.draft_vocabulary("tensor d2t", ids, size, vocab_size)
