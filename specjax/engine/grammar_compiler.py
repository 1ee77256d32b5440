"""Compile the grammars of requests in other processes, within a time limit, and with no client before all others."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from specjax.engine.grammar_worker import read_grammar, write_source, write_vocabulary
from specjax.processes.child import start_child
from specjax.processes.worker import NoAnswer, Worker
from specjax.sampling.guided.sources import Source
from specjax.sampling.guided.tables import Grammar

NUM_PROCESSES = 2  # grammars that are compiled at a time
MAX_OF_CLIENT = 1  # grammars of one client that are compiled at a time
MAX_WAITING_OF_CLIENT = 16  # grammars of one client that are not compiled yet
MAX_FAILURES, FAILURE_SECONDS = 256, 300.0  # sources that did not compile which are known, and for how long
START_SECONDS = 120.0  # the most that a process takes to start


@dataclass
class _Entry:
    future: Future[Grammar] = field(default_factory=Future)
    num_waiting: int = 0


class GrammarCompiler:
    """Compile grammars, each once for all requests that ask for it, and keep the last ones.

    Clients take turns. A source that did not compile is refused at once for `FAILURE_SECONDS`, with the same error. The
    processes start with the first grammar. Safe for several threads.

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
        self._changed = threading.Condition()
        self._entries: OrderedDict[Source, _Entry] = OrderedDict()  # least recently used first
        self._failures: OrderedDict[Source, tuple[float, str]] = (
            OrderedDict()
        )  # until when, and the error; the oldest first
        self._queues: OrderedDict[str | None, dict[Source, _Entry]] = OrderedDict()  # by client; whose turn it is first
        self._num_compiling: Counter[str | None] = Counter()  # by client
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        self._words: bytes | None = None
        self._is_closed = False

    def is_full(self, client: str | None) -> bool:
        """Whether a client may ask for no further grammar at the moment; None may always."""
        with self._changed:
            waiting = len(self._queues.get(client, ())) + self._num_compiling[client]
            return client is not None and waiting >= MAX_WAITING_OF_CLIENT

    def request(self, source: Source, client: str | None = None) -> Future[Grammar]:
        """Return the grammar of a source, once it is compiled. Whoever does not wait for it any more calls `leave`.

        Its exception is a ValueError where the source is wrong, or takes too much time or memory.

        Args:
            source: the source of the grammar.
            client: a name of who asks. A client has `MAX_OF_CLIENT` grammars compiled at a time, None any number.
        """
        with self._changed:
            if (message := self._known_failure(source)) is not None:
                failed: Future[Grammar] = Future()
                failed.set_exception(ValueError(message))
                return failed
            entry = self._entries.pop(source, None) or _Entry()
            entry.num_waiting += 1
            self._entries[source] = entry
            if not (entry.future.running() or entry.future.done()):
                self._queues.setdefault(client, {})[source] = entry
                self._changed.notify()
                if not self._threads:
                    self._start_threads()
            unused = [old for old, one in self._entries.items() if not one.num_waiting and one.future.done()]
            for old in unused[: max(0, len(self._entries) - self._max_kept)]:
                del self._entries[old]
        return entry.future

    def leave(self, source: Source, future: Future[Grammar]) -> None:
        """Note that one request does not wait for its future any more; where none does, it is not begun."""
        with self._changed:
            entry = self._entries.get(source)
            if entry is None or entry.future is not future:
                return  # it had failed before it was asked for
            entry.num_waiting -= 1
            failed = future.done() and not future.cancelled() and future.exception() is not None
            if not entry.num_waiting and (failed or future.cancel()):
                del self._entries[source]
                self._dequeue(source)

    def close(self) -> None:
        """End the processes. Grammars that are not compiled fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for worker in self._workers:
                worker.close()
            waiting = [entry for queue in self._queues.values() for entry in queue.values()]
            self._queues.clear()
        for entry in waiting:
            entry.future.cancel()

    def _known_failure(self, source: Source) -> str | None:
        until, message = self._failures.get(source, (0.0, None))
        return message if time.monotonic() < until else None

    def _dequeue(self, source: Source) -> None:
        """Take a source out of the queues of all clients that asked for it."""
        for client, queue in tuple(self._queues.items()):
            queue.pop(source, None)
            if not queue:
                del self._queues[client]

    def _start_threads(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, name="specjax grammars", daemon=True) for _ in range(NUM_PROCESSES)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        """Compile one grammar after the other, in a thread, by a process that only this thread uses."""
        worker = self._replaced(None)
        while (found := self._next()) is not None:
            client, source, entry = found
            error = grammar = None
            try:
                if worker is None:
                    worker = self._start()
                grammar = self._compile(worker, source)
            except Exception as raised:
                error = raised
            if isinstance(error, ValueError):  # of the source: it would fail again
                self._note_failure(source, str(error))
            if grammar is not None:
                entry.future.set_result(grammar)
            else:
                entry.future.set_exception(error)
            worker = self._replaced(worker)  # in the turn of this client, so that the next one does not wait for it
            with self._changed:
                if error is not None and not entry.num_waiting and self._entries.get(source) is entry:
                    del self._entries[source]  # all had left while it was compiled
                self._num_compiling[client] -= 1
                self._num_compiling += Counter()  # drops zeros
                self._changed.notify_all()

    def _note_failure(self, source: Source, message: str) -> None:
        with self._changed:
            self._failures.pop(source, None)
            self._failures[source] = time.monotonic() + FAILURE_SECONDS, message
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)

    def _next(self) -> tuple[str | None, Source, _Entry] | None:
        """Wait for the next grammar to compile, and return who asked for it, its source and entry; None is the end."""
        with self._changed:
            while not self._is_closed:
                for client, queue in self._queues.items():
                    if client is None or self._num_compiling[client] < MAX_OF_CLIENT:
                        source, entry = next(iter(queue.items()))
                        self._queues.move_to_end(client)
                        self._dequeue(source)
                        self._num_compiling[client] += 1
                        entry.future.set_running_or_notify_cancel()
                        return client, source, entry
                self._changed.wait()
        return None

    def _compile(self, worker: Worker, source: Source) -> Grammar:
        expected = "guided_decoding must be a grammar that compiles"
        try:
            answer = worker.ask(write_source(source), self._time_limit)
        except NoAnswer as error:
            message = f"{expected} within {self._time_limit:g} seconds and its memory, got {error}"
            raise ValueError(message) from error
        if answer[:1] == b"E":
            raise ValueError(f"guided_decoding must be a valid grammar: {answer[1:].decode()}")
        grammar = read_grammar(answer[1:])
        self._check(grammar)
        return grammar

    def _replaced(self, worker: Worker | None) -> Worker | None:
        """Return a process, a new one where the old one has ended; None where it cannot start, as the next will say."""
        try:
            return worker if worker is not None and worker.is_alive else self._start()
        except Exception:
            return None

    def _start(self) -> Worker:
        """Return a process that has the vocabulary."""
        words = self._words = self._words or write_vocabulary(self._vocabulary(), self._eos)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            worker = Worker(partial(start_child, "specjax.engine.grammar_worker"))
            self._workers = [worker, *(other for other in self._workers if other.is_alive)]
        worker.ask(words, START_SECONDS)
        return worker
