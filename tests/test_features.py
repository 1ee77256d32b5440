"""A toy head on features, whose drafts are right only if no feature that it was given is stale.

The target's features are a state r[s] = (5 r[s-1] + token[s] + 1) mod 97. The head keeps r[s], made of feature s-1 and
token s, in slot s of its cache. The next token of both is a sum over all slots that they hold, so that one
stale or misplaced number shows in every draft from there on.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import random_table

from specjax import decode, prompts, sampling
from specjax.pages import Pages, read_slots, write_slots
from specjax.sampling import SamplingParams
from specjax.types import NO_PAGE, Draft, Memory, Model, ModelInput, ModelOutput

VOCAB, MODULUS = 31, 97
PAGE_SIZE, MAX_LENGTH = 4, 48
LENGTHS, MAX_TOKENS = np.array([13, 1, 22, 6, 22]), (17, 30, 20, 5, 26)


def advance(state, token):
    return (5 * state + token + 1) % MODULUS


def next_token(held, length):
    """The token that follows `length` [B, T] tokens, by a sum over the slots [B, S] before it."""
    slot = jnp.arange(held.shape[1])[None, None]
    return jnp.sum(jnp.where(slot < length[..., None], held[:, None] * (slot + 1), 0), axis=-1) % VOCAB


def cache_of(num_pages, page_size):
    return jnp.zeros((num_pages, page_size), jnp.int32)


def apply(params, inputs, cache):
    slots = inputs.positions
    before = jnp.pad(read_slots(cache, inputs.pages), ((0, 0), (1, 0)))
    state = jnp.take_along_axis(before, slots[:, :1], axis=1, mode="clip")[:, 0]

    def body(state, token):
        state = advance(state, token)
        return state, state

    states = jnp.moveaxis(jax.lax.scan(body, state, jnp.moveaxis(inputs.tokens, 1, 0))[1], 0, 1)
    cache = write_slots(cache, slots, states, inputs.pages)
    tokens = next_token(read_slots(cache, inputs.pages), slots + 1)
    return ModelOutput(10.0 * jax.nn.one_hot(tokens, VOCAB), {"state": states}), cache


TARGET = Model((), apply, cache_of, VOCAB, takes_pages=True)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_draft_tokens", "period"])
@dataclass(frozen=True)
class Head:
    """Drafts the target's own tokens; where `period` divides the length, the second draft is another token."""

    num_draft_tokens: int = 3
    period: int = 3
    takes_pages = True

    def init_memory(self, batch_size, num_pages, page_size):
        return Memory(cache_of(num_pages, page_size))

    def prefill(self, inputs, following, previous, features, state):
        before = jnp.concatenate([previous["state"][:, None], features["state"][:, :-1]], axis=1)
        return Memory(write_slots(state.pools, inputs.positions, advance(before, inputs.tokens), inputs.pages))

    def propose(self, keys, context, sampling, state):
        held = read_slots(state.pools, context.pages)
        length, tokens = context.length[:, None], []
        for i in range(self.num_draft_tokens):
            token = next_token(held, length + i)
            last = jnp.take_along_axis(held, length + i - 1, axis=1, mode="clip")
            held = write_slots(held, length + i, advance(last, token))
            tokens.append(token)
        is_wrong = context.length % self.period == 0
        tokens[1] = jnp.where(is_wrong[:, None], (tokens[1] + 1) % VOCAB, tokens[1])
        return Draft(jnp.where(context.active[:, None], jnp.concatenate(tokens, axis=1), -1)), state

    def update(self, context, verified, features, state):
        index = jnp.arange(verified.tokens.shape[1])[None]
        is_kept = context.active[:, None] & (index <= verified.num_accepted[:, None])
        slots = jnp.where(is_kept, context.length[:, None] + index, NO_PAGE)
        values = advance(features["state"], verified.tokens)
        return Memory(write_slots(state.pools, slots, values, context.pages))


prefill = jax.jit(decode.prefill, static_argnames=("max_length", "chunk_size"))
step = jax.jit(decode.step)


def states_of(tokens):
    state, states = 0, []
    for token in tokens:
        state = advance(state, token)
        states.append(state)
    return states


def check(state, table=None):
    """The caches of target and head equal caches that are computed from the tokens of each row from scratch."""
    context = jax.device_get(state.context)
    for name, cache, end in (("target", state.cache.pools, 1), ("head", state.proposer.pools, 0)):
        held = np.asarray(read_slots(cache, None if table is None else jnp.asarray(table)))
        for b, length in enumerate(context.length.tolist()):
            expected = states_of(context.tokens[b, : length - end].tolist())
            if context.active[b]:
                assert held[b, : length - end].tolist() == expected, (name, b)


def decode_all(state, table=None):
    """Step until all rows have ended; every draft that is not wrong on purpose must be accepted."""
    head, kinds, cut = Head(), set(), 0
    while state.context.active.any():
        before = jax.device_get(state.context)
        ended = [] if table is None else np.setdiff1d(np.arange(len(state.cache.pools)), table[before.active])
        pools = [np.asarray(memory.pools)[ended] for memory in (state.cache, state.proposer)]
        state, info = step(TARGET, head, state)
        planned = np.where(before.length % head.period == 0, 1, head.num_draft_tokens)
        assert (np.asarray(info.num_accepted)[before.active] == planned[before.active]).all()
        check(state, table)
        for memory, expected in zip((state.cache, state.proposer), pools, strict=True):
            np.testing.assert_array_equal(np.asarray(memory.pools)[ended], expected)
        kinds |= set(planned[before.active].tolist())
        cut += int((~np.asarray(state.context.active) & before.active).sum())
    assert kinds == {1, head.num_draft_tokens} and cut == len(before.active)
    return state


