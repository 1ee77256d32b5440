"""Caches in pages: a table gives the results of a dense cache, to the bit, and no other page is read or written."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choice import LOSSLESS, one_of
from families import CONFIGS, tokens, write
from paged import poisoned, random_table, trigram_model

from specjax import decode, proposers, sampling, testing, verifiers
from specjax.decoding.calls import run
from specjax.models import load
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.layer import Attention, LayerConfig
from specjax.pages import Pages, check_pages_of_prompts, copy_pages, read_slots, write_slots
from specjax.sampling import SamplingParams
from specjax.types import NO_PAGE, ModelInput

VOCAB = 61
LAYERS = tuple(LayerConfig(Attention(window=window, softcap=2.0)) for window in (5, None))
TARGET = DecoderConfig(VOCAB, 16, 2, 2, 1, 8, 16, 512, layers=LAYERS)
SMALL = DecoderConfig(VOCAB, 16, 1, 2, 1, 8, 16, 128)

REJECTION = jax.tree_util.Partial(verifiers.rejection)

prefill = jax.jit(decode.prefill, static_argnames=("max_length", "chunk_size"))
step = jax.jit(decode.step)
apply = jax.jit(lambda model, inputs, cache: run(model, inputs, cache))


def make(config, seed):
    return decoder_model(config, jax.tree.map(lambda x: 4 * x, init_params(config, seed)))


@pytest.fixture(scope="module")
def target():
    return make(SMALL, 0)


@pytest.fixture(scope="module")
def draft():
    return make(SMALL, 1)


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


class TestSlots:
    def test_against_plain_loops(self):
        """Tables with gaps, numbers outside the pool on both sides, and slots past the end."""
        table = np.array([[3, 5, 1], [-1, 0, 2], [6, -6, 4]])
        slots = np.array([[1, 2, 3], [0, 3, 4], [4, 5, 6]])
        values = np.arange(1, 19, dtype=np.float32).reshape(3, 3, 2)
        pool = -np.random.default_rng(0).random((6, 2, 2), np.float32)
        expected = pool.copy()
        for b, t in np.ndindex(slots.shape):
            page, offset = divmod(slots[b, t], 2)
            if page < 3 and 0 <= table[b, page] < 6:
                expected[table[b, page], offset] = values[b, t]
        assert_same(write_slots(jnp.asarray(pool), slots, jnp.asarray(values), jnp.asarray(table)), expected)
        read = read_slots(jnp.asarray(expected), jnp.asarray(table))
        for b, s in np.ndindex(3, 6):
            page = table[b, s // 2]
            assert_same(read[b, s], expected[page, s % 2] if 0 <= page < 6 else np.zeros(2))

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
    def test_a_table_of_another_dtype(self, target, dtype):
        """One byte does not hold the number of pages of this pool."""
        table, slots = np.array([[3, 100]], dtype), np.array([[0, 1, 2]])
        pool = write_slots(jnp.zeros((300, 2)), slots, np.array([[5, 6, 7]]), table)
        assert pool[3].tolist() == [5, 6] and pool[100].tolist() == [7, 0] and pool.sum() == 18
        assert read_slots(pool, jnp.asarray(table)).tolist() == [[5, 6, 7, 0]]
        assert copy_pages(pool, table[0, :1], table[0, 1:])[100].tolist() == [5, 6]
        inputs = ModelInput(jnp.array([[1, 2, 3]]), jnp.arange(3)[None], pages=jnp.asarray(table))
        _, cache = jax.eval_shape(partial(run, target), inputs, target.init_cache(300, 2))
        assert cache[0]["key"].shape[:2] == (300, 2)

    @pytest.mark.parametrize(
        "slot, table, page", [(3, [2, 1], 1), (0, [2, 1], 2), (4, [2, 1], None), (1, [3, 1], None)]
    )
    def test_one_slot(self, slot, table, page):
        """Past the end and without a page nothing is written."""
        expected = np.zeros((3, 2, 5))
        if page is not None:
            expected[page, slot % 2] = 1
        written = write_slots(jnp.zeros((3, 2, 5)), jnp.array([[slot]]), jnp.ones((1, 1, 5)), jnp.array([table]))
        assert_same(written, expected)

    @pytest.mark.cpu  # the copies are made by XLA for CPUs
    def test_one_slot_is_written_in_place(self, target):
        """XLA for CPUs copied each cache four times in a call of one token."""
        inputs = ModelInput(jnp.array([[1]]), jnp.array([[5]]))
        step = jax.jit(lambda model, inputs, cache: run(model, inputs, cache), donate_argnums=2)
        program = step.lower(target, inputs, target.init_cache(1, 128)).compile().as_text()
        assert "f32[1,128,1,8]" in program and not re.search(r"= f32\[1,128,1,8\]\S* copy\(", program)

    def test_no_rows(self):
        assert read_slots(jnp.zeros((3, 2, 5)), jnp.zeros((0, 4), jnp.int32)).shape == (0, 8, 5)

    def test_copies(self):
        pool = {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.arange(3)}
        copied = copy_pages(pool, jnp.array([[2, -1], [3, 0]]), jnp.array([[0, 1], [1, NO_PAGE]]))
        assert copied["b"].tolist() == [2, 1, 2]
        assert copied["a"].tolist() == [[4, 5], [2, 3], [4, 5]]


def feed_both(model, page_size, num_pages, calls, mask=None):
    """Feed calls of (tokens, positions) to a pool of NaN and to a dense cache; return the logits of each call."""
    batch_size = len(calls[0][0])
    dense = model.init_cache(batch_size, page_size * num_pages)
    table = random_table((batch_size, num_pages), 2 * batch_size * num_pages)
    pool = poisoned(model.init_cache(2 * batch_size * num_pages, page_size))
    outputs = []
    for i, (ids, positions) in enumerate(calls):
        inputs = ModelInput(jnp.asarray(ids), jnp.asarray(positions), mask if i == len(calls) - 1 else None)
        expected, dense = apply(model, inputs, dense)
        output, pool = apply(model, inputs._replace(pages=jnp.asarray(table)), pool)
        outputs.append((output.logits, expected.logits))
    for leaf, expected in zip(jax.tree.leaves(pool), jax.tree.leaves(dense), strict=True):
        own = np.asarray(leaf)[table].reshape(expected.shape)
        assert_same(own, np.where(np.isnan(own), np.nan, expected))
        others = np.setdiff1d(np.arange(len(leaf)), table)
        assert np.isnan(np.asarray(leaf)[others]).all()
    return outputs


# One case belongs to the fast tier: the others compile much and find the same.
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name == "opt_post_norm" else pytest.mark.slow) for name in CONFIGS]
)
def test_families(case, tmp_path):
    """Rows at different lengths, calls across pages, tokens that are fed again, in a pool of NaN."""
    model = load(write(tmp_path / case, case))
    rows, calls = np.arange(2)[:, None], []
    for starts in ((0, 0), (4, 2), (8, 5)):
        columns = np.array(starts)[:, None] + np.arange(4)
        calls.append((tokens()[rows, columns], columns))
    for output, expected in feed_both(model, 3, 4, calls):
        assert_same(output, expected)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", (16, 64, 256))
def test_page_sizes(page_size):
    """The last call passes the end."""
    rng, calls = np.random.default_rng(0), []
    for starts in ((0, 0), (40, 13), (80, 53), (117, 91), (157, 131), (196, 170), (230, 210)):
        columns = np.array(starts)[:, None] + np.arange(40)
        calls.append((rng.integers(0, VOCAB, columns.shape), columns))
    results = feed_both(make(TARGET, 0), page_size, 256 // page_size, calls)
    for (_, columns), (output, expected) in zip(calls, results, strict=True):
        assert_same(output[columns < 256], expected[columns < 256])


@pytest.mark.slow
def test_a_tree(target):
    ids, positions = np.arange(10).reshape(2, 5), np.broadcast_to(np.arange(5), (2, 5))
    mask = jnp.broadcast_to(jnp.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], bool), (2, 3, 3))
    calls = [(ids, positions), (ids[:, :3] + 20, np.array([[5, 5, 6], [3, 3, 4]]))]
    for output, expected in feed_both(target, 2, 4, calls, mask):
        assert_same(output, expected)


LENGTHS, MAX_TOKENS, MAX_LENGTH, PAGE_SIZE = (9, 4, 1, 23, 17, 18), (20, 9, 26, 25, 3, 14), 48, 4
SHARED = 2  # pages that the last two rows share: 8 tokens


def requests(temperature=0.7):
    return sampling.batch([SamplingParams(temperature=temperature, max_tokens=n) for n in MAX_TOKENS])


def prompts():
    ids = np.random.default_rng(0).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    ids[5, : SHARED * PAGE_SIZE] = ids[4, : SHARED * PAGE_SIZE]
    return ids


def pages(num_pages=100):
    table = random_table((len(LENGTHS), MAX_LENGTH // PAGE_SIZE), num_pages)
    table[5, :SHARED] = table[4, :SHARED]
    return Pages(jnp.asarray(table), num_pages, PAGE_SIZE)


def start(target, proposer, **options):
    keys = jax.random.split(jax.random.key(1), len(LENGTHS))
    given = target, proposer, prompts(), np.array(LENGTHS), requests(), keys
    return prefill(*given, max_length=MAX_LENGTH, **options)


def every_proposer(target, draft):
    draft_model = proposers.draft_model(draft, 3)
    return {
        "none": proposers.none(),
        "ngram": proposers.ngram(3),
        "draft_model": draft_model,
        "the target itself": proposers.draft_model(target, 3),
        "greedy": proposers.draft_model(draft, 2, temperature=0),
        "a short draft": proposers.draft_model(draft, 3, max_length=21),
        "few rows": proposers.draft_model(draft, 3, speculate_below=4),
        "fallback": proposers.fallback(proposers.ngram(2), draft_model),
    }


def foreign(state, table, num_pages):
    """Which slots [num_pages, page_size] belong to no row, to an ended one, or lie past a row's committed tokens."""
    slots = np.ones((num_pages, PAGE_SIZE), bool)
    for row, length, active in zip(table, state.context.length.tolist(), state.context.active.tolist(), strict=True):
        for page, first in zip(row, range(0, length if active else 0, PAGE_SIZE), strict=False):
            slots[page, : max(0, length - first)] = False
    return slots


