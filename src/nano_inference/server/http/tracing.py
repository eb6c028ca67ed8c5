"""OpenTelemetry spans, one for each generation that ended or was rejected.

Attribute names follow its conventions for generative AI, and otherwise vLLM.
"""

import time
from typing import Any

from nano_inference.errors import ConfigError
from nano_inference.server.http.replies import RequestRecord

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/inference/v1/generate": "text_completion",
}


class Tracer:
    """Sender of spans to a collector, in the background and in batches.

    Args:
        endpoint: The collector's URL for traces over HTTP, such as
            `http://127.0.0.1:4318/v1/traces`.

    Raises `ConfigError` if OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: "
                "pip install 'nano-inference[otel]'"
            ) from None
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "nano-inference"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("nano_inference")
        self._context = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)

    def ended(self, record: RequestRecord) -> None:
        """Send the span of an answered request. The span of its `traceparent` is the parent."""
        operation = OPERATIONS.get(record.path)
        if operation is None:
            return
        end = time.time_ns()
        start = end - round(record.seconds * 1e9)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "nano-inference",
            "gen_ai.request.model": record.model,
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.choice.count": record.num_samples,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.latency.time_to_first_token": record.first_token,
            "http.route": record.path,
            "http.response.status_code": record.status,
            "error.type": record.problem,
        }
        parent = {} if record.traceparent is None else {"traceparent": record.traceparent}
        span = self._tracer.start_span(
            f"{operation} {record.model or ''}".strip(),
            self._context.extract(parent),
            self._kind,
            {name: value for name, value in attributes.items() if value is not None},
            start_time=start,
        )
        if record.problem is not None:
            span.set_status(self._error)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans. Blocks for a few seconds at most."""
        self._provider.shutdown()
