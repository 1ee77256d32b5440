"""The form in which the decoding loop calls proposers: with a `Memory`, whether they know of it or not."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Array, Chunk, Context, Draft, Memory, Model, ModelInput, Proposer, PyTree, Verified
from specjax.validation import is_integer

Commit = Callable[[Memory, ModelInput, Array, Array], Memory]  # as `Model.commit`


def check_draft_length(num_draft_tokens: int, most: int | None = None) -> None:
    """Raise ValueError unless K is an integer >= 0, and at most the trained depth `most` of a drafter that has one."""
    expected = "an integer >= 0" if most is None else f"an integer in [0, {most}], the trained depth"
    if not (is_integer(num_draft_tokens) and num_draft_tokens >= 0 and (most is None or num_draft_tokens <= most)):
        raise ValueError(f"num_draft_tokens must be {expected}, got {num_draft_tokens!r}")


def check_chains(name: str, proposer: Any) -> None:
    """Raise ValueError unless the argument `name` is a proposer that drafts chains."""
    if not hasattr(proposer, "propose"):
        raise ValueError(f"{name} must be a proposer, got {proposer!r}")
    tree = getattr(proposer, "tree", None)
    if tree is not None:
        raise ValueError(f"{name} must draft chains, got a proposer of trees of {tree} nodes")


def check_tree(num_nodes: int, num_draft_tokens: int) -> int:
    """Return N, the number of nodes of a tree; raise ValueError unless a path of K drafts finds room in it."""
    if not (is_integer(num_nodes) and num_nodes > num_draft_tokens):
        raise ValueError(
            f"tree must be an integer > num_draft_tokens = {num_draft_tokens}, as its longest path has so many drafts "
            f"after the pending token, got {num_nodes!r}"
        )
    return int(num_nodes)


class InMemory:
    """The base of proposers whose state is a `Memory`."""

    takes_pages = True
    tree: int | None = None  # N, the number of nodes of the trees that it drafts; None drafts chains
    takes_groups = False

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        raise NotImplementedError

    def init(self, batch_size: int, max_length: int) -> Memory:
        """Return the state of a batch whose caches are dense."""
        return self.init_memory(batch_size, batch_size, max_length)


@partial(jax.tree_util.register_dataclass, data_fields=["proposer"], meta_fields=[])
@dataclass(frozen=True)
class DenseProposer(InMemory):
    """A proposer whose own state has leaves [B, ...] alone, with that state in the rows of a `Memory`."""

    proposer: Any
    takes_pages = False

    @property
    def num_draft_tokens(self) -> int:
        return self.proposer.num_draft_tokens

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        rows = self.proposer.init(batch_size, page_size)
        for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
            if jnp.shape(leaf)[:1] != (batch_size,):
                name = f"state{jax.tree_util.keystr(path)}"
                raise ValueError(
                    f"every leaf of a proposer's state must have a row for each of the {batch_size} sequences, got "
                    f"{name} of shape {jnp.shape(leaf)} from init"
                )
        return Memory(rows=rows)

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        chunk = Chunk(inputs.tokens, following, inputs.positions, inputs.counts, previous=previous)
        rows = self.proposer.prefill(chunk, features, state.take(inputs.rows).rows)
        return state.put(inputs.rows, Memory(rows=rows))

    @property
    def reads_memory(self) -> bool:
        return reads_memory(self.proposer)

    @property
    def writes_memory(self) -> bool:
        return writes_memory(self.proposer)

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory, *memory: Memory) -> tuple:
        if not memory:  # a step of some rows has pages of a dense cache, which say where the target's memory lies
            context = context._replace(pages=None)
        draft, rows, *written = self.proposer.propose(keys, context, sampling, state.rows, *memory)
        return draft, Memory(rows=rows), *written

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return Memory(rows=self.proposer.update(context._replace(pages=None), verified, features, state.rows))

    @property
    def commit(self) -> Commit | None:
        return getattr(self.proposer, "commit", None)


def in_memory(proposer: Any) -> Proposer:
    """Return a proposer whose state is a `Memory`: the same one, or one that keeps its state in the rows.

    The method `init_memory` tells which one it is.

    Raises:
        ValueError: a proposer lacks a method, or has `init_memory` and does not say whether it takes pages.
    """
    has_memory = hasattr(proposer, "init_memory")
    lacking = [name for name in ("prefill", "propose", "update") if not hasattr(proposer, name)]
    if not has_memory and not hasattr(proposer, "init"):
        lacking.insert(0, "init_memory (or init, where its state has no pools)")
    if lacking:
        raise ValueError(
            "a proposer must have the methods init_memory or init, prefill, propose and update, got "
            f"{proposer if isinstance(proposer, type) else type(proposer).__name__} without {' and '.join(lacking)}"
        )
    if not has_memory:
        return DenseProposer(proposer)
    if not hasattr(proposer, "takes_pages"):
        raise ValueError(f"a proposer with init_memory must have takes_pages, True or False, got {proposer!r}")
    return proposer


def with_num_draft_tokens(proposer: Proposer, num_draft_tokens: int, *, may_pause: bool = False) -> Proposer:
    """Return a proposer that makes another number of drafts, as `Proposer` describes it.

    Raises:
        ValueError: the proposer does not have the method `with_num_draft_tokens`, or it cannot make so many drafts.
    """
    change = getattr(proposer, "with_num_draft_tokens", None)
    if change is None:
        raise ValueError(
            "to choose the number of drafts, the proposer must have the method with_num_draft_tokens, got "
            f"{type(proposer).__name__} without it"
        )
    return change(num_draft_tokens, may_pause=may_pause)


def num_fed(proposer: Proposer) -> int:
    """Return how many tokens of a row a step feeds to the target: N of a tree, and K + 1 of a chain."""
    return getattr(proposer, "tree", None) or proposer.num_draft_tokens + 1


def with_tree(proposer: Proposer, tree: int | None, *, coupled: bool) -> Proposer:
    """Return a proposer that drafts trees of N nodes, as `Proposer` describes it.

    Raises:
        ValueError: the proposer does not have the method `with_tree`, or it cannot make such trees.
    """
    change = getattr(proposer, "with_tree", None)
    if change is None:
        raise ValueError(
            f"tree must be None for {type(proposer).__name__}, which makes chains alone and has no method with_tree, "
            f"got {tree!r}"
        )
    return change(tree, coupled=coupled)


def commit_of(proposer: Any) -> Commit | None:
    """Return the method by which a proposer keeps the state after accepted tokens; None where it needs none."""
    return getattr(in_memory(proposer), "commit", None)


def reads_memory(proposer: Any) -> bool:
    """Return whether a proposer gets the target's memory in `propose`."""
    return getattr(proposer, "reads_memory", False)


