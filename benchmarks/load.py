"""`python -m benchmarks load URL`: put load on an OpenAI-compatible server, ours or another, and
time what it answers.

Closed loop: so many requests are always under way. Poisson: requests set out at random times, and
waiting counts from the time at which one was to set out, also where the client was late. One
process, one thread; see `wire`.
"""

import asyncio
import gc
import itertools
import json
import random
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from benchmarks.cpu_time import CpuMeter
from benchmarks.latency import percentile
from benchmarks.measure import Row
from benchmarks.wire import Broken, Connection, Reply, connect
from benchmarks.workloads import HIGHEST_ID, LOWEST_ID

try:
    from msgspec.json import decode
except ImportError:
    decode = json.loads
try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

Result = TypeVar("Result")
WORDS = (
    "time year way day thing man world life hand part child eye woman place work week case "
    "point company number"
)
TIMEOUT = 600.0  # seconds for one request
# seconds; servers close a connection that rests for 5 s, perhaps just when it is used again
IDLE_LIMIT = 2.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Target:
    """A server. `key` is sent as a bearer token."""

    url: str
    model: str = ""
    key: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{self.url!r} is not an address such as http://127.0.0.1:8000.")
        return parts.hostname, parts.port or 80

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """A whole request: POST with a body, GET without."""
        content = b"" if body is None else json.dumps({"model": self.model, **body}).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
            f"Host: {':'.join(map(str, self.address))}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            *(
                ["Content-Type: application/json", f"Content-Length: {len(content)}"]
                if body is not None
                else []
            ),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass(frozen=True)
class Ask:
    """One request. The body is without the model's name."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; times in seconds by `time.perf_counter`.

    Attributes:
        began: when it was sent, or was to be sent.
        pieces: when each event with a piece of the answer came; none where it was not streamed.
        tokens: of the answer, by the server's usage; without one, the number of pieces.
        error: what went wrong, or None.
    """

    began: float
    ended: float
    pieces: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None


@dataclass
class Load:
    """What a run saw.

    Attributes:
        cpu: CPU seconds of the client, and of every part of the server that was watched.
    """

    seconds: float
    outcomes: list[Outcome]
    cpu: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.outcomes)

    @property
    def errors(self) -> list[str]:
        return [each.error for each in self.outcomes if each.error is not None]

    @property
    def first_tokens(self) -> list[float]:
        return [each.pieces[0] - each.began for each in self.outcomes if each.pieces]

    @property
    def gaps(self) -> list[float]:
        return [gap for each in self.outcomes for gap in gaps(each.pieces)]

    def row(self) -> Row:
        """Figures for a report: seconds and tokens a second, milliseconds for latencies."""
        good = [each for each in self.outcomes if each.error is None]
        events = sum(len(each.pieces) for each in good)
        streamed = sum(each.tokens for each in good if each.pieces)
        return {
            "requests": len(self.outcomes),
            "errors": len(self.errors),
            "seconds": round(self.seconds, 4),
            "prompt_tokens": sum(each.prompt_tokens for each in good),
            "cached_tokens": sum(each.cached_tokens for each in good),
            "output_tokens": self.tokens,
            "output_tokens_per_s": round(self.tokens / self.seconds, 2),
            "tokens_per_event": round(streamed / events, 3) if events else None,
            "first_token_ms": shares(self.first_tokens, 50, 90, 99),
            "between_tokens_ms": shares(self.gaps, 50, 99, 100),
            "whole_ms": shares([each.ended - each.began for each in good], 50, 90, 99),
            "cpu_s": {name: round(seconds, 3) for name, seconds in self.cpu.items()},
        }


def gaps(pieces: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(pieces)]


def shares(seconds: Sequence[float], *percents: int) -> dict[str, float] | None:
    """Percentiles in milliseconds by name; None where there is nothing."""
    return (
        {f"p{share}": round(percentile(seconds, share) * 1e3, 3) for share in percents}
        if seconds
        else None
    )


def token_requests(
    count: int, prompt_tokens: int, output_tokens: int, *, stream: bool, seed: int = 0, **more: Any
) -> list[Ask]:
    """Completions of random token ids, each of exactly `output_tokens` tokens."""
    rng = random.Random(seed)
    options = answer_of(output_tokens, stream) | more
    return [
        Ask(
            COMPLETIONS,
            {"prompt": [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(prompt_tokens)]}
            | options,
        )
        for _ in range(count)
    ]


def chat_requests(
    count: int, words: int, output_tokens: int, *, stream: bool, seed: int = 0, **more: Any
) -> list[Ask]:
    """Chats of one message of random words."""
    rng = random.Random(seed)
    options = answer_of(output_tokens, stream) | more
    texts = [" ".join(rng.choices(WORDS.split(), k=words)) for _ in range(count)]
    return [
        Ask(CHAT, {"messages": [{"role": "user", "content": text}]} | options) for text in texts
    ]


