"""Read the fields of a JSON object that a client sent, each with a check that names it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from specjax.validation import is_integer

MAX_DEPTH = 64  # levels of lists and objects in a body
_MISSING = object()


class BadRequest(ValueError):
    """A request that cannot be served, in words for the client.

    Attributes:
        message: what was expected and what came.
        param: the field that is wrong, None where no single one is.
        code: a word for programs, such as "unknown_parameter", or None.
        status: the HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shown(value: Any) -> str:
    """Return a value for a message, cut to a length that fits a line."""
    text = repr(value[:100]) if isinstance(value, str | list) else repr(value) if is_small(value) else ""
    return f"{type(value).__name__} {text[:100]}".rstrip()


def is_small(value: Any) -> bool:
    """Return whether a value is a number, a boolean or null whose text is short."""
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**30)


def check_tree(value: Any, name: str = "body", param: str | None = None) -> None:
    """Check what holds for all values: strings that UTF-8 can encode, finite numbers, and few levels.

    Raises:
        BadRequest: a value is not so.
    """
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise BadRequest(f"{name} must have at most {MAX_DEPTH} levels of lists and objects", param)
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError as error:
                got = f"{item[error.start]!r} at {error.start}"
                raise BadRequest(f"{name} must have strings that UTF-8 can encode, got {got}", param) from None
        elif isinstance(item, float) and not math.isfinite(item):
            raise BadRequest(f"{name} must have finite numbers, got {item}", param)
        elif isinstance(item, dict):
            pending += [(each, depth + 1) for pair in item.items() for each in pair]
        elif isinstance(item, list):
            pending += [(each, depth + 1) for each in item]


class Fields:
    """Read the fields of a JSON object. A null field counts as absent; `finish` refuses fields that nobody read.

    Every method raises BadRequest where a value is not as it says.

    Args:
        value: the JSON value, which must be an object.
        path: the name of the object in messages, empty for the body.
    """

    def __init__(self, value: Any, path: str = ""):
        if not isinstance(value, dict):
            raise BadRequest(f"{path or 'the body'} must be an object, got {shown(value)}", path or None)
        self._values, self._path, self._read = value, path, set()

    def name(self, field: str) -> str:
        """Return the name of a field in messages."""
        return f"{self._path}.{field}" if self._path else field

    def refuse(self, field: str, expected: str, code: str | None = None) -> BadRequest:
        """Return the error that says what a field must be."""
        name = self.name(field)
        return BadRequest(f"{name} must be {expected}, got {shown(self._values.get(field))}", name, code)

    def any(self, field: str) -> Any:
        """Return the value of a field, None where it is absent."""
        self._read.add(field)
        return self._values.get(field)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.any(field)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return default if value is None else value

    def integer(self, field: str, least: int, most: int) -> int | None:
        value = self.any(field)
        if value is not None and not (is_integer(value) and least <= value <= most):
            raise self.refuse(field, f"an integer in [{least}, {most}]")
        return value

    def number(self, field: str, least: float, most: float) -> float | None:
        value = self.any(field)
        is_number = is_integer(value) or isinstance(value, float)
        if value is not None and not (is_number and least <= value <= most):
            raise self.refuse(field, f"a number in [{least:g}, {most:g}]")
        return value

    def text(self, field: str, max_length: int) -> str | None:
        value = self.any(field)
        if value is not None and not (isinstance(value, str) and len(value) <= max_length):
            raise self.refuse(field, f"a string of at most {max_length} characters")
        return value

    def choice(self, field: str, choices: Sequence[str]) -> str | None:
        value = self.any(field)
        if value is not None and value not in choices:
            raise self.refuse(field, f"one of {', '.join(choices)}")
        return value

    def items(self, field: str, most: int) -> list[Any] | None:
        value = self.any(field)
        if value is not None and not (isinstance(value, list) and len(value) <= most):
            raise self.refuse(field, f"a list of at most {most} items")
        return value

    def object(self, field: str) -> dict[str, Any] | None:
        value = self.any(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, "an object")
        return value

    def fields(self, field: str) -> "Fields | None":
        """Return a reader of a field that is an object, None where it is absent."""
        value = self.object(field)
        return None if value is None else Fields(value, self.name(field))

    def readers(self, field: str, most: int) -> "Iterator[Fields]":
        """Return a reader of each object of a list."""
        for i, item in enumerate(self.items(field, most) or ()):
            yield Fields(item, f"{self.name(field)}[{i}]")

    def require(self, field: str, expected: str) -> Any:
        """Return the value of a field that must not be absent."""
        value = self.any(field)
        if value is None:
            name = self.name(field)
            raise BadRequest(f"{name} must be {expected}, and it is missing", name, "missing_required_parameter")
        return value

    def neutral(self, field: str, *values: Any) -> None:
        """Refuse a field that is known and not supported, unless it has one of the values that ask for nothing."""
        value = self.any(field)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            raise BadRequest(f"{self.name(field)} is not supported", self.name(field), "unsupported_parameter")

    def finish(self) -> None:
        """Refuse fields that nobody has read."""
        for field in self._values:
            if field not in self._read:
                name = self.name(field[:100])
                raise BadRequest(f"unknown field {name!r}", name, "unknown_parameter")
