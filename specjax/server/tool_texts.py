"""Calls of tools in the text of an answer, in the forms that models write.

* An object with "name" and "arguments", or "parameters", as Qwen3, Hermes and Llama write it.
* The name and an object of the arguments, as Mistral Small 3.2 and Ministral 3 write it.
* `<function=NAME>`, with a `<parameter=KEY>` for each argument, as Qwen3-Coder, Qwen3.5, Nemotron 3 and
  Seed-OSS write it.
* The name and pairs of `<arg_key>` and `<arg_value>`, as GLM-4.5 writes it.
* `<invoke name="NAME">`, with a `<parameter name="KEY">` for each argument, as MiniMax-M2 writes it.
* The name and an object of the arguments between tags of their own, as Kimi K2 and DeepSeek V3 and V3.1 write it.
* `NAME(KEY=VALUE, ...)`, as OLMo 3 writes it, and LFM2 in a list.

In the forms of tags the values are texts. Where the JSON schema of a tool gives an argument another type, the text
is read as JSON.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn


class Elements(NamedTuple):
    """How a text has named contents, one after another.

    A content may hold the tag that ends it: the end is where another element begins, or where the text ends.
    """

    begin: re.Pattern  # whose group is the name
    end: re.Pattern

    def of(self, text: str) -> list[tuple[str, str]] | None:
        """Return the names and contents; None if the text holds anything else. It takes linear time."""
        found, place = [], 0
        while place < len(text):
            begin = self.begin.match(text, place)
            end = begin and self.end.search(text, begin.end())
            if not begin or not end:
                return None
            found.append((begin.group(1).strip(), text[begin.end() : end.start()]))
            place = end.end()
        return found


FUNCTIONS = Elements(re.compile(r"<function=([^>]+)>"), re.compile(r"</function>\s*(?=<function=|\Z)"))
PARAMETERS = Elements(re.compile(r"<parameter=([^>]+)>"), re.compile(r"</parameter>\s*(?=<parameter=|\Z)"))
INVOKES = Elements(re.compile(r'<invoke name="([^"]+)">'), re.compile(r"</invoke>\s*(?=<invoke name=|\Z)"))
NAMED = Elements(re.compile(r'<parameter name="([^"]+)">'), re.compile(r"</parameter>\s*(?=<parameter name=|\Z)"))
PAIRS = Elements(
    re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>"), re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)")
)
SECTION = Elements(  # with the number of the call after its name
    re.compile(r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>"),
    re.compile(r"<\|tool_call_end\|>\s*(?=<\|tool_call_begin\|>|\Z)"),
)
BAR = "\uff5c"  # in the tags of DeepSeek
FENCED = Elements(  # with a type before the name and a fence around the object, or without both
    re.compile(
        rf"<{BAR}tool▁call▁begin{BAR}>(?:function<{BAR}tool▁sep{BAR}>)?([\w.-]+)\s*(?:<{BAR}tool▁sep{BAR}>|```json)"
    ),
    re.compile(rf"(?:```\s*)?<{BAR}tool▁call▁end{BAR}>\s*(?=<{BAR}tool▁call▁begin{BAR}>|\Z)"),
)
_NAMES = "tool_call", "tool_calls", "minimax:tool_call", "seed:tool_call", "function_calls"
OUTER_TAGS = {  # tags around a call, or around several, with those that close them
    **{f"<{name}>": f"</{name}>" for name in _NAMES},
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    f"<{BAR}tool▁calls▁begin{BAR}>": f"<{BAR}tool▁calls▁end{BAR}>",
}
PREFIXES = ("[TOOL_CALLS]", "<|python_tag|>")  # in front of calls up to the end of an answer
INNER_TAGS = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    f"<{BAR}tool▁call▁begin{BAR}>",
    f"<{BAR}tool▁sep{BAR}>",
    f"<{BAR}tool▁call▁end{BAR}>",
    "[ARGS]",
)
BEGIN, END = re.compile(r"([\w.-]+)\("), re.compile(r"[\s,]*\)[\s,]*")  # of a call in the form of Python
LIST = re.compile(r"\[\s*(.*)\]", re.DOTALL)
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPED = re.compile(r'\\(.)|"', re.DOTALL)  # in such a text
KEY, CONSTANT = re.compile(r"[\s,]*(\w+)\s*=\s*"), re.compile("True|False|None")
NAME = re.compile(r"\s*(?:\[TOOL_CALLS\]\s*)?([A-Za-z0-9_.-]+)\s*(?:\[ARGS\]\s*)?(?={)")
PYTHON = {"True": True, "False": False, "None": None}  # as some templates show values


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which JSON can write, and UTF-8 cannot


def load(text: str) -> Any:
    """Return the value of a JSON text; None if it is no JSON, which has no NaN and no infinite numbers."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


