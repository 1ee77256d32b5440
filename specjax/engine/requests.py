"""The life of a batch of requests: prompts in, steps on the device, texts and figures out."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, metrics, sampling
from specjax import keys as streams
from specjax.engine.detokenize import Output
from specjax.engine.draft_length import DraftLength
from specjax.sampling import SamplingParams
from specjax.sampling.guided.tables import round_up

if TYPE_CHECKING:
    from specjax.engine.llm import LLM

CHUNK = 8  # steps between two looks of the host for stop strings, and between two choices of K


@partial(jax.jit, static_argnames=("max_length", "num_logprobs", "prompt_logprobs"))
def _prefill(model, proposer, prompts, lengths, sampling, key_data, sample, **options):
    """`decode.prefill`, given the data [B, 2] of each row's request key and the number [B] of its sample."""
    keys = streams.samples(jax.random.wrap_key_data(key_data, impl="threefry2x32"), sample)
    return decode.prefill(model, proposer, prompts, lengths, sampling, keys, **options)


TokenLogProbs = dict[int, float]  # token id -> log-probability


class Metrics(NamedTuple):
    """Figures of one request, over all its completions. Rates are NaN where nothing was drafted."""

    num_tokens: int  # generated
    num_steps: int
    num_drafted: int
    num_accepted: int
    acceptance_rate: float  # num_accepted / num_drafted
    acceptance_rate_per_position: tuple[float, ...]  # K
    mean_acceptance_length: float  # tokens a step with drafts, before the output is cut
    seconds: float  # in the decoding loop, of the whole batch; without compilation and prefill
    tokens_per_second: float  # num_tokens / seconds
    system_efficiency: float  # tokens that verification gave / those it gives where every draft is accepted
    time_to_first_token: float  # seconds from the call, with prompts and compilation; NaN before there is one
    noncausal_acceptance_rate: float  # drafts that pass their own test; NaN unless the verifier tells (outcomes=True)


class Completion(NamedTuple):
    """What was generated for a prompt."""

    text: str  # without the stop string, unless it is asked for; empty without `detokenize`
    token_ids: list[int]  # the stop token included; cut where a stop string cut the text
    logprobs: list[TokenLogProbs] | None  # of each token: itself first, then the most likely; None: not asked for
    finish_reason: str | None  # "stop", "length" (max_tokens, or max_length reached), or None if it was interrupted
    stop_reason: int | str | None  # the stop token id or stop string that ended it; None for the end-of-sequence token


class Result(NamedTuple):
    """A prompt, what was generated for it, and how that went."""

    prompt: str | Sequence[int]
    completions: list[Completion]  # the best one first
    metrics: Metrics
    prompt_logprobs: list[TokenLogProbs | None] | None = None  # of each prompt token used; None for the first

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


