"""Numbers for Prometheus, by the names that dashboards of language model servers know."""

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from specjax.engine.engine import Engine
from specjax.engine.requests import Result
from specjax.engine.stats import Stats
from specjax.server.remote import RemoteEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS = "stop", "length", "abort"
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)


class ServerMetrics:
    """Count the requests of a server, and write the counts with its engine's in the text format of Prometheus.

    Args:
        engine: the engine.
        model_name: the label model_name of every sample.
    """

    def __init__(self, engine: Engine | RemoteEngine, model_name: str):
        self._engine, self._model = engine, model_name
        self._registry = CollectorRegistry()
        self._finished = dict.fromkeys(REASONS, 0)
        self._first_token = self._histogram("time_to_first_token", "from the request to its first token", _REQUEST)
        self._gap = self._histogram("inter_token_latency", "between two steps that give tokens, in streams", _STEP)
        self._token = self._histogram("request_time_per_output_token", "of a token after the first", _STEP)
        self._whole = self._histogram("e2e_request_latency", "from the request to its last token", _REQUEST)
        self._decode = self._histogram("request_decode_time", "from the first token to the last", _REQUEST)
        self._registry.register(_Engine(self))

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        full = f"specjax:{name}_seconds", f"Seconds {what}."
        return Histogram(*full, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)

    def text(self) -> bytes:
        """Return all numbers in the text format of Prometheus."""
        lines = generate_latest(self._registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line)  # times of creation, which nobody reads

    def record_gap(self, seconds: float) -> None:
        """Count the time between two steps of a stream."""
        self._gap.observe(seconds)

    def record_result(self, result: Result, seconds: float) -> None:
        """Count a request that has ended by itself, `seconds` after it came."""
        for completion in result.completions:
            self._finished["stop" if completion.finish_reason == "stop" else "length"] += 1
        figures = result.metrics
        self._whole.observe(seconds)
        if not math.isnan(figures.time_to_first_token):
            decode = seconds - figures.time_to_first_token
            self._first_token.observe(figures.time_to_first_token)
            self._decode.observe(decode)
            if figures.num_tokens > 1:
                self._token.observe(decode / (figures.num_tokens - 1))

    def record_abort(self) -> None:
        """Count a request that was given up: its client left, or it took too long."""
        self._finished["abort"] += 1


class _Engine(Collector):
    """Read the numbers of an engine when somebody asks for them."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics

    def describe(self) -> list:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        metrics = self._metrics
        stats = metrics._engine.stats()
        for name, what, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"specjax:{name}", what, labels=["model_name"])
            gauge.add_metric([metrics._model], value)
            yield gauge
        for name, what, value in _counters(stats):
            counter = CounterMetricFamily(f"specjax:{name}", what, labels=["model_name"])
            counter.add_metric([metrics._model], value)
            yield counter
        name, what = "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens at a position of the draft."
        places = CounterMetricFamily(f"specjax:{name}", what, labels=["model_name", "position"])
        for position, count in enumerate(stats.num_accepted_at):
            places.add_metric([metrics._model, str(position)], count)
        yield places
        ended = CounterMetricFamily(
            "specjax:request_success", "Completions that have ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in metrics._finished.items():
            ended.add_metric([metrics._model, reason], count)
        yield ended


def _gauges(stats: Stats) -> Iterator[tuple[str, str, float]]:
    yield "num_requests_running", "Samples that have a slot.", stats.num_running
    yield "num_requests_waiting", "Samples that wait for a slot.", stats.num_waiting
    if stats.pages is not None:
        pages = stats.pages
        share = pages.num_used / (pages.num_used + pages.num_free + pages.num_cached)
        yield "kv_cache_usage_perc", "Share of the pages that running samples hold, from 0 to 1.", share


def _counters(stats: Stats) -> Iterator[tuple[str, str, int]]:
    yield "num_preemptions", "Times that a running sample gave its slot up to others.", stats.num_preempted
    yield "prompt_tokens", "Tokens of prompts.", stats.num_prompt_tokens
    yield "generation_tokens", "Generated tokens.", stats.num_tokens
    if stats.pages is not None:
        yield "prefix_cache_queries", "Tokens of prompts that were looked up.", stats.pages.num_query_tokens
        yield "prefix_cache_hits", "Tokens of prompts that were found.", stats.pages.num_hit_tokens
    yield "spec_decode_num_drafts", "Steps with at least one draft token.", stats.num_drafts
    yield "spec_decode_num_draft_tokens", "Draft tokens.", stats.num_drafted
    yield "spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.num_accepted
