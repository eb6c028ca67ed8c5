"""Routes of an administrator who looks at replicas, adds them and takes them out. Only where there
are several.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from nano_inference.serving.edge.replies import json_reply
from nano_inference.serving.errors import ApiError, bad_request
from nano_inference.serving.fleet.fleet_client import FleetClient
from nano_inference.serving.fleet.replica import BUCKETS
from nano_inference.serving.server import Server


def routes(server: Server) -> APIRouter:
    """The routes."""
    router = APIRouter()
    fleet = server.client
    if not isinstance(fleet, FleetClient):
        return router

    @router.get("/fleet", summary="The replicas; needs the admin key")
    async def look() -> Response:
        return json_reply(200, described(fleet))

    @router.post("/fleet/add", summary="Start another replica, and wait until it serves")
    async def add() -> Response:
        server.lifecycle.require_open()
        return json_reply(200, {"replica": await fleet.add()})

    @router.post(
        "/fleet/drain",
        summary="Give a replica nothing new; `move`: let others go on with what it has",
    )
    async def drain(request: Request) -> Response:
        body = await _body(request, move=False, undo=False)
        left = fleet.drain(_name(body), move=body["move"], draining=not body["undo"])
        return json_reply(200, {"replica": body["replica"], "requests_left": left})

    @router.post("/fleet/remove", summary="Take a replica out; others go on with what it has")
    async def remove(request: Request) -> Response:
        body = await _body(request)
        return json_reply(
            200, {"replica": _name(body), "requests_moved": await fleet.remove(_name(body))}
        )

    return router


def described(fleet: FleetClient) -> dict[str, Any]:
    """A fleet, for whoever looks at it."""
    failovers = fleet.failovers
    buckets = dict(zip((*map(str, BUCKETS), "inf"), failovers.counts, strict=True))
    return {
        "weight_version": fleet.roster.version,
        "paused": fleet.roster.paused,
        "asleep": list(fleet.roster.asleep),
        "replicas": [asdict(status) for status in fleet.replica_statuses()],
        "failovers": {
            "deaths": failovers.deaths,
            "moved": failovers.moved,
            "pauses": {each: count for each, count in buckets.items() if count},
            "longest_pause": round(failovers.longest, 4),
        },
    }


async def _body(request: Request, **defaults: bool) -> dict[str, Any]:
    """Of a POST: `replica`, and switches. Raises `ApiError`."""
    try:
        body: Any = msgspec.json.decode(await request.body())
    except msgspec.DecodeError:
        raise bad_request('the body must be a JSON object like {"replica": "0"}.') from None
    if not isinstance(body, Mapping):
        raise bad_request('the body must be a JSON object like {"replica": "0"}.')
    given: dict[str, Any] = dict(body)  # pyright: ignore[reportUnknownArgumentType]
    for name, value in given.items():
        if name != "replica" and name not in defaults:
            raise bad_request(
                f"{name!r} is not known here; there are {', '.join(('replica', *defaults))}.", name
            )
        if name in defaults and not isinstance(value, bool):
            raise bad_request(f"{name} must be true or false.", name)
    return {**defaults, **given}


def _name(body: Mapping[str, Any]) -> str:
    name = body.get("replica")
    if not isinstance(name, str):
        raise ApiError(400, "replica must be the name of one, as GET /fleet has it.", "replica")
    return name
