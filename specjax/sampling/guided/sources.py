"""Sources of grammars: regular expressions, JSON schemas and choices, as values that requests carry."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.sampling.guided.compilers import from_choices, from_json_schema, from_regex
from specjax.sampling.guided.tables import Grammar

LONGEST = 200  # characters of a value in an error, which may be a whole file


def _shown(value: Any) -> str:
    """Return the beginning of a value as Python writes it."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


@dataclass(frozen=True)
class Regex:
    """The texts that a regular expression matches as a whole.

    Args:
        pattern: as `guided.from_regex` takes it.

    Raises:
        ValueError: the pattern is not a string.
    """

    pattern: str

    def __post_init__(self):
        if not isinstance(self.pattern, str):
            raise ValueError(f"pattern must be a string, got {self.pattern!r}")

    def compile(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
        """Return the grammar; `guided.from_regex` describes the arguments."""
        return from_regex(self.pattern, vocabulary, eos_token_ids)


@dataclass(frozen=True)
class JsonSchema:
    """The JSON texts of a schema.

    Args:
        schema: a mapping, as `guided.from_json_schema` takes it, or its JSON text, as which it is kept.

    Raises:
        ValueError: the schema is not a mapping that JSON can write, or the text of one.
    """

    schema: str | Mapping[str, Any]

    def __post_init__(self):
        try:
            text = self.schema if isinstance(self.schema, str) else json.dumps(self.schema)
            is_schema = isinstance(json.loads(text), dict)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"schema must be a JSON schema, got {_shown(self.schema)}: {error}") from None
        if not is_schema:
            raise ValueError(f"schema must be a mapping or the JSON text of one, got {_shown(self.schema)}")
        object.__setattr__(self, "schema", text)

    def compile(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
        """Return the grammar; `guided.from_json_schema` describes the arguments."""
        assert isinstance(self.schema, str), "it is kept as text"
        return from_json_schema(json.loads(self.schema), vocabulary, eos_token_ids)


@dataclass(frozen=True)
class Choices:
    """One of several texts.

    Args:
        texts: the texts, at least one.

    Raises:
        ValueError: there is no text, or one is not a string.
    """

    texts: Sequence[str]

    def __post_init__(self):
        texts = self.texts
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts must be a non-empty sequence of strings, got {texts!r}")
        object.__setattr__(self, "texts", tuple(texts))

    def compile(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
        """Return the grammar; `guided.from_choices` describes the arguments."""
        return from_choices(self.texts, vocabulary, eos_token_ids)


Source = Regex | JsonSchema | Choices
