"""Grammars of requests, compiled in a process of its own: a pattern may cost it its time or memory, and nobody else."""

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specjax.sampling.guided.tables import Grammar
from specjax.server.fields import BadRequest
from specjax.server.protocol import Constraint
from specjax.server.served import Served

MAX_GRAMMARS = 64  # that are kept
COMPILE_SECONDS = 20.0  # of one grammar
COMPILE_MEMORY = 2 * 2**30  # bytes that compiling may take


class Grammars:
    """Compile grammars, one at a time, and keep the last `MAX_GRAMMARS` of them.

    Args:
        served: the model, whose vocabulary the grammars are over.
        seconds: the time that one may take.
    """

    def __init__(self, served: Served, seconds: float = COMPILE_SECONDS):
        self._served, self._seconds = served, seconds
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._worker: subprocess.Popen[bytes] | None = None
        self._executor = ThreadPoolExecutor(1, "specjax grammars")

    async def get(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint.

        Raises:
            BadRequest: it is not valid, or takes too much time or memory.
        """
        grammar = self._kept.get(constraint)
        if grammar is None:
            grammar = await asyncio.get_running_loop().run_in_executor(self._executor, self._compile, constraint)
            self._kept[constraint] = grammar
        self._kept.move_to_end(constraint)
        while len(self._kept) > MAX_GRAMMARS:
            self._kept.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the process."""
        self._executor.shutdown(cancel_futures=True)
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()

    def _compile(self, constraint: Constraint) -> Grammar:
        if self._worker is None or self._worker.poll() is not None:
            self._worker = self._start()
        worker = self._worker
        assert worker.stdin is not None and worker.stdout is not None
        timer = threading.Timer(self._seconds, worker.kill)
        timer.start()
        try:
            _write(worker.stdin, json.dumps(constraint).encode())
            answer = _read(worker.stdout)
        except (OSError, EOFError) as error:  # it has been killed, or has died for want of memory
            worker.kill()
            worker.communicate()
            message = f"{constraint.param} takes more than {self._seconds:g} seconds, or too much memory, to compile"
            raise BadRequest(message, constraint.param, "invalid_grammar") from error
        finally:
            timer.cancel()
        if answer[:1] == b"{":
            raise BadRequest(json.loads(answer)["error"], constraint.param, "invalid_grammar")
        with np.load(io.BytesIO(answer), allow_pickle=False) as arrays:
            return Grammar(arrays["token_classes"], arrays["transitions"])

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the process, and tell it the vocabulary."""
        command = [sys.executable, "-m", "specjax.server.grammars"]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert worker.stdin is not None and worker.stdout is not None
        vocabulary = [token.decode("latin-1") for token in self._served.vocabulary]
        _write(worker.stdin, json.dumps([vocabulary, list(self._served.eos_token_ids)]).encode())
        _read(worker.stdout)  # it is ready: what it imports does not count
        return worker


def _write(stream, content: bytes) -> None:
    stream.write(len(content).to_bytes(8, "big") + content)
    stream.flush()


def _read(stream) -> bytes:
    """Return a message.

    Raises:
        EOFError: there is none.
    """
    head = stream.read(8)
    size = int.from_bytes(head, "big")
    content = stream.read(size)
    if len(head) < 8 or len(content) < size:
        raise EOFError("the other end has closed")
    return content


def work() -> None:
    """Compile what comes on standard input until it ends; answers are arrays, or a JSON object with an error."""
    vocabulary, eos_token_ids = json.loads(_read(sys.stdin.buffer))
    vocabulary = [token.encode("latin-1") for token in vocabulary]
    _limit_memory()
    _write(sys.stdout.buffer, b"ready")
    while True:
        try:
            constraint = Constraint(*json.loads(_read(sys.stdin.buffer)))
        except EOFError:
            return
        try:
            grammar = constraint.compile(vocabulary, eos_token_ids)
        except BadRequest as error:
            answer = json.dumps({"error": error.message}).encode()
        except Exception as error:
            message = f"{constraint.param} cannot be compiled: {type(error).__name__}"
            answer = json.dumps({"error": message}).encode()
        else:
            arrays = io.BytesIO()
            np.savez(arrays, token_classes=grammar.token_classes, transitions=grammar.transitions)
            answer = arrays.getvalue()
        _write(sys.stdout.buffer, answer)


def _limit_memory() -> None:
    """Let this process have `COMPILE_MEMORY` more than it has."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # elsewhere than on Linux the time alone is limited
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_MEMORY,) * 2)


if __name__ == "__main__":
    work()
