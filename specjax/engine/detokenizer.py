"""Turn the token ids of a sequence into text as they come, in whole characters and up to a stop string."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specjax.sampling import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEFT_CONTEXT = 5  # number of last prompt tokens decoded before the first output: some tokenizers drop a leading space
INCOMPLETE = "\ufffd"  # a tokenizer decodes part of a character to this


class Detokenizer:
    """Hold the output of one sequence, its token ids and their text, and extend it token by token.

    Text grows by whole characters, so the last tokens may have no text yet. Text is certain once no stop string that is
    completed later can cut it.

    Args:
        tokenizer: tokenizer of the target.
        prompt: token ids of the prompt; the last few are context for the first tokens.
        params: parameters of the request.

    Attributes:
        token_ids: token ids so far, cut at the token that completes a stop string.
        num_certain: number of tokens whose text is certain.
        finish_reason: "stop" or "length"; None while the output grows.
        stop_reason: the stop string or stop token id that ended the output, or None.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], params: SamplingParams):
        self.params = params
        self.token_ids = []
        self.num_certain = 0
        self.finish_reason = None
        self.stop_reason = None
        self._text = ""
        self._ends = [0]  # _ends[i] is the length of the text after i tokens; absent while a character is incomplete
        self._certain = 0  # length of the certain text
        self._decode, self._skips = tokenizer.decode, params.skip_special_tokens
        self._window = prompt[-LEFT_CONTEXT:]  # the tokens that received text last, then the tokens without text
        self._known = self._decode(self._window, self._skips)  # text of the first part of the window
        self._set_apart = {}  # id and text of the special tokens that get a space on each side
        if params.spaces_between_special_tokens and not params.skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder()
            self._set_apart = {id: token.content for id, token in added.items() if token.special and token.content}

    def text(self, start: int, stop: int) -> str:
        """Return the text of the tokens [start, stop)."""
        return self._text[self._ends[start] : self._ends[stop]]

    def texts(self, stop: int | None = None) -> list[str]:
        """Return the text of each of the first `stop` tokens; None is all."""
        ends = self._ends if stop is None else self._ends[: stop + 1]
        return [self._text[start:end] for start, end in pairwise(ends)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens until one of them completes a stop string, which ends the output."""
        if not self.params.detokenize:
            self.token_ids += tokens
            self._ends += [0] * len(tokens)
            self.num_certain += len(tokens)
            return
        for token in tokens:
            self.token_ids.append(token)
            self._window.append(token)
            text = self._decode(self._window, self._skips)
            if len(text) > len(self._known) and not text.endswith(INCOMPLETE):
                self._assign_text(text)
                if self.finish_reason is not None:
                    return

    def finish(self, is_stop: bool, eos_token_ids: Sequence[int]) -> None:
        """End the output.

        Args:
            is_stop: whether the last token is a stop token; otherwise the output ends by its length.
            eos_token_ids: ids of the end-of-sequence tokens, which give no `stop_reason`.
        """
        last = self.token_ids[-1]
        if len(self._ends) <= len(self.token_ids):
            self._assign_text(self._decode(self._window, self._skips))
        if self.finish_reason is not None:
            return
        if is_stop:
            is_eos = last in eos_token_ids and not self.params.ignore_eos
            self._finish("stop", None if is_eos else last)
        else:
            self._finish("length", None)

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason, self.num_certain = finish_reason, stop_reason, len(self.token_ids)

    def _assign_text(self, text: str) -> None:
        """Assign text to the tokens that have none, where the window decodes to `text`, and look for stop strings."""
        num_tokens, piece = len(self.token_ids), text[len(self._known) :]
        num_new = num_tokens - len(self._ends) + 1
        if num_new > 1:
            self._ends += [len(self._text)] * (num_new - 1)
        self._text += self._add_spaces(piece) if self._set_apart else piece
        self._ends.append(len(self._text))
        self._window = self._window[-num_new:]
        self._known = self._decode(self._window, self._skips)

        stops = self.params.stop if num_tokens > self.params.min_tokens else None
        if not stops:
            self._certain, self.num_certain = len(self._text), num_tokens
            return
        found = [(start, stop) for stop in stops if (start := self._text.find(stop, self._certain)) >= 0]
        if found:
            self._cut(*min(found))
            return
        beginnings = (stop[:size] for stop in stops for size in range(1, len(stop)))
        held = max((len(s) for s in beginnings if self._text.endswith(s, self._certain)), default=0)
        self._certain = len(self._text) - held
        if self.params.include_stop_str_in_output:
            self.num_certain = num_tokens
            return
        covering = bisect_left(self._ends, self._certain)  # number of tokens that cover the certain text
        if self._ends[covering] > self._certain:  # the last is certain only in part; before it may be bytes of its text
            covering = bisect_left(self._ends, self._ends[covering - 1])
        self.num_certain = covering

    def _add_spaces(self, piece: str) -> str:
        """Return the next piece of text with spaces around the special token that it ends with or follows."""
        if not piece:
            return piece
        content = self._set_apart.get(self.token_ids[-1], "")
        ends_special = bool(content) and piece.endswith(content)
        head = piece.removesuffix(content) if ends_special else piece
        follows_special = self._text.endswith(tuple(self._set_apart.values()))
        if head and follows_special and not head[0].isspace():
            head = " " + head
        before = self._text + head
        gap = " " if ends_special and before and not before[-1].isspace() else ""
        return head + gap + (content if ends_special else "")

    def _cut(self, start: int, stop: str) -> None:
        """Cut the output at the stop string that begins at `start`; params say whether the stop string stays."""
        length = start + len(stop) if self.params.include_stop_str_in_output else start
        num_tokens = bisect_left(self._ends, length)
        self.token_ids = self.token_ids[:num_tokens]
        self._ends = [*self._ends[:num_tokens], length]
        self._finish("stop", stop)
