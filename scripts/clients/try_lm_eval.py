"""lm-eval: a task that compares log-likelihoods and one that generates, with the tokenizer of the server."""

import json
import subprocess
import sys
from pathlib import Path

from report import FOLDER, MODEL, URL, attempt

folder = Path(FOLDER)
rows = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " import"], "answer": 0},
    {"question": "for i in", "choices": [" range", " def def"], "answer": 0},
]
(folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
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
  max_gen_toks: 16
metric_list:
  - metric: exact_match
""")


def run(task: str, model: str, route: str, *arguments: str) -> dict:
    """Run a task and return its results."""
    out = folder / f"{task} {model}"
    options = f"model={MODEL},base_url={URL}{route},tokenizer_backend=remote,num_concurrent=1,max_retries=1"
    if "chat" in model:
        options = options.replace("backend=remote", "backend=None")
    files = ["--include_path", FOLDER, "--output_path", str(out), "--log_samples"]
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", options, "--tasks", task]
    done = subprocess.run([*command, *files, *arguments], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-1500:]
    (file,) = out.rglob("results*.json")
    return json.loads(file.read_text())["results"][task]


@attempt("loglikelihood")
def _():
    assert "acc,none" in run("choose", "local-completions", "/v1/completions")


@attempt("generate_until")
def _():
    assert "exact_match,none" in run("write", "local-completions", "/v1/completions")


@attempt("generate_until, chat")
def _():
    arguments = "--apply_chat_template"
    assert "exact_match,none" in run("write", "local-chat-completions", "/v1/chat/completions", arguments)
