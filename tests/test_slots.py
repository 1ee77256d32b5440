"""Slots of a batch: whatever enters and leaves in whatever order, each request gets the tokens it gets alone."""

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations

from specjax import decode, keys, proposers, sampling, verifiers
from specjax.engine.grammars import GrammarTables
from specjax.engine.pages import PageTables
from specjax.engine.slot_rows import empty, request
from specjax.engine.slots import MIXED_USE, Slots, chunk_at
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.proposers.drawing import reduced_vocabulary
from specjax.proposers.feature_draft import feature_draft
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import Capacities, Needs, keep_only, needs_of, of_request
from specjax.sampling.guided import Grammar
from specjax.types import Context

VOCAB, LONGEST, MAX_LENGTH, NUM_SLOTS, CHUNK, PAGE_SIZE, NUM_PAGES = 31, 20, 28, 3, 8, 4, 30
SHORT = 2, 4  # tiles, and tokens of a tile, of a call that feeds several short chunks
TILE, NUM_TILES = 4, 3  # of packed calls
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
    grammars=2,
    grammar_states=5,
    grammar_classes=4,
    logits_processors=(halve_token_3, lift_the_last_token),
)
KINDS = (
    SamplingParams(temperature=0, stop_token_ids=(7, 9, 11)),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, stop_token_ids=(7, 9, 11)),
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

CLASSES = np.where(np.arange(VOCAB) == EOS[0], 2, np.arange(VOCAB) % 2)
GRAMMARS = (  # no two fit into the tables; of as many states, so that one program generates with each alone
    Grammar(CLASSES, np.array([[1, 1, -1], [-1, 3, 2], [-1, -1, 2], [1, 1, -1]])),
    Grammar(CLASSES, np.array([[2, -1, -1], [1, 0, 3], [-1, 1, -1], [-1, -1, 3]])),
)

ANYTHING = Grammar(CLASSES, np.zeros((4, 3), int))

prefill = jax.jit(decode.prefill, static_argnames=("max_length", "num_logprobs"))


def make(seed):
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, seed)))


@pytest.fixture(scope="module")
def target():
    return make(0)


@pytest.fixture(scope="module")
def draft():
    return make(1)


@dataclass(frozen=True)
class WholeModelHead:
    """A head that is a whole model and does not need the features that it gets. It scores the tokens `IDS` alone."""

    model: Any  # without its parameters
    hidden_size = VOCAB  # its output is the logits of all tokens
    takes_groups = True

    def feature(self, params, features):
        return features.hidden

    def __call__(self, params, inputs, feature, cache):
        output, cache = self.model.apply(params["model"], inputs, cache)
        return output.logits, cache

    def recurrent(self, params, output):
        return output

    def logits(self, params, output):
        return output[..., IDS]

    def init_cache(self, num_pages, page_size, dtype):
        return self.model.init_cache(num_pages, page_size)


IDS = np.random.default_rng(0).permutation(VOCAB)[:23]  # the tokens of a reduced draft vocabulary, in some order


def reduced_drafter(draft):
    params = {"model": draft.params, "embedding": np.zeros((1, 1), np.float32)}
    return feature_draft(WholeModelHead(replace(draft, params=None)), params, 3, reduced_vocabulary(IDS, VOCAB), None)


def make_proposer(name, draft):
    make = {
        "none": lambda: None,
        "ngram": lambda: proposers.ngram(3),
        "draft_model": lambda: proposers.draft_model(draft, 3),
        "reduced": lambda: reduced_drafter(draft),
        "fallback": lambda: proposers.fallback(proposers.ngram(2), reduced_drafter(draft)),
    }
    return make[name]()


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


