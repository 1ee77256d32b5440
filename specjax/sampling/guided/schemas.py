"""Regular expressions of JSON schemas. outlines-core makes them, but for parts that it does not read as they are meant.

These are schemas that allow any value, several schemas in `allOf`, bounds of numbers, and patterns and formats of
strings, which it lets end the string that they are in. Some it gets as other schemas that mean the same. For others
it gets a constant, in whose place the right expression is put.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_PLAIN = [{"type": kind} for kind in ("string", "number", "boolean", "null")]


def _with_holders(values: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of plain values, and of lists and objects of some values."""
    lists, objects = {"type": "array", "items": values}, {"type": "object", "additionalProperties": values}
    return {"anyOf": [*_PLAIN, lists, objects]}


ANY = _with_holders(_with_holders({"anyOf": _PLAIN}))  # each further level makes a grammar four times as large
FAR = 10**15
CHARACTER = r'[^"\\\x00-\x1F\x7F-\x9F]'  # of a string, but for escapes
_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
FORMATS = {  # others are notes, and allow any string
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_OF_OBJECTS = ("properties", "required", "additionalProperties", "minProperties", "maxProperties")
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")
_OF_STRINGS = ("pattern", "minLength", "maxLength")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF = {"object": _OF_OBJECTS, "array": _OF_ARRAYS, "string": _OF_STRINGS, "number": _OF_NUMBERS}  # keywords of one type
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # keywords that hold schemas
_DEFINITIONS = ("$defs", "definitions")  # that hold schemas by names
_KINDS = ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf")  # one of them says which values are meant
_NO_OBJECTS = {*_KINDS, *_OF_ARRAYS, *_OF_STRINGS, *_OF_NUMBERS} - {"type"}  # of no schema that `allOf` merges
_ESCAPED = r'\\["\\bfnrt]'  # a character of a string as an escape
_CLASSES = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]", r"\D": "[^0-9]", r"\W": "[^A-Za-z0-9_]"}  # of JSON schemas, in ASCII
_PARTS = re.compile(r"\\[pPux]\{[^}]*\}|\\x..|\\u....|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def pattern_of(schema: Mapping[str, Any]) -> str:
    """Return the regular expression of the JSON texts of a schema.

    Raises:
        ValueError: the schema is not supported.
    """
    from outlines_core.json_schema import build_regex_from_schema  # pyright: ignore[reportMissingImports]

    try:
        text = _text(schema)
        stem = "part"
        while stem in text:
            stem += "x"
        reader = _Reader(schema, stem)
        found = build_regex_from_schema(json.dumps(reader.rewritten(schema)))
    except RecursionError:
        raise ValueError("schema must be of few levels, without an allOf that holds itself") from None
    for name, part in reader.parts.items():
        found = found.replace(f'"{name}"', part)
    return found


def _text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"schema must hold values of JSON, with finite numbers: {error}") from None


