"""The suite itself: the collected tests, how they are split, and which interpreter `scripts/test` uses."""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from conftest import pytest_xdist_auto_num_workers, shard
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "scripts" / "missing_requirements.py"


def run(*command, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)


COLLECT = """
import json, sys
import pytest
codes = []
for arguments in json.loads(sys.argv[1]):
    print("collected:")
    codes.append(pytest.main(["-p", "no:cacheprovider", "--collect-only", *arguments]))
sys.exit(any(codes))
"""


def collect(*calls: list[str], **environment) -> list[list[str]]:
    """The tests that each call of pytest collects, all in one process, which imports JAX once."""
    done = run(sys.executable, "-c", COLLECT, json.dumps(calls), **environment)
    assert done.returncode == 0, done.stdout
    parts = done.stdout.split("collected:\n")[1:]
    return [[line for line in part.splitlines() if "::" in line] for part in parts]


@pytest.mark.slow
def test_collecting_starts_no_device():
    """Collected tests could depend on a device, and processes that share one could find different tests."""
    (found,) = collect([], JAX_PLATFORMS="none")
    assert found


@pytest.mark.slow
def test_shards_are_disjoint_and_together_the_whole():
    selection = ["tests/test_suite.py", "-k", "collecting or requirements or versions"]
    first, second, whole = collect(*([*selection, *part] for part in (["--shard", "1/2"], ["--shard", "2/2"], [])))
    assert sorted(first + second) == sorted(whole) and first and second
    assert 0 <= len(first) - len(second) <= 1


@pytest.mark.slow
def test_slow_tests_run_on_request(tmp_path):
    """`scripts/test` leaves them out, `scripts/test --all` does not; both take further arguments."""
    # This interpreter, which says that it lacks nothing: where a requirement was added since its environment was made,
    # scripts/test would make the environment anew while the tests run in it.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = scripts/missing_requirements.py ] || exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    selection = "tests/test_embedded.py", "tests/test_suite.py", "--shard", "1/2", "-n0", "-p", "no:cacheprovider"
    fast, everything = (
        run("scripts/test", *tier, *selection, "--collect-only", PYTHON=str(python)).stdout for tier in ([], ["--all"])
    )
    assert "tests/test_suite.py::" in fast and "tests/test_suite.py::" in everything
    assert "tests/test_embedded.py::" not in fast and "tests/test_embedded.py::" in everything


def test_breaks_can_be_applied(monkeypatch):
    """The line of each is in its file once, and breaking it leaves Python."""
    monkeypatch.syspath_prepend(ROOT / "scripts")  # as where the script is run
    breaks = runpy.run_path(ROOT / "scripts" / "breaks.py")
    table = breaks["breaks"]()
    assert len(table) >= 40
    for name, entry in table.items():
        assert set(entry) == {"file", "old", "new", "why", "tests"}
        assert entry["old"] != entry["new"] and "\n" not in entry["old"]
        compile(breaks["broken_text"](name, entry), entry["file"], "exec")
    entry = table[name] | {"old": "no such line"}
    with pytest.raises(ValueError, match=f"old of the break '{name}' must be in .* exactly once, found it 0 times"):
        breaks["broken_text"](name, entry)
    text = (ROOT / "docs" / "breaks.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) == set(table)


@pytest.mark.parametrize(
    "backend, memory, expected", [("cpu", None, 2), ("gpu", 105, 12), ("gpu", 30, 3), ("gpu", 4, 1)]
)
def test_number_of_processes(backend, memory, expected, monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": memory * 10**9})
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    assert pytest_xdist_auto_num_workers() == expected


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/2/3", "-1/2", "a/b", "1/"])
def test_bad_shards(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be I/N with 1 <= I <= N, as in 1/2, got"):
        shard(text)


def test_requirements_are_those_of_the_named_extras_too():
    extras = {"test": ["own[chat,cli]", "ruff>=0.8", "pytest>=8"], "chat": ["jinja2"], "cli": ["own[chat]", "rich"]}
    found = runpy.run_path(CHECK)["requirements"]({"name": "own", "optional-dependencies": extras}, "test")
    assert {str(requirement) for requirement in found} == {"jinja2", "rich", "pytest>=8"}


@pytest.mark.parametrize(
    "requirement, expected", [("pytest", True), ("pytest>=8", True), ("pytest>=999", False), ("no-such-name", False)]
)
def test_versions_count(requirement, expected):
    assert runpy.run_path(CHECK)["is_met"](Requirement(requirement)) is expected


def test_an_interpreter_without_packages_lacks_some():
    done = run(sys.executable, "-I", "-S", str(CHECK), "test")
    assert done.returncode == 1 and done.stdout == "packaging\n"


@pytest.mark.slow
def test_the_active_interpreter_is_used_where_it_lacks_nothing():
    lacking = run(sys.executable, str(CHECK), "test")
    if lacking.returncode != 0:
        pytest.skip(f"this one lacks {lacking.stdout.strip()}")
    done = run("scripts/test", "--shard", "3/2", PYTHON=sys.executable)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{sys.executable} has all that the tests need" in done.stderr
    assert "argument --shard: must be I/N with 1 <= I <= N, as in 1/2, got '3/2'" in done.stderr


@pytest.mark.parametrize(("version", "number"), [("0.10.2", 3), ("0.11.0", 2), ("1.0.1", 2)])
def test_a_flag_stands_only_for_versions_that_know_it(monkeypatch, version, number):
    """An unknown flag ends the process."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    flags = runpy.run_path(ROOT / "scripts" / "xla_flags.py")["xla_flags"]()
    assert len(flags.split()) == number
    assert ("fusion_emitters" in flags) is (number == 3)
