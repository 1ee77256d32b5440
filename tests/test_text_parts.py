"""Families whose checkpoints also take images: their fields and tensors lie inside others, and images are left out."""

import json

import jax
import numpy as np
import pytest
from families import ALL, write

from specjax.models import load

PREFIXES = {  # of the language model in files of transformers before 4.52 and after
    "old": lambda name: f"language_model.{name}",
    "new": lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
}
CASES = {"gemma3": "gemma3"}  # the model_type of the whole checkpoint, by the case of the text part


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("case", CASES)
def test_images_are_left_out(case, prefix, tmp_path):
    alone = load(write(tmp_path / "alone", case))
    config = {"model_type": CASES[case], "text_config": ALL[case], "vision_config": {"depth": 2}}
    model = load(write(tmp_path / prefix, case, config=config, renamed=PREFIXES[prefix]))
    assert model.apply.config == alone.apply.config
    for one, other in zip(*map(jax.tree.leaves, (model.params, alone.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_text_part_without_its_defaults(tmp_path):
    """The files of Gemma 3 with images lack the fields with the usual values."""
    directory = write(tmp_path / "model", "gemma3")
    kept = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": kept | {"model_type": "gemma3_text"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"embed_tokens.weight in .* must have shape \(262208, 2560\), got \(64, 32\)"):
        load(directory)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in .* must be absent"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention in .* must be False"),
        ("gemma3", {"layer_types": ["full_attention", "linear"]}, "layer_types in .* must be 2 times"),
        (
            "gemma3_capped",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters.rope_type in .* must be absent",
        ),
    ],
)
def test_fields_that_are_refused(case, change, message, tmp_path):
    directory = write(tmp_path / "model", case)
    (directory / "config.json").write_text(json.dumps(ALL[case] | change))
    with pytest.raises(ValueError, match=message):
        load(directory)
