"""config.json of a checkpoint: fields of checked kinds and ranges, errors that name them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_REQUIRED = object()
MAX_INT = 2**31 - 1
MAX_NUMBER = 1e30  # beyond it, float32 overflows


class ConfigFile:
    """The fields of a JSON file. A field that is null takes its default, as an absent one does."""

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, prefix: str = ""):
        self.path = path
        self.fields = read_json(path) if fields is None else fields
        self._prefix = prefix

    def where(self, name: str) -> str:
        """The name of a field and its file, for messages."""
        return f"{self._prefix}{name} in {self.path}"

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A field of this type."""
        value = self.fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.path} must have the field {self._prefix}{name}")
            return default
        if type(value) is not kind:
            raise ValueError(f"{self.where(name)} must be {kind.__name__}, got {value!r}")
        return value

    def size(self, name: str, default: Any = _REQUIRED, *, most: int = MAX_INT) -> int:
        """A field that is an integer in [1, most]."""
        value = self.get(name, int, default)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{self.where(name)} must be in [1, {most}], got {value}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A field that is a positive, finite number."""
        value = self.fields.get(name)
        if type(value) is not int:
            value = self.get(name, float, default)
        if value is not None and not 0 < value < MAX_NUMBER:
            raise ValueError(f"{self.where(name)} must be positive and finite, got {value}")
        return None if value is None else float(value)

    def unless_null(self, name: str, default: Any) -> Any:
        """The default of a field in which null means none: None where it is null."""
        return None if name in self.fields and self.fields[name] is None else default

    def only(self, name: str, supported: bool | float | str) -> None:
        """Refuse a field that is neither absent nor the value that is supported."""
        value = self.fields.get(name)
        if value is not None and (value != supported or isinstance(value, bool) != isinstance(supported, bool)):
            raise ValueError(f"{self.where(name)} must be {supported!r}, all that specjax supports, got {value!r}")

    def choice(self, name: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        """A field that is one of some words."""
        value = self.get(name, str, default)
        if value not in choices:
            supported = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"{self.where(name)} must be {supported}, all that specjax supports, got {value!r}")
        return value

    def table(self, name: str) -> "ConfigFile":
        """A field that is an object itself; an absent one is empty."""
        return ConfigFile(self.path, self.get(name, dict, {}), f"{self._prefix}{name}.")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"directory must hold {path.name}, got {path.parent}, which does not")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
