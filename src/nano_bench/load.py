"""Send load to an OpenAI-compatible server and time the replies.

Closed loop: a fixed number of requests is in flight. Open loop: requests are sent at given times,
and latencies count from the planned time even if the client was late. Runs in one process with one
thread, see `wire`.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from nano_bench.cpu_time import CpuMeter
from nano_bench.outcomes import Load, Outcome
from nano_bench.shape import Ask
from nano_bench.wire import CUT_OFF, UNREACHABLE, Broken, Connection, Reply, connect
from nano_inference.errors import ConfigError

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

Result = TypeVar("Result")


@cache
def decoder() -> Callable[[bytes], Any]:
    """Return a JSON decoder: msgspec's if installed, which is faster. Imported on first use."""
    try:
        from msgspec.json import decode
    except ImportError:
        return json.loads
    return decode


PATIENCE = 600.0  # default timeout of a request in seconds
# seconds; servers close connections after 5 s of idling, possibly just when one is reused
IDLE_LIMIT = 2.0
AT_ONCE = 0.05  # seconds: an earlier cut-off means that the connection was already closed
LATE = 4096  # replies to keep until the load is over; later ones are parsed as they end
PAUSE = 0.1  # seconds until a loop retries an unreachable server
GIVE_UP = 3.0  # seconds without any connection, after which no more requests are sent

# Kinds of errors in addition to those of `wire`.
STREAM_ERROR, BAD_REPLY = "error in the stream", "unreadable reply"
NOT_SENT, INTERRUPTED = "not sent", "interrupted"


@dataclass(frozen=True)
class Target:
    """A server. `key` is sent as a bearer token. A path in `url`, without a trailing `/v1`, is
    prepended to the path of every request.
    """

    url: str
    model: str = ""
    key: str | None = None

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and True for TLS. Raises `ConfigError`."""
        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{self.url!r} is not an address such as http://127.0.0.1:8000.")
        if not (self.key or "").isascii() or not (self.key or " ").isprintable():
            raise ConfigError("the API key must be printable ASCII, as it is sent in a header.")
        secure = parts.scheme == "https"
        return host, port or (443 if secure else 80), secure

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Encode a request: POST if there is a body, to which the model is added, otherwise GET."""
        if body is not None:
            return self.post(path, json.dumps({"model": self.model, **body}).encode())
        return self._request("GET", path)

    def post(self, path: str, content: bytes) -> bytes:
        """Encode a POST request with a JSON body."""
        about = ("Content-Type: application/json", f"Content-Length: {len(content)}")
        return self._request("POST", path, *about) + content

    def _request(self, method: str, path: str, *fields: str) -> bytes:
        parts = urlsplit(self._url)
        root = parts.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"{method} {root}{path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            *fields,
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    @property
    def _url(self) -> str:
        return self.url if "//" in self.url else f"http://{self.url}"


async def model_of(target: Target) -> str:
    """Return the id of the first model that the server lists. Raises `Broken`."""
    connection = await connect(*target.address)
    try:
        reply = await connection.ask(target.request("/v1/models"), 30.0)
    finally:
        connection.close()
    if reply.status != 200:
        raise Broken(f"/v1/models returned status {reply.status}: {reply.body[:200]!r}")
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise Broken("/v1/models lists no model", BAD_REPLY) from None


class Connections:
    """Pool of idle connections, which opens a new one if none is idle."""

    def __init__(self, target: Target) -> None:
        self._address = target.address
        self._free: list[tuple[float, Connection]] = []

    async def ask(self, request: bytes, timeout: float) -> Reply:
        """Send a request. Raises `Broken`.

        A server may close an idle connection just when it is reused. If a reused connection is cut
        off within `AT_ONCE` and without a reply, the request was not read, and is resent over a
        new connection.
        """
        rested = self._rested()
        if rested is not None:
            began = time.perf_counter()
            try:
                return await self._ask(rested, request, timeout)
            except Broken as problem:
                late = time.perf_counter() - began > AT_ONCE
                if problem.kind != CUT_OFF or rested.has_answered or late:
                    raise
        return await self._ask(await connect(*self._address), request, timeout)

    async def _ask(self, connection: Connection, request: bytes, timeout: float) -> Reply:
        try:
            return await connection.ask(request, timeout)
        finally:
            if connection.is_open:
                self._free.append((time.perf_counter(), connection))

    def close(self) -> None:
        while self._free:
            self._free.pop()[1].close()

    def _rested(self) -> Connection | None:
        while self._free:
            since, connection = self._free.pop()
            if connection.is_open and time.perf_counter() - since < IDLE_LIMIT:
                return connection
            connection.close()
        return None


