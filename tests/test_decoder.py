"""The decoder: its cache, its masks, its positions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from specjax import models, testing
from specjax.models.attention import memories
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.layer import Attention, LayerConfig, run_layer
from specjax.models.linear import rms_norm
from specjax.types import ModelInput

CONFIG = DecoderConfig(61, 32, 2, 4, 2, 8, 64, 128)
SLOTS = 12


@pytest.fixture(scope="module")
def model():
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, 0)))


def tokens(num: int, batch: int = 2):
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (batch, num)), jnp.int32)


def positions(start: int, num: int, batch: int = 2):
    return jnp.broadcast_to(start + jnp.arange(num)[None], (batch, num))


@jax.jit
def feed(model, inputs, cache):
    return model.apply(model.params, inputs, cache)


def whole(model, ids):
    return feed(model, ModelInput(ids, positions(0, ids.shape[1], ids.shape[0])), None)[0].logits


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 4], [2, 1, 4]])
def test_incremental_is_whole(model, pieces):
    ids, cache, logits, start = tokens(7), model.init_cache(2, SLOTS), [], 0
    for size in pieces:
        output, cache = feed(model, ModelInput(ids[:, start : start + size], positions(start, size)), cache)
        logits.append(output.logits)
        start += size
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), whole(model, ids), atol=2e-5)


def test_rejected_tokens_need_no_rollback(model):
    """Slots past the committed tokens are not seen, and are overwritten."""
    ids, cache = tokens(7), model.init_cache(2, SLOTS)
    _, cache = feed(model, ModelInput(ids[:, :3], positions(0, 3)), cache)
    _, cache = feed(model, ModelInput((ids[:, :5] + 1) % 61, positions(3, 5)), cache)
    output, _ = feed(model, ModelInput(ids[:, 3:], positions(3, 4)), cache)
    np.testing.assert_allclose(output.logits, whole(model, ids)[:, 3:], atol=2e-5)


def test_rows_at_different_lengths(model):
    ids, cache = tokens(7), model.init_cache(2, SLOTS)
    _, cache = feed(model, ModelInput(ids, positions(0, 7)), cache)
    start = jnp.array([[5], [2]])
    mixed = jnp.stack([ids[0, 5:7], ids[1, 2:4]])
    output, _ = feed(model, ModelInput(mixed, start + jnp.arange(2)[None]), cache)
    expected = whole(model, ids)
    np.testing.assert_allclose(output.logits[0], expected[0, 5:7], atol=2e-5)
    np.testing.assert_allclose(output.logits[1], expected[1, 2:4], atol=2e-5)


def test_writes_past_the_end_are_dropped(model):
    """Not clamped onto the last slot, which may hold a committed token."""
    ids, cache = tokens(SLOTS + 3), model.init_cache(2, SLOTS)
    _, fits = feed(model, ModelInput(ids[:, :SLOTS], positions(0, SLOTS)), cache)
    _, cache = feed(model, ModelInput(ids[:, : SLOTS - 2], positions(0, SLOTS - 2)), cache)
    output, past = feed(model, ModelInput(ids[:, SLOTS - 2 :], positions(SLOTS - 2, 5)), cache)
    for a, b in zip(jax.tree.leaves(past), jax.tree.leaves(fits), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(output.logits[:, :2], whole(model, ids[:, :SLOTS])[:, -2:], atol=2e-5)


def test_a_tree_mask(model):
    """Two siblings at one position, in slots of their own, do not see each other."""
    ids, cache = tokens(5, batch=1), model.init_cache(1, SLOTS)
    _, cache = feed(model, ModelInput(ids[:, :3], positions(0, 3, 1)), cache)
    mask = jnp.array([[[True, False], [False, True]]])
    siblings = ModelInput(ids[:, 3:], jnp.array([[3, 3]]), mask)
    output, _ = feed(model, siblings, cache)
    for i in range(2):
        alone = jnp.concatenate([ids[:, :3], ids[:, 3 + i : 4 + i]], axis=1)
        np.testing.assert_allclose(output.logits[:, i], whole(model, alone)[:, 3], atol=2e-5)


def test_the_rest_of_a_parallel_layer_may_run_for_one_token():
    """Its MLP reads the input of the layer and not the stream after attention, for the tokens that are picked."""
    layer = LayerConfig(Attention(), is_parallel=True)
    config = replace(CONFIG, num_layers=1, layers=(layer,), norms_are_centred=True)
    params = jax.tree.map(lambda x: 4 * x, init_params(config, 0)["layers"][0])
    x, inputs = jax.random.normal(jax.random.key(1), (2, 5, 32)), ModelInput(tokens(5), positions(0, 5))
    (memory,) = memories(inputs, None, (None,))
    last = Partial(lambda stream: stream[:, -1:])
    (all_tokens, _), (one, _) = (run_layer(config, layer, params, x, None, memory, pick=pick) for pick in (None, last))
    np.testing.assert_allclose(one, all_tokens[:, -1:], atol=2e-5)


def test_a_window_counts_positions(model):
    """A token sees so many positions, itself included; siblings of a tree stand in later slots than they count."""
    windowed = decoder_model(replace(CONFIG, layers=(LayerConfig(Attention(window=3)), LayerConfig())), model.params)
    ids, cache = tokens(7, batch=1), windowed.init_cache(1, SLOTS)
    _, cache = feed(windowed, ModelInput(ids[:, :3], positions(0, 3, 1)), cache)
    mask = jnp.array([[[i == j for j in range(4)] for i in range(4)]])
    siblings = ModelInput(ids[:, 3:], jnp.full((1, 4), 3), mask)
    output, _ = feed(windowed, siblings, cache)
    for i in range(4):
        alone = jnp.concatenate([ids[:, :3], ids[:, 3 + i : 4 + i]], axis=1)
        np.testing.assert_allclose(output.logits[:, i], whole(windowed, alone)[:, 3], atol=2e-5)
        assert not np.allclose(output.logits[:, i], whole(model, alone)[:, 3], atol=1e-3)


def test_equal_configs_do_not_retrace(model):
    again = decoder_model(CONFIG, model.params)
    assert again.apply == model.apply
    assert hash(again.apply) == hash(model.apply)
    assert jax.tree.structure(again) == jax.tree.structure(model)


@pytest.mark.parametrize(
    "sizes, name", [((61, 32, 2, 4, 3, 8, 64, 128), "num_heads"), ((61, 32, 2, 4, 2, 7, 64, 128), "head_size")]
)
def test_bad_config(sizes, name):
    with pytest.raises(ValueError, match=name):
        DecoderConfig(*sizes)


def test_biases_of_norms_that_keep_the_mean():
    with pytest.raises(ValueError, match="norms_have_biases must be False where norms_are_centred is, got True"):
        replace(CONFIG, norms_have_biases=True)


def test_layers_of_another_number():
    with pytest.raises(ValueError, match="layers must be 1 or num_layers = 2 descriptions, got 3"):
        replace(CONFIG, layers=(LayerConfig(),) * 3)


@pytest.mark.usefixtures("float32_products")
def test_features(model):
    """The taps are the residual stream: the embeddings, a model of the first layer alone, and the input of the norm."""
    ids, params = tokens(7), model.params
    one = decoder_model(replace(CONFIG, num_layers=1), params | {"layers": {0: params["layers"][0]}}, (1,))
    tapped = models.with_feature_layers(model, (2, 0, 1))
    cache = tapped.init_cache(2, SLOTS)
    output, cache = feed(tapped, ModelInput(ids[:, :4], positions(0, 4)), cache)
    rest, _ = feed(tapped, ModelInput(ids[:, 4:], positions(4, 3)), cache)
    last, embedded, first = jnp.split(jnp.concatenate([output.features.taps, rest.features.taps], axis=1), 3, axis=-1)
    hidden = jnp.concatenate([output.features.hidden, rest.features.hidden], axis=1)
    np.testing.assert_array_equal(embedded, params["embedding"][ids])
    expected = feed(one, ModelInput(ids, positions(0, 7)), None)[0].features.taps
    np.testing.assert_allclose(first, expected, atol=2e-5)
    np.testing.assert_allclose(hidden, rms_norm(last, (params["norm"], CONFIG.norm_eps)), atol=2e-5)
    np.testing.assert_allclose(hidden @ params["embedding"].T, whole(model, ids), atol=1e-4)


def test_features_that_nobody_asked_for(model):
    assert feed(model, ModelInput(tokens(3), positions(0, 3)), None)[0].features.taps is None
    assert models.with_feature_layers(models.with_feature_layers(model, [1]), []) == model


@pytest.mark.parametrize("layers", [(3,), (-1,), (1.0,), (True,)])
def test_feature_layers_out_of_range(model, layers):
    with pytest.raises(ValueError, match=r"feature_layers must be in \[0, 2\], the number of layers, got"):
        models.with_feature_layers(model, layers)


def test_only_built_in_models_have_feature_layers():
    with pytest.raises(ValueError, match="model must be one that specjax built"):
        models.with_feature_layers(testing.bigram_model(jnp.zeros((3, 3))), (0,))
