"""`Control`: what a trainer may do to the engine, whatever its dialect. It lives in the API process
and keeps order.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Unpack, get_args

import msgspec

from nano_inference.errors import NanoInferenceError
from nano_inference.remote.client import EngineClient
from nano_inference.remote.operations import Checks, Received
from nano_inference.remote.tasks import start_task
from nano_inference.remote.temporary import temporary_folder
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError, api_error_of, bad_request, shown
from nano_inference.types import AdapterInfo, EngineStats, KvPolicy, Memory, PauseMode

MAX_NAME = 256  # characters
MAX_DIGITS = 15


# -- names of versions: a rising integer in the engine, any string on the wire --------------------


class VersionNames:
    """Names of versions, chosen before an update begins, so that the first token of it already has
    one.

    Args:
        newest: the engine's version that serves, or the newest that it was told of.
    """

    def __init__(self, newest: int = 0) -> None:
        self._newest = newest
        self._names: dict[int, str] = {}  # of those that are not called by their number

    def name(self, version: int) -> str:
        """What the trainer calls a version."""
        return self._names.get(version, str(version))

    def number(self, name: str) -> int | None:
        """The newest version of this name; None: there was none yet, and it is not a number
        that stands for itself.
        """
        for version, each in reversed(self._names.items()):
            if each == name:
                return version
        number = _own_number(name)
        return number if number is not None and number not in self._names else None

    def choose(self, name: str | None) -> int:
        """The integer of the next version: the name's own if it is larger than all before. Raises
        `ApiError`.
        """
        own = None if name is None else _own_number(checked_name(name))
        self._newest = own if own is not None and own > self._newest else self._newest + 1
        if name is not None:
            self.rename(self._newest, name)
        return self._newest

    def give_back(self, version: int, before: int) -> None:
        """The version that was chosen was never made; `before` is the newest one without it."""
        self._names.pop(version, None)
        if self._newest == version:
            self._newest = before

    def see(self, version: int) -> None:
        """There is this version, by whatever update."""
        self._newest = max(self._newest, version)

    @property
    def newest(self) -> int:
        """The last one that was chosen."""
        return self._newest

    def rename(self, version: int, name: str) -> None:
        """Call a version something else from now on. Raises `ApiError`."""
        if checked_name(name) == str(version):
            self._names.pop(version, None)
        else:
            self._names[version] = name


def checked_name(name: str, field: str = "weight_version") -> str:
    """A name that a version may have, as a field of a request says it. Raises `ApiError`."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise bad_request(
            f"{field} must be a printable string of 1 to {MAX_NAME} characters, not {shown(name)}.",
            field,
        )
    return name


