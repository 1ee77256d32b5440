"""A process that renders chat templates, so that one that takes too much time or memory can be ended.

It reads frames from its standard input and writes frames to its standard output, as `specjax.processes.child` has them.
The first is empty, and is answered when the process is ready. Others are a template and its values, answered by the
text, or a template and null, answered by the variables that it reads. It runs as a script that imports nothing of
specjax, which would take a second and 100 MB.
"""

import datetime
import json
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
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


@cache
def _environment() -> Any:
    """Return the sandbox in which templates run, as they are code that comes with the weights."""
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
    return environment


@lru_cache(8)
def _compiled(template: str) -> Any:
    """Return a template, ready to run."""
    return _environment().from_string(template)


def _variables(template: str) -> dict[str, list[str] | None]:
    """Return the names of the values that a template reads, without those that it sets for each message.

    With each come the texts that it may have, where the template asks whether it is among them: it does something else,
    or refuses the conversation, where the value is not. None stands for any value.
    """
    from jinja2 import meta, nodes

    tree = _environment().parse(template)
    lists = {each.target.name: each.node for each in tree.find_all(nodes.Assign) if isinstance(each.target, nodes.Name)}
    denied = [each.node for each in tree.find_all(nodes.Not)]
    texts: dict[str, list[str]] = {}
    for compared in tree.find_all(nodes.Compare):
        operand, value = compared.ops[0], compared.expr
        listed = lists.get(operand.expr.name) if isinstance(operand.expr, nodes.Name) else operand.expr
        while isinstance(value, nodes.Filter):
            value = value.node
        is_test = operand.op == "notin" or (operand.op == "in" and any(compared is each for each in denied))
        if is_test and isinstance(value, nodes.Name) and isinstance(listed, nodes.List | nodes.Tuple):
            values = [item.value for item in listed.items if isinstance(item, nodes.Const)]
            texts[value.name] = [each for each in values if isinstance(each, str)]
    inner = [each for part in tree.find_all((nodes.For, nodes.Macro)) for each in part.find_all(nodes.Assign)]
    own = {each.target.name for each in inner if isinstance(each.target, nodes.Name)}
    # This comes last, because it changes the tree.
    return {name: texts.get(name) for name in sorted(meta.find_undeclared_variables(tree) - own)}


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
        template, values = json.loads(question)
        text = json.dumps(_variables(template)) if values is None else _rendered(template, values)
        return b"T" + text.encode("utf-8", "surrogatepass")
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
