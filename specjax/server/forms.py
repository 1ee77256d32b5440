"""Choose how to part the answer to a chat, by the tokens of the model."""

from collections.abc import Sequence
from functools import partial

from specjax.server.harmony import Harmony
from specjax.server.parts import CLOSING, OPENING, MakeParts, Plain, Thinking
from specjax.server.served import Served

CONTEXT = 8  # tokens at the end of a prompt in which `<think>` is looked for


def parts_of(served: Served, prompt: Sequence[int]) -> MakeParts:
    """Return what parts the answer to the prompt of a chat."""
    if served.is_harmony:
        return Harmony
    if None in map(served.tokenizer.token_to_id, (OPENING, CLOSING)):
        return Plain
    end = served.tokenizer.decode(list(prompt[-CONTEXT:]), skip_special_tokens=False)
    return partial(Thinking, is_open=end.rstrip().endswith(OPENING))
