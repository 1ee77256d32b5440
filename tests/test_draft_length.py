"""The number of drafts chosen from past acceptance."""

import time
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial
from test_eagle import write_eagle3
from test_engine import FEW, Tokenizer
from test_llm import random_tensors, write_checkpoint

from specjax import (
    LLM,
    Engine,
    Model,
    ModelOutput,
    SamplingParams,
    decode,
    proposers,
    sampling,
    testing,
    verifiers,
)
from specjax.cli import models as cli_models
from specjax.engine import step_times
from specjax.engine.draft_length import (
    CHOICES,
    FED_IN_PROBE,
    HELD,
    PROBE_SHARE,
    ByStepTimes,
    RecentAcceptance,
    check_choice,
    choices,
    name_of_drafts,
    with_draft_lengths,
)
from specjax.engine.scheduler import Scheduler
from specjax.engine.slots import Slots
from specjax.proposers.medusa import Medusa
from specjax.sampling.capacities import Needs
from specjax.theory import StepTimes, expected_tokens

# The seconds of a step of one sequence, and of 64, which leave less room for drafts.
TIMES = StepTimes(
    {
        1: {0: 1.0, 2: 1.3, 4: 1.6, 6: 1.9, 8: 2.2},
        64: {0: 1.0, 2: 1.6, 4: 2.2, 6: 2.9, 8: 3.6},
    }
)


def apply(params, inputs, cache):
    return ModelOutput(params["table"][inputs.tokens]), cache


def init_cache(batch_size, max_length):
    return ()


def bigram(seed, padding=0):
    table = 1.5 * jax.random.normal(jax.random.key(seed), (3, 3))
    return Model({"table": table, "padding": jnp.zeros(padding)}, apply, init_cache, 3)


def follow(choice, rng, rate, num_rows, num_steps, num_behind=0):
    """Take steps whose drafts are accepted at a rate; return the K, the tokens and the seconds of each.

    The counts of a step come after the choice of the next, as in an engine.
    """
    steps, late = [], None
    for _ in range(num_steps):
        k = choice.choose(num_rows, num_behind)
        if late is not None:
            choice.count(*late)
        accepted = np.cumprod(rng.random((num_rows, k)) < rate, axis=1).sum(axis=1)
        late = np.full(num_rows, k), accepted
        steps.append((k, num_rows + accepted.sum(), TIMES.at(num_rows)[k]))
    choice.count(*late)
    return [np.array(column) for column in zip(*steps, strict=True)]


def choice_of(proposer=None):
    return ByStepTimes(TIMES, CHOICES, proposer or proposers.ngram(8))


def test_follows_acceptance():
    """Good drafts become many, bad ones end within a few steps, and good ones again are found by probes."""
    choice, rng = choice_of(), np.random.default_rng(0)
    assert follow(choice, rng, 1.0, 2, 48)[0][-1] == 8
    assert np.all(follow(choice, rng, 0.0, 2, 200)[0][-20:] == 0)
    num_drafts, _, seconds = follow(choice, rng, 0.0, 2, 4000)
    lost = seconds[num_drafts > 0] - 1
    assert len(lost) > 10 and lost.sum() <= PROBE_SHARE * seconds.sum()
    assert follow(choice, rng, 0.95, 2, 1000)[0][-1] >= 6


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_is_about_as_fast_as_the_best_fixed_number(num_rows):
    """Plain decoding among them, after the first steps."""
    seconds = TIMES.at(num_rows)
    for i, rate in enumerate((0.0, 0.3, 0.5, 0.7, 0.9)):
        choice, rng = choice_of(), np.random.default_rng(i)
        follow(choice, rng, rate, num_rows, 50)
        _, tokens, taken = follow(choice, rng, rate, num_rows, 3000)
        best = max(expected_tokens(rate, k) / seconds[k] for k in CHOICES)
        assert tokens.sum() / taken.sum() / num_rows >= 0.97 * best, rate


