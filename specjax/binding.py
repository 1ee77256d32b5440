"""Functions with bound options as arguments of jit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.tree_util import Partial


@dataclass(frozen=True)
class _WithKeywords:
    """A function with keywords bound; jit takes two with equal functions and keywords for one."""

    function: Callable
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*args, **dict(self.keywords), **keywords)


def as_pytree(function: Callable) -> Partial:
    """Return a function as a pytree, which jit takes as an argument.

    Numbers and arrays that are bound by `jax.tree_util.Partial` are its leaves, so a new value does not compile anew.
    True, False, None and strings become a part of the function.

    Args:
        function: a function, or a `jax.tree_util.Partial` of one.

    Raises:
        ValueError: it is no function.
    """
    if not callable(function):
        raise ValueError(f"verifier and scorer must be functions, got {function!r}")
    if not isinstance(function, Partial):
        return Partial(function)
    static = {k: v for k, v in function.keywords.items() if v is None or isinstance(v, bool | str)}
    traced = {k: v for k, v in function.keywords.items() if k not in static}
    return Partial(_WithKeywords(function.func, tuple(sorted(static.items()))), *function.args, **traced)
