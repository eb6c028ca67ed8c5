"""Runs a transport into a session of the manager, on threads of its own and with a deadline that
holds.
"""

import queue
import threading
import traceback
from typing import Any, Literal

from nano_inference.engine.transports.interface import Deadline, Shapes, WeightTransport
from nano_inference.engine.weights.sync import WeightSyncManager
from nano_inference.engine.weights.update import WeightUpdate
from nano_inference.errors import WeightTransferError, WeightUpdateError
from nano_inference.parallel.deadline import step_back
from nano_inference.types import KvPolicy

AHEAD = 2  # buckets that may wait while one is staged
LOOK = 0.05  # seconds between two looks at whether the session was cancelled
GRACE = 0.25  # seconds that a transport has to say itself what is late

Kind = Literal["version", "bucket", "done", "failed"]


def receive_update(
    manager: WeightSyncManager,
    transport: WeightTransport,
    *,
    version: int | None = None,
    complete: bool = False,
    check_finite: bool = False,
    kv_policy: KvPolicy | None = None,
    timeout: float = 300.0,
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
        version: number of the new version; None: the transport's, or counted up.
        complete: refuse an update that lacks a tensor.
        check_finite: refuse NaN and infinite values.
        kv_policy: what becomes of running requests.
        timeout: seconds from now by which everything must have arrived.
    """
    deadline = Deadline(timeout)
    update = manager.begin(
        version=version, complete=complete, check_finite=check_finite, kv_policy=kv_policy
    )

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
