"""`RolloutServer`: one engine behind the calls that verl makes. It needs neither Ray nor verl."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from nano_inference import AsyncInferenceEngine, WeightUpdate
from nano_inference.errors import InvalidRequest, WeightUpdateError
from nano_inference.types import Memory
from nano_inference.weights.transports import Deadline
from nano_ray.verl.buckets import Parcel, opened
from nano_ray.verl.gate import Gate
from nano_ray.verl.mapping import (
    GlobalSteps,
    RequestDefaults,
    refused_output,
    token_output,
    wanted,
)

# Who shares the device: trainer and engine in turns, with new weights each time; both in turns,
# with the same weights; the engine alone.
Mode = Literal["hybrid", "colocated", "standalone"]
BOTH: tuple[Memory, ...] = ("weights", "kv_cache")

# What `collective_rpc` may call: methods that only tell.
TELLING = ("get_weight_version", "weights_checksum", "stats")


class RolloutServer:
    """verl's calls, on one event loop. Every method that waits leaves the loop free.

    Args:
        engine: stays the caller's.
        defaults: of requests.
        mode: what `sleep` and `wake_up` have to give back.
        gives_memory_back: verl's `free_cache_engine`; False: nothing ever sleeps.
        timeout: seconds by which a weight update must serve once all of it has come.
    """

    def __init__(
        self,
        engine: AsyncInferenceEngine,
        defaults: RequestDefaults,
        *,
        mode: Mode,
        gives_memory_back: bool = True,
        timeout: float = 300.0,
    ) -> None:
        self.defaults, self.mode, self.gives_memory_back, self.timeout = (
            defaults,
            mode,
            gives_memory_back,
            timeout,
        )
        self._async = engine
        self._engine = engine.engine
        self._gate = Gate()
        self._steps = GlobalSteps()
        self._running: dict[int, str] = {}  # the engine's request ids: verl's
        self._update: WeightUpdate | None = None  # that is being received
        self._numbers = itertools.count(1)
        self._number = 0  # of that update
        self._step: int | None = None  # that it will be known as
        self._receiving = asyncio.Lock()

    # -- requests ----------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        *,
        priority: int = 0,
    ) -> dict[str, Any]:
        """One sample, as the fields of verl's `TokenOutput`. Raises `InvalidRequest` or
        `RequestTooLarge`.

        While the gate is closed it waits, or is turned away. An abort ends it with the tokens that
        it has.
        """
        asked = wanted(sampling_params, len(prompt_ids), self.defaults, priority=priority)
        if not await self._gate.enter():
            return refused_output(self._steps.of(self._engine.get_weight_version()))
        number = self._engine.intake.new_request_id()
        self._running[number] = request_id
        try:
            (sample,) = await self._async.generate([prompt_ids], asked.params, request_id=number)
        finally:
            del self._running[number]
        return token_output(sample, asked, self._steps)

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """End all requests with what they have, and compute nothing until `resume_generation`.

        Args:
            reset_prefix_cache: forget cached prefixes too. Nothing depends on it: those of other
                weights never match.
            reject_request: turn away who comes meanwhile, and who is parked; otherwise they wait.
        """
        self._gate.close(reject=reject_request)
        aborted = list(self._running.values())
        await asyncio.to_thread(self._engine.pause, "abort")
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def abort_request(
        self, request_id: str, reset_prefix_cache: bool = True
    ) -> dict[str, Any]:
        """End one request with what it has."""
        numbers = [number for number, name in self._running.items() if name == request_id]
        if not numbers:
            return {
                "aborted": False,
                "request_id": request_id,
                "error": f"request {request_id} is not running",
            }
        await asyncio.to_thread(self._engine.abort, numbers)
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted": True, "request_id": request_id}

    async def resume_generation(self) -> None:
        """Compute again, and let in who is parked."""
        await asyncio.to_thread(self._engine.resume)
        self._gate.open()

    # -- memory ------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Give weights and KV cache back, unless no other wants the memory. Requests stay."""
        if self.mode != "standalone":
            await self._sleep(BOTH)

    async def wake_up(self, tags: Iterable[Memory] | None = None) -> None:
        """Take the memory again; with tags only `"weights"` or `"kv_cache"`."""
        if self.mode != "standalone":
            await self._wake(BOTH if tags is None else tags)

    async def release_kv_cache(self) -> None:
        """Give the KV cache back for the time of an update."""
        if self.mode != "colocated":
            await self._sleep(("kv_cache",))

    async def resume_kv_cache(self) -> None:
        """Take it again."""
        if self.mode != "colocated":
            await self._wake(("kv_cache",))

    async def clear_kv_cache(self) -> None:
        """Forget every cached prefix."""
        await asyncio.to_thread(self._engine.flush_cache)

    # -- weights -----------------------------------------------------------------------------------

    async def begin_update(self, global_steps: int | None) -> int:
        """Open an update; returns its number. One that is open already is cancelled: its trainer is
        gone.

        Raises `InvalidRequest` while the weights are asleep.
        """
        self._engine.shared.require_weights()
        async with self._receiving:
            manager = self._engine.weight_sync
            self._cancel("another update has begun.")
            version = self._steps.version_for(global_steps, manager.version)
            self._update = manager.begin(version=version, kv_policy="keep")
            self._number, self._step = next(self._numbers), global_steps
            return self._number

    async def receive(self, number: int, description: bytes, content: Any) -> None:
        """Check a bucket (`buckets.Parcel`) and put it aside. Raises `WeightUpdateError`; the
        update is then over.
        """
        async with self._receiving:
            update = self._open(number)
            manager = self._engine.weight_sync
            try:
                tensors = await asyncio.to_thread(
                    opened, Parcel(description, content), manager.shapes
                )
                await asyncio.to_thread(manager.receive, tensors, copy=False, of=update)
            except WeightUpdateError as problem:
                self._cancel(str(problem))
                raise

    async def finish_update(self, number: int) -> int:
        """Write all of it between two steps; returns the version that serves. Requests go on, and
        keep their context.

        Raises `WeightUpdateError`, with the old version serving.
        """
        async with self._receiving:
            update = self._open(number)
            self._update = None
            self._engine.weight_sync.end(of=update)
            # before a sample with a token of it can come back
            self._steps.name(update.version, self._step)
            deadline = Deadline(self.timeout)
            while not await asyncio.to_thread(update.wait, 1.0):
                deadline.check(f"weight version {update.version} was not applied")
                self._engine.shared.require_alive()
            if update.error is not None:
                self._steps.name(update.version, None)
            return update.result(0)

    async def cancel_update(self, number: int) -> None:
        """Forget an update that is still being received."""
        async with self._receiving:
            if number == self._number:
                self._cancel("its trainer has given it up.")

    async def set_global_steps(self, global_steps: int) -> None:
        """Say which step of the trainer the weights are that serve now."""
        self._steps.name(self._engine.get_weight_version(), global_steps)

    # -- the rest ----------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """What a method of the engine tells (`TELLING`). Raises `InvalidRequest` for all others."""
        if method not in TELLING:
            raise InvalidRequest(f"collective_rpc calls {', '.join(TELLING)}, not {method!r}.")
        call = asyncio.to_thread(getattr(self._engine, method), *args, **(kwargs or {}))
        return await asyncio.wait_for(call, timeout)

    async def _sleep(self, memory: Sequence[Memory]) -> None:
        if self.gives_memory_back:
            await asyncio.to_thread(self._engine.sleep, memory=memory)

    async def _wake(self, tags: Iterable[Memory]) -> None:
        if self.gives_memory_back:
            await asyncio.to_thread(self._engine.wake, memory=tags)

    def _open(self, number: int) -> WeightUpdate:
        if self._update is None or number != self._number:
            raise WeightUpdateError("the weight update is not open; begin a new one.")
        return self._update

    def _cancel(self, reason: str) -> None:
        update, self._update = self._update, None
        if update is not None:
            self._engine.weight_sync.cancel(reason, of=update)
