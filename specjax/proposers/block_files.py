"""Read the checkpoints of DFlash, DFlash2, DSpark and JetSpec, in the layouts of those who train them.

The authors of DFlash write a config of Qwen3 with the table `dflash_config`, and each mask token gives the draft at its
own place. JetSpec writes the same with `causal_head` in the table: the tokens of a block then see none after them.
DeepSpec writes all fields flat, and the pending token gives the first draft. speculators keeps the sizes of the layers
in `transformer_layer_config` and says by `sample_from_anchor` which of the two it is; where it does not, only blocks of
DSpark are of the second kind. Its windows are the positions before a block, the same for all tokens of the block; all
others are counted from each token.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specjax.models.directory import Checkpoint
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers import files
from specjax.proposers.block_draft import BlockDraft, BlockHead
from specjax.proposers.dflash import dflash
from specjax.proposers.dflash2 import dflash2
from specjax.proposers.drawing import Reduced
from specjax.proposers.dspark import dspark
from specjax.types import Array, Model, PyTree

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.decoder import DecoderConfig
    from specjax.models.tensors import Tensors

MARKOV, CONFIDENCE, SELECTOR = "markov_head.markov_w", "confidence_head.proj", "candidate_selector."  # tensors
NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"}
CHANGING = (
    "*markov*",
    "*confidence*",
    "*swa*",
    "*sink*",
    "*causal",
    "*conv*",
    "selector*",
    "*gru*",
    "projector_type",
    "*norm*",
    "*multiplier*",
    "*scale*",
    "*cap*",
    "fusion*",
    "quant*",
    "attention_mode",
    "shift_label",
)
UNUSED = "num_anchors", "use_confidence_head", "confidence_head_alpha"  # of training


class _Configs(NamedTuple):
    """The places of fields in config.json, which may be one and the same."""

    whole: "ConfigFile"
    own: "ConfigFile"  # of the fields that only these drafters have
    layers: "ConfigFile"  # of the fields that Llama has

    def of(self, name: str) -> "ConfigFile":
        """Return the place that has a field, which may also stand beside the table of the drafter's own."""
        return self.whole if name in self.whole and name not in self.own else self.own


def _configs(config: "ConfigFile") -> _Configs:
    own = config.table("dflash_config") if "dflash_config" in config else config
    layers = config.table("transformer_layer_config") if "transformer_layer_config" in config else config
    return _Configs(config, own, layers)


def kind_of(names: list[str]) -> str | None:
    """Return "dspark", "dflash2" or "dflash" for the tensors of such a drafter, and None for others."""
    found = {name.removeprefix("model.") for name in names}
    if not found >= NAMES:
        return None
    if any(name.startswith(SELECTOR) for name in found):
        return "dflash2"
    return "dspark" if any(name.startswith(("markov_head.", "confidence_head.")) for name in found) else "dflash"


