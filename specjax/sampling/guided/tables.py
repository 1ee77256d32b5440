"""Grammars as tables on the device: a finite automaton over token ids, and the masks of allowed tokens.

Tokens that lead from every state to the same states share a class, so a table has the shape [S, C], not [S, V]. Most
patterns have some hundred classes, where a vocabulary has 100,000 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array


@dataclass(frozen=True, eq=False)
class Grammar:
    """The texts that a request may generate, as an automaton over tokens, which begins in state 0.

    Args:
        token_classes: [V] integers, the class of every token; with `np.arange(V)` every token is its own class.
        transitions: [S, C] integers, the state after a token of each class; -1 forbids the token. Every state must
            allow a token. Where a text is complete this is a stop token, which leads to a state that allows only stop
            tokens.

    Raises:
        ValueError: an array has a wrong shape, a class or state is out of range, or a state allows no token.
    """

    token_classes: np.ndarray
    transitions: np.ndarray

    def __post_init__(self):
        classes, transitions = np.array(self.token_classes), np.array(self.transitions)
        for name, array, ndim in (("token_classes [V]", classes, 1), ("transitions [S, C]", transitions, 2)):
            if array.ndim != ndim or not array.size or not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"{name} must be non-empty integers, got {array.dtype} {array.shape}")
        num_states, num_classes = transitions.shape
        if classes.min() < 0 or classes.max() >= num_classes:
            raise ValueError(f"token_classes must be in [0, {num_classes}), got {classes.min()} to {classes.max()}")
        if transitions.min() < -1 or transitions.max() >= num_states:
            raise ValueError(
                f"transitions must be in [-1, {num_states}), got {transitions.min()} to {transitions.max()}"
            )
        is_dead = np.all(transitions[:, np.unique(classes)] < 0, axis=1)
        if is_dead.any():
            raise ValueError(f"transitions must allow a token in every state, got none in state {is_dead.argmax()}")
        object.__setattr__(self, "token_classes", classes.astype(np.int32))
        object.__setattr__(self, "transitions", transitions.astype(np.int32))


class Guide(NamedTuple):
    """The grammars of a batch in one table. Grammar 0, whose only state is 0, allows all tokens."""

    token_classes: Array  # [G, V] int32, the class of each token in each grammar
    transitions: Array  # [S, C] int32, the state after a token of each class; -1 forbids the token
    grammar: Array  # [B] int32, the grammar of each row
    initial: Array  # [B] int32, the first state of each row


def batch(grammars: Sequence[Grammar | None], vocab_size: int | None = None) -> Guide | None:
    """Return the grammars of several requests as one table.

    The sizes of the table are powers of two, so that programs are compiled for few sizes.

    Args:
        grammars: the grammar of each row; None allows all tokens. A grammar that several rows share is stored once.
        vocab_size: the size of the model's vocabulary; None is the vocabulary of the largest grammar. Tokens that a
            grammar does not know are forbidden.

    Returns:
        Guide, or None if no row has a grammar.

    Raises:
        ValueError: a grammar has more than `vocab_size` tokens.
    """
    unique = [grammar for grammar in dict.fromkeys(grammars) if grammar is not None]
    if not unique:
        return None
    if vocab_size is None:
        vocab_size = max(len(grammar.token_classes) for grammar in unique)
    num_states = 1 + sum(len(grammar.transitions) for grammar in unique)
    num_classes = 1 + max(grammar.transitions.shape[1] for grammar in unique)  # the last class holds unknown tokens
    token_classes = np.zeros((round_up(1 + len(unique)), vocab_size), np.int32)
    transitions = np.full((round_up(num_states), round_up(num_classes)), -1, np.int32)
    transitions[0] = 0
    index: dict[Grammar | None, int] = {None: 0}
    initial: dict[Grammar | None, int] = {None: 0}
    offset = 1
    for grammar in unique:
        known, (size, width) = len(grammar.token_classes), grammar.transitions.shape
        if known > vocab_size:
            raise ValueError(f"guided_decoding must have at most vocab_size = {vocab_size} tokens, got {known}")
        index[grammar], initial[grammar] = len(index), offset
        token_classes[index[grammar], :known] = grammar.token_classes
        token_classes[index[grammar], known:] = transitions.shape[1] - 1
        transitions[offset : offset + size, :width] = np.where(
            grammar.transitions < 0, -1, grammar.transitions + offset
        )
        offset += size
    return Guide(
        jnp.asarray(token_classes),
        jnp.asarray(transitions),
        jnp.asarray([index[grammar] for grammar in grammars], jnp.int32),
        jnp.asarray([initial[grammar] for grammar in grammars], jnp.int32),
    )


def advance(guide: Guide, state: Array, tokens: Array) -> Array:
    """Return the states before and after each of several tokens.

    Args:
        guide: the grammars of the batch.
        state: [B] int32, the state before the first token.
        tokens: [B, N] int32; a negative or forbidden token does not change the state.

    Returns:
        [B, N+1] int32, the state before token i at index i, and the last state.
    """

    def step(state: Array, token: Array) -> tuple[Array, Array]:
        after = guide.transitions[state, guide.token_classes[guide.grammar, jnp.maximum(token, 0)]]
        state = jnp.where((token >= 0) & (after >= 0), after, state)
        return state, state

    _, states = jax.lax.scan(step, state, tokens.T, unroll=True)
    return jnp.concatenate([state[:, None], states.T], axis=1)


def allowed(guide: Guide, states: Array) -> Array:
    """Return which tokens [B, T, V] the states [B, T] allow."""
    classes = guide.token_classes[guide.grammar]
    return jnp.take_along_axis(guide.transitions[states], classes[:, None], axis=-1) >= 0


def round_up(size: int) -> int:
    """Return the smallest power of two that is at least `size` >= 1."""
    return 1 << (size - 1).bit_length()
