"""The counter of phrases counts prose alone, and refuses a rise."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("prose", Path(__file__).parent.parent / "scripts" / "prose.py")
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)
FENCED = """A sentence.

```bash
true  # those of a block
```
"""


def phrases(paragraphs):
    """Return the phrases of paragraphs with their lines."""
    return [(found.phrase, found.line) for paragraph in paragraphs for found in prose.find(paragraph)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Add those of jobs.", ["those of"]),
        ("Read that\nof the row.", ["that of"]),
        ("It says what an engine does, and what it did.", ["what a/an/the/it/is"] * 2),
        ("A state of its own, for a batch of so many.", ["of its own", "of so many"]),
        ("Two came. Of these one left. What remains stays.", [prose.FIRST] * 2),
        ("* Of the rows, one.", [prose.FIRST]),
        ("Whatever is known of itself, offer those often.", []),
        ("The words `those of` are code; so is [a link](what-a-page.md).", []),
    ],
)
def test_phrases_of_a_page(text, expected):
    assert [phrase for phrase, _ in phrases(prose.markdown(text))] == expected


def test_words_are_counted_with_code_as_one():
    assert prose.num_words(prose.markdown("# A title\n\nTwo words, `a = b + c` and 3 more.\n")) == 2 + 5


def test_code_blocks_are_left_out():
    assert phrases(prose.markdown(FENCED)) == []
    assert phrases(prose.docstring(f"Return a row.\n\n{FENCED}")) == []
    assert phrases(prose.markdown(FENCED + "\nThose of the text.\n")) == [("those of", 7)]


def test_doctests_and_indented_code_are_left_out():
    text = (
        "Run it.\n\n    scripts/it  # what it does\n\nExample:\n    >>> f()  # what it gives\n    'what a row needs'"
        "\n\nAdd what it gives."
    )
    assert phrases(prose.docstring(text)) == [("what a/an/the/it/is", 9)]


def test_headings_and_cells_are_no_sentences():
    text = "# What to do\n\n| What | Of that of a row |\n|---|---|\n| Of one | x |\n"
    assert phrases(prose.markdown(text)) == [("that of", 3)]


def test_entries_of_a_section_begin_sentences():
    text = "Add rows.\n\n    Args:\n        rows: What to add, in\n            more lines.\n        k: [B] int32.\n    "
    assert phrases(prose.docstring(text, 10)) == [(prose.FIRST, 13)]


def test_python_is_read_for_docstrings_and_comments():
    text = '''"""What it is."""

value = "what a string that is no docstring says"
"""Those of a field."""


def f(x):  # that of a line
    # which goes on: what is
    # of its own  # noqa
    return x  # pyright: ignore[what a rule]
'''
    assert sorted(phrases(prose.python(text)), key=lambda found: found[1]) == [
        ("What ... / Of ...", 1),
        ("what a/an/the/it/is", 1),
        ("those of", 4),
        ("that of", 7),
        ("what a/an/the/it/is", 8),
        ("of its own", 9),
    ]


def test_comments_of_shell_scripts_are_read():
    assert phrases(prose.shell("#!/bin/sh\n# What runs.\necho 'that of'\n")) == [(prose.FIRST, 2)]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Make a checkout whose documentation has one phrase."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("Add those of jobs.\n")
    monkeypatch.setattr(prose, "files", lambda group, root=None: [tmp_path / "docs" / "page.md"] * (group == "docs"))
    monkeypatch.setattr(prose, "BASELINE", tmp_path / "baseline.json")
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prose.py", *arguments])
    prose.main()


def allow(checkout, num):
    (checkout / "baseline.json").write_text(json.dumps(dict.fromkeys(prose.GROUPS, 0) | {"docs": num}))


@pytest.mark.parametrize("option", ["--check", "--write"])
def test_a_rise_is_refused(checkout, monkeypatch, option):
    allow(checkout, 0)
    with pytest.raises(SystemExit, match="docs has 1 phrases without a noun, 0 are allowed"):
        run(monkeypatch, option)
    assert json.loads((checkout / "baseline.json").read_text())["docs"] == 0


def test_equal_counts_pass(checkout, monkeypatch, capsys):
    allow(checkout, 1)
    run(monkeypatch, "--check")
    assert "| docs | 4 | 1 | 0 | 0 | 0 | 0 | 0 | 1 | 2500.0 |" in capsys.readouterr().out


def test_a_fall_is_written(checkout, monkeypatch):
    allow(checkout, 3)
    run(monkeypatch, "--write")
    assert json.loads((checkout / "baseline.json").read_text())["docs"] == 1
