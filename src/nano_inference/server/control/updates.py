"""`Groups` and `Updates`: process groups with a trainer, and weight updates, one at a time."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from nano_inference.remote.operations import Checks, Received
from nano_inference.remote.tasks import start_task
from nano_inference.remote.time_limits import SOON
from nano_inference.server.control.engine import SILENT, Engine, OpenUpdate, checked_name
from nano_inference.server.control.requests.field_types import TensorSpec
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.types import KvPolicy

log = logging.getLogger("nano_inference.server")

SEND = "send the bytes of a safetensors file, those of safetensors.torch.save(state_dict)."
PART = 2**24  # bytes of a file in one message: a larger one would hold up the event loop


def require_safetensors(content: bytes | bytearray) -> None:
    """Raise `ApiError` for what is no safetensors file, and certainly for what would run code when
    it is read.
    """
    if content[:2] == b"PK":
        raise bad_request(f"this is a zip archive, as torch.save makes it; {SEND}")
    if content[:1] == b"\x80":
        raise bad_request(f"this is a pickle, which is never read here; {SEND}")
    if len(content) < 10 or content[8:9] != b"{":
        raise bad_request(f"this is not a safetensors file; {SEND}")


class Groups:
    """`torch.distributed` groups with a trainer, who is rank 0: gloo on a CPU, NCCL on CUDA."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def join(
        self,
        name: str,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str | None = None,
        named: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Meet the trainer in a `torch.distributed` group at its TCP store.

        409 while a living trainer has a group of this name, or any group and an update that is
        open. Updates of a dead one are forgotten.

        Args:
            name: by which `Updates.receive_broadcast` and `leave` know it.
            host: of the trainer's store.
            port: of the trainer's store.
            rank: of this engine.
            world_size: the trainer and all engines.
            backend: "gloo" or "nccl"; None: by the engine's device.
            named: the trainer made it with `group_name=name`, beside a default group (slime,
                SGLang's way); False: by an ordinary `init_process_group`.
            timeout: seconds; None: the server's.
        """
        await self._engine.call(
            "join_group",
            self._engine.seconds(timeout),
            group=name,
            named=named,
            host=host,
            port=port,
            rank=rank,
            world_size=world_size,
            backend=backend,
        )

    async def has(self, name: str) -> bool:
        """Whether a group of this name was joined, and not lost by an update that failed, with its
        trainer, or with the engine.
        """
        return bool(await self._engine.call("has_group", group=name))

    async def leave(self, name: str) -> None:
        """Leave it. 404 where there is none of this name."""
        if not await self._engine.call("leave_group", group=name):
            raise ApiError(404, f"group {name!r} does not exist.")


class Updates:
    """Weight updates: each is gathered in a session, checked, and written in one piece between two
    steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)  # of sessions
        self._turn = asyncio.Lock()  # held by the operation that receives or finishes
        self._is_opening = False
        self._cancelling: set[asyncio.Task[bool]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def open(self) -> OpenUpdate | None:
        """The weight update that is open, between `begin` and `finish`."""
        return self._engine.known.update

    @property
    def is_open(self) -> bool:
        """Whether a weight update is open."""
        return self.open is not None

    async def name_version(self, name: str) -> None:
        """Give the version that serves a name, or, while an update is open, the one that it will
        become.
        """
        if self.open is not None:
            self.open.version = checked_name(name)
        else:
            self._engine.names.rename(await self._engine.call("get_weight_version"), name)

    async def begin(
        self,
        *,
        version: str | None = None,
        dialect: str = "",
        is_explicit: bool = True,
        **checks: Unpack[Checks],
    ) -> OpenUpdate:
        """Open an update, when what is left of an earlier one is gone. It ends when no call of it
        comes for as long as the server's deadline. 409 if one is open, or if the weights are
        asleep.

        Args:
            version: what the trainer calls the new version; None: by its number, unless it says so
                later.
            dialect: see `OpenUpdate`.
            is_explicit: see `OpenUpdate`.
            checks: `complete`: refuse an update that lacks a tensor. `check_finite`: refuse NaN and
                infinite values, as they are in the model's dtype; True by default.
        """
        own: Checks = {"complete": False, "check_finite": True, **checks}
        update = OpenUpdate(next(self._numbers), own, dialect, is_explicit, version)
        if self._is_opening:
            raise ApiError(409, "another weight update is about to begin.")
        self._is_opening = True
        try:
            async with self._or_forget(update):
                if self._cancelling:
                    await asyncio.wait(self._cancelling, timeout=SOON)
                # The engine may still have another update open, if a cancelling call was lost:
                # it closes every session but `known`.
                known = None if self.open is None else self.open.number
                newest = await self._engine.call(
                    "begin_update", session=update.number, known=known, **own
                )
                self._engine.names.see(newest)
                self._engine.known.update = update
        finally:
            self._is_opening = False
        self._expire_later(update)
        return update

    @asynccontextmanager
    async def updating(
        self, *, version: str | None = None, **checks: Unpack[Checks]
    ) -> AsyncIterator[None]:
        """An update that is finished within: a failure, or a caller that leaves, ends it."""
        update = await self.begin(version=version, is_explicit=False, **checks)
        try:
            yield
        except BaseException as problem:
            if self.open is update:
                await self._failed(update, problem)
            raise

    async def receive_broadcast(
        self,
        group: str,
        tensors: Sequence[TensorSpec],
        *,
        packed_bytes: int | None = None,
        timeout: float | None = None,
    ) -> Received:
        """Take part in the trainer's broadcasts of these tensors, one each, in order. What fails
        cancels the update.

        With `packed_bytes` they come as flat uint8 runs instead: tensors are put together until a
        run is longer than that (vLLM's packed format), one broadcast a run.
        """
        told = [
            (tensor.name, tensor.dtype.removeprefix("torch."), tensor.shape) for tensor in tensors
        ]
        arguments = {"group": group, "tensors": told, "packed_bytes": packed_bytes}
        return await self._receive("receive_broadcast", timeout, [arguments])

    async def receive_stream(self, group: str) -> Received:
        """Take what a `nano_inference` `WeightSender` sends, which describes itself and may name
        its version.
        """
        return await self._receive("receive_stream", None, [{"group": group}])

    async def receive_file(self, content: bytes | bytearray) -> Received:
        """Take the tensors of a safetensors file, given whole. A pickle is refused by its first
        bytes, and named.
        """
        whole = memoryview(content)
        parts = (
            {"size": len(whole), "content": whole[start : start + PART]}
            for start in range(0, len(whole) or 1, PART)
        )
        return await self._receive("receive_file", None, parts, content)

    async def receive_folder(self, path: str, *, timeout: float | None = None) -> Received:
        """Take the safetensors of a folder (or a file) on this machine."""
        received = await self._receive("receive_folder", timeout, [{"path": path}])
        if self.open is not None:
            self.open.folder = path
        return received

    async def finish(
        self,
        *,
        version: str | None = None,
        kv_policy: KvPolicy | None = None,
        timeout: float | None = None,
    ) -> str:
        """Close the update and wait until its weights serve, paused or not; returns the version's
        name.

        Args:
            version: its name, if it was not known when the update began.
            kv_policy: what becomes of running requests; None: what the pause asked for, `"keep"`
                without one. 409 if it would wait for requests that are paused.
            timeout: seconds; None: the server's.
        """
        policy: KvPolicy = kv_policy or self._engine.known.pause_policy or "keep"
        async with self._next(timeout) as (update, seconds):
            known, names = self._engine.known, self._engine.names
            before = names.newest
            # named first: tokens of it may come before the answer
            if version is None and update is not None:
                version = update.version
            number = names.choose(version)
            try:
                await self._engine.call(
                    "finish_update",
                    seconds,
                    session=0 if update is None else update.number,
                    version=number,
                    kv_policy=policy,
                )
            except ApiError as problem:
                if problem.code != SILENT:  # else it may serve
                    names.give_back(number, before)
                raise
            known.update = None
            if update is not None and update.folder is not None:
                known.folder = update.folder
        log.info("weight version %s serves; requests that ran: %s.", names.name(number), policy)
        return names.name(number)

    async def cancel(self, reason: str) -> bool:
        """Forget the open update, also while a call of it is under way; whether there was one."""
        return self.open is not None and await self._forget(self.open, reason)

    async def fail(self, problem: BaseException) -> None:
        """A request that belongs to the update was refused, or failed: forget the update, if one is
        open.
        """
        if self.open is not None:
            await self._failed(self.open, problem)

    async def _receive(
        self,
        name: str,
        timeout: float | None,
        calls: Iterable[dict[str, Any]],
        content: bytes | bytearray | None = None,
    ) -> Received:
        """Receiving calls of one request, one after the other."""
        async with self._next(timeout) as (update, seconds):
            if content is not None:
                require_safetensors(content)
            received, session = Received(), 0 if update is None else update.number
            for arguments in calls:
                received: Received = await self._engine.call(
                    name, seconds, session=session, **arguments
                )
            if update is not None and update.version is None and received.version is not None:
                update.version = str(received.version)
            return received

    @asynccontextmanager
    async def _next(self, timeout: float | None) -> AsyncIterator[tuple[OpenUpdate | None, float]]:
        """The next call of the update, alone in it: the update and the seconds that are left.

        The engine itself refuses what comes outside of an update: it also ends the group of such a
        broadcast.
        """
        seconds = self._engine.seconds(timeout)
        until = time.monotonic() + seconds
        try:
            # wait_for would forget a cancellation that comes with the turn
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            text = f"another call of the weight update did not end within {seconds:g} s."
            raise ApiError(504, text) from None
        try:
            left = max(round(until - time.monotonic(), 2), 0.01)
            update = self.open
            self._expire_later(None)
            async with self._or_forget(update):
                yield update, left
            self._expire_later(self.open)
        finally:
            self._turn.release()

    def _expire_later(self, update: OpenUpdate | None) -> None:
        """Forget the update unless a call of it comes within the server's deadline; None:
        never.
        """
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if update is not None:
            seconds = self._engine.config.rl_timeout
            why = f"nothing was heard of it for {seconds:g} s."
            self._expiry = asyncio.get_running_loop().call_later(
                seconds, lambda: self.open is update and self._forget(update, why)
            )

    @asynccontextmanager
    async def _or_forget(self, update: OpenUpdate | None) -> AsyncIterator[None]:
        """A failure inside ends the update, also where it is unknown how far the engine has
        come.
        """
        try:
            yield
        except BaseException as problem:
            if update is not None:
                await self._failed(update, problem)
            raise

    async def _failed(self, update: OpenUpdate, problem: BaseException) -> None:
        told = problem.message if isinstance(problem, ApiError) else "its caller left."
        task = self._forget(update, told)
        if isinstance(problem, Exception):  # else the caller is about to leave
            await asyncio.wait([task])

    def _forget(self, update: OpenUpdate, why: str) -> "asyncio.Task[bool]":
        """Let the engine cancel it, and the next update wait for that."""
        if self._engine.known.update is update:
            self._engine.known.update = None
        return start_task(self._cancel(update.number, why), self._cancelling)

    async def _cancel(self, session: int, reason: str) -> bool:
        text = f"the weight update was cancelled: {reason}"
        try:
            return await self._engine.client.call(
                "cancel_update", timeout=SOON, session=session, reason=text
            )
        except Exception:  # the engine is gone, and the update with it
            return False
