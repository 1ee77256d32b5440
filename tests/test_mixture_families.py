"""Families with mixtures, beyond their logits: pages, several devices, files as they are released, and bad fields."""

import json

import jax
import numpy as np
import pytest
from families import ALL, tokens, write
from safetensors.numpy import load_file, save_file
from test_families import GOLDENS, TOLERANCE, difference, whole_logits
from test_paged import assert_same, feed_both

from specjax.models import load, tensor_parallel


@pytest.mark.slow
def test_pages(tmp_path):
    """Rows at different lengths, calls across pages, tokens that are fed again, in a pool of NaN."""
    model = load(write(tmp_path / "model", "glm4_moe_groups"))
    rows, calls = np.arange(2)[:, None], []
    for starts in ((0, 0), (4, 2), (8, 5)):
        columns = np.array(starts)[:, None] + np.arange(4)
        calls.append((tokens()[rows, columns], columns))
    for output, expected in feed_both(model, 3, 4, calls):
        assert_same(output, expected)


@pytest.mark.slow
def test_devices_share_a_model(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))
    model = tensor_parallel(load(write(tmp_path / "model", "glm4_moe_groups")), mesh)
    expected = np.load(GOLDENS / "logits.npz")["glm4_moe_groups"]
    assert difference(whole_logits(model), expected) <= TOLERANCE


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    directory = write(tmp_path / "model", "glm4_moe")
    plain, tensors = load(directory), load_file(directory / "model.safetensors")
    save_file(tensors | {"model.layers.2.enorm.weight": np.ones(32, np.float32)}, directory / "model.safetensors")
    model = load(directory)
    assert model.apply == plain.apply
    jax.tree.map(np.testing.assert_array_equal, model.params, plain.params)
    (directory / "config.json").write_text(json.dumps(ALL["glm4_moe"] | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"layers.2.enorm.weight in .* does not belong to a model of this config"):
        load(directory)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("glm4_moe", {"n_group": 4}, "config.json: num_groups must divide num_experts = 6, got 4"),
        ("glm4_moe", {"topk_group": 2}, r"config.json: num_chosen_groups must be in \[1, num_groups = 1\], got 2"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func in .* must be 'sigmoid'"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method in .* must be 'noaux_tc'"),
        ("glm4_moe", {"n_routed_experts": None}, "must have the field n_routed_experts"),
        ("glm4_moe", {"n_shared_experts": 0}, r"n_shared_experts in .* must be in \[1, 4096\], got 0"),
        ("glm4_moe", {"first_k_dense_replace": -1}, r"first_k_dense_replace in .* must be in \[0, 2\], got -1"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, r"num_nextn_predict_layers in .* must be in \[0, 1024\], got"),
        ("glm4_moe", {"router_scale": 2.0}, "router_scale in .* must be absent"),
        ("glm4_moe", {"rope_scaling": {"type": "fancy"}}, "rope_scaling.type in .* must be 'default' or"),
        ("glm4_moe", {"n_routed_experts": 5}, r"mlp.gate.weight in .* must have shape \(5, 32\), got \(6, 32\)"),
    ],
)
def test_fields_that_are_refused(case, change, message, tmp_path):
    directory = write(tmp_path / "model", case)
    (directory / "config.json").write_text(json.dumps(ALL[case] | change))
    with pytest.raises(ValueError, match=message):
        load(directory)