def some_jobs(number, seed=0, kinds=KINDS):
    """Prompts of all lengths, some with a common beginning, of several kinds of parameters."""
    rng, jobs = np.random.default_rng(seed), []
    common = rng.integers(0, VOCAB, LONGEST).astype(np.int32)
    for i in range(number):
        prompt = rng.integers(0, VOCAB, rng.integers(1, LONGEST + 1)).astype(np.int32)
        if i % 3 == 0:
            prompt = np.concatenate([common[:16], prompt[:4]])
        params = replace(kinds[i % len(kinds)], max_tokens=int(rng.integers(2, 22)))
        jobs.append(Job(prompt, params, rng.integers(0, 2**32, 2, dtype=np.uint32)))
    return jobs


def alone(target, proposer, verifier, job, num_logprobs=None, params=None, is_guided=False):
    """The last state of `specjax.generate` of the request alone in a batch, with the arrays of its parameters.

    All kinds of parameters have the arrays of all, so that one program generates for each; among guided requests
    the others have a grammar that allows everything.
    """
    prompt = np.zeros((1, LONGEST), np.int32)
    prompt[0, : len(job.prompt)] = job.prompt
    if params is None:
        batch = sampling.batch([job.params, *KINDS], EOS, VOCAB)._replace(guide=None)
        guided = job.params
        if is_guided and guided.guided_decoding is None:
            guided = replace(guided, guided_decoding=ANYTHING)
        guide = sampling.batch([guided], EOS, VOCAB).guide
        params = jax.tree.map(lambda x: np.asarray(x)[:1], batch)._replace(guide=guide)
    keys = jax.random.wrap_key_data(job.key[None], impl="threefry2x32")
    given = target, proposer, prompt, np.array([len(job.prompt)]), params, keys
    state = prefill(*given, max_length=MAX_LENGTH, num_logprobs=num_logprobs)
    return decode.generate(target, proposer, state, verifier=verifier)


def assert_as_alone(target, proposer, verifier, job, is_guided=False):
    state = alone(target, proposer, verifier, job, is_guided=is_guided)
    length = int(state.context.length[0])
    assert job.generated == np.asarray(state.context.tokens)[0, len(job.prompt) : length].tolist()
    assert job.finished == int(state.finished[0])
    jax.tree.map(np.testing.assert_array_equal, job.totals, jax.tree.map(lambda x: np.asarray(x)[0], state.totals))


