"""PipelineRL's one route, and the group that it joins at its start. Adapters over `serving/control.py`."""

from fastapi import APIRouter

from nano_inference.serving.server import Server


def routes(server: Server) -> APIRouter:
    """The routes."""
    return APIRouter()
