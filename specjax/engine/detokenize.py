"""Token ids to text: a token at a time, in whole characters, up to a stop string."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from specjax.sampling import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEFT_CONTEXT = 5  # prompt tokens that the first tokens are decoded with: some tokenizers drop a leading space
INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character


class Output:
    """The output of one sequence, grown a token at a time.

    Text is made of whole characters: the last tokens may not have any yet. It is certain up to where a stop string may
    begin.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], params: SamplingParams):
        self.params = params
        self.token_ids = []
        self.num_certain = 0  # tokens
        self.finish_reason = None
        self.stop_reason = None
        self._text = ""
        self._ends = [0]  # length of the text after so many tokens, as far as they have their text
        self._certain = 0  # length of the text that no stop string to come can cut
        self._decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        self._window = prompt[-LEFT_CONTEXT:]  # the tokens that got their text last, and those without
        self._known = self._decode(self._window)  # text of the former
        self._apart = {}  # text of the special tokens that spaces are set around
        if params.spaces_between_special_tokens and not params.skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder()
            self._apart = {id: token.content for id, token in added.items() if token.special and token.content}

    def text(self, start: int, stop: int) -> str:
        """The text of the tokens start to stop."""
        return self._text[self._ends[start] : self._ends[stop]]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, up to the one that completes a stop string, which ends the output."""
        for token in tokens:
            self.token_ids.append(token)
            if not self.params.detokenize:
                self._ends.append(0)
                self.num_certain += 1
                continue
            self._window.append(token)
            text = self._decode(self._window)
            if len(text) > len(self._known) and not text.endswith(INCOMPLETE):
                self._settle(text)
            if self.finish_reason is not None:
                return

    def finish(self, is_stop: bool, eos_token_ids: Sequence[int]) -> None:
        """End the output: by a stop token, its last one, or by length."""
        last = self.token_ids[-1]
        if len(self._ends) <= len(self.token_ids):
            self._settle(self._decode(self._window))
        if self.finish_reason is not None:
            return
        if is_stop:
            is_eos = last in eos_token_ids and not self.params.ignore_eos
            self._finish("stop", None if is_eos else last)
        else:
            self._finish("length", None)

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason, self.num_certain = finish_reason, stop_reason, len(self.token_ids)

    def _settle(self, text: str) -> None:
        """Give the tokens without text theirs, that of the window being `text`, and look for stop strings in it."""
        num_new = len(self.token_ids) - len(self._ends) + 1
        self._ends += [len(self._text)] * num_new
        self._text += self._spaced(text[len(self._known) :])
        self._ends[-1] = len(self._text)
        self._window = self._window[-num_new:]
        self._known = self._decode(self._window)

        stops = self.params.stop if len(self.token_ids) > self.params.min_tokens else ()
        found = [(start, stop) for stop in stops if (start := self._text.find(stop, self._certain)) >= 0]
        if found:
            self._cut(*min(found))
            return
        beginnings = (stop[:size] for stop in stops for size in range(1, len(stop)))
        held = max((len(s) for s in beginnings if self._text.endswith(s, self._certain)), default=0)
        self._certain = len(self._text) - held
        if self.params.include_stop_str_in_output:
            self.num_certain = len(self.token_ids)
            return
        covering = bisect_left(self._ends, self._certain)  # the tokens that a cut there would keep
        self.num_certain = covering - (self._ends[covering] > self._certain)  # without one that it would cut in two

    def _spaced(self, piece: str) -> str:
        """The next piece of text, with a space on each side of a special token that it ends with or follows."""
        if not self._apart or not piece:
            return piece
        content = self._apart.get(self.token_ids[-1], "")
        ends_special = bool(content) and piece.endswith(content)
        head = piece.removesuffix(content) if ends_special else piece
        follows_special = self._text.endswith(tuple(self._apart.values()))
        if head and follows_special and not head[0].isspace():
            head = " " + head
        before = self._text + head
        gap = " " if ends_special and before and not before[-1].isspace() else ""
        return head + gap + (content if ends_special else "")

    def _cut(self, start: int, stop: str) -> None:
        """Keep the text before the stop string at `start`, or up to its end, and the tokens that it takes."""
        length = start + len(stop) if self.params.include_stop_str_in_output else start
        num_tokens = bisect_left(self._ends, length)
        self.token_ids = self.token_ids[:num_tokens]
        self._ends = [*self._ends[:num_tokens], length]
        self._finish("stop", stop)
