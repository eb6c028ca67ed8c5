"""`Pauses` and `MemoryParts`: pausing the engine, and releasing its memory."""

from collections.abc import Iterable
from typing import get_args

import msgspec

from nano_inference.remote.time_limits import SOON
from nano_inference.server.control.engine import Engine
from nano_inference.server.control.updates import Updates
from nano_inference.server.errors import ApiError
from nano_inference.types import EngineStats, KvPolicy, Memory, PauseMode


class Loads(msgspec.Struct, frozen=True):
    """Numbers of running and waiting samples."""

    running: int
    waiting: int


class Pauses:
    """Pauses of the engine, and aborts of its requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._client = engine, engine.client
        self._patience = engine.config.rl_timeout

    async def pause(
        self, mode: PauseMode, *, kv_policy: KvPolicy | None = None, timeout: float | None = None
    ) -> None:
        """Stop computing until `resume`, and return when nothing is computed. New requests wait.

        Args:
            mode: Treatment of running requests, as in `InferenceEngine.pause`. `"abort"` returns
                their partial samples.
            kv_policy: Default policy of updates during the pause.
            timeout: Seconds. None: the server's deadline. If requests need longer with `"wait"`,
                nothing is paused and a 504 is raised.
        """
        seconds = self._patience if timeout is None else timeout
        how = "keep" if mode == "abort" else mode
        if not await self._client.call("pause", mode=how, timeout=seconds):
            raise ApiError(
                504,
                f"requests did not finish within {seconds:g} s; the engine is not paused.",
            )
        self._engine.known.pause_policy = kv_policy
        if mode == "abort":
            await self._client.abort(None, timeout=seconds)

    async def resume(self) -> None:
        """End the pause. The engine computes again once no memory is asleep. Does nothing without a
        pause.
        """
        self._engine.known.pause_policy = None
        await self._client.call("resume")

    async def is_paused(self, *, timeout: float = SOON) -> bool:
        """Return True if nothing is computed until `resume` or `wake`. Raises `TimeoutError` after
        `timeout` seconds.
        """
        return bool(await self._client.call("is_paused", timeout=timeout))

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests by their clients' ids (None: all). Their clients get the partial samples.

        An id is `Ask.client_id`, or the HTTP request's `x-request-id`. Unknown ids are ignored.
        Returns the number of prompts once they have ended.
        """
        names = None if request_ids is None else frozenset(request_ids)
        return await self._client.abort(names, timeout=self._patience)

    async def loads(self) -> Loads:
        """Return the numbers of running and waiting samples. Paused requests, and those whose cache
        is asleep, are included.
        """
        stats: EngineStats = await self._client.call("stats")
        total = self._client.num_samples
        running = min(stats.num_running, total)
        return Loads(running, total - running)


class MemoryParts:
    """Parts of the engine's memory that sleep and wake, and its prefix cache."""

    def __init__(self, engine: Engine, updates: Updates) -> None:
        self._engine, self._client, self._updates = engine, engine.client, updates

    async def flush_cache(self, *, only_idle: bool = False) -> None:
        """Drop cached prefixes.

        With `only_idle` (SGLang's behavior), raises a 409 while requests run or wait. The exception
        is a pause whose requests recompute their context: waiting ones, even new ones, do not
        prevent the flush.
        """
        recomputes = self._engine.known.pause_policy == "recompute"
        if only_idle and self._client.num_samples and not recomputes:
            raise ApiError(
                409,
                f"cannot flush the cache while {self._client.num_samples} samples run or wait.",
            )
        await self._client.call("flush_cache")

    async def sleep(self, memory: Iterable[Memory] = ("kv_cache", "weights")) -> None:
        """Release parts of the memory that are awake. Nothing is computed until all of it is
        awake again.

        Requests wait, and a pause continues. Raises a 409 for the weights while an update is open.
        """
        parts = _checked(memory)
        if "weights" in parts:
            self.require_no_update()
        await self._change("sleep", parts)

    def require_no_update(self) -> None:
        """Raise `ApiError` 409 if an open update prevents the weights from sleeping."""
        if self._updates.is_open:
            raise ApiError(409, "a weight update is open; finish it before the weights sleep.")

    async def wake(self, memory: Iterable[Memory] | None = None) -> None:
        """Wake parts of the memory (None: all). The engine resumes once all are awake, unless it is
        paused.
        """
        await self._change("wake", _checked(get_args(Memory) if memory is None else memory))

    async def _change(self, operation: str, parts: list[Memory]) -> None:
        await self._client.call(operation, memory=parts, timeout=self._engine.config.rl_timeout)


def _checked(memory: Iterable[Memory]) -> list[Memory]:
    parts = list(memory)
    if unknown := [each for each in parts if each not in get_args(Memory)]:
        raise ApiError(
            400,
            f"{unknown[0]!r} is not a part of the memory; use {', '.join(get_args(Memory))}.",
        )
    return parts
