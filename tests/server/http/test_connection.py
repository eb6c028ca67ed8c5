"""Rare uses of HTTP: pipelines, HTTP/1.0, protocol upgrades, trailers and malformed requests."""

import inspect
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nano_inference.server import runner
from nano_inference.server.config import ServerConfig
from nano_inference.server.http import connection
from nano_inference.server.main import running_server
from tests.server.scripted import Script, ScriptedClient
from tests.server.test_exchange import PATIENCE, eventually

KEY = "key-one"
ENDLESS = Script("a " * 50, ends=False, delay=0.05)


@pytest.fixture(scope="module")
def engine() -> ScriptedClient:
    return ScriptedClient(max_model_len=100_000)


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    with running_server(engine, ServerConfig(port=0, drain_timeout=1, api_keys=(KEY,))) as url:
        yield url


@pytest.fixture
def peer(url: str, engine: ScriptedClient) -> Iterator[socket.socket]:
    engine.script = Script()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as peer:
        yield peer


def request(*headers: str, version: str = "1.1", key: bool = True, **fields) -> bytes:
    body = json.dumps({"prompt": "Hi", "max_tokens": 20} | fields)
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "host: x",
        "content-type: application/json",
        *headers,
    ]
    if key:
        lines.append(f"x-api-key: {KEY}")
    if not any(each.startswith("transfer-encoding") for each in headers):
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", body]).encode()
    return "\r\n".join([*lines, "", f"{len(body):x}", body, ""]).encode()


def all_of(peer: socket.socket) -> str:
    """Read until the server closes the connection."""
    found = b""
    while data := peer.recv(65536):
        found += data
    return found.decode()


def texts(events: str) -> str:
    data = re.findall(r"^data: (\{.*\})$", events, re.MULTILINE)
    return "".join(choice["text"] for each in data for choice in json.loads(each)["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_is_answered_without_chunks(peer: socket.socket, stream: bool) -> None:
    peer.sendall(request(version="1.0", stream=stream))
    head, _, body = all_of(peer).partition("\r\n\r\n")
    assert "200 OK" in head
    assert "connection: close" in head
    assert "chunked" not in head
    if stream:
        assert body.startswith("data: {")
        assert body.endswith("data: [DONE]\n\n")
        assert texts(body) == "Hello there."
    else:
        assert json.loads(body)["choices"][0]["text"] == "Hello there."


def test_error_in_a_stream_over_http_1_0(peer: socket.socket, engine: ScriptedClient) -> None:
    engine.script = Script("One two three", fail_after=2)
    peer.sendall(request(version="1.0", stream=True))
    _, _, body = all_of(peer).partition("\r\n\r\n")
    assert "error" in json.loads(body.split("data: ")[-1])


@pytest.mark.parametrize("pieces", [1, 7])
def test_wish_for_http_2_is_ignored_and_the_body_read(peer: socket.socket, pieces: int) -> None:
    """Send the upgrade of Java's HttpClient and of `curl --http2`."""
    sent = request(
        "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"
    )
    step = -(-len(sent) // pieces)
    for start in range(0, len(sent), step):
        peer.sendall(sent[start : start + step])
        time.sleep(0.01)
    peer.sendall(request("connection: close"))  # and the connection stays open
    answers = all_of(peer)
    assert answers.count("200 OK") == 2
    assert answers.count("Hello there.") == 2


def test_trailers_are_no_headers(peer: socket.socket) -> None:
    sent = request("transfer-encoding: chunked", "connection: close", key=False)
    peer.sendall(sent + f"0\r\nx-api-key: {KEY}\r\n\r\n".encode())
    assert "401 Unauthorized" in all_of(peer)


@pytest.mark.parametrize("first", [{"stream": True}, {"stream": False}], ids=["stream", "whole"])
def test_disconnect_ends_the_running_request_and_queued_ones(
    peer: socket.socket, engine: ScriptedClient, first: dict
) -> None:
    engine.script = ENDLESS
    before = len(engine.requests)
    peer.sendall(request(max_tokens=10_000, **first))
    assert eventually(lambda: engine.num_samples == 1)
    peer.sendall(request() + request())
    time.sleep(0.1)
    peer.close()
    assert eventually(lambda: not engine.num_samples)
    time.sleep(0.1)
    assert len(engine.requests) == before + 1


def test_requests_that_wait_on_a_connection_are_bounded(
    peer: socket.socket, engine: ScriptedClient
) -> None:
    engine.script = ENDLESS
    peer.sendall(request(max_tokens=10_000))
    assert eventually(lambda: engine.num_samples == 1)
    with suppress(ConnectionError):  # the server closes the connection
        for _ in range(1000):
            peer.sendall(request())
            time.sleep(0.001)
    assert eventually(lambda: not engine.num_samples)


def test_body_that_cannot_be_parsed_is_answered(peer: socket.socket) -> None:
    peer.sendall(
        request("transfer-encoding: chunked").partition(b"\r\n\r\n")[0] + b"\r\n\r\nzz\r\n"
    )
    assert "400 Bad Request" in all_of(peer)


def test_answer_that_has_begun_is_not_followed_by_another(
    peer: socket.socket, engine: ScriptedClient
) -> None:
    engine.script = ENDLESS
    peer.sendall(request(stream=True, max_tokens=10_000))
    assert b"200 OK" in peer.recv(10_000)
    peer.sendall(b"garbage\r\n\r\n")
    with suppress(ConnectionError):
        assert "400" not in all_of(peer)
    assert eventually(lambda: not engine.num_samples)


HEADS = {
    "no host": (b"", "0"),
    "two hosts": (b"host: a\r\nhost: a\r\n", "2"),
    "gzip": (b"host: x\r\ntransfer-encoding: gzip, chunked\r\n", "chunked"),
    "two codings": (
        b"host: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        "chunked",
    ),
    "twice": (b"host: x\r\ntransfer-encoding: chunked, chunked\r\n", "HTTP"),
}


@pytest.mark.parametrize("name", HEADS)
def test_ambiguous_request_is_rejected(peer: socket.socket, name: str) -> None:
    lines, said = HEADS[name]
    peer.sendall(b"POST /v1/completions HTTP/1.1\r\n" + lines + b"\r\n" + b"0\r\n\r\n")
    head, _, body = all_of(peer).partition("\r\n\r\n")
    assert " 400 " in head.split("\r\n")[0]
    assert said in json.loads(body)["error"]["message"]


def test_http_1_0_needs_no_host(peer: socket.socket) -> None:
    peer.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    assert " 200 " in all_of(peer).split("\r\n")[0]


def test_uvicorn_has_what_is_used_of_it() -> None:
    """Use only uvicorn's public names: a private name may disappear in any version."""
    theirs = vars(HttpToolsProtocol)
    mine = {
        name
        for name in vars(connection.Connection)
        if callable(getattr(connection.Connection, name))
    }
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")}
    assert not private & set(vars(connection.Connection))
    assert not [
        name for name in private if re.search(rf"\.{name}\b", inspect.getsource(connection))
    ]
    missing = (
        {name for name in mine if not name.startswith("_")}
        - set(theirs)
        - {
            "abort",
            "on_chunk_header",  # names of the parser
            "begin_without_length",
            "end_without_length",
        }
    )
    assert not missing, f"uvicorn {uvicorn.__version__} never calls {missing}"
    for method in ("startup", "shutdown", "capture_signals", "handle_exit"):
        assert method in vars(uvicorn.Server)
    assert not re.search(r"self\._captured", inspect.getsource(runner))
