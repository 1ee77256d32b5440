"""The benchmarks start, print a row when it is measured, and put figures of other systems where they belong."""

import importlib
import io
import json
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_llm import write_pair

from specjax import Categorical, Draft, models
from specjax.models.directory import Checkpoint
from specjax.server import loads as load
from specjax.types import ModelInput

SCRIPTS = Path(__file__).parent.parent / "scripts"
BENCHES = sorted(path.stem for path in SCRIPTS.glob("bench_*.py"))


@pytest.fixture
def script(monkeypatch):
    """Import a script as it runs: beside the others."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def out():
    """A standard output, buffered as it is where it goes to a file."""
    return io.TextIOWrapper(io.BytesIO())


@pytest.fixture
def run(script, out, monkeypatch):
    """Run a script with arguments; gives its output."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdout", out)
        script(name).main()
        return written(out)

    return run


def written(out):
    """The text that has left the buffer."""
    return out.buffer.getvalue().decode()


def table_rows(text):
    """The rows of the tables in a text, without their headers."""
    lines = text.splitlines()
    is_rule = [line.startswith("|---") for line in [*lines, ""]]
    return [line for i, line in enumerate(lines) if line.startswith("|") and not is_rule[i] and not is_rule[i + 1]]


@pytest.mark.parametrize("name", BENCHES)
def test_help(name, run, out):
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    out.flush()
    assert ended.value.code == 0
    assert "--json" in written(out)


@pytest.mark.slow
def test_the_smallest_bench_of_verification(script, run, monkeypatch, tmp_path):
    monkeypatch.setattr(script("timing"), "MAX_COPIES", 1)  # fewer calls to compile
    path = tmp_path / "numbers.json"
    arguments = "--vocabs 1000 --batches 1 --num-drafts 2 --dtypes float32 --implementations xla --cases rejection"
    (row,) = table_rows(run("bench_verify", *arguments.split(), "--json", path))
    assert row.startswith("| rejection | float32 | xla |")
    (numbers,) = json.loads(path.read_text())["rows"]
    assert (numbers["vocab"], numbers["num_drafts"], numbers["batch"]) == (1000, 2, 1)