class Host:
    """A host that acts at random: admit, feed pieces of prompts, step, evict, admit again.

    Packed calls have pieces of up to three prompts, in any order, which end in, at or after a tile; other calls have a
    chunk of one prompt, or short ones of two.
    """

    def __init__(self, slots, jobs, seed, pages=True, varies=True):
        self.slots, self.rng, self.jobs = slots, np.random.default_rng(seed), list(jobs)
        self.waiting, self.slot_of = list(jobs), {}
        self.num_drafts = slots.proposer.num_draft_tokens
        self.tables = None
        if pages:
            self.tables = PageTables(NUM_PAGES, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, CHUNK)
        self.grammars = GrammarTables(CAPACITIES, VOCAB)
        self.num_together = 0  # prompts whose chunks one call fed
        self.varies, self.uses = varies, []  # whether steps compute less than everything, and what each computed
        self.sizes = set()  # the numbers of slots that steps computed
        self.num_mixed = 0  # steps beside prompts

    def run(self):
        while self.waiting or self.slot_of:
            vacant = sorted(set(range(self.slots.num_slots)) - set(self.slot_of))
            if self.waiting and vacant and self.rng.random() < 0.6:
                self.admit(self.waiting.pop(0), int(self.rng.choice(vacant)))
            coming = [slot for slot, job in self.slot_of.items() if not job.is_active and not job.finished]
            self.leave([slot for slot, job in self.slot_of.items() if job.finished and self.rng.random() < 0.7])
            most = max((needs_of(job.row) for job in self.slot_of.values() if job.is_active), default=0)
            if self.slots.mixed_sizes and most <= MIXED_USE and self.rng.random() < 0.9:
                self.step(self.pieces(coming))
            else:
                if self.slots.tile_size is not None:
                    self.feed(self.pieces(coming), NUM_TILES, TILE)
                else:
                    self.feed_rows(coming)
                self.step()
            running = [slot for slot, job in self.slot_of.items() if job.is_active]
            if len(self.uses) % 3 == 0 and running:
                slot = int(self.rng.choice(running))
                job = self.slot_of[slot]
                self.leave([slot])
                job.num_evictions += 1
                self.waiting.insert(int(self.rng.integers(len(self.waiting) + 1)), job)

    def admit(self, job, slot):
        job.fed, job.previous, job.is_active = 0, self.slots.no_features, False
        if job.params.guided_decoding is not None:
            if not self.grammars.insert(job.params.guided_decoding):
                self.waiting.append(job)
                return
            self.slots.set_grammars(self.grammars.token_classes, self.grammars.transitions)
        if self.tables is not None:
            job.pages = self.tables.insert(job.tokens, len(job.tokens))
            assert job.pages is not None, "the pool is large enough"
            job.fed = job.pages.num_cached_tokens
            job.previous = job.previous if job.pages.value is None else job.pages.value
        self.slot_of[slot] = job

    def feed_rows(self, coming):
        short = [slot for slot in coming if len(self.slot_of[slot].tokens) - self.slot_of[slot].fed <= SHORT[1]]
        if self.rng.random() < 0.3 * len(short):
            self.feed(dict.fromkeys(short[: SHORT[0]], SHORT[1]), *SHORT)
            self.num_together = max(self.num_together, len(short))
        for slot in coming:
            if not self.slot_of[slot].is_active and self.rng.random() < (0.1 if slot in short else 0.7):
                self.feed({slot: CHUNK}, 1, CHUNK)

    def pieces(self, coming):
        """The sizes of pieces of prompts for a packed call, padding included."""
        sizes, num_left = {}, NUM_TILES
        for slot in self.rng.permutation(coming).tolist():
            job = self.slot_of[slot]
            most = min(len(job.tokens) - job.fed, CHUNK - job.fed % CHUNK)  # others may share whole chunks
            num_tiles = min(int(self.rng.integers(1, NUM_TILES + 1)), -(-most // TILE), num_left)
            if num_tiles and self.rng.random() < 0.8:
                sizes[slot] = num_tiles * TILE
                num_left -= num_tiles
        self.num_together = max(self.num_together, len(sizes))
        return sizes

    def feed(self, sizes, num_tiles, tile):
        """Feed chunks of these sizes, padding included, to slots."""
        if not sizes:
            return
        with self.only_writes_to(sizes, lambda job: job.fed):
            self.place()
            features, _ = self.slots.prefill(list(sizes), self.chunks(sizes), num_tiles, tile)
        self.has_fed(sizes, features)

    def chunks(self, sizes):
        each = ((self.slot_of[slot], size) for slot, size in sizes.items())
        return [chunk_at(job.tokens, job.fed, size, job.previous) for job, size in each]

    def has_fed(self, sizes, features):
        for slot, last in zip(sizes, features, strict=False):
            job = self.slot_of[slot]
            job.previous = last
            job.fed += sizes[slot]
            self.enter(slot, job)

    def enter(self, slot, job):
        tokens = job.tokens
        if self.tables is not None and job.fed <= len(tokens):
            self.tables.register(job.pages, job.fed, job.previous)
        if job.fed >= len(tokens):
            given = {"prompt_length": len(job.prompt), "totals": job.totals}
            if job.params.guided_decoding is not None:
                given["guide"] = self.grammars.guide(job.params.guided_decoding, tokens[len(job.prompt) :])
            self.slots.insert(slot, request(self.slots.state, tokens, job.key, job.row, **given))
            job.is_active = True

    def step(self, prompts=()):
        """Step, beside pieces of prompts of these sizes."""
        active = {slot: job for slot, job in self.slot_of.items() if job.is_active}
        if not active:
            self.feed(prompts, NUM_TILES, TILE)
            return
        for job in active.values():
            if self.tables is not None:
                most = min(len(job.tokens) + self.num_drafts + 1, MAX_LENGTH)
                assert self.tables.ensure(job.pages, most), "the pool is large enough"
        use = max(needs_of(job.row) for job in active.values())
        use = use if self.varies and self.rng.random() < 0.8 else Needs.EVERYTHING
        self.uses.append(use)
        slots = [int(slot) for slot in self.rng.permutation(list(active))]
        rows = self.slots.rows_of(slots) if self.rng.random() < 0.8 else None
        slots = slots if rows is not None else sorted(active)
        self.sizes.add(self.slots.num_slots if rows is None else len(rows))
        use = use if rows is None else Needs.EVERYTHING
        features = ()
        with self.only_writes_to(
            [*active, *prompts], lambda job: max(len(job.tokens) - 2, 0) if job.is_active else job.fed
        ):
            self.place()
            if prompts:
                self.num_mixed += 1
                rows, slots = None, sorted(active)
                size = NUM_SLOTS, NUM_TILES * TILE
                output, features = self.slots.mixed_step(size, slots, list(prompts), self.chunks(prompts))
            else:
                output = self.slots.step(use, rows=rows)
            output = jax.device_get(output)
        index = {slot: slot if rows is None else i for i, slot in enumerate(slots)}
        vacant = sorted(set(range(len(output.tokens))) - set(index.values()))
        assert (output.tokens[vacant] == -1).all() and not output.num_accepted[vacant].any()
        if rows is None:
            assert not output.finished[sorted(set(vacant) - set(self.slot_of))].any()
        for slot, job in active.items():
            row = index[slot]
            job.generated += [token for token in output.tokens[row].tolist() if token >= 0]
            assert output.length[row] == len(job.tokens)
            job.finished = int(output.finished[row])
            job.totals = jax.tree.map(lambda x, row=row: x[row], output.totals)
            job.is_active = job.finished == decode.RUNNING
        if prompts:
            self.has_fed(prompts, features)

    def leave(self, slots):
        if slots:
            self.slots.evict(slots)
        for slot in slots:
            job = self.slot_of.pop(slot)
            if job.params.guided_decoding is not None:
                self.grammars.remove(job.params.guided_decoding)
            if self.tables is not None:
                self.tables.free(job.pages)

    def place(self):
        """Send the tables, also of rows that are not active yet."""
        if self.tables is not None:
            table = np.full((self.slots.num_slots, self.tables.pages_per_row), NUM_PAGES, np.int32)
            for slot, job in self.slot_of.items():
                table[slot] = job.pages.table
            self.slots.set_pages(table)

    def only_writes_to(self, slots, first):
        """Compare the slots that a call must not write before and after it; each row may write from slot `first` on."""
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
        # Steps write the last two slots of a vacant row, and wherever the request of a slot has ended.
        free = self.slots + [slot for slot, job in self.host.slot_of.items() if job.finished]
        return [np.delete(leaf, free, axis=0)[:, : MAX_LENGTH - 2] for leaf in leaves]

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


def make_slots(
    target,
    proposer,
    in_pages,
    verifier=verifiers.rejection,
    num_slots=NUM_SLOTS,
    step_sizes=(),
    tile_size=TILE,
    mixed_sizes=(),
):
    pool = (NUM_PAGES, PAGE_SIZE) if in_pages else None
    sizes = {"num_slots": num_slots, "max_length": MAX_LENGTH, "capacities": CAPACITIES, "pool": pool}
    sizes |= {"step_sizes": step_sizes, "tile_size": tile_size, "mixed_sizes": mixed_sizes}
    return Slots(target, proposer, verifier=verifier, **sizes)


def run_and_compare(
    target,
    proposer,
    name,
    in_pages,
    *,
    varies=True,
    kinds=(*KINDS[:2], *KINDS),
    seed=0,
    step_sizes=(2,),
    is_mixed=False,
):
    """Run a random schedule with caches full of NaN, or in dense ones of large numbers, and compare each request.

    Returns:
        The reasons why requests have ended.
    """
    verifier = getattr(verifiers, name)
    mixed_sizes = [(NUM_SLOTS, NUM_TILES * TILE)] if is_mixed else []
    slots = make_slots(target, proposer, in_pages, verifier, step_sizes=step_sizes, mixed_sizes=mixed_sizes)
    slots.state = filled(slots.state, np.nan if in_pages else 100)
    host = Host(slots, some_jobs(9, seed, kinds), seed, in_pages, varies)
    host.run()
    assert set(host.uses) == ({Needs.GREEDY, Needs.CUT, Needs.EVERYTHING} if varies else {Needs.EVERYTHING})
    assert host.sizes == {*step_sizes, NUM_SLOTS}
    assert (host.num_mixed > 3) == is_mixed
    assert max(job.num_evictions for job in host.jobs) > 1
    assert seed or host.num_together > 1  # other schedules may never have two short prompts at a time
    if in_pages:
        host.tables.check()
        stats = host.tables.stats()
        assert stats.num_used == 0 and stats.num_hit_tokens > 0
    is_guided = any(kind.guided_decoding is not None for kind in kinds)
    for job in host.jobs:
        assert_as_alone(target, proposer, verifier, job, is_guided)
    if proposer is not None:
        assert sum(int(job.totals.accepted) for job in host.jobs) > 0
    return {job.finished for job in host.jobs}


EVERY_END = {decode.STOP, decode.MAX_TOKENS, decode.BUFFER_FULL}


@pytest.mark.slow
def test_any_schedule_gives_each_request_its_tokens(target, draft):
    """Prompts that share pages, steps that compute everything."""
    kinds = [replace(KINDS[2], temperature=temperature) for temperature in (0.8, 0, 1.1, 0.5)]
    kinds[1:3] = [replace(kind, guided_decoding=g) for kind, g in zip(kinds[1:3], GRAMMARS, strict=True)]
    given = target, make_proposer("draft_model", draft), "rejection", True
    assert run_and_compare(*given, varies=False, kinds=kinds, step_sizes=(1,)) == EVERY_END


@pytest.mark.slow
def test_beside_requests_of_every_use(target, draft):
    """A drafter of fewer tokens draws the same whether or not a neighbour's parameters read token ids."""
    run_and_compare(target, make_proposer("reduced", draft), "rejection", True)


def test_a_model_without_pages(target):
    """Steps that compute only what their rows need, or more."""
    given = replace(target, takes_pages=False), make_proposer("ngram", None), "match", False
    assert run_and_compare(*given) == EVERY_END


@pytest.mark.slow
def test_a_fallback_and_blocks_without_pages(target, draft):
    """A draft model or n-grams, in mixed steps of all slots, too.

    With the three tests above, each kind of drafter, verifier and cache has run.
    """
    given = target, make_proposer("fallback", draft), "block", False
    ends = [run_and_compare(*given, seed=seed, is_mixed=True, varies=False) for seed in (1, 2)]
    assert set.union(*ends) == EVERY_END


@pytest.mark.usefixtures("all_programs")
@pytest.mark.parametrize("in_pages", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_the_start(target, in_pages, caplog):
    jobs = some_jobs(16, seed=5)
    jax.block_until_ready(jax.jit(lambda: 0)())
    with Compilations() as start, caplog.at_level(logging.INFO, "specjax"):
        slots = make_slots(target, make_proposer("ngram", None), in_pages, num_slots=4)  # as in no other test
        slots.compile(CHUNK, [NUM_TILES * TILE])
    assert [getattr(record, "programs", None) for record in caplog.records] == [*((i, 8) for i in range(9)), None]
    # Steps, and calls that feed prompts, are compiled while others are traced.
    assert (start.number, start.number_in_threads) == (9, 6)
    with Compilations() as later:
        host = Host(slots, jobs, 5, in_pages)
        host.run()
        slots.step(Needs.GREEDY, log_probs=True)
    assert len(host.uses) > 30 and sum(job.num_evictions for job in jobs) > 5
    assert (later.number, later.number_traced) == (0, 0)


@pytest.mark.parametrize("in_pages", [True, False])
def test_each_prompt_has_its_features(target, in_pages):
    """Features of the last tokens, alone and together; rows without tokens keep the features that were there before."""
    slots = make_slots(target, None, in_pages, num_slots=3)
    if in_pages:
        slots.set_pages(np.arange(21, dtype=np.int32).reshape(3, 7))
    prompts = [np.arange(i, i + length, dtype=np.int32) for i, length in enumerate((SHORT[1], 2))]
    alone = [
        slots.prefill([slot], [chunk_at(prompt, 0, CHUNK, slots.no_features)])[0][0]
        for slot, prompt in enumerate(prompts)
    ]
    together, _ = slots.prefill([2, 0], [chunk_at(prompt, 0, SHORT[1], slots.no_features) for prompt in prompts], 3)
    after, _ = slots.prefill([2, 0], [chunk_at(prompts[0], SHORT[1], SHORT[1], features) for features in alone], 3)
    assert jax.tree.leaves(alone)
    for row in range(2):
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), together[row], alone[row])
        jax.tree.map(np.testing.assert_array_equal, after[row], alone[row])
    assert not np.allclose(jax.tree.leaves(alone[0])[0], jax.tree.leaves(alone[1])[0], atol=0.01)


def test_log_probs_and_samples(target):
    """A greedy row, and one with everything, which is sample 2 of its request."""
    proposer = make_proposer("ngram", None)
    slots = make_slots(target, proposer, True, num_slots=2)
    jobs = some_jobs(3, seed=4)[1:]
    jobs[0] = replace(jobs[0], params=replace(KINDS[0], max_tokens=6))
    table = np.arange(14, dtype=np.int32).reshape(2, 7)
    slots.set_pages(table)
    for slot, job in enumerate(jobs):
        previous = slots.no_features
        for start in range(0, len(job.tokens), CHUNK):
            (previous,), _ = slots.prefill([slot], [chunk_at(job.tokens, start, CHUNK, previous)])
        slots.insert(slot, request(slots.state, job.tokens, job.key, job.row, sample=2 * slot))
    entries = [slots.step(log_probs=True) for _ in range(24)]
    entries = jax.device_get(entries)  # a later step reuses the state, and not the output of an earlier one
    assert entries[-1].finished.all() and (entries[-1].tokens == -1).all()
    for slot, job in enumerate(jobs):
        key = jax.random.wrap_key_data(job.key[None], impl="threefry2x32")
        job.key = np.asarray(jax.random.key_data(keys.samples(key, jnp.array([2 * slot]))))[0]
        state = alone(target, proposer, verifiers.rejection, job, CAPACITIES.logprobs)
        span = slice(len(job.prompt), int(state.context.length[0]))
        chosen = [entry.tokens[slot] >= 0 for entry in entries]
        tokens = np.concatenate([entry.tokens[slot][is_one] for entry, is_one in zip(entries, chosen, strict=True)])
        assert tokens.tolist() == state.context.tokens[0, span].tolist()
        for name in ("chosen", "top", "top_ids"):
            found = [getattr(e.log_probs, name)[slot][is_one] for e, is_one in zip(entries, chosen, strict=True)]
            np.testing.assert_allclose(np.concatenate(found), getattr(state.log_probs, name)[0, span], atol=1e-5)


@pytest.mark.parametrize("kind, use", [(KINDS[0], Needs.GREEDY), (KINDS[1], Needs.CUT)])
def test_neutral_parameters_change_no_bit(kind, use):
    """Parameters that are left out, and their neutral values, give the distributions of `sampling.batch`."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (2, 4, VOCAB)).astype(np.float32)
    logits[0, 1, 3:9], logits[1, 2, 5] = -np.inf, -0.0
    ids, length = rng.integers(0, VOCAB, (2, MAX_LENGTH), dtype=np.int32), jnp.array([9, 4])
    context = Context(jnp.asarray(ids), length, jnp.ones(2, bool), length - 3, jnp.zeros(2, jnp.int32))
    drafts = jnp.asarray(rng.integers(0, VOCAB, (2, 3), dtype=np.int32))
    row = of_request(kind, CAPACITIES, EOS, VOCAB)
    assert needs_of(row) == use
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), row)
    tables = GrammarTables(CAPACITIES, VOCAB)
    assert tables.insert(GRAMMARS[0])
    guide = rows.guide._replace(token_classes=tables.token_classes, transitions=tables.transitions)
    rows = rows._replace(guide=guide)
    process = jax.jit(sampling.process)
    expected = process(sampling.batch([kind] * 2, EOS, VOCAB), jnp.asarray(logits), context, drafts)
    for wider in range(use, Needs.EVERYTHING + 1):
        found = process(keep_only(rows, wider), jnp.asarray(logits), context, drafts)
        np.testing.assert_array_equal(found.logits, expected.logits)
        np.testing.assert_array_equal(found.temperature, expected.temperature)
        cut = np.full((2, 4), -np.inf) if found.min_logit is None else found.min_logit
        np.testing.assert_array_equal(cut, np.full((2, 4), -np.inf) if use == Needs.GREEDY else expected.min_logit)


@pytest.mark.parametrize("name", ["min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_whatever_shapes_logits_needs_everything(name):
    assert needs_of(of_request(SamplingParams(temperature=0, **{name: 2}), CAPACITIES)) == Needs.EVERYTHING


def some_grammar(num_states, num_classes):
    return Grammar(np.arange(VOCAB) % num_classes, np.zeros((num_states, num_classes), int))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stop_token_ids": range(1, 5)}, "stop_token_ids must have at most 4 .*Capacities.stop_tokens.*, got 5"),
        ({"logit_bias": dict.fromkeys(range(4), 1)}, r"logit_bias must have at most 3 .*Capacities.biases.*, got 4"),
        ({"allowed_token_ids": range(21)}, "allowed_token_ids must have at most 20 .*, got 21"),
        ({"bad_words": [(1,), (2,), (3,)]}, r"bad_words must have at most 2 words.*, got 3"),
        ({"bad_words": ["a", "b"]}, r"bad_words must have at most 2 words, where a string is two .*, got 4"),
        ({"bad_words": [(1, 2, 3, 4)]}, r"bad_words must have at most 3 tokens .*bad_word_length.*, got 4"),
        ({"logprobs": 4}, r"logprobs must have at most 3 tokens \(Capacities.logprobs\), got 4"),
        ({"prompt_logprobs": 4}, "prompt_logprobs must have at most 3 tokens"),
        ({"logits_processors": [len]}, r"logits_processors must be some of .*halve_token_3.*, in their order, got"),
        ({"logits_processors": [lift_the_last_token, halve_token_3]}, "logits_processors must be some of"),
        (
            {"guided_decoding": some_grammar(6, 2)},
            "guided_decoding must have at most 5 states .*grammar_states.*, got 6",
        ),
        ({"guided_decoding": some_grammar(2, 5)}, "guided_decoding must have at most 4 classes of tokens .*, got 5"),
        ({"stop_token_ids": [VOCAB]}, r"stop_token_ids must be in \[0, vocab_size = 31\), got \[31\]"),
    ],
)
def test_more_than_the_capacities_is_refused(options, message):
    params = SamplingParams(**options)
    with pytest.raises(ValueError, match=message):
        of_request(params, CAPACITIES, EOS, VOCAB, lambda text: [ord(x) % VOCAB for x in text])


def test_capacities_of_0_are_left_out():
    capacities = Capacities(0, 0, 0, 0, 0, 0)
    row = of_request(SamplingParams(temperature=0.5), capacities)
    assert {name for name, value in row._asdict().items() if value is None} == {
        *("stop_tokens", "bias_tokens", "bias_values", "allowed_tokens", "bad_words", "logits_processors", "guide")
    }
    with pytest.raises(ValueError, match="stop_token_ids must have at most 0 ids"):
        of_request(SamplingParams(), capacities, EOS)
    for name, value in (("biases", -1), ("logprobs", 2.0)):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 0, got {value}"):
            Capacities(**{name: value})
    with pytest.raises(ValueError, match=r"logits_processors must be functions, got \(3,\)"):
        Capacities(logits_processors=(3,))
    with pytest.raises(ValueError, match="logits_processors must be functions, got 5"):
        Capacities(logits_processors=5)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"tokens": np.zeros(0, np.int32)},
            r"tokens must be int32 \[length\] with length in \[1, .* = 27\], got int32",
        ),
        ({"tokens": np.zeros(28, np.int32)}, r"max_length - 1 = 27\], got int32 \[28\]"),
        ({"tokens": np.zeros(3, np.int64)}, r"got int64 \[3\]"),
        ({"prompt_length": 0}, r"prompt_length must be in \[1, length = 9\] .*, got 0"),
        ({"prompt_length": 5}, r"leave fewer than max_tokens = 4 tokens after it, got 5"),
        ({"key_data": np.zeros(2, np.int32)}, r"key_data must be uint32 \[2\], got int32 \(2,\)"),
    ],
)
def test_bad_requests(target, options, message):
    state = jax.eval_shape(partial(empty, num_slots=2, max_length=MAX_LENGTH, capacities=CAPACITIES), target, None)
    given = {"tokens": np.zeros(9, np.int32), "key_data": np.zeros(2, np.uint32)} | options
    row = of_request(SamplingParams(max_tokens=4), CAPACITIES)
    with pytest.raises(ValueError, match=message):
        request(state, sampling=row, **given)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_slots": 0}, "num_slots must be an integer >= 1, got 0"),
        ({"max_length": 1}, "max_length must be an integer >= 2, got 1"),
        ({"max_length": 129}, "max_length must be at most the model's 128, got 129"),
        ({"capacities": Capacities(logprobs=32)}, "logprobs must be at most V = 31, got 32"),
        ({"pool": (0, 4)}, "num_pages must be an integer >= 1, got 0"),
        ({"pool": (4, 0)}, "page_size must be an integer >= 1, got 0"),
    ],
)
def test_bad_sizes(target, options, message):
    sizes = {"num_slots": 2, "max_length": 8, "capacities": Capacities(logprobs=3)} | options
    with pytest.raises(ValueError, match=message):
        Slots(target, **sizes)


def test_bad_calls(target):
    plain = replace(target, takes_pages=False)
    with pytest.raises(ValueError, match="pages must be None for a model whose takes_pages is False"):
        make_slots(plain, None, True)
    slots = make_slots(target, make_proposer("ngram", None), True, num_slots=2)
    tables = GrammarTables(replace(CAPACITIES, grammars=1), VOCAB)
    with pytest.raises(ValueError, match=r"tables must have shapes \(\(3, 31\), \(6, 5\)\), got \(\(2, 31\), "):
        slots.set_grammars(tables.token_classes, tables.transitions)
    guided = of_request(SamplingParams(guided_decoding=GRAMMARS[0]), CAPACITIES)
    for row, guide, message in (
        (guided, None, "guide must be the place of the request's grammar, got None"),
        (of_request(SamplingParams(), CAPACITIES), guided.guide, "guide must be None for a request without a grammar"),
    ):
        with pytest.raises(ValueError, match=message):
            request(slots.state, np.zeros(3, np.int32), np.zeros(2, np.uint32), row, guide=guide)
    with pytest.raises(ValueError, match=r"slot must be in \[0, 2\), got 2"):
        slots.evict([2])
    chunk = chunk_at(np.zeros(1, np.int32), 0, CHUNK, slots.no_features)
    with pytest.raises(ValueError, match=r"chunks must fill at most 1 tiles of 8 tokens, .* got chunks of \[8, 8\] "):
        slots.prefill([0, 1], [chunk, chunk])
    with pytest.raises(ValueError, match=r"table must be int32 \(2, 7\), got int32 \(2, 6\)"):
        slots.set_pages(np.zeros((2, 6), np.int32))
