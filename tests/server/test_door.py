"""Tests of server/door.py: the port answers before the server's modules are imported."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from nano_inference.errors import ConfigError
from nano_inference.server.app import build_app
from nano_inference.server.config import ServerConfig
from nano_inference.server.door import Door
from nano_inference.server.main import sources_of
from nano_inference.server.routes import server_routes
from nano_inference.server.runner import Runner
from nano_inference.server.server import Server
from tests.ports import free_port
from tests.server.scripted import Script, ScriptedClient

SECONDS = 60


@pytest.fixture
def door() -> Iterator[tuple[Door, str]]:
    """Return a door and its address."""
    config = ServerConfig(port=free_port())
    door = Door(config)
    yield door, f"http://127.0.0.1:{config.port}"
    door.close()


@pytest.mark.parametrize("path", ["/health", "/ping", "/health?verbose=1"])
def test_door_says_that_the_server_starts(door: tuple[Door, str], path: str) -> None:
    reply = httpx.get(door[1] + path)
    assert reply.status_code == 503
    assert reply.json() == {"status": "starting", "model_loaded": False}
    assert reply.headers["retry-after"] == "1"


def test_door_answers_head_without_a_body(door: tuple[Door, str]) -> None:
    reply = httpx.head(door[1] + "/health")
    assert (reply.status_code, reply.content) == (503, b"")


@pytest.mark.parametrize("size", [2, 3_000_000])
def test_door_rejects_other_requests(door: tuple[Door, str], size: int) -> None:
    reply = httpx.post(door[1] + "/v1/chat/completions", content=b"x" * size)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "starting"


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /health HTTP/1.1\r\n", b"\r\n\r\n"])
def test_door_survives_broken_clients(door: tuple[Door, str], sent: bytes) -> None:
    address = httpx.URL(door[1])
    with socket.create_connection((address.host, address.port), timeout=SECONDS) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        client.recv(100)
    assert httpx.get(door[1] + "/health", timeout=SECONDS).status_code == 503


def test_silent_client_delays_others_only_briefly(door: tuple[Door, str]) -> None:
    address = httpx.URL(door[1])
    with socket.create_connection((address.host, address.port)):
        assert httpx.get(door[1] + "/health", timeout=SECONDS).status_code == 503


def test_port_in_use_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use; --port 0 takes a free one"):
            Door(ServerConfig(port=port))


@pytest.mark.parametrize(
    "options", [{"port": 0}, {"uds": "/nowhere/socket"}, {"host": "203.0.113.1"}]
)
def test_door_without_sockets_leaves_listening_to_the_server(options: dict[str, str]) -> None:
    door = Door(ServerConfig(**options))
    assert door.hand_over() == []
    door.close()


def test_client_that_waited_at_the_door_is_served() -> None:
    """A connection that the door has not accepted is the server's first."""
    config = ServerConfig(port=free_port(), in_process=True)
    door = Door(config)
    waiting = http.client.HTTPConnection("127.0.0.1", config.port, timeout=SECONDS)
    server = Server(config, sources_of(ScriptedClient(Script()), config))
    runner = Runner(build_app(server, {}, (server_routes,)), server)
    sockets = door.hand_over()
    waiting.request("GET", "/ping")
    thread = threading.Thread(target=runner.run, args=(sockets,))
    thread.start()
    assert waiting.getresponse().status in (200, 503)
    waiting.close()
    runner.should_exit = True
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_command_opens_its_door_and_hands_it_over() -> None:
    """No request between the first answer and the engine's is refused or lost."""
    port = free_port()
    program = subprocess.Popen(
        [sys.executable, "-m", "nano_inference", "serve", "smollm2-135m", "--port", str(port)],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    statuses = []
    try:
        while program.poll() is None and 200 not in statuses:
            try:
                reply = httpx.get(f"http://127.0.0.1:{port}/health", timeout=SECONDS)
            except httpx.ConnectError:
                assert not statuses, "the port was closed again"
                continue
            statuses.append(reply.status_code)
            time.sleep(0.05)
        assert set(statuses) == {200, 503}
        program.send_signal(signal.SIGTERM)
        assert program.wait(SECONDS) == 0
    finally:
        program.kill()
