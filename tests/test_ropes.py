"""How heads turn in rows that are longer than the training had, and layers with different rotations."""

import numpy as np
import pytest
from families import GOLDENS, LLAMA, NUM_TOKENS, TWO_BASES, write
from test_families import TOLERANCE, difference, incremental_logits

from specjax.models import load
from specjax.models.config_file import ConfigFile
from specjax.models.families.llama import config_of
from specjax.models.layer import LayerConfig
from specjax.models.rope import DynamicScaling, LongRopeScaling, ProportionalScaling, Rope, frequencies, rotation

POSITIONS = np.array([[0, 3, 40]], np.int32)


@pytest.mark.parametrize(("length", "expected"), [(None, 100.0), (16, 100.0), (17, 100 * (4 * 17 / 16 - 3) ** (8 / 6))])
def test_dynamic_scaling_raises_the_base_past_the_trained_length(length, expected):
    found = DynamicScaling(4.0, 16, 100.0)(frequencies(8, 100.0), length)
    np.testing.assert_allclose(found, expected ** (-np.arange(4) / 4), rtol=1e-5)


def test_longrope_takes_the_list_of_the_room_of_a_row():
    scaling = LongRopeScaling((1.0, 2.0), (4.0, 8.0), 16, 1.5)
    for length, divisors in ((None, [1, 2]), (16, [1, 2]), (17, [4, 8])):
        cos, sin = rotation(POSITIONS, 4, 100.0, scaling, length=length)
        angle = np.asarray(POSITIONS)[..., None] * np.array([1.0, 0.1]) / divisors
        np.testing.assert_allclose(cos, 1.5 * np.cos(angle), atol=1e-5)
        np.testing.assert_allclose(sin, 1.5 * np.sin(angle), atol=1e-5)


def test_proportional_scaling_turns_the_first_pairs_of_a_whole_head():
    found = ProportionalScaling(1, 2.0)(frequencies(8, 100.0), 99)
    np.testing.assert_allclose(found, [0.5, 0, 0, 0])


def test_layers_have_rotations_of_their_own(tmp_path):
    config = load(write(tmp_path / "model", "gemma3_capped")).apply.config
    ropes = [layer.mixer.rope for layer in config.layers]
    assert ropes == [None, Rope(TWO_BASES["sliding_attention"]["rope_theta"])]
    assert config.rope.theta == 500.0 and config.rope.scaling.factor == 4.0


@pytest.mark.parametrize("case", ["llama_dynamic"])
def test_logits_of_a_cache_that_is_as_long_as_the_rows(case, tmp_path):
    """The whole rows of `test_families.py` have room for their own tokens alone, as transformers takes it."""
    model, expected = load(write(tmp_path / case, case)), np.load(GOLDENS / "logits.npz")[case]
    assert difference(incremental_logits(model, num_slots=NUM_TOKENS), expected) <= TOLERANCE


def test_heads_refuse_kinds_that_depend_on_the_length(tmp_path):
    fields = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(ValueError, match=r"rope_scaling\.rope_type in .* must be 'default' or .*, got 'dynamic'"):
        config_of(ConfigFile(tmp_path, fields), (LayerConfig(),))
