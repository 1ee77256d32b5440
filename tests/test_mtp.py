"""Multi-token prediction of MiMo: the target it comes with, parity with the formulas, and bad files."""

import heads
import jax
import numpy as np
import pytest
from heads import HIDDEN, VOCAB

from specjax import models, proposers, testing
from specjax.models.decoder import DecoderConfig
from specjax.proposers import trunk
from specjax.proposers.mtp import load_mtp as load

CONFIG = {
    "model_type": "mimo",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": heads.HEADS,
    "num_key_value_heads": heads.KV_HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": heads.THETA,
    "rms_norm_eps": heads.EPSILON,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
NAME = "model.mtp_layers.0"
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
MODULE = heads.layer_shapes(NAME, has_bias=True)
MODULE |= {f"{NAME}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("token", "hidden", "final")}
MODULE |= {f"{NAME}.input_proj.weight": (HIDDEN, 2 * HIDDEN)}
SHAPES |= heads.layer_shapes("model.layers.0", has_bias=True)
TENSORS = heads.random_tensors(SHAPES | MODULE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return heads.write(tmp_path_factory.mktemp("mimo") / "x", CONFIG, TENSORS)


@pytest.fixture(scope="module")
def target(directory):
    return models.load(directory)


def reference(tokens, features, drafts):
    """Row i is made of hidden state i and token i + 1; each draft adds a row, made of the output of the one before."""
    states, read, rows = list(features.hidden), list(tokens[1:]), []
    for draft in drafts:
        embedded = TENSORS["model.embed_tokens.weight"][read]
        embedded[0] = 0
        parts = [
            heads.rms(np.stack(states), TENSORS[f"{NAME}.hidden_layernorm.weight"]),
            heads.rms(embedded, TENSORS[f"{NAME}.token_layernorm.weight"]),
        ]
        x = np.concatenate(parts, axis=-1) @ TENSORS[f"{NAME}.input_proj.weight"].T
        output = heads.rms(heads.causal_layer(TENSORS, NAME, x), TENSORS[f"{NAME}.final_layernorm.weight"])
        rows.append(TENSORS["lm_head.weight"] @ output[-1])
        states.append(output[-1])
        read.append(draft)
    return np.stack(rows)


def test_parity(directory, target):
    assert proposers.kind_of(directory) == "mtp"
    heads.follow(target, proposers.load(directory, target, num_draft_tokens=3), reference, in_pages=True)


def test_the_target_is_a_qwen2(tmp_path, directory, target):
    """The layers for prediction change nothing, and the model is otherwise a Qwen2."""
    own = {name: array for name, array in TENSORS.items() if not name.startswith(NAME)}
    plain = models.load(heads.write(tmp_path, CONFIG | {"model_type": "qwen2"}, own))
    assert plain.apply == target.apply
    jax.tree.map(np.testing.assert_array_equal, plain.params, target.params)


@pytest.mark.slow
def test_greedy_is_plain(directory, target):
    plain, _ = heads.generate(target, None, temperature=0)
    for in_pages in (False, True):
        proposer = load(directory, target, num_draft_tokens=3)
        tokens, _ = heads.generate(target, proposer, in_pages=in_pages, temperature=0)
        assert tokens == plain


@pytest.mark.slow
def test_the_distribution_is_the_targets():
    """The target is the bigram model of the public verdict, whose hidden states are its logits."""
    head = proposers.MTPHead(DecoderConfig(8, 8, 1, 2, 1, 4, 8, 64))
    keys = jax.random.split(jax.random.key(3), 3)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, trunk.random_params(head.shapes(), keys[0]))
    params["embedding"], params["lm_head"] = (jax.random.normal(key, (8, 8)) for key in keys[1:])
    testing.assert_proposer_lossless(proposers.mtp(head, params, 2), num_samples=20_000)


def test_bad_files(tmp_path, target):
    for fields, message in [
        ({"model_type": "qwen2"}, "model_type in .* must be 'mimo'"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers in .* must be 1, the only value"),
        ({"vocab_size": 60}, "target must have the vocabulary and hidden size of .*, 60 and 32, got"),
        ({"use_sliding_window": True}, "use_sliding_window in .* must be absent or False"),
        ({"intermediate_size": 40}, rf"tensor {NAME}.mlp.gate_proj.weight in .* must have shape \(40, 32\)"),
    ]:
        heads.write(tmp_path, CONFIG | fields, TENSORS)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, target, num_draft_tokens=2)
    heads.write(tmp_path, CONFIG, {name: array for name, array in TENSORS.items() if "input_proj" not in name})
    with pytest.raises(ValueError, match=f"tensor {NAME}.input_proj.weight is missing"):
        load(tmp_path, target, num_draft_tokens=2)
    heads.write(tmp_path, CONFIG, TENSORS)
    with pytest.raises(ValueError, match="num_draft_tokens must be >= 1"):
        load(tmp_path, target, num_draft_tokens=0)
