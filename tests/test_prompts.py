"""Prompts in chunks: the tokens and number of the calls, and that a prompt may begin at any chunk."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh
from paged import random_table

from specjax import decode, prompts, proposers, sampling, testing
from specjax.decoding import log_probs
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.pages import Pages
from specjax.sampling import SamplingParams
from specjax.types import Context, ModelInput

VOCAB, MAX_LENGTH, PAGE_SIZE = 61, 32, 4
LENGTHS = np.array([5, 1, 22, 6, 22])
CONFIG = DecoderConfig(VOCAB, 16, 1, 2, 1, 8, 16, 64)
STATIC = ("max_length", "chunk_size", "num_logprobs", "prompt_logprobs")


def model(seed):
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, seed)))


def some_prompts():
    ids = np.random.default_rng(0).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    ids[4, :16] = ids[2, :16]
    return ids


def start(target, proposer, prefill=decode.prefill, **options):
    params = sampling.batch([SamplingParams(max_tokens=4)] * len(LENGTHS))
    given = target, proposer, some_prompts(), LENGTHS, params, jax.random.key(0)
    return prefill(*given, max_length=MAX_LENGTH, **options)


def table():
    """Rows 2 and 4 share 16 tokens."""
    table = random_table((len(LENGTHS), MAX_LENGTH // PAGE_SIZE), 60)
    table[4, :4] = table[2, :4]
    return table


@pytest.mark.parametrize("takes_pages", [True, False])
def test_short_rows_do_not_pay_for_long_ones(monkeypatch, takes_pages):
    """Two rows of 22 tokens are fed in five calls of five, rows of 6 and 5 in two, the row of 1 in one."""
    monkeypatch.setattr(prompts, "BUDGET", 11)
    calls = []
    bigram = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))

    def apply(params, inputs, cache):
        num_rows = len(inputs.tokens)
        jax.debug.callback(lambda first: calls.append((int(first), num_rows)), inputs.positions[0, 0], ordered=True)
        return bigram.apply(params, inputs, cache)

    start(replace(bigram, apply=apply, takes_pages=takes_pages), None, chunk_size=5)
    jax.effects_barrier()
    in_groups = [(5 * i, 2) for count in (5, 2, 1) for i in range(count)]
    assert calls == (in_groups if takes_pages else [(5 * i, 5) for i in range(5)])


@pytest.mark.parametrize(
    "platform, num_rows, width, expected",
    [
        ("cpu", 1, 5000, (1, 256)),
        ("gpu", 1, 5000, (1, 5000)),
        ("gpu", 1, 8200, (1, 4160)),
        ("gpu", 4, 512, (4, 512)),
        ("gpu", 4, 5000, (1, 1728)),
        ("gpu", 32, 5000, (8, 256)),
        ("cpu", 20, 5000, (7, 256)),
    ],
)
def test_shapes_of_calls(monkeypatch, platform, num_rows, width, expected):
    """About 2048 tokens of many prompts, some of each. On a GPU a few prompts have more each, in equal calls."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    bigram, seen = testing.bigram_model(jnp.zeros((VOCAB, VOCAB))), set()

    def apply(params, inputs, cache):
        seen.add(inputs.tokens.shape)
        return bigram.apply(params, inputs, cache)

    def feed(ids, lengths):
        context = Context(ids, lengths, lengths > 0)
        return prompts.feed(replace(bigram, apply=apply), proposers.none(), context, (), ())

    jax.eval_shape(feed, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_rows, width), (num_rows,))))
    assert seen == {expected}


@pytest.mark.parametrize("num_devices, expected", [(1, 4), (2, 64)])
def test_rows_on_several_devices_are_fed_together(num_devices, expected):
    """A call with some of the rows would leave the other devices without work."""
    mesh, widths = AbstractMesh((num_devices,), ("data",), (AxisType.Auto,)), []
    bigram = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))

    def apply(params, inputs, cache):
        widths.append(len(inputs.tokens))
        return bigram.apply(params, inputs, cache)

    def feed(ids, lengths):
        own = replace(bigram, apply=apply)
        return prompts.feed(own, proposers.none(), Context(ids, lengths, lengths > 0), (), (), chunk_size=512)

    by_row = NamedSharding(mesh, PartitionSpec("data"))
    with use_abstract_mesh(mesh):
        jax.eval_shape(feed, *(jax.ShapeDtypeStruct(x, jnp.int32, sharding=by_row) for x in ((64, 512), (64,))))
    assert widths == [expected]


