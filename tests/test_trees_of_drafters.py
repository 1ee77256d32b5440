"""Drafters that grow trees: their reports at every node, and the text, which stays the target's."""

from dataclasses import replace

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial
from test_block_draft import CASES, write
from test_block_draft import reference as of_block
from test_eagle import write_eagle3
from test_engine import FEW, Tokenizer
from test_medusa import authors

from specjax import LLM, Context, Engine, SamplingParams, decode, models, proposers, sampling, testing, trees, verifiers
from specjax.decoding import tree_steps
from specjax.decoding.binding import as_pytree, of_draft
from specjax.decoding.drafters import with_tree
from specjax.engine.trees import as_trees, numbers_of_nodes
from specjax.proposers.block_draft import BlockDraft, BlockHead
from specjax.proposers.p_eagle import ParallelEagle
from specjax.proposers.tree_drawing import shape_of
from specjax.types import ModelInput

LENIENT = Partial(trees.typical, posterior_threshold=1.0, posterior_alpha=1.0)  # accepts paths of several depths


def follow(target, proposer, reference, in_pages=False):
    """Decode, and compare the row of every inner node with a transcription of the formulas, given the path to it."""
    state, counts = heads.start(target, proposer, in_pages, max_tokens=16), np.zeros(proposer.num_draft_tokens + 1, int)
    shape = shape_of(proposer.tree, proposer.num_draft_tokens)
    inner = sorted(set(shape.parents) - {-1})
    while bool(state.context.active.any()):
        context, features = jax.device_get((state.context, heads.features_of(target, state.context.tokens)))
        tree, state, info = heads.propose_and_step(target, proposer, state, LENIENT)
        tree = jax.device_get(tree)
        for b in np.flatnonzero(context.active):
            length = context.length[b]
            if b % 2 or length < 2 or length + proposer.tree > heads.SIZE:
                continue
            own = jax.tree.map(lambda x: None if x is None else x[b, : length - 1], features)  # noqa: B023
            for node in inner:
                path, at = [], node
                while at:
                    path, at = [tree.tokens[b, at], *path], shape.parents[at]
                drafts = np.array([*path, *[0] * (proposer.num_draft_tokens - len(path))])
                expected = reference(context.tokens[b, :length], own, drafts)[len(path)]
                found = tree.distribution.logits[tree.distribution.rows[b, node]]
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
            siblings = [tree.tokens[b][[i for i, p in enumerate(shape.parents) if p == node]] for node in inner]
            assert all(len(set(tokens.tolist())) == len(tokens) for tokens in siblings)
        np.add.at(counts, np.asarray(info.num_accepted)[context.active], 1)
    assert (counts > 0).sum() >= 3, counts