def stream(choice, rng, rate_of, num_tokens, most_behind):
    """Decode one sequence; return the K of each step, and the seconds with those that feed the drafter its backlog.

    Args:
        rate_of: function of the number of tokens that there are, which returns the acceptance rate.
        most_behind: the most tokens that wait for the drafter.
    """
    seconds, num_behind, total, found = TIMES.at(1), 0, 0, []
    while total < num_tokens:
        k = choice.choose(1, num_behind)
        accepted = np.cumprod(rng.random((1, k)) < rate_of(total), axis=1).sum(axis=1)
        choice.count(np.full(1, k), accepted)
        fed = (seconds[2] - seconds[0]) * min(num_behind, most_behind) / FED_IN_PROBE if k else 0
        num_behind, total = 0 if k else num_behind + 1, total + 1 + int(accepted[0])
        found.append((total, k, seconds[k] + fed))
    return [np.array(column) for column in zip(*found, strict=True)]


DRAFTERS = {  # made in a test, as collecting must start no device
    "features": lambda: (proposers.ngram(8), HELD),
    "model": lambda: (proposers.draft_model(bigram(1), 8), np.inf),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_is_never_much_slower_than_plain_decoding(name):
    """Over 2,000 tokens of a stream after the first 100, a step and the feeding of the drafter counted by the table."""
    proposer, most_behind = DRAFTERS[name]()
    for rate in (0.0, 0.1, 0.2, 0.3, 0.5, 0.9):
        choice, rng = choice_of(proposer), np.random.default_rng(0)
        total, _, taken = stream(choice, rng, lambda _, rate=rate: rate, 2100, most_behind)
        is_late = total > 100
        assert taken[is_late].sum() <= 1.03 * (total[-1] - 100) * TIMES.at(1)[0], rate


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_come_back_within_a_stream(name):
    """They are bad for 1,000 tokens and good after that."""
    proposer, most_behind = DRAFTERS[name]()
    choice, rng = choice_of(proposer), np.random.default_rng(0)
    total, num_drafts, _ = stream(choice, rng, lambda n: 0.95 if n > 1000 else 0.0, 3000, most_behind)
    assert num_drafts[(total > 900) & (total < 1000)].mean() < 0.2
    assert num_drafts[total > 2000].mean() > 4


def test_an_expensive_draft_model_is_not_tried_again():
    """Feeding it the tokens of plain steps would take more of their time than is set aside for it."""
    times, bad = StepTimes({1: {0: 1.0, 2: 1.6}}), (np.full(1, 2), np.zeros(1, int))
    choice = ByStepTimes(times, (0, 2), proposers.draft_model(bigram(1), 2))
    for _ in range(50):
        choice.count(*bad)
    assert not any(choice.choose(1, i) for i in range(1000))
    assert choice.choose(1, 0) == 2


def test_counts_trials():
    """A rejection is a trial, a draft after one is not."""
    recent = RecentAcceptance()
    recent.update(np.full(3, 4), np.array([0, 1, 4]))
    assert (recent._accepted, recent._trials) == (5, 7)
    choice = ByStepTimes(TIMES, (0, 4), proposers.ngram(4))
    before = np.array([choice._places._trials, choice._places._accepted])
    choice.count(np.array([4, 4, 4, 0]), np.array([0, 1, 4, 0]))
    trials, accepted = np.array([choice._places._trials, choice._places._accepted]) - before
    np.testing.assert_allclose(trials[1:], [2, 1, 1], atol=1e-6)
    np.testing.assert_allclose(accepted[1:], [1, 1, 1], atol=1e-6)
    assert 2.8 < trials[0] <= 3 and 1.8 < accepted[0] <= 2  # the assumption at first has faded a little


def beside_a_tree(seconds, of_many=None):
    """A choice among chains of up to 2 drafts and a tree of 7 nodes, whose longest path has 3 tokens."""
    seconds = {1: seconds} | ({} if of_many is None else {8: of_many})
    return ByStepTimes(StepTimes(seconds), sorted(seconds[1]), proposers.ngram(2, tree=7))


def take_turns(choice, rng, of_chain, of_trees, num_steps, num_running=1):
    """Take steps whose drafts are accepted at a rate by their form; return the K of each."""
    taken = []
    for _ in range(num_steps):
        k = choice.choose(num_running, 0)
        num_drafts = np.array([min(k, 2)])
        accepted = np.cumprod(rng.random(2) < of_trees.get(k, of_chain)).sum()
        choice.count(num_drafts, np.minimum(accepted, num_drafts), k)
        taken.append(k)
    return np.array(taken)


CHAINS = {0: 1.0, 1: 1.05, 2: 1.1}


@pytest.mark.parametrize(
    "seconds, of_tree, least, most",
    [
        (CHAINS | {6: 1.5}, 0.9, 0.8, 1.0),
        (CHAINS | {6: 4.0}, 0.9, 0.0, 0.0),
        (CHAINS | {6: 1.5}, 0.35, 0.0, 0.05),
        ({0: 1.0, 2: 1.8, 6: 1.9}, 0.9, 0.8, 1.0),  # plain decoding is faster than the chain
        ({0: 1.0, 2: 1.8, 6: 1.9}, 0.3, 0.0, 0.02),
        ({0: 1.0, 6: 1.9}, 0.9, 0.8, 1.0),
        ({0: 1.0, 6: 3.0}, 0.9, 0.0, 0.0),
    ],
)
def test_a_tree_is_taken_where_it_pays(seconds, of_tree, least, most):
    """The drafts of chains are accepted at a rate of 0.4."""
    taken = take_turns(beside_a_tree(seconds), np.random.default_rng(0), 0.4, {6: of_tree}, 2000)
    assert least <= np.mean(taken == 6) <= most


def test_a_tree_that_pays_is_found_within_a_short_text():
    """40 steps give some 100 tokens."""
    shares = [
        np.mean(take_turns(beside_a_tree(CHAINS | {6: 1.5}), np.random.default_rng(seed), 0.4, {6: 0.9}, 40)[20:] == 6)
        for seed in range(20)
    ]
    assert np.mean(shares) > 0.8, shares


def test_a_chain_is_found_again_beside_a_tree():
    """The tree is the fastest until the drafts of chains, of which it says nothing, are all accepted."""
    choice, rng = beside_a_tree(CHAINS | {6: 1.5}), np.random.default_rng(0)
    assert np.mean(take_turns(choice, rng, 0.4, {6: 0.9}, 1000)[500:] == 6) > 0.9
    assert np.mean(take_turns(choice, rng, 1.0, {6: 0.9}, 1000)[500:] == 2) > 0.9


def test_the_number_of_sequences_decides_for_a_tree_or_a_chain():
    """The counts are the same."""
    choice = beside_a_tree(CHAINS | {6: 1.5}, of_many=CHAINS | {6: 2.4})
    take_turns(choice, np.random.default_rng(0), 0.4, {6: 0.9}, 500)
    of_one, of_many = ([choice.choose(number, 0) for _ in range(100)] for number in (1, 8))
    assert np.mean(np.array(of_one) == 6) > 0.9 and np.mean(np.array(of_many) == 2) > 0.9


def test_the_best_of_several_trees_is_taken():
    """One sequence gets the large tree, eight get the small one, and all trees that may pay are tried."""
    one, many = CHAINS | {4: 1.3, 6: 1.5, 8: 4.0}, CHAINS | {4: 1.4, 6: 3.0, 8: 8.0}
    of_trees, rng = {4: 0.7, 6: 0.95, 8: 1.0}, np.random.default_rng(0)
    choice = ByStepTimes(StepTimes({1: one, 8: many}), sorted(one), proposers.ngram(2, tree=9))
    of_one = take_turns(choice, rng, 0.4, of_trees, 1000)
    assert np.mean(of_one[500:] == 6) > 0.9 and {2, 4, 6} <= set(of_one.tolist()) and 8 not in of_one
    of_many = take_turns(choice, rng, 0.3, of_trees, 1000, num_running=8)
    assert np.mean(of_many[500:] == 4) > 0.9 and 6 not in of_many
    before = take_turns(choice, rng, 0.4, {4: 0.2, 6: 0.1}, 1000)[-100:]
    assert np.mean(before == 2) > 0.9
    assert np.mean(take_turns(choice, rng, 0.4, of_trees, 5000)[-500:] == 6) > 0.9


def test_trees_without_a_chain():
    """All lengths are trees, or those that are ready so far."""
    of_trees, rng = {4: 0.9, 6: 0.95}, np.random.default_rng(0)
    choice = ByStepTimes(StepTimes({1: {4: 1.2, 6: 2.0}}), (4, 6), proposers.ngram(2, tree=7))
    assert np.mean(take_turns(choice, rng, 0.4, of_trees, 500) == 4) > 0.9
    choice = beside_a_tree(CHAINS | {6: 1.5})
    choice.allow([6])
    assert set(take_turns(choice, rng, 0.4, of_trees, 10)) == {6}
    choice.allow(sorted(CHAINS | {6: 1.5}))
    assert len(set(take_turns(choice, rng, 0.9, {6: 0.1}, 500))) > 1


def test_a_table_says_which_tree_an_engine_takes():
    lengths, choice = check_choice(None, None, StepTimes({1: CHAINS | {6: 1.5}}), proposers.ngram(2, tree=7))
    assert lengths == (0, 1, 2, 6) and choice.choose(1, 0) in lengths
    several = with_draft_lengths(proposers.ngram(2, tree=7), (0, 4, 2, 6))
    assert {k: (each.tree, each.num_draft_tokens) for k, each in several.items()} == {
        6: (7, 2),
        4: (5, 2),
        2: (None, 2),
        0: (None, 0),
    }
    with pytest.raises(ValueError, match=r"integers in \[0, 2\], got \(0, 4\)"):  # without the tree of the proposer
        with_draft_lengths(proposers.ngram(2, tree=7), (0, 4))
    with pytest.raises(ValueError, match=r"at most 4, got \[0, 1, 2, 6\]"):
        check_choice(None, None, StepTimes({1: CHAINS | {6: 1.5}}), proposers.ngram(2, tree=5))


@pytest.mark.parametrize(
    "of_budget, is_good, expected",
    [(1.3, [1, 1, 0, 0], 5), (2.0, [1, 1, 0, 0], 4), (1.3, [1, 1, 1, 1], 4), (1.3, [0, 0, 0, 0], 0)],
)
def test_a_budget_is_taken_where_it_pays(of_budget, is_good, expected):
    """Rows whose drafts are all accepted get the drafts of the others."""
    choice = ByStepTimes(
        StepTimes({4: {0: 1.0, 2: 1.6, 4: 2.2, 5: of_budget}}),
        (0, 2, 4, 5),
        proposers.within_budget(proposers.ngram(4), 1),
    )
    taken, is_good = [], np.array(is_good)
    for _ in range(1000):
        k = choice.choose(4, 0)
        num_drafts = 4 * is_good // max(is_good.sum(), 1) if k == 5 else np.full(4, k)
        choice.count(num_drafts, num_drafts * is_good, k)
        taken.append(k)
    assert np.mean(np.array(taken[100:]) == expected) > 0.9


def test_a_step_of_ended_sequences_counts_nothing():
    choice = ByStepTimes(StepTimes({4: {0: 1.0, 3: 1.1}}), (0, 3), proposers.within_budget(proposers.ngram(2), 1))
    choice.count(np.zeros(0, int), np.zeros(0, int), 3)
    assert choice.choose(4, 0) in (0, 3)


def test_a_number_above_the_drafts_is_a_budget():
    proposer = proposers.within_budget(proposers.ngram(6), 3)
    assert choices(proposer) == (0, 2, 4, 6, 9)
    forms = with_draft_lengths(proposer, (0, 2, 6, 8, 9))
    assert {k: (each.num_draft_tokens, getattr(each, "is_shared", None)) for k, each in forms.items()} == {
        9: (6, True),
        8: (6, True),
        6: (6, False),
        2: (2, False),
        0: (0, None),
    }
    assert (forms[9].drafts_per_row, forms[8].drafts_per_row) == (3, 2)
    names = [name_of_drafts(proposer, 9), name_of_drafts(proposer, 6), name_of_drafts(proposers.ngram(2, tree=7), 6)]
    assert names == ["6 draft tokens, 3 a row verified", "6 draft tokens", "a tree of 7 nodes"]
    lengths, _ = check_choice(None, None, StepTimes({1: {0: 1.0, 6: 2.0, 9: 1.5}}), proposer)
    assert lengths == (0, 6, 9)
    with pytest.raises(ValueError, match="must have 9, which stands for the 6 drafts of the proposer within its bud"):
        with_draft_lengths(proposer, (0, 6))
    with pytest.raises(ValueError, match=r"integers in \[0, 6\], got \(0, 7\)"):
        with_draft_lengths(proposer, (0, 7))
    assert with_draft_lengths(proposer, (6,))[6].is_shared


@pytest.mark.parametrize("times", [TIMES, StepTimes({1: {0: 1.0, 2: 3.0}})])
def test_an_estimate_stays_while_nothing_is_drafted(times):
    choice, nothing = ByStepTimes(times, (0, 2), proposers.ngram(2)), np.zeros(4, int)
    choice.count(np.full(4, 2), np.array([0, 0, 1, 2]))
    before = choice.rates()[0]
    for _ in range(500):
        choice.count(nothing, nothing)
    assert choice.rates()[0] == pytest.approx(before) and choice._places._trials[0] == pytest.approx(2.0)


@pytest.mark.slow
def test_distribution_is_the_targets():
    """Steps whose number of drafts follows acceptance: pairs of tokens have the target's distribution."""
    target, draft, batch_size = bigram(0, 40), proposers.draft_model(bigram(9), 4), 20000
    rows = sampling.batch([SamplingParams(max_tokens=12)] * batch_size)
    times, lengths = StepTimes({1: {0: 1.0, 2: 1.1, 4: 1.2}}), (0, 2, 4)
    choice, proposer = ByStepTimes(times, lengths, draft), with_draft_lengths(draft, lengths)
    state = heads.prefill(
        target,
        draft,
        jnp.zeros((batch_size, 1), jnp.int32),
        jnp.ones(batch_size, jnp.int32),
        rows,
        jax.random.key(5),
        max_length=13,
    )
    used, before = set(), jax.tree.map(np.array, state.totals)
    while bool(state.context.active.any()):
        num_draft_tokens = choice.choose(batch_size, 0)
        used.add(num_draft_tokens)
        state = decode.generate(target, proposer[num_draft_tokens], state, max_steps=1)
        after = jax.tree.map(np.array, state.totals)
        choice.count(after.drafted - before.drafted, after.accepted - before.accepted)
        before = after
    assert len(used) > 1

    tokens = np.asarray(state.context.tokens)
    step = np.asarray(jax.nn.softmax(target.params["table"], axis=-1), np.float64)
    distribution = np.eye(3)[0]
    for i in range(12):
        counts = np.zeros((3, 3))
        np.add.at(counts, (tokens[:, i], tokens[:, i + 1]), 1)
        expected = distribution[:, None] * step
        assert np.abs(counts / batch_size - expected).max() < 5 * 0.5 / batch_size**0.5
        distribution = distribution @ step


def write_deep_pair(directory, num_layers=2):
    """A target with more layers than its draft, which add nothing to the first one."""
    target, noise = random_tensors(0, num_layers=num_layers), random_tensors(1, num_layers=1)
    for name, values in target.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            values[:] = 0
    draft = {name: (target[name] + 0.1 * noise[name]).astype(np.float32) for name in noise}
    return [
        write_checkpoint(directory / "target", target, num_layers=num_layers),
        write_checkpoint(directory / "draft", draft, num_layers=1),
    ]


@pytest.mark.slow
def test_text_is_that_of_plain_decoding_and_of_a_stream(tmp_path, monkeypatch):
    """The number of drafts changes from step to step."""
    used = recorded_steps(monkeypatch)
    StepTimes({1: {0: 1.0, 2: 1.3, 6: 1.9}}).save(tmp_path / "times.json")
    llm = LLM(*write_deep_pair(tmp_path), num_draft_tokens="auto", step_times=tmp_path / "times.json")
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = ["the cat sat", "a"]
    plain = llm.plain()
    for prompt in prompts:  # a row a call: generate and stream share one program for each number of drafts
        (result,), expected = llm.generate(prompt, params), plain.generate(prompt, params)[0].token_ids
        assert result.token_ids == expected
        assert result.metrics.num_drafted > 0
    assert [piece.token_id for piece in llm.stream(prompt, params)] == expected
    sampled = SamplingParams(temperature=0.9, seed=5, max_tokens=60)
    (result,) = llm.generate(prompt, sampled)
    assert [piece.token_id for piece in llm.stream(prompt, sampled)] == result.token_ids
    assert len({k for k in used if k is not None}) > 1


class Steps:
    """A choice of drafts that takes its numbers in turn."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def __call__(self, num_running, rate):
        self.numbers = *self.numbers[1:], self.numbers[0]
        return self.numbers[-1]


@pytest.mark.slow
def test_an_eagle_head_changes_its_drafts_in_an_engine(tmp_path):
    """Greedy tokens stay the same, whatever number of drafts each step has, zero among them."""
    target = heads.make_target((2, 0, 1))
    write_eagle3(tmp_path, target, "authors")
    head = proposers.load(tmp_path, target, num_draft_tokens=3)
    choose = Steps(3, 0, 3, 0, 0, 3)
    prompts = [np.random.default_rng(i).integers(0, heads.VOCAB, 5 + i).tolist() for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    sizes = {"num_slots": 2, "max_length": 40, "tokenizer": Tokenizer(), "eos_token_ids": (), "capacities": FEW}
    found = []
    for options in ({}, {"proposer": head, "draft_lengths": (0, 3), "choose_draft_length": choose}):
        with Engine(target, **options, **sizes) as engine:
            requests = [engine.submit(prompt, params) for prompt in prompts]
            results = [request.result(timeout=100) for request in requests]
            found.append([result.token_ids for result in results])
    assert found[0] == found[1]
    assert sum(result.metrics.num_drafted for result in results) > 0


def recorded_steps(monkeypatch):
    """Return a list to which each step of an engine adds its K from now on."""
    used, step = [], Slots.step

    def recorded(self, *args, num_draft_tokens, **options):
        used.append(num_draft_tokens)
        return step(self, *args, num_draft_tokens=num_draft_tokens, **options)

    monkeypatch.setattr(Slots, "step", recorded)
    return used


@pytest.mark.slow
@pytest.mark.parametrize("of_tree, is_taken", [(1.1, True), (9.0, False)])
def test_an_engine_takes_a_tree_by_its_table(monkeypatch, of_tree, is_taken):
    """The table alone says which chains and trees there are; the tokens are the same as without drafts."""
    used = recorded_steps(monkeypatch)
    logits = np.random.default_rng(0).normal(size=(2, 40, 40)).astype(np.float32)
    target, draft = (testing.bigram_model(jnp.asarray(2 * logits[0] + x)) for x in (0, logits[1]))
    times = StepTimes({1: {0: 1.0, 2: 1.1, 4: of_tree + 0.3, 6: of_tree}})
    drafters = (None, {}), (proposers.draft_model(draft, 2, tree=7, coupled=True), {"step_times": times})
    sizes = {"num_slots": 1, "max_length": 80, "tokenizer": Tokenizer(), "eos_token_ids": (), "capacities": FEW}
    found = []
    for proposer, options in drafters:
        with Engine(target, proposer, verifier=verifiers.match, **sizes, **options) as engine:
            request = engine.submit([5, 6, 7], SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True))
            found.append(request.result(timeout=100).token_ids)
    assert found[0] == found[1]
    chosen = [k for k in used if k is not None]
    num_trees = sum(k > 2 for k in chosen)
    assert set(chosen) == ({2, 4, 6} if is_taken else {2}) and num_trees > (10 if is_taken else -1), chosen


@pytest.mark.slow
@pytest.mark.parametrize("of_budget, is_taken", [(1.05, True), (9.0, False)])
def test_an_engine_takes_a_budget_by_its_table(monkeypatch, of_budget, is_taken):
    """Requests share slots, and their tokens are the same as without drafts."""
    used = recorded_steps(monkeypatch)
    logits = np.random.default_rng(0).normal(size=(2, 40, 40)).astype(np.float32)
    target, draft = (testing.bigram_model(jnp.asarray(2 * logits[0] + x)) for x in (0, logits[1]))
    times = StepTimes({3: {0: 1.0, 2: 1.4, 4: 1.8, 5: of_budget}})
    shared = proposers.within_budget(proposers.draft_model(draft, 4), 1)
    drafters = (None, {}), (shared, {"step_times": times})
    sizes = {"num_slots": 3, "max_length": 80, "tokenizer": Tokenizer(), "eos_token_ids": (), "capacities": FEW}
    found = []
    for proposer, options in drafters:
        with Engine(target, proposer, verifier=verifiers.match, **sizes, **options) as engine:
            engine.wait_for_draft_lengths(timeout=200)
            params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40 + 5 * i, ignore_eos=True) for i in range(5)]
            requests = [engine.submit([5, 6, 7 + i], each) for i, each in enumerate(params)]
            found.append([request.result(timeout=100).token_ids for request in requests])
    assert found[0] == found[1]
    num_shared = sum(k == 5 for k in used)
    assert num_shared > 10 if is_taken else num_shared == 0, used


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [8, 24])
def test_the_seconds_of_steps_contain_the_work_of_the_host(monkeypatch, max_length):
    """Every round waits for a host that is slower than the device, also where sequences end meanwhile."""
    read = Scheduler._read

    def slow(self):
        time.sleep(0.005)
        read(self)

    monkeypatch.setattr(Scheduler, "_read", slow)
    monkeypatch.setattr(step_times, "REPEATS", 1)
    sizes = {"num_slots": 1, "max_length": max_length, "capacities": FEW}
    device = Slots(bigram(0), proposers.ngram(2), draft_lengths=(0, 2), **sizes)
    found = step_times.measure(device, device.step_sizes)
    assert all(seconds >= 0.005 for seconds in found.at(1).values()), found
    assert not np.asarray(device.state.context.active).any()


def test_the_file_of_seconds_is_one_for_each_program():
    """Other features of sampling, and other options of a verifier, take other times."""
    options = {"num_slots": 1, "max_length": 8, "capacities": FEW, "draft_lengths": (0, 2)}
    own = [
        verifiers.rejection,
        Partial(verifiers.rejection, outcomes=True),
        Partial(verifiers.rejection, outcomes=False),
        Partial(verifiers.match, outcomes=True),
        Partial(verifiers.typical, posterior_alpha=0.2),
    ]
    devices = [Slots(bigram(0), proposers.ngram(2), verifier=verifier, **options) for verifier in own]
    names = [step_times._name_of(device, (1,), use) for device in devices for use in (Needs.CUT, Needs.EVERYTHING)]
    assert len(set(names)) == 2 * len(own)


@pytest.mark.slow
def test_the_seconds_of_steps_are_measured_once(tmp_path, monkeypatch, caplog):
    """They are kept in the folder of compiled programs, for these models and sizes."""
    monkeypatch.setattr(step_times, "_known", {})
    monkeypatch.setattr(step_times.compilation_cache, "used_folder", lambda: str(tmp_path))
    sizes = {"num_slots": 2, "max_length": 24, "capacities": FEW, "step_sizes": (1,), "draft_lengths": (0, 2)}
    device = Slots(bigram(0), proposers.ngram(2), **sizes)
    found = step_times.step_times_of(device, device.step_sizes)
    assert {batch: sorted(seconds) for batch, seconds in found.seconds.items()} == {1: [0, 2], 2: [0, 2]}
    assert not np.asarray(device.state.context.active).any()
    (path,) = tmp_path.iterdir()
    assert StepTimes.load(path) == found

    def measure(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(step_times, "measure", measure)
    step_times._known.clear()
    assert step_times.step_times_of(device, device.step_sizes) == found
    other = Slots(bigram(0), proposers.ngram(3), **sizes)
    for each, of_sizes in ((device, (1,)), (other, other.step_sizes)):
        if each is other:
            monkeypatch.setattr(step_times, "__version__", "another")
        with pytest.raises(AssertionError, match="measured again"):
            step_times.step_times_of(each, of_sizes)
    monkeypatch.undo()
    monkeypatch.setattr(step_times, "_known", {})
    monkeypatch.setattr(step_times.compilation_cache, "used_folder", lambda: str(tmp_path))
    path.write_text("{")
    with caplog.at_level("WARNING", "specjax"):
        assert step_times.step_times_of(device, device.step_sizes).seconds.keys() == {1, 2}
    assert "the seconds of steps are measured anew" in caplog.text and StepTimes.load(path)


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="step_times must be None unless num_draft_tokens is 'auto', got 4"):
        LLM(step_times=TIMES)
    with pytest.raises(FileNotFoundError):
        LLM(num_draft_tokens="auto", step_times=tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"that the drafter can make, at most 1, got \[0, 2\]"):
        LLM(draft=proposers.ngram(1), num_draft_tokens="auto", step_times=StepTimes({1: {0: 1.0, 2: 1.0}}))


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"num_draft_tokens": None}, (4, None)),
        ({"num_draft_tokens": None, "step_times": "file"}, ("auto", "file")),
        ({"num_draft_tokens": "auto", "step_times": None}, ("auto", None)),
        ({"num_draft_tokens": 0, "step_times": "file"}, (0, "file")),
    ],
)
def test_commands_choose_by_the_times_that_they_are_given(monkeypatch, tmp_path, given, expected):
    """Where no number is given; `LLM` refuses both."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")
    monkeypatch.setattr("specjax.engine.llm.LLM", lambda model, draft, k, step_times, **options: (k, step_times))
    names = ("model", "draft", "dtype", "max_length", "tensor_parallel", "quantization", "draft_quantization", "tree")
    args = (
        dict.fromkeys((*names, "drafts_per_row", "cache_dtype", "compilation_cache"))
        | {"verifier": "rejection"}
        | given
    )
    assert cli_models.load_llm(Namespace(**args)) == expected


@partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["num_draft_tokens"])
@dataclass(frozen=True)
class Owned:
    """A user's proposer, of which the number of drafts may change."""

    num_draft_tokens: int
    weights: jax.Array

    def propose(self, keys, context, sampling, state):
        raise AssertionError("not reached")

    def with_num_draft_tokens(self, num_draft_tokens, *, may_pause=False):
        return replace(self, num_draft_tokens=num_draft_tokens)


class Fixed:
    """A user's proposer, of which the number of drafts may not change."""

    num_draft_tokens = 4

    def propose(self, keys, context, sampling, state):
        raise AssertionError("not reached")


def test_choices_end_with_the_most_drafts():
    assert choices(proposers.none()) == (0,)
    assert [choices(proposers.ngram(k)) for k in (1, 4, 5, 16)] == [(0, 1), (0, 2, 4), (0, 2, 4, 5), CHOICES]


def test_a_proposer_without_the_method_keeps_its_number():
    with pytest.raises(ValueError, match=r"must be an integer for a draft without .*, got 'auto' and Fixed"):
        LLM(draft=Fixed(), num_draft_tokens="auto")
    with pytest.raises(ValueError, match="must have the method with_num_draft_tokens, got Fixed without it"):
        with_draft_lengths(Fixed(), (0, 4))


@pytest.mark.parametrize(
    "proposer, number, message",
    [
        (proposers.ngram(3), -1, "num_draft_tokens must be an integer >= 0, got -1"),
        (proposers.none(), 1, r"num_draft_tokens must be an integer in \[0, 0\], the trained depth, got 1"),
        (Medusa([None] * 3), 4, r"num_draft_tokens must be an integer in \[0, 3\], the trained depth, got 4"),
        (Medusa([None] * 3), 1.5, "got 1.5"),
    ],
)
def test_bad_numbers(proposer, number, message):
    with pytest.raises(ValueError, match=message):
        proposer.with_num_draft_tokens(number)
