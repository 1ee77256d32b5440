"""The verdict on verifiers of trees, which raises AssertionError and says where one fails and by how much."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax import keys as key_streams
from specjax.testing.enumeration import Table, enumerate_outcomes, probabilities, row_probabilities
from specjax.testing.statistics import assert_sampled_distribution
from specjax.testing.tree_law import DrawnTrees, completed_laws, draw_trees, rows_of_nodes
from specjax.testing.verdicts import assert_distribution, assert_independent, assert_log_probs, on_key_data
from specjax.trees import growing
from specjax.trees.arrays import depths
from specjax.types import Array, Categorical, DraftTree, Verified

VOCAB_SIZE, NUM_NODES, MAX_DEPTH, NUM_TOKENS = 3, 4, 3, 5


class _Case(NamedTuple):
    name: str
    trees: DrawnTrees
    target: list[Table]  # conditional logits, levels 0 to MAX_DEPTH
    draft: list[Table]
    temperature: float = 1.0
    draft_temperature: float = 1.0
    min_logit: float = -1e30
    num_nodes: int = NUM_NODES


def assert_tree_lossless(
    verifier: Callable[..., Verified], *, num_samples: int = 100_000, tolerance: float = 1e-6, **options: Any
) -> None:
    """Raise AssertionError unless the tokens that a verifier of trees emits follow the target's distribution.

    The check is exact for one step: it goes through all draws of the trees and all outcomes of the verifier. The trees
    have several shapes, one of which follows the tokens that are drawn, and their siblings are drawn without
    replacement. There are temperatures, greedy rows, deterministic siblings, cuts, impossible tokens, rows with fewer
    nodes, and garbage after them. The check covers also that a row does not depend on the rest of its batch, that the
    tokens are on the path, and that log-probabilities are the target's. Then five tokens that several steps emit with
    public keys are compared with the target by chi-square tests.

    Args:
        verifier: a verifier that `trees.from_core` made.
        num_samples: the number of sequences of the chi-square tests.
        tolerance: the largest total variation that passes the exact check.
        **options: the verifier's options.

    Raises:
        AssertionError: the verifier fails. The message names the case, the distance and the tokens at which the
            distributions differ most.

    Example:
        >>> from specjax import trees
        >>> assert_tree_lossless(trees.match, num_samples=5_000)
    """
    _assert_exact(verifier, list(_cases()), tolerance, options)
    assert_independent(on_key_data(verifier, options), _mixed_batch())
    rng = np.random.default_rng(3)
    target, draft = (jnp.asarray(rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)), jnp.float32) for _ in range(2))
    tokens = np.asarray(
        _decode(Partial(verifier, **options), target, draft, jax.random.split(jax.random.key(0), num_samples))
    )
    assert_sampled_distribution("several steps", tokens, probabilities(np.asarray(target)))


def _cases() -> Iterator[_Case]:
    rng = np.random.default_rng(0)

    def tables(hidden: float = 0.0) -> list[Table]:
        found = [1.5 * rng.normal(size=(VOCAB_SIZE,) * (level + 1)) for level in range(MAX_DEPTH + 1)]
        for table in found if hidden else ():
            is_hidden = rng.random(table.shape) < hidden
            is_hidden[..., 0] &= ~is_hidden.all(axis=-1)
            table[is_hidden] = -np.inf
        return found

    def case(name: str, parents: tuple[int, ...], target: list[Table], draft: list[Table], **fields: Any) -> _Case:
        cut, value = fields.get("min_logit"), fields.get("draft_temperature", 1.0)
        return _Case(name, draw_trees(parents, [probabilities(x, value, cut) for x in draft]), target, draft, **fields)

    target, draft, rare = tables(), tables(), tables(0.4)
    wide, deep, both = (-1, 0, 0, 0), (-1, 0, 1, 2), (-1, 0, 0, 1)
    yield case("two children, then one", both, target, draft)
    yield case("three children", wide, target, draft)
    yield case("a chain", deep, target, draft)
    yield case("a child of the second node", (-1, 0, 0, 2), target, draft)
    yield case("two children of the first draft", (-1, 0, 1, 1), target, draft)
    yield case("siblings that end early", wide, tables(0.3), rare)
    yield case("temperatures", both, target, draft, temperature=0.6, draft_temperature=1.4)
    yield case("greedy row", both, target, draft, temperature=0.0)
    lifted = [np.where(np.arange(VOCAB_SIZE) == 0, np.maximum(x, 0.5), x) for x in (*target, *draft)]
    yield case("cut", both, lifted[: len(target)], lifted[len(target) :], min_logit=0.0)
    yield case("two nodes of four", both, target, draft, num_nodes=2)
    drawn = draw_trees(both, [probabilities(x) for x in draft])
    tokens = np.where((drawn.tokens[:, 1:2] == 0) & (np.arange(NUM_NODES) == 3), -1, drawn.tokens)
    yield _Case("a shape that follows its tokens", drawn._replace(tokens=tokens), target, draft)
    garbage = [np.full_like(x, np.nan) for x in draft]
    fixed = DrawnTrees(np.array([[0, 2, 1, 0]], np.int32), np.array([both], np.int32), np.ones(1))
    yield _Case("deterministic siblings", fixed, target, garbage, draft_temperature=0.0)
    yield _Case("greedy row, deterministic siblings", fixed, target, garbage, temperature=0.0, draft_temperature=0.0)


def _stack(cases: list[_Case]) -> tuple[DraftTree, Categorical]:
    """Return the rows of all cases, one case after another."""

    def column(field: str) -> Array:
        return jnp.concatenate([jnp.full(len(c.trees.weight), getattr(c, field)) for c in cases])

    def rows(tables: list[list[Table]], temperature: str) -> Categorical:
        logits = np.concatenate([rows_of_nodes(t, c.trees, np.nan) for t, c in zip(tables, cases, strict=True)])
        cut = jnp.broadcast_to(column("min_logit")[:, None], logits.shape[:2])
        return Categorical(jnp.asarray(logits, jnp.float32), column(temperature).astype(jnp.float32), cut)

    merged = DrawnTrees(*(np.concatenate(field) for field in zip(*(c.trees for c in cases), strict=True)))
    nodes = [jnp.asarray(x) for x in (merged.tokens, merged.parents, merged.depth)]
    drafted = rows([c.draft for c in cases], "draft_temperature")
    tree = DraftTree(nodes[0], nodes[1], nodes[2], column("num_nodes").astype(jnp.int32), drafted)
    return tree, rows([c.target for c in cases], "temperature")


def _assert_exact(verifier: Callable[..., Verified], cases: list[_Case], tolerance: float, options: dict) -> None:
    """Raise AssertionError unless the verifier gives every case the expected distribution."""
    tree, target = _stack(cases)
    given: dict[str, Any] = {"max_depth": MAX_DEPTH, "log_probs": True} | options
    verified, weight = enumerate_outcomes(verifier, tree, target, **given)
    probs = row_probabilities(target)
    start = 0
    for case in cases:
        rows = slice(start, start + len(case.trees.weight))
        start = rows.stop
        outputs = slice(rows.start * weight.shape[1], rows.stop * weight.shape[1])
        own = jax.tree.map(lambda x: np.asarray(x)[outputs], verified)  # noqa: B023
        mass = (case.trees.weight[:, None] * weight[rows]).reshape(-1)
        repeated = jax.tree.map(lambda x: np.repeat(np.asarray(x)[rows], weight.shape[1], axis=0), tree[:3])  # noqa: B023
        _assert_form(case, own, DraftTree(*repeated), mass)
        expected = [probabilities(x, case.temperature, case.min_logit) for x in case.target]
        law = completed_laws(own.tokens, mass, np.zeros(len(mass), int), 1, expected)
        assert_distribution(case.name, law.reshape((VOCAB_SIZE,) * (MAX_DEPTH + 1)), expected, tolerance)
        if own.log_probs is None:
            raise AssertionError(f"{case.name!r}: log_probs=True must fill Verified.log_probs, got None")
        chances = np.repeat(probs[rows], weight.shape[1], axis=0)
        on_path = np.take_along_axis(chances, own.path[..., None], axis=1)
        assert_log_probs(case.name, own.tokens, own.log_probs, on_path, mass)


def _assert_form(case: _Case, verified: Verified, tree: DraftTree, mass: np.ndarray) -> None:
    """Raise AssertionError unless every possible output holds the tokens of a path from node 0, one more, then -1."""
    tokens, count, path = (np.asarray(x) for x in (verified.tokens, verified.num_accepted, verified.path))
    index = np.arange(MAX_DEPTH + 1)
    is_kept = index < count[:, None]
    of_path = np.take_along_axis(np.asarray(tree.tokens), path, axis=1)
    above = np.take_along_axis(np.asarray(tree.parents), path, axis=1)
    is_right = (
        np.all((tokens >= 0) == (index <= count[:, None]), axis=1)
        & np.all(tokens < VOCAB_SIZE, axis=1)
        & (path[:, 0] == 0)
        & np.all(~is_kept[:, :-1] | (of_path[:, 1:] == tokens[:, :-1]), axis=1)
        & np.all(~is_kept[:, :-1] | (above[:, 1:] == path[:, :-1]), axis=1)
        & np.all(path < case.num_nodes, axis=1)
    )
    wrong = np.flatnonzero(~is_right & (mass > 0))
    if wrong.size:
        row = wrong[0]
        raise AssertionError(
            f"{case.name!r}: tokens must be the tokens of a path from node 0, one more in [0, V = {VOCAB_SIZE}), then "
            f"-1; got {tokens[row].tolist()} with path {path[row].tolist()} and num_accepted {count[row]} for nodes "
            f"{np.asarray(tree.tokens)[row].tolist()} with parents {np.asarray(tree.parents)[row].tolist()}"
        )


def _mixed_batch() -> tuple[np.ndarray, DraftTree, Categorical]:
    """Return key words [B, D+1, 2] and trees that are greedy, sampled, small, or without mass in the target."""
    rng = np.random.default_rng(0)
    batch_size, num_nodes, vocab_size = 10, 6, 11
    parents = np.array([[-1, *(rng.integers(0, n) for n in range(1, num_nodes))] for _ in range(batch_size)], np.int32)
    tokens = np.array([rng.permutation(vocab_size)[:num_nodes] for _ in range(batch_size)], np.int32)
    logits, scores = (rng.normal(size=(batch_size, num_nodes, vocab_size)).astype(np.float32) for _ in range(2))
    scores[7], scores[8] = -np.inf, np.nan
    temperature = np.linspace(0.5, 2.0, batch_size, dtype=np.float32)
    temperature[3::4] = 0
    keys = rng.integers(1 << 32, size=(batch_size, num_nodes, 2), dtype=np.uint32)
    tree = DraftTree(
        jnp.asarray(tokens),
        jnp.asarray(parents),
        depths(jnp.asarray(parents)),
        jnp.arange(batch_size, dtype=jnp.int32) % num_nodes + 1,
        Categorical(jnp.asarray(logits), jnp.asarray(temperature[::-1])),
    )
    return jax.device_get((keys, tree, Categorical(jnp.asarray(scores), jnp.asarray(temperature))))


@jax.jit
def _decode(verifier: Callable[..., Verified], target: Array, draft: Array, request_keys: Array) -> Array:
    """Return the tokens [B, NUM_TOKENS] that steps with drawn trees emit after token 0, given bigram tables [V, V]."""
    batch_size = request_keys.shape[0]
    shape = growing.of_widths((2, 1))
    row, place = jnp.arange(batch_size)[:, None], jnp.arange(shape.max_depth + 1, dtype=jnp.int32)[None]

    def advance(tokens: Array, nodes: tuple[int, ...], carry: Any) -> tuple[Categorical, Any]:
        return Categorical(draft[tokens]), carry

    def step(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tokens, length = carry
        keys = key_streams.positions(request_keys, length, shape.max_depth)
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        tree, _ = growing.grow(shape, keys, last[:, 0], Categorical(draft[last]), advance, None, growing.by_drawing)
        verified = verifier(keys, tree, Categorical(target[jnp.maximum(tree.tokens, 0)]))
        where = jnp.where(verified.tokens >= 0, length[:, None] + place, tokens.shape[1])
        return tokens.at[row, where].set(verified.tokens, mode="drop"), jnp.minimum(
            length + verified.num_accepted + 1, tokens.shape[1]
        )

    tokens, length = jnp.zeros((batch_size, NUM_TOKENS + 1), jnp.int32), jnp.ones(batch_size, jnp.int32)
    return jax.lax.fori_loop(0, NUM_TOKENS, step, (tokens, length))[0][:, 1:]