COMPACT = (",", ":")  # between the parts of a JSON text without spaces


def dump(value: Any, separators: tuple[str, str] | None = None) -> str:
    """Return a value as JSON that UTF-8 can encode."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
    return _SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", text)


def calls_of(text: str, schemas: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of the calls between two tags, none if the text holds anything else.

    Args:
        text: one call in any form, or several of one form.
        schemas: the JSON schemas of the arguments of the tools that may be called, by name.
    """
    for functions, arguments in ((FUNCTIONS, PARAMETERS), (INVOKES, NAMED)):
        if found := functions.of(text):
            return _typed([(name, arguments.of(content.strip())) for name, content in found], schemas)
    for form in (SECTION, FENCED):
        if found := form.of(text):
            return _known([(name, load(content)) for name, content in found], schemas)
    name, key, rest = text.partition("<arg_key>")
    if name.strip() in schemas:
        return _typed([(name.strip(), PAIRS.of(key + rest))], schemas)
    return objects_of(text, schemas) or _known(_pythonic(text), schemas)


def objects_of(text: str, schemas: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a text that is an object or a list of objects, none if it holds anything else."""
    value, calls = load(text), []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("name") if isinstance(item, dict) else None
        arguments = item.get("arguments", item.get("parameters")) if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
            return []
        calls.append((name, arguments))
    return calls


def named_objects_of(text: str, schemas: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a text that is names, each before its arguments, none if it holds anything else.

    The tokens `[TOOL_CALLS]` before a name and `[ARGS]` after it may be in the text or not.
    """
    calls, place = [], 0
    while place < len(text):
        begin = NAME.match(text, place)
        if not begin or begin.group(1) not in schemas:
            return []
        try:
            arguments, place = DECODER.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            return []
        calls.append((begin.group(1), arguments))
    return calls


def _pythonic(text: str) -> list[tuple[str, Any]]:
    """Return the names and arguments of a text that is calls in the form of Python, none if it holds anything else.

    The calls may be a list. Values are JSON, or constants and texts of Python.
    """
    listed = LIST.fullmatch(text)
    text, calls, place = listed.group(1) if listed else text, [], 0
    while begin := BEGIN.match(text, place):
        arguments, place = {}, begin.end()
        while key := KEY.match(text, place):
            constant, quoted = CONSTANT.match(text, key.end()), QUOTED.match(text, key.end())
            try:
                if constant:
                    value, place = PYTHON[constant.group()], constant.end()
                elif quoted:
                    value, place = DECODER.decode(f'"{_ESCAPED.sub(_as_json, quoted.group(1))}"'), quoted.end()
                else:
                    value, place = DECODER.raw_decode(text, key.end())
            except (ValueError, RecursionError):
                return []
            arguments[key.group(1)] = value
        end = END.match(text, place)
        if not end:
            return []
        calls.append((begin.group(1), arguments))
        place = end.end()
    return calls if place == len(text) else []


def _as_json(found: re.Match) -> str:
    """Return what stands in a JSON text for an escape, or a quotation mark, of a text in single ones."""
    return '\\"' if found.group(1) is None else "'" if found.group(1) == "'" else found.group()


def _known(calls: list[tuple[str, Any]], schemas: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return calls, none if one has a name that no tool has, or arguments that are no object."""
    return calls if all(name in schemas and isinstance(arguments, dict) for name, arguments in calls) else []


def _typed(
    calls: list[tuple[str, list[tuple[str, str]] | None]], schemas: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Return calls whose arguments are texts with the types of their schemas, none if one is no call of a tool."""
    found = []
    for name, pairs in calls:
        if name not in schemas or pairs is None:
            return []
        schema = schemas[name]
        properties = schema.get("properties") if isinstance(schema, dict) else None
        known = properties if isinstance(properties, dict) else {}
        values = {key: text.removeprefix("\n").removesuffix("\n") for key, text in pairs}
        found.append((name, {key: _value(text, _kinds(known.get(key))) for key, text in values.items()}))
    return found


def _value(text: str, kinds: set[str]) -> Any:
    """Return the value of a text that stands for one of some types of JSON; the text where none is known or fits."""
    bare = text.strip()
    if "string" in kinds:
        return None if "null" in kinds and bare == "null" else text
    if not kinds:
        return text
    if bare in PYTHON:
        return PYTHON[bare]
    value = load(bare)
    return text if value is None and bare != "null" else value


def _kinds(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, as far as it names them."""
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type")
    kinds = {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        kinds |= {kind for part in (parts if isinstance(parts, list) else []) for kind in _kinds(part)}
    values = schema.get("enum")
    if not kinds and isinstance(values, list):
        kinds = {"string" if isinstance(value, str) else "other" for value in values}
    return kinds