def _own_number(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS else None


log = logging.getLogger("nano_inference.server")

SOON = 60.0  # seconds of operations that wait for a step at most
SILENT = "engine_silent"
SEND = "send the bytes of a safetensors file, those of safetensors.torch.save(state_dict)."
PART = 2**24  # bytes of a file in one message: a larger one would hold up the event loop


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that a trainer is about to broadcast: name as in the checkpoint, `"bfloat16"`,
    shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Loads(msgspec.Struct, frozen=True):
    """Requests in the engine, as samples."""

    running: int
    waiting: int


@dataclass
class OpenUpdate:
    """A weight update that is open, as far as requests have told of it. Its tensors are with the
    engine, which knows it by its number.

    Attributes:
        number: of the session.
        checks: that it began with.
        dialect: whose routes opened it; empty: any.
        is_explicit: a request said where it begins, and one will say where it ends.
        version: what the new version will be called; None: by its number.
        folder: from which it has taken weights.
    """

    number: int
    checks: Checks
    dialect: str = ""
    is_explicit: bool = True
    version: str | None = None
    folder: str | None = None


@dataclass
class _EngineState:
    """What is known of one engine; the next one in its place has none of it."""

    num_restarts: int
    names: VersionNames | None = None  # None: no question was asked yet
    update: OpenUpdate | None = None
    folder: str | None = None  # from which the weights that serve came
    checksums: dict[str, str] | None = None  # that a request asked to remember
    pause_policy: KvPolicy | None = None
    adapters: Mapping[str, AdapterInfo] | None = None  # None: those that it started with


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


class Control:
    """One update at a time; what comes in a wrong order is refused, with the old version serving.

    Every method raises `ApiError` (409 for a wrong order, a second trainer, weights that are
    asleep; 400 for names, shapes and types that do not match; 504 for a deadline) and what
    `EngineClient.call` raises.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client, self._config = client, config
        self._state = _EngineState(client.num_restarts)
        self._numbers = itertools.count(1)  # of sessions
        self._turn = asyncio.Lock()  # held by the operation that receives or finishes
        self._adapter_turn = asyncio.Lock()  # held while an adapter is loaded or unloaded
        self._is_opening = False
        self._cancelling: set[asyncio.Task[bool]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def _engine(self) -> _EngineState:
        if self._state.num_restarts != self._client.num_restarts:
            self._state = _EngineState(self._client.num_restarts)
        return self._state

    @property
    def _names(self) -> VersionNames:
        engine = self._engine
        if engine.names is None:
            engine.names = VersionNames(self._client.info.weight_version)
        return engine.names

    @property
    def pause_policy(self) -> KvPolicy | None:
        """What the pause asked for, for updates that say nothing; None: there is none, or it did
        not say.
        """
        return self._engine.pause_policy

    @property
    def update(self) -> OpenUpdate | None:
        """The weight update that is open, between `begin_update` and `finish_update`."""
        return self._engine.update

    @property
    def session_open(self) -> bool:
        """Whether a weight update is open."""
        return self.update is not None

    @property
    def model_path(self) -> str:
        """Where the weights that serve were read: SGLang tells the folder of an update."""
        return self._engine.folder or self._client.info.model_path

    async def call(self, name: str, seconds: float = SOON, /, **arguments: Any) -> Any:
        """As `EngineClient.call`. Raises `ApiError`."""
        try:
            return await self._client.call(name, timeout=seconds, **arguments)
        except TimeoutError:
            text = f"the engine did not answer within {seconds:g} s."
            raise ApiError(504, text, code=SILENT) from None
        except NanoInferenceError as problem:
            raise api_error_of(problem) from problem

    def _seconds(self, timeout: float | None) -> float:
        """A deadline as it was asked for, or the server's."""
        seconds = self._config.rl_timeout if timeout is None else timeout
        if not 0 < seconds < float("inf"):
            raise bad_request(
                f"timeout={seconds!r} must be a positive number of seconds.", "timeout"
            )
        return seconds

    # -- versions: opaque strings on the wire, integers in the engine ------------------------------

    def version_name(self, version: int) -> str:
        """A version of the engine's as the trainer calls it. No waiting: replies are made with
        it.
        """
        return self._names.name(version)

    def version_number(self, name: str) -> int | None:
        """The engine's version of this name, which may be one that is still to come; None: there
        can be none.
        """
        return self._names.number(name)

    @property
    def newest_version(self) -> int:
        """The newest version that there is, or that an update is about to make."""
        return self._names.newest

    async def serving_version(self) -> str:
        """The name of the version that serves."""
        return self.version_name(await self.call("get_weight_version"))

    async def name_version(self, name: str) -> None:
        """Give the version that serves a name, or, while an update is open, the one that it will
        become.
        """
        if self.update is not None:
            self.update.version = checked_name(name)
        else:
            self._names.rename(await self.call("get_weight_version"), name)

    # -- process groups: gloo on a CPU, NCCL on CUDA; the trainer is rank 0 ------------------------

    async def join_group(
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
            name: by which `receive_broadcast` and `leave_group` know it.
            host: of the trainer's store.
            port: of the trainer's store.
            rank: of this engine.
            world_size: the trainer and all engines.
            backend: "gloo" or "nccl"; None: by the engine's device.
            named: the trainer made it with `group_name=name`, beside a default group (slime,
                SGLang's way); False: by an ordinary `init_process_group`.
            timeout: seconds; None: the server's.
        """
        await self.call(
            "join_group",
            self._seconds(timeout),
            group=name,
            named=named,
            host=host,
            port=port,
            rank=rank,
            world_size=world_size,
            backend=backend,
        )

    async def has_group(self, name: str) -> bool:
        """Whether a group of this name was joined, and not lost by an update that failed, with its
        trainer, or with the engine.
        """
        return bool(await self.call("has_group", group=name))

    async def leave_group(self, name: str) -> None:
        """Leave it. 404 where there is none of this name."""
        if not await self.call("leave_group", group=name):
            raise ApiError(404, f"there is no group {name!r}.")

    # -- updates: gathered in a session, checked, and written in one piece between two steps -------

    async def begin_update(
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
                # The engine knows whether that one is still open. Another may be: of a call whose
                # cancelling was lost.
                known = None if self.update is None else self.update.number
                newest = await self.call("begin_update", session=update.number, known=known, **own)
                self._names.see(newest)
                self._engine.update = update
        finally:
            self._is_opening = False
        self._expire_later(update)
        return update

    @asynccontextmanager
    async def updating(
        self, *, version: str | None = None, **checks: Unpack[Checks]
    ) -> AsyncIterator[None]:
        """An update that is finished within: a failure, or a caller that leaves, ends it."""
        update = await self.begin_update(version=version, is_explicit=False, **checks)
        try:
            yield
        except BaseException as problem:
            if self.update is update:
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
        if self.update is not None:
            self.update.folder = path
        return received

    async def finish_update(
        self,
        *,
        version: str | None = None,
        kv_policy: KvPolicy | None = None,
        timeout: float | None = None,
    ) -> str:
        """Close the update and wait until its weights serve, paused or not; returns the version's
        name.

        Args:
            version: its name, for who learns it late.
            kv_policy: what becomes of running requests; None: what the pause asked for, `"keep"`
                without one. 409 if it would wait for requests that are paused.
            timeout: seconds; None: the server's.
        """
        policy: KvPolicy = kv_policy or self.pause_policy or "keep"
        async with self._next(timeout) as (update, seconds):
            engine, names = self._engine, self._names
            before = names.newest
            # named first: tokens of it may come before the answer
            if version is None and update is not None:
                version = update.version
            number = names.choose(version)
            try:
                await self.call(
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
            engine.update = None
            if update is not None and update.folder is not None:
                engine.folder = update.folder
        log.info("weight version %s serves; requests that ran: %s.", names.name(number), policy)
        return names.name(number)

    async def cancel_update(self, reason: str) -> bool:
        """Forget the open update, also while a call of it is under way; whether there was one."""
        return self.update is not None and await self._forget(self.update, reason)

    async def fail_update(self, problem: BaseException) -> None:
        """A request that belongs to the update was refused, or failed: forget the update, if one is
        open.
        """
        if self.update is not None:
            await self._failed(self.update, problem)

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
                received: Received = await self.call(name, seconds, session=session, **arguments)
            if update is not None and update.version is None and received.version is not None:
                update.version = str(received.version)
            return received

    @asynccontextmanager
    async def _next(self, timeout: float | None) -> AsyncIterator[tuple[OpenUpdate | None, float]]:
        """The next call of the update, alone in it: the update and the seconds that are left.

        The engine itself refuses what comes outside of an update: it also ends the group of such a
        broadcast.
        """
        seconds = self._seconds(timeout)
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
            update = self.update
            self._expire_later(None)
            async with self._or_forget(update):
                yield update, left
            self._expire_later(self.update)
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
            seconds = self._config.rl_timeout
            why = f"nothing was heard of it for {seconds:g} s."
            self._expiry = asyncio.get_running_loop().call_later(
                seconds, lambda: self.update is update and self._forget(update, why)
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
        if self._engine.update is update:
            self._engine.update = None
        return start_task(self._cancel(update.number, why), self._cancelling)

    async def _cancel(self, session: int, reason: str) -> bool:
        text = f"the weight update was cancelled: {reason}"
        try:
            return await self._client.call(
                "cancel_update", timeout=SOON, session=session, reason=text
            )
        except Exception:  # the engine is gone, and the update with it
            return False

    # -- requests ----------------------------------------------------------------------------------

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
        seconds = self._config.rl_timeout if timeout is None else timeout
        how = "keep" if mode == "abort" else mode
        if not await self._client.call("pause", mode=how, timeout=seconds):
            raise ApiError(
                504, f"the requests did not end within {seconds:g} seconds; nothing is paused."
            )
        self._engine.pause_policy = kv_policy
        if mode == "abort":
            await self._client.abort(None, timeout=seconds)

    async def resume(self) -> None:
        """End the pause; the engine goes on when nothing is asleep. Without one nothing happens."""
        self._engine.pause_policy = None
        await self._client.call("resume")

    async def is_paused(self, *, timeout: float = 60.0) -> bool:
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
        return await self._client.abort(names, timeout=self._config.rl_timeout)

    async def loads(self) -> Loads:
        """What runs and waits. Paused requests, and such as a sleep took the cache from, do one or
        the other too.
        """
        stats: EngineStats = await self._client.call("stats")
        total = self._client.num_samples
        running = min(stats.num_running, total)
        return Loads(running, total - running)

    # -- memory ------------------------------------------------------------------------------------

    async def flush_cache(self, *, only_idle: bool = False) -> None:
        """Forget cached prefixes. `only_idle`: 409 while requests run or wait (SGLang's way),
        except in a pause after which they compute their context anew: what waits there, newcomers
        too, holds nothing back.
        """
        if only_idle and self._client.num_samples and self.pause_policy != "recompute":
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
        parts = self._parts(memory)
        if "weights" in parts:
            self.require_no_update()
        await self._client.call("sleep", memory=parts, timeout=self._config.rl_timeout)

    def require_no_update(self) -> None:
        """Raise `ApiError`, 409, where an open update keeps the weights from sleeping."""
        if self.session_open:
            raise ApiError(409, "a weight update is open; finish it before the weights sleep.")

    async def wake(self, memory: Iterable[Memory] | None = None) -> None:
        """Take it again, as far as it sleeps; None: all. The engine goes on when all is awake,
        unless it is paused.
        """
        parts = self._parts(get_args(Memory) if memory is None else memory)
        await self._client.call("wake", memory=parts, timeout=self._config.rl_timeout)

    @staticmethod
    def _parts(memory: Iterable[Memory]) -> list[Memory]:
        parts = list(memory)
        if unknown := [each for each in parts if each not in get_args(Memory)]:
            raise ApiError(
                400,
                f"{unknown[0]!r} is not a part of the memory; these are "
                f"{', '.join(get_args(Memory))}.",
            )
        return parts

    # -- adapters ----------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Those that requests may ask for, by name. No waiting, and never changed in place."""
        own = self._engine.adapters
        return {each.name: each for each in self._client.info.adapters} if own is None else own

    async def load_adapter(self, name: str, folder: str, *, again: bool = True) -> AdapterInfo:
        """Serve an adapter, or a new version of it, from a PEFT folder on this machine. Requests
        that run with an older version do what the pause asked for, and finish with it without a
        pause.

        `again`: one of this name may be loaded already; else that is a 400. 400 also for one that
        does not fit the model, 404 where the folder holds none.
        """
        checked_name(name, "lora_name")
        async with self._adapter_turn:
            if not again and name in self.adapters:
                raise bad_request(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    "lora_name",
                )
            return await self._load_adapter("load_adapter", name=name, source=folder)

    async def load_adapter_file(
        self,
        name: str,
        content: bytes | bytearray,
        config: Mapping[str, Any],
        version: int | None = None,
    ) -> AdapterInfo:
        """As `load_adapter`, of the bytes of a safetensors file and what PEFT's
        `adapter_config.json` says. `version`: a number above those of this name; None counts up.
        """
        checked_name(name, "lora_name")
        require_safetensors(content)
        told = {"name": name, "config": dict(config), "version": version}
        async with self._adapter_turn, temporary_folder("lora") as folder:
            path = folder / "adapter.safetensors"
            await asyncio.to_thread(path.write_bytes, content)
            return await self._load_adapter("load_adapter_file", path=str(path), **told)

    async def _load_adapter(self, operation: str, *, name: str, **told: Any) -> AdapterInfo:
        """Ask for it in the turn of adapters."""
        told |= {"name": name, "kv_policy": self.pause_policy or "finish_old"}
        info: AdapterInfo = await self.call(operation, self._config.rl_timeout, **told)
        self._engine.adapters = {**self.adapters, name: info}
        log.info("version %d of adapter %r serves.", info.version, name)
        return info

    async def unload_adapter(self, name: str) -> None:
        """No new request may ask for an adapter; those that have it finish with it. 404 for one
        that is not loaded.
        """
        checked_name(name, "lora_name")
        async with self._adapter_turn:
            await self.call("unload_adapter", self._config.rl_timeout, name=name)
            self._engine.adapters = {
                key: each for key, each in self.adapters.items() if key != name
            }

    # -- checks ------------------------------------------------------------------------------------

    async def checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor that serves, by checkpoint name."""
        return await self.call("weights_checksum", self._config.rl_timeout)

    async def remember_checksums(self) -> None:
        """Take those that serve now as what `changed_tensors` compares with."""
        checksums = await self.checksums()
        self._engine.checksums = checksums

    async def changed_tensors(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Names of tensors that differ from checksums: given ones, or those remembered (409
        without).
        """
        before = self._engine.checksums if baseline is None else baseline
        if before is None:
            raise ApiError(409, "there is nothing to compare with; take a snapshot first.")
        now = await self.checksums()
        return sorted(
            name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
        )

    async def weight_rows(self, name: str, count: int) -> list[Any]:
        """The first rows of a checkpoint tensor that serves, as lists of numbers. 400 for a name
        that there is none of, and for more than a million numbers.
        """
        return await self.call("weight_rows", self._config.rl_timeout, tensor=name, count=count)
