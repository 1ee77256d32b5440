"""The contract that every verifier keeps, hand-worked cases, edges, and the draw itself."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import pydoc
import re
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distributions, testing, verifiers
from specjax.keys import gumbel, of_step
from specjax.sampling.cut import min_logit
from specjax.types import Categorical, Draft

ROOT = Path(__file__).parent.parent
OPTIONS = {"synthetic": {"acceptance_length": 2.0}}
NAMES = verifiers.__all__
LOSSLESS = [name for name in NAMES if name not in verifiers.LOSSY]
OPTIMIZED = {"xla_backend_optimization_level": 3}  # of programs that run longer than they compile
BATCH, DRAFTS, VOCAB = 64, 3, 50
TRACES = Counter()  # of the functions that `jitted` gives, by verifier


def bound(name):
    """A verifier with the options it cannot do without."""
    return partial(getattr(verifiers, name), **OPTIONS.get(name, {}))


@cache
def jitted(name, **options):
    """A verifier jitted, one function for all tests, so that each form of its arguments is compiled once."""

    def verify(*arguments):
        TRACES[name] += 1
        return getattr(verifiers, name)(*arguments, **(OPTIONS.get(name, {}) | options))

    return jax.jit(verify)


def row_keys(seed=0):
    return jax.random.split(jax.random.key(seed), BATCH)


def example(batch=BATCH, drafts=DRAFTS, vocab=VOCAB, dtype=jnp.float32, seed=0):
    """A draft with rows of all kinds (greedy, sampled, ragged) and its target."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(batch, drafts, vocab))
    tokens = jnp.asarray(np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1), jnp.int32)
    temperature = np.arange(batch, dtype=np.float32) % 3 * np.float32(0.7)
    drawn_from = Categorical(jnp.asarray(logits, dtype), jnp.asarray(np.roll(temperature, 1)))
    drafted = Draft(tokens, drawn_from, jnp.asarray(drafts - np.arange(batch, dtype=np.int32) % (drafts + 1)))
    scored = jnp.asarray(2 * rng.normal(size=(batch, drafts + 1, vocab)), dtype)
    return drafted, Categorical(scored, jnp.asarray(temperature))


@partial(jax.jit, static_argnums=0)
def run_scripted(core, accepted, token, draft, target, **options):
    return core(Scripted(accepted, token), verifiers.canonical(draft), target, **options)


class Scripted:
    """Chance written by hand."""

    def __init__(self, accepted, token):
        self.accepted, self.token = jnp.asarray(accepted), jnp.asarray(token, jnp.int32)

    def flip(self, probabilities):
        return self.accepted

    def pick(self, residual):
        return self.token


class TestGoldenCases:
    def test_walk_through(self):
        """Five drafts, the fourth rejected: three accepted, one recovered, the bonus dropped."""
        draft = Draft(jnp.array([[16, 5, 129, 86, 939]]), Categorical(jnp.zeros((1, 5, 3000))))
        accepted, target = np.array([[True, True, True, False, True]]), Categorical(jnp.zeros((1, 6, 3000)))
        verified = run_scripted(verifiers.rejection.core, accepted, np.array([2949]), draft, target)
        assert verified.tokens.tolist() == [[16, 5, 129, 2949, -1, -1]]
        assert verified.num_accepted.tolist() == [3]

    def test_causal_mask(self):
        accepted = [[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 0]]
        draft = Draft(jnp.zeros((5, 3), jnp.int32), Categorical(jnp.zeros((5, 3, 4))))
        accepted, target = np.array(accepted, bool), Categorical(jnp.zeros((5, 4, 4)))
        verified = run_scripted(verifiers.rejection.core, accepted, np.full(5, 3), draft, target)
        assert verified.num_accepted.tolist() == [1, 0, 2, 3, 0]
        assert verified.tokens.tolist() == [
            [0, 3, -1, -1],
            [3, -1, -1, -1],
            [0, 0, 3, -1],
            [0, 0, 0, 3],
            [3, -1, -1, -1],
        ]

    def test_block_keeps_the_longest_accepted_prefix(self):
        draft = Draft(jnp.zeros((3, 3), jnp.int32), Categorical(jnp.zeros((3, 3, 4))))
        accepted = np.array([[False, True, False], [False, False, True], [False] * 3])
        target = Categorical(jnp.zeros((3, 4, 4)))
        verified = run_scripted(verifiers.block.core, accepted, np.full(3, 3), draft, target)
        assert verified.num_accepted.tolist() == [2, 3, 0]

    def test_bonus_tokens_after_full_acceptance_alone(self):
        draft = Draft(jnp.array([[1, 1], [1, 1], [1, -1]]), Categorical(jnp.zeros((3, 2, 4))))
        accepted = np.array([[True, True], [True, False], [True, False]])
        bonus = np.array([3, 3, 3])
        target = Categorical(jnp.zeros((3, 3, 4)))
        verified = run_scripted(verifiers.rejection.core, accepted, np.full(3, 2), draft, target, bonus_tokens=bonus)
        assert verified.tokens.tolist() == [[1, 1, 3], [1, 2, -1], [1, 3, -1]]

    def test_match_refuses_bonus_tokens(self):
        draft, target = example()
        with pytest.raises(ValueError, match="bonus_tokens must be None"):
            verifiers.match(jax.random.key(0), draft, target, bonus_tokens=jnp.zeros(BATCH, jnp.int32))


