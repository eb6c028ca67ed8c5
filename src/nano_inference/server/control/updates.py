"""`Groups` and `Updates`: process groups with a trainer, and weight updates, one at a time."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from nano_inference.parallel.shared_tensors import Offer
from nano_inference.remote.operations import Checks, Received
from nano_inference.remote.tasks import start_task
from nano_inference.remote.time_limits import SOON
from nano_inference.server.control.engine import SILENT, Engine, OpenUpdate, checked_name
from nano_inference.server.control.requests.field_types import TensorSpec
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.types import KvPolicy

log = logging.getLogger("nano_inference.server")

SEND = "send the bytes of a safetensors file, as safetensors.torch.save(state_dict) returns them."
PART = 2**24  # bytes of a file in one message: larger ones would block the event loop


def require_safetensors(content: bytes | bytearray) -> None:
    """Raise `ApiError` unless the content looks like a safetensors file. Pickles, which can run
    code, are always rejected.
    """
    if content[:2] == b"PK":
        raise bad_request(f"the file is a zip archive, as torch.save makes it; {SEND}")
    if content[:1] == b"\x80":
        raise bad_request(f"the file is a pickle, which is not supported; {SEND}")
    if len(content) < 10 or content[8:9] != b"{":
        raise bad_request(f"the file is not a safetensors file; {SEND}")


class Groups:
    """`torch.distributed` groups with a trainer as rank 0: gloo on CPUs, NCCL on CUDA."""

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
        pynccl: bool = False,
        unique_id: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        """Join a trainer's `torch.distributed` group at its TCP store, or its group of PyNccl.

        Raises a 409 if a live trainer has a group of this name, or has any group while an update is
        open. A dead trainer's update is canceled.

        Args:
            name: Name for `Updates.receive_broadcast` and `leave`.
            host: Host of the trainer's store.
            port: Port of the trainer's store.
            rank: Rank of this engine.
            world_size: Number of ranks: the trainer and all engines.
            backend: "gloo" or "nccl". None: chosen by the engine's device.
            named: True if the trainer made the group with `group_name=name` in addition to a
                default group (slime, SGLang). False: an ordinary `init_process_group`.
            pynccl: True if trainers of this dialect make groups of vLLM's PyNccl on cards. On CPUs
                they make ordinary ones.
            unique_id: Id of NCCL, 128 bytes, instead of a store.
            timeout: Seconds. None: the server's deadline.
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
            pynccl=pynccl,
            unique_id=unique_id,
        )

    async def has(self, name: str) -> bool:
        """Return True if the group is joined. A failed update, or the end of the trainer or the
        engine, closes it.
        """
        return bool(await self._engine.call("has_group", group=name))

    async def leave(self, name: str) -> None:
        """Leave a group. Raises a 404 if it does not exist."""
        if not await self._engine.call("leave_group", group=name):
            raise ApiError(404, f"group {name!r} does not exist.")


