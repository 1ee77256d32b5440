"""Turn the messages and tools of a conversation into token ids, where text of users never becomes a control token.

The chat template writes the control tokens of a conversation as text, and the tokenizer reads them. A user can write
the same text. So before the template runs, text that the tokenizer would read as a special token gets a mark inside;
what the template returned is cut at the marks, and its parts are tokenized one by one. The marks are gone, the text is
what the user wrote, and its tokens are those of ordinary text. A conversation without such text is tokenized whole.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.engine import chat
from specjax.server.fields import BadRequest, Fields
from specjax.server.served import Served

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 256  # of a message
MAX_TOOL_CALLS = 128  # of a message
MAX_NAME_LENGTH = 64  # characters of a name of a tool or participant
MAX_TEXT_LENGTH = 2**20  # characters of a prompt, or of the content of a message
MAX_TEMPLATE_ARGUMENTS, MAX_TEMPLATE_ARGUMENT_LENGTH = 16, 256  # chat_template_kwargs, and characters of a string

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
RESERVED = ("messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt", "padding")
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # code points that Unicode keeps free of characters


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the checked messages of a body, as templates take them.

    Raises:
        BadRequest: a message is not what it must be.
    """
    expected = "a list of one or more messages"
    if not fields.require("messages", expected):
        raise fields.refuse("messages", expected)
    return [_message(message) for message in fields.readers("messages", MAX_MESSAGES)]


def _message(fields: Fields) -> dict[str, Any]:
    fields.require("role", f"one of {', '.join(ROLES)}")
    role = ROLES[fields.choice("role", list(ROLES)) or ""]
    message: dict[str, Any] = {"role": role}
    if name := fields.text("name", MAX_NAME_LENGTH):
        message["name"] = name
    if role == "assistant":
        if calls := [_tool_call(call) for call in fields.readers("tool_calls", MAX_TOOL_CALLS)]:
            message["tool_calls"] = calls
        if reasoning := fields.text("reasoning_content", MAX_TEXT_LENGTH):
            message["reasoning_content"] = reasoning
        for field, values in (("refusal", ()), ("audio", ()), ("function_call", ()), ("annotations", ([],))):
            fields.neutral(field, *values)
    if role == "tool":
        fields.require("tool_call_id", "a string")
        message["tool_call_id"] = fields.text("tool_call_id", MAX_NAME_LENGTH)
    message["content"] = _content(fields, is_required="tool_calls" not in message)
    fields.finish()
    return message


def _content(fields: Fields, is_required: bool) -> str:
    """Return the text of a message; several parts stand on lines of their own."""
    value = fields.require("content", "a string or a list of parts of text") if is_required else fields.any("content")
    if not isinstance(value, list):
        return fields.text("content", MAX_TEXT_LENGTH) or ""
    texts = []
    for part in fields.readers("content", MAX_CONTENT_PARTS):
        if part.require("type", "'text'") not in ("text", "input_text"):
            raise part.refuse("type", "'text', because the model takes nothing else", "unsupported_parameter")
        part.require("text", "a string")
        texts.append(part.text("text", MAX_TEXT_LENGTH))
        part.finish()
    return "\n".join(texts)


def _tool_call(fields: Fields) -> dict[str, Any]:
    """Return a call of a tool that the assistant made before, its arguments as an object."""
    fields.choice("type", ["function"])
    call = {"id": fields.text("id", MAX_NAME_LENGTH), "type": "function"}
    fields.any("index")  # clients that add up a stream leave it
    fields.require("function", "an object")
    function = fields.fields("function")
    assert function is not None
    function.require("name", "a string")
    name, arguments = function.text("name", MAX_NAME_LENGTH), function.text("arguments", MAX_TEXT_LENGTH) or "{}"
    function.finish()
    fields.finish()
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        raise function.refuse("arguments", "a JSON text") from None
    return call | {"function": {"name": name, "arguments": values}}