class TestTypical:
    def test_threshold_is_exact(self):
        """In a flat distribution 1/V > alpha / V accepts for any V; slack inside the logarithm would reject."""
        vocab = 200_000
        draft = Draft(jnp.zeros((1, 1), jnp.int32))
        verify = jax.jit(partial(verifiers.typical, posterior_alpha=0.9))
        verified = verify(jax.random.key(0), draft, jnp.zeros((1, 2, vocab)))
        assert verified.num_accepted.tolist() == [1]

    def test_hand_worked(self):
        """Entropy .5 ln 2 + .5 ln 4 = 1.0397: the bound is min(.3, .9 * exp(-1.0397)) = .3."""
        target = Categorical.from_probs(jnp.array([[[0.5, 0.25, 0.25], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]]))
        verify = jax.jit(partial(verifiers.typical, posterior_threshold=0.3, posterior_alpha=0.9))
        for tokens, expected in (([0, 1], [0, 1, 2]), ([1, 1], [0, -1, -1]), ([0, 0], [0, 1, -1])):
            verified = verify(jax.random.key(0), Draft(jnp.array([tokens])), target)
            assert verified.tokens.tolist() == [expected]

    def test_greedy_row(self):
        target = Categorical(jnp.log(jnp.array([[[0.6, 0.4], [0.6, 0.4]]])), jnp.zeros(1))
        for token, expected in ((0, [0, 0]), (1, [0, -1])):
            verified = jitted("typical")(jax.random.key(0), Draft(jnp.array([[token]])), target)
            assert verified.tokens.tolist() == [expected]

    @pytest.mark.parametrize(
        "option",
        [{"posterior_threshold": -0.1}, {"posterior_threshold": 2}, {"posterior_alpha": -1}, {"posterior_alpha": None}],
    )
    def test_bad_options(self, option):
        with pytest.raises(ValueError, match=next(iter(option))):
            verifiers.typical(jax.random.key(0), *example(), **option)


