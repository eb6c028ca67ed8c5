"""Spans reach an OpenTelemetry collector."""

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nano_inference.errors import ConfigError
from nano_inference.server.config import ServerConfig
from nano_inference.server.http.tracing import Tracer
from nano_inference.server.main import running_server
from tests.server.scripted import Script, ScriptedClient


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Yield the collector's URL and the list of received spans."""
    bodies = list[bytes]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()
        thread.join()


@pytest.mark.thorough
def test_generation_is_a_span_of_its_clients_trace(
    collector: tuple[str, list[bytes]],
) -> None:
    url, bodies = collector
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    client = ScriptedClient(Script("Hello there."))
    config = ServerConfig(port=0, otlp_traces_endpoint=url)
    with running_server(client, config) as server:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        asked = httpx.post(f"{server}/v1/chat/completions", json=chat, headers=headers)
        assert asked.status_code == 200
        assert httpx.post(f"{server}/v1/completions", json={"prompt": 3.5}).status_code == 400
        assert httpx.get(f"{server}/v1/models").status_code == 200
    spans = [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    good, bad = sorted(spans, key=lambda span: span.start_time_unix_nano)
    told = {
        each.key: each.value.string_value or each.value.int_value or each.value.double_value
        for each in good.attributes
    }
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (trace, parent)
    assert good.name == "chat scripted"
    assert told["gen_ai.usage.output_tokens"] == len(client.tokenizer.encode("Hello there.")) + 1
    assert told["http.response.status_code"] == 200
    first = float(told["gen_ai.latency.time_to_first_token"])
    assert 0 < first * 1e9 <= good.end_time_unix_nano - good.start_time_unix_nano
    assert bad.status.code == 2
    assert bad.trace_id.hex() != trace


def test_tracing_is_rejected_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"nano-inference\[otel\]"):
        Tracer("http://127.0.0.1:4318/v1/traces")
