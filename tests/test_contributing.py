"""CONTRIBUTING says how many files an addition touches; each number is counted on an example."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROW = re.compile(
    r"^\| (?P<addition>[^|]+) \| (?P<number>\d+) \| `(?P<example>\w+)` \| (?P<files>[^|]+) \|(?P<why>.*)\|$"
)
ROWS = [match for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if (match := ROW.match(line))]


@cache
def words(path):
    """The words of the code of a file, its name among them; prose does not count."""
    text = path.read_text()
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = {path.stem}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and token.start not in docstrings):
            found.update(re.findall(r"\w+", token.string))
    return found


def may_have(path):
    """Return a text with all `words` of a file, which takes a hundredth of their time."""
    return path.stem + "\n" + path.read_text()


def files_with(word):
    """The files of the packages whose code has a word."""
    paths = [path for package in ("specjax", "pallas_kernels") for path in sorted((ROOT / package).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in paths if word in may_have(path) and word in words(path)]


def test_the_table_has_every_kind_of_addition():
    kinds = [row["addition"] for row in ROWS]
    assert set(kinds) >= {"a verifier", "a drafter", "a family", "a kernel", "a sampling rule"}
    assert ("an expert router" in kinds) == (ROOT / "specjax" / "models" / "experts.py").exists()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["example"])
def test_the_number_of_files(row):
    found = files_with(row["example"])
    listed = re.findall(r"`([\w/.]+)`", row["files"])
    assert len(found) == int(row["number"]), found
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["example"])
def test_more_than_two_files_have_a_reason(row):
    assert (int(row["number"]) > 2) == bool(row["why"].strip())


def test_prose_is_no_mention(tmp_path):
    path = tmp_path / "other.py"
    path.write_text(
        '"""A docstring on typical."""\n\n\ndef f():\n    """Also typical."""\n    return "block"  # typical\n'
    )
    assert words(path) == {"other", "def", "f", "return", "block"}
