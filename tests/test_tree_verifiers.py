"""Verifiers of trees: the exact distribution of their output on all small trees, and their equality with chains."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wrong_trees import WRONG_CORES, rejection_from_the_root

from specjax import Categorical, Draft, DraftTree, distributions, testing, trees, verifiers
from specjax.testing.tree_law import DrawnTrees, draw_trees, tree_laws

V = 3
SHAPES = [(-1, *rest) for rest in product(*[range(node) for node in range(1, 5)])]  # every tree of 5 nodes


def tables(seed, levels=5, scale=1.5, hidden=0.15):
    """Conditional logits of V tokens, some of which are impossible, by level."""
    rng = np.random.default_rng(seed)
    result = [scale * rng.normal(size=(V,) * (level + 1)) for level in range(levels)]
    for table in result:
        is_hidden = rng.random(table.shape) < hidden
        is_hidden[..., 0] &= ~is_hidden.all(axis=-1)
        table[is_hidden] = -np.inf
    return result


TARGET, DRAFT = tables(1), tables(2)
PROBS = [testing.probabilities(table) for table in DRAFT]


def distances(laws, target=TARGET):
    """The total variation of each of some distributions from the target's."""
    exact = testing.product_law([testing.probabilities(table) for table in target]).reshape(-1)
    return 0.5 * np.abs(laws - exact).sum(axis=-1)


def dropped(drawn, *masks):
    """The trees without some nodes, by pairs of a node and the trees [R] bool that lack it."""
    tokens = drawn.tokens.copy()
    for node, mask in masks:
        tokens[mask, node] = -1
    return drawn._replace(tokens=tokens)


def growths():
    """Ways to grow trees, those that `traversal` takes and those that it does not take."""
    drawn = draw_trees((-1, 0, 0, 1, 2), PROBS)
    everywhere, tokens = np.ones(len(drawn.weight), bool), drawn.tokens
    chance = np.where(tokens < 0, -1, PROBS[0][tokens])
    is_first = chance[:, 1] > chance[:, 2]  # whether the first child of node 0 is the likelier one
    two = dropped(drawn, (3, everywhere), (4, everywhere))
    likeliest = np.argsort(-PROBS[0])
    top = DrawnTrees(np.array([[0, *likeliest[:2], -1, -1]], np.int32), drawn.parents[:1], np.ones(1))
    repeats = [(0, *pair, -1, -1) for pair in product(range(V), repeat=2)]
    chances = np.array([PROBS[0][first] * PROBS[0][second] for _, first, second, *_ in repeats])
    right = {
        "two children": two,
        "only the likelier child has a child": dropped(drawn, (3, ~is_first), (4, is_first)),
        "a child by its cousin": dropped(drawn, (4, tokens[:, 3] != 0)),
        "children by their number": dropped(drawn, (4, tokens[:, 1] == 1), (2, tokens[:, 1] == 0)),
    }
    right["children by their number"] = dropped(right["children by their number"], (4, tokens[:, 1] == 0))
    wrong = {
        "siblings by probability": two._replace(
            tokens=np.where(~is_first[:, None], tokens[:, [0, 2, 1, 3, 4]], tokens) * (np.arange(5) < 3)
            - (np.arange(5) > 2)
        ),
        "only the likelier child": dropped(two, (1, ~is_first), (2, is_first)),
        "the less likely child after its brother has grown": dropped(
            drawn, (3, ~is_first), (4, is_first), (1, ~is_first), (2, is_first)
        ),
        "a child by itself": dropped(drawn, (4, tokens[:, 4] == 0)),
        "likeliest tokens": top,
        "drawn at half the reported temperature": draw_trees(
            (-1, 0, 0, 1, 2), [table**2 / (table**2).sum(axis=-1, keepdims=True) for table in PROBS]
        ),
        "equal siblings": DrawnTrees(
            np.array(repeats, np.int32), np.repeat(drawn.parents[:1], len(repeats), 0), chances
        ),
    }
    return right, wrong


RIGHT, WRONG = growths()


@pytest.fixture(scope="module")
def traversed():
    """The distances and the mean numbers of accepted drafts of `trees.traversal` on every shape and growth."""
    shapes = [draw_trees(shape, PROBS) for shape in SHAPES]
    laws, accepted = tree_laws(trees.traversal, TARGET, DRAFT, [*shapes, *RIGHT.values(), *WRONG.values()])
    return distances(laws), accepted