@pytest.mark.slow
def test_medusa(tmp_path):
    expected = authors(tmp_path)
    target = heads.make_target()
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    follow(target, proposer.with_tree(8, coupled=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["authors", "dspark", "jetspec"])
def test_blocks(tmp_path, case):
    layers = CASES[case][2]
    target, tensors = heads.make_target(layers), write(tmp_path, case)
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    reference = of_block(tensors, case, target)
    follow(target, proposer.with_tree(8, coupled=False), reference)


@pytest.mark.slow
def test_eagle3(tmp_path):
    target = heads.make_target()
    expected = write_eagle3(tmp_path, target, "authors")
    target = models.with_feature_layers(target, proposers.feature_layers(tmp_path, target))
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    follow(target, proposer.with_tree(8, coupled=False), expected, in_pages=True)


@pytest.mark.slow
def test_a_draft_model():
    """It is fed again the tokens of the path, whose keys and values are not in the slots of a chain."""
    target = heads.make_target()

    @jax.jit
    def logits_of(tokens):
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        return target.apply(target.params, ModelInput(tokens[None], positions), None)[0].logits[0]

    def reference(tokens, features, drafts):
        whole = np.zeros(heads.SIZE, np.int32)
        whole[: len(tokens) + len(drafts)] = [*tokens, *drafts]
        return logits_of(whole)[len(tokens) - 1 : len(tokens) - 1 + len(drafts)]

    follow(target, proposers.draft_model(target, 3, tree=8), reference, in_pages=True)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_loop")
def test_the_distribution_over_several_steps():
    """Sampled trees of 4 nodes and 3 tokens: the tokens of all steps follow the target."""
    target, draft = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
    proposer = proposers.draft_model(testing.bigram_model(jnp.asarray(target + draft)), 2, tree=4)
    tokens = testing.statistics.sampled_tokens(
        verifiers.block, jnp.asarray(target), proposer, num_samples=20_000, num_tokens=5
    )
    testing.statistics.assert_sampled_distribution("tree", tokens, np.asarray(jax.nn.softmax(target, axis=-1)))


@pytest.mark.slow
def test_in_an_engine_beside_neighbours(tmp_path):
    """A request gets the text of plain decoding, whatever drafts its neighbours have.

    Prompts share the pages of their beginning, one request is cancelled, and some lose their pages to others.
    """
    target = heads.make_target((2, 0, 1))
    write_eagle3(tmp_path, target, "authors")
    head = proposers.load(tmp_path, target, num_draft_tokens=2).with_tree(12, coupled=True)
    prompts = [np.random.default_rng(i).integers(0, heads.VOCAB, 5 + i).tolist() for i in range(4)]
    prompts[2:] = [prompts[0][:4] + prompt for prompt in prompts[2:]]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=22, ignore_eos=True, presence_penalty=0.5)
        for i, temperature in enumerate((0, 0.7, 0.9, 0.4))
    ]
    sizes = {"num_slots": 2, "max_length": 40, "tokenizer": Tokenizer(), "eos_token_ids": (), "capacities": FEW}
    sizes |= {"num_pages": 17, "page_size": 4, "chunk_size": 4, "verifier": verifiers.match, "step_sizes": ()}
    found = []
    for proposer in (None, head):
        with Engine(target, proposer, **sizes) as engine:
            first = engine.submit(prompts[0], params[0])
            requests = [engine.submit(*request) for request in zip(prompts, params, strict=True)]
            next(iter(first))
            first.cancel()
            results = [request.result(timeout=100) for request in requests]
            found.append([result.token_ids for result in results])
            stats = engine.stats()
            assert stats.pages.num_hit_tokens > 0 and stats.pages.num_used == 0
    assert found[0] == found[1]
    assert stats.num_preempted > 0
    assert sum(result.metrics.num_accepted for result in results) > 0


def test_an_engine_has_pages_for_all_nodes():
    """The last nodes of trees of the target's own drafts are accepted; their keys and values need slots before."""
    target, prompt = heads.make_target(num_layers=1), [5, 6, 7, 8]
    tree = proposers.draft_model(target, 4, tree=14, coupled=True)
    sizes = {"num_slots": 1, "max_length": 40, "tokenizer": Tokenizer(), "capacities": FEW, "step_sizes": ()}
    sizes |= {"num_pages": 10, "page_size": 4, "chunk_size": 4, "verifier": verifiers.match}
    found = []
    for proposer in (None, tree):
        with Engine(target, proposer, **sizes) as engine:
            request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
            found.append(request.result(timeout=100))
    assert found[0].token_ids == found[1].token_ids
    assert found[1].metrics.num_accepted > 9


