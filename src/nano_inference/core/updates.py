"""Weight updates as the loop sees them: the queue, and the interface to the weights."""

from typing import Any, Generic, Protocol, TypeVar

from nano_inference.types import KvPolicy


class Update(Protocol):
    """A validated weight update.

    Attributes:
        kv_policy: Treatment of running requests when the update is written. None means `"keep"`.
    """

    kv_policy: KvPolicy | None

    @property
    def version(self) -> int:
        """Version number of the new weights."""
        ...


U = TypeVar("U", bound=Update)


def policy_of(update: Update) -> KvPolicy:
    """Return the treatment of running requests when an update is written."""
    return "keep" if update.kv_policy is None else update.kv_policy


class _Place:
    """State of a queued update."""

    def __init__(self) -> None:
        self.has_arrived = False


class UpdateQueue(Generic[U]):
    """Validated updates that were neither written nor cancelled, oldest first.

    A thread that queues an update appends it immediately and posts a message. The loop counts the
    update from that message on (`arrive`). Requests that were posted before the message therefore
    come before the update.
    """

    def __init__(self) -> None:
        # other threads change the queue while the loop reads it, so the loop reads copies
        self._places: dict[U, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, update: U) -> bool:
        return update in self._places

    def __getitem__(self, index: int) -> U:
        return self.all()[index]

    def all(self) -> list[U]:
        """Return all updates, including those whose message the loop has not read."""
        return list(self._places.copy())

    def since(self, update: U) -> list[U]:
        """Return an update and all later ones. Raise `ValueError` if it is not queued."""
        updates = self.all()
        return updates[updates.index(update) :]

    def arrived(self) -> list[U]:
        """Return the updates whose message the loop has read."""
        if not self._places:
            return []
        places = self._places.copy()
        return [update for update, state in places.items() if state.has_arrived]

    def append(self, update: U) -> None:
        """Append the newest update."""
        self._places[update] = _Place()

    def arrive(self, update: U) -> None:
        """Count an update as arrived, unless it was cancelled."""
        if (state := self._places.get(update)) is not None:
            state.has_arrived = True

    def remove(self, update: U) -> None:
        """Remove an update that was written or cancelled."""
        del self._places[update]

    def clear(self) -> None:
        """Remove all updates."""
        self._places.clear()


class Weights(Protocol):
    """The policy's weights, which updates change."""

    @property
    def pending(self) -> UpdateQueue[Any]:
        """Queue of updates to write."""
        ...

    def apply(self, update: Any, *, keep_old: bool) -> int | None:
        """Write an update and remove it from the queue. Nothing may be in flight.

        Return the version that is now live, or None if the update was cancelled.

        Args:
            update: The oldest update of `pending`.
            keep_old: True to keep the old weights as the weight set `previous`.
        """
        ...


class FixedWeights:
    """Weights that are never updated."""

    def __init__(self) -> None:
        self.pending: UpdateQueue[Any] = UpdateQueue()

    def apply(self, update: Any, *, keep_old: bool) -> int | None:
        """Raise `RuntimeError`, because there are no updates."""
        raise RuntimeError("this loop does not support weight updates; pass LoopHooks.weights.")
