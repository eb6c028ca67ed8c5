"""`Pauses` and `MemoryParts`: who computes nothing for a while, and what memory is given back."""

from collections.abc import Iterable
from typing import get_args

import msgspec

from nano_inference.remote.time_limits import SOON
from nano_inference.server.control.engine import Engine
from nano_inference.server.control.updates import Updates
from nano_inference.server.errors import ApiError
from nano_inference.types import EngineStats, KvPolicy, Memory, PauseMode


class Loads(msgspec.Struct, frozen=True):
    """Requests in the engine, as samples."""

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
        """Stop computing until `resume`, and return when nothing is computed. Requests that come
        meanwhile wait.

        Args:
            mode: what becomes of requests, as in `InferenceEngine.pause`; `"abort"`: they are
                answered with what they have.
            kv_policy: of updates during the pause that name none.
            timeout: seconds; None: the server's. With `"wait"` requests may need longer: then
                nothing is paused (504).
        """
        seconds = self._patience if timeout is None else timeout
        how = "keep" if mode == "abort" else mode
        if not await self._client.call("pause", mode=how, timeout=seconds):
            raise ApiError(
                504, f"the requests did not end within {seconds:g} seconds; nothing is paused."
            )
        self._engine.known.pause_policy = kv_policy
        if mode == "abort":
            await self._client.abort(None, timeout=seconds)

    async def resume(self) -> None:
        """End the pause; the engine computes again when nothing is asleep. Without a pause nothing
        happens.
        """
        self._engine.known.pause_policy = None
        await self._client.call("resume")

    async def is_paused(self, *, timeout: float = SOON) -> bool:
        """Whether nothing is computed until `resume` or `wake`. Raises `TimeoutError` after so many
        seconds.
        """
        return bool(await self._client.call("is_paused", timeout=timeout))

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests, by the ids that their clients gave them (None: all); they are answered with
        what they have.

        An id is `Ask.client_id`, or that of the HTTP request (`x-request-id`). Ids that have no
        request, any more or yet, are passed over. Returns how many prompts there were, when they
        have ended.
        """
        names = None if request_ids is None else frozenset(request_ids)
        return await self._client.abort(names, timeout=self._patience)

    async def loads(self) -> Loads:
        """How many samples run and wait. Paused requests, and requests whose cache a sleep took, do
        one or the other too.
        """
        stats: EngineStats = await self._client.call("stats")
        total = self._client.num_samples
        running = min(stats.num_running, total)
        return Loads(running, total - running)


class MemoryParts:
    """The parts of the engine's memory that sleep and wake, and its prefix cache."""

    def __init__(self, engine: Engine, updates: Updates) -> None:
        self._engine, self._client, self._updates = engine, engine.client, updates

    async def flush_cache(self, *, only_idle: bool = False) -> None:
        """Forget cached prefixes. `only_idle`: 409 while requests run or wait (SGLang's way),
        except in a pause after which they compute their context anew: what waits there, newcomers
        too, holds nothing back.
        """
        recomputes = self._engine.known.pause_policy == "recompute"
        if only_idle and self._client.num_samples and not recomputes:
            raise ApiError(
                409,
                f"{self._client.num_samples} sample(s) run or wait; the cache is flushed without "
                "them.",
            )
        await self._client.call("flush_cache")

    async def sleep(self, memory: Iterable[Memory] = ("kv_cache", "weights")) -> None:
        """Give memory back, as far as it is awake; nothing is computed until all of it is awake
        again.

        Requests wait, and a pause goes on. 409 for weights while an update is open.
        """
        parts = _checked(memory)
        if "weights" in parts:
            self.require_no_update()
        await self._change("sleep", parts)

    def require_no_update(self) -> None:
        """Raise `ApiError`, 409, where an open update keeps the weights from sleeping."""
        if self._updates.is_open:
            raise ApiError(409, "a weight update is open; finish it before the weights sleep.")

    async def wake(self, memory: Iterable[Memory] | None = None) -> None:
        """Wake these parts of the memory; None: all. The engine resumes once all are awake, unless
        it is paused.
        """
        await self._change("wake", _checked(get_args(Memory) if memory is None else memory))

    async def _change(self, operation: str, parts: list[Memory]) -> None:
        await self._client.call(operation, memory=parts, timeout=self._engine.config.rl_timeout)


def _checked(memory: Iterable[Memory]) -> list[Memory]:
    parts = list(memory)
    if unknown := [each for each in parts if each not in get_args(Memory)]:
        raise ApiError(
            400,
            f"{unknown[0]!r} is not a part of the memory; these are {', '.join(get_args(Memory))}.",
        )
    return parts