class TestSynthetic:
    @pytest.mark.parametrize(
        "option, rates",
        [({"acceptance_length": 2.5}, [1, 0.5, 0]), ({"acceptance_rates": [0.9, 0.6, 0.6]}, [0.9, 0.6, 0.6])],
    )
    def test_rates(self, option, rates):
        draft = Draft(jnp.zeros((100_000, 3), jnp.int32))
        verified = jax.jit(verifiers.synthetic)(jax.random.key(0), draft, jnp.zeros((100_000, 4, 2)), **option)
        for i, rate in enumerate(rates):
            assert float((verified.num_accepted > i).mean()) == pytest.approx(rate, abs=0.01)

    @pytest.mark.parametrize(
        "options, message",
        [
            ({}, "exactly one of acceptance_rates and acceptance_length must be given, got neither"),
            ({"acceptance_rates": [1, 1, 1], "acceptance_length": 2}, "got both"),
            ({"acceptance_rates": "abc"}, r"acceptance_rates must be numbers \[K\], got 'abc'"),
            ({"acceptance_rates": [1, 1]}, r"acceptance_rates must have shape \[K\] = \(3,\)"),
            ({"acceptance_rates": [0.5, 0.6, 0.1]}, "acceptance_rates must be non-increasing"),
            ({"acceptance_rates": [1.5, 0.6, 0.1]}, "acceptance_rates must be non-increasing and in"),
            ({"acceptance_length": 0.5}, r"acceptance_length must be in \[1, K\+1 = 4\], got 0.5"),
            ({"acceptance_length": "long"}, r"acceptance_length must be in \[1, K\+1 = 4\], got 'long'"),
            ({"acceptance_length": 5}, r"acceptance_length must be in \[1, K\+1 = 4\], got 5"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            verifiers.synthetic(jax.random.key(0), *example(), **options)


@pytest.mark.parametrize("name", NAMES)
class TestContract:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "batch, drafts, dtype, runs",
        [
            (BATCH, DRAFTS, jnp.bfloat16, False),
            (1, 1, jnp.float32, False),
            (0, DRAFTS, jnp.float32, True),
            (BATCH, 0, jnp.float32, True),
            (0, 0, jnp.bfloat16, False),
        ],
    )
    def test_shapes_and_dtypes(self, name, batch, drafts, dtype, runs):
        """Where there is nothing to verify it runs too."""
        draft, target = example(batch, drafts, dtype=dtype)
        options = {"acceptance_length": 1.0} if name == "synthetic" and drafts == 0 else {}
        verify = jitted(name, log_probs=True, **options)
        verified = (verify if runs else partial(jax.eval_shape, verify))(jax.random.key(0), draft, target)
        assert verified.tokens.shape == (batch, drafts + 1)
        assert verified.num_accepted.shape == (batch,)
        assert verified.log_probs.shape == (batch, drafts + 1)
        assert (verified.tokens.dtype, verified.num_accepted.dtype) == (jnp.int32, jnp.int32)
        assert verified.log_probs.dtype == jnp.float32

    def test_form_of_the_output(self, name):
        draft, target = example()
        verified = jitted(name)(row_keys(), draft, target)
        tokens, accepted = np.asarray(verified.tokens), np.asarray(verified.num_accepted)
        assert ((accepted >= 0) & (accepted <= np.asarray(draft.num_tokens))).all()
        index = np.arange(DRAFTS + 1)
        assert (tokens[index > accepted[:, None]] == -1).all()
        assert ((tokens >= 0) == (index <= accepted[:, None])).all()
        is_draft = index[:DRAFTS] < accepted[:, None]
        assert (tokens[:, :DRAFTS][is_draft] == np.asarray(draft.tokens)[is_draft]).all()
        assert (tokens < VOCAB).all()

    @pytest.mark.slow
    def test_vmap(self, name):
        keys = jax.random.split(jax.random.key(0), (3, BATCH))
        examples = [example(seed=i) for i in range(3)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *examples)
        mapped = jax.jit(jax.vmap(bound(name)))(keys, *stacked)
        for i, one in enumerate(examples):
            np.testing.assert_array_equal(mapped.tokens[i], jitted(name)(keys[i], *one).tokens)

    @pytest.mark.slow
    def test_permutation(self, name):
        order = np.random.default_rng(1).permutation(BATCH)
        for keys in (row_keys(), of_step(row_keys(), BATCH, DRAFTS)):
            arguments = keys, *example()
            straight = jax.tree.map(lambda x: x[order], jitted(name)(*arguments))
            permuted = jitted(name)(*jax.tree.map(lambda x: x[order], arguments))
            jax.tree.map(np.testing.assert_array_equal, permuted, straight)

    @pytest.mark.slow
    def test_neighbours(self, name):
        whole = jitted(name)(row_keys(), *example())
        part = jitted(name)(*jax.tree.map(lambda x: x[1:40], (row_keys(), *example())))
        np.testing.assert_array_equal(whole.tokens[1:40], part.tokens)

    def test_one_trace_for_many_values(self, name):
        jitted(name)(row_keys(), *example())
        first = TRACES[name]
        for seed in range(1, 3):
            jitted(name)(row_keys(seed), *example(seed=seed))
        assert TRACES[name] == first > 0

    def test_key_forms_of_one_request_agree(self, name):
        """A key of a row equals the keys of the K+1 positions that it is spread over."""
        keys = row_keys()
        spread = of_step(keys, BATCH, DRAFTS)
        assert spread.shape == (BATCH, DRAFTS + 1)
        by_row, by_position = (jitted(name)(k, *example()) for k in (keys, spread))
        np.testing.assert_array_equal(by_row.tokens, by_position.tokens)

    @pytest.mark.slow
    def test_log_probs(self, name):
        draft, target = example()
        verified = jitted(name, log_probs=True)(jax.random.key(0), draft, target)
        with np.errstate(divide="ignore"):
            expected = np.stack(
                [
                    np.log(np.maximum(testing.probabilities(row, float(t)), 0))
                    for row, t in zip(target.logits, target.temperature, strict=True)
                ]
            )
        tokens = np.asarray(verified.tokens)
        chosen = np.take_along_axis(expected, np.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(verified.log_probs, np.where(tokens >= 0, chosen, 0), atol=1e-5)

    def test_garbage_past_the_drafts_is_not_read(self, name):
        draft, target = example()
        past = jnp.arange(DRAFTS)[None, :, None] >= draft.num_tokens[:, None, None]
        logits = jnp.where(past, jnp.nan, draft.distribution.logits)
        beyond = jnp.arange(DRAFTS + 1)[None, :, None] > draft.num_tokens[:, None, None]
        poisoned = (
            Draft(
                jnp.where(past[..., 0], 10**6, draft.tokens),
                draft.distribution._replace(logits=logits),
                draft.num_tokens,
            ),
            target._replace(logits=jnp.where(beyond, jnp.nan, target.logits)),
        )
        clean, dirty = (jitted(name)(row_keys(), *x) for x in ((draft, target), poisoned))
        np.testing.assert_array_equal(clean.tokens, dirty.tokens)

    @pytest.mark.slow
    def test_minus_one_ends_the_row(self, name):
        draft, target = example()
        ended = draft._replace(tokens=draft.tokens.at[:, 1].set(-1), num_tokens=None)
        short = draft._replace(num_tokens=jnp.ones(BATCH, jnp.int32))
        first, second = (jitted(name)(row_keys(), d, target) for d in (ended, short))
        np.testing.assert_array_equal(first.tokens, second.tokens)
        assert int(first.num_accepted.max()) <= 1

    @pytest.mark.parametrize(
        "fill, where",
        [(jnp.nan, "target"), (jnp.nan, "both"), (-jnp.inf, "draft"), (-jnp.inf, "both"), (jnp.inf, "both")],
    )
    def test_ids_stay_in_range_on_broken_rows(self, name, fill, where):
        draft, target = example()
        if where != "draft":
            target = target._replace(logits=target.logits.at[::2].set(fill))
        if where != "target":
            draft = draft._replace(
                distribution=draft.distribution._replace(logits=draft.distribution.logits.at[::3].set(fill))
            )
        verified = jitted(name)(row_keys(), draft, target)
        emitted = np.arange(DRAFTS + 1) <= np.asarray(verified.num_accepted)[:, None]
        tokens = np.asarray(verified.tokens)
        assert ((tokens[emitted] >= 0) & (tokens[emitted] < VOCAB)).all()
        assert (tokens[~emitted] == -1).all()

    @pytest.mark.parametrize(
        "change, message",
        [
            (
                lambda k, d, t: (k, d, t._replace(logits=t.logits[:, :-1])),
                r"target must have shape \[B, K\+1, V\] = \(4, 4, any\), got \(4, 3, 50\)",
            ),
            (lambda k, d, t: (k, d, t._replace(logits=t.logits[:2])), r"target must have shape"),
            (
                lambda k, d, t: (k, d, t._replace(temperature=jnp.ones(3))),
                r"target.temperature must have shape \[B\] = \(4,\), got \(3,\)",
            ),
            (lambda k, d, t: (k, d, "ab"), r"draft, target and bonus_tokens must hold arrays of numbers: .*'ab'"),
            (lambda k, d, t: (k, d, None), r"target must be a specjax.Categorical or its logits .*, got None"),
            (
                lambda k, d, t: (k, d, t._replace(logits=t.logits.astype(jnp.int32))),
                r"target must be of one of the dtypes float32, bfloat16, float16, float64, got int32",
            ),
            (
                lambda k, d, t: (k, d._replace(tokens=d.tokens[0]), t),
                r"draft.tokens must have shape \[B, K\] = \(any, any\), got \(3,\)",
            ),
            (lambda k, d, t: (k, d._replace(tokens=d.tokens * 1.0), t), r"draft.tokens must be of integer dtype"),
            (
                lambda k, d, t: (k, d._replace(num_tokens=jnp.ones(3, jnp.int32)), t),
                r"draft.num_tokens must have shape",
            ),
            (
                lambda k, d, t: (k, d._replace(distribution=Categorical(jnp.zeros((4, 3, 49)))), t),
                r"draft.distribution must have shape \[B, K, V\] = \(4, 3, 50\), got \(4, 3, 49\)",
            ),
            (
                lambda k, d, t: (k, d._replace(distribution=jnp.zeros((4, 3, 50))), t),
                r"draft.distribution must be a Categorical or None",
            ),
            (lambda k, d, t: (jax.random.PRNGKey(0), d, t), r"keys must be typed keys"),
            (lambda k, d, t: (jax.random.key(0, impl="rbg"), d, t), r"keys must be threefry keys"),
            (
                lambda k, d, t: (jax.random.split(k, 3), d, t),
                r"keys must have shape \[\], \[B\] = \(4,\) or \[B, K\+1\] = \(4, 4\), got \(3,\)",
            ),
        ],
    )
    def test_bad_shapes(self, name, change, message):
        with pytest.raises(ValueError, match=message):
            bound(name)(*change(jax.random.key(0), *example(4)))

    def test_x64_with_strict_promotion(self, name):
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            verified = jax.eval_shape(bound(name), jax.random.key(0), *example())
        assert verified.tokens.dtype == verified.num_accepted.dtype == jnp.int32

    def test_bad_implementation(self, name):
        with pytest.raises(ValueError, match="implementation must be None, 'xla', 'pallas' or 'interpret', got 'cuda'"):
            bound(name)(jax.random.key(0), *example(), implementation="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "match", "typical"])  # the steps of the others are in these
def test_eager_is_jit(name):
    arguments = row_keys(), *example()
    for eager, compiled in zip(bound(name)(*arguments), jitted(name)(*arguments), strict=True):
        np.testing.assert_array_equal(eager, compiled)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "synthetic"])  # which accepts by a given rate
def test_drafts_outside_the_vocabulary_are_rejected(name):
    draft, target = example()
    wild = Draft(jnp.full_like(draft.tokens, VOCAB + 7), draft.distribution._replace(temperature=jnp.ones(BATCH)))
    verified = jitted(name)(row_keys(), wild, target)
    assert verified.num_accepted.tolist() == [0] * BATCH
    assert int(verified.tokens.max()) < VOCAB


@pytest.mark.parametrize("name", [n for n in NAMES if n != "synthetic"])  # which accepts by a given rate
def test_greedy_rows_of_a_mixed_batch(name):
    """Rows of temperature 0 emit the argmax at every position, lowest id on ties, beside sampled rows."""
    draft, target = example()
    logits = target.logits.at[:, :, 7].set(9.0).at[:, :, 30].set(9.0)
    drafts = draft.tokens.at[:, 0].set(7)
    verified = jitted(name)(row_keys(), draft._replace(tokens=drafts), target._replace(logits=logits))
    greedy = np.asarray(verified.tokens)[np.asarray(target.temperature) == 0]
    assert set(greedy.ravel()) <= {7, -1}


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_greedy_row_accepts_its_argmax_though_it_is_impossible_for_the_draft(name):
    logits = jnp.zeros((1, 3, VOCAB)).at[:, :, 7].set(9)
    drawn_from = Categorical(jnp.zeros((1, 2, VOCAB)).at[:, :, 7].set(-jnp.inf))
    draft, target = Draft(jnp.array([[7, 7]]), drawn_from), Categorical(logits, jnp.zeros(1))
    assert jitted(name)(jax.random.key(0), draft, target).tokens.tolist() == [[7, 7, 7]]


@pytest.mark.slow
@pytest.mark.parametrize("name, is_cut", [("rejection", True), ("match", True), ("match", False)])
def test_nothing_of_the_size_of_the_logits_is_written(name, is_cut):
    batch, drafts, vocab = 8, 7, 128256

    def categorical(rows):
        cut = jax.ShapeDtypeStruct((batch, rows), jnp.float32) if is_cut else None
        temperature = jax.ShapeDtypeStruct((batch,), jnp.float32)
        return Categorical(jax.ShapeDtypeStruct((batch, rows, vocab), jnp.float32), temperature, cut)

    draft = Draft(jax.ShapeDtypeStruct((batch, drafts), jnp.int32), categorical(drafts))
    arguments = jax.eval_shape(lambda: jax.random.key(0)), draft, categorical(drafts + 1)
    memory = jax.jit(getattr(verifiers, name)).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * batch * (2 * drafts + 1) * vocab / 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LOSSLESS if n != "match"])
