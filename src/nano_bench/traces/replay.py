"""Replay a trace on a server: turns in their order, with their waits, subagents at once."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nano_bench import load
from nano_bench.cpu_time import CpuMeter
from nano_bench.load import GIVE_UP, NOT_SENT, PAUSE, Connections, Record, Target
from nano_bench.outcomes import Load, Outcome
from nano_bench.shape import CHAT, Ask
from nano_bench.traces.model import Conversation, Trace, Turn
from nano_bench.wire import UNREACHABLE, Broken, Reply

_FAILED = "an earlier turn of its conversation failed"

_UNKNOWN = Outcome(0.0, 0.0, error="unknown", kind=NOT_SENT)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Played:
    """One turn of a replay.

    Attributes:
        conversation: Name in the trace.
        index: Turn of the conversation.
        depth: 0 for a session, 1 for its subagents, and so on.
        turn: Turn of the trace.
        outcome: Outcome of its request.
        reusable: Prompt tokens in blocks that were sent before, in the trace's count. None if the
            trace does not name blocks.
    """

    conversation: str
    index: int
    depth: int
    turn: Turn
    outcome: Outcome = _UNKNOWN
    reusable: int | None = None


@dataclass(frozen=True)
class Options:
    """Options of a replay.

    Attributes:
        at_once: Limit on sessions in progress. None: no limit.
        timeout: Timeout of one request in seconds.
        fields: More fields of every request.
        watched: Process ids by name, whose CPU time is measured.
        ended: Callback after each turn.
    """

    at_once: int | None = None
    timeout: float = load.PATIENCE
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    watched: Mapping[str, int] = field(default_factory=dict[str, int])
    ended: Callable[[], None] = lambda: None


class _Replay:
    def __init__(self, target: Target, trace: Trace, options: Options) -> None:
        self.played: list[Played] = []
        self.connections = Connections(target)
        self._target, self._trace, self._options = target, trace, options
        self._seen: set[int] = set()
        self._gone = asyncio.Event()  # set when the server stays unreachable
        self.began = self._last_answer = time.perf_counter()

    @property
    def gave_up(self) -> bool:
        return self._gone.is_set()

    async def run(self) -> None:
        self.began = self._last_answer = time.perf_counter()
        gate = asyncio.Semaphore(self._options.at_once or len(self._trace.roots))
        async with asyncio.TaskGroup() as sessions:
            for name in self._trace.roots:
                one = self._trace.conversations[name]
                await self._sleep_until(self.began + one.start)
                await gate.acquire()
                session = sessions.create_task(self._session(one))
                session.add_done_callback(lambda _: gate.release())

    async def _session(self, one: Conversation) -> None:
        async with asyncio.TaskGroup() as tree:
            await self._play(one, (), 0, tree)

    async def _play(
        self, one: Conversation, history: Sequence[Message], depth: int, tree: asyncio.TaskGroup
    ) -> None:
        began = time.perf_counter()
        children: dict[str, asyncio.Task[None]] = {}

        def start(names: Sequence[str], messages: Sequence[Message]) -> None:
            for name in names:
                child = self._trace.conversations[name]
                after = self._child(child, messages if child.forks else (), depth + 1, tree)
                children[name] = tree.create_task(after)

        start(one.spawns, ())
        for index, turn in enumerate(one.turns):
            await asyncio.gather(*(children[name] for name in turn.joins if name in children))
            prompt = [*(history if turn.appends else ()), *(m.message() for m in turn.messages)]
            request = self._target.request(CHAT, self._body(turn, prompt))
            due = time.perf_counter() + turn.wait
            await self._sleep_until(due if turn.at is None else max(due, began + turn.at))
            if self.gave_up:
                self._leave_out(one, index, index, depth)
                return
            reply = await self._send(Played(one.name, index, depth, turn), request)
            if reply is None:
                self._leave_out(one, index + 1, index, depth)
                return
            if turn.appends or any(self._trace.conversations[name].forks for name in turn.spawns):
                history = [*prompt, answer(reply)]
            start(turn.spawns, history)

    async def _child(
        self, one: Conversation, history: Sequence[Message], depth: int, tree: asyncio.TaskGroup
    ) -> None:
        await self._sleep_until(time.perf_counter() + one.start)
        await self._play(one, history, depth, tree)

    async def _sleep_until(self, due: float) -> None:
        """Sleep, but no longer than the server is reachable."""
        seconds = due - time.perf_counter()
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), seconds)

    def _body(self, turn: Turn, prompt: Sequence[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": prompt, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if turn.output is not None:
            body["max_tokens"] = turn.output
        return body | dict(self._options.fields) | dict(turn.fields)

    async def _send(self, played: Played, request: bytes) -> Reply | None:
        """Send a request, and again as long as the server may come back. Return None on failure."""
        record = Record(Ask(CHAT, {"stream": True}), time.perf_counter())
        reusable = self._reusable(played.turn)
        try:
            while not await self._try(record, request):
                await asyncio.sleep(PAUSE)
        finally:  # also if cancelled
            outcome = load.outcome(record)
            self.played.append(replace(played, outcome=outcome, reusable=reusable))
            self._options.ended()
        return record.reply if outcome.error is None else None

    async def _try(self, record: Record, request: bytes) -> bool:
        """Try to get a reply. Return False to try again."""
        try:
            record.reply = await self.connections.ask(request, self._options.timeout)
            record.kind = ""
        except Broken as problem:
            record.error, record.kind = str(problem), problem.kind
        now = record.ended = time.perf_counter()
        if record.kind != UNREACHABLE:
            self._last_answer = now
        elif now - self._last_answer > GIVE_UP:
            self._gone.set()
        return record.kind != UNREACHABLE or self.gave_up

    def _leave_out(self, one: Conversation, first: int, spawning: int, depth: int) -> None:
        """Record as not sent the turns from `first` on, and the subagents of the turns from
        `spawning` on.
        """
        now = time.perf_counter()
        why = "the server became unreachable" if self.gave_up else _FAILED
        outcome = Outcome(now, now, error=why, kind=NOT_SENT)
        for index, turn in enumerate(one.turns[first:], first):
            self.played.append(Played(one.name, index, depth, turn, outcome))
        for turn in one.turns[spawning:]:
            for name in turn.spawns:
                self._leave_out(self._trace.conversations[name], 0, 0, depth + 1)

    def _reusable(self, turn: Turn) -> int | None:
        if (blocks := turn.blocks) is None:
            return None
        count, is_prefix = 0, True
        for name in blocks.prefixes():
            is_prefix = is_prefix and name in self._seen
            count += is_prefix
            self._seen.add(name)
        return blocks.position(count * blocks.block_size)


def answer(reply: Reply) -> dict[str, Any]:
    """Return the assistant's message of a streamed reply, with its tool calls."""
    texts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for _, data in reply.events[:-1]:
        event = load.decoder()(data)
        for choice in event.get("choices") or ():
            delta: Mapping[str, Any] = choice.get("delta") or {}
            texts.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or ():
                _extend(calls.setdefault(part.get("index", 0), {}), part)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})


def _extend(call: dict[str, Any], part: Mapping[str, Any]) -> None:
    function: Mapping[str, Any] = part.get("function") or {}
    whole: dict[str, str] = call.setdefault("function", {"name": "", "arguments": ""})
    for name in ("name", "arguments"):
        whole[name] += function.get(name) or ""
    call["id"] = part.get("id") or call.get("id", "")
    call["type"] = "function"


async def replay(target: Target, trace: Trace, options: Options) -> tuple[Load, list[Played]]:
    """Replay a trace. If the server is unreachable for `GIVE_UP` seconds, the replay ends, and the
    remaining turns are not sent. Ctrl-C also ends it, with the results so far.
    """
    run, meter = _Replay(target, trace, options), CpuMeter(options.watched)
    interrupted = False
    try:
        with load.no_collections():
            before = meter.read()
            try:
                await run.run()
            except asyncio.CancelledError:
                interrupted = True
            whole, after = time.perf_counter() - run.began, meter.read()
    finally:
        run.connections.close()
    played = sorted(run.played, key=lambda each: each.outcome.began)
    cpu = {name: after[name] - before[name] for name in after}
    outcomes = [each.outcome for each in played]
    return Load(whole, outcomes, cpu, run.began, run.gave_up, interrupted), played