def test_traversal_is_exact_on_every_shape(traversed):
    """Siblings are drawn without replacement; where the support ends before the siblings, -1 follows."""
    assert traversed[0][: len(SHAPES)].max() < 1e-6


def test_traversal_is_exact_where_drawn_nodes_stay(traversed):
    """A shape may depend on the tokens that were drawn before, but a drawn node stays."""
    found = dict(zip([*RIGHT, *WRONG], traversed[0][len(SHAPES) :], strict=True))
    assert max(found[name] for name in RIGHT) < 1e-6, found
    assert min(found[name] for name in WRONG) > 2e-3, found


def test_traversal_accepts_no_less_than_rejection_from_the_root(traversed):
    shapes = [SHAPES.index(shape) for shape in ((-1, 0, 0, 1, 1), (-1, 0, 0, 0, 1), (-1, 0, 1, 2, 3), (-1, 0, 0, 1, 3))]
    cases = [draw_trees(SHAPES[index], PROBS) for index in shapes]
    laws, accepted = tree_laws(rejection_from_the_root, TARGET, DRAFT, cases)
    assert distances(laws).max() < 1e-6
    gain = traversed[1][shapes] - accepted
    assert gain.min() > -1e-6 and gain.max() > 0.02


def unordered():
    """One of the shapes of 5 nodes for each tree without an order of siblings."""

    def form(shape, node):
        return tuple(sorted(form(shape, child) for child in range(1, 5) if shape[child] == node))

    return list({form(shape, 0): shape for shape in SHAPES}.values())


def test_match_is_exact_on_every_tree():
    """All trees of at most 5 nodes, however grown, and equal siblings. Their order has no meaning; -1 is no node."""
    shapes = unordered()
    assert len(shapes) == 9
    cases = [
        DrawnTrees(np.array([(0, *tokens)], np.int32), np.array([shape], np.int32), np.ones(1))
        for shape in shapes
        for tokens in product(range(-1, V), repeat=4)
    ]
    laws, _ = tree_laws(trees.match, TARGET, DRAFT, [*cases, *RIGHT.values(), *WRONG.values()])
    assert distances(laws).max() < 1e-6


def random_batch(rng, batch_size, num_nodes, vocab_size):
    """Trees over a bigram target, with greedy rows, and keys by position."""
    parents = np.stack([[-1, *(rng.integers(0, n) for n in range(1, num_nodes))] for _ in range(batch_size)])
    tokens = rng.integers(-1, vocab_size, size=parents.shape)
    tokens[:, 0] = 0
    for node in range(2, num_nodes):
        earlier = (parents[:, :node] == parents[:, node : node + 1]) & (tokens[:, :node] == tokens[:, node : node + 1])
        tokens[:, node] = np.where(earlier.any(axis=1), -1, tokens[:, node])
    temperature = np.where(np.arange(batch_size) % 4 == 0, 0, 0.8).astype(np.float32)
    depth = np.asarray(trees.depths(jnp.asarray(parents)))
    return DraftTree(*(jnp.asarray(x, jnp.int32) for x in (tokens, parents, depth))), jnp.asarray(temperature)


def test_match_emits_the_tokens_of_the_plain_sampler():
    """Whatever the tree is; and a further node never shortens the path, where siblings differ."""
    rng = np.random.default_rng(0)
    batch_size, num_nodes, vocab_size = 400, 9, 5
    tree, temperature = random_batch(rng, batch_size, num_nodes, vocab_size)
    table = jnp.asarray(rng.normal(size=(vocab_size, vocab_size)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), (batch_size, num_nodes))

    @jax.jit
    def run(keys, tree, temperature):
        def verify(count):
            target = Categorical(table[jnp.maximum(tree.tokens, 0)], temperature)
            return trees.match(keys, tree._replace(num_nodes=jnp.full(batch_size, count)), target, log_probs=True)

        token, plain, streams = jnp.zeros((batch_size, 1), jnp.int32), [], verifiers.core.KeyDraw(keys)
        for place in range(num_nodes):
            one = verifiers.core.KeyDraw(streams.keys[:, place : place + 1])
            token = one.sample(Categorical(table[token], temperature))
            plain.append(token)
        return jax.lax.map(verify, jnp.arange(1, num_nodes + 1)), jnp.concatenate(plain, axis=1)

    verified, plain = jax.device_get(run(keys, tree, temperature))
    assert np.all((verified.tokens == plain) | (verified.tokens < 0))
    assert np.all(np.diff(verified.num_accepted, axis=0) >= 0) and verified.num_accepted.max() > 2
    last = jax.tree.map(lambda field: field[-1], verified._replace(is_accepted=None))
    np.testing.assert_array_equal(np.sum(last.tokens >= 0, axis=1), last.num_accepted + 1)
    on_path = np.take_along_axis(np.asarray(tree.tokens), last.path, axis=1)
    for row, count in enumerate(last.num_accepted):
        assert on_path[row, 1 : count + 1].tolist() == last.tokens[row, :count].tolist()
        assert np.all(np.diff(last.path[row, : count + 1]) > 0) and not last.path[row, count + 1 :].any()


