"""Functions that make grammars of regular expressions, JSON schemas and lists of choices."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.sampling.guided.schemas import pattern_of
from specjax.sampling.guided.tables import Grammar
from specjax.validation.extras import needs


def from_regex(pattern: str, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
    r"""Return the grammar of the texts that a regular expression matches as a whole.

    The library outlines-core, of the extra `specjax[guided]`, makes the automaton.

    Args:
        pattern: a regular expression in the syntax of Rust's `regex`, which equals the syntax of `re` without
            back-references, look-around and anchors. `\d` and `\w` are Unicode, and take more states than `[0-9]`.
        vocabulary: the bytes of every token, as `vocabulary` returns them; tokens without bytes are never generated.
        eos_token_ids: the tokens that are allowed where the text matches; after one of them no others are allowed.

    Returns:
        Grammar.

    Raises:
        ValueError: the pattern is not valid, the vocabulary cannot make a text that matches, or an id is wrong.

    Example:
        >>> grammar = from_regex("[0-9]{4}", [b"0", b"1", b"42", b"x", b""], eos_token_ids=[4])
        >>> (grammar.transitions[0, grammar.token_classes] >= 0).tolist()
        [True, True, True, False, False]
    """
    with needs("guided"):
        from outlines_core import Index, Vocabulary

    # The library takes the leftmost-first match, so that "a|ab" would match only "a". With an end of text it must match
    # all of the text. It refuses patterns that may have the end at the beginning, so a byte is put in front, whose
    # state is then skipped; and without a byte in front it takes 6 s for any JSON object, not 0.1 s.
    end = 256
    single_bytes = Vocabulary(end, {bytes([byte]): [byte] for byte in range(256)})
    try:
        Index(rf"\x00{pattern}", single_bytes)  # because "a)(b" is valid only inside the group below
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
    """Return the grammar of the JSON texts of a schema, of which outlines-core makes a regular expression.

    Args:
        schema: a JSON schema. Properties are generated in its order, and recursion ends at a depth of three; a value
            without a type has lists and objects of at most two levels. docs/sampling.md lists what does not count.
        vocabulary: as in `from_regex`.
        eos_token_ids: as in `from_regex`.

    Returns:
        Grammar.

    Raises:
        ValueError: the schema is not supported, the vocabulary cannot make a text of it, or an id is wrong.
    """
    with needs("guided"):
        return from_regex(pattern_of(schema), vocabulary, eos_token_ids)


def from_choices(choices: Sequence[str], vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> Grammar:
    """Return the grammar that allows one of several texts.

    Args:
        choices: the texts, at least one.
        vocabulary: as in `from_regex`.
        eos_token_ids: as in `from_regex`.

    Returns:
        Grammar.

    Raises:
        ValueError: `choices` is empty or has other values than strings, the vocabulary cannot make any of the texts,
            or an id is wrong.

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


def _over_tokens(
    name: str,
    automaton: np.ndarray,
    start: int,
    is_final: np.ndarray,
    vocabulary: Sequence[bytes],
    eos_token_ids: Sequence[int],
) -> Grammar:
    """Return the grammar over tokens that reads them byte by byte in an automaton over bytes [S, 256]."""
    if not eos_token_ids or not all(0 <= token < len(vocabulary) for token in eos_token_ids):
        raise ValueError(f"eos_token_ids must be one or more ids in [0, {len(vocabulary)}), got {eos_token_ids!r}")
    # A column holds the states that a token leads to from each state. Tokens with equal columns form a class. State -1,
    # which stands for no match, leads to itself.
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
    columns[0] = np.full_like(columns[0], -1)  # tokens without bytes are forbidden
    done = len(is_final)
    columns.append(np.where(is_final, done, -1))
    token_classes[list(eos_token_ids)] = len(columns) - 1
    used, token_classes = np.unique(token_classes, return_inverse=True)
    transitions = np.stack([np.append(columns[i], -1) for i in used], axis=1)
    transitions[done, -1] = done

    is_alive = np.arange(done + 1) == done  # whether the end can be reached from a state
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
