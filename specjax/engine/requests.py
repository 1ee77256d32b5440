"""Run a batch of requests: feed the prompts, decode on the device, and collect texts, tokens and metrics."""

import itertools
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
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.draft_length import DraftLength
from specjax.proposers import DraftModel
from specjax.sampling import SamplingParams
from specjax.sampling.guided.tables import round_up

if TYPE_CHECKING:
    from specjax.engine.llm import LLM
    from specjax.engine.scheduler import Job

STEPS_PER_CHUNK = 8  # steps on the device before the host looks for stop strings, and before it chooses K again


@partial(jax.jit, static_argnames=("max_length", "num_logprobs", "prompt_logprobs"))
def _prefill(model, proposer, prompts, lengths, sampling, key_data, sample, **options):
    """Call `decode.prefill` on rows that are samples of requests.

    Args:
        model, proposer, prompts, lengths, sampling, options: as `decode.prefill` takes them.
        key_data: [B, 2] uint32, data of the key of each row's request.
        sample: [B] uint32, index of each row among the samples of its request.
    """
    keys = streams.samples(jax.random.wrap_key_data(key_data, impl="threefry2x32"), sample)
    return decode.prefill(model, proposer, prompts, lengths, sampling, keys, **options)


TokenLogProbs = dict[int, float]  # token id -> log-probability


class Metrics(NamedTuple):
    """Metrics of one request, over all its completions. Rates are NaN where nothing was drafted."""

    num_tokens: int  # number of generated tokens
    num_steps: int  # number of steps, summed over the samples
    num_drafted: int  # number of draft tokens
    num_accepted: int  # number of accepted draft tokens
    acceptance_rate: float  # num_accepted / num_drafted
    acceptance_rate_per_position: tuple[float, ...]  # acceptance rate at each of the K positions of a draft
    mean_acceptance_length: float  # mean tokens of a step with drafts, before stop conditions cut the output
    seconds: float  # seconds of the batch in the decoding loop, without compilation and prefill
    tokens_per_second: float  # num_tokens / seconds
    system_efficiency: float  # emitted tokens / tokens that would be emitted if every draft were accepted
    time_to_first_token: float  # seconds from the call, with prefill and compilation; NaN before the first token
    noncausal_acceptance_rate: float  # share of drafts that pass their own test; NaN without verifier option outcomes


def metrics_of(totals: metrics.Totals, num_tokens: int, seconds: float, time_to_first_token: float) -> Metrics:
    """Return the metrics of a request from the counts of its samples, fields [samples, ...], and its times."""
    return Metrics(
        num_tokens=num_tokens,
        num_steps=int(totals.steps.sum()),
        num_drafted=int(totals.drafted.sum()),
        num_accepted=int(totals.accepted.sum()),
        acceptance_rate=metrics.acceptance_rate(totals),
        acceptance_rate_per_position=tuple(metrics.acceptance_rate_per_position(totals).tolist()),
        mean_acceptance_length=metrics.mean_acceptance_length(totals),
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        system_efficiency=metrics.system_efficiency(totals),
        time_to_first_token=time_to_first_token,
        noncausal_acceptance_rate=metrics.noncausal_acceptance_rate(totals),
    )


def list_log_probs(
    tokens: Sequence[int], chosen: Sequence[float], ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]]
) -> list[TokenLogProbs]:
    """Return for each token its own log-probability, then those of the most likely tokens that are possible.

    Args:
        tokens: the token ids.
        chosen: the log-probability of each.
        ids: the most likely tokens in the place of each.
        values: their log-probabilities.
    """
    listed = []
    for token, own, others, likely in zip(tokens, chosen, ids, values, strict=True):
        possible = {i: value for i, value in zip(others, likely, strict=True) if value > -math.inf and i != token}
        listed.append({token: own} | possible)
    return listed


class Completion(NamedTuple):
    """One sampled continuation of a prompt."""

    text: str  # text without the stop string, unless params include it; empty if `detokenize` is False
    token_ids: list[int]  # token ids with the stop token, cut where a stop string cut the text
    logprobs: list[TokenLogProbs] | None  # for each token: its own entry, then the most likely; None if not requested
    finish_reason: str | None  # "stop", "length" (max_tokens or max_length reached), or None if interrupted
    stop_reason: int | str | None  # stop token id or stop string that ended it; None for an end-of-sequence token
    index: int = 0  # number of the sample among those of the request


