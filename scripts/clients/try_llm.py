"""The command `llm`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from report import FOLDER, MODEL, URL, attempt

options = "supports_schema: true\n  supports_tools: true\n  can_stream: true"
entry = f"- model_id: specjax\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  {options}\n"
(Path(FOLDER) / "extra-openai-models.yaml").write_text(entry)


def llm(*arguments: str) -> str:
    """Run the command and return its output."""
    command = [sys.executable, "-m", "llm", "-m", "specjax", "-o", "max_tokens", "64", "--no-log", *arguments]
    environment = os.environ | {"LLM_USER_PATH": FOLDER}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@attempt("a prompt, stream")
def _():
    assert llm("def add(a, b):").strip()


@attempt("a prompt, --no-stream")
def _():
    assert llm("def add(a, b):", "--no-stream").strip()


@attempt("a prompt, --schema")
def _():
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    assert json.loads(llm("def add(a, b):", "--schema", json.dumps(schema)))["colour"] in ("red", "green")
