"""Regular expressions of JSON schemas. outlines-core makes them, but for parts that it does not read as they are meant.

These are schemas that allow any value, several schemas in `allOf`, bounds of numbers, and patterns and formats of
strings, which it lets end the string that they are in. Some it gets as other schemas that mean the same. For others
it gets a constant, in whose place the right expression is put.
"""

import json
import math
import re
from collections.abc import Mapping
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
_OF = {"object": _OF_OBJECTS, "array": _OF_ARRAYS, "string": _OF_STRINGS}  # keywords of one type
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # keywords that hold schemas
_DEFINITIONS = ("$defs", "definitions")  # that hold schemas by names
_KINDS = ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf")  # one of them says which values are meant
_ESCAPES = {"n": r"\\n", "t": r"\\t", "r": r"\\r", "f": r"\\f", "\\": r"\\\\", '"': r"\\\""}
_CLASSES = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]", r"\D": "[^0-9]", r"\W": "[^A-Za-z0-9_]"}  # of JSON schemas, in ASCII
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def pattern_of(schema: Mapping[str, Any]) -> str:
    """Return the regular expression of the JSON texts of a schema.

    Raises:
        ValueError: the schema is not supported.
    """
    from outlines_core.json_schema import build_regex_from_schema  # pyright: ignore[reportMissingImports]

    try:
        text = json.dumps(schema)
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
        if isinstance(found.get("allOf"), list) and len(found["allOf"]) > 1:
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
        if isinstance(found.get("properties"), Mapping):
            found["properties"] = {_inside(name): self.rewritten(one) for name, one in found["properties"].items()}
        if isinstance(found.get("required"), list):
            found["required"] = [_inside(name) if isinstance(name, str) else name for name in found["required"]]
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
            others = {name for each, names in _OF.items() if each != kind for name in names}
            one = {name: value for name, value in shared.items() if name not in others}
            found["anyOf"].append(one | {"type": kind})
        return found


def _inside(name: str) -> str:
    """Return the name of a property as a JSON text has it between quotation marks."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _merged(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return one schema of an object for all those in `allOf`."""
    found = {name: value for name, value in schema.items() if name != "allOf"}
    properties, required = dict(found.get("properties", {})), list(found.get("required", ()))
    for each in schema["allOf"]:
        each = _resolved(each, root)
        if "allOf" in each:
            each = _merged(each, root)
        if not isinstance(each.get("properties"), Mapping) or properties.keys() & each["properties"].keys():
            raise ValueError("allOf must hold one schema, or objects whose properties differ")
        properties |= each["properties"]
        required += each.get("required", ())
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
        return f'"(?:{_in_string(pattern)})"'
    return form and f'"{form}"'


def _in_string(pattern: str) -> str:
    r"""Return a pattern that matches texts inside of a JSON string: of characters that need no escape, or escaped.

    `"` and `\\` become escapes; `.` and classes lose characters that would need one. Anchors at its ends are left out.
    """
    found, place = [], 0
    for part in re.finditer(r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        text = part.group()
        if text[0] == "[" and len(text) > 1:
            inside = re.sub(r"\\.|\[", lambda one: r"\[" if one[0] == "[" else _CLASSES.get(one[0], one[0]), text[1:-1])
            found.append(f"[[{inside}]&&{CHARACTER}]")
        elif text[0] == "\\" and text[1:2] in tuple("dDwWsSpP"):
            found.append(f"[{_CLASSES.get(text, text)}&&{CHARACTER}]")
        elif text[0] == "\\":
            found.append(_ESCAPES.get(text[1:], text))
        elif (text, part.start()) != ("^", 0) and (text, part.end()) != ("$", len(pattern)):
            found.append({".": CHARACTER, '"': _ESCAPES['"']}.get(text, text))
        place = part.end()
    return "".join(found) + pattern[place:]


def _integer(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of the integers within bounds, None without any."""
    low, is_low_out = _bound(schema, "inimum", 1)
    high, is_high_out = _bound(schema, "aximum", -1)
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
    """Return the expression of the numbers within bounds, None without any. Fractions of bounds go outwards."""
    low, is_low_out = _bound(schema, "inimum", 1)
    high, is_high_out = _bound(schema, "aximum", -1)
    if low is None and high is None:
        return None
    if low is not None and high is not None and (low > high or (low == high and (is_low_out or is_high_out))):
        raise ValueError(f"a number must have a minimum of at most its maximum {high}, got {low}")
    least, is_low_out = (None, False) if low is None else (math.floor(low), is_low_out and low == math.floor(low))
    most, is_high_out = (None, False) if high is None else (math.ceil(high), is_high_out and high == math.ceil(high))
    found = []
    if least is None or least < 0:
        start = 0 if most is None else max(-most, 0)
        is_out = is_high_out and most is not None and most <= 0
        found.append(f"-{_positive(start, None if least is None else -least, is_out, is_low_out)}")
    if most is None or most > 0 or (most == 0 and not is_high_out):
        start = 0 if least is None else max(least, 0)
        is_out = is_low_out and least is not None and least >= 0
        found.append(_positive(start, most, is_out, is_high_out))
    return f"(?:{'|'.join(found)})"


def _positive(low: int, high: int | None, is_low_out: bool, is_high_out: bool) -> str:
    """Return the expression of the numbers from `low` >= 0 to `high`, without those that are out."""
    found = []
    if is_low_out:
        found.append(rf"{low}\.[0-9]*[1-9][0-9]*" if high is None or high > low else "")
        low += 1
    if high is None or low < high:
        found.append(rf"{_naturals(low, None if high is None else high - 1)}(?:\.[0-9]+)?")
    if high is not None and low <= high and not is_high_out:
        found.append(rf"{high}(?:\.0+)?")
    return f"(?:{'|'.join(each for each in found if each)})"


def _bound(schema: Mapping[str, Any], name: str, sign: int) -> tuple[float | None, bool]:
    """Return the tightest bound of a side, None where it has none, and whether the bound itself is out.

    Far bounds, as of the integers that a float has exactly, become 15 digits: each more makes a grammar larger.
    """
    given: list[tuple[Any, bool]] = [(schema.get(f"m{name}"), False), (schema.get(f"exclusiveM{name}"), True)]
    numbers = [(value, is_out) for value, is_out in given if _is_finite(value)]
    bound, is_out = max(numbers, key=lambda one: (sign * one[0], one[1]), default=(None, False))
    is_far = bound is not None and -sign * bound >= FAR
    return (-sign * (FAR - 1), False) if is_far else (bound, is_out)


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
