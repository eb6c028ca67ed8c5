"""`EngineActor`: an engine in a Ray worker, told by the messages that an engine process is told
by.
"""
# pyright: reportMissingImports=false

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from nano_inference.config import EngineConfig
from nano_inference.errors import NanoInferenceError, WeightUpdateConflict
from nano_inference.ray.cluster import num_ranks
from nano_inference.serving.encoding import encoded, refusal
from nano_inference.serving.messages import CannotStart, FromEngine, Heartbeat, Ready, ToEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nano_inference.ray.launcher import RayLauncher
    from nano_inference.serving.core import EngineCore

log = logging.getLogger("nano_inference.ray")

# seconds between heartbeats while there are requests; a call that has nothing to tell returns after
# it
BEAT = 1.0
IDLE_BEAT = 10.0  # and while nothing changes
AT_ONCE = 256  # messages in an answer

# Each group is a thread of its own, on which calls run one by one in the order in which they were
# made.
GROUPS = {"told": 1, "tells": 1, "weights": 1}


class EngineActor:
    """The engine is built on a thread of its own; what comes of that is the first that `tells`
    tells.

    Args:
        config: msgpack of the `EngineConfig`.
        log_level: of this package's log lines.
    """

    def __init__(self, config: bytes, log_level: int) -> None:
        logging.getLogger("nano_inference").setLevel(log_level)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._config = msgspec.msgpack.decode(config, type=EngineConfig)
        self._queue: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._core: EngineCore | None = None
        self._ended = threading.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._last: Heartbeat | None = None
        self._sent = self._due = 0.0
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    # -- told --------------------------------------------------------------------------------------

    def told(self, data: bytes) -> None:
        """Take a message in. Nothing that arrives raises."""
        core = self._core
        if core is None:
            return
        try:
            message = self._decoder.decode(data)
        except Exception as problem:
            log.warning("a message of %d bytes was not understood: %.500r", len(data), str(problem))
            if answer := refusal(data, problem):
                self._queue.put(answer)
            return
        try:
            core.handle(message)
        except Exception:
            log.exception("a message of %d bytes could not be handled", len(data))

    def wait_for_end(self, seconds: float) -> bool:
        """Until the engine has ended, as it was told; whether it has."""
        return self._ended.wait(seconds)

    # -- tells -------------------------------------------------------------------------------------

    def tells(self) -> tuple[str, list[bytes]]:
        """The node's id, and what there is to tell. Waits for it, but not longer than a second."""
        messages: list[FromEngine] = []
        try:
            messages.append(self._queue.get(timeout=BEAT))
            while len(messages) < AT_ONCE:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        if (beat := self._beat()) is not None:
            messages.append(beat)
        return self._node, [
            data for message in messages for data in encoded(self._encoder, message)
        ]

    def _beat(self) -> Heartbeat | None:
        now, core = time.monotonic(), self._core
        if now < self._due or core is None:
            return None
        self._due = now + BEAT
        beat = core.heartbeat()
        if not core.has_requests and beat == self._last and now < self._sent + IDLE_BEAT:
            return None
        self._last, self._sent = beat, now
        return beat

    # -- weights -----------------------------------------------------------------------------------

    def take_bucket(self, session: int, description: bytes, content: "NDArray[np.uint8]") -> None:
        """Take a bucket of an update that `begin_update` has opened. Ray has brought its bytes to
        this node.

        Raises `WeightUpdateError`.
        """
        from nano_inference.rl.verl.buckets import Parcel, opened

        parcel = Parcel(description, content)
        self._built().weight_link.receive_bucket(session, lambda shapes: opened(parcel, shapes))

    def take_update(
        self,
        version: int,
        seconds: float,
        descriptions: Sequence[bytes],
        *contents: "NDArray[np.uint8]",
    ) -> None:
        """Receive a whole update; returns when it serves. Raises `WeightUpdateError`."""
        link = self._built().weight_link
        session = -version  # nobody else's
        link.begin_update(session)
        for description, content in zip(descriptions, contents, strict=True):
            self.take_bucket(session, description, content)
        link.finish_update(session, version, "recompute", seconds)

    def give_buckets(self, version: int) -> list[tuple[bytes, Any]]:
        """All weights that serve, in the object store: descriptions, and references to their bytes.

        Raises `WeightUpdateConflict` if they are of another version.
        """
        from nano_inference.rl.verl.buckets import parcels_of

        manager = self._built().engine.weight_sync
        with manager.lock:
            if manager.version != version:
                raise WeightUpdateConflict(
                    f"weight version {manager.version} serves, and not {version}."
                )
            return [
                (parcel.description, ray.put(parcel.content))
                for parcel in parcels_of(manager.state_dict().items())
            ]

    def _built(self) -> "EngineCore":
        if self._core is None:
            raise NanoInferenceError("the engine is not built yet.")
        return self._core

    # -- the engine --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            from nano_inference.engine.engine import InferenceEngine
            from nano_inference.serving.core import EngineCore

            core = EngineCore(
                InferenceEngine(self._config, _launcher(self._config)), self._queue.put
            )
            core.prepare()
        except Exception as problem:
            if not isinstance(problem, NanoInferenceError):
                log.exception("the engine cannot be built")
                problem = NanoInferenceError(f"{type(problem).__name__}: {problem}")
            self._queue.put(CannotStart(type(problem).__name__, str(problem)))
            return
        self._core = core
        self._queue.put(Ready(core.info()))
        try:
            core.run()
        except Exception:
            log.exception("the engine has failed")  # and has said so
            return
        core.engine.shutdown()
        self._ended.set()


def _launcher(config: EngineConfig) -> "RayLauncher | None":
    """Who starts the other ranks, if there are any."""
    if num_ranks(config) == 1:
        return None
    from nano_inference.ray.launcher import RayLauncher

    return RayLauncher()
