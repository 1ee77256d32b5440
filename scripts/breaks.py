#!/usr/bin/env python3
"""Break the library on purpose, one line at a time, and name the breaks that the tests do not find.

    scripts/breaks.py                     # all breaks of scripts/breaks.toml
    scripts/breaks.py ratio_is_its_root    # some of them
    scripts/breaks.py --all               # with the slow tests of each selection too
    scripts/breaks.py --write             # put what was found into docs/breaks.md, too

Every break is applied to a copy of the checkout, in which the tests that the table names for it run until the first
failure. The interpreter that runs this script runs the tests.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from xla_flags import xla_flags

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "scripts" / "breaks.toml"
PAGE = ROOT / "docs" / "breaks.md"
FOLDERS = "specjax", "pallas_kernels", "tests", "scripts", "docs"
FILES = "pyproject.toml", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"
NOT_RUN, MISSED = "not run", "**not found**"
HEADER = """# Deliberate breaks

`scripts/breaks.py --write` makes this table: it applies every break of `scripts/breaks.toml` to a copy of the checkout,
one at a time, and runs the tests that should find it until the first failure. They belong to the fast tier, which
`scripts/test` runs. "{not_run}" stands where a break was not tried since its line or the tests named for it changed.

| break | file | what goes wrong | found by |
|---|---|---|---|
"""


def breaks() -> dict[str, dict[str, str]]:
    """The table: by name, a `file`, its line `old`, the line `new` in its place, `why` it is wrong, and `tests`."""
    return tomllib.loads(TABLE.read_text())


def broken_text(name: str, entry: dict[str, str], root: Path = ROOT) -> str:
    """The text of the file of a break with the break applied.

    Raises:
        ValueError: the old text is not in the file exactly once.
    """
    text = (root / entry["file"]).read_text()
    count = text.count(entry["old"])
    if count != 1:
        raise ValueError(
            f"old of the break {name!r} must be in {entry['file']} exactly once, found it {count} times: {entry['old']}"
        )
    return text.replace(entry["old"], entry["new"])


def find(name: str, entry: dict[str, str], tier: str, programs: str) -> str:
    """The test that fails on a break, or MISSED; `programs` is a folder where later calls find what this one compiles.

    Raises:
        RuntimeError: the tests did not run.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in FILES:
            shutil.copy(ROOT / file, copy / file)
        (copy / entry["file"]).write_text(broken_text(name, entry))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", tier, "-rf", "--tb=no"]
        environment = os.environ | {
            "PYTHONPATH": str(copy),
            "XLA_FLAGS": xla_flags(),
            "JAX_COMPILATION_CACHE_DIR": programs,
        }
        done = subprocess.run(
            command + shlex.split(entry["tests"]), capture_output=True, text=True, cwd=copy, env=environment
        )
    if done.returncode == 0:
        return MISSED
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"the tests of the break {name!r} must run, got {done.returncode}:\n{done.stdout[-2000:]}")
    return f"`{failed[1]}`"


def write_page(table: dict[str, dict[str, str]], found: dict[str, str]) -> None:
    """Write the page, and keep its entries of breaks that were not tried now."""
    before = {}
    if PAGE.exists():
        before = dict(re.findall(r"^\| `(\w+)` \|.* \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE))
    rows = [
        f"| `{name}` | `{entry['file']}` | {entry['why']} | {found.get(name, before.get(name, NOT_RUN))} |"
        for name, entry in table.items()
    ]
    PAGE.write_text(HEADER.format(not_run=NOT_RUN) + "\n".join(rows) + "\n")


def main() -> None:
    table = breaks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="breaks to try; all of the table if none is given")
    parser.add_argument("--all", action="store_true", help="run the slow tests of each selection too")
    parser.add_argument("--write", action="store_true", help="write what was found to docs/breaks.md")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(table))
    if unknown:
        parser.error(f"NAME must be in {TABLE.name}, got {', '.join(unknown)}")
    found = {}
    with tempfile.TemporaryDirectory() as programs:
        for name in arguments.names or table:
            found[name] = find(name, table[name], "" if arguments.all else "not slow", programs)
            print(f"{name}: {found[name]}", flush=True)
            if arguments.write:
                write_page(table, found)
    missed = [name for name, test in found.items() if test == MISSED]
    if missed:
        sys.exit(f"{len(missed)} of {len(found)} breaks were not found: {', '.join(missed)}")
    print(f"all {len(found)} breaks were found")


if __name__ == "__main__":
    main()
