"""Weight updates as the loop sees them: the queue of those that wait, and who writes them."""

from typing import Any, Generic, Protocol, TypeVar

from nano_inference.types import KvPolicy


class Update(Protocol):
    """A weight update that was checked.

    Attributes:
        kv_policy: what becomes of running requests when it is written; None: `"keep"`.
    """

    kv_policy: KvPolicy | None

    @property
    def version(self) -> int:
        """The version that it will serve as."""
        ...


U = TypeVar("U", bound=Update)


def policy_of(update: Update) -> KvPolicy:
    """Return what becomes of running requests when an update is written."""
    return "keep" if update.kv_policy is None else update.kv_policy


class _Place:
    """The place of an update in the queue."""

    def __init__(self) -> None:
        self.has_arrived = False


class UpdateQueue(Generic[U]):
    """The updates that were checked and neither written nor given up, oldest first.

    A thread that queues an update appends it at once and posts a message. The loop counts the
    update from that message on (`arrive`), so requests that were posted before it come before it.
    """

    def __init__(self) -> None:
        # other threads add and remove while the loop looks: it reads copies
        self._places: dict[U, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, update: U) -> bool:
        return update in self._places

    def __getitem__(self, place: int) -> U:
        return self.all()[place]

    def all(self) -> list[U]:
        """Return all updates, also those whose message the loop has not read."""
        return list(self._places.copy())

    def since(self, update: U) -> list[U]:
        """Return an update and those after it. Raises `ValueError` where it does not wait."""
        every = self.all()
        return every[every.index(update) :]

    def arrived(self) -> list[U]:
        """Return the updates whose message the loop has read."""
        if not self._places:
            return []
        places = self._places.copy()
        return [update for update, place in places.items() if place.has_arrived]

    def append(self, update: U) -> None:
        """Add the newest update."""
        self._places[update] = _Place()

    def arrive(self, update: U) -> None:
        """Count an update as arrived, unless it was given up meanwhile."""
        if (place := self._places.get(update)) is not None:
            place.has_arrived = True

    def remove(self, update: U) -> None:
        """Take out an update that was written or given up."""
        del self._places[update]

    def clear(self) -> None:
        """Take out all updates."""
        self._places.clear()


class Weights(Protocol):
    """The policy's weights, which updates change."""

    @property
    def pending(self) -> UpdateQueue[Any]:
        """The updates that wait."""
        ...

    def apply(self, update: Any, *, keep_old: bool) -> int | None:
        """Write an update with nothing in flight, and take it out of the queue.

        Args:
            update: the oldest one of `pending`.
            keep_old: keep the old weights as the weight set `previous`.

        Returns the version that serves now; None: the update was given up.
        """
        ...


class FixedWeights:
    """Weights without updates."""

    def __init__(self) -> None:
        self.pending: UpdateQueue[Any] = UpdateQueue()

    def apply(self, update: Any, *, keep_old: bool) -> int | None:
        """Raise `RuntimeError`: there is no update."""
        raise RuntimeError("this loop's weights are never updated.")
