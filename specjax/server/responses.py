"""OpenAI's Responses protocol: the meaning of a body, and its answer, whole and as events. Nothing is stored.

A body becomes a chat: its items are messages, its functions are tools. Everything behind that is as for chat
completions.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from specjax.engine.requests import Piece, Result
from specjax.server import answers, bodies, items, protocol
from specjax.server.bodies import ANSWER_FIELDS, LABEL, MAX_TOP_LOGPROBS, MODEL, SCHEMA
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
from specjax.server.protocol import Call, Constraint
from specjax.server.served import Served
from specjax.server.streams import COMMENT, event
from specjax.server.tools import (
    FUNCTION,
    MAX_DESCRIPTION_LENGTH,
    MAX_TOOLS,
    MODE,
    SentCalls,
    ToolCall,
    choose_tools,
)
from specjax.server.tools import NAME as FUNCTION_NAME

NOTHING_STORED = "this server stores no answers; give the turns before as items of input"
NO_TOOLS = "because the server has no tools of its own"

TEXT_PART = Object({"text": Text(MAX_TEXT_LENGTH)}, ["text"], is_open=True)  # answers come back with annotations
REFUSAL_PART = Object({"refusal": Text(MAX_TEXT_LENGTH)}, ["refusal"])
CONTENT = Either(
    (
        Text(MAX_TEXT_LENGTH),
        ListOf(
            Tagged(
                "type",
                {"input_text": TEXT_PART, "output_text": TEXT_PART, "text": TEXT_PART, "refusal": REFUSAL_PART},
                noun="one of input_text, output_text, text, refusal, because the model takes nothing else",
            ),
            MAX_CONTENT_PARTS,
            noun="parts of text",
        ),
    )
)
THOUGHTS = ListOf(Object({"text": Text(MAX_TEXT_LENGTH)}, ["text"], is_open=True), MAX_CONTENT_PARTS, noun="parts")
ROLE = Choice(["user", "assistant", "system", "developer"])
ITEMS: dict[str, Object] = {  # open, because items of answers come back with their ids and more
    "message": Object({"role": ROLE, "content": CONTENT}, ["role", "content"], is_open=True),
    "function_call": Object(
        {"call_id": NAME, "name": NAME, "namespace": NAME, "arguments": Text(MAX_TEXT_LENGTH, about="JSON.")},
        ["call_id", "name", "arguments"],
        is_open=True,
    ),
    "function_call_output": Object({"call_id": NAME, "output": CONTENT}, ["call_id", "output"], is_open=True),
    "reasoning": Object({"content": THOUGHTS, "summary": THOUGHTS}, is_open=True, about="For templates that show it."),
}
INPUT = Either(
    (
        Text(MAX_TEXT_LENGTH),
        ListOf(
            Tagged(
                "type",
                ITEMS,
                default="message",
                noun=f"one of {', '.join(ITEMS)}, because the server stores nothing and has no tools of its own",
            ),
            MAX_MESSAGES,
            least=1,
            noun="items",
        ),
    ),
    about="The conversation so far: a text of the user, or items, those of former answers among them.",
)
NAMESPACE = Object(
    {
        "name": FUNCTION_NAME,
        "description": Text(MAX_DESCRIPTION_LENGTH),
        "tools": ListOf(Tagged("type", {"function": FUNCTION}, noun=f"'function', {NO_TOOLS}"), MAX_TOOLS),
    },
    ["name", "tools"],
    about="Functions that the model knows by the name of the namespace, two underscores and their own name.",
)
WEB_SEARCH = Object({}, is_open=True, about="Taken, and not used: the model is not told of it.")
TOOL_KINDS = {"function": FUNCTION, "namespace": NAMESPACE, "web_search": WEB_SEARCH}
CHOSEN = Object({"name": NAME}, ["name"])
TOOL_FIELDS: dict[str, Kind] = {
    "tools": ListOf(
        Tagged("type", TOOL_KINDS, noun=f"'function' or 'namespace', {NO_TOOLS}"),
        MAX_TOOLS,
        about="Functions that the model may call.",
    ),
    "tool_choice": Either(
        (
            Choice(["none", "auto", "required"]),
            Tagged(
                "type",
                {
                    "function": CHOSEN,
                    "allowed_tools": Object(
                        {"mode": MODE, "tools": ListOf(Tagged("type", {"function": CHOSEN}), MAX_TOOLS)},
                        ["mode", "tools"],
                    ),
                },
                noun="'function' or 'allowed_tools'",
            ),
        ),
        about="Whether the answer calls a tool, and which; default: auto.",
    ),
    "parallel_tool_calls": Boolean(about="Whether an answer may have several calls; default: true."),
    "max_tool_calls": IGNORED,  # of tools that a server has
}
FORMAT = Tagged(
    "type",
    {
        "text": Object({}),
        "json_object": Object({}),
        "json_schema": Object(
            {
                "name": LABEL,
                "description": Text(MAX_TEXT_LENGTH),
                "strict": Boolean(about="The text always follows the schema."),
                "schema": SCHEMA,
            },
            ["schema"],
        ),
    },
)
SHARED = ("stream", "user", "safety_identifier", "prompt_cache_key", "store", "service_tier", "priority", "cache_salt")
SHARED += ("request_id",)
INCLUDABLE = [
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # answers of this server never have this field, nor the fields below
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
EFFORT = Choice(
    ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    about="How much to think, for chat templates that can be told.",
)
TEXT = Object({"format": FORMAT, "verbosity": IGNORED}, about="The form of the text, unless the answer is a call.")
REASONING = Object(
    {"effort": EFFORT, "summary": IGNORED, "generate_summary": IGNORED, "context": IGNORED, "mode": IGNORED},
)


@cache
def response(vocab_size: int, max_length: int) -> Object:
    """Return the declaration of a body of /v1/responses.

    Args:
        vocab_size: V of the model.
        max_length: the most tokens of a prompt and its answer.
    """
    fields: dict[str, Kind] = {
        "model": MODEL,
        "input": INPUT,
        "instructions": Text(MAX_TEXT_LENGTH, about="A message of the system before all others."),
        "max_output_tokens": Integer(1, max_length, about="Most tokens of the answer; default: all that fit."),
        "text": TEXT,
        "reasoning": REASONING,
        "include": ListOf(Choice(INCLUDABLE), len(INCLUDABLE), about="Further parts of the answer."),
        "top_logprobs": Integer(0, MAX_TOP_LOGPROBS, about="How many of the likeliest tokens to list for each token."),
        "chat_template_kwargs": TEMPLATE_ARGUMENTS,
        "truncation": Unsupported(["disabled"]),
        "background": Unsupported([False], why=NOTHING_STORED),
        "previous_response_id": Unsupported(why=NOTHING_STORED),
        "conversation": Unsupported(why=NOTHING_STORED),
        "prompt": Unsupported(why=NOTHING_STORED),
        "context_management": Unsupported([[]]),
        **TOOL_FIELDS,
        **{name: ANSWER_FIELDS[name] for name in SHARED},
        "metadata": Free(about="Repeated in the answer."),
        "client_metadata": IGNORED,
        "prompt_cache_options": IGNORED,
        "prompt_cache_retention": IGNORED,
        "stream_options": Object({"include_obfuscation": IGNORED}, about="Only where stream is true."),
    }
    sampling = bodies.sampling_fields(vocab_size, max_length)
    return Object(fields | {name: kind for name, kind in sampling.items() if name != "n"}, ["input"])


def parse_response(body: Any, served: Served) -> Call:
    """Read the body of a request for a response.

    Args:
        body: the parsed JSON.
        served: the model that answers.

    Raises:
        BadRequest: a field is unknown, not supported, of a wrong type or out of its range; or the chat template refuses
            the messages.
    """
    given = protocol.read(response(served.vocab_size, served.max_length), body, served)
    chat = {**given, "messages": _messages(given), **_chat_tools(given)}
    if effort := given.get("reasoning", {}).get("effort"):
        chat["reasoning_effort"] = effort
    tools, schema = choose_tools(chat)
    form = given.get("text", {}).get("format", {"type": "text"})
    constraint = _constraint(form) if schema is None else protocol.schema_constraint(schema, "tool_choice", "tools")
    top = given.get("top_logprobs", 0)
    return protocol.chat_call(
        chat,
        served,
        tools,
        constraint,
        max_tokens=given.get("max_output_tokens"),
        top_logprobs=top if top or "message.output_text.logprobs" in given.get("include", ()) else None,
        repeated={
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "text": {"format": form},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [tool for tool in given.get("tools", ()) if tool["type"] != "web_search"],
            **{name: given.get(name) for name in ("user", "safety_identifier", "prompt_cache_key")},
        },
    )


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return instructions and input as the messages of a chat."""
    messages: list[dict[str, Any]] = []
    if "instructions" in given:
        messages.append({"role": "system", "content": given["instructions"]})
    given_items: Any = given["input"]
    if isinstance(given_items, str):
        given_items = [{"type": "message", "role": "user", "content": given_items}]
    thoughts = ""  # before a message or call of the assistant
    for item in given_items:
        match item["type"]:
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"])})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append(_chat_call(item))
            case "function_call_output":
                content = _text(item["output"])
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "reasoning":
                thoughts = "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        if thoughts and item["type"] in ("message", "function_call"):
            messages[-1] |= {"reasoning": thoughts} if messages[-1]["role"] == "assistant" else {}
            thoughts = ""
    if not messages:
        raise BadRequest("input must have an item that is no reasoning", "input")
    return messages


