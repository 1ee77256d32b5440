"""A process that compiles grammars, so that one that takes too much time or memory can be ended.

It reads frames from its standard input and writes frames to its standard output. The first frame has the vocabulary.
Each later one has the source of a grammar, and is answered by the arrays of the grammar or by an error.
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from specjax.processes.child import read_frame, write_frame
from specjax.sampling.guided import sources
from specjax.sampling.guided.tables import Grammar

MEMORY = 2 * 2**30  # bytes that the process may take beside those that it has when it starts
KINDS = {kind.__name__: kind for kind in (sources.Regex, sources.JsonSchema, sources.Choices)}


def write_source(source: sources.Source) -> bytes:
    """Return the source of a grammar as bytes."""
    return json.dumps([type(source).__name__, *vars(source).values()]).encode()


def read_source(data: bytes) -> sources.Source:
    """Return the source that `write_source` has written."""
    kind, value = json.loads(data)
    return KINDS[kind](value)


def write_vocabulary(vocabulary: list[bytes], eos_token_ids: list[int]) -> bytes:
    """Return a vocabulary and its end-of-sequence tokens as bytes."""
    return json.dumps([[token.hex() for token in vocabulary], eos_token_ids]).encode()


def read_vocabulary(data: bytes) -> tuple[list[bytes], list[int]]:
    """Read a vocabulary that `write_vocabulary` has written."""
    vocabulary, eos_token_ids = json.loads(data)
    return [bytes.fromhex(token) for token in vocabulary], eos_token_ids


def write_grammar(grammar: Grammar) -> bytes:
    """Return a grammar as bytes."""
    shape = [len(grammar.token_classes), *grammar.transitions.shape]
    return np.array(shape, np.int32).tobytes() + grammar.token_classes.tobytes() + grammar.transitions.tobytes()


def read_grammar(data: bytes) -> Grammar:
    """Return the grammar that `write_grammar` has written."""
    array = np.frombuffer(data, np.int32)
    num_tokens, num_states, num_classes = array[:3].tolist()
    return Grammar(array[3 : 3 + num_tokens], array[3 + num_tokens :].reshape(num_states, num_classes))


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries are no answers
    questions: Any = sys.stdin.buffer
    with suppress(EOFError):
        vocabulary, eos_token_ids = read_vocabulary(read_frame(questions))
        _limit_memory()
        write_frame(answers, b"")
        while True:
            source = read_source(read_frame(questions))
            try:
                answer = b"G" + write_grammar(source.compile(vocabulary, eos_token_ids))
            except Exception as error:
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                answer = b"E" + f"{kind}{error}".encode(errors="replace")
            write_frame(answers, answer)


def _limit_memory() -> None:
    """Let the process take MEMORY more than it has, where the system can say and limit that."""
    with suppress(ImportError, OSError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
