"""New weights for a live model: staged, checked, then written in place between two steps.

`WeightSyncManager` orders updates and owns the version. `engine/weight_updates.py` connects it to
an engine, `EngineLoop` decides when an update is written, and `core/versions.py` changes the
sequences.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Unpack, cast

from nano_inference.arrays import Tensor, as_torch
from nano_inference.core.updates import UpdateQueue
from nano_inference.errors import WeightUpdateConflict, WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.types import UpdateOptions
from nano_inference.weights.sources import EMPTY, Weights, fill
from nano_inference.weights.staging import Bucket, Hold, WeightSession, version_of
from nano_inference.weights.update import OtherRanks, WeightSet, WeightUpdate


class WeightSyncManager:
    """Manager of one model's weight version, its pending updates, and its open session.

    A state dict uses the checkpoint's names, or transformers' for all experts of a layer, and may
    name only changed tensors. Everything is checked before anything is written. After a rejected
    update the old version stays live.

    Args:
        model: Model whose parameters are written.
        announce: Function called with each queued update, by the thread that queues it and under
            `lock`.
        room: Function that returns the bytes that a new update may take on the model's device.
            Further tensors are staged on the CPU.
        shares: Other ranks that hold parts of the model, if any.
        with_others: Lock under which engines agree to write an update together, and a function that
            returns True if they agreed on a version. None if no other engine takes part.
        asleep: Function that returns True if the memory of the weights is released and cannot be
            read.
        given_up: Function called under `lock` when announced updates will not be written.
        set_aside: Function that keeps the current weights as the weight set `previous` before an
            update is written. It may raise `MemoryError` or `RuntimeError`.

    Attributes:
        version: Live version.
        shapes: Shape of every tensor that an update may name. Some tensors are parts of others.
        num_tensors: Number of checkpoint tensors.
        reserved: Reason why updates are rejected. None if they are allowed.
        pending: Checked updates that are not written yet, oldest first.
        lock: Lock held while an update is queued, announced or written. Hold it to queue and
            announce in separate steps.
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
        self._closed: str | None = None  # reason why no update will be written any more

    @property
    def newest(self) -> int:
        """Version of the newest update, pending or applied. The next version must be higher."""
        return self._newest

    # -- whole updates -----------------------------------------------------------------------------

    def stage(
        self,
        weights: Weights,
        *,
        copy: bool = True,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdate:
        """Check an update and queue it, even while a session is open. Raises `WeightUpdateError`,
        with nothing changed.

        Args:
            weights: State dict, path of a folder or file of safetensors, or iterable of buckets
                (state dicts and patches).
            copy: Copy the tensors, so that the caller may change them afterwards. Otherwise a state
                dict is borrowed until `finish`. Buckets are always copied.
            options: Options of `InferenceEngine.update_weights`.
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
            if session.update not in self.pending:  # other ranks may hold parts of it
                session.update.fail(_as_refusal(problem))
            raise

    def keep(self, update: WeightUpdate) -> None:
        """Copy the borrowed tensors of an update, if it is still pending."""
        with self.lock:
            if update in self.pending:
                update.copy_borrowed()

    # -- sessions ----------------------------------------------------------------------------------

    def begin(self, **options: Unpack[UpdateOptions]) -> WeightUpdate:
        """Open a session and return its update. Options are those of `stage`.

        Raises `WeightUpdateError` if a session is already open. That session continues.
        """
        with self.lock:
            self._require_not_closed()
            if self._open is not None:
                raise WeightUpdateConflict(
                    "a weight session is already open; call end() or cancel() first."
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
        """Check a bucket and stage it. Raises `WeightUpdateError`, which closes the session.

        Args:
            bucket: State dict, or patches.
            copy: Copy the tensors, so that the caller may change them afterwards. Otherwise the
                session takes ownership of them.
            of: Update that `begin` returned. A session opened since then by another caller is
                rejected.
            undo: Function called before the update is marked as failed and the next one can begin.
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
        """Check the complete update, queue it and close the session. Raises `WeightUpdateError`,
        with nothing changed.

        Args:
            version: Version as in `begin`, if it became known later.
            of: Update, as in `receive`.
        """
        with self._checked(version, of) as (session, number):
            update = self._queue(session, number)
            self._open = None
            return update

    def check(self, *, version: int | None = None, of: WeightUpdate | None = None) -> None:
        """Check the same as `end` and leave the session open. A following `end` with the same
        arguments rejects nothing.

        Raises `WeightUpdateError`, which closes the session.
        """
        with self._checked(version, of):
            pass

    def cancel(
        self, reason: str = "the weight session was cancelled.", *, of: WeightUpdate | None = None
    ) -> None:
        """Cancel the open session, if there is one. With `of`, only if it is the session of that
        update.
        """
        with self.lock:
            if self._open is not None and of in (None, self._open.update):
                self._close(self._open, WeightUpdateError(reason))

    # -- writing -----------------------------------------------------------------------------------

    def finish(self) -> int | None:
        """Write the oldest pending update and return the version that is live then.

        No step may be in flight. Raises `IndexError` if no update is pending.
        """
        return self.apply(self.pending[0])

    def apply(self, update: WeightUpdate, *, keep_old: bool = False) -> int | None:
        """Write the oldest pending update, with no step in flight. Return the version that is live
        then, or None if the update was withdrawn or there is no memory for the old weights.

        Args:
            update: Oldest pending update.
            keep_old: Keep the old weights as the weight set `previous`.
        """
        try:
            if keep_old and update in self.pending:
                self._set_aside(update)
        except (MemoryError, RuntimeError) as problem:  # torch raises RuntimeError out of memory
            with self.lock:
                if update in self.pending:
                    reason = (
                        f"not enough memory to keep the old weights: {problem}; use a "
                        "kv_policy other than 'finish_old'."
                    )
                    self._give_up(update, WeightUpdateError(reason))
            return None
        with self.lock:
            if update not in self.pending:
                return None
            self.pending.remove(update)
            try:
                update.write_to(self.model.params)
            except Exception as problem:
                # the device failed, since checked changes cannot be rejected
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
        """Fail the oldest pending update, and the later ones that build on it."""
        with self.lock:
            self._give_up(self.pending[0], WeightUpdateError(reason))

    def withdraw(self, update: WeightUpdate, reason: WeightUpdateError) -> bool:
        """Cancel an update that is not live yet, and free its version number. Return False if it is
        too late.

        Later updates that build on it fail too.
        """
        with self._agreeing, self.lock:
            if update.done():
                return False
            if self._open is not None and self._open.update is update:
                self._close(self._open, reason)
                return True
            # the other engines are about to write it, so this engine must write it too
            if self._is_agreed(update.version):
                return False
            self._give_up(update, reason)
            self._given_up()
            return True

    def reserve(self, why: str) -> bool:
        """Reject updates from now on, for this reason. Return False if an update is pending or a
        session open.
        """
        with self.lock:
            if self.pending or self.is_open:
                return False
            self.reserved = why
            return True

    def stage_reserved(self, weights: Weights, **options: Unpack[UpdateOptions]) -> WeightUpdate:
        """Stage a borrowed update despite `reserved`. Only the caller of `reserve` may use it, for
        one update at a time.
        """
        with self.lock:  # prevents other updates meanwhile
            why, self.reserved = self.reserved, None
            try:
                return self.stage(weights, copy=False, **options)
            finally:
                self.reserved = why

    def close(self, reason: str) -> None:
        """Fail all pending updates, the open session and all later updates."""
        with self.lock:
            self._closed = reason
            while self.pending:
                self.refuse(f"{reason} before the update was applied.")
            self.cancel(f"{reason} before the weights had arrived.")

    def checksum(self) -> dict[str, str]:
        """Return the SHA-256 of each live checkpoint tensor, over its bytes row by row in the
        stored dtype.
        """
        with self.lock:
            return self.weights.checksum()

    def content_hash(self) -> str:
        """Return one SHA-256 of all live checkpoint tensors (`WeightSet.content_hash`)."""
        with self.lock:
            return self.weights.content_hash()

    def tensor(self, name: str) -> Tensor:
        """Return one live checkpoint tensor, as in `state_dict`. Raises `WeightUpdateError`."""
        with self.lock:
            return as_torch(self.weights.tensor(name))

    def state_dict(self) -> dict[str, Tensor]:
        """Return all live tensors by checkpoint name: views, or copies if weights are packed.

        They are torch's, also if the engine itself computes without torch.
        """
        with self.lock:
            return {name: as_torch(value) for name, value in self.weights.state_dict().items()}

    def start_sync(self, new_weights: Weights) -> None:
        """Stage an update. A later `maybe_finish_sync` or the engine's next step applies it."""
        self.stage(new_weights)

    def maybe_finish_sync(self) -> bool:
        """Apply the oldest pending update, and return False if there is none. Raises
        `WeightUpdateError` for the weights of an engine, which applies updates itself.
        """
        self._require_own()
        if not self.pending:
            return False
        self.finish()
        return True

    def sync_blocking(self, new_weights: Weights) -> None:
        """Stage an update and apply all pending updates. Raises `WeightUpdateError` for the weights
        of an engine.
        """
        self._require_own()
        self.stage(new_weights, copy=False)
        while self.maybe_finish_sync():
            pass

    # -- inside ------------------------------------------------------------------------------------

    def _require_own(self) -> None:
        # the engine's cache and samples would miss the new version
        if self._announce is not None:
            raise WeightUpdateError("the weights belong to an engine; call its update_weights.")

    @property
    def is_open(self) -> bool:
        """True if a session is open."""
        return self._open is not None

    def _new_session(self, options: UpdateOptions) -> WeightSession:
        self._require_not_reserved()
        self.check_version(options.get("version"))
        return WeightSession(self.weights, room=self._room(), **options)

    @contextmanager
    def _checked(
        self, version: int | None, of: WeightUpdate | None
    ) -> Iterator[tuple[WeightSession, int | None]]:
        """Yield the open session, complete and checked, and its requested version. A rejection
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
            raise ended or WeightUpdateConflict("no weight session is open; call begin() first.")
        return session

    def _close(self, session: WeightSession, problem: WeightUpdateError) -> None:
        with self.lock:
            session.update.fail(problem)
            if self._open is session:
                self._open = None

    def _give_up(self, failed: WeightUpdate, reason: WeightUpdateError) -> None:
        """Fail a pending update and the following ones that build on it, and remove them from the
        queue. An update that replaces every tensor ends the run.
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
            raise WeightUpdateError(f"{self._closed}; build a new engine.")

    def _require_not_reserved(self) -> None:
        if self.reserved is not None:
            raise WeightUpdateConflict(self.reserved)

    def _require_whole(self, session: WeightSession, version: int | None) -> None:
        self._require_not_closed()
        self._require_not_reserved()  # the session may be older than the reservation
        if session.is_empty:
            raise WeightUpdateError(EMPTY)
        missing = session.missing() if session.complete else []
        if missing:
            raise WeightUpdateError(
                f"{missing[0]!r} is missing ({len(missing)} of {self.num_tensors} are); "
                "complete=True requires all tensors."
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
        """Raise `WeightUpdateError` unless a new update may have this version."""
        if version is None:
            return
        version_of(version, "the update")
        if version <= self._newest:
            raise WeightUpdateError(
                f"version={version} must be higher than {self._newest}; omit it or raise it."
            )


def _as_refusal(problem: Exception) -> WeightUpdateError:
    if isinstance(problem, WeightUpdateError):
        return problem
    return WeightUpdateError(f"a bucket could not be read: {problem!r}")
