"""Two small tasks of lm-eval, one that compares log-likelihoods and one that generates, and how to run them."""

import json
import subprocess
import sys
from pathlib import Path

ROWS = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " import"], "answer": 0},
    {"question": "for i in", "choices": [" def def", " range"], "answer": 1},
    {"question": "The capital of France is", "choices": [" Paris", " Berlin", " a colour"], "answer": 0},
    {"question": "Two and two make", "choices": [" five", " four", " blue"], "answer": 1},
    {"question": "import numpy as", "choices": [" pd", " np", " os"], "answer": 1},
    {"question": "if __name__ ==", "choices": [' "__main__":', " None:", " import"], "answer": 0},
    {"question": "Water freezes at zero degrees", "choices": [" Celsius", " Tuesday"], "answer": 0},
    {"question": "class Point:\n    def", "choices": [" __init__(self", " return 0", " while"], "answer": 0},
]


def write_tasks(folder: Path) -> None:
    """Write the rows and the two tasks, "choose" and "write", to a folder."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    shared = f"""
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "rows.jsonl"}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    (folder / "choose.yaml").write_text(f"""task: choose{shared}
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
""")
    (folder / "write.yaml").write_text(f"""task: write{shared}
output_type: generate_until
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
  temperature: 0
metric_list:
  - metric: exact_match
""")


def run(folder: Path, out: Path, task: str, model: str, options: str, *arguments: str) -> tuple[dict, list]:
    """Run a task against a server.

    Args:
        folder: of `write_tasks`.
        out: a folder for the results.
        task: "choose" or "write".
        model: the kind of client, as lm-eval names it.
        options: the arguments of the client, as lm-eval takes them.
        arguments: of the command.

    Returns:
        The scores by metric, and for each row the answers of the server that lm-eval kept.
    """
    files = ["--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", options, "--tasks", task]
    done = subprocess.run([*command, *files, *arguments], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-1500:]
    (results,) = out.rglob("results*.json")
    (samples,) = out.rglob("samples*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return json.loads(results.read_text())["results"][task], [row["resps"] for row in rows]
