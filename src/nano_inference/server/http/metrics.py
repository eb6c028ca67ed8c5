"""Prometheus metrics: vLLM's names with our prefix, so that its dashboards need one replacement.

Requests are measured here as clients see them. The engine's counters come from its last report when
Prometheus scrapes. Only streams have times of first and next tokens, because the server receives
other requests when they are complete.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nano_inference.remote.client import EngineClient
from nano_inference.remote.status import BUCKETS, FleetReport, ReplicaStatus
from nano_inference.server.api.shared.generation import Generation
from nano_inference.server.http.replies import RequestRecord
from nano_inference.types import EngineStats, SpeculationStats

PREFIX = "nano_inference_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
_LONG = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_FEW = (1, 2, 4, 8, 16, 32, 64, 128)

_HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "Seconds from a streamed request's arrival to its first tokens.",
        _FIRST,
    ),
    "inter_token_latency_seconds": ("Seconds between two events of a stream.", _SHORT),
    "request_time_per_output_token_seconds": (
        "Seconds per token of a stream after its first token.",
        _SHORT,
    ),
    "e2e_request_latency_seconds": ("Seconds from arrival to the end of the reply.", _LONG),
    "request_queue_time_seconds": ("Seconds until the engine schedules the request.", _LONG),
    "request_prefill_time_seconds": (
        "Seconds from scheduling to the first token of a stream.",
        _LONG,
    ),
    "request_decode_time_seconds": (
        "Seconds from the first to the last token of a stream.",
        _LONG,
    ),
    "request_inference_time_seconds": ("Seconds in the engine, without the queue.", _LONG),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Completion tokens of a request.", _TOKENS),
    "request_params_n": ("Samples of a request.", _FEW),
    "request_params_max_tokens": ("max_tokens of a request.", _TOKENS),
}
_COUNTERS = {
    "request_success": ("Samples that ended, by reason.", "finished_reason"),
    "request_errors": ("Requests answered with an error, by HTTP status.", "status"),
    "admission_rejections": ("Requests rejected before they ran, by reason.", "reason"),
}
# status -> reason of `admission_rejections`, unless the code of a 503 is more specific
_REASONS = {
    401: "key",
    403: "key",
    408: "timeout",
    413: "body_too_large",
    429: "queue_full",
    503: "not_serving",
}
_NO_DRAFTS = SpeculationStats((), {}, {})
_NOT_SERVING = frozenset(("starting", "overloaded", "draining", "engine_dead", "engine_restarting"))


class Metrics:
    """Metrics of one server.

    Args:
        engines: Returns the clients whose reports contain the engines' counters, by model name.
    """

    def __init__(self, engines: Callable[[], Mapping[str, EngineClient]]) -> None:
        self.model_name = ""  # label of requests that reached no model; known at the start
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines))
        self._families = {
            name: Histogram(
                PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, ("model_name", label), registry=self._registry)
            for name, (text, label) in _COUNTERS.items()
        }
        self._bound: dict[str, dict[str, Histogram]] = {}

    def serve(self, model_name: str) -> None:
        """Add a model, whose metrics are all zero. The first one is the label of other requests."""
        self.model_name = self.model_name or model_name
        self._bound[model_name] = {
            name: family.labels(model_name) for name, family in self._families.items()
        }

    def count(self, name: str, label: str, model: str | None = None) -> None:
        """Increment a counter."""
        self._counters[name].labels(model or self.model_name, label).inc()

    def refused(self, status: int, problem: str | None, model: str | None = None) -> None:
        """Count a request answered with an error status. `problem` is the error's code, if any."""
        self.count("request_errors", str(status), model)
        if status in _REASONS:
            reason = problem if problem in _NOT_SERVING else _REASONS[status]
            self.count("admission_rejections", reason, model)

    def sent(self, record: RequestRecord) -> None:
        """Measure an event of a stream. Called for every event, so it must be cheap."""
        now = time.perf_counter()
        if record.first_token is None:
            record.first_token = now - record.started
        else:
            bound = self._bound[record.model or self.model_name]
            bound["inter_token_latency_seconds"].observe(now - record.last_event)
        record.last_event = now

    def ended(self, record: RequestRecord, generation: Generation, seconds: float) -> None:
        """Measure a generation that ended."""
        usage, asks, model = generation.usage, generation.builder.asks, record.model
        bound = self._bound[model or self.model_name]

        def observe(name: str, value: float) -> None:
            bound[name].observe(value)

        for choice in generation.choices:
            reason = "abort" if choice.finished is None else choice.finished.finish_reason
            self.count("request_success", reason, model)
        if not asks:  # it only loaded its model
            return
        observe("e2e_request_latency_seconds", seconds)
        observe("request_prompt_tokens", usage.prompt_tokens)
        observe("request_generation_tokens", usage.completion_tokens)
        observe("request_params_n", max(ask.num_samples for ask in asks))
        observe("request_params_max_tokens", max(ask.params.max_tokens for ask in asks))
        queued = generation.queued
        observe("request_queue_time_seconds", queued)
        observe("request_inference_time_seconds", max(0.0, seconds - queued))
        if record.first_token is not None:
            decode = seconds - record.first_token
            observe("time_to_first_token_seconds", record.first_token)
            observe("request_prefill_time_seconds", max(0.0, record.first_token - queued))
            observe("request_decode_time_seconds", decode)
            if usage.completion_tokens > len(generation.choices):
                per_choice = usage.completion_tokens / len(generation.choices)
                observe("request_time_per_output_token_seconds", decode / (per_choice - 1))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Collector of the engines' last reported counters."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineClient]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of a scrape, each with the samples of all models."""
        merged: dict[str, Metric] = {}
        for model, client in self._engines().items():
            for metric in _of_engine(client, model):
                merged.setdefault(metric.name, metric)
                if merged[metric.name] is not metric:
                    merged[metric.name].samples += metric.samples
        return merged.values()


