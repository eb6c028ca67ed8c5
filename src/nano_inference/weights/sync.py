"""New weights for a live model: staged, checked, then written in place between two steps.

`WeightSyncManager` orders updates and owns the version. `engine/weight_updates.py` is how an engine
takes them; `EngineLoop` says when an update is written, `core/versions.py` how sequences change.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from nano_inference.core.updates import UpdateQueue
from nano_inference.errors import WeightUpdateConflict, WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.types import UpdateOptions
from nano_inference.weights.sources import EMPTY, Weights, fill
from nano_inference.weights.staging import Bucket, Hold, WeightSession, version_of
from nano_inference.weights.update import OtherRanks, WeightSet, WeightUpdate


class WeightSyncManager:
    """Owns the version of one model's weights, the updates that wait for it, and the session that
    is open.

    A state dict uses the checkpoint's names, or transformers' for all experts of a layer, and may
    name only what changed. Everything is checked before anything is written; a refused update
    leaves the old version serving.

    Args:
        model: whose parameters are written.
        announce: called with each update that is queued, by the thread that queues it and under
            `lock`.
        room: bytes that an update which begins now may take of the model's device; what is beyond
            waits on the CPU.
        shares: the other ranks that hold parts of the model, if there are any.
        with_others: the lock under which other engines agree to write an update together, and
            whether they have agreed on the version; None: no other engine writes.
        asleep: whether the memory of the weights was given back, and cannot be read.
        given_up: called under `lock` when updates that were announced will not be written.
        set_aside: keeps the weights as they are as the weight set `previous`, before an update is
            written. Raises `MemoryError` or `RuntimeError`.

    Attributes:
        version: the version that serves.
        shapes: of every tensor that an update may name; some names are parts of others.
        num_tensors: of the checkpoint.
        reserved: why no update may begin, or be queued; None: any may.
        pending: updates that were checked and are not written yet, oldest first.
        lock: held while an update is queued, announced or written; a caller that queues and
            announces in two steps holds it.
    """

    def __init__(
        self,
        model: Decoder,
        announce: Callable[[WeightUpdate], None] | None = None,
        room: Callable[[], float] = lambda: math.inf,
        shares: OtherRanks | None = None,
        with_others: tuple[AbstractContextManager[Any], Callable[[int], bool]] | None = None,
        asleep: Callable[[], bool] = lambda: False,
        given_up: Callable[[], None] = lambda: None,
        set_aside: Callable[[WeightUpdate], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.weights = WeightSet(model, shares)
        self.shapes, self.num_tensors = self.weights.shapes, len(self.weights.names)
        self.version = 0
        self.pending: UpdateQueue[WeightUpdate] = UpdateQueue()
        self.lock = threading.RLock()
        self._room, self._announce, self._asleep = room, announce, asleep
        self._given_up, self._set_aside = given_up, set_aside
        self._agreeing, self._is_agreed = with_others or (nullcontext(), lambda _: False)
        self._newest = 0
        self._open: WeightSession | None = None
        self.reserved: str | None = None
        self._closed: str | None = None  # why nothing will be written any more

    @property
    def newest(self) -> int:
        """Version of the newest update, pending or applied: the next one's must be larger."""
        return self._newest

    # -- updates in one piece ----------------------------------------------------------------------

    def stage(
        self,
        weights: Weights,
        *,
        copy: bool = True,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdate:
        """Check an update and queue it, whether a session is open or not.

        Args:
            weights: a state dict, the path of a folder or file of safetensors, or buckets one after
                the other: state dicts and patches.
            copy: the tensors are the caller's again when this returns. Without it a state dict is
                only borrowed until `finish`; buckets are copied all the same.
            options: see `InferenceEngine.update_weights`.

        Raises `WeightUpdateError`, with nothing changed.
        """
        session = self._new_session(options)
        try:
            hold = Hold.COPY if copy else Hold.BORROW
            if isinstance(weights, Mapping):
                session.add(cast(Bucket, weights), hold)
            else:
                fill(session, weights, hold)
            with self.lock:
                self._require_whole(session, session.version)
                return self._queue(session, session.version)
        except Exception as problem:
            if session.update not in self.pending:  # other ranks may have parts of it
                session.update.fail(_as_refusal(problem))
            raise

    def keep(self, update: WeightUpdate) -> None:
        """Copy what an update borrowed, if it still waits."""
        with self.lock, torch.no_grad():
            if update in self.pending:
                update.copy_borrowed()

    # -- sessions ----------------------------------------------------------------------------------

    def begin(self, **options: Unpack[UpdateOptions]) -> WeightUpdate:
        """Open the session; returns the update that it will become. Options are those of `stage`.

        Raises `WeightUpdateError` if one is open already; that one goes on.
        """
        with self.lock:
            self._require_not_closed()
            if self._open is not None:
                raise WeightUpdateConflict(
                    "a weight session is open already; end() or cancel() it first."
                )
            self._open = self._new_session(options)
            return self._open.update

    def receive(
        self,
        bucket: Bucket,
        *,
        copy: bool = True,
        of: WeightUpdate | None = None,
        undo: Callable[[], Any] = nullcontext,
    ) -> None:
        """Check a bucket and put it aside.

        Args:
            bucket: a state dict, or patches.
            copy: the tensors are the caller's again when this returns; without it the caller gives
                them away.
            of: what `begin` returned; refuses a session that another caller has opened since.
            undo: called before the update is seen to have failed, and the next one can begin.

        Raises `WeightUpdateError`; the session is then closed.
        """
        session = self._require_open(of)
        try:
            session.add(bucket, Hold.COPY if copy else Hold.TAKE)
        except Exception as problem:
            error = _as_refusal(problem)
            undo()
            self._close(session, error)
            if error is problem:
                raise
            raise error from problem
        if session.update.error is not None:  # cancelled meanwhile
            raise session.update.error

    def end(self, *, version: int | None = None, of: WeightUpdate | None = None) -> WeightUpdate:
        """Check what only the whole tells, queue the update and close the session.

        Args:
            version: as in `begin`, where it is learned late.
            of: as in `receive`.

        Raises `WeightUpdateError`, with nothing changed.
        """
        with self._checked(version, of) as (session, number):
            update = self._queue(session, number)
            self._open = None
            return update

    def check(self, *, version: int | None = None, of: WeightUpdate | None = None) -> None:
        """Check what `end` would, and leave the session open: then `end` of the same refuses
        nothing.

        Raises `WeightUpdateError`; the session is then closed.
        """
        with self._checked(version, of):
            pass

    def cancel(
        self, reason: str = "the weight session was cancelled.", *, of: WeightUpdate | None = None
    ) -> None:
        """Forget the open session, if there is one; with `of` only if it is the one that makes this
        update.
        """
        with self.lock:
            if self._open is not None and of in (None, self._open.update):
                self._close(self._open, WeightUpdateError(reason))

    # -- writing -----------------------------------------------------------------------------------

    def finish(self) -> int | None:
        """Write the oldest pending update; returns the version that now serves.

        Nothing may be in flight. Raises `IndexError` where none is pending.
        """
        return self.apply(self.pending[0])

    def apply(self, update: WeightUpdate, *, keep_old: bool = False) -> int | None:
        """Write a pending update, with nothing in flight. Updates are written in their order: the
        loop passes the oldest.

        Args:
            update: the oldest pending update.
            keep_old: keep the old weights as the weight set `previous`.

        Returns the version that serves now; None: the update was withdrawn, or there is no memory
        for the old weights.
        """
        try:
            if keep_old and update in self.pending:
                self._set_aside(update)
        except (MemoryError, RuntimeError) as problem:  # torch's way to say that memory is out
            with self.lock:
                if update in self.pending:
                    reason = f"there is no memory to keep the old weights aside: {problem}"
                    self._give_up(update, WeightUpdateError(reason))
            return None
        with self.lock, torch.no_grad():
            if update not in self.pending:
                return None
            self.pending.remove(update)
            try:
                update.write_to(self.model.params)
            except Exception as problem:
                # the device is gone: nothing that was checked can be refused
                update.fail(
                    WeightUpdateError(
                        f"weight version {update.version} could not be written: {problem!r}"
                    )
                )
                raise
            self.version = update.version
            update.succeed()
            return self.version

    def refuse(self, reason: str) -> None:
        """Give up the oldest pending update, and those after it that build on it."""
        with self.lock:
            self._give_up(self.pending[0], WeightUpdateError(reason))

    def withdraw(self, update: WeightUpdate, reason: WeightUpdateError) -> bool:
        """Give an update up that does not serve yet, wherever it is; whether it was in time. Its
        version is free again.

        Those behind it that build on it fail too.
        """
        with self._agreeing, self.lock:
            if update.done():
                return False
            if self._open is not None and self._open.update is update:
                self._close(self._open, reason)
                return True
            # others are about to write it, and so does this engine
            if self._is_agreed(update.version):
                return False
            self._give_up(update, reason)
            self._given_up()
            return True

    def reserve(self, why: str) -> bool:
        """Refuse updates from now on, for this reason; False where one is on its way."""
        with self.lock:
            if self.pending or self.is_open:
                return False
            self.reserved = why
            return True

    def stage_reserved(self, weights: Weights, **options: Unpack[UpdateOptions]) -> WeightUpdate:
        """`stage` what is borrowed, past `reserved`: for its owner, who asks for one at a time."""
        with self.lock:  # so no other update is queued meanwhile
            why, self.reserved = self.reserved, None
            try:
                return self.stage(weights, copy=False, **options)
            finally:
                self.reserved = why

    def close(self, reason: str) -> None:
        """Nothing is written from now on: what waits or is still received fails, and so does what
        comes later.
        """
        with self.lock:
            self._closed = reason
            while self.pending:
                self.refuse(f"{reason}, before the update was applied.")
            self.cancel(f"{reason}, before the weights had arrived.")

    def checksum(self) -> dict[str, str]:
        """SHA-256 of each checkpoint tensor that serves: its bytes row by row, in the dtype that
        the engine holds.
        """
        with self.lock:
            return self.weights.checksum()

    def tensor(self, name: str) -> Tensor:
        """One checkpoint tensor that serves; see `state_dict`. Raises `WeightUpdateError`."""
        with self.lock:
            return self.weights.tensor(name)

    def state_dict(self) -> dict[str, Tensor]:
        """All that serves, by checkpoint name: views, or copies where weights are packed."""
        with self.lock:
            return self.weights.state_dict()

    def start_sync(self, new_weights: Weights) -> None:
        """Stage an update; it is applied by a later `maybe_finish_sync`, or by the next step of the
        engine.
        """
        self.stage(new_weights)

    def maybe_finish_sync(self) -> bool:
        """Apply the oldest pending update, if there is one. An engine does so itself:
        `WeightUpdateError`.
        """
        self._require_own()
        if not self.pending:
            return False
        self.finish()
        return True

    def sync_blocking(self, new_weights: Weights) -> None:
        """Stage an update and apply it, after those that are pending. Not of an engine:
        `WeightUpdateError`.
        """
        self._require_own()
        self.stage(new_weights, copy=False)
        while self.maybe_finish_sync():
            pass

    # -- inside ------------------------------------------------------------------------------------

    def _require_own(self) -> None:
        # its cache and its samples would not know of the new version
        if self._announce is not None:
            raise WeightUpdateError("these weights are an engine's; call its update_weights.")

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._open is not None

    def _new_session(self, options: UpdateOptions) -> WeightSession:
        self._require_not_reserved()
        self.check_version(options.get("version"))
        return WeightSession(self.weights, room=self._room(), **options)

    @contextmanager
    def _checked(
        self, version: int | None, of: WeightUpdate | None
    ) -> Iterator[tuple[WeightSession, int | None]]:
        """The open session, whole and checked, and the version that it asks for. What is refused
        closes it.
        """
        with self.lock:
            session = self._require_open(of)
            number = session.version if version is None else version
            try:
                self._require_whole(session, number)
                yield session, number
            except WeightUpdateError as problem:
                self._close(session, problem)
                raise

    def _require_open(self, of: WeightUpdate | None) -> WeightSession:
        session = self._open
        if session is None or of not in (None, session.update):
            ended = of.error if of is not None else None
            raise ended or WeightUpdateConflict("no weight session is open; begin() opens one.")
        return session

    def _close(self, session: WeightSession, problem: WeightUpdateError) -> None:
        with self.lock:
            session.update.fail(problem)
            if self._open is session:
                self._open = None

    def _give_up(self, failed: WeightUpdate, reason: WeightUpdateError) -> None:
        """Fail a pending update and those right after it that do not bring every tensor: they were
        made to follow it. All of them leave the queue.
        """
        _, *later = self.pending.since(failed)
        self.pending.remove(failed)
        failed.fail(reason)
        builds = WeightUpdateError(
            f"weight version {failed.version} failed, and this one builds on it."
        )
        for update in later:
            if update.is_whole(self.weights.names):
                break
            self.pending.remove(update)
            update.fail(builds)
        self._newest = max([self.version, *(each.version for each in self.pending.all())])

    def _require_not_closed(self) -> None:
        if self._closed is not None:
            raise WeightUpdateError(f"{self._closed}: there is nothing to update.")

    def _require_not_reserved(self) -> None:
        if self.reserved is not None:
            raise WeightUpdateConflict(self.reserved)

    def _require_whole(self, session: WeightSession, version: int | None) -> None:
        self._require_not_closed()
        self._require_not_reserved()  # it may have begun before
        if session.is_empty:
            raise WeightUpdateError(EMPTY)
        missing = session.missing() if session.complete else []
        if missing:
            raise WeightUpdateError(
                f"{missing[0]!r} is missing ({len(missing)} of {self.num_tensors} are); "
                "complete=True asks for every one."
            )
        session.settle(self.pending.all(), self._asleep())
        self.check_version(version)

    def _queue(self, session: WeightSession, version: int | None) -> WeightUpdate:
        update = session.update
        if self.weights.shares is not None:
            self.weights.shares.settle(update)
        number = self._newest + 1 if version is None else version
        update.stage(number, session.staged, session.staged_bytes, session.whole)
        self._newest = number
        self.pending.append(update)
        if self._announce is not None:
            self._announce(update)
        return update

    def check_version(self, version: int | None) -> None:
        """Raise `WeightUpdateError` unless a new version may be called that."""
        if version is None:
            return
        version_of(version, "the update")
        if version <= self._newest:
            raise WeightUpdateError(
                f"version={version} is not newer than {self._newest}; leave it out or raise it."
            )


def _as_refusal(problem: Exception) -> WeightUpdateError:
    if isinstance(problem, WeightUpdateError):
        return problem
    return WeightUpdateError(f"a bucket could not be read: {problem!r}")