def read_template_arguments(fields: Fields) -> dict[str, Any]:
    """Return the values that a request hands to the chat template: booleans, numbers and short strings.

    Raises:
        BadRequest: a value is something else, or its name is one that only the server sets.
    """
    given = fields.object("chat_template_kwargs") or {}
    if len(given) > MAX_TEMPLATE_ARGUMENTS:
        raise fields.refuse("chat_template_kwargs", f"an object of at most {MAX_TEMPLATE_ARGUMENTS} values")
    reader = Fields(given, fields.name("chat_template_kwargs"))
    for name, value in given.items():
        path = reader.name(name[:MAX_NAME_LENGTH])
        if not name.isidentifier() or name.startswith("_") or name in RESERVED or name in chat.SPECIAL_TOKENS:
            raise BadRequest(f"{path} is not a value that a request may set", path)
        is_short = isinstance(value, str) and len(value) <= MAX_TEMPLATE_ARGUMENT_LENGTH
        if not (is_short or value is None or isinstance(value, bool | int | float)):
            expected = f"true, false, a number or a string of at most {MAX_TEMPLATE_ARGUMENT_LENGTH} characters"
            raise reader.refuse(name, expected)
    return given


def encode_chat(
    served: Served,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation up to where the assistant's answer begins.

    Args:
        served: the model.
        messages: checked messages.
        tools: tools that the template describes to the model.
        arguments: further values for the template.

    Raises:
        BadRequest: the model has no chat template, the template refuses the messages, or a special token in them cannot
            be written as ordinary text.
    """
    if served.directory is None:
        raise BadRequest(f"the model {served.name} has no chat template", "messages", "unsupported_parameter")
    given = [list(messages), list(tools or ()), dict(arguments or {})]
    strings = _strings(given)
    mark = next((mark for mark in _MARKS if not any(mark in text for text in strings)), None)
    if mark is None:
        raise BadRequest("messages must not hold all of the code points U+FDD0 to U+FDEF", "messages")
    protect = _protector(served, mark)
    safe_messages, safe_tools, safe_arguments = _map_strings(protect, given)
    directory = served.directory.absolute()  # a short one, such as ".", would be found in all of the message
    try:
        text = chat.render(directory, safe_messages, tools=safe_tools or None, **safe_arguments)
    except ValueError as error:
        told = str(error).replace(mark, "").replace(str(directory), f"the model {served.name}")
        raise BadRequest(told, "messages") from error
    return _encode_parts(served, text, mark)


def _encode_parts(served: Served, text: str, mark: str) -> list[int]:
    """Return the token ids of the parts between the marks, one after the other."""
    parts = [part for part in text.split(mark) if part]
    return [token for part in parts for token in served.encode(part, add_special_tokens=False).ids]


def _protector(served: Served, mark: str) -> Callable[[str], str]:
    """Return a function that puts marks into a text so that none of it is read as a special token.

    End-of-sequence tokens count as special, whatever the tokenizer says. A text that ends with the beginning of a
    special token gets a mark there, too: what follows could complete it.
    """
    added = served.tokenizer.get_added_tokens_decoder()
    special = {i: token.content for i, token in added.items() if token.special or i in served.eos_token_ids}
    beginnings = {content[:size] for content in special.values() for size in range(1, len(content))}
    longest = max((len(content) for content in special.values()), default=0)

    def protect(text: str) -> str:
        encoding = served.encode(text, add_special_tokens=False)
        places = []
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in special:
                inside = text.find(special[token], start, stop)
                places += range(start + 1, stop) if inside < 0 else [inside + 1]
        stripped = len(text.rstrip())
        if any(text[stripped - size : stripped] in beginnings for size in range(1, min(longest, stripped + 1))):
            places.append(stripped)
        for place in sorted(set(places), reverse=True):
            text = text[:place] + mark + text[place:]
        if places and not special.keys().isdisjoint(_encode_parts(served, text, mark)):
            raise BadRequest("messages must not hold a special token that cannot be written as text", "messages")
        return text

    return protect


def _map_strings(function: Callable[[str], str], value: Any) -> Any:
    """Return a JSON value with a function of each of its strings, but the names of fields that templates look for."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {_map_key(function, key): _map_strings(function, item) for key, item in value.items()}
    return [_map_strings(function, item) for item in value] if isinstance(value, list) else value


def _map_key(function: Callable[[str], str], key: str) -> str:
    return key if key.isidentifier() else function(key)


def _strings(value: Any) -> list[str]:
    """Return all strings of a JSON value."""
    found: list[str] = []
    _map_strings(lambda text: found.append(text) or text, value)
    return found
