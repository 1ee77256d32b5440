"""Declare the fields of a JSON body: a declaration checks a value, and describes allowed values as a JSON schema.

A body is declared as an `Object` of kinds. `Object.read` returns the values of the fields that are there; a field that
is null counts as absent, and a field that is not declared is an error unless it is null.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specjax.validation import suggestion

MAX_DEPTH = 64  # levels of lists and objects in a body
NOT_SUPPORTED = "Not supported."  # description of fields that must ask for nothing


class BadRequest(ValueError):
    """A request that cannot be served, in words for the client.

    Attributes:
        message: the expected value and the actual one.
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


def refusal(name: str, expected: str, value: Any, code: str | None = None) -> BadRequest:
    """Return the error that names a field, the expected value and the actual one."""
    return BadRequest(f"{name or 'the body'} must be {expected}, got {shown(value)}", name or None, code)


def missing(name: str, expected: str) -> BadRequest:
    """Return the error of a field that must not be absent."""
    return BadRequest(f"{name} must be {expected}, and it is missing", name, "missing_required_parameter")


def shown(value: Any) -> str:
    """Return a value for a message, cut to a length that fits a line."""
    text = repr(value[:100]) if isinstance(value, str | list) else repr(value) if is_small(value) else ""
    return f"{type(value).__name__} {text[:100]}".rstrip()


def is_small(value: Any) -> bool:
    """Return whether a value is a number, a boolean or null whose text is short."""
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**30)


def check_tree(value: Any, name: str = "body", param: str | None = None) -> None:
    """Check rules for all values: strings that UTF-8 can encode, finite numbers, and few levels.

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


def whole(value: Any) -> int | None:
    """Return a number as an integer, None where it is none: 1.0 is an integer in JSON, and true is not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def token_ids(values: list[Any], vocab_size: int) -> list[int] | None:
    """Return the items of a list as token ids, None where one is no integer in [0, vocab_size)."""
    found = values if all(type(each) is int for each in values) else [whole(each) for each in values]
    ids = [each for each in found if each is not None and 0 <= each < vocab_size]
    return ids if len(ids) == len(values) else None


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    Args:
        about: effect of the value, in a sentence for readers of the description.
    """

    about: str = field(default="", kw_only=True)

    @property
    def expected(self) -> str:
        """Name of the expected values in messages."""
        return "any value"

    def takes(self, value: Any) -> bool:
        """Return whether `read` should judge a value, where there are other kinds for other types."""
        return True

    def read(self, value: Any, name: str) -> Any:
        """Return the checked value.

        Args:
            value: the JSON value, not null.
            name: its name in messages, empty for a body.

        Raises:
            BadRequest: the value is not of this kind.
        """
        return value

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the values that `read` takes."""
        return {}


@dataclass(frozen=True)
class Boolean(Kind):
    """True or false."""

    @property
    def expected(self) -> str:
        return "true or false"

    def takes(self, value: Any) -> bool:
        return isinstance(value, bool)

    def read(self, value: Any, name: str) -> bool:
        if not isinstance(value, bool):
            raise refusal(name, self.expected, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Integer(Kind):
    """An integer of a range, which may be written 1.0."""

    least: int
    most: int

    @property
    def expected(self) -> str:
        return f"an integer in [{self.least}, {self.most}]"

    def takes(self, value: Any) -> bool:
        return whole(value) is not None

    def read(self, value: Any, name: str) -> int:
        number = whole(value)
        if number is None or not self.least <= number <= self.most:
            raise refusal(name, self.expected, value)
        return number

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Number(Kind):
    """A number of a range."""

    least: float
    most: float

    @property
    def expected(self) -> str:
        return f"a number in [{self.least:g}, {self.most:g}]"

    def takes(self, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def read(self, value: Any, name: str) -> float:
        if not (self.takes(value) and self.least <= value <= self.most):
            raise refusal(name, self.expected, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Text(Kind):
    """A string."""

    most: int  # characters
    least: int = 0
    pattern: str = ""  # a regular expression for the whole text
    noun: str = ""  # its name in messages

    @property
    def expected(self) -> str:
        length = f"{self.least} to {self.most}" if self.least else f"at most {self.most}"
        return self.noun or f"a string of {length} characters"

    def takes(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, name: str) -> str:
        is_long_enough = isinstance(value, str) and self.least <= len(value) <= self.most
        if not is_long_enough or (self.pattern and not re.fullmatch(self.pattern, value)):
            raise refusal(name, self.expected, value)
        return value

    def schema(self) -> dict[str, Any]:
        pattern = {"pattern": f"^(?:{self.pattern})$"} if self.pattern else {}
        return {"type": "string", "minLength": self.least, "maxLength": self.most} | pattern


@dataclass(frozen=True)
class Choice(Kind):
    """One of several strings."""

    choices: Sequence[str]

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.choices)}"

    def takes(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, name: str) -> str:
        if value not in self.choices:
            raise refusal(name, self.expected, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.choices)}


