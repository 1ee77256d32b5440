"""JAX's persistent compilation cache, which `LLM` and the command turn on unless JAX has been told otherwise."""

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from test_llm import SENTENCE, chain_tensors, make_tokenizer, write_checkpoint

from specjax import LLM
from specjax.cli import main
from specjax.engine.compilation_cache import JAX_LEAST_SECONDS, LEAST_SECONDS, default_folder, enable

pytestmark = pytest.mark.slow  # changes no token

NAMES = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Settings of JAX as in a new process, but for a threshold that keeps every program; afterwards as they were."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    for name, value in zip(NAMES, (None, True, 0.0), strict=True):
        jax.config.update(name, value)
    reset_cache()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    ids = [*make_tokenizer().encode(SENTENCE, add_special_tokens=False).ids, 1]
    return write_checkpoint(tmp_path_factory.mktemp("cache") / "model", chain_tensors(ids), num_layers=1, hidden=128)


def compile_something(number):
    return jax.jit(lambda x: x * number + 1)(np.arange(3.0))


def test_jax_has_the_threshold_that_stands_for_none_given():
    code = "import jax; print(jax.config.jax_persistent_cache_min_compile_time_secs)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert float(run.stdout) == JAX_LEAST_SECONDS


def used():
    return jax.config.jax_compilation_cache_dir


class TestFolder:
    @pytest.mark.parametrize(
        ("platform", "variables", "folder"),
        [
            ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/specjax/xla"),
            ("linux", {}, "/home/me/.cache/specjax/xla"),
            ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/specjax/xla"),  # which the convention forbids
            ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/specjax/xla"),
            ("win32", {"LOCALAPPDATA": "/local"}, "/local/specjax/xla"),
            ("win32", {}, "/home/me/AppData/Local/specjax/xla"),
        ],
    )
    def test_default(self, monkeypatch, platform, variables, folder):
        monkeypatch.setattr(sys, "platform", platform)
        for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"HOME": "/home/me", **variables}.items():
            monkeypatch.setenv(name, value)
        assert default_folder() == Path(folder)

    def test_is_for_the_user_alone(self, tmp_path):
        enable(tmp_path / "some" / "folder")
        assert stat.S_IMODE((tmp_path / "some" / "folder").stat().st_mode) == 0o700

    def test_home_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        enable("~/programs")
        assert used() == str(tmp_path / "programs")


class TestPrograms:
    def test_are_kept_and_read(self, tmp_path):
        events = []
        jax.monitoring.register_event_listener(lambda event, **kwargs: events.append(event))
        enable(tmp_path)
        outputs = [compile_something(3)]
        kept = [path.name for path in tmp_path.iterdir() if path.is_file()]  # folders: what XLA measured on a GPU
        assert len(kept) == 1
        assert kept[0].startswith("jit__lambda")
        jax.clear_caches()
        assert "/jax/compilation_cache/cache_hits" not in events
        outputs.append(compile_something(3))
        jax.monitoring.clear_event_listeners()
        assert "/jax/compilation_cache/cache_hits" in events
        np.testing.assert_array_equal(*outputs)

    def test_are_kept_after_others_that_were_not(self, tmp_path):
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()
        compile_something(4)
        jax.config.update("jax_enable_compilation_cache", True)
        enable(tmp_path)
        compile_something(5)
        assert len(list(tmp_path.iterdir())) == 1


class TestSettingsOfTheUser:
    def test_folder(self, tmp_path):
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        enable(None)
        enable(False)
        enable(tmp_path / "own")
        message = f"compilation_cache must be None or '{tmp_path}/own', which JAX uses already"
        with pytest.raises(ValueError, match=message):
            enable(tmp_path / "other")
        assert used() == str(tmp_path / "own")
        assert list(tmp_path.iterdir()) == []

    def test_off(self, tmp_path):
        jax.config.update("jax_enable_compilation_cache", False)
        enable(None)
        enable(tmp_path / "other")
        assert (used(), jax.config.jax_enable_compilation_cache) == (None, False)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("given, expected", [(7.0, 7.0), (JAX_LEAST_SECONDS, LEAST_SECONDS)])
    def test_threshold(self, tmp_path, given, expected):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", given)
        enable(tmp_path)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == expected


class TestUnwritable:
    """A process goes on without the cache, and says so once."""

    @pytest.fixture(params=["a file in its place", "read-only", "no home"])
    def folder(self, request, tmp_path, monkeypatch):
        def refuse(*args, **options):
            raise OSError("read-only file system")

        def have_none():
            raise RuntimeError("Could not determine home directory.")

        if request.param == "a file in its place":
            (tmp_path / "user").write_text("")
        elif request.param == "read-only":
            monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        else:
            monkeypatch.delenv("XDG_CACHE_HOME")
            monkeypatch.setattr(Path, "home", have_none)

    def test_is_logged(self, folder, caplog):
        enable(None)
        assert used() is None
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "the compilation cache cannot be written: " in record.getMessage()


@pytest.mark.parametrize("folder", [True, 5, b"x"])
def test_wrong_type(folder):
    with pytest.raises(ValueError, match=f"compilation_cache must be a path, None or False, got {folder!r}"):
        enable(folder)


class TestLLM:
    def test_default(self, model, tmp_path):
        LLM(model)
        assert used() == str(tmp_path / "user" / "specjax" / "xla")
        assert default_folder().is_dir()

    def test_argument(self, model, tmp_path):
        LLM(model, compilation_cache=False)
        assert used() is None
        LLM(model, compilation_cache=tmp_path / "own")
        assert used() == str(tmp_path / "own")

    @pytest.mark.parametrize(
        ("options", "folder"),
        [([], "user/specjax/xla"), (["--compilation-cache", "own"], "own"), (["--no-compilation-cache"], None)],
    )
    def test_command(self, model, tmp_path, monkeypatch, capsys, options, folder):
        monkeypatch.chdir(tmp_path)
        assert main(["generate", SENTENCE[0], "--model", str(model), *options]) == 0
        assert capsys.readouterr().out == SENTENCE[1:] + "\n"
        assert used() == (None if folder is None else str(tmp_path / folder))

    def test_import_has_no_side_effects(self, tmp_path):
        code = "import jax, specjax, specjax.cli; print(jax.config.jax_compilation_cache_dir)"
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.stdout == "None\n", done.stderr
        assert list(tmp_path.iterdir()) == []
