"""Unrolled steps compute what decoding computes after the same tokens, row by row and document by document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, models, sampling, training
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers import medusa, trunk
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.dflash import dflash
from specjax.proposers.dspark import dspark
from specjax.proposers.eagle3 import Eagle3Head, eagle3
from specjax.proposers.medusa import head_logits
from specjax.proposers.p_eagle import p_eagle
from specjax.sampling import SamplingParams
from specjax.training import unroll
from specjax.training.unroll import Batch

VOCAB, HIDDEN, STEPS = 29, 16, 4
SIZES = {
    "vocab_size": VOCAB,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "mlp_size": 24,
    "max_length": 64,
}
LAYERS = (1, 2)
HEADS = {
    "eagle3": Eagle3Head(DecoderConfig(hidden_size=12, num_layers=1, **SIZES), HIDDEN, len(LAYERS)),
    "two layers, 3.1": Eagle3Head(
        DecoderConfig(hidden_size=12, num_layers=2, **SIZES), HIDDEN, len(LAYERS), "each", True, True
    ),
}


slow = pytest.mark.slow
features = jax.jit(training.features, static_argnums=2)
feature_unroll = jax.jit(training.feature_unroll, static_argnums=0, static_argnames=("steps", "detach"))
block_unroll = jax.jit(training.block_unroll, static_argnums=0)
depth_unroll = jax.jit(training.depth_unroll, static_argnums=1, static_argnames=("mask_token", "depths", "keep"))
prefill = jax.jit(decode.prefill, static_argnames="max_length")
propose = jax.jit(lambda proposer, *given: proposer.propose(*given)[0])


@pytest.fixture(scope="module")
def target():
    config = DecoderConfig(hidden_size=HIDDEN, num_layers=2, **SIZES)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, init_params(config, seed=0))
    return models.with_feature_layers(decoder_model(config, params), LAYERS)


def params_of(head):
    hidden = head.config.hidden_size
    shapes = head.shapes() | {"embedding": (VOCAB, hidden), "lm_head": (VOCAB, hidden)}
    return jax.tree.map(lambda x: 12 * x if x.ndim > 1 else x, trunk.random_params(shapes, jax.random.key(1)))


def drafted(target, proposer, prompts, lengths, steps=1):
    """The last step of decoding: the lengths before it, the tokens then drafted and their logits."""
    params = sampling.batch([SamplingParams(temperature=1.0, max_tokens=40)] * len(prompts))
    state = prefill(target, proposer, prompts, lengths, params, jax.random.key(2), max_length=48)
    state = decode.generate(target, proposer, state, max_steps=steps - 1)
    keys = jax.random.split(jax.random.key(3), (len(prompts), STEPS + 1))
    draft = propose(proposer, keys, state.context, state.sampling, state.proposer)
    context = state.context
    tokens = np.array(context.tokens)
    for row, length in enumerate(context.length):
        tokens[row, int(length) : int(length) + STEPS] = draft.tokens[row]
    return tokens, np.array(context.length), np.asarray(draft.distribution.logits)


@pytest.mark.parametrize("name", [pytest.param("eagle3", marks=slow), "two layers, 3.1"])
def test_steps_are_those_of_decoding(name, target):
    """From a prompt and from what later steps fed, with the drafts as the text."""
    head = HEADS[name]
    params = params_of(head)
    proposer = eagle3(head, params, STEPS)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
    tokens, lengths, logits = drafted(target, proposer, prompts, np.array([9, 5, 2]), steps=4)
    assert (lengths > [9, 5, 2]).all() and logits.std() > 0.1
    batch = Batch(jnp.asarray(tokens), None, jnp.ones(tokens.shape, bool))
    batch = features(target, batch, LAYERS)
    steps = feature_unroll(head, params, batch, steps=STEPS)
    for j in range(STEPS):
        found = head.logits(params, steps.outputs[j])
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(found[row, length - 1], logits[row, j], atol=1e-5 * np.abs(logits).max())
            assert steps.labels[j][row, length - 1] == tokens[row, length + j]


@pytest.mark.parametrize("name", ["two layers, 3.1"])
def test_depths_are_those_of_decoding(name, target):
    """P-EAGLE drafts all tokens in one pass; drafts that follow one another change nothing, and nor do other rows."""
    head = HEADS[name]
    params = params_of(head) | {"mask_taps": jax.random.normal(jax.random.key(4), (len(LAYERS) * HIDDEN,))}
    proposer = p_eagle(head, params, STEPS, mask_token=VOCAB - 1)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
    tokens, lengths, logits = drafted(target, proposer, prompts, np.array([9, 5, 2]), steps=4)
    assert (lengths > [9, 5, 2]).all() and logits.std() > 0.1
    batch = features(target, Batch(jnp.asarray(tokens), None, jnp.ones(tokens.shape, bool)), LAYERS)
    steps = depth_unroll(jax.random.key(0), head, params, batch, mask_token=VOCAB - 1, depths=STEPS, keep=1.0)
    for j in range(STEPS):
        found, rows = head.logits(params, steps.outputs[j]), np.asarray(steps.rows[j])
        assert np.sort(rows, axis=1).tolist() == [[*range(tokens.shape[1])]] * 3
        for row, length in enumerate(lengths):
            here = rows[row].tolist().index(length - 1)
            np.testing.assert_allclose(found[row, here], logits[row, j], atol=1e-5 * np.abs(logits).max())
            assert steps.labels[j][row, here] == tokens[row, length + j]
            assert steps.previous[j][row, here] == tokens[row, length + j - 1]
            hidden = batch.features.hidden[row, length + j - 1]
            np.testing.assert_array_equal(steps.target_hidden[j][row, here], hidden)


@pytest.mark.slow
def test_depths_of_packed_documents_begin_at_fewer_and_fewer_tokens(target):
    head, lengths = HEADS["eagle3"], (9, 2, 7)
    params = params_of(head) | {"mask_taps": jax.random.normal(jax.random.key(4), (len(LAYERS) * HIDDEN,))}
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
    alone = Batch(jnp.asarray(tokens), None, jnp.arange(9)[None] < jnp.array(lengths)[:, None])
    alone, together = (features(target, batch, LAYERS) for batch in (alone, packed(tokens, lengths)))
    given = jax.random.key(0), head, params
    one = depth_unroll(*given, alone, mask_token=VOCAB - 1, depths=3, keep=1.0)
    some = depth_unroll(*given, together, mask_token=VOCAB - 1, depths=3, keep=0.5)
    starts = np.cumsum([0, *lengths[:-1]])
    valid = {start + s for start, length in zip(starts, lengths, strict=True) for s in range(1, length - 2)}
    before = set(range(sum(lengths) + 3))
    for j, count in enumerate((21, 11, 6)):  # 21 tokens with padding
        rows, mask = np.asarray(some.rows[j][0]), np.asarray(some.masks[j][0])
        assert len(rows) == count and set(rows.tolist()) <= before and (not j or set(rows[mask].tolist()) <= valid)
        before = set(rows.tolist())
        for row, output in zip(rows[mask], some.outputs[j][0][mask], strict=True):
            document = np.searchsorted(starts, row, side="right") - 1
            here = one.rows[j][document].tolist().index(row - starts[document])
            np.testing.assert_allclose(output, one.outputs[j][document, here], atol=1e-5)
    assert np.asarray(some.masks[1][0]).sum() == len(valid) == 10  # tokens with something to learn come first


def block_head(from_anchor=False, **options):
    size = STEPS if from_anchor else STEPS + 1
    layers = tuple(LayerConfig(Attention(window=window, has_head_norms=True)) for window in (None, 3))
    config = DecoderConfig(hidden_size=12, num_layers=2, **SIZES, layers=layers)
    return BlockHead(config, len(LAYERS), HIDDEN, VOCAB, size, VOCAB - 1, from_anchor, **options)


BLOCK_HEADS = {
    "dflash": block_head(),
    "anchored": block_head(window_from_anchor=True),
    "causal": block_head(is_causal=True, from_anchor=True),
    "dspark": block_head(from_anchor=True, markov_rank=5),
}


@pytest.mark.parametrize("name", ["dflash", "anchored", *(pytest.param(x, marks=slow) for x in ("causal", "dspark"))])
def test_blocks_are_those_of_decoding(name, target):
    head = BLOCK_HEADS[name]
    params = params_of(head)
    make = dspark if head.markov_rank else dflash
    prompts = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
    tokens, lengths, logits = drafted(target, make(head, params, STEPS), prompts, np.array([9, 5, 2]), steps=4)
    batch = features(target, Batch(jnp.asarray(tokens), None, jnp.ones(tokens.shape, bool)), LAYERS)
    ends = jnp.asarray(lengths)[:, None] - 1
    places = jnp.concatenate([ends, jnp.maximum(ends - 2, 1), jnp.full_like(ends, -1)], axis=1)
    steps = block_unroll(head, params, batch, places)
    for j in range(STEPS):
        found = head.logits(params, steps.outputs[j])
        if head.markov_rank:
            found += head.markov_logits(params, steps.previous[j])
        np.testing.assert_allclose(found[:, 0], logits[:, j], atol=1e-5 * np.abs(logits).max())
        assert steps.labels[j][:, 0].tolist() == tokens[np.arange(3), lengths + j].tolist()
        assert steps.masks[j].tolist() == [[True, True, False]] * 3


@slow
def test_heads_of_medusa_are_those_of_decoding(target):
    keys = jax.random.split(jax.random.key(0), STEPS)
    shapes = {"blocks": [{"weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}], "head": (VOCAB, HIDDEN)}
    heads = [jax.tree.map(lambda x: 12 * x, trunk.random_params(shapes, key)) for key in keys]
    prompts = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32)
    proposer = medusa(heads, vocab_size=VOCAB)
    tokens, lengths, logits = drafted(target, proposer, prompts, np.array([9, 5]), steps=2)
    batch = features(target, Batch(jnp.asarray(tokens), None, jnp.ones(tokens.shape, bool)))
    steps = training.medusa_unroll(heads, batch)
    for j in range(STEPS):
        found = head_logits(heads[j], steps.outputs[j])[jnp.arange(2), lengths - 1]
        np.testing.assert_allclose(found, logits[:, j], atol=1e-5 * np.abs(logits).max())
        assert steps.labels[j][jnp.arange(2), lengths - 1].tolist() == tokens[np.arange(2), lengths + j].tolist()


@pytest.mark.slow
def test_blocks_of_a_row_see_their_document_only(target):
    head = BLOCK_HEADS["dflash"]
    params, lengths = params_of(head), (9, 2, 7)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
    alone = Batch(jnp.asarray(tokens), None, jnp.arange(9)[None] < jnp.array(lengths)[:, None])
    alone, together = (features(target, batch, LAYERS) for batch in (alone, packed(tokens, lengths)))
    one = block_unroll(head, params, alone, jnp.array([[5], [-1], [2]]))
    both = block_unroll(head, params, together, jnp.array([[5, 13]]))
    for j in range(STEPS):
        np.testing.assert_allclose(both.outputs[j][0], one.outputs[j][jnp.array([0, 2]), 0], atol=1e-5)
    assert [bool(mask[0, 0]) for mask in both.masks] == [True, True, True, False]  # tokens 6, 7 and 8
    assert [bool(mask[0, 1]) for mask in both.masks] == [True] * 4
    assert not any(mask[1].any() for mask in one.masks)


def test_anchors():
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    loss_mask = jnp.ones((2, 8), bool).at[1, :6].set(False)
    batch = Batch(jnp.zeros((2, 8), jnp.int32), segments, loss_mask)
    assert training.anchors(jax.random.key(0), batch, count=4).tolist() == [[1, 2, 5, -1], [5, 6, -1, -1]]
    some = {tuple(training.anchors(jax.random.key(i), batch, count=2)[0].tolist()) for i in range(20)}
    assert some == {(1, 2), (1, 5), (2, 5)}


def packed(tokens, lengths):
    """One row of several documents with padding, and the same documents in rows of their own."""
    width = sum(lengths) + 3
    row, segments = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
    place = 0
    for i, length in enumerate(lengths):
        row[0, place : place + length] = tokens[i, :length]
        segments[0, place : place + length] = i + 1
        place += length
    return Batch(jnp.asarray(row), jnp.asarray(segments), jnp.asarray(segments > 0))


@pytest.mark.parametrize("block", [8, pytest.param(unroll.BLOCK, marks=slow)])
def test_documents_of_a_row_do_not_see_each_other(block, target, monkeypatch):
    monkeypatch.setattr(unroll, "BLOCK", block)
    head = HEADS["eagle3"]
    params, lengths = params_of(head), (9, 2, 7)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 9)).astype(np.int32)
    alone = Batch(jnp.asarray(tokens), None, jnp.arange(9)[None] < jnp.array(lengths)[:, None])
    alone, together = (features(target, batch, LAYERS) for batch in (alone, packed(tokens, lengths)))
    one, all_in_one = (feature_unroll(head, params, batch, steps=3) for batch in (alone, together))
    place = 0
    for i, length in enumerate(lengths):
        for j in range(3):
            rows = np.arange(1, length)  # row 0 has no feature
            expected, found = one.outputs[j][i, rows], all_in_one.outputs[j][0, place + rows]
            valid = np.asarray(one.masks[j][i, rows])
            assert valid.tolist() == (rows + 1 + j < length).tolist()
            assert all_in_one.masks[j][0, place + rows].tolist() == valid.tolist()
            np.testing.assert_allclose(found[valid], expected[valid], atol=1e-5)
            assert not all_in_one.masks[j][0, place]
        place += length
    assert not any(mask[0, place:].any() for mask in all_in_one.masks)


def test_only_tokens_of_the_loss_mask_are_learned(target):
    batch = Batch(jnp.zeros((1, 8), jnp.int32), None, jnp.arange(8)[None] >= 5)
    batch = features(target, batch, LAYERS)
    masks = feature_unroll(HEADS["eagle3"], params_of(HEADS["eagle3"]), batch, steps=2).masks
    assert np.flatnonzero(masks[0][0]).tolist() == [4, 5, 6]
    assert np.flatnonzero(masks[1][0]).tolist() == [3, 4, 5]


@pytest.mark.slow
def test_gradients_flow_through_the_steps(target):
    """The last step has the gradients of a difference, in a random direction; detached, they pass its row alone."""
    head = HEADS["eagle3"]
    params = params_of(head)
    batch = features(target, Batch(jnp.arange(8)[None], None, jnp.ones((1, 8), bool)), LAYERS)
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)

    def last(size, detach):
        moved = jax.tree.map(lambda x, y: x + size * y, params, direction)
        return jnp.mean(feature_unroll(head, moved, batch, steps=3, detach=detach).outputs[2] ** 2)

    gradients = [jax.grad(last)(0.0, detach) for detach in (False, True)]
    difference = (last(1e-3, False) - last(-1e-3, False)) / 2e-3
    np.testing.assert_allclose(gradients[0], difference, rtol=1e-2)
    assert abs(gradients[1] - difference) > 0.05 * abs(difference)


def test_errors(target):
    batch = Batch(jnp.zeros((1, 8), jnp.int32), None, jnp.ones((1, 8), bool))
    head = HEADS["eagle3"]
    with pytest.raises(ValueError, match="batch must have features"):
        training.feature_unroll(head, params_of(head), batch)
    with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
        training.feature_unroll(head, params_of(head), batch, steps=0)
    with pytest.raises(ValueError, match="depths must be an integer >= 1, got 0"):
        training.depth_unroll(jax.random.key(0), head, params_of(head), batch, mask_token=0, depths=0)
    with pytest.raises(ValueError, match=r"features\.taps must be of 2 layers"):
        training.feature_unroll(head, params_of(head), training.features(target, batch, (1,)))


@pytest.mark.parametrize("options", [{"scale": 0.5, "softcap": None}, {"scale": None, "softcap": 2.0}])
def test_scores_that_no_loss_computes(options):
    x = jnp.zeros((1, 2, 1, 4))
    with pytest.raises(ValueError, match="the attention of a head must have no scale and no softcap in training"):
        training.unroll.Rows(None, jnp.ones((1, 2), bool), (), ()).attend(x, x, x, None, **options)
