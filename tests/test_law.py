"""The exact distribution of one step of every verifier, on cases beside the cases of `testing.assert_lossless`."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from wrong_verifiers import WRONG

from specjax import distributions, testing, verifiers

V = 3
LOSSLESS = [v for v in verifiers.__all__ if v not in verifiers.LOSSY]


def log_tables(tables):
    with np.errstate(divide="ignore"):
        return [np.log(t) for t in tables]


def random_tables(seed: int, levels: int, zeros: bool = False) -> list[np.ndarray]:
    """Random conditional logits of V tokens; with `zeros`, some tokens are impossible."""
    rng = np.random.default_rng(seed)
    result = [2 * rng.normal(size=(V,) * (level + 1)) for level in range(levels)]
    for table in result if zeros else ():
        hidden = rng.random(table.shape) < 0.4
        hidden[..., 0] &= ~hidden.all(axis=-1)
        table[hidden] = -np.inf
    return result


def error(verifier, target, draft, temperature=None, **options) -> float:
    """Total variation between the output of the verifier and the target."""
    distribution = testing.enumerate_law(verifier, target, draft, target_temperature=temperature, **options)
    exact = testing.product_law([testing.probabilities(t, temperature) for t in target])
    assert abs(distribution.sum() - 1) < 1e-5
    return testing.total_variation(distribution, exact)


def expected_accepted(verifier, target, draft) -> float:
    """Mean number of accepted drafts."""
    num_draft_tokens = len(draft)
    paths = list(np.ndindex(*(V,) * num_draft_tokens))
    rows = [np.stack([t[p[:i]] for i, t in enumerate(tables)]) for tables in (target, draft) for p in paths]
    target_rows = jnp.asarray(np.stack(rows[: len(paths)]), jnp.float32)
    draft_rows = jnp.asarray(np.stack(rows[len(paths) :]), jnp.float32)
    drafted = verifiers.core.Draft(jnp.array(paths, jnp.int32), distributions.Categorical(draft_rows))
    verified, weight = testing.enumerate_outcomes(verifier, drafted, target_rows)
    path_weight = np.array([np.prod([np.exp(t[p[: i + 1]]) for i, t in enumerate(draft)]) for p in paths])
    return float((path_weight[:, None] * weight * np.asarray(verified.num_accepted).reshape(weight.shape)).sum())


@pytest.mark.parametrize("num_draft_tokens, zeros", [(2, False), (4, True)])
@pytest.mark.parametrize("name", LOSSLESS)
def test_sampled_drafts(name, num_draft_tokens, zeros):
    """`testing.assert_lossless` has K = 0, 1 and 3."""
    target = random_tables(1, num_draft_tokens + 1, zeros)
    draft = random_tables(2, num_draft_tokens, zeros)
    assert error(getattr(verifiers, name), target, draft) < 1e-6


@pytest.mark.parametrize("name", LOSSLESS)
def test_float64(name, x64):
    assert error(getattr(verifiers, name), random_tables(1, 4), random_tables(2, 3), dtype=jnp.float64) < 1e-12


@pytest.mark.parametrize("name, drafts", [("rejection", [2, 2, 2]), ("block", [1, -1, 0]), ("match", [-1, 0, 0])])
def test_deterministic_drafts(name, drafts):
    """An id of -1 ends a row also where ids follow."""
    assert error(getattr(verifiers, name), random_tables(5, 4, zeros=True), drafts) < 1e-6


@pytest.mark.parametrize("temperature, draft_temperature", [(0.0, 0.7), (1.7, 0.0)])
@pytest.mark.parametrize("name", LOSSLESS)
def test_temperatures(name, temperature, draft_temperature):
    target, draft = random_tables(6, 4), random_tables(7, 3)
    assert error(getattr(verifiers, name), target, draft, temperature, draft_temperature=draft_temperature) < 1e-6


@pytest.mark.parametrize("name", LOSSLESS)
def test_one_hot_drafts_of_a_sampled_batch(name):
    """A row of draft temperature 0 is one-hot at its token; its logits are garbage."""
    target = random_tables(8, 4)
    others = jnp.full((1, 3, V), jnp.nan), jnp.arange(3.0 * V).reshape(1, 3, V)  # a NaN counts as -inf
    for drafts, garbage in product([(0, 1, 2), (1, 1, 0)], others):
        rows = jnp.asarray(np.stack([t[drafts[:i]] for i, t in enumerate(target)]), jnp.float32)[None]
        garbage = distributions.Categorical(garbage, jnp.zeros(1))
        draft = verifiers.core.Draft(jnp.array([drafts], jnp.int32), garbage)
        verified, weight = testing.enumerate_outcomes(getattr(verifiers, name), draft, rows)
        distribution = testing.completed_law(verified.tokens, weight[0], [testing.probabilities(t) for t in target])
        exact = testing.product_law([testing.probabilities(t) for t in target])
        assert testing.total_variation(distribution, exact) < 1e-6


def test_a_draft_longer_than_the_support():
    """All-zero draft mass on the drafted token rejects it, and the residual is then the target."""
    target, draft = random_tables(9, 3), random_tables(10, 2)
    for name in ("rejection", "block"):
        rows = jnp.asarray(np.stack([t[(0, 0)[:i]] for i, t in enumerate(target)]), jnp.float32)[None]
        draft_rows = jnp.asarray(np.stack([t[(0, 0)[:i]] for i, t in enumerate(draft)]), jnp.float32)[None]
        drafted = verifiers.core.Draft(
            jnp.zeros((1, 2), jnp.int32), distributions.Categorical(draft_rows.at[0, 0, 0].set(-jnp.inf))
        )
        verified, weight = testing.enumerate_outcomes(getattr(verifiers, name), drafted, rows)
        assert weight[0] @ np.asarray(verified.num_accepted) == 0


def test_block_instance():
    target, draft = testing.BLOCK_INSTANCE
    assert error(verifiers.block, target, draft) < 1e-6
    assert expected_accepted(verifiers.rejection, target, draft) == pytest.approx(1.15, abs=1e-6)
    assert expected_accepted(verifiers.block, target, draft) == pytest.approx(1.2, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [
        ("rejection", [2 / 3, 10 / 9, 38 / 27, 130 / 81]),
        ("block", [2 / 3, 11 / 9, 5 / 3, 166 / 81]),
        ("match", [4 / 9, 52 / 81]),
    ],
)
def test_context_free_acceptance_lengths(name, expected, monkeypatch):
    monkeypatch.setitem(globals(), "V", 2)
    for k, value in enumerate(expected, start=1):
        target = log_tables([np.broadcast_to([1 / 3, 2 / 3], (2,) * (i + 1)) for i in range(k + 1)])
        draft = log_tables([np.broadcast_to([2 / 3, 1 / 3], (2,) * (i + 1)) for i in range(k)])
        assert expected_accepted(getattr(verifiers, name), target, draft) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    "broken, tv",
    [("block_with_the_first_failure", 0.1071), ("block_with_the_token_residual", 1 / 60)],
)
def test_broken_block_fails(broken, tv):
    assert error(WRONG[broken][0], *testing.BLOCK_INSTANCE) == pytest.approx(tv, abs=1e-4)


def test_resampling_from_the_target_fails():
    target = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    levels = log_tables([target, np.broadcast_to(target, (8, 8))])
    broken, draft = WRONG["resamples_from_the_target"][0], log_tables([target[::-1]])
    assert error(broken, levels, draft) == pytest.approx(0.175, abs=1e-4)


@pytest.mark.parametrize("empty", [-np.inf, np.nan])
@pytest.mark.parametrize("name", ["block", "rejection"])
def test_a_row_without_mass(name, empty):
    """Block verification looks ahead; a target row without mass, as after a stop token, ends its view."""
    target, draft = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    distribution, rows = np.zeros(2), jnp.asarray(np.stack([target, np.full(2, empty), target])[None], jnp.float32)
    for path in np.ndindex(2, 2):
        drawn_from = distributions.Categorical(jnp.asarray(np.stack([draft, draft])[None], jnp.float32))
        drafted = verifiers.core.Draft(jnp.array([path], jnp.int32), drawn_from)
        verified, weight = testing.enumerate_outcomes(getattr(verifiers, name), drafted, rows)
        by_token = np.exp(draft[list(path)].sum()) * np.nan_to_num(weight[0])
        # A draw from the empty row has no distribution; what came before it has one.
        first = np.asarray(verified.tokens)[:, 0]
        accepted = np.asarray(verified.num_accepted)
        np.add.at(
            distribution, path[0], np.exp(draft[list(path)].sum()) * min(1, np.exp(target[path[0]] - draft[path[0]]))
        )
        np.add.at(distribution, first[accepted == 0], by_token[accepted == 0])
        assert by_token[accepted > 1].sum() == 0
    np.testing.assert_allclose(distribution, [0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["block", "rejection"])
def test_a_draft_row_without_mass(name, known):
    """A token that its own row calls impossible is rejected, and takes no part in what becomes of the one before it."""
    target, draft = np.log([0.7, 0.2, 0.1]), np.log([0.2, 0.3, 0.5])
    logits = jnp.asarray(np.stack([draft, np.full(V, -np.inf)])[None], jnp.float32)
    distribution = np.zeros(V)
    for path in np.ndindex(V, V):
        drawn_from = distributions.Categorical(logits, None, None, jnp.array([[0.0, -jnp.inf]]) if known else None)
        drafted = verifiers.core.Draft(jnp.array([path], jnp.int32), drawn_from)
        rows = jnp.asarray(np.stack([target] * 3)[None], jnp.float32)
        verified, weight = testing.enumerate_outcomes(getattr(verifiers, name), drafted, rows)
        np.add.at(distribution, np.asarray(verified.tokens)[:, 0], np.exp(draft[path[0]]) / V * weight[0])
        assert weight[0][np.asarray(verified.num_accepted) > 1].sum() == 0
    np.testing.assert_allclose(distribution, np.exp(target), atol=1e-6)


def with_nan(tables):
    """The tables with NaN in some entries, the largest of a row among them, but not in all of a row."""
    rng, result = np.random.default_rng(5), []
    for table in tables:
        hidden = rng.random(table.shape) < 0.5
        hidden[..., 0] &= ~hidden.all(axis=-1)
        result.append(np.where(hidden, np.nan, table))
    return result


@pytest.mark.parametrize("temperature", [None, 0.7, 0.0])
@pytest.mark.parametrize("name", LOSSLESS)
def test_nan_counts_as_minus_infinity(name, temperature):
    """In the target, in the draft and in both."""
    target, draft = random_tables(1, 3), random_tables(2, 2)
    for rows in ((with_nan(target), draft), (target, with_nan(draft)), (with_nan(target), with_nan(draft))):
        assert error(getattr(verifiers, name), *rows, temperature) < 1e-6


@pytest.mark.parametrize("name", verifiers.LOSSY)
def test_lossy_verifiers_are_lossy(name):
    options = {"acceptance_length": 2.0} if name == "synthetic" else {}
    assert error(getattr(verifiers, name), random_tables(1, 3), random_tables(2, 2), **options) > 0.01


def test_length_chosen_by_the_token_it_cuts_off_is_biased():
    """Cutting a row where token 1 was drafted conditions on it; masks must leave a forbidden draft in place."""
    target, draft = np.log([[0.7, 0.3]]), np.log([[0.5, 0.5]])
    distribution = np.zeros(2)
    for token in range(2):
        drafted = verifiers.core.Draft(
            jnp.array([[token]], jnp.int32),
            distributions.Categorical(jnp.asarray(draft[None], jnp.float32)),
            jnp.array([1 - token], jnp.int32),
        )
        rows = jnp.asarray(np.stack([target[0], target[0]])[None], jnp.float32)
        verified, weight = testing.enumerate_outcomes(verifiers.rejection, drafted, rows)
        np.add.at(distribution, np.asarray(verified.tokens)[:, 0], 0.5 * weight[0])
    np.testing.assert_allclose(distribution, [0.85, 0.15], atol=1e-6)


def test_a_forbidden_draft_stays_in_place():
    target, draft = np.array([0.7, 0.3, 0.0]), np.array([0.2, 0.4, 0.4])
    levels = log_tables([target, np.broadcast_to(target, (3, 3))])
    assert error(verifiers.rejection, levels, log_tables([draft])) < 1e-6
    assert error(verifiers.block, levels, log_tables([draft])) < 1e-6
