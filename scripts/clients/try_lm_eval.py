"""lm-eval: a task that compares log-likelihoods and one that generates, with the tokenizer of the server."""

from pathlib import Path

from evaluation import run, write_tasks
from report import FOLDER, MODEL, URL, attempt

folder = Path(FOLDER)
write_tasks(folder)


def scores(task: str, model: str, route: str, tokenizer: str, *arguments: str) -> dict:
    """Run a task and return its scores."""
    options = f"model={MODEL},base_url={URL}{route},tokenizer_backend={tokenizer},num_concurrent=1,max_retries=1"
    return run(folder, folder / f"{task} {model}", task, model, options, *arguments)[0]


@attempt("loglikelihood")
def _():
    assert "acc,none" in scores("choose", "local-completions", "/v1/completions", "remote")


@attempt("generate_until")
def _():
    assert "exact_match,none" in scores("write", "local-completions", "/v1/completions", "remote")


@attempt("generate_until, chat")
def _():
    arguments = "local-chat-completions", "/v1/chat/completions", "None", "--apply_chat_template"
    assert "exact_match,none" in scores("write", *arguments)
