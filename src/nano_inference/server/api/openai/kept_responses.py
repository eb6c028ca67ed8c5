"""Responses that a later request may go on from, in the memory of the server's process."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.server.api.shared.answers import encode
from nano_inference.server.errors import ApiError, shown


@dataclass(frozen=True)
class KeptResponse:
    """A response, and the conversation up to its end.

    Attributes:
        response: as it was answered.
        items: of its input.
        messages: of a chat, without the instructions; those of earlier responses first.
    """

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[dict[str, Any]]


class KeptResponses:
    """The last ones, by id. Thread-safe.

    Args:
        most_bytes: of JSON together; the longest unused go first. Messages that several responses
            share count once, as long as one of these is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        # id of a message -> how many of them have it, and its bytes
        self._shared: dict[int, tuple[int, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, kept: KeptResponse) -> None:
        """Keep it, if it fits."""
        size = len(encode(kept.response)) + len(encode(kept.items)) + 8 * len(kept.messages)
        with self._lock:
            self._kept[kept.response["id"]] = kept, size
            self._bytes += size
            for message in kept.messages:
                holders, its = self._shared.get(id(message), (0, 0))
                if not holders:
                    its = len(encode(message))
                    self._bytes += its
                self._shared[id(message)] = holders + 1, its
            while self._bytes > self._most_bytes:
                self._drop(*self._kept.popitem(last=False)[1])

    def get(self, name: str, field: str | None = None) -> KeptResponse:
        """Raises `ApiError`: 400 where a request's `field` names it, else 404."""
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                return found[0]
        raise ApiError(
            404 if field is None else 400,
            f"there is no response {shown(name)}: it was not stored, or was dropped for newer "
            "ones; send the whole conversation as input.",
            field,
            "previous_response_not_found" if field is not None else None,
        )

    def remove(self, name: str) -> None:
        """Raises `ApiError` 404."""
        self.get(name)
        with self._lock:
            if (found := self._kept.pop(name, None)) is not None:
                self._drop(*found)

    def _drop(self, kept: KeptResponse, size: int) -> None:
        """It is kept no more. With the lock."""
        self._bytes -= size
        for message in kept.messages:
            holders, its = self._shared.pop(id(message))
            if holders > 1:
                self._shared[id(message)] = holders - 1, its
            else:
                self._bytes -= its
