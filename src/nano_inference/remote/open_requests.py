"""`OpenRequests`: the requests of an engine's client that have not ended."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from nano_inference.remote.messages import AskedParts
from nano_inference.types import Delta


class Receiver(Protocol):
    """Where a request's deltas go."""

    @property
    def name(self) -> str | None:
        """By which `abort` knows the request."""
        ...

    def put(self, delta: Delta) -> None:
        """A delta has come."""
        ...

    def fail(self, problem: Exception) -> None:
        """Nothing more will come."""
        ...


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        receiver: where its deltas go.
        samples_left: of its samples, how many have not ended.
        asked: what its samples have in common.
        name: of the receiver, when the request was opened.
    """

    receiver: Receiver
    samples_left: int
    asked: AskedParts
    name: str | None


class OpenRequests:
    """Requests by id. Each method takes the same time however many there are, except iteration and
    `named` without names.

    Attributes:
        num_samples: of all of them, those that have not ended.
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
        """The request of this id; None: it has ended."""
        return self._by_id.get(request_id)

    def remove(self, request_id: int) -> OpenRequest | None:
        """End a request with all its samples; None: it had ended."""
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
        """End one sample of an open request, and the request with its last one."""
        request = self._by_id[request_id]
        request.samples_left -= 1
        self.num_samples -= 1
        if not request.samples_left:
            self.remove(request_id)

    def has_name(self, name: str | None) -> bool:
        """Whether a request of this name has not ended."""
        return name in self._ids

    def named(self, names: Collection[str] | None) -> list[int]:
        """Ids of the requests of these names, the oldest first; None: of all."""
        if names is None:
            return list(self._by_id)
        return sorted(each for name in set(names) for each in self._ids.get(name, ()))