def test_a_known_normalizer_changes_nothing(name):
    draft, target = example()
    logits, temperature = draft.distribution[:2]
    safe = jnp.where(temperature > 0, temperature, 1)[:, None, None]
    known = draft.distribution._replace(log_normalizer=jax.nn.logsumexp(logits / safe, axis=-1))
    target_safe = jnp.where(target.temperature > 0, target.temperature, 1)[:, None, None]
    target_known = target._replace(log_normalizer=jax.nn.logsumexp(target.logits / target_safe, axis=-1))
    expected = jitted(name)(row_keys(), draft, target)
    both = draft._replace(distribution=known), target_known
    np.testing.assert_array_equal(jitted(name)(row_keys(), *both).tokens, expected.tokens)


@pytest.mark.parametrize("name", [n for n in LOSSLESS if n != "match"])
def test_a_uniform_of_zero_does_not_accept_an_impossible_draft(name, monkeypatch):
    monkeypatch.setattr(verifiers.draws, "uniform", lambda keys, shape=(): jnp.zeros((*keys.shape, *shape)))
    target = Categorical(jnp.zeros((1, 2, 4)).at[0, 0, 2].set(-jnp.inf))
    draft = Draft(jnp.array([[2]]), Categorical(jnp.zeros((1, 1, 4))))
    verified = jax.jit(partial(getattr(verifiers, name)))(jax.random.key(0), draft, target)  # traced with this uniform
    assert verified.num_accepted.tolist() == [0]
    assert verified.tokens[0, 0] != 2


