"""Put load on an OpenAI-compatible server, ours or another, and time what it answers.

Closed loop: so many requests are always under way. Open loop: requests set out at given times, and
waiting counts from the time at which one was to set out, also where the client was late. One
process, one thread; see `wire`.
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
    """What reads JSON: msgspec, which is faster, where it is installed. It is not
    imported before there is something to read.
    """
    try:
        from msgspec.json import decode
    except ImportError:
        return json.loads
    return decode


PATIENCE = 600.0  # seconds for one request
# seconds; servers close a connection that rests for 5 s, perhaps just when it is used again
IDLE_LIMIT = 2.0
AT_ONCE = 0.05  # seconds in which a server says that it had closed a connection before
LATE = 4096  # replies that are kept until the load is over; later ones are read as they end
PAUSE = 0.1  # seconds before a loop that found no server tries again
GIVE_UP = 3.0  # seconds without any connection, then no more requests set out

# Kinds of errors beside those of `wire`.
STREAM_ERROR, BAD_REPLY = "error in the stream", "unreadable reply"
NOT_SENT, INTERRUPTED = "not sent", "interrupted"


@dataclass(frozen=True)
class Target:
    """A server. `key` is sent as a bearer token. A path in `url`, with or without a `/v1` at its
    end, stands before every request's.
    """

    url: str
    model: str = ""
    key: str | None = None

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, whether it speaks TLS. Raises `ConfigError`."""
        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{self.url!r} is not an address such as http://127.0.0.1:8000.")
        if not (self.key or "").isascii() or not (self.key or " ").isprintable():
            raise ConfigError("the API key holds characters that a header cannot carry.")
        secure = parts.scheme == "https"
        return host, port or (443 if secure else 80), secure

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """A whole request: POST with a body, to which the model is added; GET without."""
        if body is not None:
            return self.post(path, json.dumps({"model": self.model, **body}).encode())
        return self._request("GET", path)

    def post(self, path: str, content: bytes) -> bytes:
        """A whole POST of a body of JSON."""
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
    """The id of the first model that the server names. Raises `Broken`."""
    connection = await connect(*target.address)
    try:
        reply = await connection.ask(target.request("/v1/models"), 30.0)
    finally:
        connection.close()
    if reply.status != 200:
        raise Broken(f"/v1/models is answered with {reply.status}: {reply.body[:200]!r}")
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise Broken("/v1/models names no model", BAD_REPLY) from None


class Connections:
    """Connections that are free; a new one where none is."""

    def __init__(self, target: Target) -> None:
        self._address = target.address
        self._free: list[tuple[float, Connection]] = []

    async def ask(self, request: bytes, timeout: float) -> Reply:
        """Send a request. Raises `Broken`.

        A server may close a connection that rests just when it is used again. What it closes at
        once, without a byte of a reply, it has not read: that is sent again over a new connection.
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
class _Record:
    """A reply, or why there is none; read when the load is over."""

    ask: Ask
    began: float
    reply: Reply | None = None
    error: str = "the load was ended by Ctrl-C"
    kind: str = INTERRUPTED
    ended: float = 0.0


class _Run:
    """A load that is under way."""

    def __init__(
        self,
        target: Target,
        asks: Iterable[Ask],
        seconds: float | None,
        timeout: float,
        ended: Callable[[], None],
    ) -> None:
        self.records: list[_Record | Outcome] = []
        self.gave_up = False
        encoded = ((ask, target.request(ask.path, ask.body)) for ask in asks)
        # encoded before the clock runs, unless it is not known how many there are
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
        """The next request; None: no more set out."""
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
                if (found := self.next()) is None:
                    return
                under_way.create_task(self._send(*found, planned))

    def leave_nothing_out(self) -> None:
        """Requests that were to be sent to a server that is gone."""
        if self.gave_up and self._is_counted:
            now = time.perf_counter()
            why = "the server could not be reached any more"
            self.records += [
                _Record(ask, now, None, why, NOT_SENT, now) for ask, _ in self._requests
            ]

    async def _one_by_one(self) -> None:
        while (found := self.next()) is not None:
            if self._is_over(began := time.perf_counter()):  # by now: encoding it took time
                return
            record = await self._send(*found, began)
            if record.kind == UNREACHABLE:
                await asyncio.sleep(PAUSE)

    async def _send(self, ask: Ask, request: bytes, began: float) -> _Record:
        record, place = _Record(ask, began), len(self.records)
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
        if place >= LATE:
            self.records[place] = outcome(record)
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
    """Send requests and wait for their answers.

    A server that cannot be reached for `GIVE_UP` seconds ends the load; requests that were to
    be sent to it are among the outcomes, with their reason.

    Args:
        target: the server.
        asks: in the order in which they set out.
        concurrency: requests under way at once, where no times are given.
        starts: seconds from the begin at which requests set out, however many are under way; see
            `shape.start_times`.
        seconds: after these no request sets out. None: all of `asks` do.
        timeout: seconds for one request.
        watched: process ids by name, whose CPU time and whose children's is wanted.
        ended: called whenever a request has ended.
        interruptible: cancelled (by Ctrl-C), it returns what was seen until then.
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
    outcomes = [outcome(each) if isinstance(each, _Record) else each for each in run.records]
    return Load(whole, outcomes, cpu, run.began, run.gave_up, interrupted)


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from pausing the client."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def outcome(record: _Record) -> Outcome:
    """Read a reply."""
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
    if "meta_info" in content:  # SGLang's shape
        meta = content["meta_info"]
        return Outcome(
            began,
            reply.ended,
            (),
            meta["prompt_tokens"],
            meta.get("cached_tokens", 0),
            meta["completion_tokens"],
        )
    if not content["choices"]:
        raise Broken("the reply has no choices", BAD_REPLY)
    usage = content.get("usage")
    counts = _counts(usage) if usage else (0, 0, 0, "nothing")
    return Outcome(began, reply.ended, (), *counts)


def _of_stream(began: float, reply: Reply) -> Outcome:
    pieces: list[float] = []
    usage: Mapping[str, Any] | None = None
    if not reply.events or reply.events[-1][1] != b"[DONE]":
        raise Broken(
            "the stream ended without [DONE], behind "
            f"{reply.events[-1][1][:200] if reply.events else b''!r}",
            STREAM_ERROR,
        )
    for when, data in reply.events[:-1]:
        event = decoder()(data)
        if "error" in event:
            raise Broken(f"the stream holds an error: {data[:300]!r}", STREAM_ERROR)
        usage = event.get("usage") or usage
        if any(has_text(choice) for choice in event["choices"]):
            pieces.append(when)
    counts = _counts(usage) if usage else (0, 0, len(pieces), "pieces")
    return Outcome(began, reply.ended, tuple(pieces), *counts)


def has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of an event holds a piece of the answer. The role alone, or how it ended, is
    none.
    """
    if "text" in choice:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta: Mapping[str, Any] = choice.get("delta") or {}
    return any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
    )


def _counts(usage: Mapping[str, Any]) -> tuple[int, int, int, str]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], cached, usage["completion_tokens"], "usage"


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run in an event loop of the fastest kind that there is."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
