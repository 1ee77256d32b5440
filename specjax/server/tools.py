"""Tools that a model may call: their descriptions, the choice among them, and calls in the text of an answer."""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.server.call_stream import BegunCall, CallPart, CallStream
from specjax.server.fields import Boolean, Choice, Either, Free, Kind, ListOf, Object, Tagged, Text, refusal
from specjax.server.messages import IGNORED, MAX_NAME_LENGTH
from specjax.server.tool_texts import (
    INNER_TAGS,
    OUTER_TAGS,
    PREFIXES,
    calls_of,
    dump,
    load,
    named_objects_of,
    objects_of,
)

MAX_TOOLS = 1024  # as many as the longest body holds with 4096 bytes each; clients send the tools of many servers
MAX_DESCRIPTION_LENGTH = 2**16  # characters

_OPENING = re.compile("|".join(map(re.escape, OUTER_TAGS)))
_END = {tag: re.compile(rf"{re.escape(close)}(?=\s*(?:{_OPENING.pattern}|\Z))") for tag, close in OUTER_TAGS.items()}
_PREFIX = re.compile("|".join(map(re.escape, PREFIXES)))
_BEGINNINGS = (*OUTER_TAGS, *PREFIXES)
_BEGINNING = re.compile("|".join(map(re.escape, _BEGINNINGS)))
_LONGEST = max(map(len, _BEGINNINGS))
TAGS = frozenset((*OUTER_TAGS, *OUTER_TAGS.values(), *PREFIXES, *INNER_TAGS))

NAME = Text(
    MAX_NAME_LENGTH,
    1,
    pattern="[A-Za-z0-9_.-]+",
    noun=f"1 to {MAX_NAME_LENGTH} letters, digits, points, hyphens and underscores",
)
FUNCTION = Object(
    {
        "name": NAME,
        "description": Text(MAX_DESCRIPTION_LENGTH),
        "parameters": Free(about="A JSON schema of the arguments."),
        "strict": Boolean(about="The arguments of a tool that must be called always follow their schema."),
    },
    ["name"],
)
TOOL = Tagged(
    "type",
    {"function": Object({"function": FUNCTION, "cache_control": IGNORED}, ["function"])},
    noun="'function', because the server has no tools of its own",
)
CHOSEN = Object({"function": Object({"name": Text(MAX_NAME_LENGTH)}, ["name"])}, ["function"])
MODE = Choice(["auto", "required"], about="Whether the answer must call one of them.")
ALLOWED = Object(
    {"mode": MODE, "tools": ListOf(Tagged("type", {"function": CHOSEN}, default="function"), MAX_TOOLS)},
    ["mode", "tools"],
)
TOOL_FIELDS: dict[str, Kind] = {
    "tools": ListOf(TOOL, MAX_TOOLS, about="Functions that the model may call."),
    "tool_choice": Either(
        (
            Choice(["none", "auto", "required"]),
            Tagged(
                "type",
                {"function": CHOSEN, "allowed_tools": Object({"allowed_tools": ALLOWED}, ["allowed_tools"])},
                default="function",
            ),
        ),
        about="Whether the answer calls a tool, and which may be called; default: auto.",
    ),
    "parallel_tool_calls": Boolean(about="Whether an answer may have several calls; default: true."),
}


class Tools(NamedTuple):
    """The tools of a request."""

    described: list[dict[str, Any]]  # as the template takes them; empty where the request forbids calls
    names: tuple[str, ...]  # names of those that the model may call
    forced: str | None = None  # name of the one tool that the answer calls: its text is the arguments
    is_required: bool = False  # whether the answer must call one of several: its text names it
    is_single: bool = False  # whether only the first call of an answer counts


