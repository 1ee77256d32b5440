"""Small heads in the layout of the package `speculators`, and its results as tests/goldens has them."""

import json
from pathlib import Path

import heads
import numpy as np
from heads import HIDDEN, VOCAB

GOLDENS = Path(__file__).parent / "goldens"
NUM_DRAFTS, LENGTH, REDUCED, BLOCK, MASK = 3, 9, 40, 4, 60
LAYER_IDS = [2, 0, 1]
D2T = np.sort(np.random.default_rng(0).permutation(VOCAB)[:REDUCED]) - np.arange(REDUCED)
LAYERS = heads.FIELDS | {"num_hidden_layers": 2}
EAGLE3 = {"eagle_aux_hidden_state_layer_ids": LAYER_IDS, "draft_vocab_size": REDUCED}
BLOCKS = {"aux_hidden_state_layer_ids": LAYER_IDS, "block_size": BLOCK, "mask_token_id": MASK}
DSPARK = BLOCKS | {"block_size": 3, "draft_vocab_size": REDUCED, "markov_rank": 6}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}

CASES = {  # of each: the kind, the kind of layers, their other fields, and the fields of the head
    "eagle3": ("eagle3", "llama", {"num_hidden_layers": 1}, EAGLE3 | {"norm_before_residual": True}),
    "eagle3.1": ("eagle3", "qwen3", {}, EAGLE3 | {"draft_vocab_size": VOCAB, "fc_norm": True, "norm_output": True}),
    "peagle": ("peagle", "llama", {}, EAGLE3 | {"norm_before_fc": True, "mask_token_id": MASK}),
    "dflash": ("dflash", "qwen3", WINDOW, BLOCKS | {"draft_vocab_size": REDUCED}),
    "dflash both ways": (
        "dflash",
        "qwen3",
        WINDOW,
        BLOCKS | {"draft_vocab_size": VOCAB, "sliding_window_non_causal": True},
    ),
    "dflash2": (
        "dflash2",
        "qwen3",
        {},
        BLOCKS | {"draft_vocab_size": VOCAB, "selector_rank": 6, "selector_top_k": 5, "conv_group_size": 8},
    ),
    "dflash2 in windows": (
        "dflash2",
        "qwen3",
        WINDOW,
        BLOCKS | {"draft_vocab_size": VOCAB, "selector_rank": 6, "selector_top_k": 5, "conv_group_size": 8},
    ),
    "dspark": ("dspark", "qwen3", {}, DSPARK),
    "dspark in windows": ("dspark", "qwen3", WINDOW, DSPARK),
    "dspark both ways": ("dspark", "qwen3", WINDOW, DSPARK | {"sliding_window_non_causal": True}),
}


def tokens() -> np.ndarray:
    """The committed tokens [LENGTH]."""
    return np.random.default_rng(1).integers(0, VOCAB, LENGTH)


def taps() -> np.ndarray:
    """The target's residual stream [LENGTH - 1, 3 H] of all tokens but the last."""
    return np.random.default_rng(2).normal(size=(LENGTH - 1, len(LAYER_IDS) * HIDDEN)).astype(np.float32)


def tables() -> dict[str, np.ndarray]:
    """The embedding and the head of the target, for heads without their own."""
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32) for name in ("embed_tokens", "lm_head")}


def tensors(shapes: dict) -> dict[str, np.ndarray]:
    """The tensors of a head, given their shapes by name."""
    made = heads.random_tensors({name: tuple(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")})
    if "d2t" in shapes:
        made |= {"d2t": D2T, "t2d": np.isin(np.arange(VOCAB), D2T + np.arange(REDUCED))}
    return made


def write(directory: Path, case: str) -> Path:
    """Write the head of a case into a directory, with the config.json of the package."""
    recorded = json.loads((GOLDENS / "heads.json").read_text())[case]
    return heads.write(directory, recorded["config"], tensors(recorded["shapes"]))


def write_target(directory: Path) -> Path:
    """Write the parts of the target that the package reads: its sizes, its tables and its last norm."""
    names = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    own = {names[name]: table for name, table in tables().items()} | {"model.norm.weight": np.ones(HIDDEN, np.float32)}
    return heads.write(directory, LAYERS | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, own)