def run_both(target, proposer, verifier):
    """Decode dense and in pages, and compare after every step.

    Before it, every slot that may not be read becomes NaN. Slots that no active row owns must stay as they are.
    """
    paged = pages()
    table = np.asarray(paged.table)
    dense, state = start(target, proposer), start(target, proposer, pages=paged)
    while dense.context.active.any():
        pools = poisoned((state.cache, state.proposer), foreign(state, table, paged.num_pages))
        ended = np.setdiff1d(np.arange(paged.num_pages), table[np.asarray(state.context.active)])
        before = floats(pools, ended)
        state = state._replace(cache=pools[0], proposer=pools[1])
        (dense, _), (state, _) = (step(target, proposer, s, verifier=verifier) for s in (dense, state))
        assert_same(state.context._replace(pages=None), dense.context)
        assert_same(floats((state.cache, state.proposer), ended), before)
    assert_same(state.totals, dense.totals)
    return state


def floats(pools, rows):
    """The contents of some pages of every leaf of floats."""
    return [np.asarray(x)[rows] for x in jax.tree.leaves(pools) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_verifiers(target, draft, name):
    run_both(target, every_proposer(target, draft)["fallback"], one_of(name))


PROPOSERS = ("none", "ngram", "draft_model", "the target itself", "greedy", "a short draft", "few rows")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposers(target, draft, name):
    """Prompts of all lengths, rows that share a prefix and diverge, and ends at different steps."""
    state = run_both(target, every_proposer(target, draft)[name], REJECTION)
    assert len(set(state.totals.steps.tolist())) > 2
    assert state.context.length.tolist() == [n + m for n, m in zip(LENGTHS, MAX_TOKENS, strict=True)]
    if name == "the target itself":
        assert (state.totals.accepted == state.totals.drafted).all()


class TestSamplesOfAPrompt:
    """`rows`: a prompt is fed once; its rows share pages, or get copies of them."""

    PROMPTS, LENGTHS = np.arange(40, dtype=np.int32).reshape(2, 20) % VOCAB, np.array([19, 6])
    ROWS = np.array([1, 0, 1, 0, 0, 1])

    def start(self, target, draft, table=None):
        paged = None if table is None else Pages(jnp.asarray(table), 100, PAGE_SIZE)
        keys = jax.random.split(jax.random.key(3), len(self.ROWS))
        given = target, proposers.draft_model(draft, 3), self.PROMPTS, self.LENGTHS, requests(), keys
        return prefill(*given, max_length=MAX_LENGTH, rows=jnp.asarray(self.ROWS), pages=paged)

    @pytest.mark.slow
    def test_are_those_of_dense_caches(self, target, draft):
        """Rows of one prompt share all pages that they may, some, or none."""
        table = random_table((len(self.ROWS), MAX_LENGTH // PAGE_SIZE), 100, seed=1)
        table[3, :4], table[4, :2] = table[1, :4], table[1, :2]
        proposer = proposers.draft_model(draft, 3)
        dense, paged = self.start(target, draft), self.start(target, draft, table)
        for leaf, expected in zip(*(jax.tree.leaves((s.cache, s.proposer.pools)) for s in (paged, dense)), strict=True):
            for b, row in enumerate(self.ROWS):
                n = self.LENGTHS[row]
                assert_same(np.asarray(leaf)[table[b]].reshape(-1, *leaf.shape[2:])[:n], expected[b, :n])
        assert_same(paged.proposer.rows, dense.proposer.rows)
        unused = np.setdiff1d(np.arange(100), table)
        assert not any(np.asarray(leaf)[unused].any() for leaf in jax.tree.leaves(paged.cache))
        while dense.context.active.any():
            dense, paged = (step(target, proposer, state, verifier=REJECTION)[0] for state in (dense, paged))
        assert_same(paged.context._replace(pages=None), dense.context)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_loop")
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_distribution_through_pages(name):
    """Several steps of many rows, with pages of two slots: target and draft read their last tokens from their pools."""
    size, rows, length = 3, 60_000, 7
    logits = jax.random.normal(jax.random.key(0), (size,) * 3)
    target, draft = trigram_model(logits), trigram_model(jax.random.normal(jax.random.key(1), (size,) * 3))
    proposer = proposers.draft_model(draft, 2)
    paged = Pages(jnp.asarray(random_table((rows, 4), 4 * rows)), 4 * rows, 2)
    params = sampling.Sampling(max_tokens=jnp.full(rows, length - 1))
    ids, one = jnp.ones((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
    probs = testing.probabilities(np.asarray(logits))
    exact = probs[0, 1]
    for _ in range(length - 2):
        exact = exact[..., None] * (probs[1] if exact.ndim == 1 else probs)
    state = prefill(target, proposer, ids, one, params, jax.random.key(2), max_length=length, pages=paged)
    state = decode.generate(target, proposer, state, verifier=one_of(name))
    assert state.totals.accepted.sum() > rows
    index = np.ravel_multi_index(tuple(np.asarray(state.context.tokens)[:, 1:].T), (size,) * (length - 1))
    test = testing.chi_square(np.bincount(index, minlength=size ** (length - 1)), exact.ravel())
    assert test.statistic < test.bound


class TestBadTables:
    def start(self, target, table=None, *, num_pages=24, page_size=8, proposer=None, **options):
        params = sampling.batch([SamplingParams(max_tokens=4)] * 2)
        table = np.arange(8, dtype=np.int32).reshape(2, 4) if table is None else table
        arguments = {"prompts": np.zeros((2, 20), np.int32), "lengths": np.array([20, 18])} | options
        return decode.prefill(
            target,
            proposer,
            sampling=params,
            keys=jax.random.key(0),
            max_length=30,
            pages=Pages(table, num_pages, page_size),
            **arguments,
        )

    @pytest.mark.parametrize(
        "table, message",
        [
            ([[0, 1, 2, 3]], r"pages.table must have shape \[B, P\] = \(2, any\), got \(1, 4\)"),
            ([[0.0] * 4] * 2, "pages.table must be of integer dtype, got float32"),
            ([[0, 1, 2], [3, 4, 5]], r"pages.table must have at least 4 pages a row, as max_length is 30 .*, got 3"),
            ([[0, 1, 2, 3], [4, 5, 6, 25]], r"pages.table must be in \[0, num_pages = 24\], got 0 to 25"),
            ([[0, 1, 2, 3], [4, 5, 6, -1]], r"pages.table must be in \[0, num_pages = 24\], got -1 to 6"),
            ([[0, 1, 2, 3], [4, 5, 4, 6]], "pages.table must have a page once in a row, got 4 twice in row 1"),
            ([[0, 1, 2, 3], [4, 5, 24, 24]], r"pages.table must have a page for every token .* got none at \[1, 2\]"),
            ([[0, 1, 2, 3], [0, 4, 2, 5]], r"the same page only where .* before the last two tokens .* got page 2 in"),
            ([[0, 1, 2, 3], [4, 0, 5, 6]], r"the same page only where .* got page 0 in rows \[0, 1\]"),
            ([[0, 1, 2, 3], [4, 5, 6, 3]], r"the same page only where .* got page 3 in rows \[0, 1\]"),
        ],
    )
    def test_are_refused(self, target, table, message):
        kind = np.float32 if isinstance(table[0][0], float) else np.int32
        with pytest.raises(ValueError, match=message):
            self.start(target, np.array(table, kind))

    def test_a_list(self, target):
        with pytest.raises(ValueError, match=r"pages.table must be an array, got list"):
            self.start(target, [[0, 1, 2, 3], [4, 5, 6, 7]])

    def test_pages_of_other_prompts_are_not_shared(self, target):
        ids = np.zeros((2, 20), np.int32)
        ids[1, 3] = 1
        with pytest.raises(ValueError, match=r"the same prompt up to its end, .* got page 0 in rows \[0, 1\]"):
            self.start(target, np.array([[0, 1, 2, 3], [0, 4, 5, 6]], np.int32), prompts=ids)

    def test_pages_that_a_draft_model_feeds_again_are_not_shared(self):
        """It feeds the last two tokens of a prompt: those in slots 18 and 19 of 20, those in 17 and 18 of 19."""
        paged, ids = Pages(np.array([[0, 1], [0, 2]], np.int32), 24, 18), np.zeros((2, 20), np.int32)
        check_pages_of_prompts(paged, ids, np.array([20, 20]), None)
        with pytest.raises(ValueError, match=r"before the last two tokens of both, got page 0 in rows \[0, 1\]"):
            check_pages_of_prompts(paged, ids, np.array([20, 19]), None)

    @pytest.mark.parametrize("name, number", [("num_pages", 0), ("page_size", 2.0), ("page_size", True)])
    def test_sizes_are_positive_integers(self, target, name, number):
        with pytest.raises(ValueError, match=rf"pages.{name} must be an integer >= 1, got {number}"):
            self.start(target, **{name: number})

    def test_a_bare_table(self, target):
        with pytest.raises(
            ValueError, match=r"pages must be None or Pages\(table, num_pages, page_size\), got ndarray"
        ):
            decode.prefill(
                target,
                None,
                np.zeros((1, 2), np.int32),
                np.array([2]),
                sampling.batch([SamplingParams()]),
                jax.random.key(0),
                max_length=8,
                pages=np.zeros((1, 4), np.int32),
            )

    def test_models_and_proposers_that_take_none(self, target):
        plain = replace(target, takes_pages=False)
        with pytest.raises(ValueError, match="pages must be None for a model whose takes_pages is False"):
            self.start(plain)
        with pytest.raises(ValueError, match="pages must be None for a proposer whose takes_pages is False"):
            self.start(target, proposer=proposers.draft_model(plain, 2))
        inputs = ModelInput(*[jnp.zeros((2, 1), jnp.int32)] * 2, pages=jnp.zeros((2, 3), jnp.int32))
        with pytest.raises(ValueError, match=r"inputs.pages must be None for a model whose takes_pages is False"):
            run(plain, inputs, plain.init_cache(4, 4))
        with pytest.raises(ValueError, match=r"inputs.pages must have shape \[R, P\] = \(2, any\), got \(3, 3\)"):
            run(target, inputs._replace(pages=jnp.zeros((3, 3), jnp.int32)), target.init_cache(4, 4))

    def test_chunk_size(self, target):
        for size in (0, 2.5, True):
            with pytest.raises(ValueError, match=f"chunk_size must be None or an integer >= 1, got {size}"):
                self.start(target, chunk_size=size)

    @pytest.mark.slow
    def test_traced_ones_are_harmless(self, target, draft):
        """Where a table has no values: whatever stands in the rows of others, a good row decodes as it does alone."""
        proposer = proposers.draft_model(draft, 3)
        paged = pages()
        good = start(target, proposer, pages=paged)
        for bad in (-1, paged.num_pages, 2**31 - 1, -(2**31), "twice"):
            table = np.asarray(paged.table).copy()
            table[1:] = table[1:, :1] if bad == "twice" else bad
            state = start(target, proposer, pages=replace(paged, table=jnp.asarray(table)))
            own = table[0]
            for _ in range(4):
                states = [step(target, proposer, s, verifier=REJECTION) for s in (good, state)]
                (good_next, _), (state, _) = states
                good = good_next
            assert_same(state.context.tokens[0], good.context.tokens[0])
            assert_same(*(floats(s.cache, own) for s in (state, good)))
            others = np.setdiff1d(np.arange(paged.num_pages), table)
            assert not any(pool.any() for pool in floats((state.cache, state.proposer.pools), others))
            good = start(target, proposer, pages=paged)