def _text(content: str | list[dict[str, Any]]) -> str:
    """Return the text of an item; several parts stand on lines of their own."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


def _chat_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call that the assistant made before, as messages have it."""
    name = _full_name(item.get("namespace", ""), item["name"])
    return {"id": item["call_id"], "function": {"name": name, "arguments": item["arguments"]}}


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the functions among the tools of a body, each after its namespace, which is empty for most."""
    found = []
    for tool in tools:
        if tool["type"] == "function":
            found.append(("", tool))
        elif tool["type"] == "namespace":
            found += [(tool["name"], each) for each in tool["tools"]]
    return found


def _full_name(namespace: str, name: str) -> str:
    """Return the name of a function for the model, which knows no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def _chat_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that say the same of its tools."""
    tools = [{**tool, "name": _full_name(space, tool["name"])} for space, tool in _functions(given.get("tools", ()))]
    if len(tools) > MAX_TOOLS:
        raise refusal("tools", f"at most {MAX_TOOLS} functions in all namespaces together", given["tools"])
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        is_one, known = choice["type"] == "function", {tool["name"] for tool in tools}
        named = [choice["name"]] if is_one else [tool["name"] for tool in choice["tools"]]
        for name in named:
            if name not in known:
                path = "tool_choice.name" if is_one else "tool_choice.tools"
                raise refusal(path, "the name of one of the tools", name)
        if not named:
            raise refusal("tool_choice.tools", "one or more of the tools", named)
        chosen = [{"function": {"name": name}} for name in named]
        if is_one:
            choice = {"type": "function", **chosen[0]}
        else:
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": chosen}}
    return {"tools": [{"function": tool} for tool in tools], "tool_choice": choice}


def _constraint(form: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint on a text of this form, None for free text."""
    if form["type"] == "text":
        return None
    schema = form["schema"] if form["type"] == "json_schema" else {"type": "object"}
    return protocol.schema_constraint(schema, "text", "text.format.schema")


