"""The module for multi-token prediction in checkpoints of Nemotron 3: a layer that attends, and one after it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.models.directory import Checkpoint
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.files import num_drafts, open_directory, target_weights
from specjax.proposers.mtp import MTPHead, check_sizes, mtp, read_params
from specjax.types import Array, Model

FIRST, LAST = "mtp.layers.0", "mtp.layers.1"
PROJECTION = f"{FIRST}.eh_proj.weight"
NORMS = {"token_norm": f"{FIRST}.enorm", "hidden_norm": f"{FIRST}.hnorm", "final_norm": f"{LAST}.final_layernorm"}
PATTERNS = "*E", "*-"  # the signs of the layers that are read


def is_nemotron_mtp(names: list[str]) -> bool:
    """Return whether tensors of these names have a module for multi-token prediction."""
    return PROJECTION in names


def load_nemotron_mtp(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> FeatureDraft:
    """Load the module for multi-token prediction of a Nemotron 3 checkpoint, `mtp.layers.*`.

    Its two layers, attention without positions and experts or an MLP, are one layer here. Embedding and head are the
    target's.

    Args:
        directory: the checkpoint, or its directory.
        target: the same checkpoint, as `models.load` loads it.
        num_draft_tokens: K >= 1; None is 8. The module is trained for the first draft; the others reuse it.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    from specjax.models.families import nemotron_h

    config, tensors = open_directory(directory, target, fields)
    config.only("model_type", "nemotron_h")
    config.only("num_nextn_predict_layers", 1)
    name = "mtp_layers_block_type" if "mtp_layers_block_type" in config else "mtp_hybrid_override_pattern"
    given = config.get(name, list if name == "mtp_layers_block_type" else str, PATTERNS[0])
    signs = nemotron_h.signs_of(given)
    if signs not in PATTERNS:
        raise ValueError(
            f"{config.where(name)} must be one layer that attends and one of experts or an MLP, got {given!r}"
        )
    config.ignore("hybrid_override_pattern", "layers_block_type", "layer_types")  # of the target's layers
    attention, ffn = LayerConfig(Attention(), None), LayerConfig(None, nemotron_h.ffn(config, signs[1]))
    sizes = nemotron_h.config_of(config, (replace(attention, ffn=ffn.ffn),), tensors.on_one_gpu)
    weights = target_weights(target)
    check_sizes(config, sizes, weights)
    config.check_computation()
    head = MTPHead(sizes, is_token_first=True)
    layer = nemotron_h.layer_params(sizes, attention, tensors, FIRST)
    layer |= nemotron_h.layer_params(sizes, ffn, tensors, LAST)
    params = read_params(head, tensors, weights, norms=NORMS, projection=PROJECTION, layer=layer)
    return mtp(head, params, num_drafts(num_draft_tokens), temperature=temperature)
