"""Trees of drafts in a step of the target: their scores, the history of their nodes, and the slots that are kept."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Categorical, Context, Draft, SamplingParams, decode, sampling, scorers, verifiers
from specjax.decoding import state_rows, tree_steps
from specjax.decoding.calls import run
from specjax.decoding.drafters import InMemory
from specjax.models.attention import update_cache
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.layer import Attention, LayerConfig
from specjax.pages import Pages
from specjax.sampling.guided.tables import Grammar
from specjax.types import DraftTree, Memory, ModelInput, Verified
from tests.paged import poisoned, random_table

CONFIG = DecoderConfig(23, 16, 2, 4, 2, 4, 32, 64, layers=(LayerConfig(Attention(window=4)), LayerConfig()))
SLOTS, PAGE = 16, 4
LENGTH = np.array([6, 3], np.int32)
PARENTS = np.array([[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 1, 3, 4, 3]], np.int32)  # N = 7
DEPTH = np.array([[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 2, 3, 4, 3]], np.int32)
PATH = np.array([[0, 2, 4, 6, 0], [0, 1, 3, 4, 5]], np.int32)
COUNT = np.array([4, 5], np.int32)


@pytest.fixture(scope="module")
def model():
    params = jax.jit(lambda: jax.tree.map(lambda x: 4 * x, init_params(CONFIG, 0)))()
    return decoder_model(CONFIG, params, feature_layers=(1,))


def a_tree(seed=0):
    tokens = np.random.default_rng(seed).integers(0, 23, PARENTS.shape).astype(np.int32)
    return DraftTree(tokens, PARENTS, DEPTH)


def a_context(pages=None):
    tokens = np.random.default_rng(1).integers(0, 23, (2, SLOTS)).astype(np.int32)
    return Context(tokens, LENGTH, np.ones(2, bool), LENGTH - 1, pages=pages)


def a_memory(model, pages):
    memory = model.init_memory(2, *(2, SLOTS) if pages is None else (12, PAGE))
    return memory if pages is None else Memory(poisoned(memory.pools))


def sequences(context, tree):
    """The tokens on the path to each node [B, N, L], by a plain loop, with the committed ones before them."""
    whole = np.repeat(context.tokens[:, None], tree.tokens.shape[1], axis=1)
    for b, length in enumerate(context.length):
        for node in range(tree.tokens.shape[1]):
            at = node
            while tree.parents[b, at] >= 0:
                whole[b, node, length - 1 + tree.depth[b, at]] = tree.tokens[b, at]
                at = tree.parents[b, at]
    return whole


@partial(jax.jit, static_argnames="width")
def prefill(model, tokens, memory, pages, width):
    positions = jnp.broadcast_to(jnp.arange(width)[None], (len(tokens), width))
    return run(model, ModelInput(tokens[:, :width], positions, pages=pages), memory)


score = jax.jit(scorers.mqa)
keep = jax.jit(
    lambda memory, context, tree, path, count: tree_steps.compact(memory, tree_steps.fed(context, tree), path, count)
)


@pytest.mark.parametrize("is_paged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scores_and_compaction(model, is_paged):
    """Nodes get the logits of their paths; the cache then keeps the accepted ones as if a prompt had them."""
    pages = random_table((2, SLOTS // PAGE), 12) if is_paged else None
    context, tree = a_context(pages), a_tree()
    memory = a_memory(model, pages)
    for width in (1, 5):  # the row that is shorter gets other tokens in later slots, which nothing may see
        _, memory = prefill(model, context.tokens, memory, pages, width)
    output, memory = score(model, context, tree, memory)
    paths = sequences(context, tree)
    expected, _ = prefill(model, paths.reshape(-1, SLOTS), model.init_memory(14, 14, SLOTS), None, SLOTS)
    last = (LENGTH[:, None] - 1 + DEPTH).reshape(-1)
    for found, whole in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
        of_nodes = np.asarray(whole)[np.arange(14), last].reshape(2, 7, -1)
        np.testing.assert_allclose(found, of_nodes, atol=2e-5)

    kept = keep(memory, context, tree, PATH, COUNT)
    end = PATH[np.arange(2), COUNT - 1]
    accepted = paths[np.arange(2), end]
    fresh_output, fresh = prefill(model, accepted, a_memory(model, pages), pages, 11)
    for pool, new in zip(jax.tree.leaves(kept), jax.tree.leaves(fresh), strict=True):
        for b in range(2):
            held = LENGTH[b] - 1 + COUNT[b]
            one, other = (np.asarray(x)[b if pages is None else pages[b]].reshape(SLOTS, -1) for x in (pool, new))
            np.testing.assert_allclose(one[:held], other[:held], atol=2e-5)
    features = tree_steps.on_path(output.features, PATH)
    for found, whole in zip(jax.tree.leaves(features), jax.tree.leaves(fresh_output.features), strict=True):
        for b in range(2):
            start = LENGTH[b] - 1
            np.testing.assert_allclose(found[b, : COUNT[b]], whole[b, start : start + COUNT[b]], atol=2e-5)

    # The next step gives the same logits as after the prompt, so it sees no sibling.
    after = context._replace(tokens=accepted, length=LENGTH + COUNT)
    again = a_tree(seed=2)
    expected, _ = score(model, after, again, fresh)
    found, _ = score(model, after, again, kept)
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-5)


def test_a_chain_as_a_tree(model):
    """The same logits and cache to the bit, and nothing moves."""
    context, drafts = a_context(), a_tree().tokens[:, 1:]
    _, memory = prefill(model, context.tokens, model.init_memory(2, 2, SLOTS), None, 5)
    index = np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7))
    chain = DraftTree(a_tree().tokens, index - 1, index)
    output, cache = score(model, context, Draft(drafts), memory)
    found, kept = score(model, context, chain, memory)
    kept = keep(kept, context, chain, index[:, :5], COUNT)
    for one, other in zip(jax.tree.leaves((output, cache)), jax.tree.leaves((found, kept)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_stored_numbers_are_moved_as_they_are():
    """Numbers of eight bits, whose scales belong to the layer, are copied too; only slots of the path change."""
    table, rng = random_table((2, SLOTS // PAGE), 12, seed=3), np.random.default_rng(0)
    cache = {name: jnp.zeros((12, PAGE, 2, 4), "float8_e4m3fn") for name in ("key", "value")}
    inputs = ModelInput(np.zeros((2, SLOTS), np.int32), np.broadcast_to(np.arange(SLOTS, dtype=np.int32), (2, SLOTS)))
    values = rng.normal(size=(2, 2, SLOTS, 2, 4)).astype(np.float32)
    cache = update_cache(cache, *values, inputs._replace(pages=table), (jnp.full(2, 0.5), jnp.full(2, 2.0)))
    kept = keep(Memory([cache]), a_context(table), a_tree(), PATH, COUNT).pools[0]
    for name, pool in cache.items():
        before, after = (np.asarray(x.astype(jnp.float32))[table].reshape(2, SLOTS, -1) for x in (pool, kept[name]))
        for b, start in enumerate(LENGTH - 1):
            source = np.arange(SLOTS)
            source[start : start + COUNT[b]] = start + PATH[b, : COUNT[b]]
            np.testing.assert_array_equal(after[b], before[b][source])


def test_trees_are_refused(model):
    context, tree = a_context(), a_tree()
    memory = model.init_memory(2, 2, SLOTS)
    with pytest.raises(ValueError, match="target with a recurrent state takes no trees"):
        scorers.mqa(replace(model, commit=tree_steps.compact), context, tree, memory)
    with pytest.raises(ValueError, match="target must take pages to score trees"):
        scorers.mqa(replace(model, takes_pages=False), context, tree, memory)
    with pytest.raises(ValueError, match=r"takes a Draft, got a DraftTree: score it with scorers\.mqa"):
        scorers.batch_expansion(model, context, tree, memory)


@partial(jax.tree_util.register_dataclass, data_fields=["truth"], meta_fields=[])
@dataclass(frozen=True)
class Knowing(InMemory):
    """Trees with the tokens that plain decoding gives on one path, up to some depth, and others on the other paths."""

    truth: jax.Array  # [B, L] int32
    num_draft_tokens, tree = 4, 7

    def init_memory(self, batch_size, num_pages, page_size):
        return Memory(rows=jnp.zeros(batch_size, jnp.int32))

    def prefill(self, inputs, following, previous, features, state):
        return state

    def propose(self, keys, context, sampling, state):
        number = context.length[:, None] % 2  # which of two shapes
        parents, depth = (
            jnp.where(number == 0, *(jnp.asarray(x)[i][None] for i in range(2))) for x in (PARENTS, DEPTH)
        )
        truth = jnp.take_along_axis(self.truth, context.length[:, None] - 1 + depth, axis=1, mode="clip")
        known = jnp.where(number == 0, jnp.array([[1, 0, 1, 0, 1, 0, 1]]), jnp.array([[1, 1, 0, 1, 1, 1, 0]])) == 1
        known &= depth <= context.length[:, None] % 5
        tokens = jnp.where(known, truth, (truth + 1 + jnp.arange(7)[None]) % 23)
        return DraftTree(tokens, parents, depth), state

    def update(self, context, verified, features, state):
        return Memory(rows=state.rows + verified.num_accepted)


def every_feature():
    alternating = Grammar(np.arange(23) % 2, np.array([[1, -1], [1, 0]]))
    rows = [
        {"temperature": 0},
        {},
        {"presence_penalty": 1.5, "frequency_penalty": -1.5, "repetition_penalty": 1.7},
        {"bad_words": [[3, 4], [5], *([i, j] for i in range(9, 15) for j in range(0, 23, 2))]},
        {"stop_token_ids": [1, 2, 8, 17], "min_tokens": 6},
        {"guided_decoding": alternating, "repetition_penalty": 0.5},
        {"logit_bias": {4: 2.0}, "allowed_token_ids": list(range(0, 23, 3)), "top_k": 5},
    ]
    return sampling.batch([SamplingParams(**{"temperature": 0.9, "max_tokens": 30} | row) for row in rows])


def test_the_history_of_a_node():
    """Every parameter reads the tokens of the text and of the node's own path, as if they were committed."""
    rng, params, number = np.random.default_rng(4), every_feature(), np.arange(7) % 2
    tree = DraftTree(rng.integers(0, 23, (7, 7)).astype(np.int32), PARENTS[number], DEPTH[number])
    tokens, lengths = rng.integers(0, 23, (7, SLOTS)).astype(np.int32), np.array([6, 3, 9, 1, 4, 4, 5], np.int32)
    tokens[3, 0], tokens[5, :4] = 3, [0, 1, 2, 3]
    context = Context(tokens, lengths, np.ones(7, bool), np.maximum(lengths - 2, 1), params.guide.initial)
    logits = rng.normal(size=(7, 7, 23)).astype(np.float32)
    found = jax.device_get(jax.jit(partial(tree_steps.process, width=4))(params, logits, context, tree))

    rows, whole = np.repeat(np.arange(7), 7), sequences(context, tree).reshape(49, SLOTS)
    ends = (lengths[:, None] + tree.depth).reshape(-1)
    states = [
        alternation(path[start:end], row == 5)
        for path, start, end, row in zip(whole, lengths[rows], ends, rows, strict=True)
    ]
    own = context._replace(
        tokens=whole,
        length=ends,
        active=np.ones(49, bool),
        prompt_length=context.prompt_length[rows],
        guided_state=params.guide.initial[rows] + np.array(states),
    )
    of_rows = state_rows.take_sampling(params, lambda x: x[rows])
    expected = jax.device_get(
        jax.jit(sampling.process)(of_rows, logits.reshape(49, 1, 23), own, np.zeros((49, 0), np.int32))
    )
    np.testing.assert_allclose(found.logits.reshape(49, 23), expected.logits[:, 0], atol=1e-6)
    np.testing.assert_allclose(found.min_logit.reshape(49), expected.min_logit[:, 0], atol=1e-6)
    assert len(set(states)) == 2


