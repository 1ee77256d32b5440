"""Steps of some rows of a batch, and the states that a model keeps of a step where overwriting does not suffice."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, proposers, sampling, scorers, testing, verifiers
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.pages import PageTables
from specjax.engine.scheduler import Job, Scheduler
from specjax.engine.slots import Slots
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.pages import Pages
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import of_request
from specjax.types import Draft, Memory, Model, ModelOutput

VOCAB, MAX_LENGTH, PAGE_SIZE, LENGTHS = 29, 32, 4, (5, 2, 9, 1)
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=16, max_length=64
)
PARAMS = [
    SamplingParams(temperature=t, max_tokens=n, presence_penalty=0.3)
    for t, n in ((0.8, 12), (0, 9), (1, 14), (0.6, 11))
]
prefill = jax.jit(decode.prefill, static_argnames=("max_length", "chunk_size"))
step = jax.jit(decode.step, static_argnames="verifier")


def decoder(seed=0):
    return decoder_model(CONFIG, jax.tree.map(lambda x: 4 * x, init_params(CONFIG, seed)))


def prompts():
    return np.random.default_rng(0).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS))).astype(np.int32)


def start(target, proposer, pages=None, **options):
    keys = jax.random.split(jax.random.key(1), len(LENGTHS))
    given = target, proposer, prompts(), np.array(LENGTHS), sampling.batch(PARAMS), keys
    return prefill(*given, max_length=MAX_LENGTH, pages=pages, **options)


def random_pages():
    table = np.random.default_rng(0).permutation(40)[: len(LENGTHS) * MAX_LENGTH // PAGE_SIZE]
    return Pages(jnp.asarray(table.reshape(len(LENGTHS), -1), jnp.int32), 40, PAGE_SIZE)


@pytest.mark.parametrize(
    "form, verifier, sizes",
    [
        pytest.param("dense", "rejection", (1, 3), id="rejection-dense"),
        pytest.param("pages", "block", (3,), marks=pytest.mark.slow, id="block-pages"),
        pytest.param("no pages", "rejection", (2,), marks=pytest.mark.slow, id="rejection-no pages"),
    ],
)
def test_rows_in_any_order_and_number(form, verifier, sizes):
    """Each row gets the tokens of steps of all rows, and rows that a step does not compute stay as they are."""
    target, draft = decoder(0), decoder(1)
    if form == "no pages":
        target, draft = (replace(model, takes_pages=False) for model in (target, draft))
    proposer, pages = proposers.draft_model(draft, 2), random_pages() if form == "pages" else None
    whole = state = start(target, proposer, pages)
    while whole.context.active.any():
        whole, _ = step(target, proposer, whole, verifier=getattr(verifiers, verifier))
    rng = np.random.default_rng(0)
    while state.context.active.any():
        size = int(rng.choice(sizes))
        rows = rng.permutation(len(LENGTHS) + 1)[:size]  # one of them is no row
        before = jax.device_get(state.context)
        active = before.active[np.minimum(rows, 3)] & (rows < 4)
        state, info = step(target, proposer, state, rows=jnp.asarray(rows), verifier=getattr(verifiers, verifier))
        after = jax.device_get(state.context)
        others = np.setdiff1d(np.arange(4), rows)
        np.testing.assert_array_equal(after.length[others], before.length[others])
        counts = (np.asarray(info.tokens) >= 0).sum(axis=1)
        assert info.tokens.shape[0] == size and not counts[~active].any() and counts[active].all()
        np.testing.assert_array_equal((after.length - before.length)[rows[active]], counts[active])
    np.testing.assert_array_equal(state.context.tokens, whole.context.tokens)
    jax.tree.map(np.testing.assert_array_equal, (state.totals, state.finished), (whole.totals, whole.finished))


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[0]], r"rows must have shape \[R\]"),
        ([0.0], "rows must"),
        ([-1, 0], r"rows must be in \[0, B = 4\], where B is no row, got \[-1, 0\]"),
        ([5], r"rows must be in \[0, B = 4\]"),
        ([3, 4, 4, 3], "rows must have no row twice"),
    ],
)
def test_bad_rows(rows, message):
    target = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))
    with pytest.raises(ValueError, match=message):
        decode.step(target, None, start(target, None), rows=jnp.array(rows))


@pytest.mark.slow
def test_a_temperature_of_drafts_stays_with_its_row():
    target = testing.bigram_model(2 * jax.random.normal(jax.random.key(0), (VOCAB, VOCAB)))
    draft = testing.bigram_model(2 * jax.random.normal(jax.random.key(1), (VOCAB, VOCAB)))
    proposer = proposers.draft_model(draft, 2, temperature=jnp.array([0.2, 0.5, 1.0, 2.0]))
    whole = state = start(target, proposer)
    for _ in range(4):
        whole, _ = step(target, proposer, whole)
        state, _ = step(target, proposer, state, rows=jnp.array([3, 4, 1, 0, 2]))
    np.testing.assert_array_equal(state.context.tokens, whole.context.tokens)


def test_models_with_rows_that_are_refused():
    with pytest.raises(ValueError, match="model must have commit to draft"):
        proposers.draft_model(replace(recurrent(True), commit=None), 2)
    with pytest.raises(ValueError, match="model must have commit to be checked"):
        testing.assert_model(replace(recurrent(True), commit=None))


def test_batch_expansion_in_pages():
    """It writes what one call with all drafts writes, to the pages of each row alone."""
    target = decoder()
    dense, paged = (start(target, None, pages) for pages in (None, random_pages()))
    draft = Draft(jnp.array([[3, 4, 5], [6, -1, -1], [7, 8, -1], [-1, -1, -1]]))
    expected, _ = jax.jit(scorers.mqa)(target, dense.context, draft, dense.cache)
    output, cache = jax.jit(scorers.batch_expansion)(target, paged.context, draft, paged.cache)
    _, one = jax.jit(scorers.mqa)(target, paged.context, draft, paged.cache)
    for b, num_drafts in enumerate((3, 1, 2, 0)):
        np.testing.assert_allclose(output.logits[b, : num_drafts + 1], expected.logits[b, : num_drafts + 1], atol=2e-5)
    table = np.asarray(random_pages().table)
    for leaf, other, before in zip(*map(jax.tree.leaves, (cache.pools, one.pools, paged.cache.pools)), strict=True):
        for b, (length, num_drafts) in enumerate(zip(LENGTHS, (3, 1, 2, 0), strict=True)):
            held = (np.asarray(x)[table[b]].reshape(-1, *x.shape[2:])[: length + num_drafts] for x in (leaf, other))
            np.testing.assert_allclose(*held, atol=2e-5)
        unused = np.setdiff1d(np.arange(40), table)
        np.testing.assert_array_equal(np.asarray(leaf)[unused], np.asarray(before)[unused])


@dataclass(frozen=True)
class Recurrent:
    """A model whose logits depend on a sum over all tokens so far, in the rows of its memory or in its cache.

    A step leaves the sums around each of its tokens beside the sum, among which `commit` chooses.
    """

    in_pages: bool

    def __call__(self, params, inputs, memory):
        held = memory.take(inputs.rows).rows if self.in_pages else memory
        first = jnp.where(inputs.positions[:, 0] > 0, held["sum"], 0)[:, None]
        sums = jnp.concatenate([first, first + jnp.cumsum(inputs.tokens + 1, axis=1)], axis=1)
        if inputs.num_tokens is None:
            new = held | {"step": held["step"].at[:, : sums.shape[1]].set(sums)}
        else:
            new = keep(held, sums, inputs.num_tokens)
        output = ModelOutput(params[sums[:, 1:] % VOCAB])
        return output, memory.put(inputs.rows, Memory((), new)) if self.in_pages else new


def keep(held, sums, count):
    last = jnp.take_along_axis(sums, count[:, None], axis=1)[:, 0]
    return held | {"sum": jnp.where(count > 0, last, held["sum"])}


def commit(memory, inputs, path, count):
    return Memory(memory.pools, keep(memory.rows, memory.rows["step"], count))


def sums_of_rows(batch_size, max_length=0):
    shapes = {"sum": (batch_size,), "step": (batch_size, 5)}
    return {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}


def no_pools(num_pages, page_size):
    return ()


def recurrent(in_pages, noise=0.0):
    table = jax.random.normal(jax.random.key(0), (VOCAB, VOCAB)) * 2
    table += noise * jax.random.normal(jax.random.key(1), (VOCAB, VOCAB))
    if in_pages:
        return Model(table, Recurrent(True), no_pools, VOCAB, takes_pages=True, init_rows=sums_of_rows, commit=commit)
    return Model(table, Recurrent(False), sums_of_rows, VOCAB, commit=commit)


def greedy(target, prompt, num_tokens):
    """The tokens of a loop over the sum."""
    table, total, found = np.asarray(target.params), sum(prompt) + len(prompt), []
    for _ in range(num_tokens):
        found.append(int(table[total % VOCAB].argmax()))
        total += found[-1] + 1
    return found


def bigrams():
    return testing.BigramProposer(jax.random.normal(jax.random.key(3), (VOCAB, VOCAB)), 2, is_ragged=True)


@pytest.mark.parametrize("in_pages", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_recurrent_state_follows_what_is_accepted(in_pages):
    """Greedy tokens equal the tokens of a plain loop, whatever was drafted, in steps of all rows and of some."""
    target, proposer = recurrent(in_pages), bigrams()
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=12)] * 4)
    given = target, proposer, prompts(), np.array(LENGTHS), params, jax.random.key(0)
    state, accepted = prefill(*given, max_length=MAX_LENGTH, chunk_size=4), 0
    for i in range(60):
        rows = None if i % 3 == 0 else jnp.array([i % 4, 4, (i + 1) % 4])
        state, info = step(target, proposer, state, rows=rows)
        accepted += int(info.num_accepted.sum())
    assert accepted > 0 and not state.context.active.any()
    for row, prompt, length in zip(np.asarray(state.context.tokens), prompts().tolist(), LENGTHS, strict=True):
        assert row[length : length + 12].tolist() == greedy(target, prompt[:length], 12)


@pytest.mark.slow
@pytest.mark.parametrize("in_pages", [True, False])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_recurrent_draft_model_takes_each_token_once(in_pages, noise):
    """Each step accepts as many drafts as a plain loop of the draft model has right; without noise, all of them."""
    target, draft = recurrent(in_pages), recurrent(in_pages, noise)
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=12)] * 4)
    given = target, proposers.draft_model(draft, 2), prompts(), np.array(LENGTHS), params, jax.random.key(0)
    state = prefill(*given, max_length=MAX_LENGTH, chunk_size=4)
    expected = [
        [*row[:length], *greedy(target, row[:length], 15)]
        for row, length in zip(prompts().tolist(), LENGTHS, strict=True)
    ]
    found = list(LENGTHS)
    for i in range(40):
        rows = None if i % 3 == 0 else jnp.array([i % 4, 4, (i + 1) % 4])
        ran = np.zeros(4, bool)
        ran[slice(None) if rows is None else [i % 4, (i + 1) % 4]] = True
        ran &= np.asarray(state.context.active)
        state, info = step(target, given[1], state, rows=rows)
        accepted = dict(zip(range(4) if rows is None else rows.tolist(), info.num_accepted.tolist(), strict=True))
        for b in np.flatnonzero(ran):
            drafts = greedy(draft, expected[b][: found[b]], 2)
            right = [token == expected[b][found[b] + j] for j, token in enumerate(drafts)]
            count = [*right, False].index(False)
            assert accepted[b] == count and (noise or count == 2)
            found[b] += count + 1
    for row, length, tokens in zip(np.asarray(state.context.tokens), LENGTHS, expected, strict=True):
        assert row[: length + 12].tolist() == tokens[: length + 12]


class Letters:
    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("A") + i) for i in ids)


def serve(slots, prompts, num_values, cancelled=()):
    """Run jobs, some of which come later; every third round one loses its slot. Return them and their tables."""
    tables = PageTables(24, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE, 8, num_values=num_values)
    scheduler, jobs = Scheduler(slots, tables, 8, chunks_per_step=1), []  # so that steps come between the chunks
    for prompt in prompts:
        params = SamplingParams(temperature=0, max_tokens=9, detokenize=False)
        row = of_request(params, slots.capacities, (), slots.model.vocab_size)
        jobs.append(Job(prompt, row, np.zeros(2, np.uint32), Detokenizer(Letters(), prompt, params)))
    waiting = list(jobs)
    for rounds in range(200):
        for job in waiting[:2]:
            scheduler.add(job)
        waiting = waiting[2:]
        if rounds in cancelled:
            scheduler.cancel(max(scheduler.running, key=lambda job: job.number))
        if rounds % 3 == 2 and len(scheduler.running) > 1:
            while scheduler._in_flight:
                scheduler._read()
            if scheduler.running:
                scheduler._make_room()
        if not scheduler.advance() and not waiting:
            break
    tables.check()
    assert tables.stats().num_used == 0
    return jobs, tables


def test_prompts_share_the_states_of_recurrent_models():
    """The draft model is the target, so that all drafts are right: a state that is off in either shows.

    The draft model is fed nothing of a prompt of one token, whose slot others have had before.
    """
    target, common = recurrent(True), list(range(17))
    sizes = {"num_slots": 3, "max_length": MAX_LENGTH, "pool": (24, PAGE_SIZE), "chunk_size": 8}
    slots = Slots(target, proposers.draft_model(target, 2), **sizes)
    prompts = [[*common, i] for i in (1, 2, 1)] + [[*common[:9], i, 4, 5] for i in (1, 2)] + [[7, *common, 3, 4], [3]]
    for num_values in (None, 1, 3):
        jobs, tables = serve(slots, prompts, num_values, cancelled=(4,))
        assert sum(job.num_preempted for job in jobs) > 1 and tables.stats().num_hit_tokens > 16
        assert sum(not job.output.finish_reason for job in jobs) == 1
        for job in jobs:
            if job.output.finish_reason:
                assert job.output.token_ids == greedy(target, job.prompt, 9)
                assert job.kinds.count("recovered") == 0