def start(ids, lengths=LENGTHS, max_tokens=MAX_TOKENS, **options):
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=n) for n in max_tokens])
    given = TARGET, Head(), jnp.asarray(ids), jnp.asarray(lengths), params, jax.random.key(0)
    return prefill(*given, max_length=MAX_LENGTH, **options)


def some_prompts():
    ids = np.random.default_rng(0).integers(0, VOCAB, (5, 22)).astype(np.int32)
    ids[4, :18] = ids[2, :18]
    return ids


def whole(ids, lengths=LENGTHS):
    """Tokens of each row, decoded one by one in plain Python."""
    rows = []
    for row, length, count in zip(ids, lengths, MAX_TOKENS, strict=True):
        tokens = row[:length].tolist()
        for _ in range(count):
            held = states_of(tokens)
            tokens.append(sum(r * (i + 1) for i, r in enumerate(held)) % VOCAB)
        rows.append(tokens)
    return rows


def assert_decodes(state, expected, table=None):
    check(state, table)
    context = jax.device_get(decode_all(state, table).context)
    assert [row[:n].tolist() for row, n in zip(context.tokens, context.length, strict=True)] == expected


@pytest.fixture
def small_calls(monkeypatch):
    """Calls of so few tokens that every group has two rows."""
    monkeypatch.setattr(prompts, "BUDGET", 11)


@pytest.mark.parametrize("in_pages", [False, True])
def test_no_feature_is_stale(small_calls, in_pages):
    """Prompts of several chunks in groups of rows, accepted and rejected drafts, and rows that end."""
    ids, table, paged = some_prompts(), None, None
    if in_pages:
        table = random_table((5, MAX_LENGTH // PAGE_SIZE), 80)
        table[4, :4] = table[2, :4]
        paged = Pages(jnp.asarray(table), 80, PAGE_SIZE)
    assert_decodes(start(ids, chunk_size=5, pages=paged), whole(ids), table)


def test_a_prompt_starts_after_a_shared_prefix():
    """Row 4 begins with the second chunk: the first is in the pages of row 2, and its last feature is `previous`."""
    ids, size, head = some_prompts(), 8, Head()
    table = random_table((5, MAX_LENGTH // PAGE_SIZE), 80)
    table[4, :4] = table[2, :4]
    state = start(ids, pages=Pages(jnp.asarray(table), 80, PAGE_SIZE))
    kept = prompts.Fed(*jax.tree.map(jnp.zeros_like, (state.cache, state.proposer)), None)
    feed = jax.jit(prompts.feed_chunk)
    last, shared = None, None
    for b, first in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 16)):
        last = shared if first else None
        for begin in range(first, int(LENGTHS[b]), size):
            tokens = np.zeros((1, size), np.int32)
            fed = ids[b, begin : min(begin + size, LENGTHS[b])]
            tokens[0, : len(fed)] = fed
            inputs = ModelInput(
                jnp.asarray(tokens),
                begin + jnp.arange(size)[None],
                pages=jnp.asarray(table[b : b + 1]),
                num_tokens=jnp.array([len(fed)]),
                rows=jnp.array([b]),
            )
            kept, last = feed(TARGET, head, inputs, jnp.full((1, size), -1), last, kept)
            if (b, begin) == (2, 8):
                shared = last
    assert_decodes(state._replace(cache=kept.cache, proposer=kept.proposer), whole(ids), table)


def test_samples_of_a_prompt():
    """Rows of one prompt, whose pages are shared or copied, go on by themselves."""
    ids, rows = some_prompts(), np.array([2, 0, 2, 0, 2])
    table = random_table((5, MAX_LENGTH // PAGE_SIZE), 80)
    table[2, :5], table[4, :2] = table[0, :5], table[0, :2]
    paged = Pages(jnp.asarray(table), 80, PAGE_SIZE)
    state = start(ids, rows=jnp.asarray(rows), pages=paged, chunk_size=8)
    assert_decodes(state, whole(ids[rows], LENGTHS[rows]), table)


@pytest.mark.parametrize("what", ["previous", "features"])
def test_a_stale_feature_shows(what):
    """The toy itself: it must find a stale feature."""

    class Stale(Head):
        def prefill(self, inputs, following, previous, features, state):
            if what == "previous":
                previous = jax.tree.map(jnp.zeros_like, previous)
            else:
                features = jax.tree.map(lambda x: x.at[:, 2].set(0), features)
            return super().prefill(inputs, following, previous, features, state)

    jax.tree_util.register_dataclass(Stale, [], ["num_draft_tokens", "period"])
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=n) for n in MAX_TOKENS])
    state = decode.prefill(
        TARGET, Stale(), some_prompts(), LENGTHS, params, jax.random.key(0), max_length=MAX_LENGTH, chunk_size=8
    )
    with pytest.raises(AssertionError, match="head"):
        check(state)
