"""The verdict on rules that choose how many drafts are verified, and the rule of a shared budget."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.decoding.admission import admitted
from specjax.testing import choices

K = choices.K


def chances(drafted):
    """The probability of each draft where it was drawn, which depends on the draft."""
    return jnp.take_along_axis(drafted.probs, drafted.tokens[..., None], axis=-1)[..., 0]


def later_places_first(drafted):
    """A budget of one draft that goes to the later place among equal ones."""
    survival = jnp.cumprod(drafted.confidences, axis=1)
    order = survival.T[::-1].reshape(-1)
    rank = jnp.argsort(jnp.argsort(order, descending=True, stable=True), stable=True)
    return jnp.sum((rank < 1).reshape(survival.shape[::-1]), axis=0)


def by_largest(drafted):
    """The confidence of a row is the largest of all its places."""
    largest = jnp.max(drafted.confidences, axis=1, keepdims=True)
    return admitted(jnp.broadcast_to(largest, drafted.confidences.shape), 2)


def all_or_none(wants):
    return jnp.broadcast_to(jnp.where(wants, K, 0), (2,))


WRONG = {
    "the probability of the draft": lambda drafted: admitted(chances(drafted), 2),
    "the largest of all places": by_largest,
    "later places first": later_places_first,
    "a later draft of the row": lambda drafted: jnp.where(drafted.tokens[:, 1] == 0, K, 0),
    "both rows by the draft of the other": lambda drafted: jnp.where(drafted.tokens[::-1, 0] == 0, K, 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_fails(name):
    with pytest.raises(AssertionError, match="not lossless under rejection with sampled drafts: total variation 0"):
        testing.assert_choice_lossless(WRONG[name])


@pytest.mark.slow
def test_outcomes_after_a_rejection_fail():
    """They tell the noise of a position that the next step may use again."""
    with pytest.raises(
        AssertionError, match=r"rejection with deterministic, then sampled drafts: total variation 0\.0"
    ):
        testing.assert_choice_lossless(lambda drafted: all_or_none(~drafted.is_accepted[0, 1]))


@pytest.mark.slow
def test_lossless_rules_pass():
    """All drafts, budgets, causal counts, the row's own drafts before, and the first row by the second one's drafts."""
    rules = [lambda drafted: jnp.full(2, K)]
    rules += [lambda drafted, budget=budget: admitted(drafted.confidences, budget) for budget in (1, 2, 3)]
    rules += [
        lambda drafted: all_or_none(jnp.sum(drafted.num_accepted) >= jnp.sum(drafted.num_drafts) - 1),
        lambda drafted: jnp.where(drafted.tokens[:, 0] == 0, 1, K),
        lambda drafted: jnp.stack([jnp.where(drafted.tokens[1, 0] == 0, 0, K), jnp.asarray(K)]),
    ]
    rules.append(lambda drafted: all_or_none(jnp.all(drafted.last == choices.START)))
    for rule in rules:
        testing.assert_choice_lossless(rule)


def test_numbers_out_of_range():
    with pytest.raises(AssertionError, match=r"the rule must return numbers in \[0, K = 2\], got 3 to 3"):
        testing.assert_choice_lossless(lambda drafted: jnp.full(2, K + 1))


def test_noise_that_two_steps_share():
    """The joint distribution of two draws, against draws."""
    p, q = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.1, 0.3])
    noise = np.random.default_rng(0).gumbel(size=(200_000, 3))
    found = np.zeros((3, 3))
    np.add.at(found, (np.argmax(np.log(p) + noise, axis=1), np.argmax(np.log(q) + noise, axis=1)), 1 / len(noise))
    joint = choices._coupling(p, q)
    np.testing.assert_allclose(joint.sum(axis=1), p, atol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=0), q, atol=1e-12)
    assert np.abs(found - joint).max() < 5e-3


def test_a_budget_goes_to_the_likeliest_drafts():
    """One by one, each to the row whose next draft survives with the largest probability, the first of equal ones."""
    rng = np.random.default_rng(0)
    for budget in range(14):
        confidences = rng.choice([0.25, 0.5, 0.75, 1.0], (4, 3)).astype(np.float32)
        survival, counts = np.cumprod(confidences, axis=1), np.zeros(4, int)
        for _ in range(min(budget, survival.size)):
            free = [row for row in range(4) if counts[row] < 3]
            best = min(free, key=lambda row: (-survival[row, counts[row]], counts[row], row))
            counts[best] += 1
        assert admitted(jnp.asarray(confidences), budget).tolist() == counts.tolist()
