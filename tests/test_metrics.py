"""Metrics against figures worked by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import prefill
from jax.tree_util import Partial

from specjax import (
    Categorical,
    Draft,
    Model,
    ModelOutput,
    SamplingParams,
    decode,
    metrics,
    proposers,
    sampling,
    verifiers,
)

# Two sequences, K = 3: (drafted, accepted, emitted, active) of each, step by step.
STEPS = [
    ([3, 3], [3, 1], [4, 2], [True, True]),
    ([2, 0], [1, 0], [2, 1], [True, True]),  # ragged; a row without drafts emits one token
    ([3, 3], [2, 0], [2, 0], [True, False]),  # the output of row 0 ends inside the step; row 1 has finished
]


def run(steps, num_draft_tokens, update=metrics.update):
    totals = metrics.zeros(len(steps[0][0]), num_draft_tokens)
    for step in steps:
        totals = update(totals, *map(jnp.array, step))
    return totals


@pytest.mark.parametrize("update", [metrics.update, jax.jit(metrics.update)], ids=["eager", "jit"])
def test_totals_of_a_run(update):
    totals = run(STEPS, 3, update)
    expected = metrics.Totals(
        drafted=[8, 3],
        accepted=[6, 1],
        emitted=[8, 3],
        row_steps=[3, 1],
        steps=[3, 2],
        drafted_at=[[3, 3, 2], [1, 1, 1]],
        accepted_at=[[3, 2, 1], [1, 0, 0]],
        tested=[0, 0],
        passed=[0, 0],
    )
    for field, found, value in zip(expected._fields, totals, expected, strict=True):
        np.testing.assert_array_equal(found, value, err_msg=field)
        assert found.dtype == jnp.int32, field


def test_figures_of_a_batch_and_of_one_sequence():
    totals = run(STEPS, 3)
    assert metrics.acceptance_rate(totals) == 7 / 11
    assert metrics.mean_acceptance_length(totals) == 1 + 7 / 4
    assert metrics.system_efficiency(totals) == (7 + 4) / (11 + 4)
    np.testing.assert_array_equal(metrics.acceptance_rate_per_position(totals), [4 / 4, 2 / 4, 1 / 3])

    row = jax.tree.map(lambda count: count[0], totals)
    assert metrics.acceptance_rate(row) == 6 / 8
    assert metrics.mean_acceptance_length(row) == 1 + 6 / 3
    assert metrics.system_efficiency(row) == (6 + 3) / (8 + 3)
    np.testing.assert_array_equal(metrics.acceptance_rate_per_position(row), [3 / 3, 2 / 3, 1 / 2])


def test_system_efficiency_where_every_row_has_all_drafts():
    totals = run([([4, 4], [4, 1], [5, 2], [True, True])], 4)
    assert metrics.system_efficiency(totals) == (5 + 2) / (8 / 4 * 5)


def test_inactive_rows_add_nothing():
    totals = run([([3, 2], [3, 1], [4, 2], [False, False])], 3)
    jax.tree.map(lambda found, zero: np.testing.assert_array_equal(found, zero), totals, metrics.zeros(2, 3))


@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_figures_are_nan_when_nothing_was_drafted(num_draft_tokens):
    totals = run([([0], [0], [1], [True])], num_draft_tokens)
    assert totals.emitted.tolist() == totals.steps.tolist() == [1]
    for figure in (metrics.acceptance_rate, metrics.mean_acceptance_length, metrics.system_efficiency):
        assert np.isnan(figure(totals)) and isinstance(figure(totals), float)
    per_position = metrics.acceptance_rate_per_position(totals)
    assert per_position.shape == (num_draft_tokens,) and np.isnan(per_position).all()
    assert np.isnan(metrics.noncausal_acceptance_rate(np.ones((1, num_draft_tokens), bool), np.array([0])))


def test_walk_through():
    # Drafts [16, 5, 129, 86, 939] with outcomes [T, T, T, F, T] emit [16, 5, 129, 2949].
    totals = run([([5], [3], [4], [True])], 5)
    assert metrics.acceptance_rate(totals) == 3 / 5
    assert metrics.mean_acceptance_length(totals) == 4
    assert metrics.system_efficiency(totals) == 4 / 6
    np.testing.assert_array_equal(metrics.acceptance_rate_per_position(totals), [1, 1, 1, 0, 0])
    assert metrics.noncausal_acceptance_rate(np.array([[True, True, True, False, True]]), np.array([5])) == 4 / 5


def test_causal_and_noncausal_acceptance():
    outcomes = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 0]], bool)
    causal = [[1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]]
    totals = run([([3] * 5, [1, 0, 2, 3, 0], [2, 1, 3, 4, 1], [True] * 5)], 3)
    np.testing.assert_array_equal(totals.accepted_at, causal)
    assert metrics.acceptance_rate(totals) == 6 / 15
    for given in (outcomes, outcomes.astype(int)):
        assert metrics.noncausal_acceptance_rate(given, np.full(5, 3)) == 8 / 15


def test_outcomes_are_counted_in_steps_that_tell_them():
    outcomes = jnp.array([[True, False, True], [True, True, True]])
    drafted, accepted, emitted = jnp.array([3, 1]), jnp.array([1, 1]), jnp.array([2, 2])
    totals = metrics.update(metrics.zeros(2, 3), drafted, accepted, emitted, jnp.array([True, True]), outcomes)
    totals = metrics.update(totals, drafted, accepted, emitted, jnp.array([True, False]), outcomes)
    totals = metrics.update(totals, drafted, accepted, emitted, jnp.array([True, True]))
    assert totals.tested.tolist() == [6, 1] and totals.passed.tolist() == [4, 1]
    assert metrics.noncausal_acceptance_rate(totals) == 5 / 7
    assert metrics.noncausal_acceptance_rate(jax.tree.map(lambda count: count[0], totals)) == 4 / 6
    assert np.isnan(metrics.noncausal_acceptance_rate(metrics.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"is_accepted must have shape \[B, K\] = \(2, 3\), got \(2, 2\)"):
        metrics.update(totals, drafted, accepted, emitted, jnp.array([True, True]), outcomes[:, :2])


def test_noncausal_acceptance_does_not_read_past_the_drafts_of_a_row():
    outcomes = jnp.ones((2, 2, 3), bool).at[0, 1, 0].set(False)
    assert metrics.noncausal_acceptance_rate(outcomes, jnp.array([[3, 2], [1, 0]])) == 5 / 6


def test_sums_over_the_batch_do_not_overflow():
    big = jnp.full(3, 2**30)
    totals = metrics.zeros(3, 1)._replace(drafted=big, accepted=big, row_steps=big)
    assert metrics.acceptance_rate(totals) == 1
    assert metrics.system_efficiency(totals) == 1


def test_totals_can_be_donated():
    update = jax.jit(metrics.update, donate_argnums=0)
    totals = run(STEPS, 3, update)
    assert totals.drafted.tolist() == [8, 3]
    assert len({count.unsafe_buffer_pointer() for count in metrics.zeros(2, 2)}) == 9


def test_totals_keep_their_type_in_a_loop():
    def body(_, totals):
        return metrics.update(totals, jnp.array([2]), jnp.array([1]), jnp.array([2]), jnp.array([True]))

    totals = jax.lax.fori_loop(0, 5, body, metrics.zeros(1, 2))
    assert totals.accepted_at.tolist() == [[5, 0]]


def test_totals_keep_their_type_under_64_bit_counts():
    totals = metrics.zeros(1, 2)
    with jax.enable_x64(True):
        totals = metrics.update(totals, *(np.array([n], np.int64) for n in (2, 1, 2)), np.array([True]))
    assert {count.dtype for count in totals} == {np.dtype(np.int32)}


@pytest.mark.parametrize("name", ["num_drafts", "num_accepted", "num_emitted", "active"])
def test_wrong_shapes_are_named(name):
    step = dict.fromkeys(["num_drafts", "num_accepted", "num_emitted"], jnp.ones(2, jnp.int32)) | {
        "active": jnp.ones(2, bool)
    }
    with pytest.raises(ValueError, match=rf"{name} must have shape \[B\] = \(2,\), got \(3,\)"):
        metrics.update(metrics.zeros(2, 2), **step | {name: jnp.ones(3, step[name].dtype)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_drafts": [3]}, "num_drafts must be an array, got list"),
        ({"num_accepted": np.array([2.5])}, "num_accepted must be of integer dtype, got float32"),
        ({"num_emitted": np.array([True])}, "num_emitted must be of integer dtype, got bool"),
        ({"active": np.array([1])}, "active must be of bool dtype, got int32"),
        ({"is_accepted": [[True, False, True]]}, "is_accepted must be an array, got list"),
        ({"is_accepted": np.ones((1, 3))}, "is_accepted must be of bool dtype, got float32"),
        ({"totals": None}, "totals must be Totals, as zeros returns it, got NoneType"),
    ],
)
def test_wrong_types_are_named(change, message):
    step = dict(zip(("num_drafts", "num_accepted", "num_emitted"), np.array([[3], [2], [3]]), strict=True))
    given = {"totals": metrics.zeros(1, 3), "active": np.array([True])} | step
    with pytest.raises(ValueError, match=message):
        metrics.update(**given | change)


@pytest.mark.parametrize("given", [(-1, 2), ("a", 2), (1, True), (1, 2.5)])
def test_zeros_take_counts(given):
    with pytest.raises(ValueError, match=r"(batch_size|num_draft_tokens) must be an integer >= 0, got"):
        metrics.zeros(*given)


@pytest.mark.parametrize(
    "figure",
    [
        metrics.acceptance_rate,
        metrics.mean_acceptance_length,
        metrics.system_efficiency,
        metrics.acceptance_rate_per_position,
    ],
)
def test_figures_take_totals(figure):
    with pytest.raises(ValueError, match="totals must be Totals, as zeros returns it, got str"):
        figure("totals")


@pytest.mark.parametrize(
    "given, message",
    [
        ((np.ones((2, 4), bool), np.ones(3, int)), r"num_drafts must have shape \(2,\), got \(3,\)"),
        (([[True, False]], [5]), r"num_drafts must be integers in \[0, K = 2\], got \[5\]"),
        (([[True, False]], [-1]), r"num_drafts must be integers in \[0, K = 2\], got \[-1\]"),
        (([[True, False]], [1.5]), r"num_drafts must be integers in \[0, K = 2\], got \[1.5\]"),
        (([[0.5, float("nan")]], [2]), r"outcomes must be Totals or an array .*, or of 1 and 0, got float64 \(1, 2\)"),
        (("abc", 2), r"outcomes must be Totals or an array .*, or of 1 and 0, got <U3 \(\)"),
        (([[True], [True, False]], [1, 2]), "outcomes and num_drafts must be arrays, got lists of several lengths"),
    ],
)
def test_noncausal_acceptance_rate_names_what_is_wrong(given, message):
    with pytest.raises(ValueError, match=message):
        metrics.noncausal_acceptance_rate(*given)


@pytest.mark.parametrize("runs", [None, "a", {"a": 1}])
def test_plot_takes_metrics(runs):
    with pytest.raises(ValueError, match="runs must be metrics, as results of LLM have them, or a mapping to them"):
        metrics.plot(runs)


class TestOutcomes:
    """Verifiers that tell how each draft's own test ended."""

    TARGET, DRAFT = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], np.float32)

    def case(self, batch: int, num_drafts: int):
        logits = (
            jnp.broadcast_to(jnp.log(distribution), (batch, num_drafts + i, 3))
            for i, distribution in enumerate([self.DRAFT, self.TARGET])
        )
        drawn_from, target = (Categorical(x) for x in logits)
        tokens = jax.random.categorical(jax.random.key(0), drawn_from.logits).astype(jnp.int32)
        return Draft(tokens, drawn_from, jnp.arange(batch) % (num_drafts + 1)), target

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["rejection", "match", "typical"])
    def test_they_change_nothing_and_lead_to_what_is_accepted(self, name):
        draft, target = self.case(64, 3)
        options = {"posterior_threshold": 0.25, "posterior_alpha": 1.0} if name == "typical" else {}
        verify = jax.jit(partial(getattr(verifiers, name), **options), static_argnames="outcomes")
        told, silent = (verify(jax.random.key(1), draft, target, outcomes=told) for told in (True, False))
        assert silent.is_accepted is None
        np.testing.assert_array_equal(told.tokens, silent.tokens)
        np.testing.assert_array_equal(np.cumprod(told.is_accepted, axis=1).sum(axis=1), told.num_accepted)
        is_draft = np.arange(3) < np.asarray(draft.num_tokens)[:, None]
        assert not np.any(told.is_accepted & ~is_draft)
        assert np.sum(told.is_accepted) > np.sum(told.num_accepted)  # some pass after one that did not

    @pytest.mark.slow
    def test_each_draft_passes_as_often_as_the_first(self):
        draft, target = self.case(30_000, 3)
        told = jax.jit(verifiers.rejection, static_argnames="outcomes")(
            jax.random.key(1), draft._replace(num_tokens=None), target, outcomes=True
        )
        overlap = float(jnp.sum(jnp.minimum(self.TARGET, self.DRAFT)))
        error = (overlap * (1 - overlap) / 30_000) ** 0.5
        np.testing.assert_allclose(np.mean(told.is_accepted, axis=0), overlap, atol=5 * error)

    @pytest.mark.slow
    def test_of_deterministic_drafts(self):
        target = jnp.log(jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]]))
        told = verifiers.rejection(jax.random.key(0), Draft(jnp.array([[0, 0, 0]])), target, outcomes=True)
        assert told.is_accepted.tolist() == [[True, False, True]] and told.num_accepted.tolist() == [1]

    def test_kernels_and_cores_that_do_not_tell_refuse(self):
        draft, target = self.case(4, 3)
        with pytest.raises(NotImplementedError, match="outcomes=False: they do not test the drafts"):
            verifiers.rejection(jax.random.key(0), draft, target, outcomes=True, implementation="interpret")
        with pytest.raises(ValueError, match="outcomes must be left out, as block does not support it, got True"):
            verifiers.block(jax.random.key(0), draft, target, outcomes=True)

    @pytest.mark.slow
    def test_a_loop_counts_them(self):
        def model(distribution):
            def apply(params, inputs, cache):
                return ModelOutput(jnp.broadcast_to(jnp.log(params), (*inputs.tokens.shape, 3))), cache

            return Model(distribution, apply, lambda batch_size, max_length: (), vocab_size=3)

        target, proposer = model(self.TARGET), proposers.draft_model(model(self.DRAFT), 3)
        rows = sampling.batch([SamplingParams(max_tokens=400)] * 2)
        state = prefill(
            target, proposer, jnp.ones((2, 1), int), jnp.array([1, 1]), rows, jax.random.key(0), max_length=401
        )
        verifier = Partial(verifiers.rejection, outcomes=True)
        totals = decode.generate(target, proposer, state, verifier=verifier).totals
        np.testing.assert_array_equal(totals.tested, totals.drafted)
        overlap = float(jnp.sum(jnp.minimum(self.TARGET, self.DRAFT)))
        assert abs(metrics.noncausal_acceptance_rate(totals) - overlap) < 0.1
        assert metrics.acceptance_rate(totals) < metrics.noncausal_acceptance_rate(totals)
