"""The records that every part of specjax passes around, and the contracts of models, proposers and scorers.

Shapes: B sequences, K draft tokens, T query tokens, V vocabulary, L token buffer, R packed rows or rows of a call, W
tokens of the longest prompt, S cache slots and P pages of a sequence, N nodes of a tree and D its greatest depth.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any

FLOATS = ("float32", "bfloat16", "float16", "float64")  # the dtypes that logits may have
NO_PAGE = 2**31 - 1  # the number of a page that no pool has


class Categorical(NamedTuple):
    """One categorical distribution per row: the softmax of logits / temperature over the logits >= min_logit.

    With `rows`, the logits are packed: row (b, t) has the logits `logits[rows[b, t]]`, and `min_logit` and
    `log_normalizer` have shape [R].
    """

    logits: Array  # [B, T, V], one of `FLOATS` ([R, V] with rows); -inf excludes a token
    temperature: Array | None = None  # [B] float32; None is 1; 0 puts all mass on the argmax (lowest id wins a tie)
    min_logit: Array | None = None  # [B, T] float32: the smallest kept logit of the row
    log_normalizer: Array | None = None  # [B, T] float32: logsumexp of the kept logits / temperature
    rows: Array | None = None  # [B, T] int32 index into the packed logits; None means that they are not packed
    links: Array | None = None  # [2 n + 1] int32: the memory of the n GPUs that share the vocabulary; None is unknown

    @classmethod
    def from_probs(cls, probs: Array) -> "Categorical":
        """Return the distribution with the probabilities `probs` [B, T, V]; a zero excludes its token.

        Raises:
            ValueError: `probs` are not of a floating dtype that logits may have.
        """
        probs = jnp.asarray(probs)
        if probs.dtype.name not in FLOATS:
            raise ValueError(f"probs must be of one of the dtypes {', '.join(FLOATS)}, got {probs.dtype}")
        return cls(jnp.log(probs))


class Draft(NamedTuple):
    """Draft tokens and the distribution that they were drawn from.

    `distribution` must be exactly the one that each token was drawn from; None means deterministic (one-hot) drafts. A
    row whose draft temperature is 0 is deterministic too, and its logits are not read.
    """

    tokens: Array  # [B, K] int32; -1 fills a row that has fewer drafts
    distribution: Categorical | None = None  # rows [B, K]
    num_tokens: Array | None = None  # [B] int32 in [0, K], number of drafts of each row; None means K everywhere


class DraftTree(NamedTuple):
    """Draft tokens that form a tree: a node may have several children, of which at most one is accepted.

    Node 0 is the pending token, the last committed token of the row, which has not been fed to the target. Every other
    node stands after its parent, so `parents[n] < n`. The order of the siblings is the order of their indices. A node
    with the token -1 is no node, and neither are its descendants and the nodes from `num_nodes` on.

    A tree of N nodes has N - 1 drafts. `specjax.trees.of_chain` makes a tree of a `Draft`, in which node n + 1 is draft
    n. The children of a node must be drawn from its row of `distribution` without replacement, in the order of the
    siblings. None means that the tokens were not drawn, or were drawn in another way.
    """

    tokens: Array  # [B, N] int32, token of each node; of node 0 it is the last committed token
    parents: Array  # [B, N] int32, index of the parent of each node; -1 for node 0
    depth: Array  # [B, N] int32, number of nodes above each node; 0 for node 0
    num_nodes: Array | None = None  # [B] int32 in [1, N], number of nodes of each row; None means N everywhere
    distribution: Categorical | None = None  # rows [B, N]; row n for the children of node n, not read if it has none


class Verified(NamedTuple):
    """The output of a verifier: the accepted drafts of each row, then one recovered or bonus token, then -1.

    For a tree K is D, the greatest depth of a node that may be accepted.
    """

    tokens: Array  # [B, K+1] int32
    num_accepted: Array  # [B] int32, number of accepted drafts; the recovered or bonus token does not count
    log_probs: Array | None = None  # [B, K+1] float32, log-probability of each emitted token under its target row
    is_accepted: Array | None = None  # [B, K] bool, the outcome of each draft's own test; False where there is no draft
    is_empty: Array | None = None  # [B] bool, whether the row of the last token has none that counts, and it is some id
    path: Array | None = None  # [B, D+1] int32, for trees: node 0 and the accepted nodes, by increasing depth; then 0


class ModelInput(NamedTuple):
    """The query tokens of one call of a model, or of a drafter's prefill: T tokens of each of R rows.

    With `pages`, the cache is a pool of pages: slot s of row b is `leaf[pages[b, s // page_size], s % page_size]` in
    every leaf. A number outside the pool stands for no page: writes to it are dropped, and the logits of
    a token that sees such a slot mean nothing. Without `pages`, row b of the call owns page b of every leaf.

    A packed call has `pieces`, one row of C tokens, and neither `mask` nor `num_tokens` nor `rows`. It holds pieces of
    S sequences at most, consecutive tokens of each. A row of `pieces` has the row of the batch that a piece is of, the
    index of its first token in the call, and the number of its tokens. That index is a multiple of C / S, and after the
    last token padding with consecutive positions goes on up to the next such multiple. A row of the batch has at most
    one piece. A place without a piece is (B, 0, 0), where B is no row. Row s of `pages` belongs to piece s.

    A call of several `groups`, each of which could be a call, has the tokens and positions of all groups, [1, N]: row
    by row, one group after another. Only the groups have the other fields. No group reads what another one writes.

    A call is ragged where N is less than the tokens of its groups. It then has the tokens before `num_tokens` of each
    row alone, which are N at most, one of each row at least, and copies of its first token after them. The slots of the
    other tokens of a row may be written with anything.
    """

    tokens: Array  # [R, T] int32
    positions: Array  # [R, T] int32, never negative
    mask: Array | None = None  # [R, T, T] bool, which tokens of this call each of them sees (trees); None is causal
    pages: Array | None = None  # [R, P] int32, the pages of each row in order; None is a dense cache
    num_tokens: Array | None = None  # [R] int32 in [0, T]: padding follows these tokens; None means T everywhere
    rows: Array | None = None  # [R] int32, the row of the batch that each row is; B is no row; None: the rows in order
    pieces: Array | None = None  # [S, 3] int32, row, index of the first token, and count; None: the call is not packed
    groups: "tuple[ModelInput, ...] | None" = None  # calls that are made at a time; None: the call is one

    @property
    def counts(self) -> Array:
        """The number of tokens of each row, or of each piece, [R] int32, also where `num_tokens` is None."""
        if self.pieces is not None:
            return self.pieces[:, 2]
        num_rows, num_tokens = self.tokens.shape
        return jnp.full(num_rows, num_tokens, jnp.int32) if self.num_tokens is None else self.num_tokens

    @property
    def sequences(self) -> Array | None:
        """The row of the batch that each row or piece is of, [R] int32; None: the rows in order."""
        return self.rows if self.pieces is None else self.pieces[:, 0]

    @property
    def starts(self) -> Array:
        """The position of the first token of each row or piece, [R] int32."""
        if self.pieces is None:
            return self.positions[:, 0]
        return self.positions[0].at[self.pieces[:, 1]].get(mode="clip")


@partial(jax.tree_util.register_dataclass, data_fields=["pools", "rows"], meta_fields=[])
@dataclass(frozen=True)
class Memory:
    """The arrays that a model or a drafter keeps between calls.

    A table of pages says which parts of the pools belong to a sequence. The other arrays have a row for each sequence.
    """

    pools: PyTree = ()  # leaves [num_pages, page_size, ...]; a dense cache is a pool of one page for each row
    rows: PyTree = ()  # leaves [B, ...], such as recurrent states, features and lengths

    def take(self, rows: Array | None) -> "Memory":
        """Return the memory of some sequences: their rows, and the pools as they are.

        Args:
            rows: [R] int32; B, the number of rows, is no row, whose leaves are zeros. None takes all rows.
        """
        if rows is None:
            return self
        return Memory(self.pools, jax.tree.map(lambda leaf: leaf.at[rows].get(mode="fill", fill_value=0), self.rows))

    def put(self, rows: Array | None, part: "Memory") -> "Memory":
        """Return this memory with the pools of `part`, and its R rows in the places `rows`, as `take` has them."""
        if rows is None:
            return part
        return Memory(
            part.pools, jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), self.rows, part.rows)
        )


class Features(NamedTuple):
    """Hidden states of a built-in model, for proposers that read them.

    `taps` holds the residual stream at some layers side by side, in the order in which `Model.feature_layers` names
    them. Layer 0 stands for the embeddings and layer j for the stream after j layers, before the final norm.
    """

    hidden: Array  # [B, T, H], the final hidden state after the last norm, which the head turns into logits
    taps: Array | None = None  # [B, T, N H] of N layers; None where the model was asked for none


class ModelOutput(NamedTuple):
    """The logits of every query token, and hidden states for the proposers that use them."""

    logits: Array  # [B, T, V], one of `FLOATS`
    features: Any = None  # a pytree of arrays [B, T, ...]; `Features` of built-in models


class Context(NamedTuple):
    """The tokens of each sequence. The last committed token has not been fed to the target yet."""

    tokens: Array  # [B, L] int32, the prompt, then the generated tokens; garbage from `length` on
    length: Array  # [B] int32, number of committed tokens, the prompt included
    active: Array  # [B] bool, whether the row is still decoding
    prompt_length: Array | None = None  # [B] int32, number of prompt tokens; None means 0
    guided_state: Array | None = None  # [B] int32, state of the grammar after the tokens; None without guided decoding
    pages: Array | None = None  # [B, P] int32, the pages of each row, as in ModelInput; None is a dense cache


class Chunk(NamedTuple):
    """Some tokens of each prompt, for a proposer without `takes_pages`; they follow the tokens of earlier chunks."""

    tokens: Array  # [B, T] int32; 0 past the end of a prompt
    following: Array  # [B, T] int32, the token after each, -1 where it is not known
    positions: Array  # [B, T] int32, consecutive
    num_tokens: Array  # [B] int32 in [0, T], number of prompt tokens in the chunk; padding follows them
    pages: Array | None = None  # always None
    rows: Array | None = None  # always None
    previous: PyTree = None  # [B, ...], features of the token before the chunk; zeros at the start of a prompt


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params"],
    meta_fields=[
        *("apply", "init_cache", "vocab_size", "max_length", "takes_pages", "feature_layers", "axis_name"),
        *("init_rows", "commit", "takes_groups", "takes_ragged", "max_step"),
    ],
)
@dataclass(frozen=True)
class Model:
    """A language model as a pytree, whose leaves are the parameters and whose functions are static.

    `apply` writes the T tokens of a call to the consecutive cache slots positions[:, 0] + arange(T) and overwrites
    their contents. A token sees the slots before positions[:, 0] and, inside the call, the tokens that the mask allows.
    Every leaf of the cache has the batch as its leading axis.

    Where `takes_pages` is true, `apply` finds the slots of a row by `inputs.pages`, and `init_cache(num_pages,
    page_size)` makes a pool whose leaves are [num_pages, page_size, ...]. A dense cache is such a pool too, with one
    page for each row. Where `takes_pages` is false, the inputs of a call have neither pages nor rows.

    Where `takes_groups` is true, too, `apply` takes packed calls, which have `inputs.pieces`, and calls with
    `inputs.groups`. Where `takes_ragged` is true, too, these calls may be ragged.

    A model in pages that keeps more of a sequence than its slots, such as a recurrent state, has `init_rows`. Its
    `apply` takes and returns a `Memory`, and reads and writes the rows `inputs.rows` of it.

    Overwriting clears the slot of a rejected draft. A model that keeps a recurrent state has `commit`, which
    the loop calls after each step: it keeps the tokens of the call that the sequence keeps, and no others. Its calls
    with `inputs.num_tokens` keep these tokens without `commit`. A prompt is fed to it without the last token, which is
    the first that a step feeds, so each token is kept once. A call from position 0 begins with an empty state.

    The functions should be module-level functions or frozen dataclasses with `__call__`. These compare by value, so a
    model that is built again is not traced again.
    """

    params: PyTree
    apply: Callable[[PyTree, ModelInput, PyTree], tuple[ModelOutput, PyTree]]  # (params, inputs, cache)
    init_cache: Callable[[int, int], PyTree]  # (batch_size, max_length) or (num_pages, page_size) -> cache
    vocab_size: int
    max_length: int | None = None  # the most tokens that a sequence may have; None means no limit
    takes_pages: bool = False  # whether `apply` takes `inputs.pages`
    feature_layers: tuple[int, ...] = ()  # layers of `Features.taps`; see `models.with_feature_layers`
    axis_name: str | None = (
        None  # mesh axis whose devices share it, where `apply` gives each its own part of the logits
    )
    init_rows: Callable[[int], PyTree] | None = (
        None  # (batch_size) -> leaves [B, ...] beside the slots; None: no leaves
    )
    # (memory, inputs of the call, path [R, D+1], count [R]) -> memory. The path has indices into the T tokens of the
    # call; index 0 is the pending token, and a chain is arange. The first `count` of a row are kept; 0: it did not run.
    commit: Callable[[Memory, ModelInput, Array, Array], Memory] | None = None
    takes_groups: bool = False  # whether `apply` takes packed calls, in pages, and groups of calls
    takes_ragged: bool = False  # whether `apply` takes ragged groups, which leave padding out
    max_step: int | None = None  # the most tokens of a row that a step may have; None means no limit

    def __repr__(self) -> str:
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if hasattr(leaf, "dtype")]
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        dtypes = " and ".join(sorted({str(leaf.dtype) for leaf in leaves})) or "no dtype"
        name = getattr(self.apply, "__qualname__", type(self.apply).__qualname__)
        limits = f"vocab_size={self.vocab_size}, max_length={self.max_length}"
        return f"Model({limits}, params: {size / 1e6:,.1f} MB of {dtypes} in {len(leaves)} arrays, apply: {name})"

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        """Return the memory of a batch.

        Args:
            batch_size: B, the number of sequences.
            num_pages: number of pages of each pool. A dense memory has B pages, one for each sequence.
            page_size: slots of a page; of a dense memory, slots of a sequence.
        """
        cache = self.init_cache(num_pages, page_size)
        if not self.takes_pages:
            return Memory(rows=cache)
        return Memory(cache, () if self.init_rows is None else self.init_rows(batch_size))


class Proposer(Protocol):
    """An object that makes drafts: a pytree dataclass with weights as leaves, static options and pure methods.

    Its state is a `Memory`. A pool is read through the table of the target, and slot s of a sequence may depend on
    tokens 0 to s alone, so that sequences with a common beginning can share its pages.

    `prefill` gets a prompt chunk by chunk, each after the target has run it. `inputs` says which rows of the batch the
    chunk feeds: `state.take(inputs.rows)` are theirs, and `state.put(inputs.rows, part)` writes them back. A proposer
    with `takes_groups = True` also takes packed calls, where `inputs.sequences` are the rows; others get none.

    `update` gets the context that the drafts were made for, before the verified tokens are committed, and the target's
    features of the last committed token and of the drafts, or of the path that is accepted of a tree; the
    `num_accepted` that it gets is 0 in rows that had no drafts of this proposer.

    A proposer may draft on the target's own cache, with `reads_memory` and `writes_memory`; see `propose`. Without
    these attributes it does not see that cache.

    A proposer without `init_memory` has a simpler form and takes no pages: `init(batch_size, max_length)` makes a state
    of any leaves [B, ...], and `prefill(chunk, features, state)` gets a `Chunk` and the state of the rows that it
    feeds.

    A proposer that can make another number of drafts has `with_num_draft_tokens(num_draft_tokens, *, may_pause=False)`,
    which returns such a proposer. K = 0 makes no drafts, and only keeps the state. Proposers that come from one with
    `may_pause=True` have states of the same form, and may take turns from step to step.

    A proposer may draft a `DraftTree` in every step. It has `tree`, the number N of nodes, and `num_draft_tokens` is D,
    the depth of the deepest node. One that can draft chains and trees has `with_tree(tree, *, coupled)`, which returns
    a proposer of trees: sampled ones with their distribution, or, if coupled, the trees of which match accepts most.
    None instead of N makes chains. Trees and chains may take turns as different K do.

    A proposer with `drafts_per_row` promises that the drafts of R rows are at most R times that number together, which
    `Draft.num_tokens` says; a target with `takes_ragged` computes no more.

    A proposer of either form may have `commit`, as `Model` has, which gets and returns a `Memory`. The rows of a
    proposer without it must follow from the last chunk of a prompt, as chunks before may come from the pages of others.
    """

    @property
    def num_draft_tokens(self) -> int:
        """K, the width of every draft."""
        ...

    @property
    def takes_pages(self) -> bool:
        """Whether pages may say where the slots of a row are."""
        ...

    def init_memory(self, batch_size: int, num_pages: int, page_size: int) -> Memory:
        """Return the state of a batch; `Model.init_memory` describes the arguments."""
        ...

    def prefill(self, inputs: ModelInput, following: Array, previous: PyTree, features: Any, state: Memory) -> Memory:
        """Return the state after a chunk of prompts.

        Args:
            inputs: the chunk, [R, T], with `num_tokens`; or a packed call of S pieces, [1, C].
            following: [R, T] int32, the token after each, -1 where it is not known.
            previous: the features of the token before each row or piece, [R, ...]; zeros at the start of a prompt.
            features: the target's features of the chunk, [R, T, ...].
            state: the state.
        """
        ...

    @property
    def propose(self) -> Callable[..., Any]:
        """The method `(keys, context, sampling, state) -> (Draft, state)`, with a `DraftTree` for a tree.

        Where the proposer has `reads_memory = True`, the target's `Memory` is the last argument. Where it also has
        `writes_memory = True`, the method returns `(Draft, state, memory)`, in which only slots from `length` - 1 on
        may differ, and of these the next K: verification feeds them to the target and overwrites what they hold.
        """
        ...

    def update(self, context: Context, verified: Verified, features: Any, state: Memory) -> Memory: ...


class Verifier(Protocol):
    """A function that accepts or rejects drafts, given the target's distributions of the next K+1 tokens."""

    def __call__(
        self, keys: Array, draft: Draft, target: Categorical | Array, *args: Any, **options: Any
    ) -> Verified: ...


class Scorer(Protocol):
    """A function that runs the target over a draft and returns its logits for the next K+1 tokens."""

    def __call__(self, model: Model, context: Context, draft: Draft, cache: PyTree) -> tuple[ModelOutput, PyTree]: ...
