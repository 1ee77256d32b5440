"""Bad files of every kind of drafter: each error names the field or the tensor that is wrong."""

import json
from dataclasses import replace

import heads
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_heads
import test_eagle
import test_medusa
import test_mlp_speculator
import test_mtp
from heads import VOCAB
from recorded_heads import LAYER_IDS
from safetensors.numpy import load_file, save_file

from specjax import models, proposers, testing

KINDS = {
    "eagle": lambda directory, target: test_eagle.write_eagle(directory, target),
    "eagle in speculators": lambda directory, target: test_eagle.write_eagle(directory, target, "speculators"),
    "eagle3": lambda directory, target: test_eagle.write_eagle3(directory, target, "authors"),
    "p_eagle": lambda directory, target: recorded_heads.write(directory, "peagle"),
    "dflash": lambda directory, target: recorded_heads.write(directory, "dflash"),
    "dspark": lambda directory, target: recorded_heads.write(directory, "dspark"),
    "mtp": lambda directory, target: heads.write(directory, test_mtp.CONFIG, test_mtp.TENSORS),
    "medusa": lambda directory, target: test_medusa.authors(directory, "medusa_lm_head.safetensors"),
    "mlp_speculator": lambda directory, target: test_mlp_speculator.write(directory),
}
WITH_TAPS = "eagle3", "p_eagle", "dflash", "dspark"


SIZES = {"right": {}, "hidden size": {"hidden_size": 48}, "vocabulary": {"vocab_size": 59}}


@pytest.fixture(scope="module")
def targets():
    """Targets of the right sizes and of two others, which give all that a drafter may read."""
    return {name: heads.make_target(LAYER_IDS, **sizes) for name, sizes in SIZES.items()}


def of(kind, targets, name="right"):
    """The target with the layers that a kind reads."""
    return models.with_feature_layers(targets[name], LAYER_IDS if kind in WITH_TAPS else ())


IDS = r"layer_ids in .* must be 2 .* for H = 48, the hidden size of the target, got"
SIZE = r"hidden_size in .*config\.json must be 48, the hidden size of the target, got 32"
WORDS = r"vocab_size in .*config\.json must be 59, the vocabulary of the target, got 61"
BOTH = r"target must have the vocabulary and hidden size of .*config\.json, 61 and 32, got"
MESSAGES = {  # for a target of another hidden size, and of another vocabulary
    "eagle": (SIZE, WORDS),
    "eagle in speculators": ("transformer_layer_config." + SIZE, "transformer_layer_config." + WORDS),
    "eagle3": (IDS, WORDS),
    "p_eagle": (IDS, "transformer_layer_config." + WORDS),
    "dflash": (IDS, "transformer_layer_config." + WORDS),
    "dspark": (IDS, "transformer_layer_config." + WORDS),
    "mtp": (BOTH, BOTH),
    "medusa": (
        r"shape of 0\.1\.weight must be \(61, 48\), the vocabulary and the hidden size of the target, got \(61, 32\)",
        r"shape of 0\.1\.weight must be \(59, 32\), the vocabulary and the hidden size of the target, got \(61, 32\)",
    ),
    "mlp_speculator": ("emb_dim in .* must be 48, the hidden size of the target, got 32", WORDS),
}
NO_DEPTH = "eagle", "eagle in speculators", "eagle3", "mtp"  # one row is run for each draft, as often as is wanted


@pytest.mark.parametrize("kind", KINDS)
def test_another_target(tmp_path, targets, kind):
    """Other sizes are found when the head is loaded; missing features when it meets a target without them."""
    KINDS[kind](tmp_path, targets["right"])
    for name, message in zip(("hidden size", "vocabulary"), MESSAGES[kind], strict=True):
        with pytest.raises(ValueError, match=f"^the drafter is made for another target: .*{message}.*; give the model"):
            proposers.load(tmp_path, of(kind, targets, name), num_draft_tokens=2)
    proposer = proposers.load(tmp_path, of(kind, targets), num_draft_tokens=2)
    silent = replace(testing.bigram_model(jnp.zeros((VOCAB, VOCAB))), apply=test_medusa.without_features)
    with pytest.raises(ValueError, match=r"the target must give its (hidden states|residual stream).*, got None"):
        heads.start(silent, proposer)


