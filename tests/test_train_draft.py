"""`specjax train`: the drafter decodes, and a run that was killed or interrupted ends with the same weights."""

import importlib
import json
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, SamplingParams, models, proposers, training
from specjax.cli import _parser, main
from specjax.cli.train import CORPUS, STEPS, check_arguments
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.training import corpus, drafter, loop, unroll

pytestmark = pytest.mark.slow  # each trains for some steps

SCRIPTS = Path(__file__).parent.parent / "scripts"
CONFIG = DecoderConfig(
    vocab_size=4096, hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=24, max_length=256
)
SMALL = {
    "steps": 4,
    "every": 2,
    "save-every": 0,
    "batch": 2,
    "length": 32,
    "num-prompts": 4,
    "num-draft-tokens": 2,
    "anchors": 4,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A directory with a target of three layers and the tokenizer of the embedded one."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        save = importlib.import_module("train_embedded").save
    finally:
        sys.path.remove(str(SCRIPTS))
    directory = tmp_path_factory.mktemp("target")
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, init_params(CONFIG, seed=0))
    save(directory, CONFIG, jax.tree.map(lambda x: x.astype("bfloat16"), params))
    shutil.copy(models.EMBEDDED / "tokenizer.json", directory)
    return directory


@pytest.fixture
def train(target, tmp_path):
    """Run the command on the source of scripts; gives the directory that it wrote."""

    def train(kind, name, *arguments, exit_code=0):
        out = tmp_path / name
        files = [str(SCRIPTS / file) for file in ("prose.py", "timing.py")]
        small = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
        given = ["--target", str(target), "--kind", kind, "--out", str(out), *small, *arguments, "--data", *files]
        assert main(["train", *given]) == exit_code
        return out

    return train


def loaded(directory, target):
    model = models.load(target)
    model = models.with_feature_layers(model, proposers.feature_layers(directory, model))
    return proposers.load(directory, model, num_draft_tokens=2)


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "dflash", "medusa"])
def test_what_was_trained_decodes(kind, train, target):
    """In the layout of the kind's authors, and in the layout of speculators."""
    masked = ("--mask-token", "7") if kind == "dflash" else ()
    out = train(kind, "own", *masked, *(() if kind == "medusa" else ("--vocab-size", "1000")))
    assert proposers.kind_of(out) == kind
    assert not masked or json.loads((out / "config.json").read_text())["dflash_config"]["mask_token_id"] == 7
    header, *rows = (out / "log.csv").read_text().splitlines()
    assert header == "step,seconds,loss,learning_rate,acceptance_1,acceptance_2"
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3", "4"]
    card = (out / "README.md").read_text()
    assert f"base_model: {target}\n" in card and f"--draft {out} " in card and "| 0.8 | " in card
    if kind in ("eagle3", "dflash", "medusa"):
        params = SamplingParams(temperature=0, max_tokens=12)
        fast = LLM(target, out, num_draft_tokens=2)
        (result,), (plain,) = fast.generate("import os\n", params), fast.plain().generate("import os\n", params)
        assert result.token_ids == plain.token_ids and result.metrics.num_drafted > 0
    if kind == "medusa":
        return
    made, other = loaded(out, target), out / "other"
    model = models.with_feature_layers(models.load(target), proposers.feature_layers(out, models.load(target)))
    training.save_pretrained(made, other, target=model, layout="speculators")
    assert json.loads((other / "config.json").read_text())["speculators_model_type"] == kind.replace("_", "")
    again = loaded(other, target)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def cycle():
    """A target whose next token is all but certain and depends on the last one alone: 0, 1, 2, ..., 15, 0, ..."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 32, "max_length": 64}
    config = DecoderConfig(vocab_size=16, hidden_size=32, num_layers=2, **sizes, tie_embeddings=False)
    params = jax.tree.map(jnp.zeros_like, init_params(config, seed=0))
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0][:16].astype(np.float32)
    params |= {"embedding": vectors, "head": 2 * np.roll(vectors, 1, axis=0), "norm": jnp.ones(32)}
    return decoder_model(config, params)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "medusa"])
def test_a_target_that_can_be_copied_is_copied(kind, cycle):
    """Every draft of a trained drafter is accepted, greedy and sampled: it decodes with the features of training."""
    target = models.with_feature_layers(cycle, drafter.layers_of(2, kind))
    made, params, frozen = drafter.new_drafter(kind, target, 3, 8, 0, None, jax.random.key(0))
    batch = training.pack([(np.arange(24) + i) % 16 for i in range(16)], 24)
    plan = drafter.Plan(150, None, 1e-2, 0, "lk_hybrid", 150, np.dtype("float32"))
    data = drafter.Data(batch, 8, 0, jax.devices("cpu")[:1])
    params = drafter.train(made, params, frozen, target, data, plan)
    proposer = made.proposer(jax.device_get(params | frozen))
    found = corpus.measure(target, proposer, [[*range(4, 14)], [3, 4, 5]], max_tokens=20)
    assert min(each.tokens_per_step for each in found.values()) > 3.7, found


def test_one_token_stands_for_all_outside_a_draft_vocabulary(cycle):
    """The losses and rates are those against the whole vocabulary of the target."""
    target = models.with_feature_layers(jax.tree.map(jnp.asarray, cycle), drafter.layers_of(2, "dflash"))
    vocab = training.vocabulary([5, 0, 7, 2] * 4, 9)
    kind, params, frozen = drafter.new_drafter("dflash", target, 2, 4, 0, vocab, jax.random.key(0))
    rows = training.pack([np.random.default_rng(i).integers(0, 16, 12) for i in range(4)], 24)

    def values(rows, is_whole):
        batch = unroll.features(target, jax.tree.map(jnp.asarray, rows), target.feature_layers)
        batch = batch._replace(features=jax.tree.map(lambda x: 0.1 * x, batch.features))  # less certain tokens
        steps = kind.unroll(params | frozen, batch, jax.random.key(1))
        others = None if is_whole else drafter.logit_of_others(target, batch.features.hidden, vocab)
        given = params | frozen, target, steps, 1, kind
        return [drafter.of_step(*given, loss, others) for loss in ("lk_hybrid", "text_and_variation")]

    given, whole = (jax.jit(partial(values, is_whole=x))(rows) for x in (False, True))
    assert float(whole[0][1].max()) > 0
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.fixture
def measured_in_reports_alone(monkeypatch):
    """The card of a run gets the figures of its last report: a measurement on longer texts is a program more."""
    measure, found = corpus.measure, []

    def measured(*args, max_steps=None, **options):
        if max_steps is not None:
            found.append(measure(*args, max_steps=max_steps, **options))
        return found[-1]

    monkeypatch.setattr(corpus, "measure", measured)


@pytest.mark.usefixtures("measured_in_reports_alone")
@pytest.mark.parametrize("kind, arguments", [("p_eagle", ("--regenerate", "2")), ("dspark", ())])
def test_a_killed_run_ends_with_the_same_weights(kind, arguments, train, monkeypatch):
    """Also where the rows that are learned are drawn at random."""
    whole = train(kind, "whole", *arguments)
    save, seen = loop.save, []

    def killed(checkpoints, step, tree):
        save(checkpoints, step, tree)
        seen.append(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save", killed)
    train(kind, "cut", *arguments, exit_code=130)
    assert seen == [2] and not (whole.parent / "cut" / "model.safetensors").exists()
    monkeypatch.setattr(loop, "save", save)
    cut = train(kind, "cut", *arguments)
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    columns = [[row.split(",")[2:] for row in (out / "log.csv").read_text().splitlines()] for out in (whole, cut)]
    assert columns[0] == columns[1]


@pytest.fixture
def interruptions():
    """Interruptions are errors, also where whoever started the tests in the background has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptions", "measured_in_reports_alone")
