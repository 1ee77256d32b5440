"""Make prompts for a target that chats, from installed packages of permissive licences and from templates.

    python scripts/chat_prompts.py --out prompts --count 40000

The prompts are of five kinds: chat, explain code, write code, summarise, extract. `--out` becomes a directory with
train.jsonl, whose lines have "kind" and "prompt", and sources.json, which names the packages with their licences.
`--held-out FILE` writes some prompts of each kind as JSON that no training prompt shares: their code and documentation
come from other packages and modules, and the blanks of their templates are filled with other entries.
"""

import argparse
import ast
import inspect
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from python_corpus import STDLIB, Source, package_sources, readable, stdlib_files, version_of

KINDS = "chat", "explain code", "write code", "summarise", "extract"
HELD_OUT_PACKAGES = "humanize", "networkx", "rich", "starlette"
# Templates of prompts, and lists of words for their blanks, which stand in braces.
TOPICS = json.loads((Path(__file__).parent / "chat_topics.json").read_text())
SHARED = "language", "month", "number", "count", "price"  # lists that are too short to be split
FILES = 160  # of a package, at most
PIECES = 700  # of each kind from a package, at most
CODE = 80, 700  # characters of a function
PROSE = 200, 800  # characters of a text
LEAST_WORDS = 5  # of the sentence from which a function is to be written


class Piece(NamedTuple):
    """A function of a package, or a paragraph of its documentation."""

    kind: str  # "code" or "prose"
    text: str  # source without its docstring, or the paragraph
    signature: str = ""  # of a function, as in "add(a, b)"
    sentence: str = ""  # the first one of its docstring


def paragraphs(text: str) -> Iterator[str]:
    """Yield runs of paragraphs of plain sentences, of PROSE characters."""
    joined = ""
    for part in re.split(r"\n\s*\n", text):
        part = textwrap.dedent(part).strip()
        is_plain = (
            len(part) > 40 and part[0].isalpha() and part[-1] in ".:" and not re.search(r">>>|```|\|\s|---|http", part)
        )
        if is_plain and len(joined) + len(part) < PROSE[1]:
            joined = f"{joined}\n\n{part}".strip()
            continue
        if len(joined) >= PROSE[0]:
            yield joined
        joined = ""
    if len(joined) >= PROSE[0]:
        yield joined


def functions(text: str) -> Iterator[Piece]:
    """Yield the short functions of a module, and paragraphs of its docstrings."""
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        doc = ast.get_docstring(node)
        if doc:
            yield from (Piece("prose", part) for part in paragraphs(doc))
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.decorator_list:
            continue
        body = node.body[1:] if doc else node.body
        if not body or node.end_lineno is None:
            continue
        first, last = node.lineno - 1, node.body[0].lineno - 1 if not doc else (node.body[0].end_lineno or 0)
        head = lines[first : node.body[0].lineno - 1]
        code = textwrap.dedent("\n".join([*head, *lines[last : node.end_lineno]])) if head else ""
        names = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
        sentence = inspect.cleandoc(doc or "").split("\n\n")[0].replace("\n", " ").strip()
        is_sentence = sentence.endswith(".") and LEAST_WORDS <= len(sentence.split()) <= 40 and "`" not in sentence
        if CODE[0] <= len(code) <= CODE[1] or is_sentence:
            is_short = CODE[0] <= len(code) <= CODE[1]
            signature = f"{node.name}({', '.join(names)})"
            yield Piece("code", code.strip() if is_short else "", signature, sentence if is_sentence else "")


def described(name: str) -> list[Piece]:
    """Return the paragraphs of the description of an installed package."""
    if name == STDLIB:
        return []
    body = metadata.metadata(name).get_payload()
    return [Piece("prose", part) for part in paragraphs(body if isinstance(body, str) else "")]


def pieces_of(source: Source, rng: random.Random) -> list[Piece]:
    """Return pieces of some files of a package, no text twice."""
    files = rng.sample(source.files, min(FILES, len(source.files)))
    texts = [text for file in files if (text := readable(file)) is not None]
    found = described(source.name) + [piece for text in texts for piece in functions(text)]
    return list({(piece.text or piece.sentence): piece for piece in found}.values())


def blanks(is_held_out: bool) -> dict[str, list[str]]:
    """Return the entries of each list: every eighth is held out, but for lists that both share."""
    filled = {}
    for name, every in TOPICS["lists"].items():
        if name not in SHARED:
            every = [entry for i, entry in enumerate(every) if (i % 8 == 5) == is_held_out]
        filled[name] = every
    return filled


def fill(template: str, lists: dict[str, list[str]], rng: random.Random) -> str:
    """Return a template whose blanks are filled, each by itself."""
    text = re.sub(r"\{(\w+)\}", lambda match: rng.choice(lists[match[1]]), template)
    return text[:1].upper() + text[1:]


