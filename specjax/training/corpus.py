"""Text for a drafter: rows to train on, pieces that are held out, and acceptance that is measured on them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from specjax.sampling import SamplingParams
from specjax.training.data import Acceptance, Document, documents, pack, regenerate, replay
from specjax.training.unroll import Batch
from specjax.types import Model, Proposer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specjax.engine.llm import LLM

HELD_OUT = 20  # one document in this number is held out
PROMPT = 64  # tokens of held-out text before a measured step
SAMPLE = 192  # tokens of a continuation by the target
TEMPERATURES = (0.0, 0.8)  # at which acceptance is measured


class Corpus(NamedTuple):
    """Tokens to train on and to measure on."""

    rows: Batch  # [N, L]
    prompts: list[list[int]]  # pieces of held-out text
    counts: np.ndarray  # [V] int64, how often each token is learned


def make_corpus(
    paths: Sequence[Path],
    tokenizer: "Tokenizer",
    *,
    vocab_size: int,
    length: int,
    num_prompts: int,
    continuations: Callable[[list[list[int]]], list[Document]],
) -> Corpus:
    """Read text, hold a part out, and pack the rest into rows.

    Args:
        paths: files and directories as `training.documents` takes them; or files .npz of `write_documents`, whose
            documents have prompts and answers by the target.
        tokenizer: of the target.
        vocab_size: V of the target.
        length: L, tokens of a row.
        num_prompts: the most held-out prompts.
        continuations: function of the documents to train on, which returns continuations by the target, to train on,
            too.

    Raises:
        ValueError: the paths mix both kinds of files, or hold too little text.
    """
    answers = [path for path in paths if path.suffix == ".npz"]
    if answers and len(answers) < len(paths):
        raise ValueError(f"data must be files .npz alone or none of them, got {[str(path) for path in paths]}")
    learned: list[Document] | list[list[int]]
    if answers:
        made = [document for path in answers for document in read_documents(path)]
        prompts = beginnings(made[::HELD_OUT], num_prompts)
        learned = [document for i, document in enumerate(made) if i % HELD_OUT]
    else:
        texts, held_out = split([encoding.ids for encoding in tokenizer.encode_batch(documents(paths))])
        learned = [*map(Document, texts), *continuations(texts)]
        prompts = pieces(held_out, num_prompts)
    rows = pack(learned, length)
    return Corpus(rows, prompts, np.bincount(rows.tokens[rows.loss_mask], minlength=vocab_size))


def save_corpus(path: Path, corpus: Corpus) -> None:
    """Write a corpus to a file .npz, which is whole where it exists."""
    part = path.with_suffix(".part.npz")
    ends = np.cumsum([len(prompt) for prompt in corpus.prompts])
    fields = {name: value for name, value in corpus.rows._asdict().items() if value is not None}
    np.savez(part, prompts=np.concatenate(corpus.prompts), ends=ends, counts=corpus.counts, **fields)
    part.replace(path)


def load_corpus(path: Path) -> Corpus:
    """Read a corpus that `save_corpus` has written."""
    with np.load(path) as found:
        rows = Batch(found["tokens"], found["segments"], found["loss_mask"])
        prompts = [part.tolist() for part in np.split(found["prompts"], found["ends"][:-1])]
        return Corpus(rows, prompts, found["counts"])


def write_documents(path: Path, made: Sequence[Document]) -> None:
    """Write documents to a file .npz."""
    tokens = [np.asarray(document.tokens, np.int32) for document in made]
    np.savez_compressed(
        path,
        tokens=np.concatenate(tokens).astype(np.min_scalar_type(max(int(ids.max()) for ids in tokens))),
        lengths=np.array([len(ids) for ids in tokens], np.int32),
        learn_from=np.array([document.learn_from for document in made], np.int32),
    )


def read_documents(path: Path) -> list[Document]:
    """Read the documents of a file that `write_documents` wrote."""
    with np.load(path) as file:
        tokens = np.split(file["tokens"].astype(np.int32), np.cumsum(file["lengths"])[:-1])
        return [Document(ids.tolist(), int(place)) for ids, place in zip(tokens, file["learn_from"], strict=True)]


def split(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the documents to train on and those held out, of which one has at least PROMPT tokens."""
    held_out = [ids for i, ids in enumerate(texts) if i % HELD_OUT == HELD_OUT // 2]
    if not any(len(ids) >= PROMPT for ids in held_out):
        if len(texts) < 2:
            raise ValueError("data must hold at least two texts, one of which is held out, got one")
        return texts[:-1], texts[-1:]
    return [ids for i, ids in enumerate(texts) if i % HELD_OUT != HELD_OUT // 2], held_out


def pieces(texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return at most `count` pieces of PROMPT tokens of documents, spread evenly over all of them."""
    found = [list(ids[i : i + PROMPT]) for ids in texts for i in range(0, len(ids) - PROMPT + 1, PROMPT)]
    if not found:
        raise ValueError(f"one of the documents must have {PROMPT} tokens, got at most {max(map(len, texts))}")
    return [found[i] for i in np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)]


def beginnings(made: Sequence[Document], count: int) -> list[list[int]]:
    """Return at most `count` prompts of documents, each with the first half of its answer."""
    some = [made[i] for i in np.linspace(0, len(made) - 1, min(count, len(made))).astype(int)]
    return [list(ids[: (place + len(ids)) // 2]) for ids, place in some]


def continued(llm: "LLM", texts: Sequence[Sequence[int]], count: int, seed: int) -> list[Document]:
    """Let a target continue `count` pieces of documents, half of them greedily."""
    prompts = pieces(texts, count)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=seed + i, max_tokens=SAMPLE) for i in range(len(prompts))]
    return regenerate(llm, prompts, params)


def measure(
    target: Model,
    proposer: Proposer,
    prompts: list[list[int]],
    max_tokens: int = 128,
    *,
    max_steps: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> dict[float, Acceptance]:
    """Return the acceptance of drafts at each of TEMPERATURES.

    The drafts follow held-out text in one step where `max_steps` is 1, and otherwise stand in `max_tokens` tokens with
    which the target goes on.
    """
    found = {}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=tuple(eos_token_ids))
        found[temperature] = replay(target, proposer, prompts, params, key=jax.random.key(0), max_steps=max_steps)
    return found
