"""Turn the messages and tools of a conversation into token ids, where text of users never becomes a control token.

The chat template writes the control tokens of a conversation as text, and the tokenizer reads them. A user can write
the same text. So before the template runs, text that the tokenizer would read as a special token gets a mark inside;
the text from the template is cut at the marks, and its parts are tokenized one by one. The marks are gone, the user's
text is unchanged, and it becomes tokens of ordinary text. A conversation without such text is tokenized whole.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from specjax.engine import chat
from specjax.models.directory import SPECIAL_TOKENS
from specjax.server.fields import (
    BadRequest,
    Choice,
    Either,
    Free,
    Kind,
    ListOf,
    Object,
    Tagged,
    Text,
    Unsupported,
    missing,
    refusal,
)
from specjax.server.served import Served
from specjax.server.tool_texts import DECODER, dump

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 256  # of a message
MAX_TOOL_CALLS = 128  # of a message
MAX_NAME_LENGTH = 64  # characters of a name of a tool or participant
MAX_TEXT_LENGTH = 2**20  # characters of a prompt, or of the content of a message
MAX_TEMPLATE_ARGUMENTS, MAX_TEMPLATE_ARGUMENT_LENGTH = 16, 256  # chat_template_kwargs, and characters of a string

RESERVED = ("messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt", "padding")
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # code points that Unicode keeps free of characters

IGNORED = Kind(about="Taken, and not used.")
NAME = Text(MAX_NAME_LENGTH)
PART = Object({"text": Text(MAX_TEXT_LENGTH), "cache_control": IGNORED}, ["text"])
CONTENT = Either(
    (
        Text(MAX_TEXT_LENGTH),
        ListOf(
            Tagged("type", {"text": PART, "input_text": PART}, noun="'text', because the model takes nothing else"),
            MAX_CONTENT_PARTS,
            noun="parts of text",
        ),
    )
)
ARGUMENTS = Either((Text(MAX_TEXT_LENGTH), Free()), about="JSON, as a text or as it is.")
TOOL_CALL = Object(  # open, because clients leave the index of a stream in it
    {
        "id": NAME,
        "type": Choice(["function"]),
        "function": Object({"name": NAME, "arguments": ARGUMENTS}, ["name"], is_open=True),
    },
    ["function"],
    is_open=True,
)
MESSAGE = Object({"content": CONTENT, "name": NAME, "cache_control": IGNORED}, ["content"])
MESSAGES = ListOf(
    Tagged(
        "role",
        {
            "system": MESSAGE,
            "developer": MESSAGE,
            "user": MESSAGE,
            "assistant": Object(
                {
                    "content": CONTENT,
                    "name": NAME,
                    "tool_calls": ListOf(TOOL_CALL, MAX_TOOL_CALLS),
                    "reasoning_content": Text(MAX_TEXT_LENGTH, about="For templates that show it."),
                    "reasoning": Text(MAX_TEXT_LENGTH, about="Another name of reasoning_content."),
                    "audio": Unsupported(),
                    "function_call": Unsupported(),
                },
                is_open=True,  # answers of other servers come back with fields of theirs
            ),
            "tool": Object(MESSAGE.fields | {"tool_call_id": NAME}, ["content", "tool_call_id"]),
        },
    ),
    MAX_MESSAGES,
    least=1,
    noun="messages",
    about="The conversation so far.",
)
TEMPLATE_ARGUMENTS = Free(
    MAX_TEMPLATE_ARGUMENTS, about="Booleans, numbers and short strings for the chat template, by their names."
)


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that `MESSAGES` has read, as templates take them.

    Raises:
        BadRequest: a message without calls of tools and reasoning has no content.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(given: dict[str, Any], path: str) -> dict[str, Any]:
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role}
    if name := given.get("name"):
        message["name"] = name
    if reasoning := given.get("reasoning_content") or given.get("reasoning"):
        message["reasoning_content"] = reasoning
    if calls := given.get("tool_calls"):
        message["tool_calls"] = list(map(_tool_call, calls))
    elif "content" not in given and not reasoning:
        raise missing(f"{path}.content", "a string or a list of parts of text")
    if "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    message["content"] = _text(given.get("content", ""))
    return message


def _text(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message; several parts stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _tool_call(given: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool that the assistant made before, its arguments as an object.

    Arguments that are no JSON, because the call broke off, stay a text: a client sends them as they came.
    """
    function = given["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = _map_strings(_without_halves, DECODER.decode(arguments))
        except (ValueError, RecursionError):
            arguments = _without_halves(arguments)
    made = {"name": function["name"], "arguments": arguments}
    return {"id": given.get("id"), "type": "function", "function": made}


def _without_halves(text: str) -> str:
    """Return a text without halves of pairs of surrogates, which JSON can write as escapes and no tokenizer reads."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def template_arguments(given: Mapping[str, Any], special_tokens: Container[str] = ()) -> dict[str, Any]:
    """Return the values that a request hands to the chat template by their names there, `chat_template_kwargs`.

    Args:
        given: the fields of the request.
        special_tokens: the names by which the template knows special tokens of the model.

    Raises:
        BadRequest: a value is no boolean, number or short string, or its name is one that only the server sets.
    """
    arguments = given.get("chat_template_kwargs", {})
    for name, value in arguments.items():
        path = f"chat_template_kwargs.{name[:MAX_NAME_LENGTH]}"
        is_reserved = name in RESERVED or name in SPECIAL_TOKENS or name in special_tokens
        if not name.isidentifier() or name.startswith("_") or is_reserved:
            raise BadRequest(f"{path} is not a value that a request may set", path)
        is_short = isinstance(value, str) and len(value) <= MAX_TEMPLATE_ARGUMENT_LENGTH
        if not (is_short or value is None or isinstance(value, bool | int | float)):
            expected = f"true, false, a number or a string of at most {MAX_TEMPLATE_ARGUMENT_LENGTH} characters"
            raise refusal(path, expected, value)
    return arguments


def encode_chat(
    served: Served,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Return the token ids of a conversation up to where the assistant's answer begins.

    Args:
        served: the model.
        messages: checked messages.
        tools: tools that the template describes to the model.
        arguments: further values for the template.
        add_special_tokens: whether the tokenizer adds its special tokens to those that the template has written.

    Raises:
        BadRequest: the model has no chat template, the template refuses the messages, or a special token in them cannot
            be written as ordinary text.
    """
    if served.checkpoint is None:
        raise BadRequest(f"the model {served.name} has no chat template", "messages", "unsupported_parameter")
    given = [list(messages), list(tools or ()), dict(arguments or {})]
    strings = _strings(given)
    mark = next((mark for mark in _MARKS if not any(mark in text for text in strings)), None)
    if mark is None:
        raise BadRequest("messages must not hold all of the code points U+FDD0 to U+FDEF", "messages")
    protect = _protector(served, mark)
    safe_tools, safe_arguments = _map_strings(protect, given[1:])
    texts = [_with_texts(message) for message in given[0]]
    refusals: list[BadRequest] = []
    for form in [given[0]] if texts == given[0] else [given[0], texts]:
        safe_messages = _map_strings(protect, form)
        try:
            text = chat.render(served.checkpoint, safe_messages, tools=safe_tools or None, **safe_arguments)
        except ValueError as error:
            told = str(error).replace(mark, "").replace(str(served.checkpoint.directory), f"the model {served.name}")
            refusals.append(BadRequest(told, "messages"))
        else:
            return _encode_parts(served, text, mark, add_special_tokens)
    raise refusals[0]


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have arguments that are texts, for templates that take no objects."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [each["arguments"] if isinstance(each["arguments"], str) else dump(each["arguments"]) for each in functions]
    made = [each | {"arguments": text} for each, text in zip(functions, texts, strict=True)]
    calls = [call | {"function": each} for call, each in zip(message["tool_calls"], made, strict=True)]
    return {**message, "tool_calls": calls}


def encode_text(served: Served, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text, in which special tokens count."""
    return served.encode(text, add_special_tokens=add_special_tokens).ids


def _encode_parts(served: Served, text: str, mark: str, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of the parts between the marks, one after the other."""
    from tokenizers import Encoding

    encode = partial(served.encode, add_special_tokens=False)
    joined = Encoding.merge([encode(part) for part in text.split(mark) if part])
    return served.tokenizer.post_process(joined, add_special_tokens=True).ids if add_special_tokens else joined.ids


def _protector(served: Served, mark: str) -> Callable[[str], str]:
    """Return a function that puts marks into a text so that none of it is read as a special token.

    End-of-sequence tokens count as special, whatever the tokenizer says. A text that ends with the beginning of a
    special token gets a mark there, too: the next text could complete it.
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
