"""guidellm: a few requests of a benchmark, by each of its request formats."""

import json
import os
import subprocess
import sys
from pathlib import Path

from report import FOLDER, MODEL, URL, attempt

(Path(FOLDER) / "rows.jsonl").write_text('{"prompt": "def add(a, b):"}\n' * 4)

for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):

    @attempt(f"run, {route}")
    def _(route=route):
        out = Path(FOLDER) / f"{route.strip('/').replace('/', '-')}.json"
        backend = f"kind=openai_http,target={URL},model={MODEL},request_format={route},max_tokens=16"
        options = {
            "--backend": backend,
            "--profile": "kind=synchronous",
            "--constraint": "kind=max_requests,count=3",
            "--data": f"kind=json_file,path={FOLDER}/rows.jsonl",
            "--output": f"kind=json,path={out}",
        }
        command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
        command += [word for option in options.items() for word in option]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
        assert done.returncode == 0, (done.stderr + done.stdout)[-1500:]
        totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] >= 1 and not totals["errored"], totals
