"""Verifiers and scorers, with options bound to them, as arguments of `jax.jit`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.tree_util import Partial

from specjax.types import Proposer, Scorer, Verifier


@dataclass(frozen=True)
class _WithKeywords:
    """A function with keywords bound to it. It compares by value, so jit does not trace an equal one again."""

    function: Callable
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*args, **dict(self.keywords), **keywords)


def as_pytree(function: Callable) -> Partial:
    """Return a function as a pytree, which a jitted function takes as an argument.

    Numbers and arrays that `jax.tree_util.Partial` has bound to the function are leaves of the pytree, so another value
    does not compile again. Bound values of True, False, None and strings are static.

    Args:
        function: a function, or a `jax.tree_util.Partial` of a function.

    Raises:
        ValueError: `function` cannot be called.
    """
    if not callable(function):
        raise ValueError(f"verifier and scorer must be functions, got {function!r}")
    if not isinstance(function, Partial):
        return Partial(function)
    static = {k: v for k, v in function.keywords.items() if v is None or isinstance(v, bool | str)}
    traced = {k: v for k, v in function.keywords.items() if k not in static}
    return Partial(_WithKeywords(function.func, tuple(sorted(static.items()))), *function.args, **traced)


def as_pytrees(verifier: Verifier, scorer: Scorer, proposer: Proposer | None) -> tuple[Partial, Partial]:
    """Return verifier and scorer as arguments of jit. Bound options, which have no values under jit, are checked."""
    if isinstance(verifier, Partial) and (check_options := getattr(verifier.func, "check_options", None)):
        check_options(0 if proposer is None else proposer.num_draft_tokens, **verifier.keywords)
    return as_pytree(verifier), as_pytree(scorer)
