"""The items of a response: messages, reasoning and calls of tools."""

import uuid
from collections.abc import Sequence
from typing import Any

from specjax.engine.requests import Completion
from specjax.server.tools import ToolCall


def new_id(kind: str, name: str = "") -> str:
    """Return an id of a kind, with a random name where none is given."""
    return f"{kind}_{name or uuid.uuid4().hex}"


def message(id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the assistant."""
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def thought(id: str, status: str, text: str) -> dict[str, Any]:
    """Return an item of reasoning."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}


def message_status(completion: Completion, calls: Sequence[ToolCall]) -> str:
    """Return the status of the message of an answer that has ended."""
    return "incomplete" if completion.finish_reason == "length" and not calls else "completed"


def part(text: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a message, with the log-probabilities of its tokens."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(entries)}


def function_call(id: str, made: ToolCall) -> dict[str, Any]:
    """Return a call of a tool."""
    return {
        "id": id,
        "type": "function_call",
        "status": "completed",
        "call_id": new_id("call"),
        "name": made.name,
        "arguments": made.arguments,
    }
