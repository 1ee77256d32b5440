"""The command that looks at a machine: figures, findings with remedies, and probes that see wrong results."""

import json
import subprocess
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cli import doctor, main
from specjax.cli.doctor import machine, probes
from specjax.validation.extras import extras


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with one probe, which measures nothing: exit code and output."""
    monkeypatch.setattr(probes, "probes", lambda: [None])
    row = {"operation": "cut", "path": "XLA", "reason": "no GPU", "microseconds": 1.0, "error": None}

    def run(*arguments, error=None):
        monkeypatch.setattr(probes, "measure", lambda probe: row | {"error": error})
        return main(["doctor", *arguments]), capsys.readouterr().out

    return run


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """A machine where nothing is wrong, whatever the machine of the tests is."""
    monkeypatch.setattr(machine, "_gpus", list)
    monkeypatch.setattr(machine, "LEAST_MEMORY", 0)
    monkeypatch.setattr(machine, "LEAST_DISK", 0)
    monkeypatch.setattr(machine.compilation_cache, "used_folder", lambda: str(tmp_path))


@pytest.mark.usefixtures("healthy")
class TestCommand:
    def test_nothing_is_wrong(self, run):
        exit_code, out = run()
        assert exit_code == 0 and out.endswith("nothing is wrong\n")
        assert f"jax {jax.__version__}, " in out
        assert "cut: 1 us, XLA, because no GPU; the result equals the reference\n" in out

    def test_json(self, run):
        exit_code, out = run("--json")
        report = json.loads(out)
        assert exit_code == 0 and report["problems"] == []
        assert report["versions"]["jax"] == jax.__version__
        assert report["devices"][0]["platform"] == jax.default_backend()
        assert report["operations"][0]["microseconds"] == 1.0
        assert "test" not in report["extras"] and report["extras"]["models"] is None

    def test_a_wrong_result(self, run):
        exit_code, out = run(error="differs")
        assert exit_code == 1
        assert "\n1. cut by XLA: the result differs; reinstall jax and jaxlib" in out

    def test_missing_extras_have_a_command(self, run, monkeypatch):
        monkeypatch.setattr(doctor, "extras", lambda: {"ray": ["ray[serve]>=2"], "cli": []})
        exit_code, out = run()
        assert exit_code == 0
        assert "extras that are installed: cli\nextra ray: " in out and 'ray]"\n' in out


class TestMachine:
    def found(self, look):
        problems = []
        return look(problems), problems

    def test_a_gpu_that_jax_does_not_use(self, monkeypatch):
        monkeypatch.setattr(machine, "_gpus", lambda: [[1, 2]])
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(id=0, platform="cpu", device_kind="cpu")])
        monkeypatch.setenv("JAX_PLATFORMS", "")
        _, (problem,) = self.found(machine.devices)
        assert problem.cause == "an NVIDIA GPU is here, and JAX does not use it" and "cuda" in problem.remedy
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        assert self.found(machine.devices)[1] == []

    def test_no_device(self, monkeypatch):
        def fail():
            raise RuntimeError("Unknown backend cuad\nmore")

        monkeypatch.setattr(jax, "devices", fail)
        monkeypatch.setenv("JAX_PLATFORMS", "cuad")
        rows, (problem,) = self.found(machine.devices)
        assert rows == [] and problem.cause == "JAX finds no device: Unknown backend cuad"
        assert "JAX_PLATFORMS (now 'cuad')" in problem.remedy

    def test_an_old_gpu(self, monkeypatch):
        device = SimpleNamespace(id=0, platform="gpu", device_kind="Old", compute_capability="7.5")
        monkeypatch.setattr(jax, "devices", lambda: [device])
        (row,), (problem,) = self.found(machine.devices)
        assert row["compute_capability"] == "7.5" and "7.5, less than 8.0" in problem.cause

    def test_a_full_gpu(self, monkeypatch):
        monkeypatch.setattr(machine, "LEAST_MEMORY", 0)
        monkeypatch.setattr(machine.shutil, "which", lambda name: name)
        done = SimpleNamespace(stdout="1000, 80000\n79000, 80000\n[N/A], [N/A]\n")
        monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
        memory, (problem,) = self.found(machine.memory)
        assert memory["GPU 1"] == (79000 * 2**20, 80000 * 2**20)
        assert problem.cause.startswith("GPU 0 has 1.0 GB of 83.9 GB free") and "nvidia-smi" in problem.remedy

    def test_little_memory(self, monkeypatch):
        monkeypatch.setattr(machine, "_gpus", list)
        monkeypatch.setattr(machine, "LEAST_MEMORY", 1e20)
        _, problems = self.found(machine.memory)
        assert [problem.remedy for problem in problems] == ["end other programs"] * len(problems)

    def test_folder(self, monkeypatch, tmp_path):
        (tmp_path / "a").write_bytes(bytes(10))
        monkeypatch.setattr(machine, "LEAST_DISK", 0)
        monkeypatch.setattr(machine.compilation_cache, "used_folder", lambda: str(tmp_path))
        row, problems = self.found(machine.program_folder)
        assert (row["files"], row["bytes"], row["is_writable"], problems) == (1, 10, True, [])
        monkeypatch.setattr(machine, "LEAST_DISK", 1e20)
        assert "MB free" in self.found(machine.program_folder)[1][0].cause

    def test_a_folder_that_cannot_be_written(self, monkeypatch, tmp_path):
        def refuse(**options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(machine, "LEAST_DISK", 0)
        monkeypatch.setattr(machine.compilation_cache, "used_folder", lambda: str(tmp_path / "new"))
        monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
        row, (problem,) = self.found(machine.program_folder)
        assert not row["is_writable"] and not (tmp_path / "new").exists()
        assert problem.cause == f"compiled programs cannot be written to {tmp_path / 'new'}: Permission denied"

    def test_versions_that_do_not_fit(self, monkeypatch):
        installed = {"jax": "0.11.0", "jaxlib": "0.11.0", "numpy": "2", "jax-cuda13-plugin": "0.10.2", "rich": "12.9"}

        def version(name):
            if name not in installed:
                raise machine.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(machine.metadata, "version", version)
        monkeypatch.setattr(machine, "extras", lambda only_missing: {"cli": ["rich>=13"], "x": ["numpy>=2"]})
        monkeypatch.setattr(machine, "install_command", lambda extra, package: f"install {extra}")
        _, problems = self.found(machine.versions)
        causes = [problem.cause for problem in problems]
        assert causes == ["jax-cuda13-plugin 0.10.2 does not belong to jaxlib 0.11.0", "rich 12.9 is older than 13"]

    def test_versions_here(self):
        found, problems = self.found(machine.versions)
        assert found["jax"] == jax.__version__ and problems == []


def test_extras_include_others():
    given = extras(only_missing=False)
    assert {"rich>=13", "jinja2>=3.1", "tokenizers>=0.20"} <= set(given["cli"]) <= set(given["train"])
    assert not any(text.startswith("specjax") for texts in given.values() for text in texts)


@pytest.fixture(scope="module")
def named():
    """The probes by their names."""
    return {probe.name: probe for probe in probes.probes()}


@pytest.fixture
def cut(named):
    return named["cut of top-k"]


class TestProbes:
    @pytest.mark.slow
    def test_a_right_and_a_wrong_result(self, cut):
        row = probes.measure(cut)
        assert row["error"] is None and row["microseconds"] > 0
        assert row["path"] == ("kernel" if jax.default_backend() == "gpu" else "XLA")
        wrong = cut._replace(function=lambda logits, top_k: top_k.astype(jnp.float32))
        assert probes.measure(wrong)["error"] == "differs from the reference in 4 of 4 places"

    @pytest.mark.slow
    def test_an_error_is_a_finding(self, cut):
        def fail(logits, top_k):
            raise RuntimeError("no ptxas\nmore")

        row = probes.measure(cut._replace(function=fail))
        assert row["error"] == "is an error, RuntimeError: no ptxas" and row["microseconds"] is None

    def test_verification_sees_wrong_tokens(self, named):
        check = named["verification by rejection"].check
        right = SimpleNamespace(tokens=np.full((4, 4), 1), num_accepted=np.array([3, 3, 0, 0]))
        assert check(right) is None
        right.num_accepted[2] = 1
        assert check(right).startswith("has [3, 3, 1, 0] accepted drafts")
        right.num_accepted[2], right.tokens[3, 0] = 0, 4
        assert check(right) == "ends with the impossible tokens [4]"

    def test_products_and_attention_see_small_errors(self):
        check = partial(probes._close, np.array([1.0, -2.0]))
        assert check(jnp.array([1.0, -2.01])) is None
        assert check(jnp.array([1.0, -1.9])).startswith("is 0.05 away from the reference")

    def test_paths(self, cut):
        assert probes.path_of(cut, "... triton ...", "gpu") == ("kernel", None)
        assert probes.path_of(cut, "", "gpu") == ("XLA", "it is faster at this size")
        logits, top_k = cut.arguments
        assert probes.path_of(cut, "", "tpu") == ("XLA", "kernels run on NVIDIA GPUs alone")
        refused = cut._replace(arguments=(logits.astype(jnp.int32), top_k), function=_refusing)
        assert probes.path_of(refused, "", "gpu") == ("XLA", "the kernels take other things")

    @pytest.mark.slow
    def test_every_probe_is_right_here_and_has_a_kernel(self, named):
        for name, probe in named.items():
            assert (name, probes.measure(probe)["error"]) == (name, None)
        for probe in probes.probes(is_large=True):
            name = probe.name
            program = jax.jit(probe.function).trace(*probe.arguments).lower(lowering_platforms=("cuda",)).as_text()
            assert (name, probes.path_of(probe, program, "gpu")[0]) == (name, "kernel")


def _refusing(logits, top_k, implementation=None):
    raise NotImplementedError("implementation='pallas' cannot run this case: the kernels take other things")
