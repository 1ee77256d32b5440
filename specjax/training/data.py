"""Data to train drafters on: documents, rows packed with several of them, and the target's own continuations."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from specjax import decode, metrics, sampling, verifiers
from specjax.sampling import SamplingParams
from specjax.training.unroll import Batch
from specjax.types import Array, Model, Proposer, Verifier
from specjax.validation import is_integer

if TYPE_CHECKING:
    from specjax.engine.llm import LLM

SUFFIXES = ".jsonl", ".md", ".py", ".rst", ".txt"  # of the files that are read in a directory
MAX_OPEN = 64  # rows that are filled at the same time


class Document(NamedTuple):
    """Tokens of a text, and the place from which on a drafter learns to predict them."""

    tokens: Sequence[int]
    learn_from: int = 0  # number of tokens of a prompt, which the target did not write


class Acceptance(NamedTuple):
    """Counts of proposed and accepted drafts."""

    by_position: np.ndarray  # [K] float64, share of the drafts at each position that were accepted, with all before
    tokens_per_step: float  # mean tokens of a step, the recovered or bonus token counted


def documents(paths: Iterable[str | Path]) -> list[str]:
    """Read texts from files.

    Args:
        paths: files and directories. A line of a .jsonl file is an object with "text", or with "prompt" and
            "completion", which are joined; any other file is one text. In a directory, all files of the suffixes
            .jsonl, .md, .py, .rst and .txt are read at any depth, in the order of their paths; those that are not UTF-8
            are left out.

    Returns:
        The texts.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file is not UTF-8, a line of a .jsonl file has neither field, or there is no text at all.
    """
    texts: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()):
                try:
                    texts += _texts(file)
                except UnicodeDecodeError:
                    continue
            continue
        if not path.is_file():
            raise FileNotFoundError(f"paths must exist, got {path}")
        try:
            texts += _texts(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8: {error}") from error
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"paths must hold texts, got none in {[str(path) for path in paths]}")
    return texts


def _texts(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [text]
    texts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            texts.append(fields["text"] if "text" in fields else fields["prompt"] + fields["completion"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'line {number} of {path} must be an object with "text", got {line[:80]!r}') from error
    return texts


def pack(texts: Iterable[Document | Sequence[int]], length: int) -> Batch:
    """Put documents side by side into rows of equal length; a longer one is cut into several.

    Args:
        texts: documents, or their tokens, of which a drafter then learns to predict all.
        length: L >= 2.

    Returns:
        A batch of NumPy arrays [N, L]. A piece of a document is a separate segment. Where a row has room left, it is
        padded with segment 0.

    Raises:
        ValueError: the length is not an integer >= 2, or there are no tokens.
    """
    if not is_integer(length) or length < 2:
        raise ValueError(f"length must be an integer >= 2, got {length!r}")
    rows: list[list[tuple[np.ndarray, int]]] = []
    room: dict[int, int] = {}  # of the rows that are being filled
    for text in texts:
        document = text if isinstance(text, Document) else Document(text)
        ids = np.asarray(document.tokens, np.int32)
        for start in range(0, len(ids), length):
            piece = ids[start : start + length]
            row = next((row for row, left in room.items() if left >= len(piece)), None)
            if row is None:
                row = len(rows)
                rows.append([])
                room[row] = length
                if len(room) > MAX_OPEN:
                    del room[min(room, key=lambda other: room[other])]
            rows[row].append((piece, document.learn_from - start))
            if row in room:
                room[row] -= len(piece)
    if not rows:
        raise ValueError("texts must have tokens, got none")
    arrays: Any = [np.zeros((len(rows), length), dtype) for dtype in (np.int32, np.int32, bool)]
    tokens, segments, loss_mask = arrays
    for row, pieces in enumerate(rows):
        place = 0
        for number, (piece, learn_from) in enumerate(pieces, 1):
            here = slice(place, place + len(piece))
            tokens[row, here], segments[row, here] = piece, number
            loss_mask[row, here] = np.arange(len(piece)) >= learn_from
            place += len(piece)
    return Batch(tokens, segments, loss_mask)


def regenerate(
    llm: "LLM",
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    batch_size: int = 64,
) -> list[Document]:
    """Let the target continue prompts, for data of the distribution that a drafter meets in decoding.

    Args:
        llm: the target with its drafter, if it has one: drafts make it faster and change nothing.
        prompts: token ids of each.
        params: of all prompts, or of each.
        batch_size: prompts of a call.

    Returns:
        A document for each prompt; a drafter learns the text that the target wrote.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    made = []
    for start in range(0, len(prompts), batch_size):
        some = slice(start, start + batch_size)
        results = llm.generate([list(prompt) for prompt in prompts[some]], each[some])
        made += [
            Document([*prompt, *result.token_ids], len(prompt))
            for prompt, result in zip(prompts[some], results, strict=True)
        ]
    return made


def replay(
    target: Model,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    key: Array,
    max_steps: int | None = None,
    verifier: Verifier = verifiers.rejection,
) -> Acceptance:
    """Decode from prompts and count accepted drafts: the health check of a trained drafter.

    Args:
        target: the target, with the features that the proposer reads.
        proposer: the drafter.
        prompts: token ids of each.
        params: of all prompts.
        key: a typed key.
        max_steps: steps from each prompt. 1 measures drafts after the text of the prompts alone; None decodes to the
            end, after text that the target itself wrote.
        verifier: one of `specjax.verifiers`.

    Returns:
        The acceptance over all prompts.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    rows = sampling.batch([params] * len(prompts))
    size = int(lengths.max()) + params.max_tokens
    state = _prefill(target, proposer, tokens, lengths, rows, key, max_length=size)
    state = decode.generate(target, proposer, state, verifier=verifier, max_steps=max_steps)
    return Acceptance(metrics.acceptance_rate_per_position(state.totals), metrics.mean_acceptance_length(state.totals))


_prefill = jax.jit(decode.prefill, static_argnames="max_length")
