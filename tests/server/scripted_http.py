"""A scripted server on the standard library, for tests of HTTP clients."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Scripted answer to one request.

    Attributes:
        content: JSON object or raw bytes.
        events: Events of a stream that replaces `content`: JSON objects, or text that is not JSON.
        cut: Break the connection at the end.
        wait: Function to call before each event.
    """

    status: int = 200
    content: Any = None
    events: Sequence[Any] | None = None
    cut: bool = False
    wait: Callable[[], object] = lambda: None


def said(
    *texts: str, usage: dict[str, Any] | None = None, reason: str = "stop", chat: bool = True
) -> Answer:
    """Return a stream of these texts with role, end, usage and `[DONE]`."""

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        own = {"delta": {"content": text}} if chat else {"text": text}
        return {"choices": [own | {"index": 0, "finish_reason": reason}]}

    events: list[Any] = (
        [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}] if chat else []
    )
    events += [choice(text) for text in texts]
    events += [choice("", reason), {"choices": [], "usage": usage}, "[DONE]"]
    return Answer(events=events)


@dataclass
class Seen:
    """Requests received and the number of clients that disconnected early."""

    url: str
    requests: list[tuple[str, dict[str, str], Any]] = field(
        default_factory=list[tuple[str, dict[str, str], Any]]
    )
    broken: threading.Event = field(default_factory=threading.Event)

    def bodies(self, path: str) -> list[Any]:
        return [body for at, _, body in self.requests if at == path]


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, script: Callable[[str, Any], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.seen = Seen(f"http://127.0.0.1:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        seen = self.server.seen
        seen.requests.append(
            (self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        )
        answer = self.server.script(self.path, body)
        self.close_connection = answer.cut or self.close_connection
        try:
            self._send(answer)
        except OSError:
            seen.broken.set()
            self.close_connection = True

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        if answer.events is None:
            content = (
                answer.content
                if isinstance(answer.content, bytes)
                else json.dumps(answer.content).encode()
            )
            self.send_header("Content-Length", str(len(content) + (9 if answer.cut else 0)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b": a comment\n\n")
        for event in answer.events:
            answer.wait()
            self._chunk(
                b"data: %s\n\n" % (event if isinstance(event, str) else json.dumps(event)).encode()
            )
        if not answer.cut:
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def scripted_http(script: Callable[[str, Any], Answer]) -> Iterator[Seen]:
    """Run a server on a free port. `script` gets the path and the body of each request."""
    with _Server(script) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield listening.seen
        finally:
            listening.shutdown()
            thread.join()