class Batch:
    """One call: its outputs on the host, its state on the device, with the prompts fed and the loop compiled.

    Every completion of a request is a row. Rows of the same prompt share its prefill.
    """

    def __init__(
        self,
        llm: "LLM",
        prompts: Sequence[str | Sequence[int]],
        prompt_ids: Sequence[list[int]],
        params: Sequence[SamplingParams],
        key_data: np.ndarray,
    ):
        self._start = time.perf_counter()
        self._llm, self._prompts, self._params = llm, prompts, params
        counts = [p.num_samples for p in params]
        request = np.repeat(np.arange(len(params)), counts)  # of each row
        sample = np.concatenate([np.arange(count) for count in counts])
        self._rows_of = np.split(np.arange(len(request)), np.cumsum(counts)[:-1])
        row_ids, row_params = [prompt_ids[i] for i in request], [params[i] for i in request]
        self.outputs = [Output(llm.tokenizer, *row) for row in zip(row_ids, row_params, strict=True)]
        self._prompt_ids, self._num_read = row_ids, np.array([len(row) for row in row_ids])

        unique = list(dict.fromkeys(map(tuple, prompt_ids)))
        shared = np.array([unique.index(tuple(row)) for row in row_ids])
        lengths = np.array([len(row) for row in unique])
        longest = max(len(row) + p.max_tokens for row, p in zip(row_ids, row_params, strict=True))
        width, max_length = (min(_round_up(n), llm.max_length) for n in (lengths.max(), longest))
        tokens = [[*row, *[0] * (width - len(row))] for row in unique]

        def tokenize(text: str) -> list[int]:
            return llm.tokenizer.encode(text, add_special_tokens=False).ids

        rows = sampling.batch(row_params, llm.eos_token_ids, llm.model.vocab_size, tokenize)
        listed = [n for p in params for n in (p.logprobs, p.prompt_logprobs) if n is not None]
        has_logprobs = bool(listed) or max(counts) > 1
        num_logprobs = min(round_up(max(listed)), llm.model.vocab_size) if any(listed) else 0
        self._draft_length = None
        if llm.chooses_draft_length:
            self._draft_length = DraftLength(llm.model, llm.proposer, len(request))
        self._state = _prefill(
            llm.model,
            llm.proposer,
            np.asarray(tokens, np.int32),
            np.asarray(lengths, np.int32),
            rows,
            key_data[request],
            np.asarray(sample, np.uint32),
            max_length=max_length,
            rows=np.asarray(shared, np.int32) if len(unique) < len(shared) else None,
            num_logprobs=num_logprobs if has_logprobs else None,
            prompt_logprobs=any(p.prompt_logprobs is not None for p in params),
        )
        self._step(0)  # compiles the loop, so that the time of later calls is that of decoding
        self.seconds, self.time_to_first_token = 0.0, math.nan

    def run(self, max_steps: int | None) -> Iterator[None]:
        """Decode a step, then chunks of steps (None: all); after each, `outputs`, `totals` and times are up to date."""
        num_steps, num_taken, is_running = 1, 0, True
        while is_running:
            start = time.perf_counter()
            tokens, length, finished = self._step(num_steps)
            end = time.perf_counter()
            self.seconds += end - start
            if math.isnan(self.time_to_first_token):
                self.time_to_first_token = end - self._start
            for i, output in enumerate(self.outputs):
                if output.finish_reason is None:
                    output.extend(tokens[i, self._num_read[i] : length[i]].tolist())
                if output.finish_reason is None and finished[i] != decode.RUNNING:
                    output.finish(finished[i] == decode.STOP, self._llm.eos_token_ids)
            self._num_read = length
            is_done = np.array([output.finish_reason is not None for output in self.outputs])
            if np.any(is_done & (finished == decode.RUNNING)):
                self._state = decode.deactivate(self._state, jnp.asarray(is_done))
            if self._draft_length is not None:
                num_taken += num_steps
                if num_taken % CHUNK == 1:  # after the first step, then every so many, in chunks or one at a time
                    self._draft_length.update(self.totals)
            num_steps, is_running = max_steps, not is_done.all()
            if is_running and self._draft_length is not None:
                self._step(0)  # the next chunk may have another number of drafts
            yield

    def results(self) -> list[Result]:
        """The results of all requests, the best completions of each, best first."""
        return [self._result(i, self._ranked(i)) for i in range(len(self._params))]

    def partial_result(self, num_tokens: int) -> Result:
        """The result of the only row, as of its first tokens."""
        return self._result(0, [0], num_tokens)

    def _ranked(self, request: int) -> list[int]:
        """The rows of the n best completions of a request: those of the largest sums of log-probabilities."""
        rows = self._rows_of[request].tolist()
        if len(rows) == 1:
            return rows

        def score(row: int) -> float:
            start = len(self._prompt_ids[row])
            return float(self._log_probs.chosen[row, start : start + len(self.outputs[row].token_ids)].sum())

        return sorted(rows, key=score, reverse=True)[: self._params[request].n]

    def _result(self, request: int, ranked: list[int], num_tokens: int | None = None) -> Result:
        rows, params = self._rows_of[request], self._params[request]
        totals = jax.tree.map(lambda count: count[rows], self.totals)
        generated = num_tokens
        if generated is None:
            generated = sum(len(self.outputs[row].token_ids) for row in rows)
        figures = Metrics(
            num_tokens=generated,
            num_steps=int(totals.steps.sum()),
            num_drafted=int(totals.drafted.sum()),
            num_accepted=int(totals.accepted.sum()),
            acceptance_rate=metrics.acceptance_rate(totals),
            acceptance_rate_per_position=tuple(metrics.acceptance_rate_per_position(totals).tolist()),
            mean_acceptance_length=metrics.mean_acceptance_length(totals),
            seconds=self.seconds,
            tokens_per_second=generated / self.seconds if self.seconds else 0.0,
            system_efficiency=metrics.system_efficiency(totals),
            time_to_first_token=self.time_to_first_token,
            noncausal_acceptance_rate=metrics.noncausal_acceptance_rate(totals),
        )
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            ids = self._prompt_ids[rows[0]]
            prompt_logprobs = [None, *self._listed(rows[0], 1, ids[1:], params.prompt_logprobs)]
        completions = [self._completion(row, params, num_tokens) for row in ranked]
        return Result(self._prompts[request], completions, figures, prompt_logprobs)

    def _completion(self, row: int, params: SamplingParams, num_tokens: int | None) -> Completion:
        output = self.outputs[row]
        token_ids = output.token_ids[:num_tokens]
        is_whole = len(token_ids) == len(output.token_ids)
        logprobs = None
        if params.logprobs is not None:
            logprobs = self._listed(row, len(self._prompt_ids[row]), token_ids, params.logprobs)
        return Completion(
            text=output.text(0, len(token_ids)),
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=output.finish_reason if is_whole else None,
            stop_reason=output.stop_reason if is_whole else None,
        )

    def _listed(self, row: int, start: int, token_ids: list[int], n: int) -> list[TokenLogProbs]:
        """The log-probabilities of tokens that stand from `start` on: of each itself, then of the n most likely."""
        stop = start + len(token_ids)
        chosen, ids, values = (
            array[row, start:stop].tolist()
            for array in (self._log_probs.chosen, self._log_probs.top_ids[..., :n], self._log_probs.top[..., :n])
        )
        listed = []
        for token, own, others, likely in zip(token_ids, chosen, ids, values, strict=True):
            possible = {i: value for i, value in zip(others, likely, strict=True) if value > -math.inf and i != token}
            listed.append({token: own} | possible)
        return listed

    def _step(self, max_steps: int | None) -> list[np.ndarray]:
        """Decode a chunk and read what came of it: the tokens, the lengths and `finished` of all rows."""
        llm = self._llm
        proposer = llm.proposer if self._draft_length is None else self._draft_length.proposer
        self._state = state = decode.generate(
            llm.model, proposer, self._state, verifier=llm.verifier, max_steps=max_steps
        )
        read: Any = state.context.tokens, state.context.length, state.finished, state.totals, state.log_probs
        # Copies: the next chunk reuses the buffers.
        *rows, self.totals, self._log_probs = jax.tree.map(np.array, jax.device_get(read))
        return rows


