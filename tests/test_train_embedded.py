"""The last stage of the embedded target's training: what counts as a repetition, its loss, and that it helps."""

import importlib
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.training import loop

SCRIPTS = Path(__file__).parent.parent / "scripts"
LINE = re.compile(r"step (\d+): loss ([\d.]+)")
TINY = DecoderConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=24, max_length=128
)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("train_embedded")


@pytest.fixture
def texts(script):
    starts = jnp.arange(0, 4000, 100)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, TINY.vocab_size, 4000), jnp.uint16).at[starts].set(0)
    return script.Texts(tokens, starts, jnp.int32(1000), tokens[:400], tokens[:200])


@pytest.fixture
def tiny(script, monkeypatch):
    """The script with models, rows and calls of a size for tests."""
    sizes = {"CROP": 32, "SAMPLE": 96, "STEPS_PER_CALL": 4, "ROWS_PER_CALL": 64, "WARM_UP": 4}
    for name, value in (sizes | {"TARGET": TINY}).items():
        monkeypatch.setattr(script, name, value)
    return script


@pytest.fixture
def clock(monkeypatch):
    """The clock of the loop, which goes on a quarter of a second when it is read."""
    clock = SimpleNamespace(now=0.0)

    def perf_counter():
        clock.now += 0.25
        return clock.now

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=perf_counter))
    return clock


def repeated_by_definition(row, length, times):
    """Which tokens stand in a run whose tokens stood `times` times before in the row."""
    found, counts = [False] * len(row), {}
    for i in range(len(row) - length + 1):
        run = tuple(row[i : i + length])
        if counts.get(run, 0) >= times:
            found[i : i + length] = [True] * length
        counts[run] = counts.get(run, 0) + 1
    return found


def test_what_counts_as_repeated(script):
    random = np.random.default_rng(0)
    run, gap = list(range(1, 9)), list(range(20, 24))
    rows = [
        [*run, *gap, *run, *gap[::-1], *run, 30, 31, 32],  # the third time counts, and all of it
        [*run, *gap, *run, *gap[::-1], *run[:7], 30, 31, 32, 33],  # a token too short
        [*([5] * 9), *range(30, 56)],  # two runs that overlap, not yet three
        [*([5] * 10), *range(30, 55)],
        *random.integers(0, 2, (4, 35)).tolist(),
        *np.tile(random.integers(0, 3, (4, 5)), 7).tolist(),
    ]
    expected = np.array([repeated_by_definition(row, 8, 2) for row in rows])
    assert expected[0].sum() == 8 and not expected[1:3].any() and expected[3].sum() == 8
    np.testing.assert_array_equal(jax.jit(script.is_repeated)(jnp.array(rows)), expected)


def test_texts_that_the_target_has_not_learned(tiny, texts):
    """They are the validation files, or the others where there are none."""
    found = tiny.unlearned(texts)
    np.testing.assert_array_equal(found.training, texts.validation)
    np.testing.assert_array_equal(found.starts, [0, 100, 200, 300])
    assert found.num_stdlib == 400
    none = texts._replace(validation=texts.validation[:0])
    assert tiny.unlearned(none) is none


def test_unlikelihood(script, x64):
    """Its value by definition and its gradient by finite differences; it is finite where the token is certain."""
    logits = 2 * np.random.default_rng(1).normal(size=(5, 7))
    tokens, rows = np.array([0, 3, 6, 2, 2]), np.arange(5)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    loss = jax.jit(script.unlikelihood)
    np.testing.assert_allclose(loss(logits, tokens), -np.log1p(-probs[rows, tokens]), atol=1e-12)
    found, step = jax.jit(jax.grad(lambda x: script.unlikelihood(x, tokens).sum()))(logits), 1e-6
    for v in range(7):
        shift = step * np.eye(7)[v : v + 1]
        expected = (loss(logits + shift, tokens) - loss(logits - shift, tokens)) / (2 * step)
        np.testing.assert_allclose(found[:, v], expected, atol=1e-7)
    certain = jnp.array([60.0, 0.0, 0.0], jnp.float32)
    value, slope = jax.value_and_grad(script.unlikelihood)(certain, jnp.int32(0))
    np.testing.assert_allclose([value, slope[0]], [60 - np.log(2), 1], rtol=1e-6)


