"""Run two tasks of lm-eval against two servers of one model, and compare each answer: with drafts and without them.

    specjax serve --dtype float32 --port 8000
    specjax serve --dtype float32 --port 8001 --num-draft-tokens 0
    python scripts/clients/compare_scores.py http://127.0.0.1:8000 http://127.0.0.1:8001

The last command needs an environment with lm-eval, such as `scripts/check_clients.py` makes. Texts must be equal, and
log-likelihoods equal to 1e-3: calls of other sizes round otherwise. The exit code is 1 where an answer differs.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path

from evaluation import run, write_tasks


def are_equal(first: object, second: object) -> bool:
    """Return whether two answers are equal, numbers to 1e-3; lm-eval keeps numbers as text."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(are_equal, first, second))
    try:
        return abs(float(str(first)) - float(str(second))) <= 1e-3
    except ValueError:
        return first == second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs=2, metavar="URL", help="of a running server")
    args = parser.parse_args()
    differs = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        for task in ("choose", "write"):
            found = []
            for index, url in enumerate(args.urls):
                with urllib.request.urlopen(f"{url}/v1/models") as answer:
                    model = json.load(answer)["data"][0]["id"]
                options = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote"
                out = folder / f"{task} {index}"
                found.append(run(folder, out, task, "local-completions", f"{options},num_concurrent=4"))
            (scores, first), (others, second) = found
            equal = sum(map(are_equal, first, second))
            differs |= equal < len(first) or len(first) != len(second)
            for metric, score in scores.items():
                if metric.endswith(",none"):
                    print(f"{task:8} {metric:24} {score} {others[metric]}")
            print(f"{task:8} equal answers: {equal} of {len(first)}")
    return differs


if __name__ == "__main__":
    sys.exit(main())
