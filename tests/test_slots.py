"""Slots of a batch: whatever enters and leaves in whatever order, each request gets the tokens it gets alone."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import one_of
from paged import poisoned

from specjax import decode, proposers, sampling
from specjax.engine import slots as engine
from specjax.engine.pages import PageTables
from specjax.engine.slots import Slots, chunk_at, request
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import CUT, EVERYTHING, GREEDY, Capacities, neutral, of_request, restrict, use_of
from specjax.types import Context

VOCAB, LONGEST, MAX_LENGTH, NUM_SLOTS, CHUNK, PAGE_SIZE, NUM_PAGES = 31, 20, 36, 3, 8, 4, 30
CONFIG = DecoderConfig(VOCAB, 16, 1, 2, 1, 8, 16, 128)
EOS = (5,)


def halve_token_3(logits, context):
    return logits.at[3].multiply(0.5)


def lift_the_last_token(logits, context):
    return logits.at[context.tokens[context.length - 1]].add(1)


CAPACITIES = Capacities(
    stop_tokens=4,
    biases=3,
    allowed_tokens=20,
    bad_words=2,
    bad_word_length=3,
    logprobs=3,
    logits_processors=(halve_token_3, lift_the_last_token),
)
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(
        temperature=0.8,
        min_tokens=1,
        stop_token_ids=(7, 9, 11),
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={3: 1.5, 4: -2},
        bad_words=((8, 2), (1,)),
        logits_processors=(lift_the_last_token,),
    ),
)

prefill = jax.jit(decode.prefill, static_argnames=("max_length", "num_logprobs"))


def make(seed):
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, seed)))


@pytest.fixture(scope="module")
def target():
    return make(0)


@pytest.fixture(scope="module")
def draft():
    return make(1)


def make_proposer(name, draft):
    return {"draft_model": proposers.draft_model(draft, 3), "ngram": proposers.ngram(3), "none": None}[name]


@dataclass
class Job:
    """A request, and how far it has come."""

    prompt: np.ndarray
    params: SamplingParams
    key: np.ndarray
    row: sampling.Sampling = None
    generated: list[int] = field(default_factory=list)
    totals: Any = None
    finished: int = decode.RUNNING
    num_evictions: int = 0
    fed: int = 0  # number of its tokens that are in the cache
    previous: Any = None
    pages: Any = None
    is_active: bool = False

    def __post_init__(self):
        self.row = of_request(self.params, CAPACITIES, EOS, VOCAB)

    @property
    def tokens(self):
        return np.concatenate([self.prompt, np.array(self.generated, np.int32)])


def some_jobs(number, seed=0):
    """Prompts of all lengths, some with a common beginning, of three kinds of parameters."""
    rng, jobs = np.random.default_rng(seed), []
    common = rng.integers(0, VOCAB, LONGEST).astype(np.int32)
    for i in range(number):
        prompt = rng.integers(0, VOCAB, rng.integers(1, LONGEST + 1)).astype(np.int32)
        if i % 3 == 0:
            prompt = np.concatenate([common[:16], prompt[:4]])
        params = replace(KINDS[i % 3], max_tokens=int(rng.integers(2, 22)))
        jobs.append(Job(prompt, params, rng.integers(0, 2**32, 2, dtype=np.uint32)))
    return jobs


def alone(target, proposer, verifier, job, num_logprobs=None):
    """The last state of `specjax.generate` of the request in a batch of its own."""
    prompt = np.zeros((1, LONGEST), np.int32)
    prompt[0, : len(job.prompt)] = job.prompt
    params = sampling.batch([job.params], EOS, VOCAB)
    keys = jax.random.wrap_key_data(job.key[None], impl="threefry2x32")
    given = target, proposer, prompt, np.array([len(job.prompt)]), params, keys
    state = prefill(*given, max_length=MAX_LENGTH, num_logprobs=num_logprobs)
    return decode.generate(target, proposer, state, verifier=verifier)


def assert_as_alone(target, proposer, verifier, job):
    state = alone(target, proposer, verifier, job)
    length = int(state.context.length[0])
    assert job.generated == np.asarray(state.context.tokens)[0, len(job.prompt) : length].tolist()
    assert job.finished == int(state.finished[0])
    jax.tree.map(np.testing.assert_array_equal, job.totals, jax.tree.map(lambda x: np.asarray(x)[0], state.totals))


class Host:
    """What a host does, at random: admit, feed a chunk, step, evict and admit again."""

    def __init__(self, slots, jobs, seed, pages=True):
        self.slots, self.rng, self.jobs = slots, np.random.default_rng(seed), list(jobs)
        self.waiting, self.slot_of = list(jobs), {}
        self.num_drafts = slots.proposer.num_draft_tokens
        self.tables = None
        if pages:
            self.tables = PageTables(NUM_PAGES, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
        self.num_steps = 0

    def run(self):
        while self.waiting or self.slot_of:
            vacant = sorted(set(range(NUM_SLOTS)) - set(self.slot_of))
            if self.waiting and vacant and self.rng.random() < 0.6:
                self.admit(self.waiting.pop(0), int(self.rng.choice(vacant)))
            for slot, job in list(self.slot_of.items()):
                if not job.is_active and self.rng.random() < 0.7:
                    self.feed(slot, job)
            self.step()
            running = [slot for slot, job in self.slot_of.items() if job.is_active]
            if self.num_steps % 3 == 0 and running:
                slot = int(self.rng.choice(running))
                job = self.slot_of[slot]
                self.leave([slot])
                job.num_evictions += 1
                self.waiting.insert(int(self.rng.integers(len(self.waiting) + 1)), job)

    def admit(self, job, slot):
        job.fed, job.previous, job.is_active = 0, self.slots.no_features, False
        if self.tables is not None:
            job.pages = self.tables.insert(job.tokens, len(job.tokens))
            if job.pages is None:
                self.waiting.insert(0, job)
                return
            job.fed = job.pages.num_cached_tokens
            job.previous = job.previous if job.pages.value is None else job.pages.value
        self.slot_of[slot] = job

    def feed(self, slot, job):
        tokens = job.tokens
        with self.only_writes_to([slot], lambda job: job.fed):
            self.place()
            job.previous = self.slots.prefill(slot, chunk_at(tokens, job.fed, CHUNK, job.previous))
        job.fed += CHUNK
        if self.tables is not None and job.fed <= len(tokens):
            self.tables.register(job.pages, job.fed, job.previous)
        if job.fed >= len(tokens):
            sizes = {"max_length": MAX_LENGTH, "num_draft_tokens": self.num_drafts}
            given = {"prompt_length": len(job.prompt), "totals": job.totals}
            self.slots.insert(slot, request(tokens, job.key, job.row, **sizes, **given))
            job.is_active = True

    def step(self):
        active = {slot: job for slot, job in self.slot_of.items() if job.is_active}
        if not active:
            return
        for job in active.values():
            if self.tables is not None:
                most = min(len(job.tokens) + self.num_drafts + 1, MAX_LENGTH)
                assert self.tables.ensure(job.pages, most), "the pool is large enough"
        use = max(use_of(job.row) for job in active.values())
        use = int(self.rng.integers(use, EVERYTHING + 1))
        with self.only_writes_to(active, lambda job: max(len(job.tokens) - 2, 0)):
            self.place()
            output = jax.device_get(self.slots.step(use))
        self.num_steps += 1
        vacant = sorted(set(range(NUM_SLOTS)) - set(active))
        assert (output.tokens[vacant] == -1).all() and not output.num_accepted[vacant].any()
        assert (output.length[vacant] == MAX_LENGTH).all() and not output.finished[vacant].any()
        for slot, job in active.items():
            job.generated += [token for token in output.tokens[slot].tolist() if token >= 0]
            assert output.length[slot] == len(job.tokens)
            job.finished = int(output.finished[slot])
            job.totals = jax.tree.map(lambda x, slot=slot: x[slot], output.totals)
        self.leave([slot for slot, job in active.items() if job.finished != decode.RUNNING])

    def leave(self, slots):
        if slots:
            self.slots.evict(slots)
        for slot in slots:
            job = self.slot_of.pop(slot)
            if self.tables is not None:
                self.tables.free(job.pages)

    def place(self):
        """Send the tables, also those of rows that are not active yet."""
        if self.tables is not None:
            table = np.full((NUM_SLOTS, self.tables.pages_per_row), NUM_PAGES, np.int32)
            for slot, job in self.slot_of.items():
                table[slot] = job.pages.table
            self.slots.set_pages(table)

    def only_writes_to(self, slots, first):
        """Compare before and after a call what it must not write, where each row may write from slot `first` on."""
        return Guard(self, slots, first)


class Guard:
    def __init__(self, host, slots, first):
        self.host, self.slots = host, list(slots)
        if host.tables is not None:
            tables = [host.slot_of[slot].pages.table[first(host.slot_of[slot]) // PAGE_SIZE :] for slot in self.slots]
            pages = np.concatenate(tables)
            self.own = pages[pages < NUM_PAGES]

    def kept(self):
        """Pages of others, or rows of others in a dense cache."""
        state = self.host.slots.state
        leaves = [np.array(leaf) for leaf in jax.tree.leaves((state.cache, state.proposer)) if leaf.ndim > 2]
        if self.host.tables is not None:
            return [np.delete(leaf, self.own, axis=0) for leaf in leaves]
        # Steps write the last two slots of a vacant row.
        return [np.delete(leaf, self.slots, axis=0)[:, : MAX_LENGTH - 2] for leaf in leaves]

    def __enter__(self):
        self.before = self.kept()

    def __exit__(self, *error):
        if error[0] is None:
            for before, after in zip(self.before, self.kept(), strict=True):
                np.testing.assert_array_equal(before, after)


def filled(state, value):
    """The caches full of a number, as other requests may leave them."""
    caches = jax.tree.map(
        lambda x: jnp.full_like(x, value) if jnp.issubdtype(x.dtype, jnp.floating) else x, (state.cache, state.proposer)
    )
    return state._replace(cache=caches[0], proposer=caches[1])


def run_and_compare(target, proposer, verifier, in_pages, *, num_jobs=9, seed=0):
    pool = (NUM_PAGES, PAGE_SIZE) if in_pages else None
    sizes = {"num_slots": NUM_SLOTS, "max_length": MAX_LENGTH, "capacities": CAPACITIES, "pool": pool}
    slots = Slots(target, proposer, verifier=verifier, **sizes)
    slots.state = filled(slots.state, np.nan if in_pages else 100)
    host = Host(slots, some_jobs(num_jobs, seed), seed, in_pages)
    host.run()
    assert sum(job.num_evictions for job in host.jobs) > num_jobs // 3
    assert max(job.num_evictions for job in host.jobs) > 1
    if in_pages:
        host.tables.check()
        stats = host.tables.stats()
        assert stats.num_used == 0 and stats.num_hit_tokens > 0
    for job in host.jobs:
        assert_as_alone(target, proposer, verifier, job)
    assert {job.finished for job in host.jobs} == {decode.STOP, decode.MAX_TOKENS, decode.BUFFER_FULL}
    if proposer is not None:
        assert sum(int(job.totals.accepted) for job in host.jobs) > 0


FAST = [("draft_model", "rejection", True), ("ngram", "match", False)]
SLOW = [("draft_model", "block", False), ("none", "rejection", True), ("ngram", "block", True)]
SLOW += [("draft_model", "match", True), ("none", "match", False), ("ngram", "rejection", False)]


@pytest.mark.parametrize("name, verifier, in_pages", [*FAST, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)])
def test_any_schedule_gives_each_request_its_tokens(target, draft, name, verifier, in_pages):
    """Dense caches are those of a model that takes no pages."""
    models = target, draft
    if not in_pages:
        models = [replace(model, takes_pages=False) for model in models]
    run_and_compare(models[0], make_proposer(name, models[1]), one_of(verifier), in_pages)
