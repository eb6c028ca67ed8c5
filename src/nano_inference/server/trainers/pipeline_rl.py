"""PipelineRL's one route, and the group that it joins at its start. Adapters over
`server/control.py`.

PipelineRL tells its engines by their command line where the group is. Its trainer waits for all of
them there, then for their `/health`; so the group is joined in the background, while the server
serves, and again when it was lost.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response

from nano_inference.server.config import ServerConfig
from nano_inference.server.control import TensorSpec
from nano_inference.server.errors import NO_RETRY, ApiError, api_error_of, bad_request, shown
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import Fields, checks_of, fields_of, shape_of

log = logging.getLogger("nano_inference.server")

GROUP = "pipeline-rl"
# seconds between two looks whether the group stands: while a caller waits for it, or not
_GLANCE, _REST = 0.05, 0.5
# seconds between two tries to join it that fail at once, and how long that becomes
_PAUSES = (1.0, 30.0)


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""
    turn = asyncio.Lock()
    if _joins_group(server.config):
        server.beside.append(lambda: _stay_joined(server))

    @router.post(
        "/receive_weight_update", summary="Take part in the trainer's broadcasts; decoding goes on"
    )
    async def receive_weight_update(request: Request) -> Response:
        if not _joins_group(server.config):
            await fields_of(request, server)
            raise ApiError(
                409,
                "there is no group: the server was started without "
                "--weight-update-group-init-method, or with "
                "--disable-weight-updates.",
            )
        async with turn:
            try:
                await _update(server, await fields_of(request, server))
            except BaseException:
                # the trainer broadcasts by now; what is not taken would be taken for the next
                # update
                with suppress(ApiError):
                    await server.control.leave_group(GROUP)
                raise
        return json_reply(200, {"status": "ok"})


async def _update(server: Server, fields: Fields) -> None:
    version, tensors, checks = fields.version("version"), tensors_of(fields), checks_of(fields)
    await _joined(server)
    async with server.control.updating(version=version, **checks):
        await server.control.receive_broadcast(GROUP, tensors)
        await server.control.finish_update(kv_policy="keep")


def _joins_group(config: ServerConfig) -> bool:
    return config.weight_update_group_init_method is not None and not config.disable_weight_updates


def tensors_of(fields: Fields) -> list[TensorSpec]:
    """`parameters_info`. Raises `ApiError` 400."""
    given = fields.body.get("parameters_info")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise bad_request(
            "parameters_info must be a list of {name, shape, dtype}, and not empty.",
            "parameters_info",
        )
    return [_tensor(f"parameters_info.{place}", each) for place, each in enumerate(given)]


def _tensor(where: str, given: object) -> TensorSpec:
    if not isinstance(given, Mapping):
        raise bad_request(f"{where} must be an object, not {shown(given)}.", where)
    name, dtype = given.get("name"), given.get("dtype")
    if not (isinstance(name, str) and name and isinstance(dtype, str) and dtype):
        raise bad_request(f"{where} must have a name and a dtype.", where)
    return TensorSpec(name, dtype, shape_of(given.get("shape"), f"{where}.shape", f"{where}.shape"))


async def _joined(server: Server) -> None:
    """Wait for the group. Raises `ApiError` 504."""
    seconds = server.config.rl_timeout
    try:
        async with asyncio.timeout(seconds):
            while not await server.control.has_group(GROUP):
                await asyncio.sleep(_GLANCE)
    except TimeoutError:
        address = server.config.weight_update_group_init_method
        message = f"the group at {address} has not formed within {seconds:g} seconds."
        raise ApiError(504, message, headers=NO_RETRY) from None


async def _stay_joined(server: Server) -> None:
    """Join; where the group is lost, join again. Ends when it is cancelled."""
    config = server.config
    address: Any = urlsplit(config.weight_update_group_init_method)
    assert config.actor_llm_idx is not None
    assert config.weight_update_group_world_size is not None
    pause, longest = _PAUSES
    while True:
        try:
            if await server.control.has_group(GROUP):
                await asyncio.sleep(_REST)
                continue
            await server.control.join_group(
                GROUP,
                address.hostname,
                address.port,
                rank=1 + config.actor_llm_idx,
                world_size=config.weight_update_group_world_size,
            )
            pause = _PAUSES[0]
            log.info("joined the weight group at %s.", config.weight_update_group_init_method)
        except Exception as problem:
            error = api_error_of(problem)
            bug = problem if error.status == 500 else None
            log.warning(
                "the weight group at %s: %s",
                config.weight_update_group_init_method,
                error.message,
                exc_info=bug,
            )
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)
