"""Write drafters in the layouts in which others publish theirs, and decoders as checkpoints of Llama or Qwen3."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.quantized import is_quantized
from specjax.models.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from specjax.proposers import Medusa
from specjax.proposers.block_draft import BlockDraft, BlockHead
from specjax.proposers.drawing import Reduced
from specjax.proposers.eagle3 import Eagle3Head
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.files import as_floats, target_weights
from specjax.proposers.p_eagle import ParallelEagle
from specjax.types import Array, Model, Proposer, PyTree

if TYPE_CHECKING:
    from specjax.models.decoder import DecoderConfig

LAYOUTS = {  # of each kind, with the layout of its authors first
    "eagle3": ("eagle3", "speculators"),
    "p_eagle": ("p_eagle", "speculators"),
    "dflash": ("dflash", "speculators"),
    "dspark": ("deepspec", "speculators"),
    "medusa": ("medusa",),
}
TABLES = "embedding", "lm_head"  # which may be the target's, in codes; floats are written
WITH_TABLES = "speculators", "deepspec"  # whose readers want embedding and head, also where they are the target's
MAX_SHARD_BYTES = 5_000_000_000  # largest size of the tensors in one file
Tensors = dict[str, np.ndarray]


def save_pretrained(
    proposer: Proposer, path: str | Path, *, target: Model, layout: str | None = None, target_name: str = ""
) -> None:
    """Write config.json and model.safetensors of a drafter into a directory.

    Args:
        proposer: a drafter of EAGLE-3, P-EAGLE, DFlash, DSpark or Medusa, whose parameters are written in their dtype.
        path: the directory, which is made where there is none.
        target: its target, with the feature layers that the drafter reads. Tables of the drafter that are the target's
            are not written, except in the layouts "speculators" and "deepspec", whose readers want them.
        layout: "eagle3", "p_eagle", "dflash", "deepspec" (of DSpark) or "medusa", by the methods' authors, or
            "speculators" for all but Medusa; None is the authors'.
        target_name: name or path of the target, which the layout "speculators" records.

    Raises:
        ValueError: the drafter is of another kind or has matrices in codes, its kind has no such layout, or the layout
            has no field for a property of the head, such as where its windows begin.
    """
    kind = _kind_of(proposer)
    layout = LAYOUTS[kind][0] if layout is None else layout
    if layout not in LAYOUTS[kind]:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS[kind]))} for {kind}, got {layout!r}")
    if isinstance(proposer, Medusa):
        _check_floats("proposer", proposer.heads)
        tensors, config = _medusa(proposer)
    else:
        assert isinstance(proposer, FeatureDraft | ParallelEagle | BlockDraft), "the kinds that are left"
        _check_floats("proposer", {name: x for name, x in proposer.params.items() if name not in TABLES})
        is_nested = layout == "speculators"
        if isinstance(proposer, BlockDraft):
            tensors, config = _block(proposer, target, is_nested, target_name)
        else:
            tensors, config = _eagle3(proposer, target, is_nested, target_name)
        tensors |= _vocabulary(proposer.reduced, target.vocab_size)
        tensors |= _tables(proposer.params, target, with_tables=layout in WITH_TABLES)
    _write(Path(path), tensors, config, MAX_SHARD_BYTES)


def save_decoder(
    config: "DecoderConfig",
    params: PyTree,
    path: str | Path,
    *,
    fields: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a decoder as a checkpoint of Llama, or of Qwen3 where heads have norms, which `models.load` reads.

    Args:
        config: sizes and options of the decoder.
        params: its parameters, as `init_params` returns them, which are written in their dtype.
        path: the directory, which is made where there is none. Older safetensors files of a model there are deleted.
        fields: further fields of config.json, such as "eos_token_id".
        max_shard_bytes: largest size of the tensors in one file, > 0. A larger tensor has a file for itself.

    Raises:
        ValueError: `max_shard_bytes` is not > 0, or the decoder has an option that such checkpoints do not have, or
            matrices in codes.
    """
    _check_floats("params", params)
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be > 0, got {max_shard_bytes}")
    _check_options(config)
    about = layer_config(config, config.vocab_size) | {"tie_word_embeddings": config.tie_embeddings}
    name = "Qwen3ForCausalLM" if about["model_type"] == "qwen3" else "LlamaForCausalLM"
    tensors = {
        "model.embed_tokens.weight": np.asarray(params["embedding"]),
        "model.norm.weight": np.asarray(params["norm"]),
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = np.asarray(params["head"])
    for i, layer in params["layers"].items():
        tensors |= layer_tensors(config, layer, f"model.layers.{i}")
    directory = Path(path)
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    _write(directory, tensors, {"architectures": [name], **about, **(fields or {})}, max_shard_bytes)


def _check_floats(name: str, params: PyTree) -> None:
    """Raise ValueError for matrices in codes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    for path, leaf in leaves:
        if is_quantized(leaf):
            raise ValueError(
                f"{name} must have matrices of floats to be written, got codes in {jax.tree_util.keystr(path)}; "
                "specjax quantize writes a checkpoint of codes"
            )


def _check_options(config: "DecoderConfig") -> None:
    """Raise ValueError for an option of a decoder that checkpoints of Llama or Qwen3 do not have."""
    first = config.layers[0]
    has_bias, has_norms = first.mixer.has_bias, first.mixer.has_head_norms
    mixer = Attention(has_bias=has_bias, has_out_bias=has_bias, has_head_norms=has_norms)
    plain = LayerConfig(mixer, GatedMLP(has_bias=_has_mlp_bias(first) and not has_norms))
    others = {
        "norm_offset": 0.0,
        "norms_are_centred": False,
        "norms_have_biases": False,
        "head_has_bias": False,
        "embedding_factor": 1.0,
        "scales_embeddings": False,
        "logit_divisor": 1.0,
        "logit_softcap": None,
        "query_scaling": None,
        "axis_name": None,
        "num_padding": 0,
        "rotary_size": None,
        "rope_is_interleaved": False,
    }
    found = {name: getattr(config, name) for name in others if getattr(config, name) != others[name]}
    if set(config.layers) != {plain}:
        found["layers"] = config.layers
    if found:
        raise ValueError(
            "config must have the options of checkpoints of Llama or Qwen3, which are biases and norms of heads, got "
            f"{found}"
        )


def _write(directory: Path, tensors: Tensors, config: Mapping[str, Any], max_shard_bytes: int) -> None:
    """Write config.json, and tensors into one safetensors file or into several with an index."""
    from safetensors.numpy import save_file

    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + tensor.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = np.ascontiguousarray(tensor)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total_size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def layer_tensors(config: "DecoderConfig", params: Mapping[str, Array], name: str) -> Tensors:
    """Return the parameters of a decoder layer under the names of Llama, which begin with `name`."""
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    tensors = {}

    def add(names: dict[str, int], param: str) -> None:
        """Split matrices that stand side by side by their numbers of outputs."""
        ends = np.cumsum(list(names.values()))[:-1]
        matrix = _outputs_first(config, params[param])
        for part, values in zip(names, np.split(matrix, ends), strict=True):
            tensors[f"{name}.{part}.weight"] = values
        bias = params.get(f"{param}_bias")
        if bias is not None:
            for part, values in zip(names, np.split(np.asarray(bias), ends), strict=True):
                tensors[f"{name}.{part}.bias"] = values

    attention = "self_attn"
    add({f"{attention}.q_proj": query, f"{attention}.k_proj": key_value, f"{attention}.v_proj": key_value}, "qkv")
    add({f"{attention}.o_proj": config.hidden_size}, "attention_out")
    add({"mlp.gate_proj": config.mlp_size, "mlp.up_proj": config.mlp_size}, "gate_up")
    add({"mlp.down_proj": config.hidden_size}, "mlp_out")
    norms = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }
    tensors |= {f"{name}.{norms[norm]}.weight": np.asarray(params[norm]) for norm in norms if norm in params}
    return {key: np.ascontiguousarray(value) for key, value in tensors.items()}


def _has_mlp_bias(layer: LayerConfig) -> bool:
    return isinstance(layer.ffn, GatedMLP) and layer.ffn.has_bias


def layer_config(config: "DecoderConfig", vocab_size: int) -> dict[str, Any]:
    """Return the fields that config.json of a Llama has for these layers, or of a Qwen3 where heads have norms.

    Raises:
        ValueError: the layers have windows of different sizes, which no field says.
    """
    layer = config.layers[0]
    fields = {
        "model_type": "qwen3" if layer.mixer.has_head_norms else "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": layer.mixer.has_bias,
        "mlp_bias": _has_mlp_bias(layer),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if config.rope_scaling is not None:
        fields["rope_scaling"] = _scaling_fields(config.rope_scaling)
    if any(config.windows):
        sizes = {size for size in config.windows if size is not None}
        if len(sizes) > 1:
            raise ValueError(f"config.windows must be of one size to be written, got {config.windows}")
        types = ["full_attention" if size is None else "sliding_attention" for size in config.windows]
        fields |= {"layer_types": types, "sliding_window": max(sizes, default=None), "use_sliding_window": bool(sizes)}
    return fields


def _scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """Return the field rope_scaling of config.json."""
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.magnitude,
        }
    assert isinstance(scaling, Llama3Scaling), "the kinds that are left"
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_length,
    }


def _kind_of(proposer: Proposer) -> str:
    if isinstance(proposer, Medusa):
        return "medusa"
    if isinstance(proposer, FeatureDraft) and isinstance(proposer.head, Eagle3Head):
        return "eagle3"
    if isinstance(proposer, ParallelEagle):
        return "p_eagle"
    if isinstance(proposer, BlockDraft) and not (proposer.head.conv_taps or proposer.head.num_candidates):
        return "dspark" if proposer.head.markov_rank or proposer.head.confidence is not None else "dflash"
    raise ValueError(
        f"proposer must be a drafter of EAGLE-3, P-EAGLE, DFlash, DSpark or Medusa, got {type(proposer).__name__}"
    )


def _eagle3(
    proposer: FeatureDraft | ParallelEagle, target: Model, is_nested: bool, target_name: str
) -> tuple[Tensors, dict]:
    head, params = proposer.head, proposer.params
    assert isinstance(head, Eagle3Head), "the kind was looked at"
    first = "layers.0" if is_nested else "midlayer"
    tensors = {"norm.weight": np.asarray(params["norm"])}
    for i in range(head.config.num_layers):
        tensors |= layer_tensors(head.config, params["layers"][i], f"layers.{i}" if i else first)
    tensors[f"{first}.input_layernorm.weight"] = np.asarray(params["embedding_norm"])
    if "feature_norm" in params:
        tensors[f"{first}.hidden_norm.weight"] = np.asarray(params["feature_norm"])
    if head.num_taps:
        tensors["fc.weight"] = np.ascontiguousarray(_outputs_first(head.config, params["fc"]))
    if head.tap_norms == "all":
        tensors["input_norm.weight"] = np.asarray(params["tap_norm"])
    elif head.tap_norms == "each":
        parts = np.split(np.asarray(params["tap_norm"]), head.num_taps)
        tensors |= {f"fc_norm.{i}.weight": part for i, part in enumerate(parts)}
    layers = list(target.feature_layers)
    own = {
        "target_hidden_size": head.target_size,
        "draft_vocab_size": head.config.vocab_size,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.tap_norms == "all",
        "fc_norm": head.tap_norms == "each",
        "norm_output": head.norm_output,
    }
    # Where the first of the other ids is 1, some readers take them for layers whose output is read.
    if layers[:1] == [1]:
        own["target_layer_ids"] = [layer - 1 for layer in layers]
    if layers[:1] != [1] or is_nested:  # speculators reads these alone, and as they are
        own["eagle_aux_hidden_state_layer_ids"] = layers
    if isinstance(proposer, ParallelEagle):
        tensors["mask_hidden"] = np.asarray(params["mask_taps"])[None, None]
        own["mask_token_id" if is_nested else "ptd_token_id"] = proposer.mask_token
    fields = layer_config(head.config, target.vocab_size)
    if not is_nested:
        return tensors, {"architectures": ["LlamaForCausalLMEagle3"], **fields, **own}
    kind = ("peagle", "PEagle") if isinstance(proposer, ParallelEagle) else ("eagle3", "Eagle3")
    about = _speculators(*kind, proposer.num_draft_tokens, target_name)
    return tensors, {**about, **own, "transformer_layer_config": fields}


def _block(proposer: BlockDraft, target: Model, is_nested: bool, target_name: str) -> tuple[Tensors, dict]:
    head, params, is_dspark = proposer.head, proposer.params, _kind_of(proposer) == "dspark"
    if any(head.config.windows) and head.window_from_anchor != is_nested:
        raise ValueError(
            f"{'layout' if is_nested else 'only layout'} 'speculators' must be given a head with window_from_anchor = "
            f"True, because it counts windows from the anchor, and no other layout does; got {head.window_from_anchor}"
        )
    tensors = {
        "fc.weight": np.ascontiguousarray(_outputs_first(head.config, params["fc"])),
        "hidden_norm.weight": np.asarray(params["hidden_norm"]),
        "norm.weight": np.asarray(params["norm"]),
    }
    for i in range(head.config.num_layers):
        tensors |= layer_tensors(head.config, params["layers"][i], f"layers.{i}")
    fields = layer_config(head.config, target.vocab_size)
    mask: dict[str, Any] = {"mask_token_id": head.mask_token}
    own: dict[str, Any] = {"block_size": head.block_size, "draft_vocab_size": head.config.vocab_size}
    if is_dspark:
        more_tensors, more_fields = _dspark(proposer)
        tensors, own = tensors | more_tensors, own | more_fields
    if is_nested:
        own |= _block_of_speculators(head)
        own["aux_hidden_state_layer_ids"] = list(target.feature_layers)
        kind = ("dspark", "DSpark") if is_dspark else ("dflash", "DFlash")
        about = _speculators(*kind, proposer.num_draft_tokens, target_name)
        return tensors, {**about, **mask, **own, "transformer_layer_config": fields}
    mask["target_layer_ids"] = [layer - 1 for layer in target.feature_layers]
    if head.from_anchor != is_dspark:
        mask["sample_from_anchor"] = head.from_anchor
    if head.is_causal is not None:
        mask["causal"] = head.is_causal
    if is_dspark:
        return tensors, {"architectures": ["Qwen3DSparkModel"], **fields, **own, **mask}
    return tensors, {"architectures": ["DFlashDraftModel"], **fields, **own, "dflash_config": mask}


def _block_of_speculators(head: BlockHead) -> dict[str, Any]:
    """Return the fields of the layout "speculators" that say which tokens of a block see which, and give drafts."""
    has_norms = head.config.layers[0].mixer.has_head_norms
    if head.is_causal or not has_norms:
        raise ValueError(
            "layout 'speculators' must be given a head with norms of queries and keys whose blocks are not causal in "
            f"layers without a window, got has_head_norms = {has_norms} and is_causal = {head.is_causal}"
        )
    return {"sample_from_anchor": head.from_anchor, "sliding_window_non_causal": head.is_causal is False}


def _dspark(proposer: BlockDraft) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and fields that DSpark has besides DFlash's."""
    head, params = proposer.head, proposer.params
    tensors = {}
    if head.markov_rank:
        tensors["markov_head.markov_w1.weight"] = np.asarray(params["markov_in"])
        tensors["markov_head.markov_w2.weight"] = np.asarray(params["markov_out"])
    if head.confidence is not None:
        tensors["confidence_head.proj.weight"] = np.asarray(params["confidence"])[None]
        tensors["confidence_head.proj.bias"] = np.asarray(params["confidence_bias"])
    return tensors, {
        "markov_rank": head.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": head.confidence is not None,
        "confidence_head_with_markov": head.confidence == "both",
    }


def _medusa(proposer: Medusa) -> tuple[Tensors, dict]:
    tensors, count = {}, len(proposer.heads[0]["blocks"])
    for i, head in enumerate(proposer.heads):
        for j, block in enumerate(head["blocks"]):
            tensors[f"{i}.{j}.linear.weight"] = np.asarray(block["weight"])
            tensors[f"{i}.{j}.linear.bias"] = np.asarray(block["bias"])
        tensors[f"{i}.{count}.weight"] = np.asarray(head["head"])
    return tensors, {"medusa_num_heads": len(proposer.heads), "medusa_num_layers": count}


def _speculators(algorithm: str, name: str, num_draft_tokens: int, target_name: str) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    return {
        "architectures": [f"{name}Speculator"],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name or None, "architectures": []},
        },
    }


def _vocabulary(reduced: Reduced | None, vocab_size: int) -> Tensors:
    """Return d2t and t2d of a reduced vocabulary."""
    if reduced is None:
        return {}
    ids = np.asarray(reduced.target_ids, np.int64)
    is_held = np.zeros(vocab_size, bool)
    is_held[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": is_held}


def _tables(params: PyTree, target: Model, *, with_tables: bool) -> Tensors:
    """Return the embedding and the head of a drafter, where they are not the target's."""
    weights, tensors = target_weights(target), {}
    for name, param, shared in (
        ("embed_tokens.weight", "embedding", None if with_tables else weights.embedding),
        ("lm_head.weight", "lm_head", None if with_tables else weights.head),
    ):
        own = np.asarray(as_floats(params[param]))
        if shared is None or not np.array_equal(own, np.asarray(as_floats(shared), own.dtype)):
            tensors[name] = own
    return tensors


def _outputs_first(config: "DecoderConfig", matrix: Array) -> np.ndarray:
    return np.asarray(matrix) if config.transposed else np.asarray(matrix).T