def alternation(drafts, is_guided):
    """The state after drafts of even and odd ids in turn, which those out of turn do not change."""
    state = 0
    for token in drafts:
        state ^= int(is_guided and token % 2 == state)
    return state


def test_a_tree_finds_room_for_all_of_its_nodes_or_none():
    context = a_context()._replace(length=np.array([9, 10], np.int32))
    assert tree_steps.fit(context, a_tree()).num_nodes.tolist() == [7, 1]
    assert tree_steps.fit(context._replace(active=np.array([False, True])), a_tree()).num_nodes.tolist() == [1, 1]


def test_features_and_rows_of_a_path():
    verified = Verified(PATH, COUNT - 1, path=PATH)
    hidden, logits = np.arange(14.0).reshape(2, 7, 1), np.arange(28.0).reshape(2, 7, 2)
    features, target = tree_steps.of_path(hidden, Categorical(logits), verified)
    np.testing.assert_array_equal(features[..., 0], PATH + 7 * np.arange(2)[:, None])
    np.testing.assert_array_equal(target.rows, PATH + 7 * np.arange(2)[:, None])
    assert tree_steps.of_path(hidden, target, verified._replace(path=None)) == (hidden, target)


@partial(jax.jit, static_argnames="max_length")
def start(model, proposer, prompts, lengths, params, keys, pages=None, *, max_length=SLOTS * 2):
    return decode.prefill(model, proposer, prompts, lengths, params, keys, max_length=max_length, pages=pages)


