"""Structured output: a grammar is a finite automaton over token ids, and its masks are tables on the device.

Tokens that move every state alike share a class, so that a table is [S, C], not [S, V]: C is some hundreds for most
patterns, of the 100,000 tokens of a vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class Grammar:
    """The texts that a request may generate, as an automaton over tokens. It begins in state 0.

    Args:
        token_classes: [V] integers, the class of every token; `np.arange(V)` makes `transitions` a table [S, V].
        transitions: [S, C] integers, the state after a token of each class; -1 forbids it. Every state must allow a
            token: where a text is complete a stop token, which leads to a state that allows stop tokens only.

    Raises:
        ValueError: for wrong shapes, classes or states out of range, or a state that allows no token.
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
    """The grammars of a batch in one table. Grammar 0 and its only state 0 allow everything."""

    token_classes: Array  # [G, V] int32
    transitions: Array  # [S, C] int32, -1 forbids
    grammar: Array  # [B] int32, of each row
    initial: Array  # [B] int32, the state where each row begins


def batch(grammars: Sequence[Grammar | None], vocab_size: int | None = None) -> Guide | None:
    """The grammars of several requests as one table. Its sizes are powers of two, so that few are compiled for.

    Args:
        grammars: one a row; None allows everything. A grammar that several rows share is stored once.
        vocab_size: of the model; None is that of the largest grammar. Tokens that a grammar lacks are forbidden.

    Returns:
        Guide, or None where no row has a grammar.

    Raises:
        ValueError: for a grammar of more than vocab_size tokens.
    """
    unique = [grammar for grammar in dict.fromkeys(grammars) if grammar is not None]
    if not unique:
        return None
    if vocab_size is None:
        vocab_size = max(len(grammar.token_classes) for grammar in unique)
    num_states = 1 + sum(len(grammar.transitions) for grammar in unique)
    num_classes = 1 + max(grammar.transitions.shape[1] for grammar in unique)  # the last one is of unknown tokens
    token_classes = np.zeros((round_up(1 + len(unique)), vocab_size), np.int32)
    transitions = np.full((round_up(num_states), round_up(num_classes)), -1, np.int32)
    transitions[0] = 0
    index, initial, offset = {None: 0}, {None: 0}, 1
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
    """The states before, between and after tokens.

    Args:
        guide: of the batch.
        state: [B] int32, before the first token.
        tokens: [B, N] int32; a negative or forbidden token leaves the state as it is.

    Returns:
        [B, N+1] int32.
    """

    def step(state: Array, token: Array) -> tuple[Array, Array]:
        after = guide.transitions[state, guide.token_classes[guide.grammar, jnp.maximum(token, 0)]]
        state = jnp.where((token >= 0) & (after >= 0), after, state)
        return state, state

    _, states = jax.lax.scan(step, state, tokens.T, unroll=True)
    return jnp.concatenate([state[:, None], states.T], axis=1)


def allowed(guide: Guide, states: Array) -> Array:
    """Which tokens [B, T, V] the states [B, T] allow."""
    classes = guide.token_classes[guide.grammar]
    return jnp.take_along_axis(guide.transitions[states], classes[:, None], axis=-1) >= 0


