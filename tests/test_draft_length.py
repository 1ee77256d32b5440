"""The number of drafts chosen from past acceptance."""

from dataclasses import dataclass, replace
from functools import partial

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_eagle import write_eagle3
from test_engine import FEW, Tokenizer
from test_llm import random_tensors, write_checkpoint

from specjax import LLM, Engine, Model, ModelOutput, SamplingParams, decode, proposers, sampling
from specjax.engine.draft_length import CHOICES, BestDraftLength, RecentAcceptance, choices, with_draft_lengths
from specjax.engine.slots import Slots
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.medusa import Medusa


def apply(params, inputs, cache):
    return ModelOutput(params["table"][inputs.tokens]), cache


def init_cache(batch_size, max_length):
    return ()


def bigram(seed, padding=0):
    table = 1.5 * jax.random.normal(jax.random.key(seed), (3, 3))
    return Model({"table": table, "padding": jnp.zeros(padding)}, apply, init_cache, 3)


def best(accepting):
    return BestDraftLength.of(bigram(0, 1000), proposers.draft_model(bigram(1, 300), 8))(1, accepting.rate)


def test_follows_acceptance():
    recent, nothing = RecentAcceptance(), np.zeros(2, np.int32)
    assert best(recent) in CHOICES[1:]
    for _ in range(48):
        recent.update(np.full(2, 4), np.full(2, 4))
    assert best(recent) == 8

    rejecting = 0
    while best(recent):
        recent.update(np.full(2, best(recent)), nothing)
        rejecting += 1
    assert rejecting <= 48

    plain = 0
    while not best(recent):  # what was seen fades, so drafts get another try
        recent.update(nothing, nothing)
        plain += 1
    assert 1 <= plain <= 64


def test_counts_trials():
    """A rejection is a trial, a draft after one is not."""
    recent = RecentAcceptance()
    recent.update(np.full(3, 4), np.array([0, 1, 4]))
    assert (recent._accepted, recent._trials) == (5, 7)


@pytest.mark.slow
def test_distribution_is_the_targets():
    """Steps whose number of drafts follows acceptance: pairs of tokens have the target's distribution."""
    target, draft, batch_size = bigram(0, 40), proposers.draft_model(bigram(4), 8), 20000
    rows = sampling.batch([SamplingParams(max_tokens=12)] * batch_size)
    recent, choose, proposer = RecentAcceptance(), BestDraftLength.of(target, draft), with_draft_lengths(draft, CHOICES)
    state = decode.prefill(
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
        num_draft_tokens = choose(batch_size, recent.rate)
        used.add(num_draft_tokens)
        state = decode.generate(target, proposer[num_draft_tokens], state, max_steps=1)
        after = jax.tree.map(np.array, state.totals)
        recent.update(after.drafted - before.drafted, after.accepted - before.accepted)
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


def write_deep_pair(directory, num_layers=5):
    """A target with more layers than its draft, so that drafting pays; those after the first one add nothing."""
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
    used, step = [], Slots.step

    def recorded(self, *args, num_draft_tokens, **options):
        used.append(num_draft_tokens)
        return step(self, *args, num_draft_tokens=num_draft_tokens, **options)

    monkeypatch.setattr(Slots, "step", recorded)
    llm = LLM(*write_deep_pair(tmp_path), num_draft_tokens="auto")
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


def test_an_eagle_head_changes_its_drafts_in_an_engine(tmp_path):
    """Greedy tokens stay the same, whatever number of drafts each step has, zero among them."""
    target = heads.make_target((2, 0, 1))
    write_eagle3(tmp_path, target, "authors")
    head = proposers.load(tmp_path, target, num_draft_tokens=3)
    choose = Steps(3, 0, 1, 0, 0, 3)
    prompts = [np.random.default_rng(i).integers(0, heads.VOCAB, 5 + i).tolist() for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    sizes = {"num_slots": 2, "max_length": 40, "tokenizer": Tokenizer(), "eos_token_ids": (), "capacities": FEW}
    found = []
    for options in ({}, {"proposer": head, "draft_lengths": (0, 1, 3), "choose_draft_length": choose}):
        with Engine(target, **options, **sizes) as engine:
            requests = [engine.submit(prompt, params) for prompt in prompts]
            results = [request.result(timeout=100) for request in requests]
            found.append([result.token_ids for result in results])
    assert found[0] == found[1]
    assert sum(result.metrics.num_drafted for result in results) > 0


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: proposers.ngram(3), {0: 1, 2: 1, 3: 1}),
        (lambda: proposers.draft_model(bigram(1, 91), 3), {0: 1, 2: 3, 3: 4}),
        (lambda: proposers.fallback(proposers.ngram(3), proposers.draft_model(bigram(1, 91), 2)), {0: 1, 2: 3, 3: 3}),
        (
            lambda: proposers.medusa([{"blocks": [], "head": jnp.zeros((3, 25))}] * 3, vocab_size=3),
            {0: 1, 2: 2.5, 3: 3.25},
        ),
        (
            lambda: FeatureDraft(None, {"embedding": 7, "fc": jnp.zeros(50), "lm_head": jnp.zeros(25)}, 3),
            {0: 1, 2: 2, 3: 2.75},
        ),
        (lambda: Owned(3, jnp.zeros(50)), {0: 1.5, 2: 1.5, 3: 1.5}),
    ],
    ids=["ngram", "draft_model", "fallback", "medusa", "feature_draft", "user"],
)
def test_costs_are_the_weights_that_are_read(make, expected):
    """As a share of the target, which has 100 numbers."""
    assert BestDraftLength.of(bigram(0, 91), make(), (0, 2, 3)).step_costs == expected


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