@pytest.mark.slow
def test_match_gives_the_tokens_of_plain_decoding(model):
    """With every sampling parameter, to the end of the buffer, where a tree finds no room; stop tokens end a path."""
    lengths = np.array([6, 3, 9, 1, 2, 4, 5], np.int32)
    prompts = np.random.default_rng(5).integers(0, 23, (7, 9)).astype(np.int32)
    given = prompts, lengths, every_feature(), jax.random.split(jax.random.key(3), 7)
    plain = decode.generate(model, None, start(model, None, *given), verifier=verifiers.match)
    proposer = Knowing(plain.context.tokens)
    state = start(model, proposer, *given, Pages(random_table((7, 8), 60), 60, PAGE))
    grown = decode.generate(model, proposer, state, verifier=verifiers.match)
    assert grown.context.length.tolist() == plain.context.length.tolist()
    assert grown.finished.tolist() == plain.finished.tolist()
    assert set(plain.finished.tolist()) == {decode.STOP, decode.MAX_TOKENS, decode.BUFFER_FULL}
    assert grown.context.guided_state.tolist() == plain.context.guided_state.tolist()
    for one, other, end in zip(grown.context.tokens, plain.context.tokens, plain.context.length, strict=True):
        assert one[:end].tolist() == other[:end].tolist()
    assert grown.totals.steps.sum() < 0.6 * plain.totals.steps.sum()
    assert grown.totals.accepted.tolist() == grown.proposer.rows.tolist()
    assert grown.totals.accepted_at.sum(axis=0).tolist()[-1] > 0