def test_the_loss_is_the_weighted_unlikelihood_of_marked_tokens(tiny, texts):
    """The target is unchanged, so its divergence is 0 everywhere; there is one row."""
    params = init_params(TINY, seed=0)
    params["embedding"] *= 15
    before = decoder_model(TINY, tiny.bfloat16(params))
    random = np.random.default_rng(2)
    row = jnp.asarray(random.integers(1, TINY.vocab_size, (1, tiny.SAMPLE + 1)), jnp.int32)
    is_marked = random.integers(0, 2, row.shape).astype(bool)
    loss = jax.jit(partial(tiny.calm_loss, num_tokens=2 * tiny.SAMPLE))
    found = loss(params, jax.random.key(0), before, texts, row, jnp.asarray(is_marked))
    logits = np.asarray(jax.jit(tiny.logits_of)(before, row[:, :-1]), np.float64)[0]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = probs[np.arange(tiny.SAMPLE), row[0, 1:]]
    expected = -tiny.REPEATED_WEIGHT * (np.log1p(-chosen) * is_marked[0, 1:]).sum() / (2 * tiny.SAMPLE)
    np.testing.assert_allclose(found, expected, rtol=2e-2)


@pytest.mark.slow
def test_the_stage_ends_repetitions(tiny, texts, clock, tmp_path, capsys, monkeypatch):
    """A target that says each token again learns not to; called again, the stage is done."""
    for name, value in {"CALM_RATE": 3e-2, "REPEATED_WEIGHT": 5.0}.items():
        monkeypatch.setattr(tiny, name, value)
    monkeypatch.setattr(tiny, "look_at_target", lambda texts, out, params: None)
    params = init_params(TINY, seed=0)
    params["embedding"] *= 15  # the logit of the token itself is large

    def share_of_repeated(params):
        *_, is_marked = tiny.own_rows(params, jax.random.key(0), None, texts, num_rows=64)
        return float(is_marked[1::2].mean())  # of rows that are not greedy

    def calm():
        return tiny.calm_target(jax.tree.map(jnp.copy, params), texts, 0.25, 1024, tmp_path, tmp_path).params

    before, trained = share_of_repeated(params), calm()
    after = share_of_repeated(trained)
    assert before > 0.2 and after < before / 2, (before, after)
    capsys.readouterr()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), trained, calm())
    assert re.fullmatch(r"calm target: going on from step \d+, 15 s\n", capsys.readouterr().out)


def test_the_clock_of_training(tiny, texts, clock, tmp_path, capsys, monkeypatch):
    """Each stage has its share of the time, compiling has none, and a run that was cut off goes on."""

    def slow_compile(step, shapes, compile_step=loop.compile_step):
        clock.now += 1000
        return compile_step(step, shapes)

    monkeypatch.setattr(loop, "compile_step", slow_compile)
    monkeypatch.setattr(tiny, "SECONDS_PER_SAVE", 0)

    def loss(params, key, texts, *, num_tokens, value):
        return value + 0 * sum(jnp.sum(x) for x in jax.tree.leaves(params))

    parts = [tiny.Part(b, partial(loss, num_tokens=8, value=v), (texts,)) for b, v in ((0.0, 1.0), (0.5, 2.0))]

    def run(look):
        tiny.train("tiny", init_params(TINY, seed=0), 1e-3, 0.5, parts, tmp_path / "state", look)

    def lines():
        return [(int(step), float(value)) for step, value in LINE.findall(capsys.readouterr().out)]

    def cut_off(params):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cut_off)
    first = lines()
    run(lambda params: None)
    second = lines()
    assert len(first) < 10 and second[0][0] <= first[-1][0] + tiny.STEPS_PER_CALL, (first, second)
    values = [value for _, value in second]
    assert values == sorted(values) and 0.4 < values.count(2.0) / (len(first) + len(second)) < 0.6, (first, second)


def test_layers_are_moved_as_alone(script):
    """The optimizer orthogonalises the matrices of all layers together, with the updates that each gets alone."""
    params = init_params(replace(TINY, num_layers=3), 0)
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    gradient = jax.tree.unflatten(
        jax.tree.structure(params),
        [1e-3 * jax.random.normal(key, x.shape) for key, x in zip(keys, jax.tree.leaves(params), strict=True)],
    )
    alone = optax.contrib.muon(1.0, weight_decay=0.1, adam_b2=0.95, consistent_rms=0.2)
    together = script.optimizer()
    updates, _ = jax.jit(together.update)(gradient, together.init(params), params)
    for i, layer in params["layers"].items():
        expected, _ = jax.jit(alone.update)(gradient["layers"][i], alone.init(layer), layer)
        for name in layer:
            np.testing.assert_allclose(updates["layers"][i][name], expected[name], rtol=1e-3, atol=1e-5)
