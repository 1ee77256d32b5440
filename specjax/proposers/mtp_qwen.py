"""The module for multi-token prediction in checkpoints of Qwen3-Next and Qwen3.5, whose names begin with `mtp`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.models.directory import Checkpoint
from specjax.models.layer import GatedMLP, LayerConfig
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.files import num_drafts, open_directory, target_weights
from specjax.proposers.mtp import MTPHead, check_sizes, mtp, read_params
from specjax.types import Array, Model

LAYER, PROJECTION = "mtp.layers.0", "mtp.fc.weight"
NORMS = {
    "token_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "final_norm": "mtp.norm",
}


def is_qwen_mtp(names: list[str]) -> bool:
    """Return whether tensors of these names have a module for multi-token prediction."""
    return PROJECTION in names


def load_qwen_mtp(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> FeatureDraft:
    """Load the module for multi-token prediction of a checkpoint of Qwen3-Next or Qwen3.5.

    Its layer attends as the layers of the target that attend, with experts where the files have some. Embedding and
    head are the target's.

    Args:
        directory: the checkpoint, or its directory.
        target: the same checkpoint, as `models.load` loads it.
        num_draft_tokens: K >= 1; None is 8. The module is trained for the first draft; the others reuse it.
        rope_theta: base of the rotary frequencies, in place of the base in config.json.
        temperature: the temperature of drafts, as `draft_model` takes it.
        fields: fields of config.json, in place of the fields in the file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or a field or tensor is missing, not supported or not of this target.
    """
    from specjax.models.families import llama, qwen3_next
    from specjax.models.families.text_part import text_part

    config, tensors = text_part(*open_directory(directory, target, fields))
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        config.only(name, 1)
    config.only("mtp_use_dedicated_embeddings", False)
    config.only("hidden_act", "silu")
    config.ignore("layer_types", "mlp_only_layers", "decoder_sparse_step")  # of the target's layers
    is_renormalized = config.get("norm_topk_prob", bool, True)
    has_experts = f"{LAYER}.mlp.{qwen3_next.MIXTURE.router}.weight" in tensors
    ffn = qwen3_next.mixture(config, is_renormalized=is_renormalized) if has_experts else GatedMLP()
    layers = (LayerConfig(qwen3_next.attention(config), ffn),)
    sizes = llama.config_of(config, layers, transposed=tensors.on_one_gpu, **qwen3_next.options(config, layers))
    weights = target_weights(target)
    check_sizes(config, sizes, weights)
    config.check_computation()
    theta = sizes.rope_theta if rope_theta is None else rope_theta
    head = MTPHead(replace(sizes, num_layers=1, rope_theta=theta), is_token_first=True)
    layer = llama.layer_params(head.config, layers[0], tensors, LAYER, mixture=qwen3_next.MIXTURE)
    params = read_params(head, tensors, weights, norms=NORMS, projection=PROJECTION, layer=layer)
    return mtp(head, params, num_drafts(num_draft_tokens), temperature=temperature)
