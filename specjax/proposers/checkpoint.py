"""Load the drafter of a target from a directory, whatever kind it is of."""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.models.directory import Checkpoint
from specjax.proposers import block_files, eagle_files, files
from specjax.proposers.assistant import is_assistant, load_assistant
from specjax.proposers.medusa import is_medusa, load_medusa
from specjax.proposers.mlp_speculator import is_mlp_speculator, load_mlp_speculator
from specjax.proposers.mtp import is_mtp, load_mtp
from specjax.proposers.mtp_layers import is_mtp_layer, load_mtp_layer
from specjax.proposers.mtp_nemotron import is_nemotron_mtp, load_nemotron_mtp
from specjax.proposers.mtp_qwen import is_qwen_mtp, load_qwen_mtp
from specjax.types import Array, Model, Proposer

if TYPE_CHECKING:
    from specjax.models.config_file import ConfigFile
    from specjax.models.tensors import Tensors


@dataclass(frozen=True)
class Format:
    """A format of drafter files, which one module reads."""

    kind_of: Callable[[Mapping[str, Any], list[str]], str | None]  # (fields of config.json, names of the tensors)
    load: Callable[..., Proposer]
    feature_layers: Callable[["ConfigFile", "Tensors", Model], tuple[int, ...]] | None = None  # None: no layers
    has_rotary: bool = True  # whether `load` takes `rope_theta`


def _of_eagle(*kinds: str) -> Callable[[Mapping[str, Any], list[str]], str | None]:
    """Return the function that tells some kinds of EAGLE heads."""

    def kind_of_head(fields: Mapping[str, Any], names: list[str]) -> str | None:
        kind = eagle_files.kind_of(fields, names)
        return kind if kind in kinds else None

    return kind_of_head


def _of_names(is_of: Callable[[list[str]], bool], kind: str) -> Callable[[Mapping[str, Any], list[str]], str | None]:
    """Return the function that tells one kind by the names of its tensors."""
    return lambda fields, names: kind if is_of(names) else None


FORMATS = (  # the first one that knows the files reads them
    Format(_of_eagle("eagle"), eagle_files.load_eagle),
    Format(_of_eagle("eagle3", "p_eagle"), eagle_files.load_eagle3, eagle_files.feature_layers),
    Format(lambda fields, names: block_files.kind_of(names), block_files.load_block, block_files.feature_layers),
    Format(_of_names(is_medusa, "medusa"), load_medusa, has_rotary=False),
    Format(_of_names(is_mlp_speculator, "mlp_speculator"), load_mlp_speculator, has_rotary=False),
    Format(_of_names(is_assistant, "assistant"), load_assistant),
    Format(_of_names(is_mtp, "mtp"), load_mtp),
    Format(_of_names(is_nemotron_mtp, "mtp"), load_nemotron_mtp, has_rotary=False),
    Format(_of_names(is_mtp_layer, "mtp"), load_mtp_layer),
    Format(_of_names(is_qwen_mtp, "mtp"), load_qwen_mtp),
)
_NOT_IMPLEMENTED = {  # drafters of other kinds, by a tensor that they alone have
    "efficient_lm_head.weight": "EAGLE-4",
    "prefix_gru.*": "Domino",
    "refiner_head.*": "XPress",
    "mtp_layers.0.input_proj.weight": "multi-token prediction in the layout of speculators",
}


def load(
    directory: str | Path | Checkpoint,
    target: Model,
    *,
    num_draft_tokens: int | None,
    rope_theta: float | None = None,
    temperature: float | Array | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Proposer:
    """Load a drafter that reads the features of a target.

    These are heads of EAGLE, EAGLE-2, HASS, EAGLE-3, 3.1 and P-EAGLE, DFlash, DFlash2, JetSpec and DSpark, the layers
    for multi-token prediction in a checkpoint of MiMo, DeepSeek V3, GLM, Qwen3-Next, Qwen3.5 or Nemotron 3, assistants
    of Gemma 4, Medusa heads and MLP speculators. The names of its tensors and its config.json tell the kind of a
    drafter. The embedding and the head of the drafter are the target's where the files have none.

    Args:
        directory: the `Checkpoint` of the drafter, or its directory, with config.json and its tensors.
        target: the target, a built-in model. A drafter that reads layers below the last one needs a target with these
            `feature_layers`; `proposers.feature_layers` says which.
        num_draft_tokens: K >= 1. None is the trained depth, or 8 for a head that can make any number of drafts.
        rope_theta: base of the rotary frequencies, in place of the base in config.json: some trainers did not read it
            there, and used 10000.
        temperature: the temperature of drafts, for requests that are not greedy. None takes the temperature of the
            request. A number, or one number per row [B], replaces it. 0 makes greedy drafts for all requests.
        fields: fields of config.json, in place of the fields in the file.

    Returns:
        A proposer.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: the directory holds an ordinary model, a file is damaged, a field or tensor is missing, has a wrong
            value or shape, or is not supported, or the drafter is another target's. The message names the field or
            tensor.

    Example:
        A head for a target that reads three of its layers:

        ```python
        target = models.load(target_directory)
        target = models.with_feature_layers(target, proposers.feature_layers(head_directory, target))
        proposer = proposers.load(head_directory, target, num_draft_tokens=4)
        ```
    """
    checkpoint = Checkpoint.of(directory)
    found = _find(checkpoint)
    if found is None:
        raise ValueError(
            f"{checkpoint.directory} holds an ordinary model, not a drafter on features; as a draft model it is "
            "loaded with models.load and given to proposers.draft_model"
        )
    kind, own = found
    options = {"num_draft_tokens": num_draft_tokens, "temperature": temperature, "fields": fields}
    if own.has_rotary:
        options["rope_theta"] = rope_theta
    elif rope_theta is not None:
        raise ValueError(f"rope_theta must be None for a drafter without rotary positions ({kind}), got {rope_theta!r}")
    return own.load(checkpoint, target, **options)


def kind_of(directory: str | Path | Checkpoint) -> str | None:
    """Return the kind of drafter that a directory holds; None for an ordinary model.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or the drafter is of a kind that is not implemented.
    """
    found = _find(Checkpoint.of(directory))
    return None if found is None else found[0]


def _find(checkpoint: Checkpoint) -> tuple[str, Format] | None:
    """Return the kind of drafter that a directory holds, and its format; None for an ordinary model."""
    names = checkpoint.drafter_tensors(np.dtype("float32")).names()
    fields = checkpoint.config.fields
    for pattern, kind in _NOT_IMPLEMENTED.items():
        for name in fnmatch.filter(names, pattern):
            raise ValueError(
                f"{checkpoint.directory} holds a drafter of {kind}, which specjax does not implement: tensor {name}"
            )
    kinds = ((own.kind_of(fields, names), own) for own in FORMATS)
    return next(((kind, own) for kind, own in kinds if kind is not None), None)


def feature_layers(directory: str | Path | Checkpoint, target: Model) -> tuple[int, ...]:
    """Return the layers whose residual stream a drafter reads, for `models.with_feature_layers`.

    Args:
        directory: the `Checkpoint` of the drafter, or its directory.
        target: the target, a built-in model.

    Returns:
        Layers in the order that the drafter wants; none for a drafter that reads no more than the last hidden state.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is damaged, or names layers that the target does not have.
    """
    checkpoint = Checkpoint.of(directory)
    found = _find(checkpoint)
    read = None if found is None else found[1].feature_layers
    return () if read is None else read(*files.open_directory(checkpoint, target), target)
