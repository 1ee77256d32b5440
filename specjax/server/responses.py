"""OpenAI's Responses protocol: answers, whole and as events. Nothing is stored: no answer can be asked for later."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from specjax.engine.requests import Completion, Piece, Result
from specjax.server import answers
from specjax.server.errors import ApiError
from specjax.server.protocol import Call
from specjax.server.served import Served
from specjax.server.streams import event
from specjax.server.tools import CallFinder, ToolCall, find_calls


class ResponseAnswer:
    """The answer of the Responses protocol, as `streams.Answer`.

    Args:
        call: the request; it has one prompt and one sample.
        served: the model.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._served = call, served
        self._id, self._created = _new_id("resp"), int(time.time())
        self._finder = CallFinder(call.tools)
        self._num_events = 0
        self._output: list[dict[str, Any]] = []  # items of a stream that are complete
        self._message: dict[str, Any] | None = None  # the item of a stream that text goes to
        self._text = ""  # of it
        self._entries: list[dict[str, Any]] = []  # log-probabilities of its tokens
        self._num_entries = 0  # how many of them have been sent

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        completion = result.completions[0]
        text, calls = completion.text, []
        if self._call.tools is not None:
            text, calls = find_calls(completion.text, self._call.tools)
        output = [_function_call(_new_id("fc"), made) for made in calls]
        if text or not calls:
            self._list(completion.token_ids, completion.logprobs)
            message = _message(_new_id("msg"), _message_status(completion, calls), [_part(text, self._entries)])
            output.insert(0, message)
        return self._ended(result, output)

    def start(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def feed(self, found: Sequence[tuple[int, Piece]]) -> bytes:
        pieces = [piece for _, piece in found]
        self._list([piece.token_id for piece in pieces], [piece.logprobs or {} for piece in pieces])
        text = self._finder.feed("".join(piece.text for piece in pieces))
        return self._add_text(text) if text else b""

    def finish(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        completion = result.completions[0]
        text, calls = self._finder.finish()
        events = self._add_text(text) if text or not (calls or self._message) else b""
        if self._message is not None:
            events += self._end_message(_message_status(completion, calls))
        events += b"".join(map(self._add_call, calls))
        response = self._ended(result, self._output)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": error.body["error"]["message"]}
        return self._event("response.failed", response=self._response("failed", self._output, error=told))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1} | fields, kind)

    def _list(self, tokens: Sequence[int], entries: Sequence[answers.TokenLogProbs] | None) -> None:
        """Note the log-probabilities of tokens, where the request asks for them."""
        if self._call.top_logprobs is not None:
            self._entries += answers.list_chat(self._served, tokens, entries or [], self._call.top_logprobs)

    def _place(self) -> dict[str, Any]:
        """Return where the item is that is written now."""
        assert self._message is not None, "text opens it"
        return {"item_id": self._message["id"], "output_index": len(self._output)}

    def _add_text(self, text: str) -> bytes:
        """Return the events of more text of the message, which the first opens."""
        events = b""
        if self._message is None:
            self._message = _message(_new_id("msg"), "in_progress", [])
            events += self._event("response.output_item.added", output_index=len(self._output), item=self._message)
            events += self._event("response.content_part.added", **self._place(), content_index=0, part=_part("", []))
        self._text += text
        new, self._num_entries = self._entries[self._num_entries :], len(self._entries)
        if not text:
            return events
        return events + self._event(
            "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=new
        )

    def _end_message(self, status: str) -> bytes:
        assert self._message is not None, "text opens it"
        part = _part(self._text, self._entries)
        place = self._place() | {"content_index": 0}
        events = self._event("response.output_text.done", **place, text=self._text, logprobs=self._entries)
        events += self._event("response.content_part.done", **place, part=part)
        item = _message(self._message["id"], status, [part])
        return events + self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _add_call(self, made: ToolCall) -> bytes:
        item = _function_call(_new_id("fc"), made)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        begun = item | {"arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=len(self._output), item=begun)
        events += self._event("response.function_call_arguments.delta", **place, delta=made.arguments)
        events += self._event(
            "response.function_call_arguments.done", **place, name=made.name, arguments=made.arguments
        )
        return events + self._end_item(item)

    def _ended(self, result: Result, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response object of a generation that has come to its end."""
        is_cut = result.completions[0].finish_reason == "length"
        drafts = answers.speculative_decoding([result.metrics])
        return self._response(
            "incomplete" if is_cut else "completed",
            output,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            usage=_usage(self._call, result),
            **({"metrics": {"speculative_decoding": drafts}} if drafts else {}),
        )

    def _response(self, status: str, output: Sequence[dict[str, Any]] = (), **fields: Any) -> dict[str, Any]:
        """Return the response object. What the request said of itself is repeated in it."""
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
            "model": self._served.name,
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


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _message(id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def _message_status(completion: Completion, calls: Sequence[ToolCall]) -> str:
    return "incomplete" if completion.finish_reason == "length" and not calls else "completed"


def _part(text: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(entries)}


def _function_call(id: str, made: ToolCall) -> dict[str, Any]:
    return {
        "id": id,
        "type": "function_call",
        "status": "completed",
        "call_id": _new_id("call"),
        "name": made.name,
        "arguments": made.arguments,
    }


def _usage(call: Call, result: Result) -> dict[str, Any]:
    counts = answers.usage(call, [result])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
