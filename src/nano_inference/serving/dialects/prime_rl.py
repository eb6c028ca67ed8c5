"""The routes that prime-rl adds to vLLM's. Adapters over `serving/control.py`."""

from fastapi import APIRouter, Response

from nano_inference.serving.dialects.reading import Fields
from nano_inference.serving.errors import ApiError
from nano_inference.serving.server import Server


def routes(server: Server) -> APIRouter:
    """The routes."""
    return APIRouter()


async def update_weights(server: Server, fields: Fields) -> Response:
    """`POST /update_weights` with a `weight_dir`."""
    raise ApiError(501, "weight_dir is not supported yet.", "weight_dir")
