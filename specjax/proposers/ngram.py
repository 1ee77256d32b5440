"""Drafts that are looked up in the sequence itself."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafters import InMemory, check_draft_length, check_tree
from specjax.proposers.drawing import last_token
from specjax.proposers.none import NoDrafts, none
from specjax.types import Array, Context, Draft, DraftTree, Memory, ModelInput, PyTree, Verified
from specjax.validation import is_integer


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_draft_tokens", "min_n", "max_n", "tree"])
@dataclass(frozen=True)
class NGram(InMemory):
    """A proposer that copies the tokens after an earlier occurrence of the last n tokens; drafts are deterministic.

    A tree has the tokens after several occurrences, each of which goes on with another token.
    """

    num_draft_tokens: int
    min_n: int
    max_n: int
    tree: int | None = None  # N, the number of nodes; None makes a chain
    takes_groups = True

    def with_num_draft_tokens(self, num_draft_tokens: int, *, may_pause: bool = False) -> "NGram | NoDrafts":
        check_draft_length(num_draft_tokens)
        return replace(self, num_draft_tokens=num_draft_tokens) if num_draft_tokens else none()

    def with_tree(self, tree: int | None, *, coupled: bool) -> "NGram":
        if tree is None:
            return replace(self, tree=None)
        if not coupled:
            raise ValueError(
                "drafts by look-up are not sampled, so their trees have no distribution and must be verified by match, "
                "got a verifier that reads it"
            )
        return replace(self, tree=check_tree(tree, self.num_draft_tokens))

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        return Memory()

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: Memory) -> tuple[Draft | DraftTree, Memory]:
        width = self.num_draft_tokens
        count = 1 if self.tree is None else -(-(self.tree - 1) // width)
        lookup = partial(look_up, num_draft_tokens=width, min_n=self.min_n, max_n=self.max_n, count=count)
        tokens, num_tokens = jax.vmap(lookup)(context.tokens, context.length)
        num_tokens = jnp.where(context.active[:, None], num_tokens, 0)
        is_draft = jnp.arange(width, dtype=jnp.int32)[None, None] < num_tokens[..., None]
        tokens = jnp.where(is_draft, tokens, -1)
        if self.tree is None:
            return Draft(tokens[:, 0], None, num_tokens[:, 0]), state
        return branches(last_token(context), tokens, self.tree), state

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory:
        return state


def branches(last: Array, tokens: Array, num_nodes: int) -> DraftTree:
    """Return a tree of several chains, which have the pending token in common.

    Args:
        last: [B, 1] int32, the pending token.
        tokens: [B, M, K] int32, the chains, -1 after the end of each.
        num_nodes: N, at most 1 + M K; the last chain is cut to it.
    """
    batch_size, _, width = tokens.shape
    place = np.arange(num_nodes - 1, dtype=np.int32) % width
    parents = np.concatenate([[-1], np.where(place == 0, 0, np.arange(num_nodes - 1))]).astype(np.int32)
    depth = np.concatenate([[0], place + 1]).astype(np.int32)
    nodes = jnp.concatenate([last, tokens.reshape(batch_size, -1)[:, : num_nodes - 1]], axis=1)
    parents, depth = (jnp.broadcast_to(jnp.asarray(x)[None], nodes.shape) for x in (parents, depth))
    return DraftTree(nodes, parents, depth)


def look_up(
    tokens: Array, length: Array, *, num_draft_tokens: int, min_n: int, max_n: int, count: int = 1
) -> tuple[Array, Array]:
    """Find the longest suffix of one sequence that occurred before, and the tokens after its earliest occurrence.

    An occurrence ends before the suffix itself does; the two may overlap. With `count` above 1, the search goes on
    among the occurrences that are followed by another token.

    Args:
        tokens: [L] int32.
        length: [] int32, number of tokens of the sequence.
        num_draft_tokens: K.
        min_n: the length of the shortest suffix.
        max_n: the length of the longest suffix.
        count: M, the number of occurrences.

    Returns:
        Tokens [M, K] int32, and how many of them count, [M] int32; the others are garbage. The number is 0 if no suffix
        occurred before.
    """
    size = tokens.shape[0]
    end = jnp.arange(size, dtype=jnp.int32)  # an occurrence is tokens[end - n : end]
    run, still = jnp.zeros(size, jnp.int32), end < length
    for n in range(1, max_n + 1):
        before = jnp.pad(tokens, (n, 0), constant_values=-1)[:size]  # tokens[end - n]
        still &= (before == tokens[jnp.maximum(length - n, 0)]) & (end >= n) & (length >= n)
        run = jnp.where(still, n, run)
    # One reduction finds the longest run and, among equally long ones, the first end.
    rank = jnp.where(run >= min_n, run * size + (size - 1 - end), -1)
    found, counts = [], []
    for _ in range(count):
        best = jnp.max(rank)
        first = size - 1 - best % size
        source = jnp.minimum(first + jnp.arange(num_draft_tokens, dtype=jnp.int32), size - 1)
        found.append(tokens[source])
        counts.append(jnp.where(best >= 0, jnp.minimum(length - first, num_draft_tokens), 0).astype(jnp.int32))
        rank = jnp.where(tokens == tokens[first], -1, rank)
    return jnp.stack(found), jnp.stack(counts)


def ngram(num_draft_tokens: int, min_n: int = 1, max_n: int = 3, *, tree: int | None = None) -> NGram:
    """Draft by looking up the last tokens of a sequence in itself.

    The lookup takes the largest n in [min_n, max_n] for which the last n tokens occurred before, and the earliest of
    their occurrences. Up to `num_draft_tokens` tokens after this occurrence are the draft. Rows without an occurrence
    get no drafts.

    Args:
        num_draft_tokens: K >= 1.
        min_n: the fewest tokens to look up, >= 1.
        max_n: the most tokens to look up, >= min_n.
        tree: N, the nodes of a tree whose branches are the tokens after several occurrences, with the last committed
            token as node 0; an integer > num_draft_tokens. Its drafts are verified by `verifiers.match`. None drafts a
            chain.

    Returns:
        A proposer.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> from specjax import Context, proposers
        >>> context = Context(jnp.array([[5, 6, 7, 8, 5, 6, 0, 0]]), jnp.array([6]), jnp.array([True]))
        >>> proposers.ngram(3).propose(None, context, None, ())[0].tokens
        Array([[7, 8, 5]], dtype=int32)

    References:
        Saxena, Prompt Lookup Decoding, 2023.
    """
    if not (is_integer(num_draft_tokens) and num_draft_tokens >= 1):
        raise ValueError(f"num_draft_tokens must be >= 1, got {num_draft_tokens!r}")
    if not (is_integer(min_n) and is_integer(max_n) and 1 <= min_n <= max_n):
        raise ValueError(f"min_n and max_n must be integers, 1 <= min_n <= max_n, got {min_n!r} and {max_n!r}")
    num_draft_tokens, min_n, max_n = map(int, (num_draft_tokens, min_n, max_n))
    return NGram(num_draft_tokens, min_n, max_n, None if tree is None else check_tree(tree, num_draft_tokens))