@pytest.mark.parametrize(
    "in_pages, takes_pages",
    [
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_and_groups_change_nothing(monkeypatch, in_pages, takes_pages):
    """One call with all rows and tokens gives the same caches, log-probabilities and proposer's state."""
    target, proposer = model(0), proposers.draft_model(replace(model(1), takes_pages=takes_pages), 2)
    options = {"num_logprobs": 2, "prompt_logprobs": True}
    expected = start(target, proposer, jax.jit(decode.prefill, static_argnames=STATIC), **options)
    monkeypatch.setattr(prompts, "BUDGET", 15)
    paged = Pages(jnp.asarray(table()), 60, PAGE_SIZE) if in_pages else None
    prefill = jax.jit(lambda *given, **rest: decode.prefill(*given, **rest), static_argnames=STATIC)
    state = start(target, proposer, prefill, chunk_size=5, pages=paged, **options)
    assert expected.log_probs.top_ids.tolist() == state.log_probs.top_ids.tolist()
    assert expected.log_probs.chosen[2].any()
    for name in ("chosen", "top"):
        np.testing.assert_allclose(getattr(state.log_probs, name), getattr(expected.log_probs, name), atol=1e-5)
    assert state.proposer.rows[1].tolist() == LENGTHS.tolist()
    # The caches of models without pages are rows of a memory, and the others pools.
    caches = ((s.cache.pools, s.proposer.pools, s.proposer.rows[0]) for s in (state, expected))
    for leaf, other in zip(*map(jax.tree.leaves, caches), strict=True):
        leaf = np.asarray(leaf)[table()].reshape(other.shape) if in_pages else leaf
        for b, length in enumerate(LENGTHS):
            np.testing.assert_allclose(leaf[b, :length], other[b, :length], atol=1e-5)


@pytest.mark.slow
def test_a_prompt_may_begin_at_any_chunk():
    """After a shared prefix everything equals the run of the whole prompt, to the bit."""
    target, proposer, size = model(0), proposers.draft_model(model(1), 2), 8
    feed, ids = jax.jit(prompts.feed_chunk), some_prompts()

    def run(shared, first):
        """Feed rows 2 and 4; row 4 from the chunk `first` on."""
        pages = table()
        if not shared:
            pages[4] = np.setdiff1d(np.arange(60), pages)[: pages.shape[1]]
        memories = (each.init_memory(5, 60, PAGE_SIZE) for each in (target, proposer))
        kept, features = prompts.Fed(*memories, log_probs.zeros(5, MAX_LENGTH, 1)), {}
        for b, begin in ((2, 0), (4, first)):
            last = features[2, begin - size] if begin else None
            for start in range(begin, 22, size):
                fed = np.pad(ids[b, start : start + size + 1], (0, max(0, start + size + 1 - 22)), constant_values=-1)
                inputs = ModelInput(
                    jnp.maximum(fed[None, :-1], 0),
                    jnp.arange(start, start + size)[None],
                    pages=jnp.asarray(pages[b : b + 1]),
                    num_tokens=jnp.array([min(size, 22 - start)]),
                    rows=jnp.array([b]),
                )
                kept, last = feed(target, proposer, inputs, jnp.asarray(fed[None, 1:]), last, kept)
                features[b, start] = last
        leaves = [np.asarray(leaf)[pages[4]] for leaf in jax.tree.leaves((kept.cache.pools, kept.proposer.pools))]
        leaves = [leaf.reshape(-1, *leaf.shape[2:])[:22] for leaf in leaves]
        return leaves, kept.proposer.rows[1], features[4, 16], kept.log_probs

    whole, split = run(False, 0), run(True, 16)
    buffers = whole[-1], split[-1]
    jax.tree.map(np.testing.assert_array_equal, split[:-1], whole[:-1])
    assert split[1].tolist() == [0, 0, 22, 0, 22]
    for name in ("chosen", "top", "top_ids"):
        one, other = (np.asarray(getattr(buffer, name))[4, 17:] for buffer in buffers)
        np.testing.assert_array_equal(one, other)
    assert buffers[1].chosen[4, 17:22].all() and not buffers[1].chosen[4, :17].any()
