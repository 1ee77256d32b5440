#!/usr/bin/env python3
"""Run the clients of other projects against a running server, and print what works.

Each client gets an environment below a folder, made by the first run, with the newest version that pip finds, and runs
the script of its name in scripts/clients/. A call works where the client parses the answer: models of any quality do,
as grammars make the objects and tools that are asked for.

    specjax serve --port 8000
    scripts/check_clients.py http://127.0.0.1:8000 FOLDER
    scripts/check_clients.py http://127.0.0.1:8000 FOLDER --only openai litellm

The last lines are the table of docs/server.md. The exit code is 1 where a call fails.
"""

import argparse
import json
import shutil
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

CLIENTS = {  # what pip installs for each client, and the script that runs it
    "openai": ("openai", "try_openai.py"),
    "anthropic": ("anthropic", "try_anthropic.py"),
    "litellm": ("litellm", "try_litellm.py"),
    "langchain-openai": ("langchain-openai", "try_langchain.py"),
    "instructor": ("instructor", "try_instructor.py"),
    "openai-agents": ("openai-agents", "try_agents.py"),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]", "try_pydantic_ai.py"),
    "llm": ("llm", "try_llm.py"),
    "lm-eval": ("lm-eval[api]", "try_lm_eval.py"),
    "guidellm": ("guidellm", "try_guidellm.py"),
}


def environment(folder: Path, requirement: str) -> Path:
    """Return the interpreter of an environment with a client, which is made where there is none."""
    python = folder / "bin" / "python"
    if not (folder / "is_complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
        subprocess.run([*pip, requirement], check=True)
        (folder / "is_complete").touch()
    return python


def version(python: Path, requirement: str) -> str:
    """Return the version of a client."""
    code = f"from importlib.metadata import version; print(version({requirement.partition('[')[0]!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, encoding="utf-8").stdout.strip()


def calls(python: Path, script: str, url: str, model: str, files: Path) -> list[tuple[str, str]]:
    """Return the calls of a client with their results."""
    shutil.rmtree(files, ignore_errors=True)  # of the last run
    files.mkdir()
    command = [python, Path(__file__).parent / "clients" / script, url, model, files]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"call"')]
    ended = [("the script", done.stderr[-2000:])] if done.returncode else []
    return [(line["call"], line["result"]) for line in lines] + ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a running server")
    parser.add_argument("folder", type=Path, help="for the environments")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, metavar="CLIENT", default=list(CLIENTS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(f"{args.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]

    table, has_failed = ["| client | version | what works |", "|---|---|---|"], False
    for client in args.only:
        requirement, script = CLIENTS[client]
        python = environment(args.folder / client, requirement)
        number = version(python, requirement)
        works = []
        for call, result in calls(python, script, args.url, model, args.folder / f"{client} files"):
            print(f"{client:17} {number:10} {call:45} {result}", flush=True)
            works += [call if result == "works" else f"not: {call}"]
            has_failed |= result != "works"
        table.append(f"| {client} | {number} | {'; '.join(works)} |")
    print("", *table, sep="\n")
    return has_failed


if __name__ == "__main__":
    sys.exit(main())
