"""The corpus of the embedded family, and the judgement of its target's text."""

import importlib
from email.message import Message
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("python_corpus")


@pytest.fixture
def evaluation(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("evaluate_embedded")


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"License": "BSD 3-Clause License\n\nCopyright"}, "BSD 3-Clause License"),
        ({"Classifier": "License :: OSI Approved :: Apache Software License"}, "Apache Software License"),
        ({"License": "MIT", "Classifier": "License :: OSI Approved :: GNU General Public License v3"}, None),
        ({"License-Expression": "MIT AND LGPL-2.1"}, None),
        ({"License": "Proprietary"}, None),
        ({}, None),
    ],
)
def test_licences(fields, licence, corpus):
    package = Message()
    for name, value in fields.items():
        package[name] = value
    assert corpus.licence_of(package) == licence


def test_filters(corpus, tmp_path):
    good = "def add(first, second):\n    return first + second\n" * 6
    cases = {
        good: True,
        "x = 1\n": False,  # too short
        "# This file was automatically generated from x.\n" + good: False,
        good + "def broken(:\n": False,
        good + f"x = {'y + ' * 60}y\n": False,  # a long line
        good + f"table = [{', '.join(['12345'] * 20)}]\n" * 20: False,
    }
    for i, (text, expected) in enumerate(cases.items()):
        path = tmp_path / f"{i}.py"
        path.write_text(text)
        assert (corpus.readable(path) is not None) == expected, text[:60]
    lines = corpus.Lines()
    assert lines.is_new(good) and not lines.is_new(good)
    assert lines.is_new("class Another:\n    def method_of_some_length(self):\n        return something_else(self)\n")


def test_runs_in_common_with_held_out_documents(corpus):
    held_out = list(range(200, 300))
    runs = corpus.Runs([held_out], 400)
    assert runs.are_in([1, 2, *held_out[30:80], 3])
    assert not runs.are_in([1, 2, *held_out[30:79], 3, *held_out[79:100]])
    assert not runs.are_in(held_out[:49])
    assert not runs.are_in(held_out[:50][::-1])


def test_a_small_corpus(corpus, tmp_path):
    good = "def add_{0}(first_{0}, second_{0}):\n    return first_{0} + second_{0}\n" * 6
    for name in ("heapq", "module", "other"):
        (tmp_path / f"{name}.py").write_text(good.format(name))
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "third.py").write_text(good.format("third"))
    found = corpus.read_corpus(tmp_path, packages=False)
    texts = [*found.training[corpus.STDLIB], *found.validation]
    assert sorted(texts) == [good.format(name) for name in ("module", "other")]
    assert found.held_out == [good.format("heapq")]
    with pytest.raises(ValueError, match="stdlib must hold Python modules, some of them held out"):
        corpus.read_corpus(tmp_path / "site-packages", packages=False)


def test_packages_of_a_folder(corpus, tmp_path, monkeypatch):
    good = "def add_{0}(first_{0}, second_{0}):\n    return first_{0} + second_{0}\n" * 6
    installed, site = tmp_path / "installed", tmp_path / "site"
    for folder, name, version, licence in [
        (installed, "both", "2", "MIT"),
        (site, "both", "1", "MIT"),
        (site, "extra", "3", "BSD"),
        (site, "closed", "4", "Proprietary"),
    ]:
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Name: {name}\nVersion: {version}\nLicense: {licence}\n")
        (about / "RECORD").write_text(f"{name}.py,,\n{name}/tests/case.py,,\n")
        (folder / f"{name}.py").write_text(good.format(f"{name}_{version}"))
    monkeypatch.setattr(corpus.sys, "path", [str(installed)])
    found = {
        source.name: (source.version, source.files) for source in corpus.package_sources([str(site), str(installed)])
    }
    assert found == {"both": ("2", [installed / "both.py"]), "extra": ("3", [site / "extra.py"])}

    stdlib = tmp_path / "python3.9"
    stdlib.mkdir()
    for module in ("heapq", "other"):
        (stdlib / f"{module}.py").write_text(good.format(module))

    def versions(**options) -> dict[str, str]:
        return {
            source.name: source.version
            for source in corpus.read_corpus(stdlib, **options, validation_share=2**32).sources
        }

    assert versions() == {"Python": "3.9", "both": "2"}
    assert versions(site=site) == {"Python": "3.9", "both": "2", "extra": "3"}
    assert versions(site=site, packages=False) == {"Python": "3.9", "both": "1", "extra": "3"}
    assert versions(packages=False) == {"Python": "3.9"}
    with pytest.raises(ValueError, match=r"site must be a directory of packages, got .*nowhere"):
        corpus.read_corpus(tmp_path, site=tmp_path / "nowhere", packages=False)


def test_the_version_of_a_library(corpus, monkeypatch):
    assert corpus.version_of(Path("/opt/lib/python3.9")) == "3.9"
    assert corpus.version_of(Path("/opt/lib/python3.13t")) == "3.13"
    monkeypatch.setattr(corpus.sysconfig, "get_python_version", lambda: "3.99")
    for folder in ("/opt/cpython/Lib", "/opt/cpython-3.14.1", "/usr/lib/python3"):
        assert corpus.version_of(Path(folder)) == "3.99"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    x = 1\n    ret", True),
        ("try:\n    x = 1\n", True),
        ('x = """never\nended\n', True),
        ("x = (1,\n", True),
        ("class A:\n", True),
        ("def f(:\n    pass\n", False),
        ("def f():\n    x\n  y\n", False),
        ("else:\n    pass\n", False),
    ],
)
def test_what_parses(text, expected, evaluation):
    assert evaluation.parses(text) == expected


def test_what_repeats(evaluation):
    run = list(range(8))
    assert evaluation.repeats(run * 4) and evaluation.repeats([*run, 9] * 4) and evaluation.repeats([1] * 32)
    assert not evaluation.repeats(run * 3) and not evaluation.repeats([1] * 31)
    assert not evaluation.repeats(list(range(500)))


def test_what_loops(evaluation):
    run = list(range(8))
    assert (
        evaluation.loops([9, *run * 4, 9])
        and evaluation.loops([1] * 4)
        and evaluation.loops([5, 1, 2, 1, 2, 1, 2, 1, 2])
    )
    assert not evaluation.loops(run * 3) and not evaluation.loops([*run, 9] * 4) and not evaluation.loops([1, 1, 1, 2])
    assert not evaluation.loops([*run, *run, *run, *run[:7]]) and not evaluation.loops([])
