"""Part the text of an answer, as it comes, into reasoning, text and calls of tools."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specjax.server.call_stream import CallPart
from specjax.server.tools import CallFinder, ToolCall, Tools, find_calls

OPENING, CLOSING = "<think>", "</think>"


class Part(NamedTuple):
    """More of an answer."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[CallPart] = ()


class Whole(NamedTuple):
    """A whole answer."""

    reasoning: str
    text: str
    calls: list[ToolCall]
    is_cut: bool = False  # whether the last call of a stream broke off


class Parts(Protocol):
    """Part one answer. It is `feed` again and again, then `finish`; or `whole` alone."""

    def feed(self, text: str) -> Part:
        """Take more of the answer, and return the parts that are certain now."""
        ...

    def finish(self) -> Whole:
        """Return the rest of the reasoning and of the text, and all calls, also those whose parts have come."""
        ...

    def whole(self, text: str) -> Whole:
        """Return the parts of a whole answer."""
        ...


MakeParts = Callable[[Tools | None], Parts]


def after(text: str, *endings: str) -> int:
    """Return how many characters at the end of a text may be the beginning of one of some endings."""
    beginnings = {ending[:size] for ending in endings for size in range(1, len(ending))}
    return max((len(one) for one in beginnings if text.endswith(one)), default=0)


class Plain:
    """Answers without reasoning.

    Args:
        tools: the tools of the request, None where it has none.
    """

    def __init__(self, tools: Tools | None):
        self._tools, self._finder = tools, CallFinder(tools)

    def feed(self, text: str) -> Part:
        return Part("", self._finder.feed(text), self._finder.take())

    def finish(self) -> Whole:
        return Whole("", *self._finder.finish(), self._finder.is_cut)

    def whole(self, text: str) -> Whole:
        return Whole("", text, []) if self._tools is None else Whole("", *find_calls(text, self._tools))


class Thinking:
    """Answers that begin with reasoning between `<think>` and `</think>`, or do not, as models of Qwen give them.

    White space around the reasoning belongs to neither part.

    Args:
        tools: the tools of the request, None where it has none.
        is_open: whether the prompt has written `<think>` already.
    """

    def __init__(self, tools: Tools | None, is_open: bool = False):
        self._plain = Plain(tools)
        self._is_before, self._is_thinking, self._is_after = not is_open, is_open, False
        self._has_thought = False
        self._held = ""  # text that came and is in no part yet

    def feed(self, text: str) -> Part:
        self._held += text
        reasoning = ""
        if self._is_before and not self._begins():
            return Part()
        if self._is_thinking:
            reasoning = self._thought()
        if self._is_after:
            self._held = self._held.lstrip()
            self._is_after = not self._held
        if self._is_thinking or self._is_after:
            return Part(reasoning)
        text, self._held = self._held, ""
        return self._plain.feed(text)._replace(reasoning=reasoning)

    def finish(self) -> Whole:
        reasoning = self._held.rstrip() if self._is_thinking else ""
        first = self._plain.feed(self._held).text if self._is_before else ""
        last = self._plain.finish()
        return last._replace(reasoning=reasoning, text=first + last.text)

    def whole(self, text: str) -> Whole:
        found = Thinking(None, self._is_thinking)
        first, last = found.feed(text), found.finish()
        return self._plain.whole(first.text + last.text)._replace(reasoning=first.reasoning + last.reasoning)

    def _begins(self) -> bool:
        """Return whether it is known now how the answer begins."""
        start = self._held.lstrip()
        if OPENING.startswith(start):
            self._is_thinking = start == OPENING
            self._is_before = not self._is_thinking
        else:
            self._is_before, self._is_thinking = False, start.startswith(OPENING)
        if self._is_thinking:
            self._held = start.removeprefix(OPENING)
        return not self._is_before

    def _thought(self) -> str:
        """Return the reasoning that is certain, and hold what follows it."""
        held = self._held if self._has_thought else self._held.lstrip()
        reasoning, closing, rest = held.partition(CLOSING)
        if closing:
            self._is_thinking, self._is_after = False, True
        else:
            reasoning = held[: len(held) - after(held, CLOSING)]
        reasoning = reasoning.rstrip()
        self._held = rest if closing else held[len(reasoning) :]
        self._has_thought |= bool(reasoning)
        return reasoning


class Without:
    """Answers whose text has special tokens, because some of them part it; the others are left out.

    Args:
        make: makes what parts the text without the others.
        others: matches one of them. Each comes whole, as it is one token.
        tools: the tools of the request, None where it has none.
    """

    def __init__(self, make: MakeParts, others: re.Pattern, tools: Tools | None):
        self._parts, self._others = make(tools), others

    def feed(self, text: str) -> Part:
        return self._parts.feed(self._others.sub("", text))

    def finish(self) -> Whole:
        return self._parts.finish()

    def whole(self, text: str) -> Whole:
        return self._parts.whole(self._others.sub("", text))
