"""Text in, text out: the device decodes a batch of prompts, the host makes the text and finds stop strings."""

import copy
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax import decode, metrics, models, proposers, sampling, verifiers
from specjax.models import chat
from specjax.models import tokenizer as tokenizers
from specjax.models.vocabulary import check_same_vocabulary, resize_vocabulary
from specjax.proposers import DraftModel
from specjax.sampling import SamplingParams
from specjax.types import Model, Proposer, Verifier

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["LLM", "Completion", "Metrics", "Piece", "Result", "Stream"]

CHUNK = 8  # steps between two looks of the host for stop strings
LEFT_CONTEXT = 5  # prompt tokens that the first tokens are decoded with: some tokenizers drop a leading space
INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character

_prefill = jax.jit(decode.prefill, static_argnames="max_length")


class Metrics(NamedTuple):
    """Figures of one request. Rates are NaN where nothing was drafted."""

    num_tokens: int  # generated
    num_steps: int
    num_drafted: int
    num_accepted: int
    acceptance_rate: float  # num_accepted / num_drafted
    acceptance_rate_per_position: tuple[float, ...]  # K
    mean_acceptance_length: float  # tokens a step with drafts, before the output is cut
    seconds: float  # in the decoding loop, of the whole batch; without compilation and prefill
    tokens_per_second: float  # num_tokens / seconds


class Completion(NamedTuple):
    """What was generated for a prompt."""

    text: str  # without special tokens and without the stop string
    token_ids: list[int]  # the stop token included; cut where a stop string cut the text
    logprobs: list[float] | None  # None where they were not asked for
    finish_reason: str | None  # "stop", "length" (max_tokens, or max_length reached), or None if it was interrupted
    stop_reason: int | str | None  # the stop token id or stop string that ended it; None for the end-of-sequence token


class Result(NamedTuple):
    """A prompt, what was generated for it, and how that went."""

    prompt: str | Sequence[int]
    completions: list[Completion]  # the best one first
    metrics: Metrics

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids


class Piece(NamedTuple):
    """One token of a stream."""

    text: str  # empty where the token is special, or ends inside a character, which comes with its last token
    token_id: int
    kind: str  # "accepted" draft, "recovered" after a rejection, "bonus" after full acceptance, "target" without drafts


