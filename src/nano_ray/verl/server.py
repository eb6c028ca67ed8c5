"""`RolloutServer`: one engine with the methods that verl calls. Imports neither Ray nor verl."""

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

# Sharing of the device. hybrid: in turns with a trainer, with new weights each time. colocated: in
# turns with others, with unchanged weights. standalone: no sharing.
Mode = Literal["hybrid", "colocated", "standalone"]
BOTH: tuple[Memory, ...] = ("weights", "kv_cache")

# Read-only methods, which `collective_rpc` may call.
TELLING = ("get_weight_version", "weights_checksum", "stats")


class RolloutServer:
    """verl's calls on one event loop. No method blocks the loop.

    Args:
        engine: Engine, which the caller owns.
        defaults: Defaults for requests.
        mode: Sharing of the device, which decides the memory that `sleep` releases.
        gives_memory_back: verl's `free_cache_engine`. False: no memory is ever released.
        timeout: Seconds until a weight update must be live after all its tensors have arrived.
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
        self._running: dict[int, str] = {}  # verl's request ids by the engine's
        self._update: WeightUpdate | None = None  # the update being received
        self._numbers = itertools.count(1)
        self._number = 0  # number of that update
        self._step: int | None = None  # the trainer's step of that update
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
        """Return one sample as the fields of verl's `TokenOutput`. Raises `InvalidRequest` or
        `RequestTooLarge`.

        While the gate is closed the request waits or is rejected. An abort returns the partial
        sample.
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
        """Abort all requests, return their partial samples, and pause until `resume_generation`.

        Args:
            reset_prefix_cache: Also delete cached prefixes. Results do not depend on it, since
                prefixes of other weights never match.
            reject_request: Reject new and parked requests instead of parking them.
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
        """Abort one request and return its partial sample."""
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
        """Resume the engine and admit parked requests."""
        await asyncio.to_thread(self._engine.resume)
        self._gate.open()

    # -- memory ------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Release weights and KV cache, unless the device is not shared. Requests are kept."""
        if self.mode != "standalone":
            await self._sleep(BOTH)

    async def wake_up(self, tags: Iterable[Memory] | None = None) -> None:
        """Reallocate the memory, or with `tags` only `"weights"` or `"kv_cache"`."""
        if self.mode != "standalone":
            await self._wake(BOTH if tags is None else tags)

    async def release_kv_cache(self) -> None:
        """Release the KV cache during a weight update."""
        if self.mode != "colocated":
            await self._sleep(("kv_cache",))

    async def resume_kv_cache(self) -> None:
        """Reallocate the KV cache."""
        if self.mode != "colocated":
            await self._wake(("kv_cache",))

    async def clear_kv_cache(self) -> None:
        """Delete all cached prefixes."""
        await asyncio.to_thread(self._engine.flush_cache)

    # -- weights -----------------------------------------------------------------------------------

    async def begin_update(self, global_steps: int | None) -> int:
        """Open an update and return its number. An update that is still open is cancelled, since
        its trainer is gone.

        Raises `InvalidRequest` while the weights are released.
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
        """Check and stage a bucket (`buckets.Parcel`). If it is invalid, cancel the update and
        raise `WeightUpdateError`.
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
        """Apply the update between two steps and return its version. Requests continue with their
        KV cache.

        Raises `WeightUpdateError` and keeps the old version.
        """
        async with self._receiving:
            update = self._open(number)
            self._update = None
            self._engine.weight_sync.end(of=update)
            # before a sample with a token of this version can be returned
            self._steps.name(update.version, self._step)
            deadline = Deadline(self.timeout)
            while not await asyncio.to_thread(update.wait, 1.0):
                deadline.check(f"weight version {update.version} was not applied")
                self._engine.shared.require_alive()
            if update.error is not None:
                self._steps.name(update.version, None)
            return update.result(0)

    async def cancel_update(self, number: int) -> None:
        """Cancel an update that is still being received."""
        async with self._receiving:
            if number == self._number:
                self._cancel("its trainer cancelled it.")

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the trainer's step of the live weights."""
        self._steps.name(self._engine.get_weight_version(), global_steps)

    # -- the rest ----------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """Call a read-only engine method (`TELLING`). Raises `InvalidRequest` for any other."""
        if method not in TELLING:
            raise InvalidRequest(
                f"collective_rpc method must be one of {', '.join(TELLING)}; got {method!r}."
            )
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
