"""Files of requests: every request has one result, whatever is wrong with it, and wherever a run was killed."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_llm import SENTENCE, chain_tensors, write_checkpoint
from test_llm import make_tokenizer as make_llm_tokenizer
from test_protocol import figures
from test_server import PROGRAMS_WHEN_USED
from test_tokenizer import make_tokenizer

from specjax.cli import main
from specjax.engine.requests import Completion, Result
from specjax.sampling import guided
from specjax.server import batch_files
from specjax.server.served import Served

NUM_SLOTS = 2


@pytest.fixture(scope="module")
def served():
    return Served("small", make_tokenizer(), vocab_size=300, max_length=64, eos_token_ids=(2,))


class Engine:
    """Says the length of the prompt, in another order than the requests; ends at the request number `fails`."""

    def __init__(self, fails=None):
        self.fails, self.num_calls, self.running, self.most = fails, 0, 0, 0

    async def generate(self, prompt, params, *, priority=0, cache_salt=""):
        self.num_calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        if self.num_calls == self.fails:
            raise RuntimeError("the engine has failed")
        if params.seed == 13:
            raise KeyError("of this request alone")
        if params.stop_token_ids:
            raise ValueError("stop_token_ids must have at most 0 ids (Capacities.stop_tokens), got 1")
        if params.guided_decoding == guided.Regex("("):
            raise ValueError("guided_decoding must be a valid grammar, got (")
        await asyncio.sleep(0.001 * (len(prompt) % 5))
        self.running -= 1
        return Result(prompt, [Completion(str(len(prompt)), [len(prompt)], None, "length", None)], figures(1))


def line(number, body=None, **fields):
    body = {"model": "small", "prompt": [7] * (number % 40 + 1)} | (body or {})
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body} | fields


@pytest.fixture
def files(tmp_path):
    """The files of a run, and a function that writes lines of requests."""
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"

    def write(lines):
        requests.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))

    return requests, results, write


def run(engine, served, files, progress=False):
    return batch_files.run(engine, served, files[0], files[1], num_slots=NUM_SLOTS, progress=progress)


def read(files):
    results = [json.loads(each) for each in files[1].read_text().splitlines()]
    assert len({each["id"] for each in results}) == len(results)
    return {each["custom_id"]: each for each in results}


def texts(files):
    return {id: each["response"]["body"]["choices"][0]["text"] for id, each in read(files).items()}


def test_every_request_has_its_result(served, files, capsys):
    files[2]([line(i) for i in range(50)])
    engine = Engine()
    assert run(engine, served, files, progress=True) == (50, 0, 0)
    assert texts(files) == {f"r{i}": str(i % 40 + 1) for i in range(50)}
    assert list(read(files)) != [f"r{i}" for i in range(50)]  # as they ended
    assert engine.most == batch_files.REQUESTS_PER_SLOT * NUM_SLOTS
    assert "50/50" in capsys.readouterr().err
    first = read(files)["r0"]
    assert first["error"] is None and first["response"]["status_code"] == 200
    assert first["response"]["body"]["object"] == "text_completion"


BAD_LINES = [
    (b"{", "must be JSON"),
    (b"\xff", "must be JSON"),
    (b"[" * 100_000, "must be JSON"),
    (b"7", "must be an object"),
    ({"method": "POST"}, "custom_id must be a string"),
    (line(90, custom_id=""), "custom_id must be a string"),
]
BAD_REQUESTS = [
    (line(1, method="GET"), "method must be POST"),
    (line(2, url="/v1/embeddings"), "url must be one of"),
    (line(3, url=["x"]), "url must be one of"),
    (line(4, more=1), "got 'more'"),
]
BAD_BODIES = [
    (line(5, {"temperature": "hot"}), 400, "temperature"),
    (line(6, {"model": "other"}), 404, "model"),
    (line(7, {"stream": True}), 400, "stream"),
    (line(8, {"stop_token_ids": [9]}), 400, "stop_token_ids"),
    (line(9, body=None) | {"body": None}, 400, None),
]


def test_bad_lines_become_errors(served, files):
    good = line(0)
    files[2]([*(each for each, _ in BAD_LINES), *(each[0] for each in BAD_REQUESTS + BAD_BODIES), b"", good])
    assert run(Engine(), served, files) == (16, 15, 0)
    results = [json.loads(each) for each in files[1].read_text().splitlines()]
    by_line = {each["id"]: each["error"] for each in results if each["custom_id"] is None}
    for number, (_, message) in enumerate(BAD_LINES, 1):
        assert message in by_line[f"line-{number}"]["message"]
    by_id = {each["custom_id"]: each for each in results}
    for each, message in BAD_REQUESTS:
        assert by_id[each["custom_id"]]["response"] is None
        assert message in by_id[each["custom_id"]]["error"]["message"]
    for each, status, param in BAD_BODIES:
        response = by_id[each["custom_id"]]["response"]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, param)
    assert by_id["r0"]["response"]["status_code"] == 200
    assert run(Engine(), served, files) == (0, 0, 16)  # they are done, too


def test_other_encodings(served, files):
    """The mark of UTF-8 that some editors put before a text is none of it; other encodings are errors."""
    files[0].write_bytes(b"\xef\xbb\xbf" + json.dumps(line(0)).encode() + b"\n" + json.dumps(line(1)).encode("utf-16"))
    assert run(Engine(), served, files)[:2] == (2, 1)
    assert "must be JSON in UTF-8" in files[1].read_text()


def test_an_error_in_one_request_is_its_own(served, files):
    files[2]([line(0), line(1, {"seed": 13}), line(2)])
    assert run(Engine(), served, files) == (3, 1, 0)
    assert read(files)["r1"]["error"]["code"] == "server_error"


def test_lines_without_end(served, files, monkeypatch):
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 200)
    files[2]([line(0), line(1, {"user": "x" * 1000}), line(2)])
    assert run(Engine(), served, files) == (3, 1, 0)
    assert "at most 200 bytes" in json.loads(files[1].read_text().splitlines()[0])["error"]["message"]


def test_goes_on_where_it_was(served, files):
    files[2]([line(i) for i in range(40)])
    with pytest.raises(RuntimeError, match="the engine has failed"):
        run(Engine(fails=25), served, files)
    done = files[1].read_bytes()
    first = done.count(b"\n")
    assert 0 < first < 40
    for torn in (b'{"id": "batch_re', b'{"', b"{" + done.splitlines()[0][1:-1]):
        files[1].write_bytes(done + torn)
        engine = Engine()
        assert run(engine, served, files) == (40 - first, 0, first)
        assert engine.num_calls == 40 - first
        assert files[1].read_bytes().startswith(done)
        assert texts(files) == {f"r{i}": str(i + 1) for i in range(40)}


def test_ids_must_differ(served, files):
    files[2]([line(0), line(1), line(0)])
    with pytest.raises(ValueError, match="line 3: every custom_id must be there once, got 'r0' again"):
        run(Engine(), served, files)
    assert not files[1].exists()


@pytest.mark.parametrize("content", [b"my notes", b'{"id": "x", "custom_id": "other"}\n', b"text\n"])
def test_a_file_of_something_else_stays(served, files, content):
    files[2]([line(0)])
    files[1].write_bytes(content)
    with pytest.raises(ValueError, match="no result of these requests; move the file away"):
        run(Engine(), served, files)
    assert files[1].read_bytes() == content


def test_a_second_result_is_an_error(served, files):
    files[2]([line(0)])
    run(Engine(), served, files)
    files[1].write_bytes(files[1].read_bytes() * 2)
    with pytest.raises(ValueError, match="line 2: a second result"):
        run(Engine(), served, files)


def test_no_room_for_results(served, files, monkeypatch):
    """The error names the file. Written results stay, and the next run goes on."""
    files[2]([line(number) for number in range(5)])
    write, numbers = os.write, iter(range(2))

    def write_or_fail(file, data):
        if next(numbers, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:100])

    monkeypatch.setattr(batch_files.os, "write", write_or_fail)
    with pytest.raises(OSError, match=f"No space left on device: .*{files[1].name}"):
        run(Engine(), served, files)
    monkeypatch.undo()
    assert files[1].stat().st_size == 200
    assert run(Engine(), served, files) == (5, 0, 0)


def test_a_folder_that_vanishes(served, files):
    files[2]([line(number) for number in range(5)])

    class Removing(Engine):
        async def generate(self, *args, **options):
            files[1].unlink(missing_ok=True)
            return await super().generate(*args, **options)

    with pytest.raises(FileNotFoundError, match=f"has been deleted: .*{files[1].name}"):
        run(Removing(), served, files)


def test_results_go_into_a_file(tmp_path, capsys):
    """A device has no end, and what went into a pipe is not there again."""
    (tmp_path / "requests.jsonl").write_text("")
    assert main(["batch", str(tmp_path / "requests.jsonl"), "--out", "/dev/null"]) == 2
    assert "--out must be a file, which later runs read again, got /dev/null" in capsys.readouterr().err


def test_one_run_at_a_time(served, files):
    pytest.importorskip("fcntl")
    files[2]([line(0)])
    file, _ = batch_files.open_results(files[1], {})
    with file, pytest.raises(ValueError, match="another process writes it"):
        run(Engine(), served, files)
    assert run(Engine(), served, files) == (1, 0, 0)


def test_several_prompts(served, files):
    files[2]([line(0, {"prompt": [[7], [7, 7]]})])
    run(Engine(), served, files)
    choices = read(files)["r0"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == ["1", "2"]


def test_a_grammar_that_is_refused_names_its_field(served, files):
    files[2]([line(0, {"guided_regex": "[ab]{2}"}), line(1, {"guided_regex": "("})])
    assert run(Engine(), served, files) == (2, 1, 0)
    error = read(files)["r1"]["response"]["body"]["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "invalid_grammar")
    assert error["message"].startswith("guided_regex must be a valid grammar")


class TestCommand:
    def test_arguments_are_checked_before_models_are_loaded(self, files, capsys):
        requests, results, write = files
        assert main(["batch", str(requests), "--out", str(results)]) == 2
        assert "requests.jsonl" in capsys.readouterr().err
        write([line(0), line(0)])
        assert main(["batch", str(requests), "--out", str(results)]) == 2
        assert "once" in capsys.readouterr().err
        assert main(["batch", str(requests), "--out", str(requests)]) == 2
        assert "another file" in capsys.readouterr().err

    @pytest.mark.slow
    def test_killed_and_started_again(self, files, tmp_path):
        """Kill it in the middle; together the runs give what one gives, as the seeds show."""
        requests, results, write = files
        tensors = chain_tensors([*make_llm_tokenizer().encode(SENTENCE, add_special_tokens=False).ids, 1])
        model = str(write_checkpoint(tmp_path / "small", tensors, num_layers=1, hidden=128))
        body = {"prompt": SENTENCE[0], "max_tokens": 24, "temperature": 2.0, "ignore_eos": True}
        write([line(i, body | {"seed": i % 5}) for i in range(100)])
        options = ["--model", model, "--max-length", "64", "--num-slots", "2"]
        command = [sys.executable, *PROGRAMS_WHEN_USED, "batch", str(requests), "--out", str(results), *options]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 300
            while not (results.exists() and results.read_bytes().count(b"\n") >= 10):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            os.kill(process.pid, signal.SIGKILL)
        first = results.read_bytes().count(b"\n")
        assert first < 100
        second = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
        assert second.returncode == 0, second.stderr
        assert f"{100 - first} answered, 0 of them with an error, {first} before" in second.stderr
        found = texts(files)
        assert len(found) == 100
        assert len(set(found.values())) == 5
        assert all(found[f"r{i}"] == found[f"r{i % 5}"] for i in range(100))
