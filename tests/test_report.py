"""The log of a start: devices, weights, caches, each program, and how the commands show it."""

import io
import logging
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, cli, proposers
from specjax.cli.terminal import shown
from specjax.engine.report import Compiling, Programs, log_caches, log_models
from specjax.models.decoder import DecoderConfig, decoder_model, init_params

LOGGER = logging.getLogger("specjax.engine.report")


@pytest.fixture(autouse=True)
def level(caplog):
    caplog.set_level(logging.INFO, "specjax")


class TestModels:
    def test_target_and_drafts(self, caplog):
        config = DecoderConfig(100, 16, 1, 2, 1, 8, 16, 64)
        model = decoder_model(config, init_params(config, 0))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) / 1e6
        log_models(model, proposers.draft_model(model, 3))
        log_models(model, proposers.ngram(2))
        log_models(model, proposers.none())
        kind = jax.devices()[0].device_kind
        target = f"target: {size:.1f} MB of weights, float32, on 1 x {kind}"
        assert caplog.messages == [
            target,
            f"drafts: 3 tokens a step, DraftModel, {size:.1f} MB of weights, float32",
            target,
            "drafts: 2 tokens a step, NGram",
            target,
            "no drafts: plain decoding",
        ]

    @pytest.mark.parametrize("pool, pages", [(None, ""), ((8, 4), " in 8 pages of 4 tokens")])
    def test_caches(self, caplog, pool, pages):
        state = SimpleNamespace(cache=[jnp.zeros((500, 1000))], proposer=jnp.zeros((500, 500)))
        log_caches(SimpleNamespace(state=state, num_slots=2, max_length=16), pool)
        assert caplog.messages == [f"caches: 3.0 MB{pages}, for 2 slots of 16 tokens"]


class TestPrograms:
    def test_compiled_and_read(self, caplog):
        """The tests keep what they compile in a folder, where the second program is found."""
        fresh = int.from_bytes(os.urandom(3), "little")
        with Programs(2) as programs:
            for name in ("first", "second"):
                with programs.making(name, seconds=60.0):
                    jax.jit(lambda x: x * fresh + 1)(np.arange(3.0))
        begin, first, second, end = caplog.messages
        assert begin == "compiling 2 programs"
        assert first.startswith("program 1 of 2 compiled in 6") and first.endswith(" s: first")
        assert second.startswith("program 2 of 2 read in 6") and second.endswith(" s: second")
        assert end.startswith("2 programs are ready, 1 of them newly compiled, in ") and "kept in " in end
        assert [getattr(r, "programs", None) for r in caplog.records] == [(0, 2), (1, 2), (2, 2), None]

    def test_an_error_is_not_the_end_of_a_program(self, caplog):
        with pytest.raises(ValueError), Programs(1) as programs, programs.making("bad"):
            raise ValueError
        assert caplog.messages == ["compiling 1 programs"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestCommand:
    def test_lines(self, capsys):
        before = LOGGER.parent.handlers, logging.getLogger("specjax").handlers[:]
        with shown():
            LOGGER.info("begin", extra={"programs": (0, 2)})
            LOGGER.warning("a warning")
            LOGGER.debug("no line")
        LOGGER.info("after the command")
        assert capsys.readouterr().err == "specjax: begin\nspecjax: warning: a warning\n"
        assert (LOGGER.parent.handlers, logging.getLogger("specjax").handlers) == before

    def test_warnings_alone(self, capsys):
        with shown(logging.WARNING):
            LOGGER.info("begin")
            LOGGER.warning("a warning")
        assert capsys.readouterr().err == "specjax: warning: a warning\n"

    def test_bar_on_a_terminal(self, monkeypatch):
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stderr", file := Terminal())
        with shown():
            LOGGER.info("on a device")
            for i in range(3):
                LOGGER.info("program %d of 2", i, extra={"programs": (i, 2)})
            LOGGER.info("ready")
        text = file.getvalue()
        assert text.startswith("specjax: on a device\n") and text.endswith("specjax: ready\n")
        assert "━" in text and "specjax: program" not in text and "program 2 of 2" in text
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is there again

    def test_bar_goes_with_an_error(self, monkeypatch):
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stderr", file := Terminal())
        with pytest.raises(KeyboardInterrupt), shown():
            LOGGER.info("begin", extra={"programs": (0, 2)})
            raise KeyboardInterrupt
        assert file.getvalue().count("\x1b[?25h") == 1

    @pytest.mark.parametrize(
        "arguments, is_terminal, level",
        [
            (["serve"], False, logging.INFO),
            (["batch", "a", "--out", "b"], False, logging.INFO),
            (["generate"], False, logging.WARNING),
            (["generate"], True, logging.INFO),
            (["generate", "--json"], True, logging.WARNING),
        ],
    )
    def test_what_commands_show(self, arguments, is_terminal, level, monkeypatch):
        monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())
        assert cli._level(cli._parser().parse_args(arguments)) == level


def test_compiling_is_counted_once():
    """Seconds of a block count where a program of it is new."""

    @jax.jit
    def add(x):
        return x + 1

    compiling = Compiling()
    with compiling.counted():
        add(np.float32(1))
    first = compiling.seconds
    with compiling.counted():
        add(np.float32(2))
    assert first > 0 and compiling.seconds == first
    with pytest.raises(ValueError), compiling.counted():
        raise ValueError


def test_the_first_call_alone_is_told(caplog, monkeypatch):
    monkeypatch.setattr("specjax.engine.llm.Run", lambda *args: SimpleNamespace(is_done=True, errors=None, results=[]))
    config = DecoderConfig(100, 16, 1, 2, 1, 8, 16, 64)
    model, llm = decoder_model(config, init_params(config, 0)), object.__new__(LLM)
    llm.setup, llm._has_run = SimpleNamespace(model=model, proposer=proposers.ngram(2)), False
    monkeypatch.setattr(LLM, "_encode", lambda *args: [1])
    monkeypatch.setattr(LLM, "_key_data", lambda *args: None)
    for _ in range(2):
        llm.generate("a")
    (line,) = caplog.messages
    assert line.startswith(f"first call: on 1 x {jax.devices()[0].device_kind}, weights of float32; it compiles")
    assert "steps with 2 draft tokens" in line


def test_reading_weights(caplog, monkeypatch, tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    from specjax.models import tensors

    monkeypatch.setattr(tensors, "LOG_SECONDS", 0.0)
    save_file({"a": np.zeros((20, 500), np.float32)}, tmp_path / "model.safetensors")
    found = tensors.Tensors(tmp_path, np.dtype("float32"))
    with found.progress():
        found.table("a", 20, 500)
    assert caplog.messages[-1] == f"loading {tmp_path.name}: 0.00 of 0.00 GB"