def writes_memory(proposer: Any) -> bool:
    """Return whether a proposer also returns the target's memory from `propose`."""
    return getattr(proposer, "writes_memory", False)


def check_pair(model: Model, proposer: Any) -> None:
    """Raise ValueError where a proposer makes too many drafts for this target, or must not write its memory."""
    if not hasattr(model, "apply"):
        raise ValueError(f"model must be a specjax.Model, got {type(model).__name__}")
    if model.max_step is not None and proposer.num_draft_tokens >= model.max_step:
        raise ValueError(
            f"num_draft_tokens must be at most {model.max_step - 1} for this target, which takes at most "
            f"{model.max_step} tokens of a row in a step, got {proposer.num_draft_tokens}"
        )
    if not writes_memory(proposer):
        return
    if not reads_memory(proposer):
        raise ValueError(f"a proposer with writes_memory must have reads_memory = True, got {type(proposer).__name__}")
    if model.commit is not None:
        raise ValueError(
            f"proposer must not write the memory of a target with commit, got {type(proposer).__name__}: the target "
            "keeps a recurrent state, which verification does not overwrite"
        )


def propose(
    model: Model, proposer: Any, keys: Array, context: Context, sampling: Any, state: Memory, memory: Memory
) -> tuple[Draft, Memory, Memory]:
    """Call `propose` of a proposer that has or has not to do with the target's memory.

    Args:
        model: the target.
        proposer: a proposer in the form of `in_memory`.
        keys, context, sampling, state: as `Proposer.propose` takes them.
        memory: the target's memory.

    Returns:
        The draft, the proposer's state, and the target's memory.

    Raises:
        ValueError: the proposer writes the memory and must not, or returns something else than its attributes say.
    """
    check_pair(model, proposer)
    given = (keys, context, sampling, state)
    result = proposer.propose(*given, memory) if reads_memory(proposer) else proposer.propose(*given)
    if not writes_memory(proposer):
        result = *result, memory
    if len(result) != 3 or jax.tree.structure(result[2]) != jax.tree.structure(memory):
        expected = "(Draft, state, memory)" if writes_memory(proposer) else "(Draft, state)"
        raise ValueError(f"propose of {type(proposer).__name__} must return {expected}, with the memory that it got")
    return result
