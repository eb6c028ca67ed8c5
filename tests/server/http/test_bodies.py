"""Unfinished bodies and more connections than the limit: other requests are still served."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from nano_inference.errors import ConfigError
from nano_inference.server.config import ServerConfig
from nano_inference.server.http import connection
from nano_inference.server.http.admission import SMALL, Bodies
from nano_inference.server.main import running_server
from tests.server.scripted import ScriptedClient
from tests.server.test_exchange import eventually

MIB = 1 << 20


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, **options) -> Iterator[tuple[str, list[Bodies]]]:
    """Yield a server and its counter of bodies."""
    made: list[Bodies] = []
    init = Bodies.__init__

    def note(self: Bodies, *args) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Bodies, "__init__", note)
    with running_server(ScriptedClient(), ServerConfig(port=0, drain_timeout=1, **options)) as url:
        yield url, made


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def unfinished(url: str, sent: int, size: int) -> socket.socket:
    """Open a connection and send `count` bytes of a body."""
    peer = connected(url)
    peer.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
        + b" " * sent
    )
    return peer


@pytest.mark.thorough
def test_unfinished_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(monkeypatch, max_body_bytes=MIB, max_pending_bytes=2 * MIB) as (url, made),
        ExitStack() as stack,
    ):
        bodies = made[0]
        first, second = (stack.enter_context(unfinished(url, MIB - 1, MIB)) for _ in range(2))
        assert eventually(lambda: bodies.pending == 2 * (MIB - 1 - SMALL))
        third = stack.enter_context(unfinished(url, MIB - 1, MIB))
        head, _, body = third.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert b"connection: close" in head
        assert "max_pending_bytes" in json.loads(body)["error"]["message"]
        # small bodies pass
        assert httpx.post(url + "/v1/completions", json={"prompt": "Hi" * 1000}).status_code == 200
        first.close()
        assert eventually(lambda: bodies.pending == MIB - 1 - SMALL)
        large = json.dumps({"prompt": "Hi", "pad": " " * (MIB - 100)})
        assert httpx.post(url + "/v1/completions", content=large).status_code == 200
        second.sendall(b" ")
        assert second.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert bodies.pending == 0
        assert 'reason="overloaded"} 1' in httpx.get(url + "/metrics").text


@pytest.mark.thorough
def test_body_that_stalls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(monkeypatch, body_timeout=0.3) as (url, made),
        unfinished(url, 100_000, 200_000) as peer,
    ):
        head, _, body = peer.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "body_timeout" in json.loads(body)["error"]["message"]
        assert peer.recv(1) == b""
        assert made[0].pending == 0


@pytest.mark.thorough
def test_slow_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps({"prompt": "Hi"}).encode()
    with (
        serving(monkeypatch, body_timeout=2.0) as (url, _),
        unfinished(url, 0, len(content)) as peer,
    ):
        for byte in content:  # all of it takes longer than one permitted gap
            peer.sendall(bytes((byte,)))
            time.sleep(0.15)
        assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.thorough
def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SPARE", 1)
    head = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    with serving(monkeypatch, max_connections=2) as (url, _), ExitStack() as stack:
        first, second, third = (stack.enter_context(connected(url)) for _ in range(3))
        for peer in (first, second):
            peer.sendall(head)
            assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")
        # monitoring is admitted
        third.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
        with connected(url) as fourth:  # beyond the connections that get a reply
            assert fourth.recv(1) == b""
        third.sendall(head)
        told, _, body = third.recv(65536).partition(b"\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in told
        assert "max_connections" in json.loads(body)["error"]["message"]
        first.close()
        assert third.recv(1) == b""

        def is_served() -> bool:
            with connected(url) as another:
                another.sendall(head)
                return another.recv(65536).startswith(b"HTTP/1.1 200 ")

        assert eventually(is_served)


@pytest.mark.parametrize(
    "wrong",
    [{"max_pending_bytes": 10, "max_body_bytes": 20}, {"max_connections": 0}, {"body_timeout": 0}],
)
def test_limits_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)
