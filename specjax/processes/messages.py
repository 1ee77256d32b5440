"""Calls as bytes: a line of JSON and the arrays that it counts. Nothing that is read here can run code.

JSON has numbers, texts, true, false and null as they are, and `[kind, ...]` for everything else:

* `["list", item, ...]`, `["tuple", item, ...]` and `["dict", [key, value], ...]`
* `["record", "module:name", field, ...]`, a NamedTuple or dataclass of specjax
* `["array", dtype, shape]`, an array of the host, whose bytes follow those before it after the JSON
* `["result", call, leaf]`, an array on the devices that an earlier call has returned
"""

import dataclasses
import importlib
import json
import math
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_LENGTH = struct.Struct("!I")  # bytes of the JSON


def encode(value: Any, reference: Callable[[Any], tuple[int, int] | None]) -> bytes:
    """Return a value as bytes.

    Args:
        value: numbers, texts, None, and lists, tuples, dicts, records of specjax and arrays of them.
        reference: a function that returns where a leaf comes from, the number of a call and the number of the leaf in
            its result; None for a leaf that is to be sent as it is.

    Raises:
        ValueError: there is something else in the value, such as a function.
    """
    arrays: list[bytes] = []

    def visit(value: Any) -> Any:
        if isinstance(value, np.float64):  # a float, too, but with a dtype, which programs depend on
            value = np.asarray(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return ["list", *map(visit, value)]
        if isinstance(value, dict):
            return ["dict", *([visit(key), visit(item)] for key, item in value.items())]
        if hasattr(type(value), "_fields"):
            return ["record", _name(type(value)), *map(visit, value)]
        if isinstance(value, tuple):
            return ["tuple", *map(visit, value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (getattr(value, field.name) for field in dataclasses.fields(value))
            return ["record", _name(type(value)), *map(visit, fields)]
        if (found := reference(value)) is not None:
            return ["result", *found]
        if not isinstance(value, np.ndarray | np.generic) or value.dtype.hasobject:
            raise ValueError(
                f"a call that other processes repeat must have numbers and arrays of the host, got {value!r}"
            )
        arrays.append(value.tobytes())
        return ["array", value.dtype.name, list(value.shape)]

    text = json.dumps(visit(value)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(message: bytes, results: Callable[[int, int], Any]) -> Any:
    """Return the value of a message; `results` gives leaves of the results of earlier calls. Arrays are read-only.

    Raises:
        ValueError: the message is damaged.
    """
    (length,) = _LENGTH.unpack_from(message)
    offset = _LENGTH.size + length

    def visit(item: Any) -> Any:
        nonlocal offset
        if not isinstance(item, list):
            return item
        kind, *rest = item
        if kind == "array":
            dtype, shape = np.dtype(rest[0]), tuple(rest[1])
            array = np.frombuffer(message, dtype, math.prod(shape), offset).reshape(shape)
            offset += array.nbytes
            return array
        if kind == "result":
            return results(*rest)
        if kind == "dict":
            return {visit(key): visit(value) for key, value in rest}
        if kind == "record":
            return _record(rest[0])(*map(visit, rest[1:]))
        return {"list": list, "tuple": tuple}[kind](map(visit, rest))

    return visit(json.loads(message[_LENGTH.size : offset]))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _record(name: str) -> type:
    """Return the record of specjax that has a name; nothing else is ever called."""
    module, _, attribute = name.partition(":")
    if module.split(".")[0] != "specjax":
        raise ValueError(f"a record must be one of specjax, got {name!r}")
    found = getattr(importlib.import_module(module), attribute, None)
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))):
        raise ValueError(f"a record must be a NamedTuple or a dataclass, got {name!r}")
    return found