@dataclass(frozen=True)
class Texts(Kind):
    """A string, or a list of strings, none of them empty; `read` returns a list."""

    most: int  # strings
    max_length: int  # characters of each

    @property
    def expected(self) -> str:
        return f"a string or a list of at most {self.most} strings"

    def read(self, value: Any, name: str) -> list[str]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise refusal(name, self.expected, value)
        if len(values) > self.most:
            raise refusal(name, f"a list of at most {self.most} items", value)
        if not all(isinstance(each, str) and 0 < len(each) <= self.max_length for each in values):
            raise refusal(name, f"made of strings of 1 to {self.max_length} characters", value)
        return values

    def schema(self) -> dict[str, Any]:
        text = {"minLength": 1, "maxLength": self.max_length}
        items = {"type": "string", **text}
        return {"type": ["string", "array"], **text, "items": items, "maxItems": self.most}


@dataclass(frozen=True)
class TokenIds(Kind):
    """A list of token ids."""

    vocab_size: int
    most: int

    @property
    def expected(self) -> str:
        return f"made of token ids in [0, {self.vocab_size})"

    def takes(self, value: Any) -> bool:
        return isinstance(value, list)

    def read(self, value: Any, name: str) -> list[int]:
        if not isinstance(value, list) or len(value) > self.most:
            raise refusal(name, f"a list of at most {self.most} items", value)
        ids = token_ids(value, self.vocab_size)
        if ids is None:
            raise refusal(name, self.expected, value)
        return ids

    def schema(self) -> dict[str, Any]:
        items = {"type": "integer", "minimum": 0, "maximum": self.vocab_size - 1}
        return {"type": "array", "items": items, "maxItems": self.most}