class ToolCall(NamedTuple):
    """A call of a tool in an answer."""

    name: str
    arguments: str  # a JSON text

    def body(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def choose_tools(given: Mapping[str, Any]) -> tuple[Tools | None, dict[str, Any] | None]:
    """Return the tools of a request, and the JSON schema that an answer which must call one follows, None for others.

    Args:
        given: the fields of the request: `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        BadRequest: two tools have the same name, or the choice is none of them.
    """
    described = [_described(tool["function"]) for tool in given.get("tools", ())]
    functions = {tool["function"]["name"]: tool["function"] for tool in described}
    if len(functions) != len(described):
        raise refusal("tools", "functions of different names", given["tools"])
    mode, names = _choice(given.get("tool_choice", "auto"), tuple(functions))
    if not described or mode == "none":
        return None, None
    if mode == "auto":
        return Tools(described, names, is_single=not given.get("parallel_tool_calls", True)), None
    if len(names) == 1:
        return Tools(described, names, names[0]), _arguments_schema(functions[names[0]])
    return Tools(described, names, is_required=True), {"anyOf": [_call_schema(functions[name]) for name in names]}


def _described(function: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates take it."""
    names = "name", "description", "parameters"
    return {"type": "function", "function": {name: function[name] for name in names if name in function}}


def _choice(choice: str | dict[str, Any], names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return "none", "auto" or "required", and the names of the tools that may be called, in the order of `names`."""
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise refusal("tool_choice", "none or auto where there are no tools", choice)
        return choice, names
    if choice["type"] == "function":
        return "required", _known(choice, names, "tool_choice.function.name")
    allowed, path = choice["allowed_tools"], "tool_choice.allowed_tools.tools"
    if not allowed["tools"]:
        raise refusal(path, "one or more of the tools", allowed["tools"])
    chosen = {name for tool in allowed["tools"] for name in _known(tool, names, path)}
    return allowed["mode"], tuple(name for name in names if name in chosen)


def _known(tool: Mapping[str, Any], names: tuple[str, ...], path: str) -> tuple[str]:
    """Return the name of a tool that a choice names, after a check."""
    name = tool["function"]["name"]
    if name not in names:
        raise refusal(path, "the name of one of the tools", name)
    return (name,)


def _arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": function["name"]}, "arguments": _arguments_schema(function)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def find_calls(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Return the text of an answer without its calls, and the calls.

    A tool that must be called has its arguments, or its name and arguments, as the whole text. Where the model chooses,
    the whole text, or all that follows one of `PREFIXES`, is an object, a list of objects, or names each before its
    arguments; or calls are anywhere between two of `OUTER_TAGS`, as `<tool_call>` and `</tool_call>`, in one of the
    forms of `tool_texts`. Only names of the request's tools count. Everything else stays text, and so does an answer
    that ended before its call did. Where only one call may be, those after it are left out.
    """
    if tools.forced is not None:
        return ("", [ToolCall(tools.forced, text)]) if load(text) is not None else (text, [])
    most = 1 if tools.is_single else None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools.described}
    schemas = {name: functions.get(name, {}).get("parameters") for name in tools.names}
    begin = _PREFIX.search(text)
    for rest, whole in (("", text), *([(text[: begin.start()], text[begin.end() :])] if begin else ())):
        if calls := objects_of(whole.strip(), schemas) or named_objects_of(whole.strip(), schemas):
            return rest.strip(), _tool_calls(calls[:most])
    rest, calls = _parted(text, schemas)
    return rest.strip() if calls else text, _tool_calls(calls[:most])


def _parted(text: str, schemas: Mapping[str, Any]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return a text without its calls between tags, and the calls; none where something else stands between two."""
    rest, calls, place = [], [], 0
    while begin := _OPENING.search(text, place):
        close, start = OUTER_TAGS[begin.group()], begin.end()
        # A call may quote the tag that closes it. The end is then where another opens or the text ends, or the last.
        end = text.find(close, start)
        if end < 0:
            break
        found = calls_of(text[start:end].strip(), schemas)
        if not found:
            later = _END[begin.group()].search(text, start)
            end = text.rfind(close) if later is None else later.start()
            found = calls_of(text[start:end].strip(), schemas)
        if not found:
            return text, []
        rest.append(text[place : begin.start()])
        calls += found
        place = end + len(close)
    return "".join([*rest, text[place:]]), calls


def _tool_calls(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    return [ToolCall(name, dump(arguments)) for name, arguments in calls]


def num_certain(text: str, tools: Tools, known: int = 0) -> int:
    """Return how many characters at the beginning of an unfinished answer are text, and no part of a call.

    Args:
        text: the answer so far.
        tools: the tools of the request.
        known: how many were so before more of the answer came.
    """
    if not known and _is_open(text.lstrip(), tools):
        return 0
    if begin := _BEGINNING.search(text, known):
        return begin.start()
    most = min(len(text) - known, _LONGEST - 1)
    held = (size for size in range(most, 0, -1) if any(tag.startswith(text[-size:]) for tag in _BEGINNINGS))
    return len(text) - next(held, 0)


def _is_open(start: str, tools: Tools) -> bool:
    """Return whether an answer may be a call as a whole, given its beginning without white space."""
    if tools.forced is not None or tools.is_required or not start or start[0] in "{[":
        return True
    is_prefix = any(prefix.startswith(start[: len(prefix)]) for prefix in PREFIXES)
    return is_prefix or any(_may_call(start, name) for name in tools.names)


def _may_call(text: str, name: str) -> bool:
    """Return whether a text may be the beginning of a tool's name before its arguments."""
    if len(text) < len(name):
        return name.startswith(text)
    return text.startswith(name) and text[len(name) :].lstrip()[:1] in ("", "{", "[")


class CallFinder:
    """Part the text of an answer, as it comes, into text and calls of tools.

    Args:
        tools: the tools of the request, None where it has none: then all is text.

    Attributes:
        is_cut: whether the last call of an answer that has ended has no end: it had begun when the answer, or its JSON,
            broke off.
    """

    def __init__(self, tools: Tools | None):
        self._tools = tools
        self._text, self._num_given = "", 0  # characters of the text that have been returned
        self._stream = CallStream(() if tools is None else tools.names, tools is not None and tools.is_single)
        self._parts: list[CallPart] = []
        self.is_cut = False

    def feed(self, text: str) -> str:
        """Take more of the answer, and return the part that is now certain to be text."""
        self._text += text
        known, size = self._num_given, len(self._text)
        if self._tools is not None:
            size = num_certain(self._text, self._tools, known)
        start, self._num_given = self._num_given, max(size, self._num_given)
        if self._tools is not None and self._tools.forced is not None:
            self._parts += [CallPart(0, self._tools.forced, text)] if text else []
        elif self._tools is not None:
            self._parts += self._stream.feed(self._text, self._num_given)
        return self._text[start : self._num_given]

    def take(self) -> list[CallPart]:
        """Return the parts of calls that have come since it was last called."""
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest of the text, and the calls of the whole answer."""
        rest = self._text[self._num_given :]
        if self._tools is None:
            return rest, []
        text, calls = find_calls(rest, self._tools)
        begun = self._stream.calls
        if self._tools.forced is not None:
            self.is_cut = bool(rest) and not calls
            return ("", [ToolCall(self._tools.forced, rest)]) if self.is_cut else (text, calls)
        if len(begun) <= len(calls) and all(map(_continues, calls, begun)):
            return text, [ToolCall(one.name, one.arguments) for one in begun] + calls[len(begun) :]
        self.is_cut = not begun[-1].object.is_whole
        return self._stream.rest(self._text), [ToolCall(one.name, one.arguments) for one in begun]


def _continues(made: ToolCall, begun: BegunCall) -> bool:
    """Return whether a call is the one that has begun; the JSON of either may have a name twice, and the other once."""
    is_same = begun.arguments == made.arguments or load(begun.arguments) == load(made.arguments)
    return made.name == begun.name and begun.object.is_whole and is_same


class SentCalls:
    """Count the parts of calls that a stream has sent."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # characters of the arguments of each call that has begun

    @property
    def last(self) -> int:
        """The number of the call that has begun last, -1 before the first."""
        return len(self._sizes) - 1

    def add(self, part: CallPart) -> bool:
        """Count a part, and return whether it begins a call."""
        is_first = part.number > self.last
        if is_first:
            self._sizes.append(0)
        self._sizes[part.number] += len(part.arguments)
        return is_first

    def rest(self, calls: Sequence[ToolCall]) -> list[CallPart]:
        """Return the parts of the calls of an answer that has ended which have not been sent."""
        parts = []
        for number, made in enumerate(calls):
            size = self._sizes[number] if number <= self.last else -1
            if size < len(made.arguments):
                parts.append(CallPart(number, made.name, made.arguments[max(size, 0) :]))
        return parts
