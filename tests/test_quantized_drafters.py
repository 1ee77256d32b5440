"""Drafters whose matrices the files hold in codes draft as the floats do for which the codes stand."""

import json

import heads
import jax
import numpy as np
import pytest
import quantized_files as files
from safetensors.numpy import load_file, save_file
from test_drafter_files import KINDS, of, targets  # noqa: F401, a fixture
from test_quantized_checkpoints import FORMATS, GPTQ, compressed, is_quantized

from specjax import proposers

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
CASES = {  # of each kind of drafter: the field quantization_config, and what makes a matrix [N, K]
    "eagle": FORMATS["fp8"],
    "eagle in speculators": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda rng, n, k: files.fp8(rng, n, k, name="weight_scale", shape=(n, 1)),
    ),
    "eagle3": FORMATS["packed"],
    "p_eagle": (FP8, lambda rng, n, k: files.fp8(rng, n, k, name="weight_scale")),
    "dflash": FORMATS["int8"],
    "dspark": FORMATS["nf4"],
    "mtp": (GPTQ, lambda rng, n, k: files.gptq(rng, n, k, 32)),
    "medusa": FORMATS["nvfp4"],
    "mlp_speculator": FORMATS["awq"],
}
TABLES = "embed_tokens", "lm_head", "emb.", "markov_w1", "mask_hidden", "codebook"


def quantise(directory, quantization, fabricate):
    """Put fabricated codes in the place of the matrices of a drafter, beside which a copy gets their floats."""
    config, file = directory / "config.json", next(directory.glob("*.safetensors"))
    rng, stored, floats = np.random.default_rng(1), {}, {}
    for name, x in load_file(file).items():
        is_matrix = x.ndim == 2 and name.endswith(".weight") and not any(table in name for table in TABLES)
        arrays, floats[name] = fabricate(rng, *x.shape) if is_matrix else ({"": x}, x)
        beginning = name.removesuffix("weight") if is_matrix else name
        stored |= {beginning + key: np.array(y) for key, y in arrays.items()}
    copy = directory.parent / "floats"
    heads.write(copy, json.loads(config.read_text()), floats, file.name)
    save_file(stored, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_drafter_drafts_as_its_floats_do(tmp_path, targets, kind):  # noqa: F811
    directory, target = tmp_path / "codes", of(kind, targets)
    directory.mkdir()
    KINDS[kind](directory, targets["right"])
    copy = quantise(directory, *CASES[kind])
    assert proposers.kind_of(directory) == proposers.kind_of(copy)
    codes, floats = (proposers.load(path, target, num_draft_tokens=2) for path in (directory, copy))
    found = [x for x in jax.tree.leaves(codes, is_leaf=is_quantized) if is_quantized(x)]
    assert found and not any(map(is_quantized, jax.tree.leaves(floats, is_leaf=is_quantized)))
    drafts = [heads.propose(one, heads.start(target, one)) for one in (codes, floats)]
    logits = [np.asarray(draft.distribution.logits) for draft in drafts]
    np.testing.assert_array_equal(*(draft.tokens for draft in drafts))
    np.testing.assert_allclose(*logits, atol=1e-4 * np.abs(logits[1][np.isfinite(logits[1])]).max())
