"""Heads of the EAGLE family: parity with the formulas in every layout of files, losslessness, and bad files."""

import heads
import numpy as np
import pytest
from heads import HIDDEN, LAYERS, VOCAB

from specjax import models, proposers

K, SMALL = 3, 40  # drafts, and tokens of a reduced vocabulary
D2T = np.sort(np.random.default_rng(0).permutation(VOCAB)[:SMALL]) - np.arange(SMALL)
IDS = D2T + np.arange(SMALL)
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": heads.HEADS,
    "num_key_value_heads": heads.KV_HEADS,
    "head_dim": heads.HEAD_SIZE,
    "intermediate_size": 48,
    "max_position_embeddings": 8,  # less than the sequences have: heads state what they were trained on
    "rope_theta": heads.THETA,
    "rms_norm_eps": heads.EPSILON,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_cache": True,
}


def layer_shapes(name, size=HIDDEN, inputs=HIDDEN, has_head_norms=False):
    """As `heads.layer_shapes`, for a residual stream of any size."""
    shapes = heads.layer_shapes(name, has_head_norms=has_head_norms, inputs=inputs)
    for part in ("o", "down", "gate", "up"):
        key = f"{name}.{'self_attn' if part == 'o' else 'mlp'}.{part}_proj.weight"
        shapes[key] = (size, shapes[key][1]) if part in ("o", "down") else (shapes[key][0], size)
    return shapes | {f"{name}.{norm}.weight": (size,) for norm in ("input_layernorm", "post_attention_layernorm")}


def run_layer(tensors, name, x, residual):
    """A decoder layer on rows [T, ...] in one sequence: attention reads x and is added to the residual."""
    positions = np.arange(len(x))
    query, key = (heads.turn(heads.heads_of(tensors, name, part, x), positions) for part in "qk")
    attended = heads.attend(query, key, heads.heads_of(tensors, name, "v", x), np.tri(len(x), dtype=bool))
    return heads.after_attention(tensors, name, residual, attended)


def chain(tokens, features, drafts, embedding, run, score, recurrent=lambda x: x):
    """The logits of drafts: rows of features and of the tokens after them, then of drafts and the outputs before."""
    embedded, rows = [*embedding[tokens[1:]]], [*features]
    logits = []
    for draft in drafts:
        last = run(np.stack(embedded), np.stack(rows))[-1]
        logits.append(score(last))
        embedded.append(embedding[draft])
        rows.append(recurrent(last))
    return np.stack(logits)


def widen(logits):
    """Logits [..., D] of the reduced vocabulary as those of the target's."""
    wide = np.full((*logits.shape[:-1], VOCAB), -np.inf)
    wide[..., IDS] = logits
    return wide


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


@pytest.fixture(scope="module")
def tapped():
    """With the layers that files without ids mean: 2, n / 2 and n - 3."""
    return heads.make_target((2, LAYERS // 2, LAYERS - 3))


def tables(target):
    return (np.asarray(target.params[name]) for name in ("embedding", "head"))


def write_eagle(directory, target, form="flat"):
    """A head of EAGLE, and the reference of its formulas."""
    shapes = heads.layer_shapes("layers.0") | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    del shapes["layers.0.input_layernorm.weight"]
    config = CONFIG | {"architectures": ["LlamaForCausalLM"]}
    if form == "flat":
        shapes["fc.bias"] = (HIDDEN,)
    else:
        config = {"model_type": "eagle", "model": config | {"bias": False}, "truncated_vocab_size": None}
    tensors = heads.random_tensors(shapes)
    heads.write(directory, config, tensors)
    embedding, head = tables(target)

    def run(embedded, rows):
        x = np.concatenate([embedded, rows], axis=-1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
        return run_layer(tensors, "layers.0", x, x)

    def logits(tokens, features, drafts):
        return chain(tokens, features.hidden, drafts, embedding, run, lambda x: head @ x)

    return logits


# Layouts of EAGLE-3: the name of the first layer, fields of config.json, and options of `eagle3_shapes`.
FLAT = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SMALL}
LAYOUTS = {
    "authors": ("midlayer", FLAT, {}),
    "3.1": ("model.midlayer", FLAT | {"fc_norm": True, "norm_output": True}, {"norms": "each"}),
    "speculators": (
        "layers.0",
        {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": SMALL,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [3, 0],
            "target_hidden_size": HIDDEN,
            "speculators_config": {"algorithm": "eagle3"},
        },
        {"norms": "all", "size": 24, "taps": 2, "num_layers": 2},
    ),
    "modelopt": (
        "layers.0",
        {
            "eagle_config": {
                "use_aux_hidden_state": False,
                "use_last_layernorm": True,
                "use_input_layernorm_in_first_layer": True,
                "use_mtp_layernorm": False,
            },
        },
        {"taps": 0, "is_reduced": False},
    ),
    "deepspec": (
        "layers.0",
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [0, 1, 2, 0, 1]},
        {"taps": 5, "is_reduced": False, "has_head_norms": True},
    ),
    "parallel": (
        "layers.0",
        {"speculators_model_type": "peagle", "norm_before_residual": False, "mask_token_id": 60}
        | {"draft_vocab_size": SMALL},
        {"num_layers": 2, "is_parallel": True},
    ),
}
TAPS = {"speculators": (3, 0), "modelopt": (), "deepspec": (1, 2, 3, 1, 2)}


def eagle3_shapes(
    first, size=HIDDEN, taps=3, norms=None, num_layers=1, is_reduced=True, has_head_norms=False, is_parallel=False
):
    shapes = layer_shapes(first, size, 2 * size, has_head_norms=has_head_norms)
    for i in range(1, num_layers):
        shapes |= layer_shapes(f"layers.{i}", size, size)
    shapes["norm.weight"] = (size,)
    if taps:
        shapes |= {"fc.weight": (size, taps * HIDDEN), f"{first}.hidden_norm.weight": (size,)}
    if norms == "each":
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(taps)}
    elif norms == "all":
        shapes["input_norm.weight"] = (taps * HIDDEN,)
    if is_reduced:
        shapes["lm_head.weight"] = (SMALL, size)
    if size != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, size)
    if is_parallel:
        shapes["mask_hidden"] = (1, 1, taps * HIDDEN)
    return shapes


