"""How models, results and metrics look in a terminal, in a notebook and as plots."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import LLM, Model, metrics
from specjax.engine.requests import Completion, Metrics, Piece, Result
from specjax.proposers import ngram, none

PLAIN = Metrics(8, 8, 0, 0, math.nan, (), math.nan, 2.0, 4.0, math.nan, 0.5, math.nan)
FIGURES = Metrics(8, 3, 6, 5, 5 / 6, (1.0, 0.5), 2.67, 2.0, 4.0, 0.9, 0.5, math.nan)
PIECES = (Piece("a < b", 3, "accepted"), Piece("\n", 4, "bonus"), Piece("é", 5, "recovered"))


def result(text="a < b\né", pieces=PIECES, figures=FIGURES, number=1):
    made = [Completion(text, [3, 4, 5], None, "stop", None, i) for i in range(number)]
    return Result("say " + "so " * 50, made, figures, pieces=pieces)


class TestRepr:
    def test_metrics(self):
        line = "Metrics(8 tokens in 2.00 s, 4.0 tokens/s, acceptance rate 0.83, mean acceptance length 2.67)"
        assert repr(FIGURES) == line
        assert repr(PLAIN) == "Metrics(8 tokens in 2.00 s, 4.0 tokens/s, no drafts)"

    def test_result(self):
        line = repr(result(number=2))
        assert line.startswith(
            "Result('say so so so so so ... so so so so so ' -> 'a < b\\né', stop, 2 completions, Metr"
        )
        assert len(line) < 240

    def test_model(self):
        params = {"a": jnp.zeros((500, 1000)), "b": np.zeros(4, np.float16)}
        model = Model(params, apply_nothing, apply_nothing, 7, 9)
        line = (
            "Model(vocab_size=7, max_length=9, params: 2.0 MB of float16 and float32 in 2 arrays, apply: apply_nothing)"
        )
        assert repr(model) == line
        assert "2.0 MB of float16 and float32" in repr(jax.eval_shape(lambda: model))

    @pytest.mark.parametrize("proposer, drafts", [(ngram(3), "NGram with K = 3"), (none(), "no drafts")])
    def test_llm(self, proposer, drafts):
        llm = object.__new__(LLM)
        model = Model({}, apply_nothing, apply_nothing, 7, 9)
        llm.setup = SimpleNamespace(model=model, proposer=proposer, verifier=specjax.verifiers.block, max_length=9)
        lines = repr(llm).splitlines()
        assert lines[0] == f"LLM({drafts}, verifier: {llm.verifier.__name__}, max_length: 9,"
        assert len(lines) == 2 and lines[1].startswith("    target: Model(vocab_size=7, ")


def apply_nothing(*args):
    raise NotImplementedError


class TestNotebook:
    def test_result(self):
        page = result()._repr_html_()
        assert '<span title="accepted, token 3" style="background:rgba(46,160,67,.3)">a &lt; b</span>' in page
        assert 'title="recovered"' in page and "draft 2" in page

    def test_without_drafts_and_pieces(self):
        page = result(text="<b>", pieces=(), figures=PLAIN)._repr_html_()
        assert ">&lt;b&gt;</pre>" in page and "recovered" not in page and "draft" not in page.replace("no drafts", "")

    def test_metrics(self):
        page = FIGURES._replace(acceptance_rate_per_position=(1.0, math.nan))._repr_html_()
        assert "width:120px" in page and "draft 2" not in page


@pytest.mark.slow  # imports matplotlib
class TestPlot:
    @pytest.fixture(autouse=True)
    def without_a_screen(self, monkeypatch):
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("agg")

    def test_several(self):
        figure = metrics.plot({"EAGLE": FIGURES, "plain": PLAIN})
        rates, speeds = figure.axes
        (line,) = rates.lines
        assert line.get_ydata().tolist() == [1.0, 0.5]
        assert [bar.get_width() for bar in speeds.patches] == [4.0, 4.0]
        assert [text.get_text() for text in speeds.get_yticklabels()] == ["EAGLE", "plain"]

    def test_one(self):
        rates, speeds = FIGURES.plot().axes
        assert len(rates.lines) == 1 and rates.get_legend() is None
        assert [text.get_text() for text in speeds.texts] == ["2.67 tokens a step"]

    def test_none(self):
        with pytest.raises(ValueError, match="runs must hold the metrics of at least one run"):
            metrics.plot({})

    def test_without_matplotlib(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match="the package matplotlib is missing, install it with"):
            FIGURES.plot()
