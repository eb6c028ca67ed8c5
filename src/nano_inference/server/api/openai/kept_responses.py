"""Store of responses that later requests may continue, in the memory of the server process."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_inference.server.api.openai.responses_tools import Offered, Offers
from nano_inference.server.api.shared.answers import encode
from nano_inference.server.api.shared.detached import Detached
from nano_inference.server.errors import ApiError, bad_request, retry_after, shown

MOST = 10_000  # responses
MOST_SECONDS = 30 * 86400.0  # age of a response


@dataclass(frozen=True)
class KeptResponse:
    """A response, with the conversation up to its end.

    Attributes:
        response: Response as it was answered.
        items: Items of its input.
        messages: Messages of the conversation without instructions, including earlier responses.
        owner: Client that may read it. "": any.
        detached: The answer in the background, if it was made there.
        late_tools: Tools that items of the conversation have added, by the functions' names.
    """

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[dict[str, Any]]
    owner: str = ""
    detached: Detached | None = None
    late_tools: Offers = field(default_factory=dict[str, Offered])

    @property
    def is_running(self) -> bool:
        """True if the response is still being generated."""
        return self.detached is not None and self.detached.is_running

    @property
    def current(self) -> Mapping[str, Any]:
        """Response as far as it has come."""
        if self.detached is not None and self.detached.is_running:
            return self.detached.snapshot()
        return self.response


@dataclass
class _Entry:
    kept: KeptResponse
    size: int  # without events
    since: float
    events: int = 0  # bytes


class KeptResponses:
    """Store of the last responses, by id. Thread-safe.

    Running responses are never dropped. Others are dropped after `MOST_SECONDS`, and the least
    recently used first if there are too many.

    Args:
        most_bytes: Limit on their JSON. A message that several responses share counts once.
        now: Clock, in seconds.
    """

    def __init__(self, most_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self.most_bytes = most_bytes
        self._now = now
        self._kept: OrderedDict[str, _Entry] = OrderedDict()
        # id of a message -> number of responses that have it, and its bytes
        self._shared: dict[int, tuple[int, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, kept: KeptResponse) -> None:
        """Store a response, and drop old ones until all fit. It replaces one with the same id, and
        keeps the room of its events.

        Raises:
            ApiError: 429, running responses leave no room for this one, which runs as well.
        """
        size = len(encode(kept.response)) + len(encode(kept.items)) + 8 * len(kept.messages)
        entry = _Entry(kept, size, self._now())
        with self._lock:
            if (before := self._kept.pop(kept.response["id"], None)) is not None:
                entry.events = before.events
                self._drop(before)
            self._kept[kept.response["id"]] = entry
            self._bytes += entry.size + entry.events
            for message in kept.messages:
                holders, message_size = self._shared.get(id(message), (0, 0))
                if not holders:
                    message_size = len(encode(message))
                    self._bytes += message_size
                self._shared[id(message)] = holders + 1, message_size
            while self._kept and self._is_old(next(iter(self._kept.values()))):
                self._drop(self._kept.popitem(last=False)[1])
            self._make_room()
            if before is None and kept.is_running and self._bytes > self.most_bytes:
                self._drop(self._kept.pop(kept.response["id"]))
                raise _full()

    def grow(self, name: str, num_bytes: int) -> None:
        """Count events of a running response. Raises `ApiError` 429 if there is no room."""
        with self._lock:
            if (entry := self._kept.get(name)) is None:
                return
            entry.events += num_bytes
            self._bytes += num_bytes
            self._make_room()
            if self._bytes > self.most_bytes:
                raise _full()

    def get(self, name: str, field: str | None = None, owner: str = "") -> KeptResponse:
        """Return a client's response. Raises `ApiError`: 400 if a request's `field` names it, else
        404.
        """
        with self._lock:
            entry = self._kept.get(name)
            if entry is not None and self._is_old(entry):
                self._drop(self._kept.pop(name))
                entry = None
            if entry is not None and entry.kept.owner == owner:
                self._kept.move_to_end(name)
                return entry.kept
        raise ApiError(
            404 if field is None else 400,
            f"response {shown(name)} does not exist: it was not stored, or was dropped for newer "
            "ones; send the whole conversation as input.",
            field,
            "previous_response_not_found" if field is not None else None,
        )

    def remove(self, name: str, owner: str = "") -> None:
        """Drop a response. Raises `ApiError` 404."""
        self.get(name, owner=owner)
        with self._lock:
            if (entry := self._kept.pop(name, None)) is not None:
                self._drop(entry)

    def _is_old(self, entry: _Entry) -> bool:
        return self._now() - entry.since > MOST_SECONDS and not entry.kept.is_running

    def _make_room(self) -> None:
        """Drop responses that do not run, until all fit. Call it with the lock held."""
        while self._bytes > self.most_bytes or len(self._kept) > MOST:
            entries = self._kept.items()
            name = next((name for name, entry in entries if not entry.kept.is_running), None)
            if name is None:
                return
            self._drop(self._kept.pop(name))

    def _drop(self, entry: _Entry) -> None:
        """Subtract a dropped response from the total size. Call it with the lock held."""
        self._bytes -= entry.size + entry.events
        for message in entry.kept.messages:
            holders, message_size = self._shared.pop(id(message))
            if holders > 1:
                self._shared[id(message)] = holders - 1, message_size
            else:
                self._bytes -= message_size


def page_of(
    items: Sequence[Mapping[str, Any]], limit: int, order: str, after: str | None
) -> dict[str, Any]:
    """Return one page of the items of an input. Raises `ApiError` 400.

    Args:
        items: All items, the oldest first.
        limit: Maximum number of items.
        order: `"asc"`: the oldest first; `"desc"`: the newest first.
        after: Id of the item before the page.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise bad_request(f"the input has no item {shown(after)}, which after names.", "after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "has_more": len(ordered) > limit,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _full() -> ApiError:
    return ApiError(
        429,
        "running responses fill max_stored_responses; wait until some have ended, or send the "
        "request without background.",
        code="rate_limit_exceeded",
        headers=retry_after(1.0),
    )
