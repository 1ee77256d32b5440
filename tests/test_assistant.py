"""Assistants of Gemma 4: the drafts of transformers, the target's memory, which stays as it is, and other targets."""

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assistants import CASES, NUM_DRAFTS, TARGET, TEXT, write
from families import GOLDENS, NUM_TOKENS, tokens
from families import write as write_target
from paged import poisoned, random_table

from specjax import proposers, sampling
from specjax.decoding.calls import run
from specjax.models import load
from specjax.sampling import SamplingParams
from specjax.types import Context, Memory, ModelInput

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load(write_target(tmp_path_factory.mktemp("target") / TARGET, TARGET))


@pytest.fixture(scope="module")
def fed(target):
    """The target's features of twice the same tokens, and its memory, of which the pending token's slot is NaN."""
    pages = jnp.asarray(random_table((2, 5), 20))
    positions = jnp.broadcast_to(jnp.arange(NUM_TOKENS, dtype=jnp.int32), (2, NUM_TOKENS))
    inputs = ModelInput(jnp.asarray(np.stack([tokens()[0]] * 2)), positions, pages=pages)
    output, memory = jax.jit(run)(target, inputs, poisoned(target.init_memory(2, 20, 4)))
    is_pending = np.zeros((20, 4), bool)
    is_pending[np.asarray(pages)[:, (NUM_TOKENS - 1) // 4], (NUM_TOKENS - 1) % 4] = True
    return inputs, output.features, poisoned(memory, is_pending)


@jax.jit
def propose(proposer, inputs, features, memory):
    """Draft at a temperature that takes the best token."""
    number, length = inputs.tokens.shape
    state = Memory(rows=features.hidden[:, -2])
    length = jnp.full(number, length, jnp.int32)
    ids = jnp.pad(inputs.tokens, ((0, 0), (0, 8)))
    context = Context(ids, length, jnp.ones(number, bool), length, pages=inputs.pages)
    rows = sampling.batch([SamplingParams(temperature=1e-3, max_tokens=4)] * number)
    keys = jax.random.split(jax.random.key(0), (number, NUM_DRAFTS + 1))
    draft, _, after = proposer.propose(keys, context, rows, state, memory)
    return draft, after


@pytest.mark.parametrize(
    "case", [case if case == "groups" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_drafts_are_those_of_transformers(case, target, fed, tmp_path):
    """In pages among NaN; the slot of the pending token is not read, and no slot changes."""
    assert proposers.kind_of(write(tmp_path / case, case)) == "assistant"
    proposer = proposers.load(tmp_path / case, target, num_draft_tokens=NUM_DRAFTS)
    draft, after = jax.device_get(propose(proposer, *fed))
    expected = np.load(GOLDENS / "logits.npz")[f"assistant_{case}"]
    scale = np.abs(expected[np.isfinite(expected)]).max()
    for row in (0, 1):
        np.testing.assert_array_equal(draft.tokens[row], expected.argmax(axis=1))
        np.testing.assert_allclose(draft.distribution.logits[row], expected, rtol=0, atol=TOLERANCE * scale)
    jax.tree.map(np.testing.assert_array_equal, after, fed[2])


@pytest.mark.slow
@pytest.mark.usefixtures("float32_products")
def test_greedy_tokens_in_an_engine(tmp_path):
    """Requests in pages, of which one has no token before the pending one at first, on layers that share keys."""
    target = load(write_target(tmp_path / "small", "gemma4_small"))
    proposer = proposers.load(write(tmp_path / "groups", "groups"), target, num_draft_tokens=NUM_DRAFTS)
    found, rng = heads.in_slots(target, proposer), np.random.default_rng(3)
    for number, length in enumerate((9, 1, 5, 12)):
        rows = [*rng.integers(0, heads.VOCAB, length).tolist(), *found[number]]
        ids = jnp.asarray([rows + [0] * (26 - len(rows))], jnp.int32)
        likely = jnp.argmax(whole(target, ids), axis=-1)[0].tolist()
        assert len(found[number]) == 14 and found[number] == likely[length - 1 : len(rows) - 1]


@jax.jit
def whole(target, ids):
    """The logits of whole sequences."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return target.apply(target.params, ModelInput(ids, positions), None)[0].logits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone_hidden_size": 48}, "backbone_hidden_size in .* must be 32, the hidden size of the target, got 48"),
        ({"vocab_size": 63}, "vocab_size in .* must be 64, the vocabulary of the target, got 63"),
        (
            {"global_head_dim": 32},
            "its heads must be 24, the size of heads in layer 1 of the target, got 32",
        ),
        ({"sliding_window": 6}, "its window must be 5, the window of layer 0 of the target, got 6"),
        ({"enable_moe_block": True}, "text_config.enable_moe_block in .* must be False"),
        ({"num_centroids": 15}, r"centroids.weight in .* must have shape \(15, 16\), got \(16, 16\)"),
        ({"centroid_intermediate_top_k": 17}, r"centroid_intermediate_top_k in .* must be in \[1, 16\], got 17"),
    ],
)
def test_fields_that_are_refused(change, message, target, tmp_path):
    of_text = {name: value for name, value in change.items() if name in TEXT or name == "enable_moe_block"}
    changed = {"text_config": TEXT | of_text} if of_text else change
    with pytest.raises(ValueError, match=message):
        proposers.load(write(tmp_path / "groups", "groups", **changed), target, num_draft_tokens=2)


def test_layers_read_the_last_keys_of_their_type(tmp_path):
    """Later layers of the target have none."""
    target = load(write_target(tmp_path / "small", "gemma4_small"))
    proposer = proposers.load(write(tmp_path / "plain", "plain"), target, num_draft_tokens=2)
    assert [layer.mixer.keys_of for layer in proposer.config.layers] == [1, 2]


def test_other_targets_are_refused(target, tmp_path):
    directory = write(tmp_path / "plain", "plain")
    with pytest.raises(ValueError, match="must have a layer with a window that keeps keys and values, got none"):
        proposers.load(directory, load(write_target(tmp_path / "llama", "llama")), num_draft_tokens=2)
    with pytest.raises(ValueError, match="rope_theta must be None for an assistant, whose layers turn in two ways"):
        proposers.load(directory, target, num_draft_tokens=2, rope_theta=1e4)
