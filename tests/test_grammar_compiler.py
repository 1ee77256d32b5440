"""Whose grammars are compiled when, and the errors of grammars that do not compile."""

import threading
from concurrent.futures import CancelledError, wait

import numpy as np
import pytest

from specjax.engine import grammar_compiler
from specjax.engine.grammar_compiler import GrammarCompiler
from specjax.engine.grammar_worker import read_source, write_grammar
from specjax.processes.worker import NoAnswer
from specjax.sampling.guided import Regex
from specjax.sampling.guided.tables import Grammar

GRAMMAR = Grammar(np.zeros(3, np.int32), np.zeros((1, 1), np.int32))


class Workers:
    """Processes that note their questions. A pattern that begins with "wait" has no answer before the test says so."""

    def __init__(self):
        self.asked, self.num_started, self.begun, self.go_on = [], 0, threading.Semaphore(0), threading.Event()

    def start(self, module):
        self.num_started += 1
        return Worker(self)


class Worker:
    def __init__(self, workers):
        self._workers, self.is_alive = workers, True

    def close(self):
        self.is_alive = False
        self._workers.go_on.set()

    def ask(self, question, seconds):
        if seconds == grammar_compiler.START_SECONDS:
            return b""
        pattern = read_source(question).pattern
        self._workers.asked.append(pattern)
        self._workers.begun.release()
        if pattern.startswith("wait"):
            assert self._workers.go_on.wait(20)
        if pattern.startswith("late"):
            self.is_alive = False
            raise NoAnswer("no answer in time")
        return b"Ewrong" if pattern.startswith("wrong") else b"G" + write_grammar(GRAMMAR)


@pytest.fixture
def workers(monkeypatch):
    workers = Workers()
    monkeypatch.setattr(grammar_compiler, "Worker", workers.start)
    return workers


@pytest.fixture
def compiler(workers):
    compiler = GrammarCompiler(lambda: [b"a", b"b", b""], [2], lambda grammar: None, time_limit=7.0, max_kept=4)
    yield compiler
    compiler.close()


def ask(compiler, client, *patterns):
    return [compiler.request(Regex(pattern), client) for pattern in patterns]


def is_grammar(future):
    return future.result(timeout=20).transitions.tolist() == [[0]]


def test_clients_take_turns(compiler, workers, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "NUM_PROCESSES", 1)
    futures = ask(compiler, "a", "wait 0")
    assert workers.begun.acquire(timeout=20)
    futures += ask(compiler, "a", "a1", "a2", "a3") + ask(compiler, "b", "b1") + ask(compiler, None, "c1", "c2")
    futures += ask(compiler, "b", "a3")  # that is before other grammars of b, not behind the grammars of a
    workers.go_on.set()
    wait(futures, timeout=20)
    assert workers.asked == ["wait 0", "a1", "b1", "c1", "a2", "a3", "c2"]
    assert all(is_grammar(future) for future in futures)


def test_a_client_does_not_have_all_processes(compiler, workers):
    ask(compiler, "a", "wait 0", "wait 1")
    assert workers.begun.acquire(timeout=20)
    (other,) = ask(compiler, "b", "b1")
    assert is_grammar(other)
    assert workers.asked == ["wait 0", "b1"]


def test_the_program_itself_has_all_processes(compiler, workers):
    ask(compiler, None, "wait 0", "wait 1", "wait 2")
    assert all(workers.begun.acquire(timeout=20) for _ in range(2))
    assert sorted(workers.asked) == ["wait 0", "wait 1"]


def test_a_client_has_a_bounded_number(compiler, workers, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING_OF_CLIENT", 3)
    futures = ask(compiler, "a", "wait 0", "a1")
    assert not compiler.is_full("a")
    futures += ask(compiler, "a", "a2")
    assert compiler.is_full("a") and not compiler.is_full("b") and not compiler.is_full(None)
    workers.go_on.set()
    wait(futures, timeout=20)
    for _ in range(2000):
        if not compiler.is_full("a"):
            return
        threading.Event().wait(0.01)
    raise AssertionError("it stays full")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("wrong", "guided_decoding must be a valid grammar: wrong"),
        ("late", "must be a grammar that compiles within 7 seconds and its memory, got no answer in time"),
    ],
)
def test_failures_are_known(pattern, message, compiler, workers):
    (first,) = ask(compiler, "a", pattern)
    with pytest.raises(ValueError, match=message):
        first.result(timeout=20)
    compiler.leave(Regex(pattern), first)
    (again,) = ask(compiler, "b", pattern)
    assert again.done()
    with pytest.raises(ValueError, match=message):
        again.result()
    compiler.leave(Regex(pattern), again)
    assert workers.asked == [pattern]


def test_a_bounded_number_of_failures_is_known(compiler, workers, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_FAILURES", 2)
    patterns = ["wrong 0", "wrong 1", "wrong 2"]
    for pattern in patterns:
        (future,) = ask(compiler, "a", pattern)
        wait([future], timeout=20)
        compiler.leave(Regex(pattern), future)
    wait(ask(compiler, "a", *reversed(patterns)), timeout=20)
    assert workers.asked == [*patterns, "wrong 0"]


def test_failures_are_forgotten(compiler, workers, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "FAILURE_SECONDS", 0.0)
    for _ in range(2):
        (future,) = ask(compiler, "a", "late")
        wait([future], timeout=20)
        compiler.leave(Regex("late"), future)
    assert workers.asked == ["late", "late"]


def test_a_failure_to_start_is_no_failure_of_the_grammar(compiler, workers, monkeypatch):
    def fail(module):
        raise OSError("no more processes")

    monkeypatch.setattr(grammar_compiler, "Worker", fail)
    (first,) = ask(compiler, "a", "a1")
    with pytest.raises(OSError, match="no more processes"):
        first.result(timeout=20)
    compiler.leave(Regex("a1"), first)
    monkeypatch.setattr(grammar_compiler, "Worker", workers.start)
    (again,) = ask(compiler, "a", "a1")
    assert is_grammar(again)


def test_the_next_client_does_not_wait_for_a_process_to_start(compiler, workers, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "NUM_PROCESSES", 1)
    (late,) = ask(compiler, "a", "late")
    wait([late], timeout=20)
    for _ in range(2000):
        if workers.num_started == 2:  # the first has been ended
            return
        threading.Event().wait(0.01)
    raise AssertionError("no process has been started")


def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler, workers):
    (first,) = ask(compiler, "a", "wait 0")
    assert workers.begun.acquire(timeout=20)
    left = ask(compiler, "a", "a1", "a1") + ask(compiler, "b", "wait 1", "a1")[1:]
    assert workers.begun.acquire(timeout=20)
    for future in left:
        compiler.leave(Regex("a1"), future)
    assert left[0].cancelled()
    last = ask(compiler, "a", "a2") + ask(compiler, "b", "b2")
    workers.go_on.set()
    wait([first, *last], timeout=20)
    assert sorted(workers.asked) == ["a2", "b2", "wait 0", "wait 1"]


def test_grammars_that_wait_fail_at_the_end(compiler, workers):
    ask(compiler, "a", "wait 0")
    assert workers.begun.acquire(timeout=20)
    (future,) = ask(compiler, "a", "a1")
    compiler.close()
    with pytest.raises(CancelledError):
        future.result(timeout=20)
