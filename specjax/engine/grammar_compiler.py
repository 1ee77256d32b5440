"""Compile the grammars of requests in other processes, within a time limit."""

import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from specjax.engine.grammar_worker import read_grammar, write_source, write_vocabulary
from specjax.processes.child import read_frame, start_child, write_frame
from specjax.sampling.guided.sources import Source
from specjax.sampling.guided.tables import Grammar

NUM_PROCESSES = 2  # grammars that are compiled at a time
START_SECONDS = 120.0  # the most that a process takes to start


@dataclass
class _Entry:
    future: Future[Grammar]
    num_waiting: int = 0


class GrammarCompiler:
    """Compile grammars, each once for all requests that ask for it, and keep the last ones.

    The processes start with the first grammar. Safe for several threads.

    Args:
        vocabulary: a function that returns the bytes of every token.
        eos_token_ids: the tokens that may follow a complete text.
        check: a function that raises ValueError for a grammar that requests may not have.
        time_limit: the most seconds that a grammar may take, without those that it waits for others.
        max_kept: number of grammars that are kept for later requests.
    """

    def __init__(
        self,
        vocabulary: Callable[[], list[bytes]],
        eos_token_ids: Sequence[int],
        check: Callable[[Grammar], None],
        *,
        time_limit: float,
        max_kept: int,
    ):
        self._vocabulary, self._eos, self._check = vocabulary, list(eos_token_ids), check
        self._time_limit, self._max_kept = time_limit, max_kept
        self._lock = threading.Lock()
        self._entries: OrderedDict[Source, _Entry] = OrderedDict()  # least recently used first
        self._executor = ThreadPoolExecutor(NUM_PROCESSES, "specjax grammars")
        self._own = threading.local()  # the process of a thread
        self._processes: list[_Process] = []
        self._words: bytes | None = None
        self._is_closed = False

    def request(self, source: Source) -> Future[Grammar]:
        """Return the grammar of a source, once it is compiled. Whoever does not wait for it any more calls `leave`.

        Its exception is a ValueError where the source is wrong, or takes too much time or memory.
        """
        with self._lock:
            entry = self._entries.pop(source, None) or _Entry(self._executor.submit(self._compile, source))
            entry.num_waiting += 1
            self._entries[source] = entry
            unused = [old for old, one in self._entries.items() if not one.num_waiting and one.future.done()]
            for old in unused[: max(0, len(self._entries) - self._max_kept)]:
                del self._entries[old]
        return entry.future

    def leave(self, source: Source) -> None:
        """Note that one request does not wait for a grammar any more; where none does, it is not begun."""
        with self._lock:
            entry = self._entries[source]
            entry.num_waiting -= 1
            failed = entry.future.done() and not entry.future.cancelled() and entry.future.exception() is not None
            if not entry.num_waiting and (failed or entry.future.cancel()):
                del self._entries[source]

    def close(self) -> None:
        """End the processes. Grammars that are not compiled fail."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, source: Source) -> Grammar:
        process = getattr(self._own, "process", None)
        if process is None or not process.is_alive:
            self._own.process = process = self._start()
        grammar = process.compile(source, self._time_limit)
        self._check(grammar)
        return grammar

    def _start(self) -> "_Process":
        words = self._words = self._words or write_vocabulary(self._vocabulary(), self._eos)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            process = _Process()
            self._processes = [process, *(other for other in self._processes if other.is_alive)]
        process.start(words)
        return process


class _Process:
    """A process that compiles one grammar at a time."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = start_child("specjax.engine.grammar_worker", **pipes)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """End it and return its code; who waits for an answer gets an error."""
        self._process.kill()
        code = self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of what it has not read
                assert file is not None
                file.close()
        return code

    def start(self, vocabulary: bytes) -> None:
        """Give it the vocabulary, and wait until it has it."""
        self._ask(vocabulary, START_SECONDS, "the process that compiles grammars must start")

    def compile(self, source: Source, time_limit: float) -> Grammar:
        """Return the grammar of a source."""
        answer = self._ask(write_source(source), time_limit, "guided_decoding must be a grammar that compiles")
        if answer[:1] == b"E":
            raise ValueError(f"guided_decoding must be a valid grammar: {answer[1:].decode()}")
        return read_grammar(answer[1:])

    def _ask(self, question: bytes, time_limit: float, expected: str) -> bytes:
        """Send a frame and return the answer; the process is ended where it takes longer than the limit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(time_limit, end)
        timer.daemon = True
        timer.start()
        try:
            write_frame(self._process.stdin, question)
            return read_frame(self._process.stdout)
        except (EOFError, OSError, ValueError) as error:  # the last of a file that `close` has closed
            code = self.close()
            reason = "no answer in time" if is_late.is_set() else f"the end of its process with code {code}"
            raise ValueError(f"{expected} within {time_limit:g} seconds and its memory, got {reason}") from error
        finally:
            timer.cancel()