def from_regex(pattern: str, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
    r"""The texts that a regular expression matches as a whole.

    The automaton is made by outlines-core (the extra `specjax[guided]`).

    Args:
        pattern: in the syntax of Rust's `regex`: that of `re` without back-references, look-around and anchors. `\d`
            and `\w` are Unicode, and take more states than `[0-9]`.
        vocabulary: the bytes of every token, as from `vocabulary`; empty ones are never generated.
        eos_token_ids: allowed where the text matches, and the only tokens allowed after that.

    Returns:
        Grammar.

    Raises:
        ValueError: for a pattern that is not valid or that no tokens match, or wrong ids.

    Example:
        >>> grammar = from_regex("[0-9]{4}", [b"0", b"1", b"42", b"x", b""], eos_token_ids=[4])
        >>> (grammar.transitions[0, grammar.token_classes] >= 0).tolist()
        [True, True, True, False, False]
    """
    from outlines_core import Index, Vocabulary

    # The library stops at the leftmost-first match: "a|ab" would be "a". The end of text makes it match all of it. It
    # refuses patterns that ask for the end at the beginning, so there is a byte in front, taken off again.
    end = 256
    single_bytes = Vocabulary(end, {bytes([byte]): [byte] for byte in range(256)})
    try:
        Index(pattern, single_bytes)  # alone first: "a)(b" is not a pattern
        index = Index(rf"\x00(?:{pattern})\z", single_bytes)
    except ValueError as error:
        raise ValueError(f"pattern must be a regular expression without anchors, got {pattern!r}: {error}") from None
    edges = index.get_transitions()
    number = {state: i for i, state in enumerate(edges)}
    automaton = np.full((len(number), 256), -1)
    for state, targets in edges.items():
        for byte in targets.keys() - {end}:
            automaton[number[state], byte] = number[targets[byte]]
    is_final = np.array([index.is_final_state(state) for state in edges])
    start = automaton[number[index.get_initial_state()], 0]
    return _over_tokens("pattern", automaton, start, is_final, vocabulary, eos_token_ids)


def from_json_schema(schema: dict[str, Any], vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
    """The JSON texts of a schema: `from_regex` of the expression that outlines-core makes of it.

    Args:
        schema: JSON schema; properties come in its order, and recursion is cut at a depth of three.
        vocabulary: as in `from_regex`.
        eos_token_ids: as in `from_regex`.

    Returns:
        Grammar.

    Raises:
        ValueError: as `from_regex`, or for a schema that is not supported.
    """
    from outlines_core.json_schema import build_regex_from_schema

    return from_regex(build_regex_from_schema(json.dumps(schema)), vocabulary, eos_token_ids)


def from_choices(choices: Sequence[str], vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
    """One of several texts.

    Args:
        choices: the texts.
        vocabulary: as in `from_regex`.
        eos_token_ids: as in `from_regex`.

    Returns:
        Grammar.

    Raises:
        ValueError: for choices that are none, not strings, or that no tokens make; or wrong ids.

    Example:
        >>> grammar = from_choices(["yes", "no"], [b"y", b"es", b"no", b"n", b"</s>"], eos_token_ids=[4])
        >>> (grammar.transitions[0, grammar.token_classes] >= 0).tolist()
        [True, False, True, False, False]
    """
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices must be a non-empty sequence of strings, got {choices!r}")
    texts = {choice.encode() for choice in choices}
    prefixes = sorted({text[:end] for text in texts for end in range(len(text) + 1)})
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    automaton = np.full((len(prefixes), 256), -1)
    for prefix in prefixes[1:]:
        automaton[number[prefix[:-1]], prefix[-1]] = number[prefix]
    is_final = np.array([prefix in texts for prefix in prefixes])
    return _over_tokens("choices", automaton, 0, is_final, vocabulary, eos_token_ids)


def vocabulary(tokenizer: "Tokenizer") -> list[bytes]:
    """The bytes of every token of a byte-level or SentencePiece tokenizer; special tokens have none.

    Raises:
        ValueError: for another kind of tokenizer.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if "ByteLevel" in kinds:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

        def to_bytes(token: str) -> bytes:
            return bytes(byte_of[char] for char in token)

    elif kinds & {"ByteFallback", "Metaspace"}:

        def to_bytes(token: str) -> bytes:
            is_byte = len(token) == 6 and token.startswith("<0x")
            return bytes([int(token[3:5], 16)]) if is_byte else token.replace("\u2581", " ").encode()

    else:
        raise ValueError(f"tokenizer must decode as ByteLevel, ByteFallback or Metaspace, got {sorted(kinds)}")

    added = tokenizer.get_added_tokens_decoder()
    ids = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    return [
        (b"" if added[i].special else added[i].content.encode()) if i in added else to_bytes(ids.get(i, ""))
        for i in range(max(ids) + 1)
    ]


def round_up(size: int) -> int:
    """The smallest power of two that is not below `size` >= 1."""
    return 1 << (size - 1).bit_length()


def _over_tokens(
    name: str,
    automaton: np.ndarray,
    start: int,
    is_final: np.ndarray,
    vocabulary: Sequence[bytes],
    eos_token_ids: Sequence[int],
) -> Grammar:
    """The grammar of an automaton over bytes [S, 256], whose tokens are read byte by byte."""
    if not eos_token_ids or not all(0 <= token < len(vocabulary) for token in eos_token_ids):
        raise ValueError(f"eos_token_ids must be one or more ids in [0, {len(vocabulary)}), got {eos_token_ids!r}")
    # What a token does to all states at once is a column; columns that are equal are one class. State -1 stays -1.
    automaton = np.concatenate([automaton, np.full((1, 256), -1)])
    columns = [np.arange(len(automaton) - 1)]
    classes, after = {}, {}
    token_classes = np.zeros(len(vocabulary), int)
    for i, token in enumerate(vocabulary):
        current = 0
        for byte in token:
            if (current, byte) not in after:
                column = automaton[columns[current], byte]
                after[current, byte] = classes.setdefault(column.tobytes(), len(columns))
                if after[current, byte] == len(columns):
                    columns.append(column)
            current = after[current, byte]
        token_classes[i] = current
    columns[0] = np.full_like(columns[0], -1)  # of tokens without bytes
    done = len(is_final)
    columns.append(np.where(is_final, done, -1))
    token_classes[list(eos_token_ids)] = len(columns) - 1
    used, token_classes = np.unique(token_classes, return_inverse=True)
    transitions = np.stack([np.append(columns[i], -1) for i in used], axis=1)
    transitions[done, -1] = done

    is_alive = np.arange(done + 1) == done  # the end can be reached
    source, target = np.unique([np.nonzero(transitions >= 0)[0], transitions[transitions >= 0]], axis=1)
    while not is_alive[source[is_alive[target]]].all():
        is_alive[source[is_alive[target]]] = True
    if not is_alive[start]:
        raise ValueError(f"{name} must match a text that the vocabulary can make")
    transitions = np.where(is_alive[transitions], transitions, -1)
    reached = [int(start)]
    for state in reached:
        reached += set(transitions[state].tolist()) - {-1, *reached}
    number = np.full(done + 2, -1)  # number[-1] is -1
    number[reached] = np.arange(len(reached))
    return Grammar(token_classes, number[transitions[reached]])
