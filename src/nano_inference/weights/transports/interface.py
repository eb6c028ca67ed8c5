"""What every transport is: something that yields buckets until done, before a deadline. And how one
runs into a session of the manager: on threads of its own, with a deadline that holds.
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
LOOK = 0.05  # seconds between two looks at whether the session was cancelled
GRACE = 0.25  # seconds that a transport has to say itself what is late

Item = TypeVar("Item")
Begun = TypeVar("Begun")
Done = TypeVar("Done")
Shapes = Mapping[str, tuple[int, ...]]  # of every tensor that an update of the model may name
Kind = Literal["version", "bucket", "done", "failed"]


class Incoming(NamedTuple):
    """An update that begins to arrive."""

    version: int | None  # that the trainer gave it
    buckets: Iterator[Bucket]  # the caller owns a bucket's tensors


class WeightTransport(Protocol):
    """A way for weights to arrive. One update at a time."""

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for an update to begin. Raises `WeightUpdateError`, as the buckets' iterator does.

        The peer's words are checked against `shapes`, the model's own table, before anything is
        allocated.
        """
        ...

    def close(self) -> None:
        """Tear down what is open; called from another thread while `receive` or its iterator may
        wait, or twice.

        A later `receive` starts anew.
        """
        ...


def overlapped(
    items: Iterable[Item],
    begin: Callable[[Item], Begun],
    finish: Callable[[Begun], Done],
    depth: int = 2,
) -> Iterator[Done]:
    """Each item begun, then finished when `depth` of them are under way: in order, so that one
    travels while the one before it is worked on.
    """
    under_way: deque[Begun] = deque()
    for item in items:
        under_way.append(begin(item))
        if len(under_way) == depth:
            yield finish(under_way.popleft())
    while under_way:
        yield finish(under_way.popleft())


def receive_update(
    manager: WeightSyncManager,
    transport: WeightTransport,
    *,
    timeout: float = 300.0,
    **options: Unpack[UpdateOptions],
) -> WeightUpdate:
    """Begin to receive an update and return at once; it is queued and announced when all of it was
    checked.

    Two threads: one waits for the transport, one checks what it brings and keeps the deadline, even
    where a call into a library does not come back. Whatever goes wrong fails the returned update,
    closes the session and, in the middle of the bytes, the transport, and leaves the old version
    serving.

    Args:
        manager: whose session it is; raises `WeightUpdateError` at once if one is open.
        transport: what brings the buckets.
        timeout: seconds from now by which everything must have arrived.
        options: see `InferenceEngine.update_weights`; `version` None: the transport's, or counted
            up.
    """
    deadline = Deadline(timeout)
    update = manager.begin(**options)
    version = options.get("version")

    def receive() -> None:
        try:
            receive_into(manager, transport, update, deadline, version=version, end=True)
        except Exception as problem:  # the update has it, if it has begun
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
    """Run a transport into the session that is open, on the calling thread; returns the version
    that the peer named. With `end` also end the session, as `version` or else the peer's.

    Whatever goes wrong closes the session and, in the middle of the bytes, the transport; so does a
    session that is cancelled meanwhile. Raises `WeightUpdateError`.
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
        # first: the thread that sees the update failed may begin the next one with this transport
        arrivals.stop()
        manager.cancel(_reason(problem), of=update)
        raise
    return theirs


def _reason(problem: Exception) -> str:
    return (
        str(problem)
        if isinstance(problem, WeightUpdateError)
        else f"weights cannot be received: {problem!r}"
    )


class _Arrivals:
    """What a transport brings, on a thread of its own: its version, then its buckets."""

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
        self._settled = False  # the transport has nothing under way
        self._buckets = 0
        threading.Thread(target=self._bring, name="weight-transport", daemon=True).start()

    def take(self) -> tuple[Kind, Any]:
        """What came next. Raises what the transport raised, what the update was cancelled with, and
        `WeightTransferError` at the deadline.
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
                    came = (
                        f"the weights did not arrive within {self.deadline.seconds:g} s; "
                        f"{self._buckets} buckets did."
                    )
                    raise WeightTransferError(came) from None
        self._settled = kind in ("done", "failed")
        self._buckets += kind == "bucket"
        if kind == "failed":
            raise content
        return kind, content

    def stop(self) -> None:
        """Take no more; what is under way is torn down, unless that waits for a call that does not
        come back. Once: the transport may be another update's afterwards.
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
            # works that they hold would keep their group's sockets open
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
