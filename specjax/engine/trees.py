"""The trees of an `LLM`: whether its target, its proposer and its verifier fit them."""

from collections.abc import Sequence

from specjax import trees
from specjax.decoding import tree_steps
from specjax.decoding.binding import of_trees
from specjax.decoding.drafters import with_tree
from specjax.types import Model, Proposer, Verifier
from specjax.validation import is_integer


def numbers_of_nodes(tree: int | Sequence[int] | None, is_auto: bool) -> tuple[int, ...]:
    """Return the numbers of nodes that the argument `tree` of an `LLM` names, the smallest first.

    Raises:
        ValueError: it is none of them, or several where a step has no choice.
    """
    if tree is None:
        return ()
    numbers: Sequence[int] = tree if isinstance(tree, Sequence) else [tree]
    if isinstance(tree, str) or not (numbers and all(is_integer(each) and each >= 2 for each in numbers)):
        raise ValueError(f"tree must be None or an integer >= 2, the nodes of a tree, or several, got {tree!r}")
    if len(numbers) > 1 and not is_auto:
        raise ValueError(f"tree must be one number of nodes unless num_draft_tokens is 'auto', got {tree!r}")
    return tuple(sorted(set(numbers)))


def check_tree_fits(tree: int | None, max_length: int) -> None:
    """Raise ValueError where no sequence has room for a tree of N nodes, so that none would be drafted."""
    if tree is not None and tree >= max_length:
        raise ValueError(f"tree must be less than {max_length}, the longest sequence, got {tree}")


def check_beside_chains(tree: int, num_draft_tokens: int) -> None:
    """Raise ValueError unless a tree of N nodes can be told from chains of at most K drafts by its number of drafts."""
    if tree <= num_draft_tokens + 1:
        raise ValueError(
            f"tree must be more than {num_draft_tokens + 1}, the tokens of the longest chain that it is chosen beside, "
            f"got {tree}"
        )


def as_trees(proposer: Proposer, target: Model, verifier: Verifier, tree: int | None) -> Proposer:
    """Return the proposer in the form that drafts trees of N nodes for this verifier; the same one for None.

    A verifier that reads the distribution of the drafts gets sampled trees, another the trees that it accepts most of.

    Raises:
        ValueError: the target, the proposer or the verifier takes no trees.
    """
    if tree is None:
        return proposer
    if not proposer.num_draft_tokens:
        raise ValueError(f"tree must be None for plain decoding, where num_draft_tokens is 0, got {tree}")
    tree_steps.check_target(target)
    return with_tree(proposer, tree, coupled=of_trees(verifier)[0] is not trees.traversal)
