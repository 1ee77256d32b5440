"""Heads of the package `speculators`: the files that it writes load here, and give its logits and its drafts."""

import json
from dataclasses import replace

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_heads
from recorded_heads import CASES, GOLDENS, LENGTH, NUM_DRAFTS

from specjax import proposers, sampling, training
from specjax.sampling import SamplingParams
from specjax.types import Context, Features, ModelInput

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS / "heads.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def target():
    target, tables = heads.make_target((2, 0, 1)), recorded_heads.tables()
    own = {"embedding": tables["embed_tokens"], "head": tables["lm_head"]}
    return replace(target, params=target.params | jax.tree.map(jnp.asarray, own))


@jax.jit
def draft_of(proposer):
    """The draft after the recorded tokens, at a temperature that takes the best token."""
    tokens, taps = jnp.asarray(recorded_heads.tokens())[None], jnp.asarray(recorded_heads.taps())[None]
    taps = jnp.pad(taps, ((0, 0), (0, 1), (0, 0)))
    none = jnp.zeros((1, heads.HIDDEN))
    features = Features(jnp.zeros((1, LENGTH, heads.HIDDEN)), taps)
    length = jnp.array([LENGTH])
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    inputs = ModelInput(tokens, jnp.arange(LENGTH)[None], num_tokens=length)
    previous = Features(none, jnp.zeros((1, taps.shape[-1])))
    state = proposer.prefill(inputs, following, previous, features, proposer.init(1, 2 * LENGTH))
    padded = jnp.pad(tokens, ((0, 0), (0, LENGTH)))
    context = Context(padded, length, jnp.ones(1, bool), length)
    rows = sampling.batch([SamplingParams(temperature=1e-3, max_tokens=4)])
    keys = jax.random.split(jax.random.key(0), (1, NUM_DRAFTS))
    return proposer.propose(keys, context, rows, state)[0]


def check(proposer, logits, drafts):
    draft = jax.device_get(draft_of(proposer))
    assert draft.tokens[0].tolist() == drafts.tolist()
    reduced = proposer.reduced
    found = draft.distribution.logits[0] if reduced is None else draft.distribution.logits[0][:, reduced.target_ids]
    np.testing.assert_allclose(found, logits, rtol=TOLERANCE, atol=TOLERANCE)


FAST = "dflash", "dflash both ways", "dflash2"  # what one of their layers reads has breaks that they find


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST)) for x in CASES])
def test_parity(tmp_path, target, goldens, case):
    recorded_heads.write(tmp_path, case)
    assert proposers.kind_of(tmp_path) == {"peagle": "p_eagle"}.get(CASES[case][0], CASES[case][0])
    assert proposers.feature_layers(tmp_path, target) == (2, 0, 1)
    proposer = proposers.load(tmp_path, target, num_draft_tokens=NUM_DRAFTS)
    check(proposer, goldens[f"{case}.logits"], goldens[f"{case}.drafts"])


def test_dflash2_in_the_layout_of_its_authors(tmp_path, target, goldens):
    """The same head with the fields of layers beside a separate table, whose ids count layers by their outputs."""
    recorded = json.loads((GOLDENS / "heads.json").read_text())["dflash2"]
    config, tensors = recorded["config"], recorded_heads.tensors(recorded["shapes"])
    names = "mask_token_id", "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"
    own = {name: config[name] for name in names} | {"target_layer_ids": [1, -1, 0]}
    own |= {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    fields = config["transformer_layer_config"] | {"block_size": config["block_size"], "dflash_config": own}
    heads.write(tmp_path, fields, tensors)
    assert proposers.kind_of(tmp_path) == "dflash2"
    proposer = proposers.load(tmp_path, target, num_draft_tokens=NUM_DRAFTS)
    check(proposer, goldens["dflash2.logits"], goldens["dflash2.drafts"])
    for name, value in (("output_multiplier", 2.0), ("input_embedding_scale", 8.0), ("final_logit_softcapping", 30.0)):
        with pytest.raises(ValueError, match=rf"dflash_config\.{name} in .* must be"):
            changed = {"dflash_config": own | {name: value}}
            proposers.load(tmp_path, target, num_draft_tokens=NUM_DRAFTS, fields=changed)
    wrong = {"dflash_config": own | {"conv_group_size": 16}}
    with pytest.raises(ValueError, match=r"attention_conv\.kernel_projection\.weight in .* must have shape \(8, 32\)"):
        proposers.load(tmp_path, target, num_draft_tokens=NUM_DRAFTS, fields=wrong)


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("speculators")
    import reference_heads

    return reference_heads


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, when it is imported
@pytest.mark.parametrize("case", CASES)
def test_the_package_computes_what_is_recorded(tmp_path, reference, goldens, case):
    written, numbers = reference.record(case, tmp_path)
    recorded = json.loads((GOLDENS / "heads.json").read_text())[case]
    assert written["shapes"] == recorded["shapes"]
    assert numbers["drafts"].tolist() == goldens[f"{case}.drafts"].tolist()
    np.testing.assert_allclose(numbers["logits"], goldens[f"{case}.logits"], rtol=TOLERANCE / 10, atol=TOLERANCE / 10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["eagle3", "eagle3.1", "peagle", "dflash", "dflash both ways", "dspark"])
def test_the_package_loads_what_is_exported(tmp_path, reference, target, case):
    recorded_heads.write(tmp_path / "first", case)
    proposer = proposers.load(tmp_path / "first", target, num_draft_tokens=NUM_DRAFTS)
    name = str(recorded_heads.write_target(tmp_path / "target"))
    training.save_pretrained(proposer, tmp_path / "second", target=target, layout="speculators", target_name=name)
    logits, drafts = reference.draft(reference.load(tmp_path / "second"), CASES[case][0])
    check(proposer, logits, drafts)
