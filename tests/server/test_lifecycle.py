"""Start and end of a server: it listens before the engine is built, drains on a signal, and ends
with its engine.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PATIENCE = 30.0  # seconds: a hang fails instead of blocking
ENDLESS = {"says": "a " * 10, "ends": False, "delay": 0.02}


class Process:
    """A server in a separate process, and its output."""

    def __init__(self, **options) -> None:
        command = [sys.executable, "-m", "tests.server.serve_scripted", json.dumps(options)]
        self.child = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "src:."}
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def listening(self) -> None:
        self.url = self.said(r"(http://\S+?), ")[1]

    def _read(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.lines.append(line)

    def said(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if match := re.search(pattern, "".join(self.lines)):
                return match
            time.sleep(0.01)
        raise AssertionError(f"{pattern!r} is not in {''.join(self.lines)}")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.child.send_signal(number)

    def ended(self) -> int:
        code = self.child.wait(PATIENCE)
        self._reader.join(5)
        return code


@contextmanager
def process(**options) -> Iterator[Process]:
    server = Process(**options)
    try:
        server.listening()
        yield server
    finally:
        server.child.kill()
        server.child.wait()
        if server.child.stderr is not None:
            server._reader.join(5)
            server.child.stderr.close()


def ready(server: Process) -> None:
    server.said("serving scripted")


def stream_of(server: Process, max_tokens: int, found: list) -> threading.Thread:
    """Read a stream in a thread and put its text, or its error, into `found`."""

    def read() -> None:
        try:
            body = {"prompt": "Hi", "max_tokens": max_tokens, "stream": True}
            found.append(httpx.post(server.url + "/v1/completions", json=body, timeout=60).text)
        except httpx.HTTPError as problem:
            found.append(problem)

    thread = threading.Thread(target=read)
    thread.start()
    server_has_it = time.monotonic() + PATIENCE
    while 'num_samples{model_name="scripted"} 1' not in httpx.get(server.url + "/metrics").text:
        assert time.monotonic() < server_has_it
        time.sleep(0.01)
    return thread


@pytest.mark.thorough
def test_server_listens_before_the_engine_is_ready(tmp_path: Path) -> None:
    file = tmp_path / "start"
    with process(start=str(file)) as server:
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()) == (
            503,
            {"status": "starting", "model_loaded": False},
        )
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/stats"),
            ("GET", "/x"),
        ):
            early = httpx.request(method, server.url + path)
            assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        (tmp_path / "new").write_text("now")
        (tmp_path / "new").rename(file)  # complete at the end
        ready(server)
        assert httpx.get(server.url + "/health").json() == {"status": "ok", "model_loaded": True}
        server.signal()
        assert server.ended() == 0


@pytest.mark.thorough
def test_engine_that_cannot_be_built_ends_the_server(tmp_path: Path) -> None:
    file = tmp_path / "start"
    with process(start=str(file)) as server:
        file.touch()
        assert server.ended() == 1
        assert "there is no such model" in "".join(server.lines)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_drains(number: signal.Signals) -> None:
    results: list = []
    with process(script=ENDLESS, config={"drain_timeout": 20}) as server:
        ready(server)
        thread = stream_of(server, 250, results)
        server.signal(number)
        server.said(r"Shutting down: waiting up to [0-9]+ s for 1 request; press Ctrl-C again")
        # New connections get a reply with the reason.
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "Hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"] == "1"
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        thread.join()
        assert results[0].endswith("data: [DONE]\n\n")
        assert server.ended() == 0


@pytest.mark.thorough
def test_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    results: list = []
    with process(script=ENDLESS, config={"drain_timeout": 0.5}) as server:
        ready(server)
        thread = stream_of(server, 100_000, results)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as upload:
            upload.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n"
                b"expect: 100-continue\r\n\r\n{"
            )
            assert upload.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"  # reads the body
            server.signal()
            thread.join()
            assert "shutting down" in results[0].rstrip().rsplit("data: ", 1)[1]
            assert b"503 Service Unavailable" in upload.recv(1000)  # does not reach the end
        assert server.ended() == 0
        assert "Traceback" not in "".join(server.lines)


@pytest.mark.thorough
def test_drain_may_take_no_time() -> None:
    results: list = []
    with process(script=ENDLESS, config={"drain_timeout": 0}) as server:
        ready(server)
        thread = stream_of(server, 100_000, results)
        server.signal()
        thread.join()
        assert "shutting down" in results[0].rstrip().rsplit("data: ", 1)[1]
        assert server.ended() == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_ends_the_server_immediately(number: signal.Signals, code: int) -> None:
    found: list = []
    with process(script=ENDLESS, config={"drain_timeout": 60}) as server:
        ready(server)
        thread = stream_of(server, 100_000, found)
        server.signal(number)
        server.said(r"Shutting down: waiting up to 60 s for 1 request; press Ctrl-C again to stop ")
        server.signal(number)
        assert server.ended() == code
        thread.join()


@pytest.mark.thorough
def test_server_ends_with_its_engine() -> None:
    with process(script={"die_after": 2}, linger=3.0) as server:
        ready(server)
        httpx.post(server.url + "/v1/completions", json={"prompt": "Hi"})
        assert httpx.get(server.url + "/health").json()["status"] == "dead"
        assert (
            httpx.post(server.url + "/v1/completions", json={"prompt": "Hi"}).headers[
                "x-should-retry"
            ]
            == "false"
        )
        assert server.ended() == 1
        assert "error: the script says so." in "".join(server.lines)


@pytest.mark.thorough
def test_server_stays_if_engines_are_replaced() -> None:
    with process(script={"die_after": 2}, linger=0.1, config={"restart_engine": True}) as server:
        ready(server)
        httpx.post(server.url + "/v1/completions", json={"prompt": "Hi"})
        late = httpx.post(server.url + "/v1/completions", json={"prompt": "Hi"})
        assert (late.status_code, "x-should-retry" in late.headers) == (503, False)
        assert "retry-after" in late.headers
        time.sleep(1.0)
        assert server.child.poll() is None


@pytest.mark.thorough
def test_logs_of_a_server() -> None:
    keys = {"api_keys": ["secret-key"], "host": "0.0.0.0"}
    with process(config={"log_format": "json", **keys}) as server:
        ready(server)
        headers = {"x-api-key": "secret-key"}
        body = {"prompt": "The secret prompt", "max_tokens": 3, "stream": True}
        httpx.post(
            server.url.replace("0.0.0.0", "127.0.0.1") + "/v1/completions",
            json=body,
            headers=headers,
        )
        httpx.get(server.url.replace("0.0.0.0", "127.0.0.1") + "/a%0Ab%1b[31m", headers=headers)
        server.said('"status": 404')
        server.signal()
        assert server.ended() == 0
        entries = [json.loads(line) for line in server.lines]
        whole, lost = [entry for entry in entries if entry["logger"] == "nano_inference.access"]
        assert (whole["path"], whole["status"], whole["completion_tokens"]) == (
            "/v1/completions",
            200,
            3,
        )
        assert whole["first_token"] <= whole["seconds"]
        assert lost["path"] == "/a\nb\x1b[31m"  # escaped as JSON
        assert not [line for line in server.lines if "secret" in line or "\x1b" in line]