class ResponseAnswer:
    """The answer of the Responses protocol, as `streams.Answer`.

    Args:
        call: the request; it has one prompt and one sample.
        served: the model.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._served = call, served
        self._id, self._created = items.new_id("resp", call.request_id), int(time.time())
        self._parts, self._calls = call.parts(call.tools), SentCalls()
        functions = _functions(call.repeated.get("tools", ()))
        self._names = {_full_name(space, tool["name"]): (space, tool["name"]) for space, tool in functions}
        self._num_events = 0
        self._output: list[dict[str, Any]] = []  # items of a stream that are complete
        self._message: dict[str, Any] | None = None  # the item of a stream that text goes to
        self._thought: dict[str, Any] | None = None  # the item of a stream that reasoning goes to
        self._made: dict[str, Any] | None = None  # the item of a stream that arguments of a call go to
        self._reasoning = ""  # of it
        self._all_reasoning = ""  # of all such items
        self._text = ""  # of it
        self._entries: list[dict[str, Any]] = []  # log-probabilities of its tokens
        self._num_entries = 0  # how many of them have been sent

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        completion = result.completions[0]
        reasoning, text, calls, _ = self._call.parts(self._call.tools).whole(completion.text)
        self._all_reasoning = reasoning
        output = [self._call_item(made) for made in calls]
        if text or not calls:
            self._list(completion.token_ids, completion.logprobs)
            message = items.message(
                items.new_id("msg"), items.message_status(completion, calls), [items.part(text, self._entries)]
            )
            output.insert(0, message)
        if reasoning:
            output.insert(0, items.thought(items.new_id("rs"), "completed", reasoning))
        return self._ended(result, output)

    def start(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def feed(self, found: Sequence[tuple[int, Piece]]) -> bytes:
        pieces = [piece for _, piece in found]
        self._list([piece.token_id for piece in pieces], [piece.logprobs or {} for piece in pieces])
        return self._add_parts(*self._parts.feed("".join(piece.text for piece in pieces)))

    def finish(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        completion = result.completions[0]
        reasoning, text, calls, is_cut = self._parts.finish()
        events = self._add_parts(reasoning, text, self._calls.rest(calls)) + self._end_thought()
        has_message = self._message is not None or any(item["type"] == "message" for item in self._output)
        events += b"" if calls or has_message else self._add_text("")
        if self._message is not None:
            events += self._end_message(items.message_status(completion, calls))
        events += self._end_call("incomplete" if is_cut else "completed")
        response = self._ended(result, self._output)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": error.body["error"]["message"]}
        return self._event("response.failed", response=self._response("failed", self._output, error=told))

    def ping(self) -> bytes:
        return COMMENT

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1} | fields, kind)

    def _list(self, tokens: Sequence[int], entries: Sequence[answers.TokenLogProbs] | None) -> None:
        """Note the log-probabilities of tokens, where the request asks for them."""
        if self._call.top_logprobs is not None:
            self._entries += answers.list_chat(self._served, tokens, entries or [], self._call.top_logprobs)

    def _add_parts(self, reasoning: str, text: str, calls: Sequence[CallPart]) -> bytes:
        """Return the events of more of an answer: of the call that is open, then of what follows it."""
        last = -1 if self._made is None else self._calls.last
        events = b"".join(self._add_call(part) for part in calls if part.number == last)
        events += self._add_reasoning(reasoning) + (self._add_text(text) if text else b"")
        return events + b"".join(self._add_call(part) for part in calls if part.number != last)

    def _add_reasoning(self, reasoning: str) -> bytes:
        """Return the events of more reasoning; the first opens an item, after a message or call that is open."""
        if not reasoning:
            return b""
        events = self._end_call() + (b"" if self._message is None else self._end_message("completed"))
        if self._thought is None:
            self._thought = items.thought(items.new_id("rs"), "in_progress", "")
            events += self._event("response.output_item.added", output_index=len(self._output), item=self._thought)
        self._reasoning += reasoning
        self._all_reasoning += reasoning
        place = {"item_id": self._thought["id"], "output_index": len(self._output), "content_index": 0}
        return events + self._event("response.reasoning_text.delta", **place, delta=reasoning)

    def _end_thought(self) -> bytes:
        """Return the end of the item of reasoning that is open, if one is."""
        if self._thought is None:
            return b""
        thought, text = self._thought, self._reasoning
        self._thought, self._reasoning = None, ""
        place = {"item_id": thought["id"], "output_index": len(self._output), "content_index": 0}
        events = self._event("response.reasoning_text.done", **place, text=text)
        return events + self._end_item(items.thought(thought["id"], "completed", text))

    def _place(self) -> dict[str, Any]:
        """Return where the item is that is written now."""
        assert self._message is not None, "text opens it"
        return {"item_id": self._message["id"], "output_index": len(self._output)}

    def _add_text(self, text: str) -> bytes:
        """Return the events of more text of the message, which the first opens."""
        events = self._end_thought() + self._end_call()
        if self._message is None:
            self._message = items.message(items.new_id("msg"), "in_progress", [])
            events += self._event("response.output_item.added", output_index=len(self._output), item=self._message)
            events += self._event(
                "response.content_part.added", **self._place(), content_index=0, part=items.part("", [])
            )
        self._text += text
        new, self._num_entries = self._entries[self._num_entries :], len(self._entries)
        if not text:
            return events
        return events + self._event(
            "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=new
        )

    def _end_message(self, status: str) -> bytes:
        assert self._message is not None, "text opens it"
        part = items.part(self._text, self._entries)
        place = self._place() | {"content_index": 0}
        events = self._event("response.output_text.done", **place, text=self._text, logprobs=self._entries)
        events += self._event("response.content_part.done", **place, part=part)
        item = items.message(self._message["id"], status, [part])
        self._message, self._text = None, ""
        self._entries, self._num_entries = [], 0
        return events + self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call_item(self, made: ToolCall) -> dict[str, Any]:
        """Return a call, with the namespace of its function where that has one."""
        namespace, name = self._names[made.name]
        item = items.function_call(items.new_id("fc"), made._replace(name=name))
        return item | ({"namespace": namespace} if namespace else {})

    def _add_call(self, part: CallPart) -> bytes:
        """Return the events of more of a call; the first opens an item, after others that are open."""
        events = b""
        if self._calls.add(part):
            events = self._end_thought() + self._end_call()
            events += b"" if self._message is None else self._end_message("completed")
            self._made = self._call_item(ToolCall(part.name, "")) | {"status": "in_progress"}
            events += self._event("response.output_item.added", output_index=len(self._output), item=self._made)
        assert self._made is not None, "the first part opens it"
        self._made = self._made | {"arguments": self._made["arguments"] + part.arguments}
        place = {"item_id": self._made["id"], "output_index": len(self._output)}
        return events + self._event("response.function_call_arguments.delta", **place, delta=part.arguments)

    def _end_call(self, status: str = "completed") -> bytes:
        """Return the end of the call that is open, if one is."""
        if self._made is None:
            return b""
        item, self._made = self._made | {"status": status}, None
        place = {"item_id": item["id"], "output_index": len(self._output)}
        told = {"name": item["name"], "arguments": item["arguments"]}
        return self._event("response.function_call_arguments.done", **place, **told) + self._end_item(item)

    def _ended(self, result: Result, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response object of a generation that has come to its end."""
        is_cut = result.completions[0].finish_reason == "length"
        drafts = answers.speculative_decoding([result.metrics])
        return self._response(
            "incomplete" if is_cut else "completed",
            output,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            usage=_usage(self._call, result, self._num_thoughts()),
            **({"metrics": {"speculative_decoding": drafts}} if drafts else {}),
        )

    def _num_thoughts(self) -> int:
        """Return the number of tokens of the reasoning, as the tokenizer would write it."""
        reasoning = self._all_reasoning
        return len(self._served.encode(reasoning, add_special_tokens=False).ids) if reasoning else 0

    def _response(self, status: str, output: Sequence[dict[str, Any]] = (), **fields: Any) -> dict[str, Any]:
        """Return the response object. It repeats fields of the request."""
        params = self._call.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._call.model,
            "output": list(output),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,  # whatever was asked for
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self._call.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None,
            **self._call.repeated,
            **fields,
        }


def _usage(call: Call, result: Result, num_thoughts: int) -> dict[str, Any]:
    counts = answers.usage(call, [result])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": counts["total_tokens"],
    }
