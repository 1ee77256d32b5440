"""Checks of arguments that several modules share, and of packages that extras bring."""

from specjax.validation.arguments import (
    as_python,
    check_array,
    check_bonus_tokens,
    check_categorical,
    check_number,
    check_shapes,
    holds_booleans,
    is_integer,
    is_iterable,
    is_traced,
    suggestion,
)

__all__ = [
    "as_python",
    "check_array",
    "check_bonus_tokens",
    "check_categorical",
    "check_number",
    "check_shapes",
    "holds_booleans",
    "is_integer",
    "is_iterable",
    "is_traced",
    "suggestion",
]
