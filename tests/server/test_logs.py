"""Log lines: their contents and format."""

import io
import itertools
import json
import logging
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.remote import log_lines
from nano_inference.remote.loading_line import loading_line
from nano_inference.remote.log_lines import (
    JsonLines,
    Rarely,
    ShortLines,
    TextLines,
    escaped,
    send_to_stderr,
)
from nano_inference.server.config import ServerConfig, is_loopback
from nano_inference.server.http.replies import RequestRecord, log_access
from nano_inference.server.main import running_server
from nano_inference.server.runner import log_start
from nano_inference.server.server import farewell
from nano_inference.system.progress import Progress
from tests.server.scripted import ScriptedClient


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("0.0.0.0", ("secret",), False),
        ("127.0.0.1", (), False),
        ("::1", (), False),
    ],
)
def test_warning_without_access_control(
    caplog, host: str, keys: tuple[str, ...], warns: bool
) -> None:
    with caplog.at_level("INFO", "nano_inference.server"):
        log_start(
            ServerConfig(host=host, api_keys=keys, admin_key="secret-too"), f"http://{host}:1"
        )
    assert ("any client that reaches it" in caplog.text) == warns
    assert "secret" not in caplog.text
    assert f"http://{host}:1" in caplog.text


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@given(text=st.text())
def test_client_text_stays_on_one_line(text: str) -> None:
    line = escaped(text)
    assert line.isprintable()
    assert line == text or not text.isprintable()


def entry(message: str, *args: object, **more) -> logging.LogRecord:
    record = logging.LogRecord(
        "nano_inference.x", logging.INFO, "", 0, message, args, more.pop("exc_info", None)
    )
    for name, value in more.items():
        setattr(record, name, value)
    return record


def test_repeatable_client_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: now[0])
    rarely = Rarely(0.05)
    assert [rarely.due() for _ in range(4)] == [0, None, None, None]
    now[0] += 0.06
    assert rarely.due() == 3


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 200, "DEBUG"),
        ("/metrics", 200, "DEBUG"),
        ("/health", 503, "DEBUG"),
        ("/page/main.js", 200, "DEBUG"),
        ("/page/main.js", 404, "INFO"),
        ("/metrics", 401, "INFO"),
        ("/stats", 200, "DEBUG"),
        ("/v1/models", 200, "INFO"),
    ],
)
def test_polled_routes_are_logged_at_debug(caplog, path: str, status: int, level: str) -> None:
    with caplog.at_level("DEBUG", "nano_inference.access"):
        log_access(RequestRecord("id", "GET", path, status=status))
    assert [record.levelname for record in caplog.records] == [level]


AGAIN = "press Ctrl-C again to stop now."


@pytest.mark.parametrize(
    ("count", "seconds", "line"),
    [
        (0, 30.0, "Shutting down."),
        (1, 30.0, f"Shutting down: waiting up to 30 s for 1 request; {AGAIN}"),
        (3, 2.5, f"Shutting down: waiting up to 2.5 s for 3 requests; {AGAIN}"),
        (3, 0.0, "Shutting down."),
    ],
)
def test_farewell_counts_pending_requests(count: int, seconds: float, line: str) -> None:
    assert farewell(count, seconds) == line


def test_short_lines_are_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ShortLines().format(entry("ready"))
    assert re.fullmatch(r"\r\x1b\[K\d\d:\d\d:\d\d ready", line)
    wild = ShortLines().format(entry("a\x1b[31m\nb"))
    assert wild.removeprefix("\r\x1b[K").isprintable()
    logger = logging.getLogger("nano_inference.test_short_lines")
    for is_terminal, kind in ((True, ShortLines), (False, TextLines)):
        monkeypatch.setattr("sys.stderr", Terminal(is_terminal))
        send_to_stderr(logger, "text")
        assert type(logger.handlers[0].formatter) is kind
        send_to_stderr(logger, "json")
        assert type(logger.handlers[0].formatter) is JsonLines


class Terminal(io.StringIO):
    """Stream that reports whether it is a terminal, and records writes."""

    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str, /) -> int:
        count = super().write(text)
        if self.awaited in text:
            self.wrote.set()
        return count

    awaited = ""


def test_loading_line_names_the_model_and_then_its_parts() -> None:
    stream = Terminal()
    with loading_line("smollm2-135m", stream):
        assert stream.wrote.wait(30)
        assert "loading smollm2-135m (0 s)" in stream.getvalue()
        stream.awaited = "weights"
        stream.wrote.clear()
        with Progress("weights", 0, clock=itertools.count(step=10).__next__) as progress:
            progress.add(1)
            assert stream.wrote.wait(30)
    assert stream.getvalue().endswith("\r\x1b[K")
    nobody = Terminal(False)
    with loading_line("smollm2-135m", nobody):
        pass
    assert nobody.getvalue() == ""


def test_address_is_the_last_line_of_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "nano_inference.server"),
        running_server(ScriptedClient(), ServerConfig(port=0)) as url,
    ):
        deadline = time.monotonic() + 30
        while "Ready" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        messages = [record.getMessage() for record in caplog.records]
    assert messages[-1] == f"Ready: {url} (page, /docs, OpenAI at /v1)"
    assert sum("Ready" in line for line in messages) == 1


@given(text=st.text())
def test_log_entries_cannot_be_forged(text: str) -> None:
    wild = entry("model %s", text)
    assert TextLines().format(wild).isprintable()
    line = JsonLines().format(wild)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == f"model {text}"


def test_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError("a\n2026-01-01 00:00:00 INFO forged\x1b[31m")
    except ValueError as problem:
        told = TextLines().format(
            entry("failed", exc_info=(ValueError, problem, problem.__traceback__))
        )
    first, *rest = told.split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_line_of_a_request(caplog) -> None:
    record = RequestRecord(
        "id-1", "POST", '/v1/x y="1"\n', status=200, model="m", prompt_tokens=3, first_token=0.5
    )
    with caplog.at_level("INFO", "nano_inference.access"):
        log_access(record)
    (logged,) = caplog.records
    line = logged.getMessage()
    assert 'path="/v1/x y=\\"1\\"\\n"' in line
    assert "first_token=0.5" in line
    assert json.loads(JsonLines().format(logged))["path"] == '/v1/x y="1"\n'