class _Reader:
    """Rewrite a schema for outlines-core.

    Args:
        root: the whole schema, in which references are looked up.
        stem: begins the constants, and is nowhere in the schema.

    Attributes:
        parts: the expression of each constant.
    """

    def __init__(self, root: Mapping[str, Any], stem: str):
        self._root, self._stem = root, stem
        self.parts: dict[str, str] = {}

    def rewritten(self, schema: Any) -> Any:
        """Return the schema for outlines-core. Other values stay as they are, and are refused there."""
        if schema is False:
            raise ValueError("schema must allow a value, got false")
        if schema is not True and not isinstance(schema, Mapping):
            return schema
        found = {} if schema is True else dict(schema)
        for name in _KINDS:
            if found.get(name) == []:
                raise ValueError(f"{name} must hold one or more items, got []")
        if isinstance(found.get("allOf"), list) and (len(found["allOf"]) > 1 or "properties" in found):
            found = _merged(found, self._root)
        if found.keys().isdisjoint(_KINDS):
            kind = next((kind for kind, names in _OF.items() if not found.keys().isdisjoint(names)), None)
            found |= ANY if kind is None else {"type": kind}
        is_listed = not found.keys().isdisjoint(("enum", "const", "$ref"))
        if isinstance(found.get("type"), list) and not is_listed:
            found = self._of_several(found)
        elif not is_listed and (part := _expression(found)) is not None:
            name = f"{self._stem}{len(self.parts)}x"
            self.parts[name] = part
            return {"const": name}
        if found.get("type") == "object" and found.keys().isdisjoint(_KINDS[1:]):
            found = _with_required(found)
        if isinstance(found.get("properties"), Mapping):
            found["properties"] = {_inside(name): self.rewritten(one) for name, one in found["properties"].items()}
        if isinstance(found.get("required"), list):
            found["required"] = [_inside(name) if isinstance(name, str) else name for name in found["required"]]
        if "prefixItems" in found:  # a list has these alone
            found.pop("items", None)
        if "items" in found:
            found["items"] = self.rewritten(found["items"])
        if isinstance(found.get("additionalProperties"), Mapping):
            found["additionalProperties"] = self.rewritten(found["additionalProperties"])
        for name in _LISTS:
            if isinstance(found.get(name), list):
                found[name] = [self.rewritten(one) for one in found[name]]
        for name in _DEFINITIONS:
            if isinstance(found.get(name), Mapping):
                found[name] = {key: self.rewritten(one) for key, one in found[name].items()}
        return {name: value for name, value in found.items() if name != "format"}

    def _of_several(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema with an alternative for each of its types."""
        shared = {name: value for name, value in schema.items() if name != "type" and name not in _DEFINITIONS}
        found = {name: schema[name] for name in _DEFINITIONS if name in schema}
        found["anyOf"] = []
        for kind in schema["type"]:
            own = "number" if kind == "integer" else kind
            others = {name for each, names in _OF.items() if each != own for name in names}
            one = {name: value for name, value in shared.items() if name not in others}
            found["anyOf"].append(one | {"type": kind})
        return found


def _inside(name: str) -> str:
    """Return the name of a property as a JSON text has it between quotation marks."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _with_required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with each required name among its properties, or with none if it allows none.

    Raises:
        ValueError: a required name is none of the properties, and the object allows no others.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return dict(schema)
    rest = schema.get("additionalProperties", True)
    added = {name: rest for name in required if isinstance(name, str) and name not in properties}
    if added and rest is False:
        raise ValueError(f"required must name properties of the object, got {next(iter(added))!r}")
    return {**schema, "properties": properties | added} if added or rest is False else dict(schema)


def _merged(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return one schema of an object for it and all those in `allOf`."""
    found = {name: value for name, value in schema.items() if name != "allOf"}
    properties, required = {}, []
    for each in [found, *(_resolved(each, root) for each in schema["allOf"])]:
        if isinstance(each.get("allOf"), list):
            each = _merged(each, root)
        given, needed = each.get("properties", {}), each.get("required", [])
        is_object = each.get("type", "object") == "object" and _NO_OBJECTS.isdisjoint(each)
        if not (is_object and isinstance(given, Mapping) and isinstance(needed, list)):
            raise ValueError(f"allOf must hold one schema, or schemas of objects, got one of {list(each)}")
        differing = [name for name in properties.keys() & given.keys() if given[name] != properties[name]]
        if differing:
            raise ValueError(
                f"allOf must hold objects that agree about a property, got two schemas of {differing[0]!r}"
            )
        properties |= given
        required += needed
    return found | {"type": "object", "properties": properties, "required": required}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one that its `$ref` names."""
    if not isinstance(schema, Mapping) or "$ref" not in schema:
        return schema if isinstance(schema, Mapping) else {}
    found: Any = root
    for name in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _expression(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of a string or number that outlines-core does not make, None for others."""
    makers = {"string": _string, "integer": _integer, "number": _number}
    kind = schema.get("type")
    return makers[kind](schema) if isinstance(kind, str) and kind in makers else None


def _string(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of a string with a pattern or a format, None for others."""
    pattern, form = schema.get("pattern"), FORMATS.get(str(schema.get("format")))
    if isinstance(pattern, str) and not (form and _LOOK_AROUND.search(pattern)):
        return f'"{_in_string(pattern)}"'
    return form and f'"{form}"'


def _in_string(pattern: str) -> str:
    """Return a pattern that matches texts inside of a JSON string, where some characters are escapes.

    Each alternative matches the whole string; but one with an anchor at one end alone leaves the other end open.
    """
    alternatives, depth = [[]], 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if depth < 0:  # it would end the group below
            raise ValueError(f"pattern must be a regular expression, got {pattern!r}")
        if part == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    return f"(?:{'|'.join(map(_alternative, alternatives))})"


def _alternative(parts: list[str]) -> str:
    """Return one alternative of `_in_string`."""
    is_begun, is_ended = parts[:1] == ["^"], parts[-1:] == ["$"]
    found = []
    for part in parts[is_begun : len(parts) - is_ended]:
        if part[0] == "[" and len(part) > 1:
            found.append(_class(part))
        elif part == '"' or (part[0] == "\\" and part[1:2] in tuple('"\\afnrtvxudDwWsSpP')):
            found.append(_class(f"[{part}]"))
        else:
            found.append(_class(r"[^\n\r]") if part == "." else part)
    rest = f"(?:{CHARACTER}|{_ESCAPED})*"
    before, after = rest if is_ended and not is_begun else "", rest if is_begun and not is_ended else ""
    return f"{before}{''.join(found)}{after}"


def _class(text: str) -> str:
    """Return the expression of a class of characters inside of a JSON string."""
    text = re.sub(r"\\.|[\[&~]", lambda one: one[0] if len(one[0]) > 1 else rf"\{one[0]}", text[1:-1])
    try:
        matches = re.compile(f"[{text}]", re.ASCII).match
        escapes = [re.escape(_inside(char)) for char in '\b\f\n\r\t"\\' if matches(char)]
    except re.error:  # `re` does not know the classes of Unicode
        escapes = []
    inside = re.sub(r"\\.", lambda one: _CLASSES.get(one[0], one[0]), text)
    return f"(?:{'|'.join([f'[[{inside}]&&{CHARACTER}]', *escapes])})"


def _integer(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of the integers within bounds, None without any."""
    (low, is_low_out), (high, is_high_out) = _bounds(schema)
    if low is None and high is None:
        return None
    low = None if low is None else math.floor(low) + 1 if is_low_out else math.ceil(low)
    high = None if high is None else math.ceil(high) - 1 if is_high_out else math.floor(high)
    if low is not None and high is not None and low > high:
        raise ValueError(f"an integer must have a minimum of at most its maximum {high}, got {low}")
    found = []
    if low is None or low < 0:
        most = None if low is None else -low
        found.append(f"-{_naturals(1 if high is None else max(1, -high), most)}")
    if high is None or high >= 0:
        found.append(_naturals(max(low or 0, 0), high))
    return f"(?:{'|'.join(found)})"


def _number(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of the numbers within bounds, without exponents, None without any."""
    (low, is_low_out), (high, is_high_out) = _bounds(schema)
    if low is None and high is None:
        return None
    if low is not None and high is not None and (low > high or (low == high and (is_low_out or is_high_out))):
        raise ValueError(f"a number must have a minimum of at most its maximum {high}, got {low}")
    found = []
    if low is None or low < 0:
        is_out = is_high_out and high is not None and high <= 0
        most = None if low is None else -low
        found.append(f"-{_positive(0 if high is None else max(-high, 0), most, is_out, is_low_out)}")
    if high is None or high > 0 or (high == 0 and not is_high_out):
        is_out = is_low_out and low is not None and low >= 0
        found.append(_positive(max(low or 0, 0), high, is_out, is_high_out))
    return f"(?:{'|'.join(found)})"


def _positive(low: float, high: float | None, is_low_out: bool, is_high_out: bool) -> str:
    """Return the expression of the numbers from `low` >= 0 to `high`, without those that are out."""
    first, low_digits = _parts(low)
    last, high_digits = (None, None) if high is None else _parts(high)
    if first == last:
        return _with_digits(rf"{first}", low_digits, high_digits, is_low_out, is_high_out, r"\.")
    found = []
    if low_digits or is_low_out:
        found.append(_with_digits(rf"{first}", low_digits, None, is_low_out, False, r"\."))
        first += 1
    if last is None or first < last:
        found.append(rf"{_naturals(first, None if last is None else last - 1)}(?:\.[0-9]+)?")
    if last is not None:
        found.append(_with_digits(rf"{last}", "", high_digits, False, is_high_out, r"\."))
    return f"(?:{'|'.join(each for each in found if each)})"


def _parts(number: float) -> tuple[int, str]:
    """Return the integer of a number >= 0, and its digits after the point, without zeros at the end."""
    whole, _, digits = f"{abs(Decimal(str(number))):f}".partition(".")
    return int(whole), digits.rstrip("0")


def _with_digits(
    before: str, low: str, high: str | None, is_low_out: bool, is_high_out: bool, between: str = ""
) -> str:
    """Return the expression of a text, and then digits after the point from `low` to `high`; empty if there are none.

    Digits end in no zeros; `high` is None where all are small enough. `between` is a text in front of the digits.
    """
    is_end = not (low or is_low_out or (high == "" and is_high_out))
    digits = _digits(low, high, is_low_out, is_high_out)
    if not digits:
        return before if is_end else ""
    return f"{before}(?:{between}(?:{digits})){'?' if is_end else ''}"


def _digits(low: str, high: str | None, is_low_out: bool, is_high_out: bool) -> str:
    """Return the expression of one or more digits as in `_with_digits`."""
    if high == "":
        return "" if low or is_low_out or is_high_out else "0+"
    if high is None and not low:
        return "[0-9]*[1-9][0-9]*" if is_low_out else "[0-9]+"
    first, last = int(low[:1] or 0), 10 if high is None else int(high[0])
    if high is not None and first == last:
        return _with_digits(f"{first}", low[1:], high[1:], is_low_out, is_high_out)
    found = [_with_digits(f"{first}", low[1:], None, is_low_out, False)]
    if first + 1 < last:
        found.append(f"[{first + 1}-{last - 1}][0-9]*")
    if high is not None:
        found.append(_with_digits(f"{last}", "", high[1:], False, is_high_out))
    return "|".join(each for each in found if each)


def _bounds(schema: Mapping[str, Any]) -> tuple[tuple[float | None, bool], tuple[float | None, bool]]:
    """Return the tightest bound of each side, None where it has none, and whether the bound itself is out.

    Far bounds, as of the integers that a float has exactly, become 15 digits: each more makes a grammar larger.
    """
    low, is_low_out = max(_given_bounds(schema, "inimum"), default=(None, False))
    lowest_first = sorted(_given_bounds(schema, "aximum"), key=lambda one: (one[0], not one[1]))
    high, is_high_out = next(iter(lowest_first), (None, False))
    is_high_far, is_low_far = high is not None and high >= FAR, low is not None and low <= -FAR
    if is_high_far and (low is None or low < FAR):
        high, is_high_out = FAR - 1, False
    if is_low_far and (high is None or high > -FAR):
        low, is_low_out = 1 - FAR, False
    return (low, is_low_out), (high, is_high_out)


def _given_bounds(schema: Mapping[str, Any], name: str) -> list[tuple[float, bool]]:
    """Return the bounds of a side, each with whether it is out, which old schemas say beside it."""
    inner, outer = schema.get(f"m{name}"), schema.get(f"exclusiveM{name}")
    given: list[tuple[Any, bool]] = [(inner, outer is True), (outer, True)]
    return [(value, is_out) for value, is_out in given if _is_finite(value)]


def _is_finite(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _naturals(low: int, high: int | None) -> str:
    """Return the expression of the integers from `low` >= 0 to `high`."""
    found = ["0"] if low == 0 else []
    low, last = max(low, 1), None if high is None else len(str(high))
    first = len(str(low))  # digits of the first number, and then of the numbers of which all are meant
    if low > 10 ** (first - 1):
        top = 10**first - 1 if high is None else min(10**first - 1, high)
        found.append(_between(str(low), str(top)))
        first += 1
    if high is None or last is None:
        found.append(f"[1-9][0-9]{{{first - 1},}}")
        return f"(?:{'|'.join(found)})"
    end = last if high == 10**last - 1 else last - 1
    if first <= end:
        found.append(f"[1-9][0-9]{{{first - 1},{end - 1}}}")
    if first <= last != end and high >= low:
        found.append(_between(str(10 ** (last - 1)), str(high)))
    return f"(?:{'|'.join(found)})"


def _between(low: str, high: str) -> str:
    """Return the expression of the numbers between two of as many digits."""
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _between(low[1:], high[1:])
    size, first, last, found = len(low) - 1, int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        found.append(low[0] + _between(low[1:], "9" * size))
        first += 1
    if high[1:].strip("9"):
        found.append(high[0] + _between("0" * size, high[1:]))
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}]" + (f"[0-9]{{{size}}}" if size else ""))
    return f"(?:{'|'.join(found)})"
