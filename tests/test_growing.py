"""Growing trees: the children of a node, static shapes, and the searches, compared with searches in Python."""

import heapq
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Categorical, distributions, testing, trees
from specjax.keys import DRAFT, TARGET, stream
from specjax.trees import growing
from specjax.trees.growing.largest import largest


@pytest.mark.parametrize("size, count", [(7, 9), (600, 4), (5000, 31)])
def test_largest(size, count):
    """Equal values stand in the order of their indices."""
    values = np.random.default_rng(0).integers(0, max(size // 3, 3), size=(3, 2, size)).astype(np.float32)
    values[0, 0, 1:] = -np.inf
    expected = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    expected = np.pad(expected, ((0, 0), (0, 0), (0, max(0, count - size))), constant_values=size - 1)
    np.testing.assert_array_equal(jax.jit(partial(largest, count=count))(values), expected)


def rows(vocab_size, temperature=None):
    """A distribution over some blocks of the vocabulary; row (2, 0) has two tokens, and row 1 may be greedy."""
    logits = 2 * np.random.default_rng(1).normal(size=(3, 2, vocab_size)).astype(np.float32)
    logits[2, 0] = -np.inf
    logits[2, 0, [3, vocab_size - 1]] = 1, 0
    return Categorical(jnp.asarray(logits), temperature)


@jax.jit
def all_children(keys, distribution):
    first = distributions.sample(keys, distribution)
    return (
        first,
        growing.top(distribution, 4),
        growing.coupled(keys, distribution, 4),
        growing.sampled(keys, distribution, 4),
    )


def test_children_of_a_row():
    distribution = rows(1300, jnp.array([0.7, 0.0, 1.0]))
    keys = jax.random.split(jax.random.key(0), (3, 2))
    first, top, coupled, drawn = jax.device_get(all_children(keys, distribution))
    order = np.argsort(-np.asarray(distribution.logits), axis=-1, kind="stable")[..., :4]
    log_probs = jax.nn.log_softmax(distribution.logits / jnp.array([0.7, 1, 1])[:, None, None])
    for found in (top, coupled, drawn):
        assert found.tokens[2, 0, 2:].tolist() == [-1, -1] and np.all(found.log_probs[2, 0, 2:] == -np.inf)
        assert sorted(found.tokens[2, 0, :2].tolist()) == [3, 1299]
        for row in found.tokens.reshape(-1, 4).tolist():
            assert len({token for token in row if token >= 0}) == 4 - row.count(-1)
    is_there = top.tokens >= 0
    np.testing.assert_array_equal(top.tokens, np.where(is_there, order, -1))
    for found in (top, drawn):
        expected = np.take_along_axis(np.asarray(log_probs), np.maximum(found.tokens, 0), axis=-1)
        np.testing.assert_allclose(found.log_probs[is_there], expected[is_there], atol=1e-5)
    for found in (coupled, drawn):
        np.testing.assert_array_equal(found.tokens[..., 0], first)
        np.testing.assert_array_equal(found.tokens[1], top.tokens[1])
    np.testing.assert_allclose(np.exp(coupled.log_probs[[0, 2]]).sum(axis=-1), 1, atol=1e-5)


def test_drawn_children_follow_their_distribution():
    """Ordered pairs and triples, of tokens in two blocks of the vocabulary."""
    probs, ids = np.array([0.5, 0.3, 0.15, 0.05]), np.array([3, 70, 513, 598])
    logits = np.full(600, -np.inf, np.float32)
    logits[ids] = np.log(probs)
    num_samples = 4_000

    @jax.jit
    def draw(keys):
        return growing.sampled(
            keys[:, None], Categorical(jnp.broadcast_to(jnp.asarray(logits), (num_samples, 1, 600))), 3
        )

    found = np.searchsorted(ids, np.asarray(draw(jax.random.split(jax.random.key(3), num_samples)).tokens)[:, 0])
    expected = np.zeros((4, 4, 4))
    for first, second, third in np.ndindex(4, 4, 4):
        if len({first, second, third}) == 3:
            left = 1 - probs[first]
            expected[first, second, third] = probs[first] * probs[second] / left * probs[third] / (left - probs[second])
    counts = np.zeros((4, 4, 4))
    np.add.at(counts, tuple(found.T), 1)
    test = testing.chi_square(counts, expected)
    assert test.statistic < test.bound


def test_coupled_children_are_what_the_target_draws():
    """The target draws with the same noise, and so finds its token more often than among the draft's likeliest."""
    rng = np.random.default_rng(2)
    draft = 1.5 * rng.normal(size=(4000, 1, 40)).astype(np.float32)
    target = draft + 0.7 * rng.normal(size=draft.shape).astype(np.float32)

    @jax.jit
    def hits(keys, draft, target):
        token = distributions.sample(stream(keys, TARGET), Categorical(target))[..., None]
        found = growing.coupled(stream(keys, TARGET), Categorical(draft), 4).tokens
        return jnp.mean(found == token, axis=(0, 1)), jnp.mean(
            growing.top(Categorical(draft), 4).tokens == token, axis=(0, 1)
        )

    coupled, top = hits(jax.random.split(jax.random.key(4), (4000, 1)), jnp.asarray(draft), jnp.asarray(target))
    assert coupled[0] > 0.6 and coupled.sum() > 0.9 > top.sum()


def test_shapes():
    assert len(growing.MEDUSA.parents) == 64 and growing.MEDUSA.max_depth == 4
    assert len(growing.EAGLE.parents) == 26 and growing.EAGLE.max_depth == 5
    assert growing.of_widths((2, 1)).parents == (-1, 0, 0, 1, 2) and growing.of_widths((2, 1)).ranks == (0, 0, 1, 0, 0)
    gap = growing.of_paths([(0,), (2,)])
    assert gap.ranks == (0, 0, 2) and not gap.has_all_candidates and growing.EAGLE.has_all_candidates
    for paths, message in (
        ([[0, 0]], r"must have the path \[0\], the parent of \[0, 0\]"),
        ([[0], [0]], r"must be different .* got \[0\]"),
        ([[-1]], r"one or more ranks >= 0, got \[-1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            growing.of_paths(paths)
    with pytest.raises(ValueError, match="widths must be one or more integers >= 1, got"):
        growing.of_widths((2, 0))
    first = Categorical(jnp.zeros((1, 1, 4)))
    with pytest.raises(ValueError, match="shape must have every candidate before the last"):
        growing.grow(gap, jax.random.key(0), jnp.zeros(1, jnp.int32), first, None, None, growing.by_drawing)


TABLE = 2 * np.random.default_rng(5).normal(size=(11, 11)).astype(np.float32)
LAST = np.array([4, 7], np.int32)


@pytest.mark.slow
def test_a_grown_shape_follows_the_draft():
    """Each node has the candidate of its rank after its parent; a drawn chain has the noise of other drafters."""

    def advance(tokens, nodes, carry):
        return Categorical(jnp.asarray(TABLE)[tokens]), [*carry, nodes]

    keys = jax.random.split(jax.random.key(6), (2, 6))
    first = Categorical(jnp.asarray(TABLE)[LAST[:, None]])
    tree, calls = jax.jit(lambda *given: growing.grow(growing.EAGLE, *given, advance, []))(keys, LAST, first)
    assert tree.distribution is None and [len(nodes) for nodes in calls] == [4, 4, 1, 1]
    for row in range(2):
        tokens = np.asarray(tree.tokens)[row]
        for node in range(1, 26):
            best = np.argsort(-TABLE[tokens[growing.EAGLE.parents[node]]], kind="stable")
            assert tokens[node] == best[growing.EAGLE.ranks[node]]
    for choose in (growing.by_coupling, growing.by_drawing):
        chain = partial(growing.grow, growing.of_widths((1, 1)), advance=advance, carry=[], choose=choose)
        tree, _ = jax.jit(chain)(keys, LAST, first)
        for node in (1, 2):
            above = Categorical(jnp.asarray(TABLE)[tree.tokens[:, node - 1 : node]])
            own = stream(keys[:, :1], DRAFT, node - 1)
            own = own if choose is growing.by_drawing else stream(keys[:, node - 1 : node], TARGET)
            np.testing.assert_array_equal(distributions.sample(own, above)[:, 0], tree.tokens[:, node])
            if tree.distribution is not None:
                row = distributions.take(tree.distribution, jnp.full(2, node - 1)).rows
                np.testing.assert_array_equal(row[:, 0], [node - 1, node + 1])


def scored(tree, log_probs):
    """The score of each path of a tree, by its tokens, by `log_probs(path, token)`."""
    found = {}
    for node, token in enumerate(tree.tokens.tolist()):
        if node and token >= 0:
            path = next(p for p, (n, _) in {**found, (): (0, 0)}.items() if n == tree.parents[node])
            assert tree.depth[node] == len(path) + 1
            score = 0 if not path else found[path][1]
            found[*path, token] = node, score + log_probs(path, token)
    return {path: score for path, (_, score) in found.items()}


def test_the_best_nodes_of_eagle_trees():
    """The best children of the best nodes of each level, then the best of all, as a search in Python finds them."""
    table = np.asarray(jax.nn.log_softmax(TABLE))

    def advance(tokens, place, level, carry):
        return Categorical(jnp.asarray(TABLE)[tokens]), carry

    grow = jax.jit(
        lambda last, first: growing.expand(last, first, advance, None, num_nodes=13, width=3, max_depth=4)[0]
    )
    tree = jax.device_get(grow(LAST, Categorical(jnp.asarray(TABLE)[LAST[:, None]])))
    for row, last in enumerate(LAST.tolist()):

        def log_prob(path, token, last=last):
            return table[path[-1] if path else last, token]

        beam, every = {(): 0.0}, {}
        for _ in range(4):
            found = {}
            for path, score in beam.items():
                after = table[path[-1] if path else last]
                found |= {(*path, int(t)): score + after[t] for t in np.argsort(-after)[:3]}
            every |= found
            beam = dict(sorted(found.items(), key=lambda item: -item[1])[:3])
        best = dict(sorted(every.items(), key=lambda item: -item[1])[:12])
        mine = scored(jax.tree.map(lambda x: x[row], tree), log_prob)  # noqa: B023
        assert set(mine) == set(best)
    with pytest.raises(ValueError, match=r"num_nodes must be an integer in \[1, 4\], where so many are grown, got 5"):
        growing.expand(LAST, Categorical(jnp.zeros((2, 1, 4))), advance, None, num_nodes=5, width=3, max_depth=1)


@pytest.mark.slow
def test_the_best_first_tree_of_marginals():
    """The tree of a heap: the best of all nodes whose parents are there."""
    logits = 2 * np.random.default_rng(7).normal(size=(2, 4, 30)).astype(np.float32)
    marginals = np.asarray(jax.nn.log_softmax(logits))
    grow = jax.jit(lambda logits: growing.best_first(LAST, growing.top(Categorical(logits), 16), 17))
    tree = jax.device_get(grow(logits))
    for row in range(2):
        heap, best = [(-marginals[row, 0, t], (t,)) for t in range(30)], []
        heapq.heapify(heap)
        while len(best) < 16:
            score, path = heapq.heappop(heap)
            best.append(path)
            if len(path) < 4:
                for token in range(30):
                    heapq.heappush(heap, (score - marginals[row, len(path), token], (*path, token)))
        mine = scored(jax.tree.map(lambda x: x[row], tree), lambda path, token: marginals[row, len(path), token])  # noqa: B023
        assert set(mine) == set(best)
        assert trees.depths(jnp.asarray(tree.parents)).tolist() == tree.depth.tolist()
    grow = jax.jit(lambda logits: growing.best_first(LAST, growing.top(Categorical(logits), 3), 7))
    few = grow(jnp.zeros((2, 1, 3)))
    assert few.tokens.tolist() == [[4, 0, 1, 2, -1, -1, -1], [7, 0, 1, 2, -1, -1, -1]]
    with pytest.raises(ValueError, match="num_nodes must be an integer >= 1, got 0"):
        growing.best_first(LAST, growing.top(Categorical(jnp.zeros((2, 1, 3))), 3), 0)
