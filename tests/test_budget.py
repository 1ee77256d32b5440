"""Rows that share a budget of verified drafts, and steps that compute no padding."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from choice import one_of
from test_decode import DRAFT, TARGET, model, outputs, run, start

from specjax import LLM, decode, proposers, testing
from specjax.decoding.admission import admitted
from specjax.decoding.ragged_steps import within
from specjax.distributions import likeliest_probability, sampled
from specjax.proposers.within_budget import LEVELS, levels
from specjax.sampling import SamplingParams
from specjax.theory import StepTimes
from specjax.types import Categorical, Context, Draft, Memory, Verified

LENGTHS = (9, 4, 1, 6)
PARAMS = [SamplingParams(temperature=t, max_tokens=14) for t in (0.8, 0, 1.2, 0)]
WIDTHS = []  # tokens of the calls that the target was traced for


@pytest.fixture(scope="module")
def target():
    return model(TARGET, 0)


class Seen:
    """`Model.apply` that notes the numbers of tokens of its calls."""

    def __init__(self, apply):
        self.apply = apply

    def __call__(self, params, inputs, cache):
        WIDTHS.append(inputs.tokens.size)
        return self.apply(params, inputs, cache)


@pytest.mark.parametrize(("kind", "drafts_per_row"), [("draft", 1), ("ngram", 3)])
def test_tokens_do_not_change_under_match(target, kind, drafts_per_row):
    proposer = proposers.draft_model(model(DRAFT, 1), 4) if kind == "draft" else proposers.ngram(4)
    shared = proposers.within_budget(proposer, drafts_per_row)
    expected = outputs(run(target, None, PARAMS, one_of("match"), lengths=LENGTHS))
    seen = replace(target, apply=Seen(target.apply))
    state = start(seen, shared, PARAMS, lengths=LENGTHS)
    WIDTHS.clear()
    state = decode.generate(seen, shared, state, verifier=one_of("match"))
    assert outputs(state) == expected
    assert set(WIDTHS) == {len(LENGTHS) * (1 + drafts_per_row)}
    drafted = np.asarray(state.totals.drafted)
    if kind == "draft":
        assert 0 < drafted.sum() <= drafts_per_row * np.asarray(state.totals.steps).max() * len(LENGTHS)


def test_the_choice_is_lossless():
    testing.assert_choice_lossless(
        lambda drafted: admitted(likeliest_probability(Categorical.from_probs(drafted.probs)), budget=1)
    )


def test_levels_do_not_depend_on_the_drafts():
    probs = jnp.array([[[0.5, 0.25, 0.25], [0.99, 0.01, 0.0], [0.1, 0.1, 0.8]]])
    for temperature, expected in ((None, [0.5, 0.99, 0.8]), (1.0, [0.5, 0.99, 0.8]), (0.0, [0.5, 0.99, 0.8])):
        temperature = None if temperature is None else jnp.array([temperature])
        found = Categorical.from_probs(probs)._replace(temperature=temperature)
        np.testing.assert_allclose(likeliest_probability(sampled(found))[0], expected, rtol=1e-6)
    halved = Categorical.from_probs(probs)._replace(temperature=jnp.array([0.5]))
    np.testing.assert_allclose(likeliest_probability(halved)[0, 0], 0.25 / 0.375, rtol=1e-6)
    packed = Categorical(jnp.log(probs[0]), rows=jnp.array([[2, 0]]))
    np.testing.assert_allclose(likeliest_probability(packed)[0], [0.8, 0.5], rtol=1e-6)
    assert levels(Categorical.from_probs(probs), 1, 3).tolist() == [[2, len(LEVELS), 4]]
    assert levels(None, 1, 10)[0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 0, 0]


def test_acceptance_is_counted_up_to_the_first_rejection():
    proposer = proposers.within_budget(proposers.ngram(4), 2)
    state = proposer.init_memory(3, 3, 16)
    counts = state.rows["counts"]._replace(
        level=jnp.array([[7, 6, 5, 4]] * 3, jnp.int32), num_drafts=jnp.array([4, 2, 0], jnp.int32)
    )
    state = Memory(rows=state.rows | {"counts": counts})
    verified = Verified(jnp.zeros((3, 5), jnp.int32), jnp.array([1, 2, 0], jnp.int32))
    counts = proposer.update(None, verified, None, state).rows["counts"]
    assert counts.trials[:, :3:-1].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert counts.accepted[:, :3:-1].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_drafts_go_where_they_count(target):
    """A row whose drafts are always rejected gives its share to a row whose drafts are accepted."""
    proposer = proposers.within_budget(proposers.ngram(4), 2)
    state = proposer.init_memory(2, 2, 16)
    counts = state.rows["counts"]
    trials = jnp.full_like(counts.trials, 30.0)
    state = Memory(
        rows=state.rows | {"counts": counts._replace(trials=trials, accepted=trials * jnp.array([[0], [1]]))}
    )
    context = Context(jnp.tile(jnp.array([5, 6]), (2, 8)), jnp.array([12, 12]), jnp.array([True, True]))
    draft, state = proposer.propose(None, context, None, state)
    assert draft.num_tokens.tolist() == [0, 4]
    draft, _ = proposer.propose(None, context._replace(active=jnp.array([True, False])), None, state)
    assert draft.num_tokens.tolist() == [4, 0]


@pytest.mark.slow
def test_requests_that_share_slots_share_a_budget():
    """Requests enter and leave, and steps compute as many slots as there are; greedy tokens stay as they are."""
    prompts = ["def area(width, height):", "for i in range(", "class Point:", "import os", "x = [1, 2,"]
    params = [SamplingParams(temperature=0, max_tokens=5 + 2 * i) for i in range(5)]
    shared = LLM(draft=proposers.within_budget(proposers.ngram(4), 1), num_slots=3)
    plain = LLM(draft=None, num_draft_tokens=0, num_slots=3)
    found, expected = ([x.token_ids for x in llm.generate(prompts, params)] for llm in (shared, plain))
    assert found == expected


def test_a_choice_has_chains_and_the_budget(tmp_path):
    llm = LLM(draft=proposers.ngram(4), num_draft_tokens="auto", drafts_per_row=2)
    assert llm.setup.draft_lengths == (0, 2, 4, 6) and llm.proposer.drafts_per_row == 2
    times = StepTimes({1: {0: 1.0, 3: 2.0, 5: 1.5}})
    llm = LLM(draft="ngram", num_draft_tokens="auto", drafts_per_row=2, step_times=times)
    assert llm.setup.draft_lengths == (0, 3, 5) and llm.proposer.num_draft_tokens == 3


def test_bad_arguments_of_an_llm():
    for number in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"drafts_per_row must be None or an integer >= 1, got "):
            LLM(drafts_per_row=number)
    with pytest.raises(ValueError, match=r"drafts_per_row must be None for trees, .* got 2"):
        LLM(drafts_per_row=2, tree=8)
    with pytest.raises(ValueError, match=r"drafts_per_row must be an integer in \[1, 4\], .* got 5"):
        LLM(draft="ngram", drafts_per_row=5)
    with pytest.raises(ValueError, match=r"proposer must make drafts, of which a budget verifies some, got NoDrafts"):
        LLM(num_draft_tokens=0, drafts_per_row=2)


def test_bad_arguments(target):
    for number in (0, 5, 1.5, True):
        with pytest.raises(ValueError, match=r"drafts_per_row must be an integer in \[1, 4\]"):
            proposers.within_budget(proposers.ngram(4), number)
    with pytest.raises(ValueError, match="proposer must draft chains, got a proposer of trees of 6 nodes"):
        proposers.within_budget(proposers.ngram(4, tree=6), 2)
    with pytest.raises(ValueError, match="proposer must be a proposer, got None"):
        proposers.within_budget(None, 2)
    draft = Draft(jnp.zeros((2, 4), jnp.int32))
    shared = proposers.within_budget(proposers.ngram(4), 2)
    assert within(replace(target, takes_ragged=False), shared, draft).apply is target.apply
    assert within(target, proposers.ngram(4), draft).apply is target.apply
    assert within(target, shared, draft).apply.size == 6
