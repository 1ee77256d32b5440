"""The number of drafts chosen from past acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_llm import random_tensors, write_checkpoint

from specjax import LLM, Model, ModelOutput, SamplingParams, decode, proposers, sampling
from specjax.engine.draft_length import CHOICES, BestDraftLength, RecentAcceptance, with_draft_lengths


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


def write_deep_pair(directory, num_layers=8):
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
def test_text_is_that_of_plain_decoding_and_of_a_stream(tmp_path):
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


def test_takes_a_draft_model():
    with pytest.raises(ValueError, match="'auto' takes a draft model, got NGram"):
        LLM(draft="ngram", num_draft_tokens="auto")