def answer_of(output_tokens: int, stream: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": stream,
    }
    return options | ({"stream_options": {"include_usage": True}} if stream else {})


async def model_of(target: Target) -> str:
    """The id of the first model that the server names. Raises `Broken`."""
    connection = await connect(*target.address)
    try:
        reply = await connection.ask(target.request("/v1/models"), 30.0)
    finally:
        connection.close()
    if reply.status != 200:
        raise Broken(f"/v1/models is answered with {reply.status}: {reply.body[:200]!r}")
    return str(json.loads(reply.body)["data"][0]["id"])


class Connections:
    """Connections that are free; a new one where none is."""

    def __init__(self, target: Target) -> None:
        self._address = target.address
        self._free: list[tuple[float, Connection]] = []

    async def ask(self, request: bytes, timeout: float) -> Reply:
        """Send a request. Raises `Broken`."""
        connection = self._rested() or await connect(*self._address)
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
    error: str = ""
    ended: float = 0.0


async def _send(record: _Record, request: bytes, connections: Connections, timeout: float) -> None:
    try:
        record.reply = await connections.ask(request, timeout)
    except Broken as problem:
        record.error, record.ended = str(problem), time.perf_counter()


async def drive(
    target: Target,
    asks: Sequence[Ask],
    *,
    concurrency: int = 32,
    rate: float | None = None,
    seed: int = 0,
    timeout: float = TIMEOUT,
    watched: Mapping[str, int] | None = None,
) -> Load:
    """Send all requests and wait for their answers.

    Args:
        target: the server.
        asks: in the order in which they set out.
        concurrency: requests under way at once, where there is no rate.
        rate: requests a second that set out on average, however many are under way.
        seed: of the times between them.
        timeout: seconds for one request.
        watched: process ids by name, whose CPU time and whose children's is wanted.
    """
    # encoded before the clock runs
    requests = [(ask, target.request(ask.path, ask.body)) for ask in asks]
    records: list[_Record] = []
    connections = Connections(target)
    waiting = iter(requests)

    async def next_ones() -> None:
        for ask, request in waiting:
            record = _Record(ask, time.perf_counter())
            records.append(record)
            await _send(record, request, connections, timeout)

    async def at_random(rate: float) -> None:
        rng, planned = random.Random(seed), time.perf_counter()
        async with asyncio.TaskGroup() as under_way:
            for ask, request in waiting:
                planned += rng.expovariate(rate)
                await asyncio.sleep(max(planned - time.perf_counter(), 0.0))
                records.append(_Record(ask, planned))
                under_way.create_task(_send(records[-1], request, connections, timeout))

    meter = CpuMeter(watched or {})
    try:
        with no_collections():
            began, before = time.perf_counter(), meter.read()
            if rate is None:
                await asyncio.gather(*(next_ones() for _ in range(min(concurrency, len(requests)))))
            else:
                await at_random(rate)
            seconds, after = time.perf_counter() - began, meter.read()
    finally:
        connections.close()
    cpu = {name: after[name] - before[name] for name in after}
    return Load(seconds, [outcome(record) for record in records], cpu)


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
        return Outcome(record.began, record.ended, error=record.error)
    try:
        if reply.status != 200:
            raise Broken(
                f"status {reply.status}: "
                f"{(reply.body or b' '.join(e for _, e in reply.events))[:300]!r}"
            )
        if record.ask.body.get("stream"):
            return _of_stream(record.began, reply)
        return _of_body(record.began, reply)
    except (Broken, ValueError, LookupError, TypeError) as problem:
        return Outcome(record.began, reply.ended, error=str(problem) or type(problem).__name__)


def _of_body(began: float, reply: Reply) -> Outcome:
    content = decode(reply.body)
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
        raise Broken("the reply has no choices")
    return Outcome(began, reply.ended, (), *_counts(content["usage"]))


def _of_stream(began: float, reply: Reply) -> Outcome:
    pieces: list[float] = []
    usage: Mapping[str, Any] | None = None
    if not reply.events or reply.events[-1][1] != b"[DONE]":
        raise Broken(
            "the stream ended without [DONE], behind "
            f"{reply.events[-1][1][:200] if reply.events else b''!r}"
        )
    for when, data in reply.events[:-1]:
        event = decode(data)
        if "error" in event:
            raise Broken(f"the stream holds an error: {data[:300]!r}")
        usage = event.get("usage") or usage
        if any(has_text(choice) for choice in event["choices"]):
            pieces.append(when)
    counts = _counts(usage) if usage else (0, 0, len(pieces))
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


def _counts(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run in an event loop of the fastest kind that there is."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