@dataclass(slots=True)
class Record:
    """A reply, which is parsed when the load is over, or the reason for its absence."""

    ask: Ask
    began: float
    reply: Reply | None = None
    error: str = "the load was ended by Ctrl-C"
    kind: str = INTERRUPTED
    ended: float = 0.0


class _Run:
    """A load in progress."""

    def __init__(
        self,
        target: Target,
        asks: Iterable[Ask],
        seconds: float | None,
        timeout: float,
        ended: Callable[[], None],
    ) -> None:
        self.records: list[Record | Outcome] = []
        self.gave_up = False
        encoded = ((ask, target.request(ask.path, ask.body)) for ask in asks)
        # encoded before the clock starts, unless the number of requests is unknown
        self._requests = iter(list(encoded)) if seconds is None else encoded
        self._is_counted = seconds is None
        self._seconds = seconds
        self._timeout = timeout
        self._ended = ended
        self.connections = Connections(target)
        self.began = self._last_answer = time.perf_counter()

    def begin(self) -> None:
        self.began = self._last_answer = time.perf_counter()

    def next(self) -> tuple[Ask, bytes] | None:
        """Return the next request, or None if no more are to be sent."""
        over = self._is_over(time.perf_counter())
        return None if over or self.gave_up else next(self._requests, None)

    def _is_over(self, now: float) -> bool:
        return self._seconds is not None and now - self.began >= self._seconds

    async def closed(self, concurrency: int) -> None:
        await asyncio.gather(*(self._one_by_one() for _ in range(concurrency)))

    async def opened(self, starts: Iterator[float]) -> None:
        async with asyncio.TaskGroup() as under_way:
            for start in starts:
                if self._seconds is not None and start >= self._seconds:
                    return
                planned = self.began + start
                await asyncio.sleep(max(planned - time.perf_counter(), 0.0))
                if (request := self.next()) is None:
                    return
                under_way.create_task(self._send(*request, planned))

    def leave_nothing_out(self) -> None:
        """Record the requests that were not sent because the server is gone."""
        if self.gave_up and self._is_counted:
            now = time.perf_counter()
            why = "the server became unreachable"
            self.records += [
                Record(ask, now, None, why, NOT_SENT, now) for ask, _ in self._requests
            ]

    async def _one_by_one(self) -> None:
        while (request := self.next()) is not None:
            if self._is_over(began := time.perf_counter()):  # encoding the request took time
                return
            record = await self._send(*request, began)
            if record.kind == UNREACHABLE:
                await asyncio.sleep(PAUSE)

    async def _send(self, ask: Ask, request: bytes, began: float) -> Record:
        record, index = Record(ask, began), len(self.records)
        self.records.append(record)
        try:
            record.reply = await self.connections.ask(request, self._timeout)
            record.kind = ""
        except Broken as problem:
            record.error, record.kind = str(problem), problem.kind
        now = record.ended = time.perf_counter()
        if record.kind != UNREACHABLE:
            self._last_answer = now
        elif now - self._last_answer > GIVE_UP:
            self.gave_up = True
        if index >= LATE:
            self.records[index] = outcome(record)
        self._ended()
        return record