class Updates:
    """Weight updates. Each is collected in a session, checked, and applied as a whole between two
    steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)  # session numbers
        self._turn = asyncio.Lock()  # held while an operation receives or finishes
        self._is_opening = False
        self._cancelling: set[asyncio.Task[bool]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def open(self) -> OpenUpdate | None:
        """Open weight update, between `begin` and `finish`."""
        return self._engine.known.update

    @property
    def is_open(self) -> bool:
        """True if a weight update is open."""
        return self.open is not None

    async def name_version(self, name: str) -> None:
        """Name the served version, or, if an update is open, its future version."""
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
        """Open an update, after a canceled one has ended. The update expires if its next call does
        not arrive within the server's deadline. Raises a 409 if an update is open, or if the
        weights are asleep.

        Args:
            version: Trainer's name of the new version. None: its number, unless named later.
            dialect: Dialect of the request, as in `OpenUpdate`.
            is_explicit: True if requests mark the beginning and the end, as in `OpenUpdate`.
            checks: `complete`: reject an update that lacks a tensor. `check_finite`: reject NaN and
                infinite values after conversion to the model's dtype; True by default.
        """
        chosen_checks: Checks = {"complete": False, "check_finite": True, **checks}
        update = OpenUpdate(next(self._numbers), chosen_checks, dialect, is_explicit, version)
        if self._is_opening:
            raise ApiError(409, "another weight update is being opened; retry later.")
        self._is_opening = True
        try:
            async with self._or_forget(update):
                if self._cancelling:
                    await asyncio.wait(self._cancelling, timeout=SOON)
                # If an earlier cancel call was lost, the engine still has that update open. It
                # closes any open session except `known`.
                known = None if self.open is None else self.open.number
                newest = await self._engine.call(
                    "begin_update", session=update.number, known=known, **chosen_checks
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
        """Open an update for the block. An error, or a caller that leaves, cancels it."""
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
        """Receive the trainer's broadcasts of these tensors, one each, in order. An error cancels
        the update.

        With `packed_bytes` they arrive as flat uint8 runs instead, one broadcast per run. A run
        takes tensors until it is longer than that (vLLM's packed format).
        """
        specs = [
            (tensor.name, tensor.dtype.removeprefix("torch."), tensor.shape) for tensor in tensors
        ]
        arguments = {"group": group, "tensors": specs, "packed_bytes": packed_bytes}
        return await self._receive("receive_broadcast", timeout, [arguments])

    async def receive_stream(self, group: str, *, timeout: float | None = None) -> Received:
        """Receive weights with their description: from `nano_inference`'s `WeightSender`, which may
        name their version, or from prime-rl's trainer over PyNccl.
        """
        return await self._receive("receive_stream", timeout, [{"group": group}])

    async def receive_file(self, content: bytes | bytearray) -> Received:
        """Receive the tensors of a whole safetensors file. Pickles are rejected."""
        whole = memoryview(content)
        parts = (
            {"size": len(whole), "content": whole[start : start + PART]}
            for start in range(0, len(whole) or 1, PART)
        )
        return await self._receive("receive_file", None, parts, content)

    async def receive_lent(self, offers: Sequence[Offer]) -> Received:
        """Copy tensors from memory that a trainer on the engine's card lends. The handles are
        closed before this returns, also after an error.
        """
        return await self._receive("receive_lent", None, [{"offers": offers}])

    async def receive_folder(self, path: str, *, timeout: float | None = None) -> Received:
        """Read the safetensors of a folder or a file on this machine."""
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
        """Close the update and wait until its weights serve, even during a pause. Return the
        version's name.

        Args:
            version: Name of the version, if it was not set at the beginning.
            kv_policy: Treatment of running requests. None: the policy of the pause, otherwise
                `"keep"`. Raises a 409 if it would wait for paused requests.
            timeout: Seconds. None: the server's deadline.
        """
        policy: KvPolicy = kv_policy or self._engine.known.pause_policy or "keep"
        async with self._next(timeout) as (update, seconds):
            known, names = self._engine.known, self._engine.names
            before = names.newest
            # set the name first: tokens with the new version may arrive before the reply
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
                if problem.code != SILENT:  # without an answer, the version may be serving
                    names.give_back(number, before)
                raise
            known.update = None
            if update is not None and update.folder is not None:
                known.folder = update.folder
        log.info(
            "weight version %s is serving (kv_policy of running requests: %s).",
            names.name(number),
            policy,
        )
        return names.name(number)

    async def cancel(self, reason: str) -> bool:
        """Cancel the open update, even during one of its calls. Return False if there is none."""
        return self.open is not None and await self._forget(self.open, reason)

    async def fail(self, problem: BaseException) -> None:
        """Cancel the open update because one of its requests was rejected or failed."""
        if self.open is not None:
            await self._failed(self.open, problem)

    async def _receive(
        self,
        name: str,
        timeout: float | None,
        calls: Iterable[dict[str, Any]],
        content: bytes | bytearray | None = None,
    ) -> Received:
        """Run the receiving calls of one request in sequence."""
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
        """Run the update's next call exclusively. Yields the update and the remaining seconds.

        The engine itself rejects calls outside of an update, because a broadcast must then also
        close its group.
        """
        seconds = self._engine.seconds(timeout)
        until = time.monotonic() + seconds
        try:
            # wait_for could lose a cancellation that arrives with the lock
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            text = f"another call of this weight update did not finish within {seconds:g} s."
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
        """Cancel the update unless its next call arrives within the server's deadline. None: stop
        the timer.
        """
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if update is not None:
            seconds = self._engine.config.rl_timeout
            why = f"its next call did not arrive within {seconds:g} s."
            self._expiry = asyncio.get_running_loop().call_later(
                seconds, lambda: self.open is update and self._forget(update, why)
            )

    @asynccontextmanager
    async def _or_forget(self, update: OpenUpdate | None) -> AsyncIterator[None]:
        """Cancel the update if the block fails, even if the engine's progress is unknown."""
        try:
            yield
        except BaseException as problem:
            if update is not None:
                await self._failed(update, problem)
            raise

    async def _failed(self, update: OpenUpdate, problem: BaseException) -> None:
        reason = problem.message if isinstance(problem, ApiError) else "its caller left."
        task = self._forget(update, reason)
        if isinstance(problem, Exception):  # do not delay a canceled caller
            await asyncio.wait([task])

    def _forget(self, update: OpenUpdate, why: str) -> "asyncio.Task[bool]":
        """Start to cancel an update in the engine. The next update waits for that."""
        if self._engine.known.update is update:
            self._engine.known.update = None
        return start_task(self._cancel(update.number, why), self._cancelling)

    async def _cancel(self, session: int, reason: str) -> bool:
        text = f"the weight update was cancelled: {reason}"
        try:
            return await self._engine.client.call(
                "cancel_update", timeout=SOON, session=session, reason=text
            )
        except Exception:  # the engine and its update are gone
            return False
