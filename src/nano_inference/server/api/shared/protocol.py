"""`ApiProtocol`: how a protocol reads requests that generate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nano_inference.server.api.shared.fields import Strict, read_body
from nano_inference.server.api.shared.generation import Builder, Served


@dataclass(frozen=True)
class ApiProtocol:
    """How a protocol reads requests that generate.

    Attributes:
        request: the body.
        builder: makes a builder of the body, what is served and the request's id. It raises
            `ApiError`, `InvalidRequest` and the like, and may take a while (templates, tokenising).
        openapi: what `/openapi.json` says of its route; see `openapi.py`.
    """

    request: type[Strict]
    builder: Callable[[Any, Served, str], Builder]
    openapi: Mapping[str, Any]

    def prepare(self, body: bytes, served: Served, request_id: str) -> Builder:
        """Read a request; in a thread where the body is large."""
        return self.builder(read_body(body, self.request, served.config), served, request_id)