def load_block(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None = None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    min_confidence: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> BlockDraft:
    """Load a drafter of DFlash, DFlash2 or DSpark for a target that gives the features it reads.

    Args:
        directory: the checkpoint of the drafter, or its directory.
        target: a built-in model with the `feature_layers` that `feature_layers` returns.
        num_draft_tokens: K, at most the trained depth; None is that.
        rope_theta: base of the rotary frequencies, in place of the base in config.json.
        temperature: the temperature of drafts, as `draft_model` takes it.
        min_confidence: as `dspark` takes it.
        fields: fields of config.json, in place of the fields in the file; `sample_from_anchor` says whether the pending
            token gives the first draft.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    config, tensors = files.open_directory(directory, target, fields)
    configs = _configs(config)
    layers = _feature_layers(configs, tensors, target)
    if target.feature_layers != layers:
        raise ValueError(
            f"target must have feature_layers = {layers}, those of the drafter in {config.path.parent}, which "
            f"models.load or models.with_feature_layers gives it, got {target.feature_layers}"
        )
    head = _read_head(configs, tensors, target, len(layers), rope_theta)
    size = config.size("draft_vocab_size", target.vocab_size, most=target.vocab_size)
    reduced = _vocabulary(tensors, size, target.vocab_size)
    if head.num_candidates and reduced is not None:
        raise ValueError(
            f"a drafter of DFlash2 must have the vocabulary of the target, {target.vocab_size} tokens, got d2t and "
            f"draft_vocab_size = {size} in {config.path.parent}"
        )
    head = replace(head, config=replace(head.config, vocab_size=size))
    _refuse_unread(configs)
    params = _params(head, tensors, target, reduced)
    tensors.check_all_read("*.rotary_emb.inv_freq", "t2d")
    if head.num_candidates:
        return dflash2(head, params, num_draft_tokens, temperature=temperature)
    options = {"reduced": reduced, "temperature": temperature}
    if min_confidence is None and not head.markov_rank:
        return dflash(head, params, num_draft_tokens, **options)
    return dspark(head, params, num_draft_tokens, min_confidence=min_confidence, **options)


def feature_layers(config: "ConfigFile", tensors: "Tensors", target: Model) -> tuple[int, ...]:
    """Return the layers of the target that a drafter reads.

    The ids of `target_layer_ids` count layers whose output is read, from 0, and -1 is the embedding; the ids of
    `aux_hidden_state_layer_ids` count layers whose input is read. Without ids they are spread evenly.
    """
    return _feature_layers(_configs(config), tensors, target)


def _feature_layers(configs: _Configs, tensors: "Tensors", target: Model) -> tuple[int, ...]:
    num_layers, size = files.num_layers(target), files.target_weights(target).hidden_size
    inputs = tensors.shape("fc.weight")[-1]
    if inputs % size:
        raise files.other_target(
            f"tensor fc.weight of {configs.whole.path.parent} must have a multiple of H = {size} columns, the hidden "
            f"size of the target, got {inputs}"
        )
    count = inputs // size
    by_input = "aux_hidden_state_layer_ids"
    name = by_input if by_input in configs.of(by_input) else "target_layer_ids"
    place = configs.of(name)
    ids = place.get(name, list, None)
    if ids is None:
        ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)] if count > 1 else [num_layers // 2]
    if not all(type(layer) is int for layer in ids):
        raise ValueError(f"{place.where(name)} must be integers, got {ids!r}")
    if len(ids) != count:
        raise files.other_target(
            f"{place.where(name)} must be {count} layers, those of fc.weight for H = {size}, the hidden size of the "
            f"target, got {ids}"
        )
    layers = tuple(layer + (name == "target_layer_ids") for layer in ids)
    if not all(0 <= layer <= num_layers for layer in layers):
        where = place.where(name)
        raise files.other_target(f"{where} must be layers of the target, which has {num_layers}, got {ids}")
    return layers


def _read_head(
    configs: _Configs, tensors: "Tensors", target: Model, num_taps: int, rope_theta: float | None
) -> BlockHead:
    of = configs.of
    has_markov, has_confidence = (
        f"{name}.weight" in tensors for name in ("markov_head.markov_w1", "confidence_head.proj")
    )
    # Where the files of speculators lack a field, it has the default of their kind.
    kind = configs.whole.choice("speculators_model_type", ("dflash", "dflash2", "dspark"), "dflash")
    is_anchored = kind == "dspark" if "speculators_model_type" in configs.whole else configs.own is configs.whole
    size, place = files.target_weights(target).hidden_size, of("target_hidden_size")
    given = place.size("target_hidden_size", size)
    files.expect(place.where("target_hidden_size"), given, size, "the hidden size of the target")
    of("projector_type").choice("projector_type", ("dflash", "dspark"), "dflash")
    of("markov_head_type").choice("markov_head_type", ("vanilla",), "vanilla")
    of("attention_sink_bias").only("attention_sink_bias", False)
    rank = of("markov_rank").get("markov_rank", int, 0)
    of("enable_confidence_head").ignore("enable_confidence_head")
    reads_token = of("confidence_head_with_markov").get("confidence_head_with_markov", bool, has_markov)
    layers = _read_layers(configs, tensors, target, rope_theta)
    return BlockHead(
        config=layers,
        num_taps=num_taps,
        target_size=size,
        target_vocab=target.vocab_size,
        block_size=of("block_size").size("block_size"),
        mask_token=of("mask_token_id").get("mask_token_id", int),
        from_anchor=of("sample_from_anchor").get("sample_from_anchor", bool, is_anchored),
        is_causal=_is_causal(configs, kind),
        window_from_anchor=any(layers.windows) and "speculators_model_type" in configs.whole,
        markov_rank=rank if has_markov else 0,
        confidence=("both" if reads_token else "hidden") if has_confidence else None,
        **_of_dflash2(configs, tensors),
    )


def _is_causal(configs: _Configs, kind: str) -> bool | None:
    """Return whether tokens of a block see none after them; None where only those in layers with a window do not."""
    if configs.whole.get("sliding_window_non_causal", bool, kind == "dflash2"):
        return False
    of_jetspec = configs.of("causal_head").get("causal_head", bool, None)
    own = configs.of("causal").get("causal", bool, of_jetspec)
    is_causal = configs.of("is_causal").get("is_causal", bool, own)
    # Where `use_swa` gives windows to layers without the type of a window, their blocks are open.
    return False if is_causal is None and _has_window_everywhere(configs) else is_causal


def _has_window_everywhere(configs: _Configs) -> bool:
    """Return whether `use_swa` gives all layers a window, because no layer has the type of a window."""
    types = configs.layers.get("layer_types", list, None)
    return configs.of("use_swa").get("use_swa", bool, False) and "sliding_attention" not in (types or [])


def _of_dflash2(configs: _Configs, tensors: "Tensors") -> dict[str, int]:
    """Return the sizes of convolutions and of the choice among candidates; none for other drafters."""
    of = configs.of
    for name in ("input_embedding_scale", "output_multiplier"):
        of(name).only(name, 1.0)
    if f"{SELECTOR}predecessor_codebook" not in tensors:
        return {}
    names = {
        "conv_taps": ("conv_kernel_size", 2),
        "conv_group": ("conv_group_size", 16),
        "num_candidates": ("selector_top_k", 16),
        "selector_rank": ("selector_rank", 256),
    }
    return {option: of(name).size(name, default) for option, (name, default) in names.items()}


def _read_layers(configs: _Configs, tensors: "Tensors", target: Model, rope_theta: float | None) -> "DecoderConfig":
    """Return sizes and options of the layers, of which some may have a window."""
    from specjax.models.families import llama

    config = configs.layers
    config.only("hidden_act", "silu")
    norm = "layers.0.self_attn.q_norm.weight"
    size = tensors.shape(norm)[0] if norm in tensors else None
    mixer = Attention(
        has_bias="layers.0.self_attn.q_proj.bias" in tensors,
        has_out_bias="layers.0.self_attn.o_proj.bias" in tensors,
        has_head_norms=size is not None,
    )
    layers = llama.config_of(config, (LayerConfig(mixer),), head_size=size, transposed=tensors.on_one_gpu)
    files.expect(config.where("vocab_size"), layers.vocab_size, target.vocab_size, "the vocabulary of the target")
    layers = replace(layers, layers=llama.windowed(layers.layers[0], _windows(configs)))
    config.check_computation()
    return layers if rope_theta is None else replace(layers, rope_theta=rope_theta)


def _windows(configs: _Configs) -> tuple[int | None, ...]:
    """Return the window of each layer, from the fields of Qwen3 or the drafter's own."""
    from specjax.models.families import llama

    own, layers = configs.of("use_swa"), configs.layers
    types = layers.get("layer_types", list, None)
    if own.get("use_swa", bool, False):
        layers.ignore("sliding_window")
        window, count = own.size("swa_window_size"), layers.size("num_hidden_layers")
        if _has_window_everywhere(configs):
            return (window,) * count
        if len(types) != count:
            raise ValueError(f"{layers.where('layer_types')} must name {count} layers, got {len(types)}")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    own.ignore("swa_window_size")
    if "sliding_attention" not in (types or []):
        layers.ignore("sliding_window")  # copied from the target
        return (None,) * layers.size("num_hidden_layers")
    return llama.windows(layers, lambda layer: False)


def _vocabulary(tensors: "Tensors", size: int, vocab_size: int) -> Reduced | None:
    """Return the draft vocabulary, whose tensor d2t has the offset of each token's id in the target's."""
    if size == vocab_size and "d2t" not in tensors:
        return None
    if "d2t" not in tensors:
        raise ValueError(f"tensor d2t must say which of the {vocab_size} tokens the draft vocabulary of {size} has")
    ids = np.arange(size) + tensors.integers("d2t", size)
    return files.draft_vocabulary("d2t", ids, size, vocab_size)


def _layer_params(head: BlockHead, layer: LayerConfig, tensors: "Tensors", name: str) -> PyTree:
    from specjax.models.families import llama

    config, hidden, taps = head.config, head.config.hidden_size, head.conv_taps
    params = llama.layer_params(config, layer, tensors, name)
    if taps:
        for part in ("attention_conv", "mlp_conv"):
            outputs = {f"{name}.{part}.kernel_projection.weight": 2 * taps * (hidden // head.conv_group)}
            params[part] = tensors.table(f"{name}.{part}.base_kernel", 2, taps, hidden)
            params[f"{part}_kernel"] = tensors.matrices(hidden, outputs, transposed=config.transposed)
    return params


def _params(head: BlockHead, tensors: "Tensors", target: Model, reduced: Reduced | None) -> PyTree:
    config, hidden, weights = head.config, head.config.hidden_size, files.target_weights(target)
    params = {
        "fc": tensors.matrices(head.num_taps * head.target_size, {"fc.weight": hidden}, transposed=config.transposed),
        "hidden_norm": tensors.vectors({"hidden_norm.weight": hidden}),
        "norm": tensors.vectors({"norm.weight": hidden}),
        "layers": {i: _layer_params(head, layer, tensors, f"layers.{i}") for i, layer in enumerate(config.each_layer)},
    }
    for name, tensor, rows, shared in (
        ("embedding", "embed_tokens.weight", head.target_vocab, weights.embedding),
        ("lm_head", "lm_head.weight", config.vocab_size, weights.head if reduced is None else None),
    ):
        if tensor not in tensors and (shared is None or hidden != head.target_size):
            raise ValueError(f"tensor {tensor} is missing, and that of the target is not of shape ({rows}, {hidden})")
        params[name] = tensors.table(tensor, rows, hidden) if tensor in tensors else shared
    if head.markov_rank:
        params["markov_in"] = tensors.table(f"{MARKOV}1.weight", head.target_vocab, head.markov_rank)
        params["markov_out"] = tensors.table(f"{MARKOV}2.weight", config.vocab_size, head.markov_rank)
    if head.num_candidates:
        size = head.target_vocab, head.selector_rank
        params["selector_in"] = tensors.table(f"{SELECTOR}predecessor_codebook", *size)
        params["selector_out"] = tensors.table(f"{SELECTOR}successor_codebook", *size)
        params["selector_hidden"] = tensors.table(f"{SELECTOR}hidden_projection.weight", head.selector_rank, hidden)
    if head.confidence is not None:
        width = hidden + (head.markov_rank if head.confidence == "both" else 0)
        params["confidence"] = files.as_floats(tensors.table(f"{CONFIDENCE}.weight", 1, width))[0]
        params["confidence_bias"] = tensors.vectors({f"{CONFIDENCE}.bias": 1})
    return params


def _refuse_unread(configs: _Configs) -> None:
    """Raise ValueError for fields that change the computation and that nobody has read."""
    for config in configs:
        config.ignore(*UNUSED)
    if configs.own is not configs.whole:
        configs.own.check_all_read()
    files.refuse_unread(configs.whole, *CHANGING)
