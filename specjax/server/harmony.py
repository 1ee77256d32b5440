"""The form of answers of gpt-oss, harmony: messages with a channel each, and calls of tools among them."""

import json
import re

from specjax.server.parts import Part, Whole, after
from specjax.server.tool_texts import load
from specjax.server.tools import ToolCall, Tools

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = "<|end|>", "<|return|>", "<|call|>", START
FINAL = f"{CHANNEL}final{MESSAGE}"  # header of the message for the user
FUNCTIONS = "functions."  # in front of the names of a request's tools
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


class Harmony:
    """Answers in harmony, whose special tokens stand in their text.

    The channel analysis is reasoning. A message to one of the request's tools is a call, if it is a JSON object.
    Everything else is text. Messages of one part stand on lines of their own.

    Args:
        tools: the tools of the request, None where it has none.
    """

    def __init__(self, tools: Tools | None):
        self._tools = tools
        self._held = ""  # text that came and is in no message yet
        self._kind = ""  # "reasoning", "text" or the name of a tool; empty in a header
        self._begun: set[str] = set()  # parts that have something
        self._is_new = False  # whether nothing of the message has come
        self._body = ""  # of a call
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> Part:
        self._held += text
        found = {"reasoning": "", "text": ""}
        while self._kind or MESSAGE in self._held:
            if not self._kind:
                header, _, self._held = self._held.partition(MESSAGE)
                self._kind, self._is_new = self._kind_of(header), True
            end = min((place for one in ENDS if (place := self._held.find(one)) >= 0), default=-1)
            if end < 0:
                certain = len(self._held) - after(self._held, *ENDS)
                self._add(found, self._held[:certain])
                self._held = self._held[certain:]
                break
            self._add(found, self._held[:end])
            self._end(found)
            self._held = self._held[end + next(len(one) for one in ENDS if self._held.startswith(one, end)) :]
        return Part(**found)

    def finish(self) -> Whole:
        found = {"reasoning": "", "text": ""}
        if self._kind:
            self._add(found, self._held)
            self._end(found)
        elif not self._held.startswith((START, CHANNEL)):  # the answer has no header
            found["text"] = self._held
        is_single = self._tools is not None and self._tools.is_single
        return Whole(**found, calls=self._calls[:1] if is_single else self._calls)

    def whole(self, text: str) -> Whole:
        found = Harmony(self._tools)
        first, last = found.feed(text), found.finish()
        return Whole(first.reasoning + last.reasoning, first.text + last.text, last.calls)

    def _kind_of(self, header: str) -> str:
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient.group(1).removeprefix(FUNCTIONS)
        if self._tools is not None and name in self._tools.names:
            return name
        channel = _CHANNEL.search(header)
        return "reasoning" if channel is not None and channel.group(1) == "analysis" else "text"

    def _add(self, found: dict[str, str], text: str) -> None:
        """Add text to the message that is open."""
        if self._kind not in found:
            self._body += text
        elif text:
            if self._is_new and self._kind in self._begun:
                found[self._kind] += "\n"
            found[self._kind] += text
            self._begun.add(self._kind)
            self._is_new = False

    def _end(self, found: dict[str, str]) -> None:
        """End the message that is open; a call whose arguments are no object is text."""
        name, body, self._body = self._kind, self._body, ""
        if name not in found:
            arguments = load(body)
            if isinstance(arguments, dict):
                self._calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
            else:
                self._kind, self._is_new = "text", True
                self._add(found, body)
        self._kind = ""