class Result(NamedTuple):
    """The completions of one prompt, with metrics."""

    prompt: str | Sequence[int]  # the prompt as it was given
    completions: list[Completion]  # completions, the best first
    metrics: Metrics  # metrics of the request
    prompt_logprobs: list[TokenLogProbs | None] | None = (
        None  # entry of each prompt token after truncation; first is None
    )
    num_prompt_tokens: int = 0  # number of tokens of the prompt after truncation
    num_cached_tokens: int = 0  # number of them that were found in the pages of others

    @property
    def text(self) -> str:
        """The text of the best completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the best completion."""
        return self.completions[0].token_ids


class Piece(NamedTuple):
    """One token of a stream."""

    text: str  # text of the token; empty if it is special, or if its character ends in a later token
    token_id: int  # id of the token
    kind: str  # "accepted" draft, "recovered" after a rejection, "bonus" after full acceptance, "target" without drafts
    index: int = 0  # number of the sample among those of the request
    logprobs: TokenLogProbs | None = None  # entry of the token, as in `Completion.logprobs`; None if not requested


class Samples:
    """The samples of one request: their text as it becomes certain, and their result.

    Args:
        prompt: the prompt as it was given.
        params: the parameters of the request.
        jobs: its samples, which a scheduler works on.
    """

    def __init__(self, prompt: str | Sequence[int], params: SamplingParams, jobs: Sequence["Job"]):
        self.prompt, self.params, self.jobs = prompt, params, jobs

    def pieces(self, sample: int) -> Iterator[Piece]:
        """Yield the tokens of a sample. At most as many as are certain may be taken so far."""
        job = self.jobs[sample]
        entries = itertools.repeat(None) if self.params.logprobs is None else list_entries(job, self.params.logprobs)
        for i in itertools.count():
            output = job.output
            yield Piece(output.text(i, i + 1), output.token_ids[i], job.kinds[i], sample, next(entries))

    def result(self, seconds: float, time_to_first_token: float) -> Result:
        """Return the result with the n best completions, the best first."""
        ranked = self.jobs
        if len(ranked) > 1:
            ranked = sorted(ranked, key=_total_log_prob, reverse=True)[: self.params.n]
        totals = jax.tree.map(lambda *counts: np.stack(counts), *(job.totals for job in self.jobs))
        num_tokens = sum(len(job.output.token_ids) for job in self.jobs)
        first = self.jobs[0]
        return Result(
            self.prompt,
            [self._completion(job) for job in ranked],
            metrics_of(totals, num_tokens, seconds, time_to_first_token),
            prompt_logprobs=self._prompt_logprobs(),
            num_prompt_tokens=len(first.prompt),
            num_cached_tokens=first.num_cached_tokens,
        )

    def _prompt_logprobs(self) -> list[TokenLogProbs | None] | None:
        first, n = self.jobs[0], self.params.prompt_logprobs
        if n is None:
            return None
        entries = first.prompt_log_probs
        assert entries is not None, "they are read with the first step"
        arrays = entries.chosen, entries.top_ids[:, :n], entries.top[:, :n]
        return [None, *list_log_probs(first.prompt[1:], *(np.asarray(array).tolist() for array in arrays))]

    def _completion(self, job: "Job") -> Completion:
        output, n = job.output, self.params.logprobs
        return Completion(
            text=output.text(0, len(output.token_ids)),
            token_ids=output.token_ids,
            logprobs=None if n is None else list(list_entries(job, n)),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            index=job.sample,
        )


def list_entries(job: "Job", n: int) -> Iterator[TokenLogProbs]:
    """Yield for each token of a job's output its own log-probability, then those of the n most likely tokens."""
    start = 0
    for part in job.log_probs:  # which may grow meanwhile
        tokens = job.output.token_ids[start : start + len(part.chosen)]
        start += len(part.chosen)
        arrays = part.chosen, part.top_ids[:, :n], part.top[:, :n]
        yield from list_log_probs(tokens, *(np.asarray(array)[: len(tokens)].tolist() for array in arrays))


