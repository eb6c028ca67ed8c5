"""`Control`: what a trainer may do to the engine, whatever its dialect. It lives in the API process
and keeps order.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypedDict, Unpack, get_args

import msgspec

from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, bad_request
from nano_inference.serving.versions import checked_name
from nano_inference.serving.weight_calls import WeightCalls
from nano_inference.types import EngineStats, KvPolicy, Memory, PauseMode

log = logging.getLogger("nano_inference.serving")

SLACK = 30.0  # seconds in which an engine that keeps a deadline itself has said that it is over
SEND = "send the bytes of a safetensors file, those of safetensors.torch.save(state_dict)."
PART = 2**24  # bytes of a file in one message: a larger one would hold up the event loop


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that a trainer is about to broadcast: name as in the checkpoint, `"bfloat16"`,
    shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Checks(TypedDict, total=False):
    """What an update is checked for; see `Control.begin_update`."""

    complete: bool
    check_finite: bool


class Loads(msgspec.Struct, frozen=True):
    """Requests in the engine, as samples."""

    running: int
    waiting: int


def require_safetensors(content: bytes) -> None:
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
        self._client = client
        self._config = config
        self._weights = WeightCalls(client, config)
        self._paused: tuple[int, KvPolicy | None] | None = None  # which engine was paused, and how

    @property
    def pause_policy(self) -> KvPolicy | None:
        """What the pause asked for, for updates that say nothing; None: there is none, or it did
        not say.
        """
        # a new engine is not paused
        if self._paused is None or self._paused[0] != self._client.num_restarts:
            return None
        return self._paused[1]

    @property
    def session_open(self) -> bool:
        """Between `begin_update` and `finish_update`."""
        return self._weights.session is not None

    @property
    def model_path(self) -> str:
        """Where the weights that serve were read, as far as they were: SGLang tells the folder of
        an update.
        """
        self._weights.notice_restart()
        return self._weights.served_folder or self._client.info.model_path

    # -- versions: opaque strings on the wire, integers in the engine ------------------------------

    def version_name(self, version: int) -> str:
        """A version of the engine's as the trainer calls it. No waiting: replies are made with
        it.
        """
        return self._weights.names.name(version)

    def version_number(self, name: str) -> int | None:
        """The engine's version of this name, which may be one that is still to come; None: there
        can be none.
        """
        return self._weights.names.number(name)

    @property
    def newest_version(self) -> int:
        """The newest version that there is, or that an update is about to make."""
        return self._weights.names.newest

    async def serving_version(self) -> str:
        """The name of the version that serves."""
        return self.version_name(await self._weights.call("get_weight_version"))

    async def name_version(self, name: str) -> None:
        """Give the version that serves a name, or, while a session is open, the one that it will
        become.
        """
        if self.session_open:
            self._weights.version = checked_name(name)
        else:
            self._weights.names.rename(await self._weights.call("get_weight_version"), name)

    # -- groups: gloo on a CPU, NCCL on CUDA; the trainer is rank 0 --------------------------------

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
        open. What a dead one has left is forgotten.

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
        await self._weights.call(
            "join_group",
            self._weights.seconds(timeout),
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
        return bool(await self._weights.call("has_group", group=name))

    async def leave_group(self, name: str) -> None:
        """Leave it. 404 where there is none of this name."""
        if not await self._weights.call("leave_group", group=name):
            raise ApiError(404, f"there is no group {name!r}.")

    # -- updates: gathered in a session, checked, and written in one piece between two steps -------

    async def begin_update(
        self, *, version: str | None = None, complete: bool = False, check_finite: bool = True
    ) -> None:
        """Open the session. 409 if one is open, or if the weights are asleep.

        Args:
            version: what the trainer calls the new version; None: by its number, unless it says so
                later.
            complete: refuse an update that lacks a tensor.
            check_finite: refuse NaN and infinite values, as they are in the model's dtype.
        """
        await self._weights.begin(version, complete=complete, check_finite=check_finite)

    @asynccontextmanager
    async def updating(
        self, *, version: str | None = None, **checks: Unpack[Checks]
    ) -> AsyncIterator[None]:
        """`begin_update`, for what is finished within: a failure, or a caller that leaves, ends the
        session.
        """
        await self.begin_update(version=version, **checks)
        try:
            yield
        except BaseException as problem:
            await self.fail_update(problem)
            raise

    async def receive_broadcast(
        self,
        group: str,
        tensors: Sequence[TensorSpec],
        *,
        packed_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take part in the trainer's broadcasts of these tensors, one each, in order. What fails
        cancels the session.

        With `packed_bytes` they come as flat uint8 runs instead: tensors are put together until a
        run is longer than that (vLLM's packed format), one broadcast a run.
        """
        told = [
            (tensor.name, tensor.dtype.removeprefix("torch."), tensor.shape) for tensor in tensors
        ]
        await self._weights.receive(
            "receive_broadcast", timeout, group=group, tensors=told, packed_bytes=packed_bytes
        )

    async def receive_stream(self, group: str) -> None:
        """Take what a `nano_inference` `WeightSender` sends, which describes itself and may name
        its version.
        """
        self._name_session(await self._weights.receive("receive_stream", None, group=group))

    async def receive_file(self, content: bytes) -> None:
        """Take the tensors of a safetensors file, given whole. A pickle is refused by its first
        bytes, and named.
        """
        async with self._weights.next() as (session, seconds):
            require_safetensors(content)
            whole = memoryview(content)
            for start in range(0, len(whole), PART):
                part = whole[start : start + PART]
                await self._weights.call(
                    "receive_file", seconds, session=session, size=len(whole), content=part
                )

    async def receive_folder(self, path: str, *, timeout: float | None = None) -> None:
        """Take the safetensors of a folder (or a file) on this machine."""
        self._name_session(await self._weights.receive("receive_folder", timeout, path=path))
        self._weights.folder = path

    async def finish_update(
        self,
        *,
        version: str | None = None,
        kv_policy: KvPolicy | None = None,
        timeout: float | None = None,
    ) -> str:
        """Close the session and wait until its weights serve, paused or not; returns the version's
        name.

        Args:
            version: its name, for who learns it late.
            kv_policy: what becomes of running requests; None: what the pause asked for, `"keep"`
                without one. 409 if it would wait for requests that are paused.
            timeout: seconds; None: the server's.
        """
        policy: KvPolicy = kv_policy or self.pause_policy or "keep"
        async with self._weights.next(timeout) as (session, seconds):
            name = await self._weights.finish(session, seconds, version, kv_policy=policy)
        log.info("weight version %s serves; requests that ran: %s.", name, policy)
        return name

    async def cancel_update(self, reason: str) -> bool:
        """Forget the session, if one is open."""
        return await self._weights.cancel(reason)

    async def fail_update(self, problem: BaseException) -> None:
        """A request that belongs to the update was refused, or failed: forget the session, if one
        is open.
        """
        await self._weights.fail(problem)

    def _name_session(self, theirs: int | None) -> None:
        """What was received may say itself which version it is."""
        if theirs is not None and self._weights.version is None:
            self._weights.version = str(theirs)

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
        # The engine keeps the deadline: a call that is given up here would go on there.
        if not await self._client.call(
            "pause_within", mode=how, seconds=seconds, timeout=seconds + SLACK
        ):
            raise ApiError(
                504, f"the requests did not end within {seconds:g} seconds; nothing is paused."
            )
        self._paused = self._client.num_restarts, kv_policy
        if mode == "abort":
            await self._client.abort(None, timeout=seconds)

    async def resume(self) -> None:
        """End the pause; the engine goes on when nothing is asleep. Without one nothing happens."""
        self._paused = None
        await self._client.call("end_pause")

    async def is_paused(self, *, timeout: float = 60.0) -> bool:
        """Whether nothing is computed until `resume` or `wake`. Raises `TimeoutError` after so many
        seconds.
        """
        return bool(await self._client.call("is_paused", timeout=timeout))

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests, by the ids that their clients gave them (None: all); they are answered with
        what they have.

        An id is `Ask.client_id`, or that of the HTTP request (`x-request-id`). Ids that nobody has,
        any more or yet, are passed over. Returns how many prompts there were, when they have ended.
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
        if "weights" in parts and self.session_open:
            raise ApiError(409, "a weight update is open; finish it before the weights sleep.")
        await self._client.call("sleep", memory=parts, timeout=self._config.rl_timeout)

    async def wake(self, memory: Iterable[Memory] | None = None) -> None:
        """Take it again, as far as it sleeps; None: all. The engine goes on when all is awake,
        unless it is paused.
        """
        parts = self._parts(get_args(Memory) if memory is None else memory)
        await self._client.call("wake", memory=parts, timeout=self._config.rl_timeout)

    async def sleeping(self) -> tuple[Memory, ...]:
        """What sleeps."""
        return tuple(await self._client.call("sleeping"))

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

    # -- checks ------------------------------------------------------------------------------------

    async def checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor that serves, by checkpoint name."""
        return await self._weights.call("weights_checksum", self._config.rl_timeout)

    async def remember_checksums(self) -> None:
        """Take those that serve now as what `changed_tensors` compares with."""
        checksums = await self.checksums()
        self._weights.notice_restart()
        self._weights.snapshot = checksums

    async def changed_tensors(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Names of tensors that differ from checksums: given ones, or those remembered (409
        without).
        """
        self._weights.notice_restart()
        before = self._weights.snapshot if baseline is None else baseline
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
        return await self._weights.call(
            "weight_rows", self._config.rl_timeout, tensor=name, count=count
        )

    async def info(self) -> dict[str, Any]:
        """Device, dtype, block size and the like, for `/server_info`."""
        return await self._weights.call("describe")