def test_an_interrupted_run_saves_and_goes_on(train, monkeypatch, capsys):
    """At a step that no report and no checkpoint is due."""
    rows = drafter.Data.rows

    def rows_and_interrupt(self, step):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return rows(self, step)

    monkeypatch.setattr(drafter.Data, "rows", rows_and_interrupt)
    given = "--every", "4", "--save-every", "1000"
    out = train("medusa", "cut", *given, exit_code=130)
    assert "specjax: saved at step 3; the same command goes on from there" in capsys.readouterr().err
    monkeypatch.setattr(drafter.Data, "rows", rows)
    train("medusa", "cut", *given)
    steps = [row.split(",")[0] for row in (out / "log.csv").read_text().splitlines()]
    assert steps == ["step", "1", "2", "3", "4"]


def test_devices_that_share_a_batch_compute_what_one_does(target):
    """Also of rows that are drawn at random."""
    kind = "p_eagle"
    model = models.load(target, dtype="float32")
    model = models.with_feature_layers(model, drafter.layers_of(3, kind))
    made, params, frozen = drafter.new_drafter(kind, model, 3, 4, 7, None, jax.random.key(0))
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, CONFIG.vocab_size, length) for length in (30, 9, 11, 25, 40, 8)]
    batch = training.pack(documents, 32)
    plan = drafter.Plan(4, None, 1e-3, 0, "text_and_variation", 1, np.dtype("float32"))
    step = jax.jit(jax.value_and_grad(partial(drafter.loss_of, kind=made, plan=plan), has_aux=True))
    found = []
    for count in (1, 2):
        data = drafter.Data(batch, 4, 0, jax.devices("cpu")[:count])
        given = jax.device_put((params, frozen, model), data.whole)
        rows, key = data.rows(0), jax.device_put(jax.random.key(1), data.whole)
        assert len(rows.tokens.sharding.device_set) == count
        assert rows.tokens.addressable_shards[0].data.shape[0] == 4 // count
        found.append(jax.device_get(step(*given, rows, key)))
    (one, gradient), (both, other) = found
    for x, y in zip(one, both, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(x).max())


