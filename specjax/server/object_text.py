"""The text of a JSON object as it comes, written as `dump` writes the whole object."""

import re

from specjax.server.tool_texts import DECODER, dump

_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r'[^ \t\n\r,:\[\]{}"]+')  # a number or a name, or a fault
_HIGH, _HEX = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}"
_CERTAIN = re.compile(  # characters and escapes; what follows may change the meaning of \ud83d, but of no other
    rf'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|(?!{_HIGH}){_HEX}'
    rf"|{_HIGH}(?:\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|(?=[^\\]|\\[^u]|{_HEX})))+"
)
_BEGUN = re.compile(rf"(?:{_HIGH})?(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?")  # that what follows may complete


class ObjectText:
    """Write a JSON object anew, as it comes.

    The texts that `feed` returns are together the `dump` of the object. A name that an object has twice stays twice.

    Attributes:
        is_whole: whether the object has ended.
        is_wrong: whether the text is no JSON object.
        rest: text that is in nothing returned yet; what follows the object, if that is whole.
    """

    def __init__(self) -> None:
        self.is_whole = self.is_wrong = False
        self.rest = ""
        self._place = 0  # in the rest, where reading goes on
        self._open: list[str] = []  # what closes the objects and lists that are open
        self._next = "object"  # must follow: that, a name, a colon, a value, or what comes after a value
        self._in_text = False  # whether a string is open

    def feed(self, text: str) -> str:
        """Take more of the text, and return the text that it adds."""
        self.rest += text
        found, before = [], -1
        while self._place != before and not (self.is_whole or self.is_wrong):
            before = self._place
            found.append(self._text() if self._in_text else self._step())
        self.rest, self._place = self.rest[self._place :], 0
        return "".join(found)

    def _text(self) -> str:
        """Return more of a string, without the quotation mark that begins it."""
        certain = _CERTAIN.match(self.rest, self._place)
        start, self._place = self._place, certain.end() if certain else self._place
        found = dump(DECODER.decode(f'"{self.rest[start : self._place]}"'))[1:-1]
        if self.rest.startswith('"', self._place):
            self._place += 1
            self._in_text = False
            return found + '"'
        self.is_wrong = not _BEGUN.fullmatch(self.rest, self._place)
        return found

    def _step(self) -> str:
        """Return one thing that is no part of a string, nothing where it is not certain yet."""
        if space := _SPACE.match(self.rest, self._place):
            self._place = space.end()
        first, takes_value = self.rest[self._place : self._place + 1], self._next in ("value", "value or end")
        if not first:
            return ""
        if first == '"' and (takes_value or self._next in ("name", "name or end")):
            self._next, self._in_text = "after" if takes_value else "colon", True
        elif first == "{" and (takes_value or self._next == "object"):
            self._open.append("}")
            self._next = "name or end"
        elif first == "[" and takes_value:
            self._open.append("]")
            self._next = "value or end"
        elif self._open and first == self._open[-1] and self._next in ("after", "name or end", "value or end"):
            self._open.pop()
            self._next, self.is_whole = "after", not self._open
        elif first == ":" and self._next == "colon":
            self._next = "value"
        elif first == "," and self._next == "after":
            self._next = "name" if self._open[-1] == "}" else "value"
        else:
            return self._scalar() if takes_value else self._fail()
        self._place += 1
        return first + " " if first in ":," else first

    def _scalar(self) -> str:
        scalar = _SCALAR.match(self.rest, self._place)
        if scalar is None:
            return self._fail()
        if scalar.end() == len(self.rest):  # more of it may come
            return ""
        try:
            found = dump(DECODER.decode(scalar.group()))
        except ValueError:
            return self._fail()
        self._place, self._next = scalar.end(), "after"
        return found

    def _fail(self) -> str:
        self.is_wrong = True
        return ""
