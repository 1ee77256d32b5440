"""Anthropic's Messages protocol: answers, whole and as events."""

import json
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


class MessageAnswer:
    """The answer of the Messages protocol, as `streams.Answer`.

    Args:
        call: the request; it has one prompt and one sample.
        served: the model.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._served = call, served
        self._id = f"msg_{uuid.uuid4().hex}"
        self._finder = CallFinder(call.tools)
        self._num_blocks = 0  # blocks of a stream that have ended
        self._has_text = False  # whether a block of text is open

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        completion = result.completions[0]
        text, calls = completion.text, []
        if self._call.tools is not None:
            text, calls = find_calls(completion.text, self._call.tools)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        content += [_tool_use(made, json.loads(made.arguments)) for made in calls]
        drafts = answers.speculative_decoding([result.metrics])
        return {
            **self._message(content, _usage(self._call, result)),
            **_stop(completion, calls),
            **({"metrics": {"speculative_decoding": drafts}} if drafts else {}),
        }

    def start(self) -> bytes:
        # What of the prompt is found in pages of other requests is not known yet; the last events say it.
        usage = {"input_tokens": len(self._call.prompts[0]), "output_tokens": 0}
        return _event("message_start", message=self._message([], usage)) + _event("ping")

    def feed(self, found: Sequence[tuple[int, Piece]]) -> bytes:
        text = self._finder.feed("".join(piece.text for _, piece in found))
        return self._add_text(text) if text else b""

    def finish(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        completion = result.completions[0]
        text, calls = self._finder.finish()
        events = self._add_text(text) if text else b""
        if self._has_text:
            events += self._end_block()
        events += b"".join(map(self._add_call, calls))
        events += _event("message_delta", delta=_stop(completion, calls), usage=_usage(self._call, result))
        return events + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return event(error.anthropic_body, "error")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _add_text(self, text: str) -> bytes:
        """Return the events of more text; the first opens a block."""
        events = b"" if self._has_text else self._start_block({"type": "text", "text": ""})
        self._has_text = True
        return events + self._delta({"type": "text_delta", "text": text})

    def _add_call(self, made: ToolCall) -> bytes:
        delta = {"type": "input_json_delta", "partial_json": made.arguments}
        return self._start_block(_tool_use(made, {})) + self._delta(delta) + self._end_block()

    def _start_block(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _end_block(self) -> bytes:
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, kind)


def _tool_use(made: ToolCall, values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": made.name, "input": values}


def _stop(completion: Completion, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return why an answer ended."""
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(call: Call, result: Result) -> dict[str, int]:
    """Return the counts of tokens; those of the prompt that were found in pages of other requests count apart."""
    counts = answers.usage(call, [result])
    num_cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": counts["completion_tokens"],
    }