async def drive(
    target: Target,
    asks: Iterable[Ask],
    *,
    concurrency: int = 32,
    starts: Iterator[float] | None = None,
    seconds: float | None = None,
    timeout: float = PATIENCE,
    watched: Mapping[str, int] | None = None,
    ended: Callable[[], None] = lambda: None,
    interruptible: bool = False,
) -> Load:
    """Send requests and wait for the replies.

    If the server is unreachable for `GIVE_UP` seconds, the load ends. The outcomes then include
    the unsent requests.

    Args:
        target: Server to send to.
        asks: Requests in sending order.
        concurrency: Number of requests in flight. Ignored with `starts`.
        starts: Sending times in seconds since the start, for any number in flight, as from
            `shape.start_times`.
        seconds: Send no request after this many seconds. None: send all of `asks`.
        timeout: Timeout of one request in seconds.
        watched: Process ids by name. The CPU time of these process trees is measured.
        ended: Callback after each request.
        interruptible: Return the results so far if cancelled by Ctrl-C.
    """
    run, meter = _Run(target, asks, seconds, timeout, ended), CpuMeter(watched or {})
    interrupted = False
    try:
        with no_collections():
            run.begin()
            before = meter.read()
            try:
                await (run.closed(concurrency) if starts is None else run.opened(starts))
            except asyncio.CancelledError:
                if not interruptible:
                    raise
                interrupted = True
            whole, after = time.perf_counter() - run.began, meter.read()
    finally:
        run.connections.close()
    run.leave_nothing_out()
    cpu = {name: after[name] - before[name] for name in after}
    outcomes = [outcome(each) if isinstance(each, Record) else each for each in run.records]
    return Load(whole, outcomes, cpu, run.began, run.gave_up, interrupted)


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable the garbage collector, so that it cannot pause the client."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def outcome(record: Record) -> Outcome:
    """Parse a record into an outcome."""
    reply = record.reply
    if reply is None:
        ended = record.ended or time.perf_counter()
        return Outcome(record.began, ended, error=record.error, kind=record.kind)
    try:
        if reply.status != 200:
            body = reply.body or b" ".join(data for _, data in reply.events)
            raise Broken(f"status {reply.status}: {body[:300]!r}", f"status {reply.status}")
        if record.ask.body.get("stream"):
            return _of_stream(record.began, reply)
        return _of_body(record.began, reply)
    except Broken as problem:
        return Outcome(record.began, reply.ended, error=str(problem), kind=problem.kind)
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        what = str(problem) or type(problem).__name__
        return Outcome(record.began, reply.ended, error=what, kind=BAD_REPLY)


def _of_body(began: float, reply: Reply) -> Outcome:
    content = decoder()(reply.body)
    if "meta_info" in content:  # SGLang's format
        meta = content["meta_info"]
        return Outcome(
            began,
            reply.ended,
            (),
            meta["prompt_tokens"],
            meta.get("cached_tokens"),
            meta["completion_tokens"],
        )
    if not content["choices"]:
        raise Broken("the reply has no choices", BAD_REPLY)
    usage = content.get("usage")
    counts = _counts(usage, content) if usage else (0, None, 0, "nothing")
    return Outcome(began, reply.ended, (), *counts)


def _of_stream(began: float, reply: Reply) -> Outcome:
    pieces: list[float] = []
    usage: Mapping[str, Any] | None = None
    event: Mapping[str, Any] = {}
    if not reply.events or reply.events[-1][1] != b"[DONE]":
        raise Broken(
            "the stream ended without [DONE], after "
            f"{reply.events[-1][1][:200] if reply.events else b''!r}",
            STREAM_ERROR,
        )
    for when, data in reply.events[:-1]:
        event = decoder()(data)
        if "error" in event:
            raise Broken(f"the stream contains an error: {data[:300]!r}", STREAM_ERROR)
        usage = event.get("usage") or usage
        if any(has_text(choice) for choice in event["choices"]):
            pieces.append(when)
    counts = _counts(usage, event) if usage else (0, None, len(pieces), "pieces")
    return Outcome(began, reply.ended, tuple(pieces), *counts)


def has_text(choice: Mapping[str, Any]) -> bool:
    """Return True if a choice of an event contains output, not only a role or finish reason."""
    if "text" in choice:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta: Mapping[str, Any] = choice.get("delta") or {}
    return any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


def _counts(usage: Mapping[str, Any], last: Mapping[str, Any]) -> tuple[int, int | None, int, str]:
    """Return prompt tokens, cached ones, output tokens and their source. llama.cpp's last event
    has the cached ones in its timings.
    """
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        cached = (last.get("timings") or {}).get("cache_n")
    return usage["prompt_tokens"], cached, usage["completion_tokens"], "usage"


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the fastest available kind of event loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