def _total_log_prob(job: "Job") -> float:
    chosen = np.concatenate([np.asarray(part.chosen) for part in job.log_probs])
    return float(chosen[: len(job.output.token_ids)].sum())


class Batch:
    """Hold one batch of requests: its outputs on the host and its decoding state on the device.

    Every sample of a request is a row. Rows with the same prompt share its prefill. The constructor feeds the prompts
    and compiles the decoding loop.

    Args:
        llm: the models, tokenizer and limits.
        prompts: prompts as they were given.
        prompt_ids: token ids of each prompt.
        params: parameters of each request.
        key_data: [number of requests, 2] uint32, data of the key of each request.

    Attributes:
        detokenizers: the output of each row.
        totals: counts of each row, for metrics.
        seconds: seconds in the decoding loop.
        time_to_first_token: seconds from the call to the first token; NaN before it.
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
        request = np.repeat(np.arange(len(params)), counts).tolist()  # index of each row's request
        sample = np.concatenate([np.arange(count) for count in counts])  # index of each row within its request
        self._request_rows = np.split(np.arange(len(request)), np.cumsum(counts)[:-1])
        row_ids, row_params = [prompt_ids[i] for i in request], [params[i] for i in request]
        self.detokenizers = [Detokenizer(llm.tokenizer, *row) for row in zip(row_ids, row_params, strict=True)]
        self._prompt_ids, self._num_read = row_ids, np.array([len(row) for row in row_ids])

        # Equal prompts are prefilled once; `shared` maps each row to its prompt in `unique`.
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
        if llm.chooses_draft_length and isinstance(llm.proposer, DraftModel):
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
        self._step(0)  # compile the loop now, so that later calls are timed without compilation
        self.seconds, self.time_to_first_token = 0.0, math.nan

    def run(self, max_steps: int | None) -> Iterator[None]:
        """Decode one step and then chunks of `max_steps` steps (None: until the end); yield after each chunk.

        At each yield, `detokenizers`, `totals` and the times are up to date.
        """
        num_steps, num_taken, is_running = 1, 0, True
        while is_running:
            start = time.perf_counter()
            tokens, length, finished = self._step(num_steps)
            end = time.perf_counter()
            self.seconds += end - start
            if math.isnan(self.time_to_first_token):
                self.time_to_first_token = end - self._start
            for i, output in enumerate(self.detokenizers):
                if output.finish_reason is None:
                    output.extend(tokens[i, self._num_read[i] : length[i]].tolist())
                if output.finish_reason is None and finished[i] != decode.RUNNING:
                    output.finish(finished[i] == decode.STOP, self._llm.eos_token_ids)
            self._num_read = length
            is_done = np.array([output.finish_reason is not None for output in self.detokenizers])
            if np.any(is_done & (finished == decode.RUNNING)):
                self._state = decode.deactivate(self._state, jnp.asarray(is_done))
            if self._draft_length is not None:
                assert num_steps is not None, "K is chosen between chunks of steps"
                num_taken += num_steps
                if num_taken % STEPS_PER_CHUNK == 1:  # after steps 1, 9, 17, ..., in chunks or one at a time
                    self._draft_length.update(self.totals)
            num_steps, is_running = max_steps, not is_done.all()
            if is_running and self._draft_length is not None:
                self._step(0)  # the next chunk may have another K: compile it outside the time that is measured
            yield

    def results(self) -> list[Result]:
        """Return the result of each request, with its n best completions, the best first."""
        return [self._result(i, self._ranked(i)) for i in range(len(self._params))]

    def partial_result(self, num_tokens: int) -> Result:
        """Return the result of the first `num_tokens` tokens of a batch of one row."""
        return self._result(0, [0], num_tokens)

    def _ranked(self, request: int) -> list[int]:
        """Return the rows of a request's n best completions, sorted by their total log-probability."""
        rows = self._request_rows[request].tolist()
        if len(rows) == 1:
            return rows

        def score(row: int) -> float:
            start = len(self._prompt_ids[row])
            return float(self._log_probs.chosen[row, start : start + len(self.detokenizers[row].token_ids)].sum())

        return sorted(rows, key=score, reverse=True)[: self._params[request].n]

    def _result(self, request: int, ranked: list[int], num_tokens: int | None = None) -> Result:
        """Return the result of a request from its ranked rows, cut to `num_tokens` if that is given."""
        rows, params = self._request_rows[request], self._params[request]
        totals = jax.tree.map(lambda count: count[rows], self.totals)
        generated = num_tokens
        if generated is None:
            generated = sum(len(self.detokenizers[row].token_ids) for row in rows)
        figures = metrics_of(totals, generated, self.seconds, self.time_to_first_token)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            ids = self._prompt_ids[rows[0]]
            prompt_logprobs = [None, *self._list_log_probs(rows[0], 1, ids[1:], params.prompt_logprobs)]
        completions = [self._completion(row, params, num_tokens) for row in ranked]
        return Result(self._prompts[request], completions, figures, prompt_logprobs)

    def _completion(self, row: int, params: SamplingParams, num_tokens: int | None) -> Completion:
        """Return the completion of a row, cut to `num_tokens` if that is given."""
        output = self.detokenizers[row]
        token_ids = output.token_ids[:num_tokens]
        is_whole = len(token_ids) == len(output.token_ids)
        logprobs = None
        if params.logprobs is not None:
            logprobs = self._list_log_probs(row, len(self._prompt_ids[row]), token_ids, params.logprobs)
        return Completion(
            text=output.text(0, len(token_ids)),
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=output.finish_reason if is_whole else None,
            stop_reason=output.stop_reason if is_whole else None,
        )

    def _list_log_probs(self, row: int, start: int, token_ids: list[int], n: int) -> list[TokenLogProbs]:
        """Return the log-probabilities at each of the tokens from position `start` on.

        Each entry holds the token itself and then the n most likely tokens of that position.
        """
        stop = start + len(token_ids)
        chosen, ids, values = (
            array[row, start:stop].tolist()
            for array in (self._log_probs.chosen, self._log_probs.top_ids[..., :n], self._log_probs.top[..., :n])
        )
        return list_log_probs(token_ids, chosen, ids, values)

    def _step(self, max_steps: int | None) -> list[np.ndarray]:
        """Decode a chunk of steps, and return the tokens [B, L], lengths [B] and `finished` [B] of all rows."""
        llm = self._llm
        proposer = llm.proposer if self._draft_length is None else self._draft_length.proposer
        self._state = state = decode.generate(
            llm.model, proposer, self._state, verifier=llm.verifier, max_steps=max_steps
        )
        read: Any = state.context.tokens, state.context.length, state.finished, state.totals, state.log_probs
        # The next chunk reuses these buffers, so the host keeps copies.
        *rows, self.totals, self._log_probs = jax.tree.map(np.array, jax.device_get(read))
        return rows


class Stream:
    """Iterate over the `Piece`s of one request. Iteration may end early; `result` covers the pieces given so far."""

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
        """The result that the pieces given so far make up."""
        return self._batch.partial_result(self._num_tokens)

    def _iterate(self) -> Iterator[Piece]:
        output, kinds, before = self._batch.detokenizers[0], [], self._batch.totals
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


def show_progress(chunks: Iterator[None], detokenizers: Sequence[Detokenizer]) -> Iterator[None]:
    """Yield the chunks while a progress bar on standard error counts the tokens."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("tokens")
        for _ in chunks:
            counts = [len(each.token_ids) for each in detokenizers]
            limits = [n if d.finish_reason else d.params.max_tokens for n, d in zip(counts, detokenizers, strict=True)]
            progress.update(task, completed=sum(counts), total=sum(limits))
            yield


def _round_up(size: int) -> int:
    """Round a size up by at most 64, or a quarter if that is more, so that few different sizes are compiled."""
    size = int(size)
    step = max(64, 1 << size.bit_length() >> 3)
    return -(-size // step) * step
