"""Decide on the host which grammars stand in the tables of a batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.sampling.capacities import Capacities
from specjax.sampling.guided.tables import Grammar, Guide


@dataclass
class _Entry:
    index: int  # of the grammar in the tables
    first: int  # its first state
    count: int = 0  # number of requests that use it


class GrammarTables:
    """Give grammars a place in tables of fixed sizes, where requests share those that are equal.

    Grammars that no request uses stay until their place is needed. The arrays change in place: a caller hands copies to
    the device. Not safe for several threads.

    Args:
        capacities: the sizes.
        vocab_size: V.

    Attributes:
        token_classes: [1 + grammars, V] int32, as in `Guide`.
        transitions: [1 + grammar_states, 1 + grammar_classes] int32, as in `Guide`.
    """

    def __init__(self, capacities: Capacities, vocab_size: int):
        self._capacities = capacities
        self.token_classes = np.zeros((1 + capacities.grammars, vocab_size), np.int32)
        self.transitions = np.full((1 + capacities.grammar_states, 1 + capacities.grammar_classes), -1, np.int32)
        self.transitions[0] = 0
        self._entries: dict[Grammar, _Entry] = {}

    def __contains__(self, grammar: Grammar) -> bool:
        """Whether a grammar has a place, for a request or from an earlier one."""
        return grammar in self._entries

    def insert(self, grammar: Grammar) -> bool:
        """Place a grammar for one more request; return whether there was room."""
        entry = self._entries.pop(grammar, None) or self._place(grammar)
        if entry is None:
            return False
        entry.count += 1
        self._entries[grammar] = entry  # after those that were used before
        return True

    def remove(self, grammar: Grammar) -> None:
        """Note that one request that used a grammar has left.

        Raises:
            ValueError: no request uses the grammar.
        """
        entry = self._entries.get(grammar)
        if entry is None or not entry.count:
            raise ValueError("no request uses the grammar")
        entry.count -= 1

    def guide(self, grammar: Grammar, generated: np.ndarray) -> Guide:
        """Return the place of a grammar, and its state after some generated tokens [N] as the row's first one."""
        entry, state = self._entries[grammar], 0
        for token in generated.tolist():
            is_known = token < len(grammar.token_classes)
            after = grammar.transitions[state, grammar.token_classes[token]] if is_known else -1
            state = state if after < 0 else int(after)  # as `guided.advance` has it
        guide: Any = Guide  # the fields of a row are numbers of the host, and its tables are not its own
        return guide(
            token_classes=None,
            transitions=None,
            grammar=np.int32(entry.index),
            initial=np.int32(entry.first + state),
        )

    def _place(self, grammar: Grammar) -> _Entry | None:
        """Write a grammar into the tables, where necessary in place of some that no request uses."""
        size, width = grammar.transitions.shape
        while True:
            first = self._first_gap(size)
            indices = set(range(1, len(self.token_classes))) - {entry.index for entry in self._entries.values()}
            if first is not None and indices:
                break
            unused = next((old for old, entry in self._entries.items() if not entry.count), None)
            if unused is None:
                return None
            del self._entries[unused]
        index, known = min(indices), len(grammar.token_classes)
        self.token_classes[index, :known] = grammar.token_classes
        self.token_classes[index, known:] = self.transitions.shape[1] - 1
        rows = self.transitions[first : first + size]
        rows[:] = -1
        rows[:, :width] = np.where(grammar.transitions < 0, -1, grammar.transitions + first)
        return _Entry(index, first)

    def _first_gap(self, size: int) -> int | None:
        """Return the first state of the first gap of `size` states, or None."""
        start = 1
        spans = sorted((entry.first, len(grammar.transitions)) for grammar, entry in self._entries.items())
        for first, length in [*spans, (len(self.transitions), 0)]:
            if first - start >= size:
                return start
            start = first + length
        return None
