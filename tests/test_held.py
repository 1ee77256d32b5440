"""Features of plain steps that wait for a drafter."""

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_eagle
import test_features
import test_medusa
from paged import random_table

from specjax import Model, proposers
from specjax.engine import held
from specjax.engine.slots import Slots, chunk_at, request
from specjax.proposers.feature_draft import FeatureDraft
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import Capacities, Needs, of_request

K, ROOM = 3, 4
SIZE = heads.SIZE
NONE = Capacities(stop_tokens=1, biases=0, allowed_tokens=0, bad_words=0, logprobs=0)


def toy():
    """A head that is right as long as it has been fed all tokens, each once and with its own feature."""
    target = Model((), test_eagle.toy_target, test_features.cache_of, test_features.VOCAB, takes_pages=True)
    return target, FeatureDraft(test_eagle.ToyHead(), {"embedding": jnp.zeros((1, 1))}, K)


def copying():
    return test_medusa.COPIED, test_medusa.copying_heads(K)


def start(slots, slot, prompt):
    """Feed a prompt, and let it enter a slot."""
    features = slots.no_features
    for begin in range(0, len(prompt), 4):
        (features,), _ = slots.prefill([slot], [chunk_at(prompt, begin, 4, features)])
    params = SamplingParams(temperature=0, max_tokens=SIZE)
    sampling = of_request(params, slots.capacities, (), slots.model.vocab_size)
    slots.insert(slot, request(slots.state, prompt, np.zeros(2, np.uint32), sampling))


@pytest.mark.slow
@pytest.mark.parametrize("make, in_pages", [(toy, True), (copying, False)])
def test_drafts_are_as_good_as_before(monkeypatch, make, in_pages):
    """After any number of plain steps, more than there is room for among them, and beside a request that came later."""
    monkeypatch.setattr(held, "HELD", ROOM)
    target, proposer = make()
    options = {"pool": (32, 4)} if in_pages else {}
    sizes = {"num_slots": 2, "max_length": SIZE, "capacities": NONE, "step_sizes": (1,) if in_pages else ()}
    slots = Slots(target, proposer, draft_lengths=(0, K), **sizes, **options)
    if in_pages:
        slots.set_pages(random_table((2, SIZE // 4), 32))
    fed = []

    def feed(rows):
        fed.append(slots._held.counts.tolist())
        Slots.feed(slots, rows)

    monkeypatch.setattr(slots, "feed", feed)
    text = np.array(test_medusa.own_text(6), np.int32) % target.vocab_size
    start(slots, 1, text)
    active = [1]
    for number, k in enumerate((K, 0, 0, K, 0, 0, 0, 0, 0, K, 0, K, K)):
        if number == 6:
            start(slots, 0, text[:5])
            active = [0, 1]
        before = jax.device_get(slots.state.proposer)
        output = slots.step(Needs.GREEDY, num_draft_tokens=k, rows=slots.rows_of(active))
        if k:
            assert np.asarray(output.num_accepted)[-len(active) :].tolist() == [k] * len(active), number
        elif not (fed and slots._held.counts.max() == 1):  # the step after a full room has fed the drafter
            jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(slots.state.proposer))
    assert fed == [[0 if in_pages else 2, 2], [2, 4], [1, 1], [1, 1]]  # a step of all slots counts vacant ones


def test_where_features_wait():
    target, proposer = toy()
    assert held.may_hold(target, proposer.with_num_draft_tokens(0, may_pause=True))
    for other in (proposers.ngram(2), proposers.fallback(proposers.ngram(2), proposer)):
        assert not held.may_hold(target, other.with_num_draft_tokens(0, may_pause=True))