@dataclass(frozen=True)
class ListOf(Kind):
    """A list whose items are of one kind."""

    item: Kind
    most: int
    least: int = 0
    noun: str = "items"  # name of the items in messages

    @property
    def expected(self) -> str:
        return f"a list of one or more {self.noun}" if self.least else f"a list of at most {self.most} {self.noun}"

    def takes(self, value: Any) -> bool:
        return isinstance(value, list)

    def read(self, value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or len(value) < self.least:
            raise refusal(name, self.expected, value)
        if len(value) > self.most:
            raise refusal(name, f"a list of at most {self.most} {self.noun}", value)
        return [self.item.read(each, f"{name}[{i}]") for i, each in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(), "minItems": self.least, "maxItems": self.most}


@dataclass(frozen=True)
class Free(Kind):
    """An object of any fields."""

    most: int | None = None  # fields

    @property
    def expected(self) -> str:
        return "an object"

    def takes(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refusal(name, self.expected, value)
        if self.most is not None and len(value) > self.most:
            raise refusal(name, f"an object of at most {self.most} fields", value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"} | ({} if self.most is None else {"maxProperties": self.most})


@dataclass(frozen=True)
class Object(Kind):
    """An object of declared fields.

    Args:
        fields: the kind of each field.
        required: the fields that must be there.
        is_open: whether other fields are ignored; else they are errors unless they are null.
    """

    fields: dict[str, Kind]
    required: Sequence[str] = ()
    is_open: bool = False

    @property
    def expected(self) -> str:
        return "an object"

    def takes(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, name: str = "") -> dict[str, Any]:
        """Return the values of the declared fields that are there and not null."""
        if not isinstance(value, dict):
            raise refusal(name, self.expected, value)
        prefix, found = f"{name}." if name else "", {}
        for each in self.required:
            if value.get(each) is None:
                raise missing(prefix + each, self.fields[each].expected)
        for key, item in value.items():
            if item is None:
                continue
            path = prefix + key[:100]
            if key in self.fields:
                found[key] = self.fields[key].read(item, path)
            elif not self.is_open:
                message = f"unknown field {path!r}{suggestion(key[:100], self.fields)}"
                raise BadRequest(message, path, "unknown_parameter")
        return found

    def schema(self) -> dict[str, Any]:
        described = {key: described_by(kind) for key, kind in self.fields.items()}
        fields = {key: each if key in self.required else or_null(each) for key, each in described.items()}
        schema: dict[str, Any] = {"type": "object", "properties": fields}
        if self.required:
            schema["required"] = list(self.required)
        return schema | ({} if self.is_open else {"additionalProperties": {"type": "null"}})


@dataclass(frozen=True)
class Tagged(Kind):
    """An object whose fields depend on the value of one of them, the tag."""

    tag: str
    kinds: Mapping[str, Object]  # by the value of the tag, which they do not declare
    noun: str = ""  # expected tag, in messages
    default: str | None = None  # the tag of objects that have none

    @property
    def expected(self) -> str:
        return "an object"

    def takes(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, name: str) -> dict[str, Any]:
        """Return the values of the fields, the tag's value among them."""
        if not isinstance(value, dict):
            raise refusal(name, self.expected, value)
        path, tag = f"{name}.{self.tag}" if name else self.tag, value.get(self.tag)
        tag = self.default if tag is None else tag
        expected = self.noun or f"one of {', '.join(self.kinds)}"
        if tag is None:
            raise missing(path, expected)
        if not isinstance(tag, str) or tag not in self.kinds:
            raise refusal(path, expected, tag, "unsupported_parameter" if self.noun else None)
        others = {key: item for key, item in value.items() if key != self.tag}
        return {self.tag: tag} | self.kinds[tag].read(others, name)

    def schema(self) -> dict[str, Any]:
        alternatives = []
        for tag, kind in self.kinds.items():
            schema = kind.schema()
            named = {"enum": [tag, None]} if tag == self.default else {"const": tag}
            fields = {self.tag: named} | schema["properties"]
            required = [*([] if tag == self.default else [self.tag]), *schema.get("required", ())]
            alternatives.append(schema | {"properties": fields} | ({"required": required} if required else {}))
        return {"oneOf": alternatives}


@dataclass(frozen=True)
class Either(Kind):
    """A value of one of several kinds: the first that takes its type."""

    kinds: Sequence[Kind]

    @property
    def expected(self) -> str:
        return " or ".join(kind.expected for kind in self.kinds)

    def takes(self, value: Any) -> bool:
        return any(kind.takes(value) for kind in self.kinds)

    def read(self, value: Any, name: str) -> Any:
        kind = next((kind for kind in self.kinds if kind.takes(value)), None)
        if kind is None:
            raise refusal(name, self.expected, value)
        return kind.read(value, name)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True)
class Unsupported(Kind):
    """A field that is known and not supported, unless it has one of the values that ask for nothing."""

    values: Sequence[Any] = ()
    why: str = ""  # addition to messages
    about: str = field(default=NOT_SUPPORTED, kw_only=True)

    def read(self, value: Any, name: str) -> Any:
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values):
            why = f": {self.why}" if self.why else ""
            raise BadRequest(f"{name} is not supported{why}", name, "unsupported_parameter")
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.values)}


def described_by(kind: Kind) -> dict[str, Any]:
    """Return the JSON schema of a kind with its description."""
    return kind.schema() | ({"description": kind.about} if kind.about else {})


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that takes null, too, beside the values of `schema`."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return schema | {"type": [*types, "null"]}
    alternatives = next((key for key in ("anyOf", "oneOf") if key in schema), None)
    return schema if alternatives is None else schema | {alternatives: [*schema[alternatives], {"type": "null"}]}