@pytest.mark.slow
def test_random_weights_are_made_where_they_stay(script):
    config = replace(script("bench_decode").SHAPES["8b"], vocab_size=1500, hidden_size=32, num_layers=1, mlp_size=64)
    with jax.default_device(jax.devices("cpu")[0]):
        mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))
        made = script("bench_devices").shared_model(config, mesh)
        expected = models.tensor_parallel(script("bench_decode").random_model(config), mesh)
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for got, wanted in zip(*map(jax.tree.leaves, (made.params, expected.params)), strict=True):
        assert (got.shape, got.dtype, got.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
def test_random_checkpoints_load(ties, script, run, monkeypatch, tmp_path):
    shapes = script("bench_decode").SHAPES
    small = {"vocab_size": 60, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}
    config = replace(shapes["8b"], **small, mlp_size=24, tie_embeddings=ties)
    monkeypatch.setitem(shapes, "100m", config)
    run("random_checkpoint", tmp_path / "model", "--shape", "100m")
    read, made = models.load(tmp_path / "model", dtype="bfloat16"), script("bench_decode").random_model(config)
    tokens = ModelInput(jnp.arange(5)[None] * 11, jnp.arange(5)[None])
    got, expected = (model.apply(model.params, tokens, model.init_cache(1, 8))[0].logits for model in (read, made))
    np.testing.assert_array_equal(got, expected)
    assert Checkpoint(tmp_path / "model").tokenizer().decode([7, 59]) == "7 59"


@pytest.mark.slow
def test_the_smallest_bench_of_devices(script, run, monkeypatch, tmp_path):
    write_pair(tmp_path, num_layers=1, max_position_embeddings=512)
    monkeypatch.setattr(models, "EMBEDDED", tmp_path)  # a smaller family
    monkeypatch.setattr(script("timing"), "MAX_COPIES", 1)  # fewer calls to compile
    path, devices = tmp_path / "numbers.json", min(2, jax.local_device_count())
    by = ["pallas", "pallas", "xla"] if jax.default_backend() == "gpu" else ["xla", "xla"]
    arguments = f"--preset embedded --devices {devices} --batches 1 --num-drafts 1 --vocab 1500 --context 16 --prompt 9"
    assert len(table_rows(run("bench_devices", *arguments.split(), "--json", path))) == len(by) + 3
    rows = json.loads(path.read_text())["rows"]
    assert [row["table"] for row in rows] == ["verify"] * len(by) + ["steps"] * 2 + ["prompt"]
    assert [row["devices"] for row in rows] == [1] + [devices] * (len(rows) - 1)
    assert [row["by"] for row in rows[: len(by)]] == by


@pytest.mark.parametrize("number", [-1, 0, 65])
def test_devices_that_are_not_there(number, run, capsys):
    with pytest.raises(SystemExit):
        run("bench_devices", "--devices", number)
    assert f"--devices must be in [1, {jax.local_device_count()}], " in capsys.readouterr().err


@pytest.fixture
def run_measuring_nothing(script, run, monkeypatch):
    """Run a script with numbers of our own; `measured()` is called wherever it would measure a row."""

    def run_with(measured, name, *arguments):
        def stand_in(result):
            def measure(*args, **kwargs):
                measured()
                return result(*args) if callable(result) else result

            return measure

        def step(target, draft, batch, context, num_drafts, with_parts):
            row = {"batch": batch, "context": context, "num_drafts": num_drafts, "step_s": 0.1 * (num_drafts + 1)}
            return row | {"compile_s": 1.0, "floor_s": 0.1, "tokens_per_s": {1.0: 9.0}}

        seen = load.Load([load.Trace(0.0, [0.1, 0.2], {"num_tokens": 2})], 1.0)

        def rows_of_loads(bench):
            for number in range(3):
                measured()
                yield {"load": f"closed loop, {number}", "compilations": 0, "pages_used": 0} | load.figures(seen)

        module = script(name)
        model = SimpleNamespace(params={"embedding": np.zeros(1)})
        stand_ins = {
            "bench_decode": {"measure": stand_in(step), "load": lambda preset: (model, model)},
            "bench_delta_net": {"step_seconds": stand_in(1e-6), "prompt_seconds": stand_in(1e-6)},
            "bench_devices": {
                "measure": stand_in(step),
                "load": lambda preset, mesh, quantization: (model, model),
                "verify_seconds": stand_in(1e-6),
                "prefill_seconds": stand_in(0.1),
            },
            "bench_embedded": {
                "run": stand_in((SimpleNamespace(totals=None), 1.0)),
                "tokens_per_second": stand_in((2.0, 1.0)),
                "metrics": SimpleNamespace(
                    acceptance_rate_per_position=lambda _: np.array([0.5]), mean_acceptance_length=lambda _: 2.0
                ),
            },
            "bench_engine": {
                "Bench": lambda *_: None,
                "PARTS": {"loads": (rows_of_loads, load.COLUMNS, load.load_row)},
            },
            "bench_prefill": {"prefill_seconds": stand_in(0.1)},
            "bench_experts": {
                "measure": stand_in((1e-6, 0.0)),
                "matrices": lambda config, format: {"experts_out": np.zeros((128, 1))},
                "copy_bandwidth": lambda: 1e12,
            },
            "bench_quantized": {"measure": stand_in((1e-6, 0.0)), "copy_bandwidth": lambda: 1e12},
            "bench_hybrids": {"slope": stand_in(1e-6), "Run": lambda *_: SimpleNamespace(steps=None)},
            "bench_proposers": {"device_seconds": stand_in(1e-6), "SHAPES": [(1, 64)] * 3},
            "bench_trees": {"device_seconds": stand_in(1e-6), "inputs": lambda *_: (), "rows_of": lambda *_: ()},
            "bench_verify": {"device_seconds": stand_in(1e-6), "inputs": lambda *_: (), "CUT_ROWS": 1},
        }
        for attribute, value in stand_ins[name].items():
            monkeypatch.setattr(module, attribute, value)
        return run(name, *arguments)

    return run_with


VERIFY = ("--dtypes", "float32", "--implementations", "xla", "--batches", "1", "--vocabs")
BRIEF = {
    "bench_decode": ("--batches", "1", "--num-drafts", "2", "3"),
    "bench_delta_net": ("--batches", "1", "8", "--prompt", "64"),
    "bench_devices": ("--preset", "8b-1b", "--devices", "1", "--one", "--batches", "1", "8"),
    "bench_engine": (),
    "bench_embedded": ("--num-prompts", "2", "--max-tokens", "8", "--num-drafts", "2"),
    "bench_hybrids": ("--models", "small", "--rows", "plain:1:0", "mtp:1:3", "dflash2:2:3", "--prompt", "0"),
    "bench_prefill": ("--rows", "1x16", "1x32", "2x16"),
    "bench_proposers": (),
    "bench_experts": ("--parts", "products", "--mixtures", "qwen3-bf16", "--rows", "1", "4", "16"),
    "bench_quantized": ("--matrices", "64x32", "--formats", "bf16", "int4", "--rows", "1", "3"),
    "bench_trees": ("--vocabs", "1000"),
    "bench_verify": (*VERIFY, "1000"),
}


@pytest.mark.slow  # runs models, and changes no token
@pytest.mark.parametrize("name", BENCHES)
def test_a_row_is_printed_before_the_next_is_measured(name, run_measuring_nothing, out, tmp_path):
    rows = []
    path = tmp_path / "numbers.json"
    run_measuring_nothing(lambda: rows.append(table_rows(written(out))), name, *BRIEF[name], "--json", path)
    assert len(rows) >= 3
    assert [len(printed) for printed in rows] == list(range(len(rows)))
    assert len(json.loads(path.read_text())["rows"]) == len(rows)


def test_figures_of_peers_stand_under_rows_of_the_same_shape(run_measuring_nothing, tmp_path):
    path = tmp_path / "numbers.json"
    arguments = (*VERIFY, "128256", "1000", "--num-drafts", "5", "4", "--cases", "rejection", "typical", "--json", path)
    text = run_measuring_nothing(lambda: None, "bench_verify", *arguments)
    same, *others = text.split("\nV = ")[1:]
    assert "one NVIDIA H200" in same and "not in this one" in same
    ours, *peers, typical = table_rows(same)
    assert ours.startswith("| rejection | float32 | xla | 1 |") and typical.startswith("| typical | float32 | xla |")
    assert [row.split(" | ")[3] for row in peers] == ["155", "19.6", "95"]
    assert all(row.startswith("| rejection | float32 | peer: ") for row in peers)
    assert len(others) == 3 and not any("peer:" in other or "H200" in other for other in others)
    numbers = json.loads(path.read_text())["rows"]
    assert [row["us"] for row in numbers if "peer" in row] == [155, 19.6, 95]


def test_peers_that_decode_stand_under_the_first_context(run_measuring_nothing):
    arguments = ["--preset", "8b-1b", "--batches", "1", "8", "--contexts", "512", "4096", "--num-drafts", "3", "5"]
    text = run_measuring_nothing(lambda: None, "bench_decode", *arguments)
    assert "not in this run" in text
    cells = [row.strip("| ").split(" | ") for row in table_rows(text.split("\n\n| B |")[0])]
    keys = [(by.split(":")[0], *rest[:3]) for by, *rest in cells]
    first = [("specjax", "1", "512", "0"), *[("peer", "1", "-", "0")] * 2, ("specjax", "1", "512", "3")]
    first += [("specjax", "1", "512", "5"), *[("peer", "1", "-", "5")] * 2]
    assert keys[:7] == first
    assert all(key[0] == "specjax" for key in keys[7:])
    assert cells[5][4] == "14.10" and cells[5][-3:] == ["426", "176", "0.90"]


def test_launches_of_steps(script, run, monkeypatch):
    lists, counts = script("launches"), []
    events = [
        SimpleNamespace(name=name, start_ns=1000 * i, end_ns=1000 * i + 700)
        for i, name in enumerate(["product", "attention", "product", "attention", "product"] * lists.STEPS)
    ]
    monkeypatch.setattr(lists, "steps_of", lambda name, args: lambda count: counts.append((name, count)))
    monkeypatch.setattr(lists, "profiled", lambda: nullcontext(events))
    rows = table_rows(run("launches", "8b", "qwen3-fp8"))
    assert counts == [(name, lists.STEPS) for name in ("8b", "8b", "qwen3-fp8", "qwen3-fp8")]
    assert rows[:2] == ["| product | 3.0 | 0.70 | 2.1 |", "| attention | 2.0 | 0.70 | 1.4 |"]
    assert rows[2] == "| all | 5.0 | 0.70 | 3.5 |" and rows[3] == "| attention | 0.70 | 0.30 |"


@pytest.mark.slow
@pytest.mark.parametrize("name, num_drafts", [("small", 0), ("small", 3), ("embedded", 2)])
def test_steps_whose_launches_are_listed(name, num_drafts, script):
    lists = script("launches")
    args = Namespace(batch=2, num_drafts=num_drafts, drafter="mtp", quantization=None, context=16)
    assert lists.steps_of(name, args)(2) >= 4


def test_the_sweep_of_tiles_asks_for_inputs_as_the_bench_makes_them(script, monkeypatch):
    """All else in it needs a GPU."""
    sweep, bench = script("tune_verify"), script("bench_verify")

    def inputs(*args):
        asked = signature(bench.inputs).bind(*args).arguments
        assert asked["case"] in bench.CASES.values()
        target = Categorical(jnp.zeros((1, 2, 8)))
        return Draft(jnp.zeros((1, 1), jnp.int32), target), target

    monkeypatch.setattr(sweep, "inputs", inputs)
    monkeypatch.setattr(sweep, "row_statistics", lambda *_, **__: ())
    assert next(sweep.cases(1, "float32"))[0] == "statistics"


@pytest.mark.slow
def test_plots_of_the_benches(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("plot_benchmarks", "--out", tmp_path)
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {path.stem for path in (SCRIPTS.parent / "docs" / "plots").glob("*.png")}


def test_plots_have_the_numbers_of_the_tables():
    docs = SCRIPTS.parent / "docs"
    rows = [row.split(" | ") for row in (docs / "benchmarks.md").read_text().splitlines() if row.startswith("| ")]
    for name, column in (("decode-8b-1b", 3), ("decode-8b-eagle3", 3)):
        for row in json.loads((docs / "plots" / f"{name}.json").read_text())["rows"]:
            is_in_text = name == "decode-8b-eagle3" and row["batch"] > 1 and not row["num_drafts"]
            if not is_in_text:
                assert any(len(r) > column and r[column] == f"{1e3 * row['step_s']:.2f}" for r in rows), row
    for row in json.loads((docs / "plots" / "embedded.json").read_text())["rows"]:
        rates = " ".join(f"{rate:.2f}" for rate in row["by_position"])
        assert any(r[:3] == [f"| `{row['drafter']}`", f"{row['temperature']:g}", rates] for r in rows), row
    measured = json.loads((docs / "plots" / "smollm2.json").read_text())["rows"]
    for row in (row for row in measured if row["kind"] == "all"):
        rates, verifiers = " ".join(f"{rate:.2f}" for rate in row["by_position"]), ("any", f"`{row['verifier']}`")
        found = [r for r in rows if r[:2] == [f"| `{row['drafter']}`", f"{row['temperature']:g}"] and len(r) == 10]
        length = f"{row['tokens_per_step']:.2f} |"
        assert any(r[2] in verifiers and r[3] == rates and r[-1] == length for r in found), row