def about(task: str, text: str, rng: random.Random, fence: str = "") -> str:
    """Return a task and the text that it is about, in some order."""
    text = f"```{fence}\n{text}\n```" if fence else text
    return f"{task}\n\n{text}" if rng.random() < 0.8 else f"{text}\n\n{task}"


def prompts_of(
    pieces: Sequence[Piece], lists: dict[str, list[str]], rng: random.Random
) -> dict[str, Callable[[], str]]:
    """Return a function for each kind, which makes a new prompt in every call."""
    code = [piece for piece in pieces if piece.kind == "code" and piece.text]
    told = [piece for piece in pieces if piece.kind == "code" and piece.sentence]
    prose = [piece for piece in pieces if piece.kind == "prose"]
    named = ("explain code", "implement", "summarise", "details", "chat", "write code", "records", "extract")
    explain, implement, summarise, details, chat, write, records, extract = (TOPICS["templates"][x] for x in named)

    def implemented() -> str:
        piece = rng.choice(told)
        name, _, arguments = piece.signature.rstrip(")").partition("(")
        fields = {"signature": piece.signature, "name": name, "arguments": arguments, "sentence": piece.sentence}
        return rng.choice(implement).format(**fields)

    def extracted() -> str:
        if rng.random() < 0.6:
            return about(rng.choice(extract), fill(rng.choice(records), lists, rng), rng)
        task = rng.choice(details)
        piece = rng.choice(code if "code" in task or "argument" in task else prose)
        return about(task, piece.text, rng, "python" if piece.kind == "code" else "")

    return {
        "chat": lambda: fill(rng.choice(chat), lists, rng),
        "explain code": lambda: about(rng.choice(explain), rng.choice(code).text, rng, "python"),
        "write code": lambda: implemented() if rng.random() < 0.6 else fill(rng.choice(write), lists, rng),
        "summarise": lambda: about(rng.choice(summarise), rng.choice(prose).text, rng),
        "extract": extracted,
    }


def make(pieces: Sequence[Piece], is_held_out: bool, count: int, seed: int) -> list[dict[str, str]]:
    """Return `count` different prompts, as many of each kind."""
    rng = random.Random(seed)
    makers = prompts_of(pieces, blanks(is_held_out), rng)
    made: dict[str, str] = {}
    for kind, maker in makers.items():
        wanted, tries = len(made) + count // len(makers), 0
        while len(made) < wanted and tries < 20 * count:
            made.setdefault(maker(), kind)
            tries += 1
    found = [{"kind": kind, "prompt": prompt} for prompt, kind in made.items()]
    rng.shuffle(found)
    return found


def collect(seed: int) -> tuple[list[Piece], list[Piece], list[Source]]:
    """Return the pieces to train on, those held out, and the packages of the first ones."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = (Source(STDLIB, version_of(stdlib), "PSF-2.0", list(files)) for files in stdlib_files(stdlib))
    packages = [source for source in package_sources(sys.path) if source.name != "specjax"]
    kept, others, used = [], [], []
    for source in [training, held_out, *packages]:
        rng = random.Random(f"{seed} {source.name}")
        found = pieces_of(source, rng)
        if source is held_out or source.name.lower() in HELD_OUT_PACKAGES:
            others += found
            continue
        for kind in ("code", "prose"):
            some = [piece for piece in found if piece.kind == kind]
            kept += rng.sample(some, min(PIECES, len(some)))
        used.append(source)
    seen = {piece.text for piece in others if piece.text} | {piece.sentence for piece in others if piece.sentence}
    return [piece for piece in kept if not seen & {piece.text, piece.sentence}], others, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the prompts")
    parser.add_argument("--count", type=int, default=40_000, help="prompts to train on")
    parser.add_argument("--held-out", type=Path, help="also write held-out prompts to this file")
    parser.add_argument("--held-out-count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pieces, others, sources = collect(args.seed)
    made = make(pieces, False, args.count, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in made))
    named = [{"name": x.name, "version": x.version, "licence": x.licence} for x in sources]
    (args.out / "sources.json").write_text(json.dumps(named, indent=1) + "\n")
    if args.held_out is not None:
        held_out = make(others, True, args.held_out_count, args.seed + 1)
        shared = {prompt["prompt"] for prompt in made} & {prompt["prompt"] for prompt in held_out}
        if shared:
            raise ValueError(f"held-out prompts must not be among those to train on, got {shared}")
        args.held_out.write_text(json.dumps(sorted(held_out, key=lambda x: KINDS.index(x["kind"])), indent=1) + "\n")
    print(f"{len(made)} prompts from {len(pieces)} pieces of {len(sources)} packages, and from templates")


if __name__ == "__main__":
    main()
