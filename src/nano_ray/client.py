"""`RayClient`: one engine in an actor, on a node that Ray chooses."""
# pyright: reportMissingImports=false

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from nano_inference.config import EngineConfig
from nano_inference.errors import EngineDead, NanoInferenceError
from nano_inference.remote import STOPPING, FromEngine, Ready, RemoteClient, Stop, start_task
from nano_ray.actor import GROUPS, EngineActor
from nano_ray.cluster import Placement, RankNeeds, num_ranks, rank_config
from nano_ray.kept import Bucket, KeptUpdate

log = logging.getLogger("nano_ray")

# seconds without a reply after which an actor counts as lost; it replies every second
SILENT = 20.0
STOP_PATIENCE = 5.0  # seconds that an engine has to stop before it is killed
BUCKET_SECONDS = 600.0  # timeout to copy a bucket to its node and check it


class RayClient(RemoteClient):
    """Client of one engine, for one event loop. The client holds a placement group and an actor
    until `close`.

    Any failure between client and actor ends the engine, and a new engine needs a new client. Lost
    messages are never resent, because an actor that Ray restarted could receive messages meant for
    its predecessor.

    Args:
        config: Configuration of the engine.
        needs: Resources of each rank.
        max_backlog: Maximum tokens per sample that a stream buffers for a slow reader.
        name: Name of the replica, for errors.
        patience: Seconds until the replica must be placed, and then again until it is ready.
        welcome: Function that sends the current weights. Called after the engine is built and
            before it is announced.
    """

    def __init__(
        self,
        config: EngineConfig,
        needs: RankNeeds,
        max_backlog: int,
        *,
        name: str,
        patience: float = 300.0,
        welcome: "Callable[[RayClient], Awaitable[None]] | None" = None,
    ) -> None:
        super().__init__(max_backlog)
        self.name = name
        self.node = ""  # Ray's id of the actor's node
        self._config = rank_config(config, needs)
        self._needs = needs
        self._patience = patience
        self._welcome = welcome
        self._version = 0  # newest version from `take_updates`
        self._placement: Placement | None = None
        self._actor: Any = None
        self._told: Any = None  # the actor's methods, each in its group
        self._tells: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # -- the beginning and the end -----------------------------------------------------------------

    async def start(self) -> None:
        """Place and start the actor, and wait until its engine is ready. Raises the error if it
        cannot be built.
        """
        self._started = asyncio.get_running_loop().create_future()
        try:
            self._placement = await asyncio.to_thread(
                Placement, self._needs, num_ranks(self._config)
            )
            await asyncio.to_thread(self._placement.wait, self._patience)
            kind = ray.remote(concurrency_groups=GROUPS)(EngineActor)  # pyright: ignore
            level = logging.getLogger("nano_inference").getEffectiveLevel()
            self._actor = kind.options(**self._placement.options(0)).remote(
                msgspec.msgpack.encode(self._config), level
            )
            self._told = self._actor.told.options(concurrency_group="told")
            self._tells = self._actor.tells.options(concurrency_group="tells")
            self._begin_task(self._listen())
            async with asyncio.timeout(self._patience):
                await self._started
        except BaseException as problem:
            await self.close()
            if isinstance(problem, TimeoutError):
                raise EngineDead(
                    f"{self.name} was not ready within {self._patience:g} s."
                ) from problem
            raise

    async def close(self) -> None:
        """Stop the engine, or kill it after a timeout, and release its resources."""
        lives = self._info is not None and self._dead is None
        self._closing = True
        self._die(STOPPING, STOPPING)
        self._settle(EngineDead(STOPPING))
        current = asyncio.current_task()
        for task in self._tasks - {current}:
            task.cancel()
        actor, self._actor = self._actor, None
        placement, self._placement = self._placement, None
        if not ray.is_initialized():
            return
        if actor is not None:
            if lives:
                with suppress(RayError, TimeoutError):
                    await asyncio.wait_for(
                        self._told.remote(msgspec.msgpack.encode(Stop())), STOP_PATIENCE
                    )
                    await asyncio.wait_for(
                        actor.wait_for_end.remote(STOP_PATIENCE), STOP_PATIENCE + 1
                    )
            await asyncio.to_thread(ray.kill, actor)
        if placement is not None:
            await asyncio.to_thread(placement.remove)

    def kill(self) -> None:
        """Kill the actor without waiting."""
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)
        self._die("it was killed.", "its process has ended")

    # -- weights -----------------------------------------------------------------------------------

    async def call(self, name: str, *, timeout: float = 60.0, **arguments: Any) -> Any:
        """Call a method of the engine, like `EngineClient.call`. The bytes of `receive_bucket`
        come from Ray's object store.
        """
        if name != "receive_bucket":
            return await super().call(name, timeout=timeout, **arguments)
        self._require_alive()
        bucket: Bucket = arguments["bucket"]
        return await self._weights(
            "take_bucket", timeout, arguments["session"], bucket.description, bucket.content
        )

    async def take_updates(self, updates: Sequence[KeptUpdate]) -> None:
        """Send complete updates to the engine, one after another. Raises `WeightUpdateError` or
        `EngineDead`.
        """
        for update in updates:
            descriptions = [bucket.description for bucket in update.buckets]
            contents = [bucket.content for bucket in update.buckets]
            seconds = BUCKET_SECONDS * len(contents)
            await self._weights(
                "take_update", seconds, update.version, seconds, descriptions, *contents
            )
            self._version = update.version

    async def give_update(self, version: int) -> KeptUpdate:
        """Return all live weights, put into the object store. Raises like `take_updates`."""
        pairs: list[tuple[bytes, Any]] = await self._weights(
            "give_buckets", BUCKET_SECONDS, version
        )
        return KeptUpdate(version, tuple(Bucket(*each) for each in pairs))

    async def _weights(self, method: str, seconds: float, *arguments: Any) -> Any:
        if self._actor is None:
            raise EngineDead(f"{self.name} has ended.")
        remote = getattr(self._actor, method).options(concurrency_group="weights").remote
        try:
            return await asyncio.wait_for(remote(*arguments), seconds)
        except RayTaskError as problem:
            if isinstance(problem.cause, NanoInferenceError):
                raise problem.cause from None
            raise
        except (RayError, TimeoutError) as problem:
            self.lose(f"it did not receive the weights: {_reason(problem)}")
            raise EngineDead(self._dead or "") from problem

    # -- messages ----------------------------------------------------------------------------------

    def _send_bytes(self, data: bytes) -> None:
        if self._actor is not None:
            self._begin_task(self._watch(self._told.remote(data)))

    async def _watch(self, sent: Any) -> None:
        try:
            await sent
        except RayError as problem:
            self.lose(_reason(problem))

    async def _listen(self) -> None:
        try:
            patience = self._patience  # the actor's process is starting
            while self._dead is None:
                self.node, batch = await asyncio.wait_for(self._tells.remote(), patience)
                patience = SILENT
                for data in batch:
                    self._hear_bytes(data)
        except (RayError, TimeoutError) as problem:
            self.lose(_reason(problem))

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._begin_task(self._greet(message))
        else:
            super()._hear(message)

    async def _greet(self, ready: Ready) -> None:
        """Send the current weights to a new engine, then announce it."""
        try:
            if self._welcome is not None:
                await self._welcome(self)
        except Exception as problem:
            self._settle(problem)
            return
        version = max(self._version, ready.info.weight_version)
        super()._hear(Ready(msgspec.structs.replace(ready.info, weight_version=version)))

    # -- inside ------------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """Mark the engine as dead and fail its requests."""
        if self._dead is None and not self._closing:
            self._die(
                f"{self.name} on node {self.node[:8] or '?'} is lost: {reason}",
                "its process has ended",
            )
            log.error("%s", self._dead)
        self._settle(EngineDead(reason))

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        start_task(work, self._tasks)


def _reason(problem: BaseException) -> str:
    """Return one line that describes an error of Ray."""
    if isinstance(problem, TimeoutError):
        return "it does not reply."
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0] if text else ''}"
