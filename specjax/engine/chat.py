"""Render conversations as prompts with the chat template of a checkpoint, in processes that can be ended."""

import atexit
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from specjax.engine import template_worker
from specjax.models.directory import Checkpoint
from specjax.processes.child import start_script
from specjax.processes.worker import NoAnswer, Worker
from specjax.validation.extras import needs

NUM_PROCESSES = 2  # templates that run at a time
TEMPLATE_SECONDS = 5.0  # the most that a template may take
START_SECONDS = 60.0  # the most that a process takes to start
_ASKS_FOR_NULL = re.compile(r"""\bcontent['"]?\]?\s+is\s+none\b""")  # by which DeepSeek's know a message of calls alone


def render(
    checkpoint: Checkpoint,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Write messages as a prompt that ends where the assistant's answer begins.

    Args:
        checkpoint: the checkpoint with the template.
        messages: at least one mapping with "role" ("system", "user" or "assistant") and "content". A key whose value is
            None, of a message or of its calls of tools, is as if it were not there.
        tools: descriptions of functions that the model may call, if the template knows of tools.
        variables: further values that the template may use.

    Returns:
        The prompt. The template has already written the special tokens into it.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
        ValueError: messages is empty or holds something else than mappings with "role", or values that JSON cannot
            write; the checkpoint has no chat template; or the template refuses the messages, or takes too much time or
            memory.
    """
    is_list = isinstance(messages, Sequence) and len(messages) > 0
    if not (is_list and all(isinstance(message, Mapping) and "role" in message for message in messages)):
        raise ValueError(f'messages must be mappings with "role" and "content", at least one, got {messages!r}')
    with needs("chat"):
        if find_spec("jinja2") is None:
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
    template = _template(checkpoint, bool(tools))
    told = [_without_nulls(message) for message in messages]
    if _ASKS_FOR_NULL.search(template):
        told = [each | ({"content": None} if _only_calls(each) else {}) for each in told]
    given = {"messages": told, "tools": tools, "documents": None}
    values = variables | checkpoint.special_tokens | given
    try:
        question = json.dumps([template, values | {"add_generation_prompt": True}], default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages and tools must have values that JSON can write: {error}") from error
    return _answer(checkpoint, question)


def variables(checkpoint: Checkpoint, has_tools: bool = False) -> Mapping[str, list[str] | None]:
    """Return the names of the values that the chat template reads.

    With each come the texts that it may have, where the template tests for them; None stands for any value.

    Args:
        checkpoint: the checkpoint with the template.
        has_tools: whether it is the template of conversations with tools.

    Raises:
        ValueError: the checkpoint has no chat template, or it is no template.
    """
    template = _template(checkpoint, has_tools)
    if template not in _variables:
        _variables[template] = json.loads(_answer(checkpoint, json.dumps([template, None]).encode()))
    return _variables[template]


_variables: dict[str, dict[str, list[str] | None]] = {}  # of templates that were read before


def _template(checkpoint: Checkpoint, has_tools: bool) -> str:
    template = checkpoint.chat_template
    with_tools = checkpoint.tool_template if has_tools else None
    return template if with_tools is None else with_tools


def _answer(checkpoint: Checkpoint, question: bytes) -> str:
    """Return the answer to a question about the template of a checkpoint.

    Raises:
        ValueError: the template refuses the values, or takes too much time or memory.
    """
    try:
        answer = _ask(question)
    except NoAnswer as error:
        limits = f"{TEMPLATE_SECONDS:g} seconds and its memory"
        raise ValueError(
            f"the chat template of {checkpoint.directory} must end within {limits}, got {error}"
        ) from error
    if answer[:1] == b"E":
        raise ValueError(f"the chat template of {checkpoint.directory} refuses the messages: {answer[1:].decode()}")
    return answer[1:].decode("utf-8", "surrogatepass")


def _only_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys whose value is None; arguments of calls, which are data, keep theirs."""
    found = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := found.get("tool_calls"), list | tuple):
        found["tool_calls"] = [_without_nulls(call) if isinstance(call, Mapping) else call for call in calls]
    if isinstance(function := found.get("function"), Mapping):
        found["function"] = {key: value for key, value in function.items() if value is not None}
    return found


def _plain(value: Any) -> Any:
    """Return a mapping that is no dict as one, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"got {type(value).__name__}")


# The processes that run templates, each None before it has been started. The one that was used last comes first.
_idle: LifoQueue[Worker | None] = LifoQueue()
for _ in range(NUM_PROCESSES):
    _idle.put(None)


def _ask(question: bytes) -> bytes:
    """Return the answer of a process that runs templates."""
    worker = _idle.get()
    try:
        if worker is None or not worker.is_alive:
            worker = Worker(partial(start_script, Path(template_worker.__file__)))
            worker.ask(b"", START_SECONDS)
        return worker.ask(question, TEMPLATE_SECONDS)
    finally:
        _idle.put(worker)


@atexit.register
def _close() -> None:
    """End the processes that do nothing; others end with this process, as their input does."""
    with suppress(Empty):
        while True:
            if (worker := _idle.get_nowait()) is not None:
                worker.close()
