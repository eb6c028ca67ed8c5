"""Requests that end early: clients that disconnect or stop reading, timeouts, full queues."""

import asyncio
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import httpx
import psutil
import pytest
import uvicorn
from starlette.responses import PlainTextResponse, Response
from uvicorn.server import ServerState

from nano_inference.errors import ConfigError
from nano_inference.remote.messages import Ready
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.http import connection
from nano_inference.server.http.admission import Admission
from nano_inference.server.http.replies import EventStream
from nano_inference.server.main import running_server
from tests.server import virtual_time
from tests.server.scripted import Script, ScriptedClient

PATIENCE = 30.0  # seconds: a hang fails instead of blocking
SLOW = Script("a " * 50, ends=False, delay=0.05)


def eventually(condition, seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def serving(script: Script, **options) -> Iterator[tuple[str, ScriptedClient]]:
    client = ScriptedClient(
        script,
        max_model_len=10_000_000,
        max_backlog=options.get("max_backlog", ServerConfig().max_backlog),
    )
    with running_server(client, ServerConfig(port=0, drain_timeout=1, **options)) as url:
        yield url, client


def connected(url: str, body: dict, **options) -> socket.socket:
    """Open a connection and send a request."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    for option, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    connection.settimeout(PATIENCE)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
        + content
    )
    return connection


@pytest.mark.thorough(but=["queued-False"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "running"])
def test_client_that_disconnects_ends_its_request(stream: bool, when: str) -> None:
    with serving(SLOW) as (url, client):
        reader = connected(url, {"prompt": "Hi", "max_tokens": 1000, "stream": stream})
        assert eventually(lambda: client.requests)
        if when == "running":
            time.sleep(0.2)
        reader.close()
        # would last for a minute
        assert eventually(lambda: client.aborted == [client.requests[0].request_id])
        assert eventually(lambda: client.num_samples == 0)
        assert httpx.get(url + "/health").status_code == 200


@pytest.mark.thorough
def test_client_that_goes_away_while_its_body_comes() -> None:
    with serving(SLOW) as (url, client):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
            )
            time.sleep(0.1)
        time.sleep(0.1)
        assert not client.requests
        assert httpx.get(url + "/health").status_code == 200


@pytest.mark.thorough
def test_request_that_takes_too_long() -> None:
    with serving(SLOW, request_timeout=1.5) as (url, client):
        reply = httpx.post(url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 1000})
        assert reply.status_code == 504
        assert reply.headers["x-should-retry"] == "false"
        assert reply.json()["error"]["type"] == "timeout_error"
        streamed = httpx.post(
            url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 1000, "stream": True}
        )
        assert streamed.status_code == 200
        assert "request_timeout" in streamed.text.rstrip().rsplit("data: ", 1)[1]
        assert len(client.aborted) == 2
    with serving(Script(delay=5.0), request_timeout=0.2) as (url, _):
        before = httpx.post(url + "/v1/completions", json={"prompt": "Hi", "stream": True})
        assert before.status_code == 504  # nothing was sent, so a plain status is still possible


@pytest.mark.thorough
def test_body_that_takes_too_long() -> None:
    with serving(SLOW, request_timeout=0.3) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
            )
            assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.thorough
def test_client_that_does_not_read_is_ended_with_its_connection() -> None:
    script = Script("word " * 50, ends=False, portion=8)
    with serving(script, max_backlog=2000) as (url, client):
        before = psutil.Process().memory_info().rss
        reader = connected(
            url, {"prompt": "Hi", "max_tokens": 200_000, "stream": True}, SO_RCVBUF=4096
        )
        try:
            assert eventually(lambda: client.aborted)
            assert client.num_samples == 0
            assert psutil.Process().memory_info().rss - before < 50 << 20
            total = 0
            with pytest.raises(ConnectionResetError):  # noqa: PT012 - the end comes after what was sent before
                while more := reader.recv(1 << 20):
                    total += len(more)
                raise ConnectionResetError
            assert total < 20 << 20
        finally:
            reader.close()


@pytest.mark.thorough
def test_full_queue_is_429_with_a_time_to_come_again() -> None:
    with serving(SLOW, max_queued_samples=2) as (url, client):
        busy = [connected(url, {"prompt": "Hi", "max_tokens": 1000, "n": 2}) for _ in range(17)]
        assert eventually(lambda: client.num_samples == 34)
        reply = httpx.post(url + "/v1/completions", json={"prompt": "Hi"})
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(reply.headers["retry-after"]) >= 1
        assert int(reply.headers["retry-after-ms"]) >= 500
        assert (
            'admission_rejections_total{model_name="scripted",reason="queue_full"} 1'
            in httpx.get(url + "/metrics").text.replace("nano_inference_", "")
        )
        for reader in busy:
            reader.close()
        assert eventually(lambda: client.num_samples == 0)


@pytest.mark.thorough
def test_dying_engine_ends_streams_with_events_others_with_503() -> None:
    with serving(Script("a b c d e f", die_after=3)) as (url, _):
        reply = httpx.post(url + "/v1/completions", json={"prompt": "Hi", "stream": True})
        assert (
            "engine" in json.loads(reply.text.rstrip().rsplit("data: ", 1)[1])["error"]["message"]
        )
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()) == (
            503,
            {"status": "dead", "model_loaded": False, "reason": "a step failed: KeyError"},
        )
        late = httpx.post(url + "/v1/completions", json={"prompt": "Hi"})
        assert (late.status_code, late.headers["x-should-retry"]) == (503, "false")
        assert httpx.get(url + "/stats").json()["status"] == "dead"
        assert "engine_up" in httpx.get(url + "/metrics").text


@pytest.mark.thorough
def test_poisoned_sample_ends_its_own_request_only() -> None:
    def script(request, _: int) -> Script:
        return (
            Script("fine", fail_after=1)
            if request.params.seed == 13
            else Script("fine", delay=0.02)
        )

    with serving(Script()) as (url, client):
        client.script = script
        with httpx.Client() as http:
            bad = http.post(url + "/v1/completions", json={"prompt": "Hi", "seed": 13})
            good = http.post(url + "/v1/completions", json={"prompt": "Hi", "seed": 14})
        assert bad.status_code == 500
        assert bad.json()["error"]["message"].endswith(": the draw raised ValueError.")
        assert bad.headers["x-should-retry"] == "false"
        assert good.json()["choices"][0]["text"] == "fine"


# -- the stream by itself --------------------------------------------------------------------------


def played(events: AsyncGenerator[bytes, None], keep_alive: float) -> list[dict]:
    """Return the ASGI messages of a stream."""
    sent: list[dict] = []

    async def send(message) -> None:
        sent.append(message)

    async def play() -> None:
        def refuse(problem: Exception) -> Response:
            return PlainTextResponse(f"refused: {problem}", 418)

        stream = EventStream(
            events,
            refuse,
            lambda problem: f"failed: {problem}".encode(),
            nullcontext(),
            lambda: None,
            keep_alive,
        )
        await stream({"type": "http"}, None, send)  # pyright: ignore[reportArgumentType]

    virtual_time.run(play())
    return sent


def body(sent: list[dict]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


async def slow(*waits: float, raises: bool = False) -> AsyncGenerator[bytes, None]:
    for index, wait in enumerate(waits):
        await asyncio.sleep(wait)
        yield b"data: %d\n\n" % index
    if raises:
        await asyncio.sleep(0.12)
        raise ValueError("no more")


def test_quiet_stream_is_kept_alive_by_comments() -> None:
    sent = played(slow(0.13, 0.0, 0.07), keep_alive=0.05)
    assert body(sent) == [b": keep-alive\n\n"] * 2 + [
        b"data: 0\n\n",
        b"data: 1\n\n",
        b": keep-alive\n\n",
        b"data: 2\n\n",
        b"",
    ]
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[-1]["more_body"] is False


def test_error_is_a_status_first_and_an_event_later() -> None:
    assert played(slow(raises=True), keep_alive=1.0)[0]["status"] == 418
    # a comment was sent before
    assert body(played(slow(raises=True), keep_alive=0.05))[-1] == b"failed: no more"
    assert body(played(slow(0.0, raises=True), keep_alive=1.0)) == [
        b"data: 0\n\n",
        b"failed: no more",
    ]


@pytest.mark.thorough
def test_server_answers_many_concurrent_clients() -> None:
    """Run client threads, streaming and not, that disconnect at random: nothing leaks."""
    with serving(Script("a " * 20, ends=False, delay=0.005)) as (url, client):

        def visit(number: int) -> None:
            reader = connected(url, {"prompt": "Hi", "max_tokens": 40, "stream": number % 2 == 0})
            time.sleep(number % 7 * 0.02)
            reader.close()

        threads = [threading.Thread(target=visit, args=(number,)) for number in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert eventually(lambda: client.num_samples == 0)
        assert eventually(lambda: httpx.get(url + "/metrics").status_code == 200)


def hung_up(connection: socket.socket) -> bool:
    try:
        return not connection.recv(100)
    except ConnectionResetError:
        return True


@pytest.mark.thorough
def test_client_that_never_finishes_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 1.0)
    with serving(Script()) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as slow_one:
            slow_one.sendall(b"GET /health HTTP/1.1\r\na: ")
            assert hung_up(slow_one)
        # an idle connection may wait longer
        with httpx.Client(base_url=url) as http:
            assert http.get("/health").status_code == 200
            time.sleep(1.3)
            assert http.get("/health").status_code == 200


@pytest.mark.parametrize("reads_again", [False, True])
def test_client_that_stops_reading_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, reads_again: bool
) -> None:
    """Hang up even if the backlog has room for the whole answer."""
    monkeypatch.setattr(connection, "STALL_TIMEOUT", 0.05)

    async def app(scope: object, receive: object, send: object) -> None: ...

    async def play() -> int:
        transport = MagicMock(
            **{"get_extra_info.return_value": None, "is_closing.return_value": False}
        )
        it = connection.Connection(
            uvicorn.Config(app, log_config=None, ws="none"), ServerState(), {}
        )
        it.connection_made(transport)
        it.pause_writing()
        await asyncio.sleep(0.02)
        if reads_again:
            it.resume_writing()
        await asyncio.sleep(0.1)
        it.connection_lost(None)
        return transport.abort.call_count

    assert virtual_time.run(play()) == (0 if reads_again else 1)


@pytest.mark.thorough
def test_long_body_that_is_refused_is_not_listened_to() -> None:
    with serving(Script(), api_keys=("k",)) as (url, _):
        reply = httpx.post(url + "/v1/completions", json={"prompt": "x" * 200_000})
        assert (reply.status_code, reply.headers["connection"]) == (401, "close")
        assert "connection" not in httpx.post(url + "/v1/completions", json={"prompt": "x"}).headers
        metrics = httpx.get(url + "/metrics", headers={"x-api-key": "k"}).text
        assert 'admission_rejections_total{model_name="scripted",reason="key"} 2' in metrics


@pytest.mark.thorough
def test_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    made += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            [*made, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl")
    with serving(Script(), tls_cert=str(cert), tls_key=str(key)) as (url, _):
        assert url.startswith("https://")
        assert (
            httpx.get(
                url + "/health", verify=ssl.create_default_context(cafile=str(cert))
            ).status_code
            == 200
        )
    with (
        pytest.raises(ConfigError, match="tls_cert"),
        serving(Script(), tls_cert=str(key), tls_key=str(cert)),
    ):
        pass


@pytest.mark.thorough
def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} is in use; --port 0 takes a free one"),
            running_server(ScriptedClient(), ServerConfig(port=port)),
        ):
            pass


def test_host_that_cannot_be_a_name() -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot listen on host='a\.\.b', port=0"),
        running_server(ScriptedClient(), ServerConfig(host="a..b", port=0)),
    ):
        pass


@pytest.mark.thorough
def test_version_that_cannot_come_is_refused_at_once() -> None:
    with serving(Script()) as (url, client):
        for path in ("/v1/completions", "/v1/chat/completions"):
            body: dict = (
                {"messages": [{"role": "user", "content": "Hi"}]}
                if "chat" in path
                else {"prompt": "Hi"}
            )
            body["max_tokens"] = 4
            refused = httpx.post(url + path, json=body | {"min_weight_version": "7"})
            assert refused.status_code == 400
            assert "--rl" in refused.json()["error"]["message"]
            assert (
                httpx.post(url + path, json=body | {"min_weight_version": "0"}).status_code == 200
            )
        assert len(client.requests) == 2


@pytest.mark.thorough
def test_requests_that_wait_for_weights_keep_no_others_out() -> None:
    """Admit servable requests although the queue is full of waiting ones, which have their own
    limit.
    """

    def script(request, _: int) -> Script:
        return Script(delay=60.0) if request.min_version else Script()

    with serving(Script(), rl=True, max_queued_samples=8) as (url, client):
        client.script = script
        later = {"prompt": "Hi", "n": 4, "min_weight_version": 7}
        waiting = [connected(url, later) for _ in range(2)]
        assert eventually(lambda: client.num_samples == 8)
        refused = httpx.post(url + "/v1/completions", json=later)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        assert "weights" in refused.json()["error"]["message"]
        assert (
            httpx.post(url + "/v1/completions", json={"prompt": "Hi", "n": 40}).status_code == 200
        )
        for waiter in waiting:
            waiter.close()
        assert eventually(lambda: client.num_samples == 0)
        waiting = connected(url, later)
        assert eventually(lambda: client.num_samples == 4)  # there is room again
        waiting.close()


def test_request_whose_weights_have_arrived_queues_normally() -> None:
    client, newest = ScriptedClient(), 0
    client._receive(Ready(client._engine_info()))
    admission = Admission(ServerConfig(max_queued_samples=0), client, lambda: newest)
    admission.hold(3, 40)
    client._open.add(0, MagicMock(), 40, MagicMock())
    admission.require_room(30)
    newest = 3
    with pytest.raises(ApiError, match="40 samples are already running or waiting"):
        admission.require_room(30)
    admission.let_go(3, 40)
    for _ in range(38):
        client._open.end_sample(0)
    admission.require_room(30)
