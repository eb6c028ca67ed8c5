"""SGLang's RL routes. Adapters over `serving/control.py`."""

from collections.abc import Mapping

from fastapi import APIRouter

from nano_inference.serving.edge.access import Level
from nano_inference.serving.server import Server

# Each route: ADMIN changes the engine, KEY reads, OPEN tells nothing.
LEVELS: Mapping[str, Level] = {}


def routes(server: Server) -> APIRouter:
    """The routes."""
    return APIRouter()