def chains(seed=0, batch_size=256, num_drafts=4, vocab_size=6):
    """Chains of every kind: sampled, deterministic and short rows, greedy targets, rows without mass."""
    rng = np.random.default_rng(seed)
    draft_logits = rng.normal(size=(batch_size, num_drafts, vocab_size)).astype(np.float32)
    logits = rng.normal(size=(batch_size, num_drafts + 1, vocab_size)).astype(np.float32)
    logits[5, 2] = -np.inf
    tokens = np.argmax(draft_logits + rng.gumbel(size=draft_logits.shape), axis=-1).astype(np.int32)
    tokens[3, 2] = -1
    count = rng.integers(0, num_drafts + 1, size=batch_size).astype(np.int32)
    temperature = np.where(np.arange(batch_size) % 5 == 0, 0, 0.9).astype(np.float32)
    reported = Categorical(
        jnp.asarray(draft_logits), jnp.asarray(np.where(np.arange(batch_size) % 7 == 0, 0, 1.0), jnp.float32)
    )
    draft = Draft(jnp.asarray(tokens), reported, jnp.asarray(np.maximum(count, 3 * (count == 1))))
    return draft, Categorical(jnp.asarray(logits), jnp.asarray(temperature))


@pytest.mark.parametrize(
    "of_trees, of_chains",
    [
        pytest.param("match", "match", marks=pytest.mark.slow),
        ("traversal", "block"),
        pytest.param("typical", "typical", marks=pytest.mark.slow),
    ],
)
def test_a_chain_has_the_output_of_the_verifier_of_chains(of_trees, of_chains):
    """The same coins and samples, so the same tokens. The masses of traversal are sums in another order."""
    draft, target = chains()
    batch_size, num_drafts = draft.tokens.shape
    keys = jax.random.split(jax.random.key(2), (batch_size, num_drafts + 1))

    @jax.jit
    def run(keys, draft, target):
        tree = trees.of_chain(draft, jnp.zeros(batch_size, jnp.int32))
        first = getattr(trees, of_trees)(keys, tree, target, log_probs=True)
        return first, getattr(verifiers, of_chains)(keys, draft, target, log_probs=True)

    tree, chain = jax.device_get(run(keys, draft, target))
    np.testing.assert_array_equal(tree.tokens, chain.tokens)
    np.testing.assert_array_equal(tree.num_accepted, chain.num_accepted)
    np.testing.assert_array_equal(tree.is_empty, chain.is_empty)
    np.testing.assert_allclose(tree.log_probs, chain.log_probs, atol=1e-6)
    index = np.arange(num_drafts + 1)[None]
    np.testing.assert_array_equal(tree.path, np.where(index <= tree.num_accepted[:, None], index, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_CORES)
def test_a_wrong_core_is_found(name):
    cases = [draw_trees((-1, 0, 0), PROBS)]
    laws, _ = tree_laws(WRONG_CORES[name], TARGET[:2], DRAFT[:2], cases)
    assert distances(laws, TARGET[:2]).max() > 1e-3


@pytest.mark.parametrize("verifier", ["traversal", pytest.param("match", marks=pytest.mark.slow)])
def test_the_kernels_give_the_tokens_of_xla(verifier):
    """Greedy rows, deterministic drafts, cuts, NaN, ids past the vocabulary, and nodes that are none."""
    rng = np.random.default_rng(3)
    batch_size, num_nodes, vocab_size = 24, 9, 700
    tree, temperature = random_batch(rng, batch_size, num_nodes, 4)
    likely = np.arange(vocab_size) < 4
    table = (rng.normal(size=(7, vocab_size)) + 7 * likely).astype(np.float32)
    target = (table + rng.normal(size=table.shape)).astype(np.float32)
    tokens = np.maximum(tree.tokens, 0)
    logits, min_logit = target[tokens], np.where(np.arange(batch_size) % 3 == 0, 0.5, -9.0)
    logits[5, 0, 3:9], logits[6, 1] = np.nan, -np.inf
    target = Categorical(logits, temperature, np.broadcast_to(min_logit[:, None], tokens.shape).astype(np.float32))
    draft_temperature = np.where(np.arange(batch_size) % 5 == 0, 0, 1).astype(np.float32)
    tree = tree._replace(
        tokens=tree.tokens.at[7, 2].set(vocab_size), distribution=Categorical(table[tokens], draft_temperature)
    )
    keys = jax.random.split(jax.random.key(4), batch_size)
    kernel, xla = (
        jax.jit(partial(getattr(trees, verifier), implementation=name))(keys, tree, target)
        for name in ("pallas" if jax.default_backend() == "gpu" else "interpret", "xla")
    )
    for found, expected in zip(jax.tree.leaves(kernel), jax.tree.leaves(xla), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert len(set(xla.num_accepted.tolist())) >= 3, xla.num_accepted


def test_typical_takes_the_longest_path_that_passes():
    """Node 4 is reached by way of node 2; nodes 1 and 2 are as likely, and node 3 is not likely enough."""
    tree = DraftTree(jnp.array([[0, 1, 2, 0, 1]]), jnp.array([[-1, 0, 0, 1, 2]]), jnp.array([[0, 1, 1, 2, 2]]))
    rows = jnp.log(jnp.array([[[0.1, 0.45, 0.45], [0.04, 0.9, 0.06], [0.1, 0.8, 0.1], [1, 0, 0], [0, 0, 1]]]))
    verify = jax.jit(partial(trees.typical, max_depth=2))
    verified = verify(jax.random.key(0), tree._replace(num_nodes=jnp.array([5])), rows)
    assert verified.tokens.tolist() == [[2, 1, 2]] and verified.path.tolist() == [[0, 2, 4]]
    short = tree._replace(num_nodes=jnp.array([4]))
    verified = verify(jax.random.key(0), short, rows)
    assert verified.tokens.tolist() == [[1, 1, -1]] and verified.path.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": np.zeros((2, 3), np.float32)}, r"tree.tokens must be of integer dtype, got float32"),
        ({"parents": np.zeros((2, 4), np.int32)}, r"tree.parents must have shape \[B, N\] = \(2, 3\), got \(2, 4\)"),
        ({"depth": np.zeros(3, np.int32)}, r"tree.depth must have shape \[B, N\] = \(2, 3\), got \(3,\)"),
        ({"num_nodes": np.ones(3, np.int32)}, r"tree.num_nodes must have shape \[B\] = \(2,\), got \(3,\)"),
        ({"distribution": None}, r"tree.distribution must be the Categorical that .* got None: trees.match"),
        ({"distribution": Categorical(np.zeros((2, 2, V)))}, r"tree.distribution must have shape \[B, N, V\]"),
    ],
)
def test_a_wrong_shape_is_named(change, message):
    nodes = jnp.array([[0, 1, 2]] * 2), jnp.array([[-1, 0, 0]] * 2), jnp.array([[0, 1, 1]] * 2)
    tree = DraftTree(*nodes, distribution=Categorical(jnp.zeros((2, 3, V))))
    with pytest.raises(ValueError, match=message):
        trees.traversal(jax.random.key(0), tree._replace(**change), jnp.zeros((2, 3, V)))
    with pytest.raises(ValueError, match=r"tree must be a specjax.DraftTree, got Draft"):
        trees.match(jax.random.key(0), Draft(nodes[0]), jnp.zeros((2, 3, V)))
    with pytest.raises(ValueError, match=r"keys must have shape .* \[B, K\+1\] = \(2, 2\), got \(2, 3\)"):
        trees.match(jax.random.split(jax.random.key(0), (2, 3)), tree, jnp.zeros((2, 3, V)), max_depth=1)
    with pytest.raises(ValueError, match="max_depth must be None or an integer >= 0, got -1"):
        trees.match(jax.random.key(0), tree, jnp.zeros((2, 3, V)), max_depth=-1)
    assert distributions.shape_of(tree.distribution) == (2, 3, V)


@pytest.mark.slow
def test_the_verdict_passes_a_lossless_verifier():
    """The example in its docstring is `match`."""
    testing.assert_tree_lossless(trees.traversal, num_samples=20_000)


def test_the_verdict_finds_a_lossy_verifier():
    with pytest.raises(AssertionError, match="not lossless on 'two children, then one': total variation"):
        testing.assert_tree_lossless(trees.typical)
