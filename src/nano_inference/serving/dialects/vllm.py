"""vLLM's RL routes: pause, weight transfer, sleep, versions. Adapters over `serving/control.py`."""

from collections.abc import Mapping

from fastapi import APIRouter, Response

from nano_inference.serving.dialects.reading import Fields
from nano_inference.serving.edge.access import Level
from nano_inference.serving.errors import ApiError
from nano_inference.serving.server import Server

# Each route: ADMIN changes the engine, KEY reads, OPEN tells nothing.
LEVELS: Mapping[str, Level] = {}


def routes(server: Server) -> APIRouter:
    """The routes."""
    return APIRouter()


async def update_weights(server: Server, fields: Fields) -> Response:
    """`POST /update_weights` with an `update_info`."""
    raise ApiError(501, "update_info is not supported yet.", "update_info")
