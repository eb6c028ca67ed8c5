"""`OpenRequests`: the unfinished requests of an engine client."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from nano_inference.remote.messages import AskedParts
from nano_inference.types import Delta


class Receiver(Protocol):
    """Receives the deltas of a request."""

    @property
    def name(self) -> str | None:
        """Name by which `abort` finds the request."""
        ...

    def put(self, delta: Delta) -> None:
        """Take in a delta."""
        ...

    def fail(self, problem: Exception) -> None:
        """Take in the error that ended the request."""
        ...


@dataclass(slots=True)
class OpenRequest:
    """An unfinished request.

    Attributes:
        receiver: Receives the request's deltas.
        samples_left: Number of unfinished samples.
        asked: Parts that all samples of the request share.
        name: Name of the receiver when the request was opened.
    """

    receiver: Receiver
    samples_left: int
    asked: AskedParts
    name: str | None


class OpenRequests:
    """Requests by id.

    Every method takes constant time, except iteration and `named(None)`.

    Attributes:
        num_samples: Number of unfinished samples of all requests.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._by_id: dict[int, OpenRequest] = {}
        self._ids: dict[str, set[int]] = {}  # by name

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def add(self, request_id: int, receiver: Receiver, num_samples: int, asked: AskedParts) -> None:
        """Open a request."""
        name = receiver.name
        self._by_id[request_id] = OpenRequest(receiver, num_samples, asked, name)
        self.num_samples += num_samples
        if name is not None:
            self._ids.setdefault(name, set()).add(request_id)

    def get(self, request_id: int) -> OpenRequest | None:
        """Return the request with this id, or None if it has ended."""
        return self._by_id.get(request_id)

    def remove(self, request_id: int) -> OpenRequest | None:
        """Remove a request with all its samples and return it, or None if it had ended."""
        request = self._by_id.pop(request_id, None)
        if request is None:
            return None
        self.num_samples -= request.samples_left
        if request.name is not None:
            ids = self._ids[request.name]
            ids.discard(request_id)
            if not ids:
                del self._ids[request.name]
        return request

    def end_sample(self, request_id: int) -> None:
        """End one sample of an open request. The last sample ends the request."""
        request = self._by_id[request_id]
        request.samples_left -= 1
        self.num_samples -= 1
        if not request.samples_left:
            self.remove(request_id)

    def has_name(self, name: str | None) -> bool:
        """Return True if a request with this name is open."""
        return name in self._ids

    def named(self, names: Collection[str] | None) -> list[int]:
        """Return the ids of the requests with these names (None: of all), oldest first."""
        if names is None:
            return list(self._by_id)
        return sorted(each for name in set(names) for each in self._ids.get(name, ()))