class Stream:
    """An iterator over the `Piece`s of one request. It can be left at any time: `result` holds what it has given."""

    def __init__(self, batch: Batch):
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
        return self._batch.partial_result(self._num_tokens)

    def _iterate(self) -> Iterator[Piece]:
        output, kinds, before = self._batch.outputs[0], [], self._batch.totals
        for _ in self._batch.run(max_steps=1):
            after = self._batch.totals
            drafted, accepted, emitted = (
                int((getattr(after, name) - getattr(before, name))[0]) for name in ("drafted", "accepted", "emitted")
            )
            last = "target" if drafted == 0 else "bonus" if accepted == drafted else "recovered"
            kinds += (["accepted"] * accepted + [last])[:emitted]
            before = after
            while self._num_tokens < output.num_certain:
                i = self._num_tokens
                self._num_tokens += 1
                yield Piece(output.text(i, i + 1), output.token_ids[i], kinds[i])


def show_progress(chunks: Iterator[None], outputs: Sequence[Output]) -> Iterator[None]:
    """The chunks, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("tokens")
        for _ in chunks:
            counts = [len(output.token_ids) for output in outputs]
            limits = [n if o.finish_reason else o.params.max_tokens for n, o in zip(counts, outputs, strict=True)]
            progress.update(task, completed=sum(counts), total=sum(limits))
            yield


def _round_up(size: int) -> int:
    """A size of few different values, so that few are compiled for: at most 64, or a quarter, larger."""
    size = int(size)
    step = max(64, 1 << size.bit_length() >> 3)
    return -(-size // step) * step
