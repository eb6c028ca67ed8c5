"""`EngineActor`: an engine in a Ray worker, with the messages of an engine process."""
# pyright: reportMissingImports=false

import logging
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from nano_inference.config import EngineConfig
from nano_inference.errors import NanoInferenceError, WeightUpdateConflict
from nano_inference.remote import BEAT, EngineHost, FromEngine, encoded
from nano_ray.cluster import num_ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nano_inference import InferenceEngine
    from nano_inference.remote import EngineCore

AT_ONCE = 256  # maximum messages in a reply

# Each group has its own thread, which runs the group's calls one after another in order.
GROUPS = {"told": 1, "tells": 1, "weights": 1}


class EngineActor:
    """Host of an engine, which is built on a separate thread. The first message from `tells`
    reports that the engine is ready or failed.

    Args:
        config: The `EngineConfig` as msgpack.
        log_level: Level of this package's log lines.
    """

    def __init__(self, config: bytes, log_level: int) -> None:
        logging.getLogger("nano_inference").setLevel(log_level)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._config = msgspec.msgpack.decode(config, type=EngineConfig)
        self._queue: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._host = EngineHost(self._queue.put)
        self._ended = threading.Event()
        self._encoder = msgspec.msgpack.Encoder()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    # -- messages ----------------------------------------------------------------------------------

    def told(self, data: bytes) -> None:
        """Receive a message. Never raises."""
        self._host.take(data)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the engine has stopped. Return False on timeout."""
        return self._ended.wait(seconds)

    def tells(self) -> tuple[str, list[bytes]]:
        """Return the node's id and the pending messages. Waits up to a second for the first one."""
        messages: list[FromEngine] = []
        try:
            messages.append(self._queue.get(timeout=BEAT))
            while len(messages) < AT_ONCE:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        if (beat := self._host.beat()) is not None:
            messages.append(beat)
        return self._node, [
            data for message in messages for data in encoded(self._encoder, message)
        ]

    # -- weights -----------------------------------------------------------------------------------

    def take_bucket(self, session: int, description: bytes, content: "NDArray[np.uint8]") -> None:
        """Receive a bucket of an open update. Ray has already copied its bytes to this node.

        Raises `WeightUpdateError`.
        """
        from nano_ray.verl.buckets import Parcel, opened

        parcel = Parcel(description, content)
        self._built().weights.receive_bucket(session, lambda shapes: opened(parcel, shapes))

    def take_update(
        self,
        version: int,
        seconds: float,
        descriptions: Sequence[bytes],
        *contents: "NDArray[np.uint8]",
    ) -> None:
        """Receive a complete update and wait until it is live. Raises `WeightUpdateError`."""
        link = self._built().weights
        session = -version  # negative ids are not used by callers
        link.begin_update(session)
        for description, content in zip(descriptions, contents, strict=True):
            self.take_bucket(session, description, content)
        link.finish_update(session, version, "recompute", seconds)

    def give_buckets(self, version: int) -> list[tuple[bytes, Any]]:
        """Put all live weights into the object store. Return descriptions and references to bytes.

        Raises `WeightUpdateConflict` if their version is not `version`.
        """
        from nano_ray.verl.buckets import parcels_of

        manager = self._built().engine.weight_sync
        with manager.lock:
            if manager.version != version:
                raise WeightUpdateConflict(
                    f"weight version {manager.version} is live, not {version}."
                )
            return [
                (parcel.description, ray.put(parcel.content))
                for parcel in parcels_of(manager.state_dict().items())
            ]

    def _built(self) -> "EngineCore":
        if self._host.core is None:
            raise NanoInferenceError("the engine is not built yet.")
        return self._host.core

    def _run(self) -> None:
        if self._host.run(lambda: _engine(self._config)):
            self._ended.set()


def _engine(config: EngineConfig) -> "InferenceEngine":
    """Build the engine. Ray places its other ranks, if any."""
    from nano_inference import InferenceEngine
    from nano_ray.launcher import RayLauncher

    return InferenceEngine(config, RayLauncher() if num_ranks(config) > 1 else None)
