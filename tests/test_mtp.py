"""Multi-token prediction of MiMo and of hybrids: the target it comes with, parity with the formulas, and bad files."""

import heads
import hybrids
import jax
import numpy as np
import pytest
import tokenizers
from heads import HIDDEN, VOCAB
from safetensors.numpy import load_file

from specjax import LLM, models, proposers, testing
from specjax.models import Checkpoint
from specjax.models.decoder import DecoderConfig
from specjax.models.experts import Experts
from specjax.proposers import trunk
from specjax.proposers.mtp import is_of_target
from specjax.proposers.mtp import load_mtp as load
from specjax.proposers.mtp_qwen import load_qwen_mtp

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


def scaled(x, scale):
    """The norm of Qwen3-Next, whose scales are stored less 1."""
    return heads.rms(x, 1 + scale)


@pytest.mark.slow
def test_parity_on_a_hybrid(tmp_path):
    """The module of Qwen3.5: gated attention, of whose heads of 16 numbers the first 4 turn."""
    directory = hybrids.write(tmp_path / "model", "qwen3_5_text", hybrids.SMALL, has_mtp=True)
    target, t = models.load(directory), load_file(directory / "model.safetensors")
    layer, size = "mtp.layers.0", 16

    def head(states, read):
        embedded = scaled(t["model.embed_tokens.weight"][read], t["mtp.pre_fc_norm_embedding.weight"])
        x = np.concatenate([embedded, scaled(states, t["mtp.pre_fc_norm_hidden.weight"])], axis=-1)
        x = x @ t["mtp.fc.weight"].T
        normed, positions = scaled(x, t[f"{layer}.input_layernorm.weight"]), np.arange(len(x))
        query, key, value = (normed @ t[f"{layer}.self_attn.{part}_proj.weight"].T for part in "qkv")
        query, gate = np.moveaxis(query.reshape(len(x), -1, 2, size), 2, 0)
        key, value = (part.reshape(len(x), -1, size) for part in (key, value))
        query, key = (
            scaled(part, t[f"{layer}.self_attn.{name}_norm.weight"]) for name, part in (("q", query), ("k", key))
        )
        query, key = (
            np.concatenate([heads.turn(part[..., :4], positions), part[..., 4:]], axis=-1) for part in (query, key)
        )
        query = query * (heads.HEAD_SIZE / size) ** 0.5  # which `attend` divides by
        attended = heads.attend(query, key, value, np.tri(len(x), dtype=bool)) / (1 + np.exp(-gate.reshape(len(x), -1)))
        own = t | {f"{layer}.post_attention_layernorm.weight": 1 + t[f"{layer}.post_attention_layernorm.weight"]}
        return scaled(heads.after_attention(own, layer, x, attended), t["mtp.norm.weight"])

    def reference(tokens, features, drafts):
        states, read, rows = list(features.hidden), list(tokens[1:]), []
        for draft in drafts:
            output = head(np.stack(states), read)
            rows.append(t["lm_head.weight"] @ output[-1])
            states.append(output[-1])
            read.append(draft)
        return np.stack(rows)

    assert proposers.kind_of(directory) == "mtp"
    proposer = proposers.load(directory, target, num_draft_tokens=3)
    heads.follow(target, proposer, reference, in_pages=True, tolerance=5e-4)


def test_a_word_names_the_module(tmp_path):
    """For a target of another width, the checkpoint is a draft model."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    for name, case, config in (("small", "qwen3_5_text", hybrids.SMALL), ("none", "qwen3_next", None)):
        words.save(str(hybrids.write(tmp_path / name, case, config, has_mtp=name != "none") / "tokenizer.json"))
    wide = heads.write(tmp_path / "wide", CONFIG | {"hidden_size": 64}, {})
    assert is_of_target(Checkpoint(tmp_path / "small"), models.load(tmp_path / "none"))
    assert not is_of_target(Checkpoint(wide), models.load(tmp_path / "none"))
    llm = LLM(tmp_path / "small", "mtp", num_draft_tokens=2)
    assert isinstance(llm.proposer.head, proposers.MTPHead) and llm.proposer.num_draft_tokens == 2
    assert LLM(tmp_path / "small", "mtp", num_draft_tokens=0).proposer.num_draft_tokens == 0
    with pytest.raises(ValueError, match="draft must be another than 'mtp' for a target without a layer"):
        LLM(tmp_path / "none", "mtp")


def test_the_module_of_a_mixture(tmp_path):
    """Its layer has experts, as the layers of the target."""
    for case in ("qwen3_next", "qwen3_5_moe_text"):
        directory = hybrids.write(tmp_path / case, case, has_mtp=True)
        target = models.load(directory)
        proposer = load_qwen_mtp(directory, target, num_draft_tokens=2)
        assert proposer.head.is_token_first and isinstance(proposer.head.config.layers[0].ffn, Experts)
        shapes = proposer.head.shapes()
        own = {name: proposer.params[name] for name in shapes}
        assert jax.tree.map(np.shape, own) == shapes
    config = hybrids.CONFIGS["qwen3_next"] | {"num_nextn_predict_layers": 2}
    other = hybrids.write(tmp_path / "other", "qwen3_next", config, has_mtp=True)
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers in .* must be 1, the only value"):
        load_qwen_mtp(other, target, num_draft_tokens=2)


@pytest.mark.slow
def test_greedy_is_plain(directory, target):
    plain, _ = heads.generate(target, None, temperature=0)
    proposer = load(directory, target, num_draft_tokens=3)
    tokens, _ = heads.generate(target, proposer, temperature=0)
    assert tokens == plain


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_loop")
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
