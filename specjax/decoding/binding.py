"""Verifiers and scorers, with options bound to them, as arguments of `jax.jit`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.tree_util import Partial

from specjax import trees, verifiers
from specjax.trees.verifier import TreeVerifier
from specjax.types import Draft, DraftTree, Proposer, Scorer, Verifier

OF_TREES = {  # the verifier of trees that takes the place of a verifier of chains
    verifiers.match: trees.match,
    verifiers.rejection: trees.traversal,
    verifiers.block: trees.traversal,
    verifiers.typical: trees.typical,
}


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


def name_of(function: Callable) -> str:
    """Return the name of the function of a pytree of `as_pytree`, and the bound values that are static."""
    if isinstance(function, _WithKeywords):
        return f"{name_of(function.function)} {dict(function.keywords)}"
    return getattr(function, "__qualname__", type(function).__name__)


def of_trees(verifier: Verifier) -> tuple[TreeVerifier, dict[str, Any]]:
    """Return the verifier of trees that takes the place of a verifier, and the options that are bound to it.

    Raises:
        ValueError: there is none.
    """
    function, options = verifier, {}
    while isinstance(function, Partial | _WithKeywords):
        options = dict(function.keywords) | options
        function = function.func if isinstance(function, Partial) else function.function
    own = OF_TREES.get(function, function)
    if not isinstance(own, TreeVerifier):
        names = ", ".join(each.__name__ for each in OF_TREES)
        raise ValueError(
            f"drafts in trees need a verifier that has a form for trees ({names}), got "
            f"{getattr(function, '__name__', repr(function))}"
        )
    return own, options


def of_draft(verifier: Verifier, draft: Draft | DraftTree) -> Verifier:
    """Return the verifier of a step, given its draft: for a tree, a verifier of trees with the same options.

    Raises:
        ValueError: the draft is a tree, and no verifier of trees belongs to the verifier; or one that reads the
            distribution of the drafts does, and the tree has none.
    """
    if not isinstance(draft, DraftTree):
        return verifier
    own, options = of_trees(verifier)
    if own is trees.traversal and draft.distribution is None:
        raise ValueError(
            "the tree has no distribution, and must be verified by match, got a verifier that reads it: "
            "decode with verifiers.match, or let the proposer sample its trees"
        )
    return Partial(own, **options)


def as_pytrees(verifier: Verifier, scorer: Scorer, proposer: Proposer | None) -> tuple[Partial, Partial]:
    """Return verifier and scorer as arguments of jit. Bound options, which have no values under jit, are checked."""
    if isinstance(verifier, Partial) and (check_options := getattr(verifier.func, "check_options", None)):
        check_options(0 if proposer is None else proposer.num_draft_tokens, **verifier.keywords)
    return as_pytree(verifier), as_pytree(scorer)
