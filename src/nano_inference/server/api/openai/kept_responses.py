"""Store of responses that later requests may continue, in the memory of the server process."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nano_inference.server.api.shared.answers import encode
from nano_inference.server.errors import ApiError, shown


@dataclass(frozen=True)
class KeptResponse:
    """A response, with the conversation up to its end.

    Attributes:
        response: Response as it was answered.
        items: Items of its input.
        messages: Messages of the conversation without instructions, including earlier responses.
    """

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[dict[str, Any]]


class KeptResponses:
    """Store of the last responses, by id. Thread-safe.

    Args:
        most_bytes: Limit on their JSON. The least recently used responses are dropped first. A
            message that several responses share counts once.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        # id of a message -> number of responses that have it, and its bytes
        self._shared: dict[int, tuple[int, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, kept: KeptResponse) -> None:
        """Store a response, and drop old ones until all fit."""
        size = len(encode(kept.response)) + len(encode(kept.items)) + 8 * len(kept.messages)
        with self._lock:
            self._kept[kept.response["id"]] = kept, size
            self._bytes += size
            for message in kept.messages:
                holders, message_size = self._shared.get(id(message), (0, 0))
                if not holders:
                    message_size = len(encode(message))
                    self._bytes += message_size
                self._shared[id(message)] = holders + 1, message_size
            while self._bytes > self._most_bytes:
                self._drop(*self._kept.popitem(last=False)[1])

    def get(self, name: str, field: str | None = None) -> KeptResponse:
        """Return a response. Raises `ApiError`: 400 if a request's `field` names it, else 404."""
        with self._lock:
            entry = self._kept.get(name)
            if entry is not None:
                self._kept.move_to_end(name)
                return entry[0]
        raise ApiError(
            404 if field is None else 400,
            f"response {shown(name)} does not exist: it was not stored, or was dropped for newer "
            "ones; send the whole conversation as input.",
            field,
            "previous_response_not_found" if field is not None else None,
        )

    def remove(self, name: str) -> None:
        """Drop a response. Raises `ApiError` 404."""
        self.get(name)
        with self._lock:
            if (entry := self._kept.pop(name, None)) is not None:
                self._drop(*entry)

    def _drop(self, kept: KeptResponse, size: int) -> None:
        """Subtract a dropped response from the total size. Call it with the lock held."""
        self._bytes -= size
        for message in kept.messages:
            holders, message_size = self._shared.pop(id(message))
            if holders > 1:
                self._shared[id(message)] = holders - 1, message_size
            else:
                self._bytes -= message_size
