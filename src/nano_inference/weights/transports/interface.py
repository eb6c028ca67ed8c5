"""Interface of transports, which yield buckets before a deadline, and functions that stage these
buckets in the manager's session.
"""

import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Unpack

from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.deadline import Deadline as Deadline
from nano_inference.parallel.deadline import step_back
from nano_inference.types import UpdateOptions
from nano_inference.weights.staging import Bucket
from nano_inference.weights.sync import WeightSyncManager
from nano_inference.weights.update import WeightUpdate

AHEAD = 2  # buckets that may wait while one is staged
LOOK = 0.05  # seconds between checks for a cancelled session
GRACE = 0.25  # seconds after the deadline in which a transport may raise its own, clearer error

Item = TypeVar("Item")
Begun = TypeVar("Begun")
Done = TypeVar("Done")
Shapes = Mapping[str, tuple[int, ...]]  # shapes of all tensors that an update may name
Kind = Literal["version", "bucket", "done", "failed"]


class Incoming(NamedTuple):
    """Update that begins to arrive."""

    version: int | None  # version that the trainer named
    buckets: Iterator[Bucket]  # buckets whose tensors the caller owns


class WeightTransport(Protocol):
    """Transport of weights. It carries one update at a time."""

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for an update to begin. Both this method and the buckets' iterator raise
        `WeightUpdateError`.

        The peer's description is checked against `shapes`, the model's own table, before any memory
        is allocated.
        """
        ...

    def close(self) -> None:
        """Close all connections. Another thread may call it while `receive` or its iterator waits,
        and may call it twice.

        A later `receive` opens new connections.
        """
        ...


def overlapped(
    items: Iterable[Item],
    begin: Callable[[Item], Begun],
    finish: Callable[[Begun], Done],
    depth: int = 2,
) -> Iterator[Done]:
    """Begin each item, and finish items in order once `depth` of them are in progress. One is then
    transferred while the previous one is processed.
    """
    in_progress: deque[Begun] = deque()
    for item in items:
        in_progress.append(begin(item))
        if len(in_progress) == depth:
            yield finish(in_progress.popleft())
    while in_progress:
        yield finish(in_progress.popleft())


def receive_update(
    manager: WeightSyncManager,
    transport: WeightTransport,
    *,
    timeout: float = 300.0,
    **options: Unpack[UpdateOptions],
) -> WeightUpdate:
    """Start to receive an update and return immediately. The update is queued once all of it has
    arrived and been checked.

    One thread waits for the transport. Another checks the buckets and enforces the deadline, even
    if a call into a library does not return. Any failure fails the returned update and closes the
    session. If it occurs during a transfer, it also closes the transport. The old version stays
    live.

    Args:
        manager: Manager of the session. If one is open, `WeightUpdateError` is raised immediately.
        transport: Transport that delivers the buckets.
        timeout: Seconds within which everything must arrive.
        options: Options of `InferenceEngine.update_weights`. If `version` is None, the transport's
            version applies, or else the next number.
    """
    deadline = Deadline(timeout)
    update = manager.begin(**options)
    version = options.get("version")

    def receive() -> None:
        try:
            receive_into(manager, transport, update, deadline, version=version, end=True)
        except Exception as problem:  # the update reports it, if it has begun
            manager.cancel(_reason(problem), of=update)

    threading.Thread(target=receive, name="weight-session", daemon=True).start()
    return update


def receive_into(
    manager: WeightSyncManager,
    transport: WeightTransport,
    update: WeightUpdate,
    deadline: Deadline,
    *,
    version: int | None = None,
    end: bool = False,
) -> int | None:
    """Stage a transport's buckets in the open session, on the calling thread. Return the version
    that the peer named. With `end`, also end the session as `version`, or else the peer's version.

    Any failure, including a cancelled session, closes the session. If it occurs during a transfer,
    it also closes the transport. Raises `WeightUpdateError`.
    """
    arrivals = _Arrivals(transport, manager.shapes, deadline, update)
    try:
        _, theirs = arrivals.take()
        if None not in (version, theirs) and version != theirs:
            raise WeightUpdateError(
                f"the trainer sent weight version {theirs}, expected {version}."
            )
        number = theirs if version is None else version
        if end:
            manager.check_version(number)
        while (bucket := arrivals.take())[0] != "done":
            manager.receive(bucket[1], copy=False, of=update, undo=arrivals.stop)
        if end:
            manager.end(version=number, of=update)
    except Exception as problem:
        # stop first: a thread that sees the update fail may reuse this transport for the next one
        arrivals.stop()
        manager.cancel(_reason(problem), of=update)
        raise
    return theirs


def _reason(problem: Exception) -> str:
    return (
        str(problem)
        if isinstance(problem, WeightUpdateError)
        else f"receiving the weights failed: {problem!r}"
    )


class _Arrivals:
    """Output of a transport, which runs on a separate thread: its version, then its buckets."""

    def __init__(
        self, transport: WeightTransport, shapes: Shapes, deadline: Deadline, update: WeightUpdate
    ) -> None:
        self.transport, self.shapes, self.deadline, self.update = (
            transport,
            shapes,
            deadline,
            update,
        )
        self._arrived: queue.Queue[tuple[Kind, Any]] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._settled = False  # True if the transport has no transfer in progress
        self._buckets = 0
        threading.Thread(target=self._bring, name="weight-transport", daemon=True).start()

    def take(self) -> tuple[Kind, Any]:
        """Return the next item. Raises the transport's exception, the error of a cancelled update,
        or `WeightTransferError` at the deadline.
        """
        late = Deadline(self.deadline.left() + GRACE)
        while True:
            try:
                kind, content = self._arrived.get(timeout=min(LOOK, late.left()))
                break
            except queue.Empty:
                if self.update.error is not None:
                    raise self.update.error from None
                if not late.left():
                    text = (
                        f"received only {self._buckets} buckets of the weights within "
                        f"{self.deadline.seconds:g} s."
                    )
                    raise WeightTransferError(text) from None
        self._settled = kind in ("done", "failed")
        self._buckets += kind == "bucket"
        if kind == "failed":
            raise content
        return kind, content

    def stop(self) -> None:
        """Accept no more items, and tear down a transfer in progress, without waiting for a call
        that does not return.

        Only the first call has an effect, since the transport may belong to another update
        afterwards.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        if not self._settled:
            teardown = threading.Thread(
                target=self.transport.close, name="weight-teardown", daemon=True
            )
            teardown.start()
            teardown.join(GRACE)

    def _bring(self) -> None:
        step_back()
        try:
            incoming = self.transport.receive(self.shapes, self.deadline)
            self._put("version", incoming.version)
            for bucket in incoming.buckets:
                self._put("bucket", bucket)
            self._put("done", None)
        except Exception as problem:
            # pending works in the frames would keep their group's sockets open
            traceback.clear_frames(problem.__traceback__)
            if not self._stopped.is_set():
                self._put("failed", problem)

    def _put(self, kind: Kind, content: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._arrived.put((kind, content), timeout=0.1)
            except queue.Full:
                continue
        raise WeightUpdateError("the session has ended.")
