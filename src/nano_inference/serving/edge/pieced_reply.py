"""An answer's body as it is made: others get their turn meanwhile, and no large one is ever in
memory as a whole.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nano_inference.serving.protocols.pieces import json_pieces

PIECE = 64 * 1024  # bytes that are made and sent together
WHOLE = 1 << 20  # bytes up to which an answer is sent as a whole, with its length


async def reply_in_pieces(body: Any, *, aside: bool) -> Response:
    """A reply with a body of JSON. Raises what making its first `WHOLE` bytes raises.

    Args:
        body: see `json_pieces`.
        aside: make it in a thread; worth its while for answers that take milliseconds.
    """
    batches = _batches(json_pieces(body))
    made, size = list[bytes](), 0
    while size <= WHOLE:
        batch = await _next(batches, aside)
        if batch is None:
            return Response(b"".join(made), 200, media_type="application/json")
        made.append(batch)
        size += len(batch)
    return PiecedReply(made, batches)


class PiecedReply(Response):
    """What is made already, and then the rest of it, piece by piece. Ends early where nobody reads
    any more.

    Args:
        made: the body's beginning.
        rest: what follows.
    """

    media_type = "application/json"

    def __init__(self, made: list[bytes], rest: Iterator[bytes]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._made, self._rest = made, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        connection = scope["state"].get("connection")
        unsized = connection if scope.get("http_version") == "1.0" else None  # it knows no chunks
        if unsized is not None:
            unsized.begin_without_length()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        batch: bytes | None = b"".join(self._made)
        self._made.clear()
        while batch is not None and (connection is None or connection.is_open):
            await send({"type": "http.response.body", "body": batch, "more_body": True})
            batch = await _next(self._rest, True)
        if unsized is not None:
            unsized.end_without_length(b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _batches(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Joined, so that no piece is small."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= PIECE:
            yield bytes(joined)
            joined.clear()
    if joined:
        yield bytes(joined)


async def _next(batches: Iterator[bytes], aside: bool) -> bytes | None:
    return await asyncio.to_thread(next, batches, None) if aside else next(batches, None)
