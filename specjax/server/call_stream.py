"""Calls of tools whose arguments are sent while the model writes them.

The forms of `tool_texts` whose arguments are an object of JSON can be read so. A call begins when its name has come
and the brace that opens its arguments. Calls in other forms are known when the answer has ended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specjax.server.object_text import ObjectText
from specjax.server.tool_texts import FENCED, NAME, OUTER_TAGS, PREFIXES, SECTION


@dataclass(frozen=True)
class CallPart:
    """More of a call of a tool in an answer.

    Attributes:
        number: how many calls of the answer come before it.
        name: the name of the tool.
        arguments: more of the JSON text of the arguments.
    """

    number: int
    name: str
    arguments: str


@dataclass
class BegunCall:
    """A call that has begun.

    Attributes:
        name: the name of the tool.
        object: the object of its arguments.
        texts: the JSON text of the arguments, in parts.
    """

    name: str
    object: ObjectText
    texts: list[str]

    @property
    def arguments(self) -> str:
        """The JSON text of the arguments so far."""
        return "".join(self.texts)


_S = r"[ \t\n\r]*+"
_OPEN, _CLOSE = ("|".join(map(re.escape, tags)) for tags in ((*OUTER_TAGS, *PREFIXES), OUTER_TAGS.values()))
_OBJECT = rf'\{{{_S}"name"{_S}:{_S}"([^"\\]{{1,256}})"{_S},{_S}"(?:arguments|parameters)"{_S}:{_S}(?={{)'
_BETWEEN = rf"(?:\]{_S})?(?:{_CLOSE}){_S}(?:{_OPEN}){_S}(?:\[{_S})?"
_FORMS = [  # the text before the arguments of the first call, and the text between two
    tuple(re.compile(pattern) for pattern in (rf"{_S}(?:{_OPEN})?{begin}", between))
    for begin, between in (
        (rf"{_S}(?:\[{_S})?{_OBJECT}", rf"{_S}}}{_S}(?:,{_S}|{_BETWEEN}){_OBJECT}"),
        (NAME.pattern, NAME.pattern),
        (rf"{_S}{SECTION.begin.pattern}{_S}(?={{)", rf"{_S}{SECTION.end.pattern}{_S}{SECTION.begin.pattern}{_S}(?={{)"),
        (rf"{_S}{FENCED.begin.pattern}{_S}(?={{)", rf"{_S}{FENCED.end.pattern}{_S}{FENCED.begin.pattern}{_S}(?={{)"),
    )
]
_END = re.compile(rf"{_S}}}?{_S}\]?{_S}(?:{_CLOSE})?")  # of the last call


class CallStream:
    """Find calls of tools in an answer as it comes.

    Args:
        names: the tools that may be called.
        is_single: whether only the first call counts.

    Attributes:
        calls: the calls that have begun. Whether they are calls at all is known when the answer has ended.
    """

    def __init__(self, names: Sequence[str], is_single: bool = False):
        self._names, self._is_single = names, is_single
        self.calls: list[BegunCall] = []
        self._place = self._num_fed = 0  # characters of the answer that are behind, and that objects have been fed
        self._forms = _FORMS  # that the next call may have
        self._is_open = self._is_over = False  # whether a call is open, and whether no more are looked for

    def feed(self, text: str, start: int) -> list[CallPart]:
        """Return more of the calls.

        Args:
            text: the answer so far.
            start: the place where the first call may begin.
        """
        self._place = max(self._place, start)
        found: list[CallPart] = []
        while not self._is_over and (self._is_open or self._begin(text)):
            call = self.calls[-1]
            new, self._num_fed = call.object.feed(text[self._num_fed :]), len(text)
            call.texts.append(new)
            if new:  # which the brace is, so each call has a part
                found.append(CallPart(len(self.calls) - 1, call.name, new))
            self._place = len(text) - len(call.object.rest)
            self._is_open = not call.object.is_whole
            self._is_over = call.object.is_wrong or (self._is_single and not self._is_open)
            if self._is_open:
                break
        return found

    def _begin(self, text: str) -> bool:
        """Return whether a call begins at the place where the last one has ended."""
        for begin, between in self._forms:
            if match := begin.match(text, self._place):
                self._is_over = match.group(1) not in self._names
                if not self._is_over:
                    self.calls.append(BegunCall(match.group(1), ObjectText(), []))
                    self._num_fed, self._is_open, self._forms = match.end(), True, [(between, between)]
                return not self._is_over
        return False

    def rest(self, text: str) -> str:
        """Return the text that is in no call, where calls of a whole answer have begun and are none."""
        last = self.calls[-1].object
        if last.is_whole and (end := _END.match(text, self._place)):
            return text[end.end() :].strip()
        return text[self._place :] if last.is_wrong else ""
