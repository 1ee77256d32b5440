"""The form of answers of gpt-oss, harmony: messages with a channel each, and calls of tools among them."""

import re

from specjax.server.call_stream import CallPart
from specjax.server.object_text import ObjectText
from specjax.server.parts import Part, Whole, after
from specjax.server.tool_texts import dump, load
from specjax.server.tools import ToolCall, Tools

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = "<|end|>", "<|return|>", "<|call|>", START
FINAL = f"{CHANNEL}final{MESSAGE}"  # header of the message for the user
FUNCTIONS = "functions."  # in front of the names of a request's tools
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


class Harmony:
    """Answers in harmony, whose special tokens stand in their text.

    The channel analysis is reasoning. A message to one of the request's tools is a call, if it is a JSON object. A call
    whose parts have been returned before it broke off is cut. Everything else is text. Messages of one part stand on
    lines of their own.

    Args:
        tools: the tools of the request, None where it has none.
    """

    def __init__(self, tools: Tools | None):
        self._tools = tools
        self._is_single = tools is not None and tools.is_single
        self._held = ""  # text that came and is in no message yet
        self._kind = ""  # "reasoning", "text" or "call"; empty in a header
        self._name = ""  # of the tool that the message calls
        self._begun: set[str] = set()  # parts that have something
        self._is_new = False  # whether nothing of the message has come
        self._body = ""  # of a call
        self._object = ObjectText()  # of its arguments
        self._arguments = ""  # of those, what has been returned
        self._calls: list[ToolCall] = []
        self._parts: list[CallPart] = []  # of calls, since they were returned last
        self._is_cut = False
        self._is_whole = False  # whether the answer comes at once, so that no parts are asked for

    def feed(self, text: str) -> Part:
        self._held += text
        found = {"reasoning": "", "text": ""}
        while self._kind or MESSAGE in self._held:
            if not self._kind:
                header, _, self._held = self._held.partition(MESSAGE)
                self._begin(header)
            end = min((place for one in ENDS if (place := self._held.find(one)) >= 0), default=-1)
            if end < 0:
                certain = len(self._held) - after(self._held, *ENDS)
                self._add(found, self._held[:certain])
                self._held = self._held[certain:]
                break
            self._add(found, self._held[:end])
            self._end(found)
            self._held = self._held[end + next(len(one) for one in ENDS if self._held.startswith(one, end)) :]
        parts, self._parts = self._parts, []
        return Part(**found, calls=parts)

    def finish(self) -> Whole:
        found = {"reasoning": "", "text": ""}
        if self._kind:
            self._add(found, self._held)
            self._end(found)
        elif not self._held.startswith((START, CHANNEL)):  # the answer has no header
            found["text"] = self._held
        return Whole(**found, calls=self._calls[:1] if self._is_single else self._calls, is_cut=self._is_cut)

    def whole(self, text: str) -> Whole:
        found = Harmony(self._tools)
        found._is_whole = True
        first, last = found.feed(text), found.finish()
        return Whole(first.reasoning + last.reasoning, first.text + last.text, last.calls)

    def _begin(self, header: str) -> None:
        """Begin a message."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._name = "" if recipient is None else recipient.group(1).removeprefix(FUNCTIONS)
        if self._tools is not None and self._name in self._tools.names:
            self._kind, self._object, self._arguments = "call", ObjectText(), ""
        else:
            self._kind = "reasoning" if channel is not None and channel.group(1) == "analysis" else "text"
        self._is_new = True

    def _add(self, found: dict[str, str], text: str) -> None:
        """Add text to the message that is open."""
        if self._kind == "call":
            self._body += text
            is_told = not self._is_whole and not (self._is_single and self._calls)
            if is_told and (new := self._object.feed(text)):
                self._parts.append(CallPart(len(self._calls), self._name, new))
                self._arguments += new
        elif text:
            if self._is_new and self._kind in self._begun:
                found[self._kind] += "\n"
            found[self._kind] += text
            self._begun.add(self._kind)
            self._is_new = False

    def _end(self, found: dict[str, str]) -> None:
        """End the message that is open; a call whose arguments are no object is text."""
        if self._kind == "call":
            body, self._body = self._body, ""
            values, made = load(body), self._object
            if self._arguments:
                self._calls.append(ToolCall(self._name, self._arguments))
                self._is_cut |= not made.is_whole
                body = made.rest.strip() if made.is_whole or made.is_wrong else ""
            elif isinstance(values, dict):
                self._calls.append(ToolCall(self._name, dump(values)))
                body = ""
            self._kind, self._is_new = "text", True
            self._add(found, body)
        self._kind = ""
