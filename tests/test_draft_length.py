"""The number of drafts chosen from past acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_llm import random_tensors, write_checkpoint

from specjax import LLM, Model, ModelOutput, SamplingParams, decode, metrics, proposers, sampling
from specjax.engine.draft_length import CHOICES, DraftLength


def apply(params, inputs, cache):
    return ModelOutput(params["table"][inputs.tokens]), cache


def init_cache(batch_size, max_length):
    return ()


def bigram(seed, padding=0):
    table = 1.5 * jax.random.normal(jax.random.key(seed), (3, 3))
    return Model({"table": table, "padding": jnp.zeros(padding)}, apply, init_cache, 3)


def after(totals, num_drafts, num_accepted, steps):
    """Totals after steps in which each row had so many drafts and accepted so many of them."""
    batch_size = totals.steps.shape[0]
    counts = (jnp.full(batch_size, n) for n in (num_drafts, num_accepted, num_accepted + 1))
    counts = (*counts, jnp.ones(batch_size, bool))
    for _ in range(steps):
        totals = metrics.update(totals, *counts)
    return totals


def test_follows_acceptance():
    choice = DraftLength(bigram(0, 1000), proposers.draft_model(bigram(1, 300), 8), 2)
    totals = metrics.zeros(2, max(CHOICES))
    first = choice.num_draft_tokens
    assert first in CHOICES[1:]
    assert choice.proposer.num_draft_tokens == first

    for _ in range(6):
        totals = after(totals, choice.num_draft_tokens, choice.num_draft_tokens, steps=8)
        choice.update(jax.tree.map(np.asarray, totals))
    assert choice.num_draft_tokens == 8

    rejecting = 0
    while choice.num_draft_tokens:
        totals = after(totals, choice.num_draft_tokens, 0, steps=8)
        choice.update(jax.tree.map(np.asarray, totals))
        rejecting += 1
    assert rejecting <= 6
    assert choice.proposer.num_draft_tokens == 0

    plain = 0
    while not choice.num_draft_tokens:  # what was seen fades, so drafts get another try
        totals = after(totals, 0, 0, steps=8)
        choice.update(jax.tree.map(np.asarray, totals))
        plain += 1
    assert 1 <= plain <= 8


def test_counts_trials():
    """A rejection is a trial, a draft behind one is not."""
    choice = DraftLength(bigram(0, 1000), proposers.draft_model(bigram(1, 300), 8), 3)
    num_drafts = choice.num_draft_tokens
    totals = metrics.zeros(3, max(CHOICES))
    accepted = jnp.array([0, 1, num_drafts])
    totals = metrics.update(totals, jnp.full(3, num_drafts), accepted, accepted + 1, jnp.ones(3, bool))
    choice.update(jax.tree.map(np.asarray, totals))
    assert (choice._accepted, choice._trials) == (1 + num_drafts, 1 + 2 + num_drafts)


def test_distribution_is_the_targets():
    """Chunks of one step whose number of drafts follows acceptance: pairs of tokens have the target's distribution."""
    target, draft, batch_size = bigram(0, 40), proposers.draft_model(bigram(4), 8), 20000
    rows = sampling.batch([SamplingParams(max_tokens=12)] * batch_size)
    choice = DraftLength(target, draft, batch_size)
    state = decode.prefill(
        target,
        draft,
        jnp.zeros((batch_size, 1), jnp.int32),
        jnp.ones(batch_size, jnp.int32),
        rows,
        jax.random.key(5),
        max_length=13,
    )
    used = set()
    while bool(state.context.active.any()):
        used.add(choice.num_draft_tokens)
        state = decode.generate(target, choice.proposer, state, max_steps=1)
        choice.update(jax.tree.map(np.array, state.totals))
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
    """A target with more layers than its draft, so that drafting pays; those behind the first one add nothing."""
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
    for prompt in prompts:  # a row a call: generate and stream share what is compiled for each number of drafts
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
