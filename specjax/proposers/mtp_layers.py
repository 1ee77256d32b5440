"""The layer for multi-token prediction that follows the layers of DeepSeek V3 and GLM in their checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.models.directory import Checkpoint
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.files import num_drafts, open_directory, target_weights
from specjax.proposers.mtp import MTPHead, check_sizes, mtp, read_params
from specjax.types import Array, Model

PROJECTION = ".eh_proj.weight"  # end of the name of a tensor that every such layer has


def is_mtp_layer(names: list[str]) -> bool:
    """Return whether tensors of these names have a layer for multi-token prediction."""
    return any(name.endswith(PROJECTION) for name in names)


def load_mtp_layer(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> FeatureDraft:
    """Load the layer for multi-token prediction of a checkpoint of DeepSeek V3, GLM-4.5 or GLM-4.7-Flash.

    It is `model.layers.N`, where N is the number of the other layers, with experts as the last of these have. Embedding
    and head are the target's, as in the training; copies of them in the files are not read.

    Args:
        directory: the checkpoint, or its directory.
        target: the same checkpoint, as `models.load` loads it.
        num_draft_tokens: K >= 1; None is 8. The layer is trained for the first draft; the others reuse it.
        rope_theta: base of the rotary frequencies, in place of the base in config.json.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    from specjax.models.families import deepseek_v3, glm4_moe, llama, mixtures

    layers: dict[str, Callable] = {
        "deepseek_v3": deepseek_v3.layer,
        "glm4_moe": glm4_moe.layer,
        "glm4_moe_lite": deepseek_v3.layer_lite,
    }
    config, tensors = open_directory(directory, target, fields)
    family = config.choice("model_type", tuple(layers))
    config.only("num_nextn_predict_layers", 1)
    options: dict[str, Any] = {"rope": glm4_moe.read_rope} if family == "glm4_moe" else {}
    layer = layers[family](config)
    sizes = llama.config_of(config, (layer,), transposed=tensors.on_one_gpu, **mixtures.widths(config), **options)
    weights = target_weights(target)
    check_sizes(config, sizes, weights)
    config.check_computation()
    theta = sizes.rope_theta if rope_theta is None else rope_theta
    head = MTPHead(replace(sizes, num_layers=1, rope_theta=theta), is_token_first=True)
    name = f"model.layers.{sizes.num_layers}"
    norms = {"token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"}
    params = read_params(
        head,
        tensors,
        weights,
        norms={param: f"{name}.{norm}" for param, norm in norms.items()},
        projection=f"{name}{PROJECTION}",
        layer=llama.layer_params(head.config, layer, tensors, name, mixture=mixtures.Names()),
    )
    return mtp(head, params, num_drafts(num_draft_tokens), temperature=temperature)