@pytest.mark.parametrize("kind", KINDS)
def test_more_drafts_than_trained_for(tmp_path, targets, kind):
    KINDS[kind](tmp_path, targets["right"])
    if kind in NO_DEPTH:
        assert proposers.load(tmp_path, of(kind, targets), num_draft_tokens=4).num_draft_tokens == 4
        return
    with pytest.raises(ValueError, match=r"num_draft_tokens must be in \[1, 3\], .*, got 4"):
        proposers.load(tmp_path, of(kind, targets), num_draft_tokens=4)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(tmp_path, targets, kind):
    """A file that ends early, a config.json that does, and a field that would change the computation."""
    KINDS[kind](tmp_path, targets["right"])
    config, file = tmp_path / "config.json", next(tmp_path.glob("*.safetensors"))
    fields, content = config.read_text(), file.read_bytes()

    def expect(message):
        with pytest.raises(ValueError, match=message):
            proposers.load(tmp_path, of(kind, targets), num_draft_tokens=2)

    config.write_text(fields[:-9])
    expect(r"config\.json must be JSON")
    changed = json.loads(fields)
    place = changed.get("transformer_layer_config", changed)
    name = {"medusa": "medusa_gate", "mlp_speculator": "logit_scale"}.get(kind, "attn_logit_softcapping")
    config.write_text(json.dumps(changed | {"transformer_layer_config": place} | {name: 30.0}))
    expect(f"{name} in .* must be absent")
    config.write_text(fields)
    file.write_bytes(content[:-200])
    expect("must be a whole safetensors file")


@pytest.mark.parametrize("kind", ["p_eagle", "dflash", "dspark"])
def test_a_reduced_vocabulary_without_its_ids(tmp_path, targets, kind):
    KINDS[kind](tmp_path, targets["right"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}, file)
    with pytest.raises(ValueError, match=r"tensor d2t must say which"):
        proposers.load(tmp_path, of(kind, targets), num_draft_tokens=2)


OTHER_KINDS = {
    "efficient_lm_head.weight": "EAGLE-4",
    "prefix_gru.weight_ih_l0": "Domino",
    "refiner_head.token_embed.weight": "XPress",
    "mtp_layers.0.input_proj.weight": "multi-token prediction in the layout of speculators",
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_other_kinds_are_named(tmp_path, targets, name):
    recorded_heads.write(tmp_path, "dflash")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: np.zeros((2, 2), np.float32)}, file)
    message = f"holds a drafter of {OTHER_KINDS[name]}, which specjax does not implement: tensor {name}"
    with pytest.raises(ValueError, match=message):
        proposers.load(tmp_path, of("dflash", targets), num_draft_tokens=2)


def test_fields_of_speculators(tmp_path, targets):
    recorded_heads.write(tmp_path, "dflash")
    for name, value, message in [
        ("speculators_model_type", "xpress", "speculators_model_type in .* must be 'dflash' or 'dflash2' or"),
        ("target_hidden_size", 48, "target_hidden_size in .* must be 32, the hidden size of the target, got 48"),
    ]:
        with pytest.raises(ValueError, match=message):
            proposers.load(tmp_path, of("dflash", targets), num_draft_tokens=2, fields={name: value})


@pytest.mark.parametrize(
    "kind, from_anchor, is_causal", [("dflash", False, None), ("dflash2", False, False), ("dspark", True, None)]
)
def test_fields_that_older_files_of_speculators_lack(tmp_path, targets, kind, from_anchor, is_causal):
    recorded_heads.write(tmp_path, kind)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["sample_from_anchor"], fields["sliding_window_non_causal"]
    path.write_text(json.dumps(fields))
    head = proposers.load(tmp_path, of("dflash", targets), num_draft_tokens=2).head
    assert (head.from_anchor, head.is_causal) == (from_anchor, is_causal)


def test_candidates_are_of_the_whole_vocabulary(tmp_path, targets):
    recorded_heads.write(tmp_path, "dflash2")
    file, size = tmp_path / "model.safetensors", recorded_heads.REDUCED
    head = np.zeros((size, heads.HIDDEN), np.float32)
    save_file(load_file(file) | {"lm_head.weight": head, "d2t": recorded_heads.D2T}, file)
    with pytest.raises(ValueError, match=r"DFlash2 must have the vocabulary of the target, 61 tokens, got .* = 40"):
        target = of("dflash", targets)
        proposers.load(tmp_path, target, num_draft_tokens=2, fields={"draft_vocab_size": size})
