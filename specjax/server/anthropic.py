"""Anthropic's Messages protocol: the meaning of a body, and its answer, whole and as events.

A body becomes a chat: its blocks are messages and calls of tools. Everything behind that is as for chat completions.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from specjax.engine.requests import Completion, Piece, Result
from specjax.server import answers, bodies, protocol
from specjax.server.bodies import ANSWER_FIELDS, LABEL, MODEL, SCHEMA
from specjax.server.call_stream import CallPart
from specjax.server.errors import ApiError
from specjax.server.fields import (
    BadRequest,
    Boolean,
    Choice,
    Either,
    Free,
    Integer,
    Kind,
    ListOf,
    Object,
    Tagged,
    Text,
    Texts,
    Unsupported,
    refusal,
)
from specjax.server.messages import (
    IGNORED,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TEXT_LENGTH,
    NAME,
    TEMPLATE_ARGUMENTS,
)
from specjax.server.protocol import Call
from specjax.server.served import Served
from specjax.server.streams import event
from specjax.server.tools import MAX_DESCRIPTION_LENGTH, MAX_TOOLS, SentCalls, ToolCall, choose_tools
from specjax.server.tools import NAME as TOOL_NAME

NOTHING_ELSE = "because the model takes nothing else"
TEXT = Object({"text": Text(MAX_TEXT_LENGTH), "cache_control": IGNORED, "citations": IGNORED}, ["text"])


def contents(**kinds: Object) -> Either:
    """Return the declaration of a text, or a list of blocks of these kinds and of text."""
    blocks = {"text": TEXT, **kinds}
    noun = f"one of {', '.join(blocks)}, {NOTHING_ELSE}" if kinds else f"'text', {NOTHING_ELSE}"
    block = Tagged("type", blocks, noun=noun)
    return Either((Text(MAX_TEXT_LENGTH), ListOf(block, MAX_CONTENT_PARTS, noun="blocks")))


THOUGHT = Object({"thinking": Text(MAX_TEXT_LENGTH)}, is_open=True, about="For templates that show it.")
TOOL_USE = Object({"id": NAME, "name": NAME, "input": Free()}, ["id", "name", "input"], is_open=True)
TOOL_RESULT = Object(
    {
        "tool_use_id": NAME,
        "content": contents(),
        "is_error": Boolean(about="Not told to the model, which reads the content."),
        "cache_control": IGNORED,
    },
    ["tool_use_id"],
)
MESSAGES = ListOf(
    Tagged(
        "role",
        {
            "user": Object({"content": contents(tool_result=TOOL_RESULT)}, ["content"]),
            "assistant": Object(
                {"content": contents(tool_use=TOOL_USE, thinking=THOUGHT, redacted_thinking=THOUGHT)}, ["content"]
            ),
            "system": Object({"content": contents()}, ["content"]),
        },
    ),
    MAX_MESSAGES,
    least=1,
    noun="messages",
    about="The conversation so far, which ends with the user.",
)
TOOL = Object(
    {
        "name": TOOL_NAME,
        "description": Text(MAX_DESCRIPTION_LENGTH),
        "input_schema": Free(about="A JSON schema of the input."),
        "strict": Boolean(about="The input of a tool that must be called always follows its schema."),
        "cache_control": IGNORED,
        "eager_input_streaming": IGNORED,
        "defer_loading": Unsupported([False]),
    },
    ["name", "input_schema"],
)
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}  # an edit that changes nothing
PARALLEL: dict[str, Kind] = {"disable_parallel_tool_use": Boolean(about="Whether an answer has at most one call.")}
CHAT_FIELDS: dict[str, Kind] = {
    "model": MODEL,
    "messages": MESSAGES,
    "system": Either(contents().kinds, about="A message of the system before all others."),
    "tools": ListOf(
        Tagged("type", {"custom": TOOL}, default="custom", noun="'custom', because the server has no tools of its own"),
        MAX_TOOLS,
        about="Tools that the model may call.",
    ),
    "tool_choice": Tagged(
        "type",
        {
            "auto": Object(PARALLEL),
            "any": Object(PARALLEL),
            "tool": Object({"name": NAME, **PARALLEL}, ["name"]),
            "none": Object({}),
        },
        about="Whether the answer calls a tool, and which; default: auto.",
    ),
    "thinking": bodies.thinking(["budget_tokens"]),
    "output_config": Object(
        {
            "effort": Choice(["low", "medium", "high", "xhigh", "max"], about="How much to think."),
            "format": Tagged("type", {"json_schema": Object({"schema": SCHEMA}, ["schema"])}),
        },
        about="The form of the text, unless the answer is a call.",
    ),
    "chat_template_kwargs": TEMPLATE_ARGUMENTS,
    "cache_control": IGNORED,
    "context_management": Unsupported([{"edits": []}, {"edits": [KEEP_THINKING]}]),
}
COUNT = Object(CHAT_FIELDS, ["messages"])


@cache
def message(vocab_size: int, max_length: int) -> Object:
    """Return the declaration of a body of /v1/messages.

    Args:
        vocab_size: V of the model.
        max_length: the most tokens of a prompt and its answer.
    """
    fields: dict[str, Kind] = {
        **CHAT_FIELDS,
        "max_tokens": Integer(
            1, 2**31 - 1, about="Most tokens of the answer, which the maximum length may end before."
        ),
        "stop_sequences": Texts(bodies.MAX_STOPS, bodies.MAX_STOP_LENGTH, about="Texts before which the answer ends."),
        "metadata": Object({"user_id": LABEL}),
        "service_tier": IGNORED,
        "inference_geo": IGNORED,
        "speed": Unsupported(["standard"]),
        "container": Unsupported(),
        "thread": Unsupported(why="this server stores no conversations; give the whole one in messages"),
        "mcp_servers": Unsupported([[]]),
        **{name: ANSWER_FIELDS[name] for name in ("stream", "priority", "cache_salt", "request_id")},
    }
    sampling = bodies.sampling_fields(vocab_size, max_length)
    more = {name: kind for name, kind in sampling.items() if name not in ("n", "stop", "truncate_prompt_tokens")}
    return Object(fields | more, ["messages", "max_tokens"])


def parse_message(body: Any, served: Served) -> Call:
    """Read the body of a request for a message.

    Args:
        body: the parsed JSON.
        served: the model that answers.

    Raises:
        BadRequest: a field is unknown, not supported, of a wrong type or out of its range; or the chat template refuses
            the messages.
    """
    given = protocol.read(message(served.vocab_size, served.max_length), body, served)
    chat = _chat(given)
    tools, schema = choose_tools(chat)
    form, constraint = given.get("output_config", {}).get("format"), None
    if schema is not None:
        constraint = protocol.schema_constraint(schema, "tool_choice", "tools")
    elif form is not None:
        constraint = protocol.schema_constraint(form["schema"], "output_config", "output_config.format.schema")
    return protocol.chat_call(chat, served, tools, constraint, max_tokens=given["max_tokens"], may_be_cut=True)


def count_tokens(body: Any, served: Served) -> dict[str, int]:
    """Return the answer to a body of /v1/messages/count_tokens: how many tokens the prompt of its messages has."""
    chat = _chat(protocol.read(COUNT, body, served))
    return {"input_tokens": len(protocol.encode_messages(chat, served, choose_tools(chat)[0]))}


def _chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that ask for the same."""
    chat = {**given, "messages": _messages(given), **_chat_tools(given)}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
    if user := given.get("metadata", {}).get("user_id"):
        chat["user"] = user
    if effort := given.get("output_config", {}).get("effort"):
        chat["reasoning_effort"] = effort
    return chat


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat that say the same. Messages of one role in a row are one."""
    if given["messages"][-1]["role"] == "assistant":
        end = "a message of the user, because the server does not continue one of the assistant"
        raise BadRequest(f"messages must end with {end}", "messages", "unsupported_parameter")
    messages: list[dict[str, Any]] = []
    if "system" in given:
        messages.append({"role": "system", "content": _text(given["system"])})
    for each in given["messages"]:
        content, thought = each["content"], ""
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            match block["type"]:
                case "text":
                    last = _last(messages, each["role"])
                    last["content"] = "\n".join(
                        [last["content"], block["text"]] if "content" in last else [block["text"]]
                    )
                case "thinking":
                    thought = block.get("thinking", "")
                case "tool_use":
                    made = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
                    calls = _last(messages, "assistant").setdefault("tool_calls", [])
                    calls.append({"id": block["id"], "function": made})
                case "tool_result":
                    content = _text(block.get("content", ""))
                    messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
            if thought and block["type"] in ("text", "tool_use"):
                _last(messages, "assistant")["reasoning"], thought = thought, ""
    if not messages:
        raise BadRequest("messages must have a block that is no thinking", "messages")
    return messages


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the last message if it is of a role, else a new one after it."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role})
    return messages[-1]


def _text(content: str | list[dict[str, Any]]) -> str:
    """Return the text of blocks; several stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def _chat_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that say the same of its tools."""
    tools, choice = given.get("tools", []), given.get("tool_choice", {"type": "auto"})
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice["type"])
    if chosen is None:
        if choice["name"] not in [tool["name"] for tool in tools]:
            raise refusal("tool_choice.name", "the name of one of the tools", choice["name"])
        chosen = {"type": "function", "function": {"name": choice["name"]}}
    return {
        "tools": [{"function": {**tool, "parameters": tool["input_schema"]}} for tool in tools],
        "tool_choice": chosen,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
    }


class MessageAnswer:
    """The answer of the Messages protocol, as `streams.Answer`.

    Args:
        call: the request; it has one prompt and one sample.
        served: the model.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._served = call, served
        self._id = f"msg_{call.request_id or uuid.uuid4().hex}"
        self._parts, self._calls = call.parts(call.tools), SentCalls()
        self._num_blocks = 0  # blocks of a stream that have ended
        self._open = ""  # "thinking", "text" or "tool_use", the kind of the block that is open

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        completion = result.completions[0]
        reasoning, text, calls, _ = self._call.parts(self._call.tools).whole(completion.text)
        parts = ("thinking", reasoning), ("text", text)
        content: list[dict[str, Any]] = [_block(kind, part) for kind, part in parts if part]
        content += [_tool_use(made.name, json.loads(made.arguments)) for made in calls]
        drafts = answers.speculative_decoding([result.metrics])
        return {
            **self._message(content, _usage(self._call, result)),
            **self._stop(completion, calls),
            **({"metrics": {"speculative_decoding": drafts}} if drafts else {}),
        }

    def start(self) -> bytes:
        # The number of prompt tokens in pages of other requests is not known yet; the last events say it.
        usage = {"input_tokens": len(self._call.prompts[0]), "output_tokens": 0}
        return _event("message_start", message=self._message([], usage)) + self.ping()

    def feed(self, found: Sequence[tuple[int, Piece]]) -> bytes:
        return self._add_parts(*self._parts.feed("".join(piece.text for _, piece in found)))

    def finish(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        completion = result.completions[0]
        reasoning, text, calls, is_cut = self._parts.finish()
        events = self._add_parts(reasoning, text, self._calls.rest(calls)) + self._end_part()
        stop = self._stop(completion, () if is_cut else calls)
        events += _event("message_delta", delta=stop, usage=_usage(self._call, result))
        return events + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return event(error.anthropic_body, "error")

    def ping(self) -> bytes:
        return _event("ping")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self, completion: Completion, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return why an answer ended."""
        if completion.finish_reason == "length":
            is_full = len(self._call.prompts[0]) + self._call.params.max_tokens == self._served.max_length
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _add_parts(self, reasoning: str, text: str, calls: Sequence[CallPart]) -> bytes:
        """Return the events of more of an answer: of the call that is open, then of what follows it."""
        last = self._calls.last if self._open == "tool_use" else -1
        events = b"".join(self._add_call(part) for part in calls if part.number == last)
        events += self._add("thinking", reasoning) + self._add("text", text)
        return events + b"".join(self._add_call(part) for part in calls if part.number != last)

    def _add(self, kind: str, part: str) -> bytes:
        """Return the events of more thinking or text; the first opens a block."""
        if not part:
            return b""
        events = b""
        if self._open != kind:
            events = self._end_part() + self._start_block(_block(kind, ""))
            self._open = kind
        return events + self._delta({"type": f"{kind}_delta", kind: part})

    def _end_part(self) -> bytes:
        """Return the end of the block that is open, if one is."""
        if not self._open:
            return b""
        self._open = ""
        return self._end_block()

    def _add_call(self, part: CallPart) -> bytes:
        events = b""
        if self._calls.add(part):
            events = self._end_part() + self._start_block(_tool_use(part.name, {}))
            self._open = "tool_use"
        return events + self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _start_block(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _end_block(self) -> bytes:
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _block(kind: str, part: str) -> dict[str, Any]:
    """Return a block of thinking, which nobody signs, or of text."""
    return {"type": kind, kind: part} | ({"signature": ""} if kind == "thinking" else {})


def _tool_use(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": name, "input": values}


def _usage(call: Call, result: Result) -> dict[str, int]:
    """Return the counts of tokens; prompt tokens that were found in pages of other requests count apart."""
    counts = answers.usage(call, [result])
    num_cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": counts["completion_tokens"],
    }