class LLM:
    """A target model (`model`) with its `tokenizer` and what drafts for it (`proposer`).

    Args:
        model: directory of a Hugging Face checkpoint, tokenizer in it or tokenizer.json beside it; None is the
            embedded pair.
        draft: directory of a checkpoint with the same vocabulary, of any family, "ngram" (look-up in the text itself),
            or a proposer; None is the embedded draft for the embedded target, and no drafts for any other. A draft
            whose limit is lower drafts as long as a sequence is within it.
        num_draft_tokens: K of a draft given by its directory; 0 is plain decoding, whatever the draft.
        verifier: one of `specjax.verifiers`. The output follows the target's law if the verifier is lossless.
        dtype: of the weights; None is float32.
        max_length: most tokens of a sequence, prompt and output; None is the model's limit.

    Raises:
        ValueError: for a directory, tokenizer, vocabulary or number that does not fit.

    Example:
        >>> import specjax
        >>> llm = specjax.LLM()
        >>> params = specjax.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        >>> len(llm.generate("def add(a, b):", params)[0].token_ids)
        4
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | Proposer | None = None,
        num_draft_tokens: int = 4,
        verifier: Verifier = verifiers.rejection,
        dtype: DTypeLike | None = None,
        max_length: int | None = None,
    ):
        if not isinstance(num_draft_tokens, int) or num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be an integer >= 0, got {num_draft_tokens!r}")
        if not callable(verifier):
            raise ValueError(f"verifier must be a function, as specjax.verifiers.block, got {verifier!r}")
        if model is None:
            model, draft = models.EMBEDDED / "target", models.EMBEDDED / "draft" if draft is None else draft
        dtype = jnp.float32 if dtype is None else dtype
        directory = _directory("model", model)
        if draft == "ngram":
            draft = proposers.ngram(num_draft_tokens) if num_draft_tokens else None
        elif isinstance(draft, str | Path):
            draft = _directory("draft", draft)
        elif draft is not None and not hasattr(draft, "propose"):
            raise ValueError(f"draft must be a directory or a proposer, got {type(draft).__name__}")

        self.verifier = verifier
        self.model = models.load(directory, dtype=dtype)
        self.tokenizer = tokenizers.load_tokenizer(directory)
        self.eos_token_ids = tokenizers.eos_token_ids(directory, self.tokenizer)
        self._directory = directory
        limit = self.model.max_length
        self.max_length = limit if max_length is None else max_length
        if not 2 <= self.max_length <= limit:
            raise ValueError(f"max_length must be in [2, {limit}], the model's limit, got {max_length}")

        if draft is None or num_draft_tokens == 0:
            draft = proposers.none()
        elif isinstance(draft, Path):
            draft = proposers.draft_model(_load_draft(draft, directory, self, dtype), num_draft_tokens)
        if isinstance(draft, DraftModel) and draft.model.vocab_size != self.model.vocab_size:
            raise ValueError(
                f"draft must have the vocabulary of the target, {self.model.vocab_size} tokens, "
                f"got {draft.model.vocab_size}"
            )
        self.proposer = draft
        self._entropy = np.random.default_rng()

    def plain(self) -> "LLM":
        """The same target, weights shared, without drafts."""
        other = copy.copy(self)
        other.proposer = proposers.none()
        return other

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Result]:
        """Generate for all prompts in one batch.

        It is one loop on the device, unless a stop string or the progress bar needs the host between steps.

        Args:
            prompts: text, or token ids, of any lengths.
            params: for all prompts, or one a prompt; None is `SamplingParams()`. A request with a seed gives the same
                output in any batch; one without never gives the same output twice.
            progress: show a progress bar on standard error.

        Returns:
            A result for every prompt.

        Raises:
            ValueError: a prompt is empty, too long for one more token, or has ids outside the vocabulary; or the number
                of params is not that of the prompts.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = SamplingParams() if params is None else params
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"params must be SamplingParams, one for all or one a prompt, got {params!r}")
        if len(params) != len(prompts):
            raise ValueError(f"params must be one for all or one for each of {len(prompts)} prompts, got {len(params)}")
        if not prompts:
            return []
        batch = _Batch(self, prompts, params)
        chunks = batch.run(CHUNK if progress or any(p.stop for p in params) else None)
        for _ in _show_progress(chunks, batch.rows) if progress else chunks:
            pass
        return [batch.result(i, len(row.token_ids)) for i, row in enumerate(batch.rows)]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
    ) -> Result:
        """Generate the assistant's answer to a conversation.

        Args:
            messages: each a mapping with "role" ("system", "user" or "assistant") and "content".
            params: of the request; None is `SamplingParams()`.

        Returns:
            The result; its prompt is token ids.

        Raises:
            ModuleNotFoundError: jinja2 is not installed.
            ValueError: the checkpoint has no chat template, or that refuses the messages; or as `generate`.
        """
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins, by the chat template."""
        text = chat.render(self._directory, messages)
        return self.tokenizer.encode(text, add_special_tokens=False).ids  # the template writes them

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> "Stream":
        """Generate for one prompt, a token at a time.

        The text is that of `generate` for the same seed. A token is held back while its character is incomplete, or
        while its text may be the beginning of a stop string.

        Args:
            prompt: text or token ids.
            params: of the request.

        Returns:
            An iterator over `Piece`, whose `result` is what it has given so far.

        Raises:
            ValueError: as `generate`.
        """
        return Stream(_Batch(self, [prompt], [params or SamplingParams()]))


class Stream:
    """An iterator over the `Piece`s of one request. It can be left at any time: `result` holds what it has given."""

    def __init__(self, batch: "_Batch"):
        self._batch = batch
        self._num_tokens = 0
        self._pieces = self._iterate()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def result(self) -> Result:
        """The result of the pieces given so far."""
        return self._batch.result(0, self._num_tokens)

    def _iterate(self) -> Iterator[Piece]:
        row, kinds, before = self._batch.rows[0], [], self._batch.totals
        for _ in self._batch.run(max_steps=1):
            after = self._batch.totals
            drafted, accepted, emitted = (
                int((getattr(after, name) - getattr(before, name))[0]) for name in ("drafted", "accepted", "emitted")
            )
            last = "target" if drafted == 0 else "bonus" if accepted == drafted else "recovered"
            kinds += (["accepted"] * accepted + [last])[:emitted]
            before = after
            while self._num_tokens < row.num_certain:
                i = self._num_tokens
                self._num_tokens += 1
                yield Piece(row.text(i, i + 1), row.token_ids[i], kinds[i])


class _Row:
    """The output of one request, grown a token at a time.

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
        self._certain = 0  # length of the text that is certain
        self._decode = tokenizer.decode
        self._window = prompt[-LEFT_CONTEXT:]  # the tokens that got their text last, and those without
        self._known = self._decode(self._window)  # text of the former

    def text(self, start: int, stop: int) -> str:
        """The text of the tokens start to stop."""
        return self._text[self._ends[start] : self._ends[stop]]

    def extend(self, tokens: list[int]) -> None:
        """Add tokens, up to the one that completes a stop string, which ends the row."""
        for token in tokens:
            self.token_ids.append(token)
            self._window.append(token)
            text = self._decode(self._window)
            if len(text) > len(self._known) and not text.endswith(INCOMPLETE):
                self._settle(text)
            if self.finish_reason is not None:
                return

    def finish(self, is_stop: bool, eos_token_ids: Sequence[int]) -> None:
        """End the row: by a stop token, its last one, or by length."""
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
        self._text += text[len(self._known) :]
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
        covering = bisect_left(self._ends, self._certain)  # the tokens that a cut there would keep
        self.num_certain = covering - (self._ends[covering] > self._certain)  # without one that it would cut in two

    def _cut(self, length: int, stop: str) -> None:
        """Keep so much text, and the tokens that it takes."""
        num_tokens = bisect_left(self._ends, length)
        self.token_ids = self.token_ids[:num_tokens]
        self._ends = [*self._ends[:num_tokens], length]
        self._finish("stop", stop)