def parsed(*arguments):
    return _parser().parse_args(["train", "--data", "x", *arguments])


def test_a_directory_of_another_run_is_refused(tmp_path):
    def check(*arguments):
        check_arguments(parsed("--out", str(tmp_path / "out"), *arguments))

    check("--kind", "dspark")
    check("--kind", "eagle3")  # the first run ended before it had data
    (tmp_path / "out" / "state" / CORPUS).touch()
    check("--kind", "eagle3", "--steps", "0")
    with pytest.raises(ValueError, match=r"--out must be a new directory .* differ: seed was 0"):
        check("--kind", "eagle3", "--seed", "1")
    check("--kind", "eagle3")  # the run before ended because its number of steps was wrong
    (tmp_path / "out" / "state" / STEPS / "50").mkdir(parents=True)
    check("--kind", "eagle3")
    with pytest.raises(ValueError, match=r"--out must be a new directory .* differ: kind was eagle3, seed was 0"):
        check("--kind", "dflash", "--seed", "1")


def test_arguments_are_refused_before_training(tmp_path):
    for message, *arguments in (
        (r"--layout must be eagle3 or speculators for eagle3, got deepspec", "--layout", "deepspec"),
        (r"--vocab-size must be absent for medusa", "--kind", "medusa", "--vocab-size", "100"),
        (r"--vocab-size must be absent with --init", "--init", "head", "--vocab-size", "100"),
        (r"--mask-token must be absent for eagle3, which has no mask token", "--mask-token", "7"),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments(parsed("--out", str(tmp_path / "out"), *arguments))
    assert not (tmp_path / "out").exists()


def test_updates_of_muon():
    """An update of a matrix is orthogonal but for its size; the head and the norms have updates as Adam makes them."""
    rng = np.random.default_rng(0)
    params, gradient = (
        {"fc": rng.normal(size=(12, 16)), "lm_head": rng.normal(size=(20, 16)), "norm": rng.normal(size=16)}
        for _ in range(2)
    )
    params, gradient = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree) for tree in (params, gradient))
    optimizers = [drafter.optimizer_of(name) for name in drafter.OPTIMIZERS]
    adam, muon = (each.update(gradient, each.init(params), params)[0] for each in optimizers)
    for name in ("lm_head", "norm"):
        np.testing.assert_array_equal(np.sign(muon[name]), np.sign(gradient[name]))
        assert np.ptp(muon[name] / adam[name]) < 1e-3
    spread = [np.linalg.cond(update["fc"]) for update in (adam, muon)]
    assert spread[1] < 2 < 4 < spread[0] and np.sum(muon["fc"] * gradient["fc"]) > 0


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_drafter_to_begin_with(kind, cycle):
    vocab = None if kind == "medusa" else training.vocabulary([5, 0, 7, 2] * 4, 9)
    made, params, frozen = drafter.new_drafter(kind, cycle, 2, 4, 0, vocab, jax.random.key(0))
    first = made.proposer(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params | frozen))
    again, found = drafter.begin_with(first, made, params)
    assert again == made
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, y.astype(jnp.bfloat16))
    other, wide, _ = drafter.new_drafter("eagle3", cycle, 2, 4, 0, None, jax.random.key(0), mlp_size=40)
    if kind == "medusa":
        with pytest.raises(ValueError, match=r"the first drafter must be of kind eagle3, got Medusa"):
            drafter.begin_with(first, other, wide)
        return
    np.testing.assert_array_equal(drafter.vocabulary_of(first, 16).ids, vocab.ids)
    with pytest.raises(ValueError, match=r"the first drafter must have parameters of the shapes .* got "):
        drafter.begin_with(first, other, wide)
    # As it is loaded on one GPU.
    turned = replace(made.head, config=replace(made.head.config, transposed=True))
    loaded = params | frozen | jax.tree.map(jnp.zeros, turned.shapes(), is_leaf=lambda x: isinstance(x, tuple))
    first = proposers.eagle3(turned, loaded, 2, reduced=first.reduced)
    again, found = drafter.begin_with(first, made, params)
    assert again.head == turned and found["fc"].shape == params["fc"].shape[::-1]


def test_rows_come_once_an_epoch():
    batch = training.Batch(np.arange(5)[:, None], np.ones((5, 1), np.int32), np.ones((5, 1), bool))
    data = drafter.Data(batch, 2, seed=0)
    seen = [data.rows(step).tokens[:, 0].tolist() for step in range(4)]
    assert all(len({*first, *second}) == 4 for first, second in (seen[:2], seen[2:]))
    assert seen[:2] != seen[2:]
    with pytest.raises(ValueError, match="data must fill a batch of 6 rows, got 5"):
        drafter.Data(batch, 6, seed=0)
