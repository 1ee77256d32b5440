"""DFlash and DSpark: parity with the formulas in every layout, confidences, losslessness and bad files."""

import heads
import numpy as np
import pytest
from heads import HIDDEN, VOCAB

from specjax import models, proposers

NUM_LAYERS, BLOCK, MASK, RANK, REDUCED = 2, 4, 5, 6, 40
LAYERS = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": heads.HEADS,
    "num_key_value_heads": heads.KV_HEADS,
    "head_dim": heads.HEAD_SIZE,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": heads.THETA,
    "rms_norm_eps": heads.EPSILON,
    "tie_word_embeddings": False,
}
AUTHORS = LAYERS | {"block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}}
FLAT = LAYERS | {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [-1, 1], "num_anchors": 512}
DSPARK = FLAT | {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "draft_vocab_size": REDUCED,
}
D2T = np.sort(np.random.default_rng(3).permutation(VOCAB)[:REDUCED]) - np.arange(REDUCED)


def shapes_of(rows=VOCAB, own_tables=False, rank=0, confidence=0):
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(NUM_LAYERS):
        shapes |= heads.layer_shapes(f"layers.{i}", has_head_norms=True)
    if own_tables:
        shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (rows, HIDDEN)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (rows, rank)}
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, confidence), "confidence_head.proj.bias": (1,)}
    return shapes


CASES = {  # config, shapes of the tensors, layers of the target, whether the pending token gives the first draft
    "authors": (AUTHORS, shapes_of(), (1, 3), False),
    "window": (
        AUTHORS
        | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True},
        shapes_of(),
        (1, 3),
        False,
    ),
    "flat": (FLAT, shapes_of(own_tables=True), (0, 2), True),
    "dspark": (DSPARK, shapes_of(own_tables=True, rank=RANK, confidence=HIDDEN + RANK), (0, 2), True),
    "speculators": (SPECULATORS, shapes_of(REDUCED, own_tables=True), (1, 3), False),
}


def write(directory, case, **changes):
    """A checkpoint; returns its tensors."""
    config, shapes, *_ = CASES[case]
    tensors = heads.random_tensors(shapes)
    extra = {}
    if case == "speculators":
        is_kept = np.zeros(VOCAB, bool)
        is_kept[np.arange(REDUCED) + D2T] = True
        extra = {"d2t": D2T, "t2d": is_kept}
    heads.write(directory, config | changes, tensors | extra)
    return tensors


@pytest.fixture(scope="module")
def targets():
    """The target with the layers that each case reads."""
    target = heads.make_target()
    return {case: models.with_feature_layers(target, layers) for case, (_, _, layers, _) in CASES.items()}


def outputs(tensors, config, target, tokens, taps, from_anchor, count):
    """The normalised output of the rows that give drafts."""
    context = heads.rms(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    seen, width = len(context), count + (not from_anchor)
    places, block = np.arange(seen), seen + np.arange(width)
    embedding = tensors.get("embed_tokens.weight", np.asarray(target.params["embedding"]))
    x = embedding[[tokens[-1], *[MASK] * (width - 1)]]
    for i in range(NUM_LAYERS):
        name = f"layers.{i}"
        normed = heads.rms(x, tensors[f"{name}.input_layernorm.weight"])
        query = heads.turn(heads.heads_of(tensors, name, "q", normed), block)
        keys = [heads.turn(heads.heads_of(tensors, name, "k", y), at) for y, at in ((context, places), (normed, block))]
        values = [heads.heads_of(tensors, name, "v", y) for y in (context, normed)]
        mask = np.ones((width, seen + width), bool)
        if config.get("layer_types", [None] * 9)[i] == "sliding_attention":
            distance = block[:, None] - np.arange(seen + width)[None]
            mask = (distance >= 0) & (distance < config["sliding_window"])
        attended = heads.attend(query, np.concatenate(keys), np.concatenate(values), mask)
        x = heads.after_attention(tensors, name, x, attended)
    return heads.rms(x, tensors["norm.weight"])[0 if from_anchor else 1 :]


def reference(tensors, case, target):
    config, _, _, from_anchor = CASES[case]

    def logits(tokens, features, drafts):
        rows = outputs(tensors, config, target, tokens, features.taps, from_anchor, len(drafts))
        head = tensors.get("lm_head.weight", np.asarray(target.params["head"]))
        result = rows @ head.T
        if config.get("markov_rank"):
            before = tensors["markov_head.markov_w1.weight"][[tokens[-1], *drafts[:-1]]]
            result = result + before @ tensors["markov_head.markov_w2.weight"].T
        if case == "speculators":
            wide = np.full((len(result), VOCAB), -np.inf)
            wide[:, np.arange(REDUCED) + D2T] = result
            return wide
        return result

    return logits


@pytest.mark.parametrize("case", CASES)
def test_parity(tmp_path, targets, case):
    target, tensors = targets[case], write(tmp_path, case)
    assert proposers.kind_of(tmp_path) == ("dspark" if case == "dspark" else "dflash")
    assert proposers.feature_layers(tmp_path, target) == CASES[case][2]
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    heads.follow(target, proposer, reference(tensors, case, target), in_pages=case in ("authors", "dspark"))