class _Batch:
    """One call: its rows on the host, its state on the device, with the prompts fed and the loop compiled."""

    def __init__(self, llm: LLM, prompts: list[str | Sequence[int]], params: list[SamplingParams]):
        ids = [_encode(llm, f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
        self.prompts = prompts
        self.rows = [_Row(llm.tokenizer, *row) for row in zip(ids, params, strict=True)]
        self._llm = llm
        self._num_read = lengths = np.array([len(row) for row in ids])  # tokens of each row that the host has

        longest = max(len(row) + p.max_tokens for row, p in zip(ids, params, strict=True))
        width, max_length = (min(_round_up(n), llm.max_length) for n in (max(map(len, ids)), longest))
        tokens = [row + [0] * (width - len(row)) for row in ids]

        def tokenize(text: str) -> list[int]:
            return llm.tokenizer.encode(text, add_special_tokens=False).ids

        self._state = _prefill(
            llm.model,
            llm.proposer,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            sampling.batch(params, llm.eos_token_ids, llm.model.vocab_size, tokenize),
            _request_keys(llm, params),
            max_length=max_length,
        )
        self._step(0)  # compiles the loop, so that the time of later calls is that of decoding
        self.seconds = 0.0

    def run(self, max_steps: int | None) -> Iterator[None]:
        """Decode in chunks of steps (None: in one); after each, `rows`, `totals` and `seconds` are up to date."""
        is_running = True
        while is_running:
            start = time.perf_counter()
            tokens, length, finished = self._step(max_steps)
            self.seconds += time.perf_counter() - start
            for i, row in enumerate(self.rows):
                if row.finish_reason is None:
                    row.extend(tokens[i, self._num_read[i] : length[i]].tolist())
                if row.finish_reason is None and finished[i] != decode.RUNNING:
                    row.finish(finished[i] == decode.STOP, self._llm.eos_token_ids)
            self._num_read = length
            is_done = np.array([row.finish_reason is not None for row in self.rows])
            if np.any(is_done & (finished == decode.RUNNING)):
                self._state = decode.deactivate(self._state, jnp.asarray(is_done))
            is_running = not is_done.all()
            yield

    def result(self, index: int, num_tokens: int) -> Result:
        """The result of a row, as of its first tokens."""
        row = self.rows[index]
        totals = jax.tree.map(lambda count: count[index], self.totals)
        is_whole = num_tokens == len(row.token_ids)
        completion = Completion(
            text=row.text(0, num_tokens),
            token_ids=row.token_ids[:num_tokens],
            logprobs=None,
            finish_reason=row.finish_reason if is_whole else None,
            stop_reason=row.stop_reason if is_whole else None,
        )
        figures = Metrics(
            num_tokens=num_tokens,
            num_steps=int(totals.steps),
            num_drafted=int(totals.drafted),
            num_accepted=int(totals.accepted),
            acceptance_rate=metrics.acceptance_rate(totals),
            acceptance_rate_per_position=tuple(metrics.acceptance_rate_per_position(totals).tolist()),
            mean_acceptance_length=metrics.mean_acceptance_length(totals),
            seconds=self.seconds,
            tokens_per_second=num_tokens / self.seconds if self.seconds else 0.0,
        )
        return Result(self.prompts[index], [completion], figures)

    def _step(self, max_steps: int | None) -> list[np.ndarray]:
        """Decode a chunk and read what came of it: the tokens, the lengths and `finished` of all rows."""
        llm = self._llm
        self._state = state = decode.generate(
            llm.model, llm.proposer, self._state, verifier=llm.verifier, max_steps=max_steps
        )
        read = state.context.tokens, state.context.length, state.finished, state.totals
        *rows, self.totals = jax.tree.map(np.array, jax.device_get(read))  # copies: the next chunk reuses the buffers
        return rows


def _directory(name: str, path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise ValueError(f"{name} must be a directory with a Hugging Face checkpoint, got {str(path)!r}")
    return Path(path)


def _load_draft(directory: Path, target: Path, llm: LLM, dtype: DTypeLike) -> Model:
    """The draft model; where its tokenizer is the target's, its logits have the target's size."""
    path = tokenizers.find_tokenizer(directory)
    if path is None:
        return models.load(directory, dtype=dtype)
    if path != tokenizers.find_tokenizer(target):
        check_same_vocabulary(llm.tokenizer, tokenizers.load_tokenizer(directory))
    draft = models.load(directory, dtype=dtype)
    return draft if draft.vocab_size == llm.model.vocab_size else resize_vocabulary(draft, llm.model.vocab_size)


def _encode(llm: LLM, name: str, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a prompt, checked."""
    if isinstance(prompt, str):
        ids = np.array(llm.tokenizer.encode(prompt).ids, np.int64)
    else:
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"{name} must be a string or a list of token ids, got {prompt!r}")
    if not len(prompt) or not ids.size:
        raise ValueError(f"{name} must have at least one token, got {prompt!r}")
    if len(ids) >= llm.max_length:
        raise ValueError(
            f"{name} must leave room for one token in max_length = {llm.max_length}, got {len(ids)} tokens"
        )
    outside = ids[(ids < 0) | (ids >= llm.model.vocab_size)]
    if outside.size:
        raise ValueError(f"{name} must have token ids in [0, {llm.model.vocab_size}), got {outside[0]}")
    return ids.tolist()


def _request_keys(llm: LLM, params: list[SamplingParams]) -> jax.Array:
    """The key of each request [B]: of its seed modulo 2**64 (`jax.random.key` takes half of that), or a fresh one."""
    seeds = [p.seed if p.seed is not None else int(llm._entropy.integers(2**64, dtype=np.uint64)) for p in params]
    words = np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def _round_up(size: int) -> int:
    """A size of few different values, so that few are compiled for: at most 64, or a quarter, larger."""
    step = max(64, 1 << size.bit_length() >> 3)
    return -(-size // step) * step


def _show_progress(chunks: Iterator[None], rows: list[_Row]) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("tokens")
        for _ in chunks:
            counts = [len(row.token_ids) for row in rows]
            limits = [n if row.finish_reason else row.params.max_tokens for n, row in zip(counts, rows, strict=True)]
            progress.update(task, completed=sum(counts), total=sum(limits))
            yield
