"""Fleets of scripted engines and helpers for their tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from nano_inference.errors import EngineDead
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import STOPPING
from nano_inference.remote.messages import (
    Call,
    EngineInfo,
    Failed,
    Generate,
    Outputs,
    Refused,
    Resume,
    Returned,
    ToEngine,
)
from nano_inference.remote.operations import Received, operation_named
from nano_inference.types import Delta, TrainingSample
from tests.server.scripted import Script, ScriptedClient, _Sample

Scripts = Script | Callable[[Generate, int], Script]


class Engine(ScriptedClient):
    """A scripted engine with weights that can be held and can resume requests of other engines.

    Attributes:
        resumed: Requests that this engine resumed.
        go: Event without which requests produce nothing.
        refuses: True if the engine rejects all resumed requests.
        version: Version of the weights.
        fails: Maps a call to the exception it raises, or to a function to run.
        holds: Maps a call to the event it waits for before it returns.
        is_built: Event that the start waits for.
        about: Extra facts that this engine reports about itself.
    """

    def __init__(self, number: int, script: Scripts) -> None:
        super().__init__(script)
        self.number = number
        self.resumed: list[Resume] = []
        self.go = asyncio.Event()
        self.go.set()
        self.refuses = False
        self.version = 0
        self.paused = False
        self.saved: str | None = None
        self.fails: dict[str, Exception | Callable[[], None]] = {}
        self.holds: dict[str, asyncio.Event] = {}
        self.is_closed = False
        self.fail_to_start: Exception | None = None
        self.is_built = asyncio.Event()
        self.is_built.set()
        self.about: dict[str, object] = {}
        self.returns |= dict.fromkeys(
            ("join_group", "leave_group", "receive_broadcast", "prepare_update"), None
        )
        self.returns |= dict.fromkeys(("begin_update", "flush_cache", "receive_folder"), 0) | {
            "cancel_update": True
        }
        self.returns |= {
            "describe_blocks": {"block_size": 4, "block_bytes": 64},
            "count_blocks": 0,
            "export_blocks": None,
        }
        self.returns |= {
            "has_group": True,
            "adapters": [],
            "sleeping": [],
            "save_weights": 0,
            "sleep": None,
            "wake": None,
        }

    async def start(self) -> None:
        await self.is_built.wait()
        self._require_open()
        if self.fail_to_start is not None:
            raise self.fail_to_start
        await super().start()

    async def close(self) -> None:
        self.is_closed = True
        await super().close()
        self.is_built.set()

    def _require_open(self) -> None:
        if self.is_closed:
            raise EngineDead(STOPPING)

    def _engine_info(self) -> EngineInfo:
        return msgspec.structs.replace(super()._engine_info(), **self.about)

    def said(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def _send(self, message: ToEngine) -> None:
        match message:
            case Resume(request_id, samples):
                self.resumed.append(message)
                if self.refuses:
                    asyncio.get_running_loop().call_soon(
                        self._receive, Refused(request_id, "InvalidRequest", "no")
                    )
                    return
                self._running[request_id] = [
                    self._spawn(self._resume(message, sample)) for sample in samples
                ]
            case Call(call_id, name, arguments):
                self.calls.append(message)
                self._spawn(self._answer_call(call_id, name, arguments))
            case _:
                super()._send(message)

    async def _answer_call(self, call_id: int, name: str, arguments: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if name in self.holds:
            await self.holds[name].wait()
        failure = self.fails.get(name)
        if isinstance(failure, Exception):
            return self._receive(Failed(call_id, type(failure).__name__, str(failure)))
        if failure is not None:
            failure()
        match name:
            case "finish_update":
                self.version = arguments["version"]
            case "pause":
                self.paused = True
            case "resume":
                self.paused = False
            case _:
                pass
        special = {
            "get_weight_version": self.version,
            "finish_update": self.version,
            "pause": True,
        }
        value = special.get(name, self.returns.get(name))
        if operation_named(name).returns is Received:
            value = Received()
        return self._receive(Returned(call_id, value))

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _play(self, request: Generate, index: int, script: Script) -> None:
        await self.go.wait()
        await super()._play(request, index, script)

    async def _resume(self, message: Resume, partial: TrainingSample) -> None:
        params = partial.sampling_params
        assert params is not None
        request = Generate(
            message.request_id, list(partial.prompt_tokens), params, stream=message.stream
        )
        script = (
            self.script
            if isinstance(self.script, Script)
            else self.script(request, partial.sample_index)
        )
        sample = _Sample(request, partial.sample_index, script, self.tokenizer)
        known = len(partial.completion_tokens)
        assert tuple(sample.token_ids[:known]) == partial.completion_tokens
        for at in range(known, len(sample.token_ids)):
            await asyncio.sleep(script.delay)
            await self.go.wait()
            if script.die_after is not None and at >= script.die_after:
                return self.die()
            if message.request_id in self._ended:
                sample.cut(at)
                break
            if message.stream:
                self._receive(Outputs([sample.delta(at, at + 1)], [message.request_id]))
        return self._receive(Outputs([sample.last()], [message.request_id]))

    def tell(self, request_id: int, deltas: list[Delta]) -> None:
        """Report the tokens of unstreamed requests, as an engine does periodically."""
        self._receive(Outputs(deltas, [request_id] * len(deltas)))


class Made:
    """A fleet and its engines, in order of creation."""

    def __init__(self, count: int, script: Scripts, **options: Any) -> None:
        self.engines: list[Engine] = []
        self.script = script
        self.on_made: Callable[[Engine], None] = lambda _: None

        def make(number: int) -> Engine:
            self.engines.append(Engine(number, self.script))
            self.on_made(self.engines[-1])
            return self.engines[-1]

        self.client = FleetClient(make, count, 4096, **options)


@asynccontextmanager
async def fleet(
    count: int = 2, script: Scripts | None = None, **options: Any
) -> AsyncIterator[Made]:
    made = Made(
        count,
        script if script is not None else Script(list(range(100, 130)), delay=0.001),
        **options,
    )
    await made.client.start()
    try:
        yield made
    finally:
        await made.client.close()


def play(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def told(deltas: list[Delta]) -> tuple[list[int], str]:
    """Return the tokens and the text of a stream of one sample."""
    return [each for delta in deltas for each in delta.token_ids], "".join(
        delta.text or "" for delta in deltas
    )


def plain(sample: TrainingSample) -> TrainingSample:
    """Return the sample without fields that differ between replicas."""
    return replace(sample, request_id=0, group_id=None, cached_tokens=0, kv_versions=())
