"""A process that renders chat templates, so that one that takes too much time or memory can be ended.

It reads frames from its standard input and writes frames to its standard output, as `specjax.processes.child` has them.
The first is empty, and is answered when the process is ready. It runs as a script that imports nothing of specjax,
which would take a second and 100 MB.
"""

import datetime
import json
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

MEMORY = 2**29  # bytes that the process may take beside those that it has when it starts
MAX_PROMPT_LENGTH = 2**23  # characters that a template may write
MAX_ERROR_LENGTH = 1000  # characters
LENGTH = struct.Struct("<Q")  # bytes of a frame


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, by the names and the order of arguments that published templates write."""
    parts = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=parts, sort_keys=sort_keys)


@lru_cache(8)
def _compiled(template: str) -> Any:
    """Return a template, ready to run in a sandbox, as it is code that comes with the weights."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag around the text of the assistant, which is for training alone and writes nothing."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Parser) -> Scope:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    # Published templates are written for these settings, tags, filters and globals.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _rendered(template: str, values: dict[str, Any]) -> str:
    parts, length = [], 0
    for part in _compiled(template).generate(values):
        parts.append(part)
        length += len(part)
        if length > MAX_PROMPT_LENGTH:
            raise ValueError(f"it writes more than {MAX_PROMPT_LENGTH} characters")
    return "".join(parts)


def _answer(question: bytes) -> bytes:
    try:
        return b"T" + _rendered(*json.loads(question)).encode("utf-8", "surrogatepass")
    except MemoryError:
        return b"Eit needs too much memory"
    except Exception as error:  # the template's code may raise anything
        return b"E" + str(error)[:MAX_ERROR_LENGTH].encode("utf-8", "replace")


def _limit_memory() -> None:
    """Let the process take MEMORY more than it has, where the system can say and limit that."""
    with suppress(ImportError, OSError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer until the input ends."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries are no answers
    import jinja2.sandbox  # noqa: F401

    _limit_memory()
    while header := questions.read(LENGTH.size):
        question = questions.read(LENGTH.unpack(header)[0])
        answer = _answer(question) if question else b""
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main()
