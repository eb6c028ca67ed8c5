"""`Control`: what a trainer may do to the engine, whatever its dialect. It lives in the API process and keeps order."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.types import KvPolicy, PauseMode

Memory = Literal["weights", "kv_cache"]


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
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._config = config
        self.session_open = False

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

    def has_group(self, name: str) -> bool:
        """Whether a group of this name has formed and not been lost: by an update that failed, or with the engine."""
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

    async def pause(self, mode: PauseMode, *, kv_policy: KvPolicy | None = None) -> None:
        """As `InferenceEngine.pause`; updates during the pause follow `kv_policy`. `"abort"`: requests are answered
        with what they have.
        """
        raise NotImplementedError

    async def resume(self) -> None:
        """Go on."""
        raise NotImplementedError

    async def is_paused(self) -> bool:
        """Whether it is paused."""
        raise NotImplementedError

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests, by the ids that their clients gave them (None: all); they are answered with what they have.
        Returns how many requests there were.
        """
        raise NotImplementedError

    async def loads(self) -> Loads:
        """What runs and waits."""
        raise NotImplementedError

    # -- memory -------------------------------------------------------------------------------------------------------

    async def flush_cache(self, *, only_idle: bool = False) -> None:
        """Forget cached prefixes. `only_idle`: 409 while requests run or wait (SGLang's way)."""
        raise NotImplementedError

    async def sleep(self, memory: Iterable[Memory] = ("kv_cache", "weights")) -> None:
        """Give memory back; requests are paused until all of it is awake."""
        raise NotImplementedError

    async def wake(self, memory: Iterable[Memory] | None = None) -> None:
        """Take it again; None: all that sleeps."""
        raise NotImplementedError

    async def sleeping(self) -> tuple[Memory, ...]:
        """What sleeps."""
        raise NotImplementedError

    # -- checks -------------------------------------------------------------------------------------------------------

    async def checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor that serves, by checkpoint name."""
        raise NotImplementedError

    async def info(self) -> dict[str, Any]:
        """Device, dtype, block size and the like, for `/server_info`."""
        raise NotImplementedError
