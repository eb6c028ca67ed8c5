"""`Control`: what a trainer may do to the engine, whatever its dialect. It lives in the API process and keeps order."""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError
from nano_inference.types import EngineStats, KvPolicy, Memory, PauseMode

SLACK = 30.0  # seconds in which an engine that keeps a deadline itself has said that it is over


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor that a trainer is about to broadcast: name as in the checkpoint, `"bfloat16"`, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Loads(msgspec.Struct, frozen=True):
    """Requests in the engine, as samples."""

    running: int
    waiting: int


class Control:
    """One update at a time; what comes in a wrong order is refused, with the old version serving.

    Every method raises `ApiError` (409 for a wrong order, a second trainer, weights that are asleep; 400 for names,
    shapes and types that do not match; 504 for a deadline) and what `EngineClient.call` raises.

    Attributes:
        session_open: between `begin_update` and `finish_update`.
        pause_policy: what the pause asked for, for updates that say nothing; None: there is none, or it did not say.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._config = config
        self.session_open = False
        self.pause_policy: KvPolicy | None = None

    # -- versions: opaque strings on the wire, integers in the engine ----------------------------------------------

    def version_name(self, version: int) -> str:
        """A version of the engine's as the trainer calls it. No waiting: replies are made with it."""
        raise NotImplementedError

    async def serving_version(self) -> str:
        """The name of the version that serves."""
        raise NotImplementedError

    async def name_version(self, name: str) -> None:
        """Give the version that serves a name, or, while a session is open, the one that it will become."""
        raise NotImplementedError

    # -- groups: gloo on a CPU, NCCL on CUDA; the trainer is rank 0 -------------------------------------------------

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

        Args:
            name: by which `receive_broadcast` and `leave_group` know it.
            host: of the trainer's store.
            port: of the trainer's store.
            rank: of this engine.
            world_size: the trainer and all engines.
            backend: "gloo" or "nccl"; None: by the engine's device.
            named: the trainer made it with `group_name=name`, beside a default group (slime, SGLang's way); False: by
                an ordinary `init_process_group`.
            timeout: seconds; None: the server's.
        """
        raise NotImplementedError

    async def leave_group(self, name: str) -> None:
        """Leave it. 404 where there is none of this name."""
        raise NotImplementedError

    # -- updates: gathered in a session, checked, and written in one piece between two steps ------------------------

    async def begin_update(self, *, version: str | None = None) -> None:
        """Open the session. 409 if one is open, or if the weights are asleep."""
        raise NotImplementedError

    async def receive_broadcast(
        self,
        group: str,
        tensors: Sequence[TensorSpec],
        *,
        packed_bytes: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take part in the trainer's broadcasts of these tensors, one each, in order. What fails cancels the session.

        With `packed_bytes` they come as flat uint8 runs instead: tensors are put together until a run is longer than
        that (vLLM's packed format), one broadcast a run.
        """
        raise NotImplementedError

    async def receive_stream(self, group: str, *, timeout: float | None = None) -> None:
        """Take what a `nano_inference` `WeightSender` sends, which describes itself."""
        raise NotImplementedError

    async def receive_file(self, content: bytes) -> None:
        """Take the tensors of a safetensors file, given whole. A pickle is refused by its first bytes, and named."""
        raise NotImplementedError

    async def receive_folder(self, path: str, *, timeout: float | None = None) -> None:
        """Take the safetensors of a folder (or a file) on this machine."""
        raise NotImplementedError

    async def finish_update(self, *, version: str | None = None, kv_policy: KvPolicy | None = None) -> str:
        """Close the session and wait until its weights serve, paused or not; returns the version's name.

        `kv_policy` None: what the pause asked for, `"keep"` without one. Never `"abort"` unless asked.
        """
        raise NotImplementedError

    async def cancel_update(self, reason: str) -> bool:
        """Forget the session, if one is open."""
        raise NotImplementedError

    # -- requests -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, *, kv_policy: KvPolicy | None = None, timeout: float | None = None) -> None:
        """Stop computing until `resume`, and return when nothing is computed. Requests that come meanwhile wait.

        Args:
            mode: what becomes of requests, as in `InferenceEngine.pause`; `"abort"`: they are answered with what they
                have.
            kv_policy: of updates during the pause that name none.
            timeout: seconds; None: the server's. With `"wait"` requests may need longer: then nothing is paused (504).
        """
        seconds = self._config.rl_timeout if timeout is None else timeout
        how = "keep" if mode == "abort" else mode
        # The engine keeps the deadline: a call that is given up here would go on there.
        if not await self._client.call("pause_within", mode=how, seconds=seconds, timeout=seconds + SLACK):
            raise ApiError(504, f"the requests did not end within {seconds:g} seconds; nothing is paused.")
        self.pause_policy = kv_policy
        if mode == "abort":
            await self._client.abort(None, timeout=seconds)

    async def resume(self) -> None:
        """End the pause; the engine goes on when nothing is asleep. Without one nothing happens."""
        self.pause_policy = None
        await self._client.call("end_pause")

    async def is_paused(self) -> bool:
        """Whether nothing is computed until `resume` or `wake`."""
        return bool(await self._client.call("is_paused"))

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests, by the ids that their clients gave them (None: all); they are answered with what they have.

        An id is `Ask.client_id`, or that of the HTTP request (`x-request-id`). Ids that nobody has, any more or yet,
        are passed over. Returns how many prompts there were, when they have ended.
        """
        names = None if request_ids is None else frozenset(request_ids)
        return await self._client.abort(names, timeout=self._config.rl_timeout)

    async def loads(self) -> Loads:
        """What runs and waits. Paused requests, and such as a sleep took the cache from, do one or the other too."""
        stats: EngineStats = await self._client.call("stats")
        total = self._client.num_samples
        running = min(stats.num_running, total)
        return Loads(running, total - running)

    # -- memory -------------------------------------------------------------------------------------------------------

    async def flush_cache(self, *, only_idle: bool = False) -> None:
        """Forget cached prefixes. `only_idle`: 409 while requests run or wait (SGLang's way)."""
        if only_idle and self._client.num_samples:
            raise ApiError(409, f"{self._client.num_samples} sample(s) run or wait; the cache is flushed without them.")
        await self._client.call("flush_cache")

    async def sleep(self, memory: Iterable[Memory] = ("kv_cache", "weights")) -> None:
        """Give memory back, as far as it is awake; nothing is computed until all of it is awake again.

        Requests wait, and a pause goes on. 409 for weights while an update is open.
        """
        parts = self._parts(memory)
        if "weights" in parts and self.session_open:
            raise ApiError(409, "a weight update is open; finish it before the weights sleep.")
        await self._client.call("sleep", memory=parts, timeout=self._config.rl_timeout)

    async def wake(self, memory: Iterable[Memory] | None = None) -> None:
        """Take it again, as far as it sleeps; None: all. The engine goes on when all is awake, unless it is paused."""
        parts = self._parts(get_args(Memory) if memory is None else memory)
        await self._client.call("wake", memory=parts, timeout=self._config.rl_timeout)

    async def sleeping(self) -> tuple[Memory, ...]:
        """What sleeps."""
        return tuple(await self._client.call("sleeping"))

    @staticmethod
    def _parts(memory: Iterable[Memory]) -> list[Memory]:
        parts = list(memory)
        if unknown := [each for each in parts if each not in get_args(Memory)]:
            raise ApiError(400, f"{unknown[0]!r} is not a part of the memory; these are {', '.join(get_args(Memory))}.")
        return parts

    # -- checks -------------------------------------------------------------------------------------------------------

    async def checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor that serves, by checkpoint name."""
        raise NotImplementedError

    async def info(self) -> dict[str, Any]:
        """Device, dtype, block size and the like, for `/server_info`: `EngineInfo`, as a dict."""
        return msgspec.structs.asdict(self._client.info)
