"""Matrices of one checkpoint in several variants of a format, as patterns of their names say."""

import re
from dataclasses import dataclass
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.linear_files import StoredLinear
from specjax.models.quantized import Quantized

CODES = ".qweight", ".weight_packed", ".weight"  # endings of the names of codes


@dataclass(frozen=True)
class ByName:
    """A `Scheme` whose matrices have the variant of the first pattern that matches the beginning of their name."""

    usual: Any  # `Scheme` of matrices that no pattern matches
    others: tuple[tuple[re.Pattern[str], Any], ...]  # patterns, each with a `Scheme`
    unneeded: tuple[str, ...] = ()  # as `Scheme` has them

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether the files have the codes of a matrix."""
        return self._scheme(linear).is_quantized(linear)

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        return self._scheme(linear).shape(linear)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        return self._scheme(linear).read(linear)

    def _scheme(self, linear: StoredLinear) -> Any:
        name = linear.stored_name(*CODES)
        return next((scheme for pattern, scheme in self.others if pattern.match(name)), self.usual)


def changed(config: ConfigFile, field: str, name: str) -> ConfigFile:
    """Return the table quantization_config with the fields that an object in one of its fields has under a name.

    Raises:
        ValueError: there is no object.
    """
    fields = config.fields[field][name]
    if not isinstance(fields, dict):
        raise ValueError(f"{config.where(field)} must have an object for each name, got {fields!r} for {name}")
    return ConfigFile(config.path, {**config.fields, field: None, **fields}, f"quantization_config.{field}.{name}.")


def pattern_of(config: ConfigFile, field: str, text: str) -> re.Pattern[str]:
    """Return a pattern of names that stands in a field; raise ValueError if it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{config.where(field)} must have patterns of names, got {text!r}: {error}") from error
