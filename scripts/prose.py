#!/usr/bin/env python3
"""Count phrases that leave out their noun, in docstrings, comments and pages.

    scripts/prose.py                # a table by group and phrase
    scripts/prose.py --list docs    # the places of a group
    scripts/prose.py --check        # exits with 1 where a group has more than scripts/prose_baseline.json allows
    scripts/prose.py --write        # lowers the figures in scripts/prose_baseline.json

A reader has to guess the noun behind `those of` or `what it`. A sentence with a subject, a verb and an object that
names every noun needs none of these phrases. Code, in blocks or in backticks, is left out.
"""

import argparse
import ast
import bisect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BASELINE = ROOT / "scripts" / "prose_baseline.json"
GROUPS = {
    "specjax": ["specjax"],
    "pallas_kernels": ["pallas_kernels"],
    "scripts": ["scripts", ".ci"],
    "tests": ["tests"],
    "docs": ["docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
PHRASES = {
    "those of": re.compile(r"\bthose\s+of\b", re.IGNORECASE),
    "that of": re.compile(r"\bthat\s+of\b", re.IGNORECASE),
    "what a/an/the/it/is": re.compile(r"\bwhat\s+(?:an?|the|it|is)\b", re.IGNORECASE),
    "of its own": re.compile(r"\bof\s+its\s+own\b", re.IGNORECASE),
    "of so many": re.compile(r"\bof\s+so\s+many\b", re.IGNORECASE),
}
FIRST = "What ... / Of ..."
COLUMNS = [*PHRASES, FIRST]
_FIRST = re.compile(r"(?:^|[.!?][\"')*_]*\s)\s*[\"'(*_]*(?P<word>What|Of)\b")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_SPAN = re.compile(r"(`+)[^`]+\1")
_ADDRESS = re.compile(r"(?<=\]\()[^)\s]*(?=\))")
_FENCE = re.compile(r"\s*(?:[*-]\s+)?(```+|~~~+)")
_ITEM = re.compile(r"\s*(?:[*-]|\d+\.)\s+")
_ENTRY = re.compile(r"\s*\*{0,2}\w+(?: \([^)]*\))?:\s+(?=\S)")
_DIRECTIVE = re.compile(r"#\s*(?:!|noqa|pyright:|type:|fmt:|pragma)")


class Paragraph(NamedTuple):
    """Lines that belong together, each with its number. Headings and cells of tables are no sentences."""

    lines: list[tuple[int, str]]
    is_sentence: bool = True

    def text(self) -> str:
        """Return the lines as one."""
        return " ".join(line.strip() for _, line in self.lines)

    def words(self) -> str:
        """Return the text with placeholders of the same length for code and the addresses of links."""
        return _ADDRESS.sub(
            lambda match: "_" * len(match[0]), _SPAN.sub(lambda match: "x" * len(match[0]), self.text())
        )

    def line_at(self, offset: int) -> int:
        """Return the number of the line in which a place of the text lies."""
        starts = [0]
        for _, line in self.lines[:-1]:
            starts.append(starts[-1] + len(line.strip()) + 1)
        return self.lines[bisect.bisect_right(starts, offset) - 1][0]


class Found(NamedTuple):
    """A phrase, the number of its line, and the sentence in which it stands."""

    phrase: str
    line: int
    sentence: str


def num_words(paragraphs: Iterable[Paragraph]) -> int:
    """Count words; code in backticks is one word."""
    return sum(len(_WORD.findall(paragraph.words())) for paragraph in paragraphs)


def find(paragraph: Paragraph) -> list[Found]:
    """Return the phrases of a paragraph in their order."""
    words = paragraph.words()
    places = [(match.start(), name) for name, phrase in PHRASES.items() for match in phrase.finditer(words)]
    if paragraph.is_sentence:
        places += [(match.start("word"), FIRST) for match in _FIRST.finditer(words)]
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", words)]
    bounds = [0, *ends, len(words)]
    found = []
    for start, name in sorted(places):
        index = bisect.bisect_right(ends, start)
        sentence = paragraph.text()[bounds[index] : bounds[index + 1]].strip()
        found.append(Found(name, paragraph.line_at(start), sentence))
    return found


def markdown(text: str) -> Iterator[Paragraph]:
    """Yield the paragraphs, headings and cells of a page, without its blocks of code."""
    lines: list[tuple[int, str]] = []
    fence, in_directive = "", False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
            continue
        # Options of a reference, as in `::: specjax.decode`, are indented below it.
        in_directive = line.startswith(":::") or (in_directive and (not line.strip() or line.startswith(" ")))
        is_table, is_heading = line.lstrip().startswith("|"), line.startswith("#")
        is_apart = bool(mark) or in_directive or is_table or is_heading or not line.strip()
        if (is_apart or _ITEM.match(line)) and lines:
            yield Paragraph(lines)
            lines = []
        if mark:
            fence = mark[1]
        elif is_heading:
            yield Paragraph([(number, line.lstrip("#"))], is_sentence=False)
        elif is_table and not in_directive:
            yield from (Paragraph([(number, cell)], is_sentence=False) for cell in line.strip().strip("|").split("|"))
        elif not is_apart:
            lines.append((number, _ITEM.sub("", line) if _ITEM.match(line) else line))


def docstring(text: str, first_line: int = 1) -> Iterator[Paragraph]:
    """Yield the paragraphs of a docstring and the entries of its sections, without doctests and other code."""
    lines: list[tuple[int, str]] = []
    fence, indents = "", _indents(text)
    in_section = in_code = in_doctest = False
    for number, line in enumerate([*text.splitlines(), ""], first_line):
        mark = _FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
            continue
        indent = len(line) - len(line.lstrip()) - indents if number > first_line else 0
        if not line.strip() or mark or _ITEM.match(line) or (in_section and _ENTRY.match(line) and indent <= 4):
            if lines:
                yield Paragraph(lines)
                lines = []
            in_code = not line.strip()
        if mark:
            fence = mark[1]
            continue
        if not line.strip():
            in_doctest = False
            continue
        if indent <= 0:
            in_section = bool(re.fullmatch(r"\s*[A-Z][a-z]+:\s*", line))
        # A block that is indented after an empty line is code, outside of a section such as `Args:`.
        in_doctest = in_doctest or line.lstrip().startswith(">>>")
        if in_doctest or (in_code and indent >= 4 and not in_section):
            continue
        in_code = False
        entry = _ENTRY.match(line) if in_section and indent <= 4 else None
        lines.append((number, line[entry.end() :] if entry else _ITEM.sub("", line) if _ITEM.match(line) else line))


def _indents(text: str) -> int:
    """Return the indentation of a docstring after its first line."""
    rest = [line for line in text.splitlines()[1:] if line.strip()]
    return min((len(line) - len(line.lstrip()) for line in rest), default=0)


def comments(text: str) -> Iterator[Paragraph]:
    """Yield the comments of a Python file; comments on lines of their own continue the line above."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        number, is_alone = token.start[0], not token.line[: token.start[1]].strip()
        if lines and not (is_alone and number == lines[-1][0] + 1):
            yield Paragraph(lines)
            lines = []
        lines.append((number, token.string.lstrip("#").strip()))
    if lines:
        yield Paragraph(lines)


def python(text: str) -> Iterator[Paragraph]:
    """Yield the docstrings of a Python file, wherever a string stands as a statement, and its comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from docstring(node.value.value, node.lineno)
    yield from comments(text)


def shell(text: str) -> Iterator[Paragraph]:
    """Yield the comments of a shell script that have their lines for themselves."""
    lines: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#") and not line.startswith("#!"):
            lines.append((number, line.strip().lstrip("#").strip()))
        elif lines:
            yield Paragraph(lines)
            lines = []


def paragraphs(path: Path) -> list[Paragraph]:
    """Return the prose of a file; none of a file that is no page, no Python and no shell script."""
    if path.suffix == ".md":
        return list(markdown(path.read_text()))
    if path.suffix == ".py":
        return list(python(path.read_text()))
    if not path.suffix:
        text = path.read_text(errors="replace")
        return list(shell(text)) if text.startswith("#!") and "sh" in text.split("\n", 1)[0] else []
    return []


def files(group: str, root: Path = ROOT) -> list[Path]:
    """Return the files of a group in the order of their names."""
    places = [root / name for name in GROUPS[group]]
    return sorted(
        path for place in places for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file()
    )


def count(group: str, root: Path = ROOT) -> tuple[int, dict[str, int]]:
    """Return the number of words of a group, and how often each phrase stands in it."""
    prose = [paragraph for path in files(group, root) for paragraph in paragraphs(path)]
    found = [place.phrase for paragraph in prose for place in find(paragraph)]
    return num_words(prose), {name: found.count(name) for name in COLUMNS}


def table(counts: dict[str, tuple[int, dict[str, int]]]) -> str:
    """Return counts as a table in Markdown: each phrase, their sum, and their sum in 10,000 words."""
    header = ["group", "words", *COLUMNS, "sum", "in 10,000 words"]
    rows = [header, ["---"] * len(header)]
    for group, (words, phrases) in counts.items():
        total = sum(phrases.values())
        rows.append([group, f"{words}", *map(str, phrases.values()), f"{total}", f"{1e4 * total / max(words, 1):.1f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rises(counts: dict[str, tuple[int, dict[str, int]]], baseline: dict[str, int]) -> list[str]:
    """Name the groups with more phrases than the baseline allows."""
    totals = {group: sum(phrases.values()) for group, (_, phrases) in counts.items()}
    return [
        f"{group} has {total} phrases without a noun, {baseline[group]} are allowed: scripts/prose.py --list {group}"
        for group, total in totals.items()
        if total > baseline[group]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list", choices=GROUPS, metavar="GROUP", help=f"show the places of a group: {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a group has more than the baseline allows"
    )
    parser.add_argument("--write", action="store_true", help="lower the baseline to the counts")
    options = parser.parse_args()
    if options.list:
        for path in files(options.list):
            places = [place for paragraph in paragraphs(path) for place in find(paragraph)]
            for place in sorted(places, key=lambda place: place.line):
                print(f"{path.relative_to(ROOT)}:{place.line}: [{place.phrase}] {place.sentence}")
        return
    counts = {group: count(group) for group in GROUPS}
    print(table(counts))
    baseline = json.loads(BASELINE.read_text())
    risen = rises(counts, baseline)
    if options.write:
        lowered = {group: min(baseline[group], sum(phrases.values())) for group, (_, phrases) in counts.items()}
        BASELINE.write_text(json.dumps(lowered, indent=2) + "\n")
    if risen and (options.check or options.write):
        sys.exit("\n".join(risen))


if __name__ == "__main__":
    main()
