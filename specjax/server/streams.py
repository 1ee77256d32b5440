"""The answer to a call in the form of its protocol, whole or as the events of a stream."""

from collections.abc import Sequence
from typing import Any, Protocol

from specjax.engine.requests import Piece, Result
from specjax.server import answers
from specjax.server.answers import ChoiceStream
from specjax.server.errors import ApiError, is_of_anthropic
from specjax.server.protocol import Call
from specjax.server.served import Served
from specjax.server.tool_texts import COMPACT, dump

DONE = b"data: [DONE]\n\n"
COMMENT = b": the stream goes on\n\n"  # which clients leave out


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """Return an event of a stream.

    Args:
        body: its data.
        name: its name, in protocols that name events.
    """
    data = b"data: " + dump(body, COMPACT).encode() + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def error_event(error: ApiError, path: str) -> bytes:
    """Return the event by which a stream that a path began ends with an error."""
    return event(error.anthropic_body, "error") if is_of_anthropic(path) else event(error.body)


class Answer(Protocol):
    """The answer to a call in the form of one protocol. A stream is `start`, then `feed` again and again, then an end.

    All but `body` return events, empty where there is nothing to send.
    """

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the body of the whole answer, from the result of each prompt."""
        ...

    def start(self) -> bytes:
        """Return the events before the first token."""
        ...

    def feed(self, found: Sequence[tuple[int, Piece]]) -> bytes:
        """Return the events of new pieces, each with the number of its prompt."""
        ...

    def finish(self, results: Sequence[Result]) -> bytes:
        """Return the last events, from the result of each prompt. All pieces must have been fed before."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of a stream that ends with an error."""
        ...

    def ping(self) -> bytes:
        """Return bytes that say nothing, for a stream in which nothing happens for long."""
        ...


class CompletionAnswer:
    """The answer in OpenAI's forms of completions and chat completions, as `Answer`.

    Args:
        call: the request.
        served: the model.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._served = call, served
        self._head = answers.new_head(call)
        self._choices = [
            [
                _Choice(ChoiceStream(call, prompt, sample, self._head, served), call.has_token_kinds)
                for sample in range(call.params.n)
            ]
            for prompt in range(len(call.prompts))
        ]

    def body(self, results: Sequence[Result]) -> dict[str, Any]:
        return answers.answer(self._call, results, self._head, self._served)

    def start(self) -> bytes:
        if not (self._call.is_chat or self._call.echo):
            return b""
        return b"".join(choice.start() for samples in self._choices for choice in samples)

    def feed(self, found: Sequence[tuple[int, Piece]]) -> bytes:
        for prompt, piece in found:
            self._choices[prompt][piece.index].add(piece)
        return b"".join(choice.take() for samples in self._choices for choice in samples)

    def finish(self, results: Sequence[Result]) -> bytes:
        ended = zip(self._choices, results, strict=True)
        events = b"".join(choice.finish(result) for samples, result in ended for choice in samples)
        if self._call.include_usage:
            events += event(answers.usage_chunk(self._call, results, self._head, self._served))
        return events + DONE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body)

    def ping(self) -> bytes:
        return COMMENT


class _Choice:
    """Write the events of one choice.

    Args:
        stream: makes the chunks.
        has_kinds: whether chunks say how each of their tokens came about; then each has one token with text.
    """

    def __init__(self, stream: ChoiceStream, has_kinds: bool):
        self._stream, self._has_kinds = stream, has_kinds
        self._pieces: list[Piece] = []
        self._kinds: list[str] = []

    def start(self) -> bytes:
        return event(self._stream.start())

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def take(self) -> bytes:
        """Return the events of the pieces that were added."""
        new, self._pieces = self._pieces, []
        if not new:
            return b""
        if not self._has_kinds:
            chunk = self._stream.feed(new)
            return b"" if chunk is None else event(chunk)
        return b"".join(self._with_kind(piece) for piece in new)

    def _with_kind(self, piece: Piece) -> bytes:
        self._kinds.append(piece.kind)
        chunk = self._stream.feed([piece])
        if chunk is None:
            return b""
        chunk["choices"][0]["token_kinds"], self._kinds = self._kinds, []
        return event(chunk)

    def finish(self, result: Result) -> bytes:
        chunks = self._stream.finish(result)
        if self._kinds:
            chunks[-1]["choices"][0]["token_kinds"] = self._kinds
        return b"".join(map(event, chunks))
