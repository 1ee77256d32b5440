"""Messages between the process of an engine and the process that speaks HTTP, as bytes. Nothing here can run code.

A frame to the engine is one question, `(kind, number, ...)` as `specjax.processes.messages` writes it. A frame to the
other process is a list in JSON of events since the one before, each `[kind, number, content]`: several steps
are one frame where that process is behind. Both begin with their length.
"""

import json
import traceback
from collections.abc import Sequence
from concurrent.futures import CancelledError
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from specjax.engine.engine import QueueFull
from specjax.engine.jobs import NoTokenError
from specjax.engine.pages import PageStats
from specjax.engine.requests import Completion, Metrics, Piece, Result, TokenLogProbs
from specjax.engine.stats import Stats
from specjax.processes import messages
from specjax.processes.child import frame
from specjax.sampling import SamplingParams
from specjax.server.served import Served

# Errors that clients are told.
TOLD = {kind.__name__: kind for kind in (QueueFull, NoTokenError, CancelledError, ValueError)}
_VALUES = (  # of `Served`
    "name",
    "vocab_size",
    "max_length",
    "eos_token_ids",
    "defaults",
    "fingerprint",
    "aliases",
    "takes_any_name",
)


def write_question(kind: str, number: int, *content: Any) -> bytes:
    """Return a frame to the engine."""
    return frame(messages.encode((kind, number, *content), lambda leaf: None))


def read_question(data: bytes) -> tuple:
    """Read a question that `write_question` has written, without its length."""
    return messages.decode(data, lambda call, leaf: None)


def write_submission(
    number: int, prompt: Sequence[int], params: SamplingParams, priority: int, cache_salt: str, client: str | None
) -> bytes:
    """Return the question for the answer to a prompt."""
    return write_question("submit", number, np.asarray(prompt, np.int32), params, priority, cache_salt, client)


def write_news(news: list[list[Any]]) -> bytes:
    """Return a frame to the process that speaks HTTP."""
    return frame(json.dumps(news, separators=(",", ":")).encode())


def read_piece(values: list[Any]) -> Piece:
    """Return a piece, which JSON has as the list of its fields."""
    text, token_id, kind, index, entry = values
    return Piece(text, token_id, kind, index, entry and _read_log_probs(entry))


def write_result(result: Result) -> list[Any]:
    """Return a result for JSON, without its prompt and without fields of its pieces."""
    ended = [[each.index, each.finish_reason, each.stop_reason] for each in result.completions]
    return [ended, result.metrics, result.prompt_logprobs, result.num_prompt_tokens, result.num_cached_tokens]


def read_result(values: list[Any], pieces: Sequence[Piece]) -> Result:
    """Rebuild the result that `write_result` has written, from the pieces of its request, with an empty prompt."""
    ended, metrics, prompt_logprobs, *counts = values
    in_order = sorted(pieces, key=lambda piece: piece.index)
    of_sample = {index: list(group) for index, group in groupby(in_order, key=lambda piece: piece.index)}
    figures = Metrics(*metrics)
    return Result(
        (),
        [_completion(of_sample.get(index, []), index, *reasons) for index, *reasons in ended],
        figures._replace(acceptance_rate_per_position=tuple(figures.acceptance_rate_per_position)),
        prompt_logprobs and [entry and _read_log_probs(entry) for entry in prompt_logprobs],
        *counts,
    )


def _completion(
    pieces: list[Piece], index: int, finish_reason: str | None, stop_reason: int | str | None
) -> Completion:
    entries = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=[piece.token_id for piece in pieces],
        logprobs=entries or None,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        index=index,
    )


def _read_log_probs(entry: dict[str, float]) -> TokenLogProbs:
    return {int(token): value for token, value in entry.items()}  # JSON has texts for keys


def write_stats(stats: Stats) -> list[Any]:
    """Return the numbers of an engine for JSON."""
    return list(stats)


def read_stats(values: list[Any]) -> Stats:
    """Return the numbers that `write_stats` has written."""
    stats = Stats(*values)
    pages = None if stats.pages is None else PageStats(*stats.pages)
    return stats._replace(pages=pages, num_accepted_at=tuple(stats.num_accepted_at))


def write_error(error: BaseException) -> list[str]:
    """Return the kind of an error and its message; of one that clients are not told, with where it was raised."""
    kind = next((name for name, kind in TOLD.items() if isinstance(error, kind)), None)
    if kind is not None:
        return [kind, str(error), ""]
    kind = "RuntimeError" if type(error) is RuntimeError else "Exception"  # the first: the engine has failed
    return [kind, str(error), "".join(traceback.format_exception(error))]


def read_error(values: list[str]) -> Exception:
    """Return the error that `write_error` has written."""
    kind, message, trace = values
    error = TOLD.get(kind, RuntimeError if kind == "RuntimeError" else Exception)(message)
    if trace:
        error.__cause__ = Exception(f"in the process of the engine:\n{trace}")
    return error


def write_served(served: Served) -> dict[str, Any]:
    """Return for JSON the properties of a model that answers need."""
    directory = None if served.directory is None else str(served.directory)
    values = {name: getattr(served, name) for name in _VALUES}
    return values | {"directory": directory, "tokenizer": served.tokenizer.to_str()}


def read_served(values: dict[str, Any]) -> Served:
    """Read the `Served` that `write_served` has written."""
    from tokenizers import Tokenizer

    directory = values["directory"] and Path(values["directory"])
    return Served(**values | {"directory": directory, "tokenizer": Tokenizer.from_str(values["tokenizer"])})