@pytest.mark.slow
def test_sampled_trees_in_slots():
    """A request gets the tokens of the loop with the same key, in which it has a dense cache and other neighbours."""
    logits = np.random.default_rng(0).normal(size=(2, heads.VOCAB, heads.VOCAB)).astype(np.float32)
    target, draft = (testing.bigram_model(jnp.asarray(2 * x)) for x in (logits[0], logits.sum(axis=0)))
    drafter, prompts = proposers.draft_model(draft, 2, tree=5), heads.requests()
    lengths, size = np.array([len(prompt) for prompt in prompts], np.int32), heads.SIZE
    padded = np.stack([np.pad(prompt, (0, size - len(prompt))) for prompt in prompts])
    keys = jax.random.wrap_key_data(jnp.array([[0, i] for i in range(4)], jnp.uint32), impl="threefry2x32")
    params = sampling.batch([SamplingParams(temperature=0.7, max_tokens=14)] * 4)
    state = heads.prefill(target, drafter, padded, lengths, params, keys, max_length=size)
    state = decode.generate(target, drafter, state, verifier=verifiers.block)
    found = heads.in_slots(target, drafter, temperature=0.7, verifier=verifiers.block)
    for number, (row, length) in enumerate(zip(np.asarray(state.context.tokens), lengths, strict=True)):
        assert found[number] == row[length : length + 14].tolist()
    assert np.all(state.totals.accepted > 0)


@pytest.mark.slow
def test_trees_and_chains_take_turns():
    """A drafter is left in a state that the other form goes on from; the tokens are the same as without drafts."""
    logits = np.random.default_rng(0).normal(size=(2, heads.VOCAB, heads.VOCAB)).astype(np.float32)
    target, draft = (testing.bigram_model(jnp.asarray(2 * x)) for x in (logits[0], logits.sum(axis=0)))
    drafter = proposers.draft_model(draft, 2, tree=5)
    of_turns = heads.in_slots(target, drafter, turns=(4, 2, 0, 4, 0), verifier=verifiers.match, draft_lengths=(0, 2, 4))
    assert of_turns == heads.in_slots(target, None)


def test_shapes():
    """They hold the chain of the first children, and their siblings stand in order."""
    for num_nodes, depth in ((2, 1), (4, 2), (9, 4), (16, 4), (40, 3)):
        shape = shape_of(num_nodes, depth)
        assert len(shape.parents) == num_nodes and max(shape.depth) <= depth
        assert all(parent < node for node, parent in enumerate(shape.parents))
        assert tuple(sorted(shape.depth)) == shape.depth and shape.has_all_candidates
    assert shape_of(5, 4).parents == (-1, 0, 1, 2, 3)


def test_ngrams_go_on_after_several_occurrences():
    tokens = jnp.array([[5, 6, 7, 5, 6, 8, 9, 5, 6, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0]])
    context = Context(tokens, jnp.array([9, 4]), jnp.array([True, True]))
    tree, _ = proposers.ngram(3, tree=6).propose(None, context, None, None)
    assert tree.tokens.tolist() == [[6, 7, 5, 6, 8, 9], [4, -1, -1, -1, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 0, 4]] * 2
    assert tree.depth.tolist() == [[0, 1, 2, 3, 1, 2]] * 2
    assert tree.distribution is None


def test_bad_trees():
    model = testing.bigram_model(jnp.eye(3))
    with pytest.raises(ValueError, match=r"tree must be an integer > num_draft_tokens = 4, .* got 4"):
        proposers.draft_model(model, 4, tree=4)
    with pytest.raises(ValueError, match="coupled must be False where tree is None, got True"):
        proposers.draft_model(model, 4, coupled=True)
    with pytest.raises(ValueError, match="temperature must not be 0 for sampled trees"):
        proposers.draft_model(model, 2, temperature=0, tree=4)
    with pytest.raises(ValueError, match="have no distribution and must be verified by match"):
        proposers.ngram(2).with_tree(5, coupled=False)
    tree, _ = proposers.ngram(2, tree=4).propose(
        None, Context(jnp.zeros((1, 4), int), jnp.ones(1, int), jnp.ones(1, bool)), None, None
    )
    with pytest.raises(ValueError, match="the tree has no distribution, and must be verified by match"):
        of_draft(verifiers.block, tree)
    with pytest.raises(ValueError, match=r"a verifier that has a form for trees .*, got synthetic"):
        of_draft(verifiers.synthetic, tree)
    assert of_draft(verifiers.match, tree).func is trees.match
    options = Partial(verifiers.typical, posterior_alpha=0.5)
    assert of_draft(as_pytree(options), tree).keywords == {"posterior_alpha": 0.5}