def write_eagle3(directory, target, layout, **changed):
    """A head of EAGLE-3, and the reference of its formulas."""
    first, fields, options = LAYOUTS[layout]
    size = options.get("size", HIDDEN)
    layers = CONFIG | {"hidden_size": size, "num_hidden_layers": options.get("num_layers", 1)}
    nested = "speculators_model_type" in fields
    config = ({"transformer_layer_config": layers} if nested else layers) | fields | changed
    tensors = heads.random_tensors(eagle3_shapes(first, **options))
    vocabulary = {}
    if options.get("is_reduced", True):
        vocabulary = {"d2t": D2T, "t2d": np.isin(np.arange(VOCAB), IDS)}
    heads.write(directory, config, tensors | vocabulary)
    embedding, head = tables(target)
    embedding, head = tensors.get("embed_tokens.weight", embedding), tensors.get("lm_head.weight", head)
    after = heads.rms

    def fused(taps):
        if options.get("norms") == "each":
            parts = np.split(taps, options.get("taps", 3), axis=-1)
            taps = np.concatenate([after(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], axis=-1)
        elif options.get("norms") == "all":
            taps = after(taps, tensors["input_norm.weight"])
        return taps @ tensors["fc.weight"].T

    def run(embedded, rows):
        normed = after(rows, tensors[f"{first}.hidden_norm.weight"]) if options.get("taps", 3) else rows
        pair = np.concatenate([after(embedded, tensors[f"{first}.input_layernorm.weight"]), normed], axis=-1)
        x = run_layer(tensors, first, pair, normed if config.get("norm_before_residual") else rows)
        for i in range(1, options.get("num_layers", 1)):
            name = f"layers.{i}"
            x = run_layer(tensors, name, after(x, tensors[f"{name}.input_layernorm.weight"]), x)
        return x

    def score(x):
        logits = head @ after(x, tensors["norm.weight"])
        return widen(logits) if vocabulary else logits

    def recurrent(x):
        return after(x, tensors["norm.weight"]) if config.get("norm_output") else x

    def logits(tokens, features, drafts):
        rows = fused(features.taps) if options.get("taps", 3) else features.hidden
        if options.get("is_parallel"):
            masked = np.repeat(fused(tensors["mask_hidden"][0]), len(drafts) - 1, axis=0)
            embedded = embedding[[*tokens[1:], *[60] * (len(drafts) - 1)]]
            return np.stack([score(x) for x in run(embedded, np.concatenate([rows, masked]))[-len(drafts) :]])
        return chain(tokens, rows, drafts, embedding, run, score, recurrent)

    return logits


def load(directory, target, **options):
    return proposers.load(directory, target, **{"num_draft_tokens": K} | options)


@pytest.mark.parametrize("form, in_pages", [("flat", True), pytest.param("wrapped", False, marks=pytest.mark.slow)])
def test_parity_of_eagle(tmp_path, target, form, in_pages):
    expected = write_eagle(tmp_path, target, form)
    heads.follow(target, load(tmp_path, target), expected, in_pages)


@pytest.mark.parametrize(
    "layout, in_pages",
    [
        ("authors", False),
        ("parallel", True),
        *(pytest.param(name, name != "deepspec", marks=pytest.mark.slow) for name in ("3.1", *TAPS)),
    ],
)
def test_parity_of_eagle3(tmp_path, target, layout, in_pages):
    expected = write_eagle3(tmp_path, target, layout)
    layers = proposers.feature_layers(tmp_path, target)
    assert layers == TAPS.get(layout, (2, 1, 0))
    target = models.with_feature_layers(target, layers)
    heads.follow(target, load(tmp_path, target), expected, in_pages)