def _of_engine(client: EngineClient, model: str) -> Iterable[Metric]:
    gauges: dict[str, tuple[str, float]] = {
        "num_samples": (
            "Running and waiting samples, as counted by the server.",
            client.num_samples,
        ),
        "engine_up": ("1 if the engine serves, else 0.", float(client.why_dead is None)),
    }
    counters: dict[str, tuple[str, float]] = {}
    stats = client.stats
    if stats is not None:
        gauges |= _gauges(stats)
        counters = _counters(stats)
    names, values = ("model_name",), (model,)
    for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, value) in metrics.items():
            yield _family(kind, name, text, names, [(values, value)])
    if stats is not None:  # only sum and count: an average over time
        steps = HistogramMetricFamily(
            PREFIX + "iteration_tokens_total", "Tokens of a step.", labels=names
        )
        steps.add_metric(values, [("+Inf", stats.num_steps)], stats.tokens_computed)
        yield steps
        if stats.speculation is not None:
            yield from _of_drafts(stats.speculation, model)
    if (report := client.replica_report()) is not None:
        yield from _of_replicas(report, model)


def _family(
    kind: type[Any], name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Any, float]]
) -> Metric:
    """Make a metric with a value for each combination of labels."""
    family = kind(PREFIX + name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _of_drafts(drafts: SpeculationStats, model: str) -> Iterable[Metric]:
    """Yield drafts by source and position after the known tokens (from 0), and step costs."""
    for name, text, counts in (
        ("draft", "Rows computed for drafts, by source and position.", drafts.drafted),
        ("accepted", "Accepted drafts, by source and position.", drafts.accepted),
    ):
        yield _family(
            CounterMetricFamily,
            f"spec_decode_num_{name}_tokens_per_pos",
            text,
            ("model_name", "source", "position"),
            [
                ((model, source, str(place)), count)
                for source, places in counts.items()
                for place, count in enumerate(places)
            ],
        )
    yield _family(
        GaugeMetricFamily,
        "spec_decode_step_seconds",
        "Seconds of a step measured at start, by its rows.",
        ("model_name", "rows"),
        [
            ((model, str(rows)), seconds)
            for rows, seconds in zip(drafts.step_rows, drafts.step_seconds, strict=True)
        ],
    )


def _of_replicas(report: FleetReport, model: str) -> Iterable[Metric]:
    def metric(
        kind: type[Any], name: str, text: str, value: Callable[[ReplicaStatus], float | None]
    ) -> Metric:
        values = ((status, value(status)) for status in report.replicas)
        known = [([model, status.name], at) for status, at in values if at is not None]
        return _family(kind, name, text, labels, known)

    moves, labels, model_only = report.moves, ("model_name", "replica"), ("model_name",)
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield metric(gauge, "replica_waiting", "Waiting samples of a replica.", lambda s: s.waiting)
    yield metric(gauge, "replica_running", "Running samples of a replica.", lambda s: s.running)
    yield metric(
        gauge,
        "replica_weight_version",
        "Weight version of a replica.",
        lambda s: s.weight_version,
    )
    yield metric(
        counter, "replica_starts", "Engines started for a replica.", lambda s: s.num_starts
    )
    yield _family(
        gauge,
        "replica_state",
        "1 for the replica's current state.",
        (*labels, "state"),
        [([model, status.name, status.state], 1) for status in report.replicas],
    )
    yield _family(
        counter, "replica_deaths", "Replicas that died.", model_only, [([model], report.deaths)]
    )
    yield _family(
        counter,
        "requests_moved",
        "Requests that another replica took over.",
        model_only,
        [([model], moves.moved)],
    )
    pauses = HistogramMetricFamily(
        PREFIX + "failover_pause_seconds",
        "Seconds between the last event before and the first event after a move.",
        labels=model_only,
    )
    counts = list(accumulate(moves.counts))
    pauses.add_metric(
        [model], list(zip((*map(str, BUCKETS), "+Inf"), counts, strict=True)), moves.seconds
    )
    yield pauses


def leaked_blocks(stats: EngineStats) -> int:
    """Return the number of KV blocks in use although no request runs or waits. Above 0, it is a
    bug.
    """
    is_idle = not (stats.num_running or stats.num_waiting or stats.num_held)
    return round(stats.kv_use * stats.num_blocks) if is_idle else 0


def _gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    return {
        "num_requests_running": ("Running sequences.", stats.num_running),
        "num_requests_waiting": ("Waiting sequences.", stats.num_waiting + stats.num_held),
        "kv_cache_usage_perc": (
            "Fraction of the KV cache in use, from 0 to 1.",
            stats.kv_use,
        ),
        "kv_leaked_blocks": (
            "KV blocks in use while nothing runs or waits. Above 0, it is a bug.",
            leaked_blocks(stats),
        ),
        "kv_kept_blocks": (
            "Kept KV blocks in memory.",
            stats.num_kept_blocks,
        ),
        "kv_kept_file_bytes": (
            "Bytes of evicted kept blocks in files.",
            stats.kept_file_bytes,
        ),
    }


def _counters(stats: EngineStats) -> dict[str, tuple[str, float]]:
    asked = stats.prompt_tokens_computed + stats.prompt_tokens_cached
    drafts = stats.speculation or _NO_DRAFTS
    return {
        "spec_decode_num_drafts": (
            "Times that a sequence had drafts in a step.",
            sum(places[0] for places in drafts.drafted.values() if places),
        ),
        "spec_decode_num_draft_tokens": (
            "Rows computed for drafts.",
            drafts.num_drafted,
        ),
        "spec_decode_num_accepted_tokens": ("Accepted drafts.", drafts.num_accepted),
        "spec_decode_num_wasted_rows": (
            "Rows computed for drafts that were not accepted.",
            drafts.num_drafted - drafts.num_accepted,
        ),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", asked),
        "prefix_cache_hits": ("Prompt tokens found there.", stats.prompt_tokens_cached),
        "kv_kept_blocks_written": ("Kept blocks written to files.", stats.kept_blocks_written),
        "kv_kept_blocks_read": ("Kept blocks read back.", stats.kept_blocks_read),
        "num_preemptions": (
            "Preempted sequences, which are computed again.",
            stats.num_preemptions,
        ),
        "prompt_tokens": ("Prompt tokens, computed or cached.", asked),
        "generation_tokens": ("Tokens sampled.", stats.completion_tokens),
        "num_steps": ("Steps of the engine.", stats.num_steps),
        "grammars_compiled": ("Compiled grammars.", stats.grammars_compiled),
        "grammars_failed": (
            "Grammars whose compilation failed or timed out.",
            stats.grammars_failed,
        ),
        "grammar_seconds": ("Seconds spent on compiling grammars.", stats.grammar_seconds),
    }