@pytest.mark.parametrize("kind", [ParallelEagle, proposers.MLPSpeculator, proposers.SelfDraft, proposers.Assistant])
def test_drafters_of_chains_alone_are_refused(kind):
    with pytest.raises(ValueError, match=f"tree must be None for {kind.__name__}, which makes chains alone .* got 8"):
        with_tree(object.__new__(kind), 8, coupled=True)


def test_blocks_that_cut_chains_are_refused():
    head = BlockHead(heads.CONFIG, 1, heads.HIDDEN, heads.VOCAB, block_size=4, mask_token=0, num_candidates=5)
    with pytest.raises(ValueError, match=r"tree must be None for a drafter of DFlash2, .* among 5 candidates, got 8"):
        with_tree(BlockDraft(head, {}, 3), 8, coupled=True)
    with pytest.raises(ValueError, match="min_confidence must be None for trees, because it ends chains, got tree = 8"):
        with_tree(BlockDraft(replace(head, num_candidates=0), {}, 3, min_confidence=0.5), 8, coupled=True)


def test_trees_of_an_llm():
    """Its verifier chooses the trees; what takes none is refused before anything is compiled."""
    target = testing.bigram_model(jnp.eye(3))
    drafter, ngram = proposers.draft_model(target, 2), proposers.ngram(2)
    assert as_trees(drafter, target, verifiers.match, None) is drafter
    for verifier, coupled in ((verifiers.match, True), (verifiers.typical, True), (verifiers.block, False)):
        proposer = as_trees(drafter, target, verifier, 4)
        assert (proposer.tree, proposer.coupled) == (4, coupled)
    assert as_trees(ngram, target, verifiers.match, 4).tree == 4
    with pytest.raises(ValueError, match="have no distribution and must be verified by match"):
        as_trees(ngram, target, verifiers.rejection, 4)
    with pytest.raises(ValueError, match="a target with a recurrent state takes no trees"):
        as_trees(drafter, replace(target, commit=tree_steps.compact), verifiers.match, 4)
    with pytest.raises(
        ValueError, match="tree must be None for Fallback, which makes chains alone and has no method with_tree, got 4"
    ):
        as_trees(proposers.fallback(ngram, drafter), target, verifiers.match, 4)
    with pytest.raises(ValueError, match=r"tree must be more than 9, the tokens of the longest chain .*, got 9"):
        LLM(tree=9, num_draft_tokens="auto", draft=ngram.with_num_draft_tokens(8))
    with pytest.raises(ValueError, match=r"tree must be one number .* unless num_draft_tokens is 'auto', got \[8, 4\]"):
        LLM(tree=[8, 4])
    assert numbers_of_nodes([8, 4, 8], is_auto=True) == (4, 8) and numbers_of_nodes((8,), is_auto=False) == (8,)
    for wrong in ([], "8", [8, 1], 8.0):
        with pytest.raises(ValueError, match=r"tree must be None or an integer >= 2, .* or several, got "):
            LLM(tree=wrong, num_draft_tokens="auto")
    with pytest.raises(
        ValueError, match="tree must be None or an integer >= 2, the nodes of a tree, or several, got 1"
    ):
        LLM(tree=1)
    with pytest.raises(ValueError, match="tree must be less than 64, the longest sequence, got 64"):
        LLM(tree=64, max_length=64)
    with pytest.raises(ValueError, match="tree must be None for plain decoding, where num_draft_tokens is 0, got 4"):
        as_trees(proposers.none(), target, verifiers.match, 4)
