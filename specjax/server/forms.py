"""Choose how to part the answer to a chat, by the tokens of the model."""

import re
from collections.abc import Sequence
from functools import cache, partial

from specjax.server.harmony import Harmony
from specjax.server.parts import CLOSING, OPENING, MakeParts, Plain, Thinking, Without
from specjax.server.served import Served
from specjax.server.tools import TAGS, Tools

CONTEXT = 8  # tokens at the end of a prompt in which `<think>` is looked for


def parts_of(served: Served, prompt: Sequence[int], tools: Tools | None) -> tuple[MakeParts, bool]:
    """Return how to part the answer to a chat, and whether its text must have the special tokens.

    Args:
        served: the model.
        prompt: the token ids of the chat.
        tools: the tools of the request, None where it has none.
    """
    if served.is_harmony:
        return Harmony, True
    parts: MakeParts = Plain
    needed = TAGS if tools is not None else frozenset()
    if _thinks(served):
        parts = partial(Thinking, is_open=is_thinking(served, prompt))
        needed |= {OPENING, CLOSING}
    if needed.isdisjoint(served.special_tokens):
        return parts, False
    return partial(Without, parts, _any_of(served.special_tokens - needed)), True


def is_thinking(served: Served, prompt: Sequence[int]) -> bool:
    """Return whether the prompt of a chat ends with `<think>`, so that the answer begins with reasoning."""
    end = served.tokenizer.decode(list(prompt[-CONTEXT:]), skip_special_tokens=False)
    return _thinks(served) and end.rstrip().endswith(OPENING)


def _thinks(served: Served) -> bool:
    return None not in map(served.tokenizer.token_to_id, (OPENING, CLOSING))


@cache
def _any_of(texts: frozenset[str]) -> re.Pattern:
    """Return the pattern of any of some texts, the longest that fits."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
