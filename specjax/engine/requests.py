"""Parts of a request: its samples, the pieces of their text, and its result."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specjax import metrics
from specjax.decoding.log_probs import LogProbs
from specjax.engine.detokenizer import Detokenizer
from specjax.engine.display import html_of_metrics, html_of_result, line_of_metrics, shortened
from specjax.engine.jobs import Job
from specjax.sampling import Sampling, SamplingParams
from specjax.sampling.guided import Grammar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    seconds: float  # seconds from when its prompt was computed to its end, without compilation
    tokens_per_second: float  # num_tokens / seconds
    system_efficiency: float  # emitted tokens / tokens that would be emitted if every draft were accepted
    time_to_first_token: float  # seconds from the call, with prefill, without compilation; NaN before the first token
    noncausal_acceptance_rate: float  # share of drafts that pass their own test; NaN without verifier option outcomes

    def __repr__(self) -> str:
        return f"Metrics({line_of_metrics(self)})"

    def _repr_html_(self) -> str:
        return html_of_metrics(self)

    def plot(self) -> Any:
        """Draw acceptance and speed, as `specjax.metrics.plot` does for one or several of these.

        Returns:
            A figure of Matplotlib.

        Raises:
            ModuleNotFoundError: Matplotlib is not installed.
        """
        return metrics.plot({"": self})


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


class Completion(NamedTuple):
    """One sampled continuation of a prompt."""

    text: str  # text without the stop string, unless params include it; empty if `detokenize` is False
    token_ids: list[int]  # token ids with the stop token, cut where a stop string cut the text
    logprobs: list[TokenLogProbs] | None  # for each token: its own entry, then the most likely; None if not requested
    finish_reason: str | None  # "stop", "length" (max_tokens or max_length reached), or None if interrupted
    stop_reason: int | str | None  # stop token id or stop string that ended it; None for an end-of-sequence token
    index: int = 0  # number of the sample among the request's samples


class Result(NamedTuple):
    """The completions of one prompt, with metrics."""

    prompt: str | Sequence[int]  # the prompt as it was given
    completions: list[Completion]  # completions, the best first
    metrics: Metrics  # metrics of the request
    prompt_logprobs: list[TokenLogProbs | None] | None = (
        None  # entry of each prompt token after truncation; first is None
    )
    num_prompt_tokens: int = 0  # number of tokens of the prompt after truncation
    num_cached_tokens: int = 0  # number of them that were found in the pages of other requests
    pieces: tuple["Piece", ...] = ()  # tokens of the best completion without log-probabilities; empty from a server

    def __repr__(self) -> str:
        others = f", {len(self.completions)} completions" if len(self.completions) > 1 else ""
        texts = f"{shortened(self.prompt)} -> {shortened(self.text)}"
        return f"Result({texts}, {self.completions[0].finish_reason}{others}, {self.metrics!r})"

    def _repr_html_(self) -> str:
        return html_of_result(self)

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
    index: int = 0  # number of the sample among the request's samples
    logprobs: TokenLogProbs | None = None  # entry of the token, as in `Completion.logprobs`; None if not requested


class Samples:
    """The samples of one request, as jobs of a scheduler: the pieces of their text, and their result.

    Args:
        prompt: the prompt as it was given.
        token_ids: its token ids.
        params: the parameters of the request.
        sampling: what `capacities.of_request` makes of them.
        key_data: [2] uint32, the data of the request's key.
        tokenizer: the tokenizer of the target.
        priority: as `Job.priority`.
        salt: as `Job.salt`.

    Attributes:
        jobs: the samples.
        num_certain: number of tokens of each sample whose text was certain at the last `update`.
        start: time of the call, of `time.perf_counter`.
    """

    def __init__(
        self,
        prompt: str | Sequence[int],
        token_ids: list[int],
        params: SamplingParams,
        sampling: Sampling,
        key_data: np.ndarray,
        tokenizer: "Tokenizer",
        priority: int = 0,
        salt: bytes = b"",
    ):
        self._prompt, self.params = prompt, params
        self.jobs = [
            Job(
                token_ids,
                sampling,
                key_data,
                Detokenizer(tokenizer, token_ids, params),
                sample,
                priority,
                wants_log_probs=params.logprobs is not None or params.num_samples > 1,
                wants_prompt_log_probs=params.prompt_logprobs is not None and sample == 0,
                grammar=params.guided_decoding if isinstance(params.guided_decoding, Grammar) else None,
                salt=salt,
            )
            for sample in range(params.num_samples)
        ]
        self.num_certain = [0] * len(self.jobs)
        self.start, self._time_to_first_token = time.perf_counter(), math.nan
        self._begin = self._end = math.nan  # of decoding
        self._has_tokens = False  # at the last `update`

    @property
    def is_done(self) -> bool:
        """Whether every sample has ended."""
        return all(job.is_done for job in self.jobs)

    def update(self, clock: float) -> bool:
        """Note the new tokens of a round of the scheduler.

        Args:
            clock: the time of `time.perf_counter`, less the seconds of compiling since `start`.

        Returns:
            Whether more tokens are certain.
        """
        self._end = clock
        if not self._has_tokens:
            self._note_first(clock)
        num_certain = [job.output.num_certain for job in self.jobs]
        if num_certain == self.num_certain:
            return False
        self.num_certain = num_certain
        return True

    def _note_first(self, clock: float) -> None:
        """Note the time when decoding begins, and when there are tokens."""
        self._has_tokens = any(job.kinds for job in self.jobs)
        if math.isnan(self._begin) and (self._has_tokens or any(job.is_active for job in self.jobs)):
            self._begin = clock
        if self._has_tokens:
            self._time_to_first_token = clock - self.start

    def pieces(self, sample: int) -> Iterator[Piece]:
        """Yield the tokens of a sample. At most as many as are certain may be taken so far."""
        job, n = self.jobs[sample], self.params.logprobs
        entries = itertools.repeat(None) if n is None else _list_log_probs(job, n)
        for i in itertools.count():
            output = job.output
            yield Piece(output.text(i, i + 1), output.token_ids[i], job.kinds[i], sample, next(entries))

    def result(self, num_tokens: int | None = None) -> Result:
        """Return the result with the n best completions, the best first, each cut to `num_tokens` if that is given."""
        ranked, first, n = self.jobs, self.jobs[0], self.params.prompt_logprobs
        if len(ranked) > 1:
            ranked = sorted(ranked, key=_total_log_prob, reverse=True)[: self.params.n]
        totals: list[Any] = [of_job for job in self.jobs if (of_job := job.totals) is not None]
        if not totals:
            totals = [[np.asarray(x)[0] for x in metrics.zeros(1, 0)]]
        counts: Any = map(np.array, zip(*totals, strict=True))
        generated = sum(len(job.output.token_ids) for job in self.jobs) if num_tokens is None else num_tokens
        prompt_logprobs = None
        if n is not None and first.prompt_log_probs is not None:
            prompt_logprobs = [None, *_listed(first.prompt[1:], first.prompt_log_probs, n)]
        return Result(
            self._prompt,
            [self._completion(job, num_tokens) for job in ranked],
            metrics_of(
                metrics.Totals(*counts),
                generated,
                0.0 if math.isnan(self._begin) else self._end - self._begin,
                self._time_to_first_token,
            ),
            prompt_logprobs,
            num_prompt_tokens=len(first.prompt),
            num_cached_tokens=first.num_cached_tokens,
            pieces=_plain_pieces(ranked[0], num_tokens),
        )

    def _completion(self, job: Job, num_tokens: int | None) -> Completion:
        output, n = job.output, self.params.logprobs
        token_ids = output.token_ids[:num_tokens]
        is_whole = len(token_ids) == len(output.token_ids)
        return Completion(
            text=output.text(0, len(token_ids)),
            token_ids=token_ids,
            logprobs=None if n is None else list(itertools.islice(_list_log_probs(job, n), len(token_ids))),
            finish_reason=output.finish_reason if is_whole else None,
            stop_reason=output.stop_reason if is_whole else None,
            index=job.sample,
        )


def _plain_pieces(job: Job, num_tokens: int | None) -> tuple[Piece, ...]:
    """Return the tokens of a job without log-probabilities, cut to `num_tokens` if that is given."""
    output = job.output
    return tuple(map(Piece, output.texts(num_tokens), output.token_ids, job.kinds, itertools.repeat(job.sample)))


def _list_log_probs(job: Job, n: int) -> Iterator[TokenLogProbs]:
    """Yield the log-probability of each token of a job's output, then of the n most likely tokens beside it."""
    start = 0
    for part in job.log_probs:  # which may grow meanwhile
        tokens = job.output.token_ids[start : start + len(part.chosen)]
        start += len(part.chosen)
        yield from _listed(tokens, part, n)


def _listed(tokens: Sequence[int], log_probs: LogProbs, n: int) -> list[TokenLogProbs]:
    """Return the log-probability of each token, then of the n most likely tokens that are possible.

    Args:
        tokens: the token ids.
        log_probs: fields [number of tokens or more, ...].
        n: how many of the most likely tokens to list.
    """
    arrays = log_probs.chosen, log_probs.top_ids[:, :n], log_probs.top[:, :n]
    rows = (np.asarray(array)[: len(tokens)].tolist() for array in arrays)
    listed = []
    for token, own, others, likely in zip(tokens, *rows, strict=True):
        possible = {i: value for i, value in zip(others, likely, strict=True) if value > -math.inf and i != token}
        listed.append({token: own} | possible)
    return listed


def _total_log_prob(job: Job) -> float:
    chosen = np.concatenate([np.asarray(part.chosen) for part in job.log_probs])
    return float(chosen[: len(job.output.token_ids)].sum())
