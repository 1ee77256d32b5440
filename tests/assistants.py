"""Small assistants of Gemma 4 for the case "gemma4_values" of families.py."""

import json
from pathlib import Path

import families
import numpy as np
from safetensors.numpy import save_file

TARGET, NUM_DRAFTS = "gemma4_values", 2
TEXT = families.GEMMA4 | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 0,
}
PLAIN = {"model_type": "gemma4_assistant", "backbone_hidden_size": 32, "text_config": TEXT}
CASES = {
    "plain": PLAIN,
    "unified": PLAIN
    | {
        "model_type": "gemma4_unified_assistant",
        "text_config": {name: value for name, value in TEXT.items() if "per_layer_input" not in name}
        | {"model_type": "gemma4_unified_text"},
    },
    "groups": PLAIN | {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 5},
}


def make_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("token_ordering"):
        return np.random.default_rng(0).permutation(shape[0])
    return families.make_tensor(f"assistant.{name}", shape)


def write(directory: Path, case: str, **fields) -> Path:
    """An assistant of the case in a new directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CASES[case] | fields))
    shapes = json.loads((families.GOLDENS / "shapes.json").read_text())[f"assistant_{case}"]
    save_file({n: make_tensor(n, tuple(s)) for n, s in shapes.items()}, directory / "model.safetensors")
    return directory