@pytest.mark.parametrize("name", ["block", "rejection"])
def test_the_recovered_token_is_never_the_rejected_draft(name):
    for seed in range(8):
        draft, target = example(vocab=5, seed=seed)
        draft_logits, target_logits = (
            jnp.pad(x.logits, ((0, 0), (0, 0), (0, VOCAB - 5)), constant_values=-jnp.inf)
            for x in (draft.distribution, target)
        )
        draft = draft._replace(distribution=draft.distribution._replace(logits=draft_logits))
        verified = jitted(name)(row_keys(seed), draft, Categorical(target_logits, jnp.ones(BATCH)))
        rows = np.flatnonzero(np.asarray(verified.num_accepted) < np.asarray(draft.num_tokens))
        at = np.asarray(verified.num_accepted)[rows]
        assert (np.asarray(verified.tokens)[rows, at] != np.asarray(draft.tokens)[rows, at]).all()


@jax.jit
def pick_token(logits, uniforms):
    return distributions.pick(distributions.Residual(distributions.normalize(Categorical(logits))), uniforms)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("vocab", [1, 2, 100, 8193, 10000, 50272, 151936])
def test_the_ends_of_the_vocabulary(vocab, uniform):
    """The extreme uniforms give the first and the last token with any mass, never an id without."""
    logits = jnp.zeros((1, 1, vocab)).at[0, 0, : vocab // 4].set(-jnp.inf).at[0, 0, vocab - vocab // 4 :].set(-jnp.inf)
    token = pick_token(logits, jnp.full((1, 2), uniform))
    assert token.tolist() == [vocab // 4 if uniform == 0 else vocab - vocab // 4 - 1]


def test_former_names_warn_and_do_the_same():
    _, target = example()
    rows = jnp.arange(BATCH) % 2
    normalized = distributions.normalize_drafts(target)
    with pytest.warns(DeprecationWarning, match="of_drafts is now called normalize_drafts"):
        former = distributions.of_drafts(target)
    assert (former.log_mass == normalized.log_mass).all() and former.argmax is normalized.argmax is None
    with pytest.warns(DeprecationWarning, match="take_law is now called take_row"):
        row = distributions.take_law(normalized, rows)
    assert (row.shift == distributions.take_row(normalized, rows).shift).all()


@pytest.mark.slow
class TestTheDraw:
    """The inverse CDF in float32, over all points of the grids of its two uniforms."""

    def first_above_probabilities(self, weights):
        """Probability of each index of `_first_above`: how many of the 2**24 uniforms give it."""
        total = np.asarray(jnp.cumsum(jnp.asarray(weights)[None], axis=-1))[0]
        mass = total[-1]
        count = np.clip(np.ceil(total.astype(np.float64) / mass * 2**24).astype(np.int64) + 2, 0, 2**24)
        for _ in range(5):  # uniforms u with float32(u * mass) < total
            bound = (np.maximum(count - 1, 0) * np.float32(2**-24)).astype(np.float32) * mass
            count = np.where(
                (count > 0) & ~(np.minimum(bound, np.nextafter(mass, np.float32(0))) < total), count - 1, count
            )
        count = np.where(np.asarray(weights) > 0, count, 0)
        return np.diff(np.maximum.accumulate(count), prepend=0) / 2**24

    def logits_rows(self):
        vocab = 128256
        rng = np.random.default_rng(0)
        yield np.zeros(vocab)
        yield -np.log(np.arange(1, vocab + 1))
        yield 2 * rng.normal(size=vocab)
        yield np.where(np.arange(vocab) == 77_777, 14.0, 0.0)

    def test_counted_on_the_grid(self):
        for logits in self.logits_rows():
            logits = jnp.asarray(logits, jnp.float32)[None, None]
            residual = distributions.Residual(distributions.normalize(Categorical(logits)))
            weights = np.asarray(distributions.residual_weights(residual))[0]
            blocks = np.pad(weights, (0, -len(weights) % distributions.BLOCK_SIZE)).reshape(
                -1, distributions.BLOCK_SIZE
            )
            block_probabilities = self.first_above_probabilities(np.asarray(jnp.sum(jnp.asarray(blocks), axis=-1)))
            distribution = np.concatenate(
                [p * self.first_above_probabilities(b) for p, b in zip(block_probabilities, blocks, strict=True)]
            )[: len(weights)]
            exact = testing.probabilities(np.asarray(logits[0, 0], np.float64))
            assert distribution.sum() == pytest.approx(1, abs=1e-6)
            assert testing.total_variation(distribution, exact) < 5e-5

    def test_the_count_is_of_the_function(self):
        rng = np.random.default_rng(1)
        weights = rng.random(37).astype(np.float32) * (rng.random(37) < 0.7)
        drawn = distributions._first_above(
            jnp.broadcast_to(weights, (200_000, 37)), jnp.asarray(rng.integers(0, 2**24, 200_000) / 2**24, jnp.float32)
        )
        counts = np.bincount(np.asarray(drawn), minlength=37)
        test = testing.chi_square(counts, self.first_above_probabilities(weights))
        assert test.statistic < test.bound

    def test_gumbel_noise_has_a_resolved_tail(self):
        """The largest of many draws follows its distribution past the 16.6 where a 23-bit uniform ends."""
        draw = jax.jit(lambda keys: gumbel(keys, (1 << 20,)), compiler_options=OPTIMIZED)
        noise = np.asarray(draw(jax.random.split(jax.random.key(0), 64)))
        assert noise.max() > 16.8
        assert np.isfinite(noise).all()
        tail = noise[noise > 12]
        expected = noise.size * -np.expm1(-np.exp(-12.0))
        assert abs(tail.size - expected) < 6 * expected**0.5
        assert len(np.unique(tail)) > 0.9 * tail.size


VOCAB_SAMPLED, SAMPLES, CHUNK = 4096, 200_000, 1000  # larger arrays leave the processor's cache


@pytest.mark.parametrize("name", LOSSLESS)
def test_deterministic_drafts_are_verified_by_match(name):
    draft, target = example()
    draft = draft._replace(distribution=None)
    by_match = jitted("match")(row_keys(), draft, target)
    np.testing.assert_array_equal(jitted(name)(row_keys(), draft, target).tokens, by_match.tokens)


@cache
def first_tokens(name):
    """Jitted: the first token of CHUNK rows."""

    def draw(key, target_logits, temperature, cut, draft_logits, draft_sums):
        draft_key, key = jax.random.split(key)
        if name == "match":  # whose tokens do not depend on the drafts
            draft = Draft(jnp.zeros((CHUNK, 0), jnp.int32))
        else:
            uniforms = jax.random.uniform(draft_key, (CHUNK, 1))
            tokens = jnp.minimum(jnp.searchsorted(draft_sums, uniforms, side="right"), VOCAB_SAMPLED - 1)
            draft = Draft(tokens.astype(jnp.int32), Categorical(draft_logits, rows=jnp.zeros((CHUNK, 1), jnp.int32)))
        num_rows = draft.tokens.shape[1] + 1
        rows = jnp.broadcast_to(jnp.arange(num_rows)[None], (CHUNK, num_rows))
        scored = Categorical(target_logits, jnp.full(CHUNK, temperature), cut, rows=rows)
        return getattr(verifiers, name)(key, draft, scored).tokens[:, 0]

    return jax.jit(draw, compiler_options=OPTIMIZED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, temperature, top_p",
    [
        ("rejection", 0.0, 0.9),
        ("rejection", 0.6, 1.0),
        ("rejection", 1.0, 0.9),
        ("block", 1.7, 1.0),
        ("match", 1.0, 0.9),
    ],
)
def test_sampled_distribution(name, temperature, top_p):
    """200,000 first tokens of a vocabulary of 4096 against the distribution, by chi-square.

    Every verifier at every temperature is enumerated in test_law.py. Here it is the draws from a large vocabulary that
    count: the draw of a recovered token, which rejection and block share, and the draw of a sample. Drafts are sampled
    for rejection and block; deterministic ones they verify by match.
    """
    rng = np.random.default_rng(5)
    target_logits, draft_logits = (1.5 * rng.normal(size=(2, VOCAB_SAMPLED))).astype(np.float32)
    draft_logits = 0.5 * (target_logits + draft_logits)
    logits = jnp.stack([target_logits] * 2)
    cut = min_logit(logits, temperature=jnp.full(2, temperature), top_p=jnp.full(2, top_p))
    distribution = testing.probabilities(
        np.where(target_logits >= np.asarray(cut)[0], target_logits, -np.inf), temperature
    )
    draft_sums = jnp.asarray(np.cumsum(testing.probabilities(draft_logits)), jnp.float32)
    chunks = 1 if temperature == 0 else SAMPLES // CHUNK
    tokens = [
        first_tokens(name)(key, logits, temperature, cut, draft_logits[None], draft_sums)
        for key in jax.random.split(jax.random.key(0), chunks)
    ]
    test = testing.chi_square(np.bincount(np.concatenate(tokens), minlength=VOCAB_SAMPLED), distribution)
    assert test.statistic < test.bound


@pytest.mark.parametrize("name", verifiers.__all__)
def test_help_shows_what_a_caller_passes(name):
    verifier = getattr(verifiers, name)
    parameters = inspect.signature(verifier).parameters
    assert list(parameters)[:3] == ["keys", "draft", "target"]
    assert {"bonus_tokens", "log_probs", "implementation"} <= set(parameters)
    assert "draw" not in parameters
    own = {
        "typical": {"posterior_threshold", "posterior_alpha"},
        "synthetic": {"acceptance_rates", "acceptance_length"},
    }
    assert own.get(name, set()) <= set(parameters)
    shown = pydoc.render_doc(verifier, renderer=pydoc.plaintext)
    named = re.findall(r"^ +(\w+): ", shown.partition("Args:")[2].split("Returns:")[0], flags=re.MULTILINE)
    unnamed = sorted(set(parameters) - set(named))
    assert not unnamed, f"the section `Args:` in the docstring of {name} is missing, or names no {', '.join(unnamed)}"
    assert inspect.getdoc(verifier.core).splitlines()[0] in shown


def test_the_signature_of_a_core_has_the_arguments_that_it_takes():
    @verifiers.from_core
    def own(draw, draft, target, *, bonus_tokens=None, log_probs=False, chance=0.5):
        raise AssertionError("not reached")

    names = ["keys", "draft", "target", "chance", "bonus_tokens", "log_probs", "implementation"]
    assert list(inspect.signature(own).parameters) == names
    assert "outcomes" not in inspect.signature(verifiers.block).parameters


@pytest.mark.parametrize("name", verifiers.__all__)
def test_a_verifier_compares_by_value_and_pickles_by_name(name):
    verifier = getattr(verifiers, name)
    again = type(verifier)(verifier.core, verifier.kernel, verifier.check_options)
    assert again == verifier and hash(again) == hash(verifier)
    assert dataclasses.replace(verifier, kernel=None) != verifier
    assert pickle.loads(pickle.dumps(verifier)) is copy.deepcopy(verifier) is verifier
    assert (verifier.__name__, verifier.__module__) == (name, f"specjax.verifiers.{name}")
    with pytest.raises(dataclasses.FrozenInstanceError):
        verifier.kernel = None


@pytest.mark.slow
def test_equal_verifiers_are_traced_once():
    traces = []

    @jax.jit
    def verify(verifier, draft, target):
        traces.append(verifier)
        return verifier(jax.random.key(0), draft, target).tokens

    draft, target = example(2)
    for core in (verifiers.block, verifiers.from_core(verifiers.block.core, kernel=verifiers.block.kernel)):
        verify(jax.tree_util.Partial(core), draft, target)
        verify(jax.tree_util.Partial(core, bonus_tokens=jnp.zeros(2, jnp.int32)), draft, target)
    assert len(traces) == 2  # one without bonus tokens, one with them


CALLS = """
import jax
import jax.numpy as jnp

from specjax import Draft, verifiers
from specjax.types import Verifier

keys, draft, target = jax.random.key(0), Draft(jnp.zeros((1, 1), jnp.int32)), jnp.zeros((1, 2, 3))
reveal_type(verifiers.rejection.__call__)
reveal_type(verifiers.typical.__call__)
made: Verifier = verifiers.typical
plain: Verifier = lambda keys, draft, target: verifiers.block(keys, draft, target)
verifiers.match(keys, draft, target, log_probs=True, implementation="xla").num_accepted
verifiers.match(keys, draft)
verifiers.match(keys, draft, target, log_probs="yes")
verifiers.synthetic(keys, draft, target, acceptance_lenght=2.0)
"""


@pytest.mark.slow
def test_type_checkers_see_the_arguments(tmp_path):
    """Pyright shows the signatures, and finds a missing argument, a wrong type and a misspelt option."""
    pytest.importorskip("pyright")
    (tmp_path / "calls.py").write_text(CALLS)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "calls.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    shown = [x["message"] for x in found if x["severity"] == "information"]
    common = "bonus_tokens: Array | None = None, log_probs: bool = False"
    assert f"target: Categorical | Array, *, {common}, outcomes: bool = False" in shown[0]
    assert "posterior_threshold: float | Array = 0.09, posterior_alpha: float | Array = 0.3" in shown[1]
    errors = [(x["range"]["start"]["line"], x["message"]) for x in found if x["severity"] == "error"]
    expected = [(13, 'parameter "target"'), (14, 'parameter "log_probs"'), (15, '"acceptance_lenght"')]
    for (line, message), (expected_line, part) in zip(errors, expected, strict=True):
        assert line == expected_line and part in message


def test_a_core_without_its_keywords_is_named():
    with pytest.raises(ValueError, match=r"core must take .*, got plain without bonus_tokens and log_probs: write"):

        @verifiers.from_core
        def plain(draw, draft, target):
            raise AssertionError("not reached")


@pytest.mark.parametrize("argument", ["log_probs", "outcomes"])
def test_a_traced_static_argument_is_named(argument):
    with pytest.raises(ValueError, match=rf"{argument} must be static, .*static_argnames='{argument}'"):
        jax.jit(verifiers.match)(row_keys(), *example(), **{argument: True})
