"""Report which calls of a client work. The scripts beside this one run in environments that hold one client each."""

import json
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL, FOLDER = sys.argv[1:]  # of the server; the name of its model; for files
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def attempt(call: str) -> Callable[[Callable[[], Any]], None]:
    """Run the function below, and print whether the call that it makes works: a line of JSON."""

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
            result = "works"
        except Exception as error:
            result = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps({"call": call, "result": result[:2000]}), flush=True)

    return run
