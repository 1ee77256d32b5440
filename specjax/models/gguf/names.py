"""The names of tensors in GGUF as transformers has them, and the changes of their numbers that converters made."""

import re
from collections.abc import Mapping

import numpy as np

WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def name_of(name: str, of_layer: dict[str, str]) -> str:
    """Return the name of a tensor in transformers; an unknown name stays as it is.

    Args:
        name: of the tensor in GGUF.
        of_layer: names of the tensors of a layer, by their names in GGUF, with the ending where that is not kept.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?((?:nextn\.|shortconv\.)?\w+?)(?:\.(weight|bias|scale))?", name)
    if match is None:
        return name
    layer, kind, last = match.groups()
    known = WHOLE if layer is None else of_layer
    whole = kind if last is None else f"{kind}.{last}"
    if layer is not None and whole in known:
        return f"model.layers.{layer}.{known[whole]}"
    if kind not in known or last is None:
        return name
    return f"{known[kind]}.{last}" if layer is None else f"model.layers.{layer}.{known[kind]}.{last}"


def renamed(name: str, whole: Mapping[str, str]) -> str:
    """Return the name of a tensor in transformers, of which `whole` may give another one without the ending."""
    stem, _, ending = name.rpartition(".")
    return f"{whole.get(stem, stem)}.{ending}"


def rows_of(name: str, size: int, heads: dict[str, int]) -> np.ndarray | None:
    """Return the row of the file that each row of a tensor is, None where the order is the same.

    Args:
        name: of the tensor in GGUF.
        size: number of rows.
        heads: number of heads of "attn_q" and "attn_k" where converters have put the halves of each head between each
            other, as for the architecture llama; empty for others.
    """
    kind = name.split(".")[-2] if name.count(".") >= 2 else ""
    if kind not in heads or size % (2 * heads[kind]):
        return None
    pairs = np.arange(size).reshape(heads[kind], -1, 2)
    return pairs.swapaxes(1, 2).ravel()
