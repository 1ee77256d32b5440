"""Structured output: grammars that the generated text must follow, as tables on the device."""

from specjax.sampling.guided.compilers import from_choices, from_json_schema, from_regex
from specjax.sampling.guided.sources import Choices, JsonSchema, Regex, Source
from specjax.sampling.guided.tables import Grammar, Guide, advance, allowed, batch
from specjax.sampling.guided.tokens import vocabulary

__all__ = [
    "Choices",
    "Grammar",
    "Guide",
    "JsonSchema",
    "Regex",
    "Source",
    "advance",
    "allowed",
    "batch",
    "from_choices",
    "from_json_schema",
    "from_regex",
    "vocabulary",
]
