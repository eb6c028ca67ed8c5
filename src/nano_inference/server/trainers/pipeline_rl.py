"""PipelineRL's route, and the group that the engine joins at its start. Adapters over
`server/control`.

PipelineRL passes the group's address on the engines' command lines. Its trainer first waits for all
engines to join, and then for their `/health`. So the group is joined in the background while the
server starts, and again if it is lost.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response

from nano_inference.server.config import ServerConfig
from nano_inference.server.control.requests.pipeline_rl import ROUTES, ReceiveUpdate
from nano_inference.server.errors import NO_RETRY, ApiError, api_error_of
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import add_route, raw_of

log = logging.getLogger("nano_inference.server")

GROUP = "pipeline-rl"
# seconds between checks if the group is joined: while a caller waits for it, and otherwise
_GLANCE, _REST = 0.05, 0.5
# first and longest delay in seconds after a failed attempt to join
_PAUSES = (1.0, 30.0)


def routes(router: APIRouter, server: Server) -> None:
    """Add PipelineRL's route, and join its group in the background."""
    turn = asyncio.Lock()
    joins = _joins_group(server.config)
    if joins:
        server.beside.append(lambda: _stay_joined(server))

    async def receive_weight_update(request: Request) -> Response:
        if not joins:
            await raw_of(request, server)
            raise ApiError(
                409,
                "no weight group is configured: start the server with "
                "--weight-update-group-init-method, and without "
                "--disable-weight-updates.",
            )
        async with turn:
            try:
                await _update(server, (await raw_of(request, server)).read(ReceiveUpdate))
            except BaseException:
                # leave the group: the trainer may have broadcast tensors that the next update would
                # take for its own
                with suppress(ApiError):
                    await server.control.groups.leave(GROUP)
                raise
        return json_reply(200, {"status": "ok"})

    add_route(router, ROUTES[0], receive_weight_update)


async def _update(server: Server, fields: ReceiveUpdate) -> None:
    updates = server.control.updates
    await _joined(server)
    async with updates.updating(version=fields.version, **fields.checks):
        await updates.receive_broadcast(GROUP, fields.parameters_info)
        await updates.finish(kv_policy="keep")


def _joins_group(config: ServerConfig) -> bool:
    return config.weight_update_group_init_method is not None and not config.disable_weight_updates


async def _joined(server: Server) -> None:
    """Wait until the group is joined. Raises `ApiError` 504."""
    seconds = server.config.rl_timeout
    try:
        async with asyncio.timeout(seconds):
            while not await server.control.groups.has(GROUP):
                await asyncio.sleep(_GLANCE)
    except TimeoutError:
        address = server.config.weight_update_group_init_method
        message = f"the group at {address} did not form within {seconds:g} seconds."
        raise ApiError(504, message, headers=NO_RETRY) from None


async def _stay_joined(server: Server) -> None:
    """Join the group, and again whenever it is lost, until canceled."""
    config = server.config
    address: Any = urlsplit(config.weight_update_group_init_method)
    assert config.actor_llm_idx is not None
    assert config.weight_update_group_world_size is not None
    pause, longest = _PAUSES
    while True:
        try:
            if await server.control.groups.has(GROUP):
                await asyncio.sleep(_REST)
                continue
            await server.control.groups.join(
                GROUP,
                address.hostname,
                address.port,
                rank=1 + config.actor_llm_idx,
                world_size=config.weight_update_group_world_size,
                pynccl=True,
            )
            pause = _PAUSES[0]
            log.info("joined the weight group at %s.", config.weight_update_group_init_method)
        except Exception as problem:
            error = api_error_of(problem)
            bug = problem if error.status == 500 else None
            log.warning(
                "cannot join the weight group at %s: %s",
                config.weight_update_group_init_method,
                error.message,
                exc_info=bug,
            )
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)
