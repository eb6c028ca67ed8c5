"""The routes that prime-rl adds to vLLM's. Adapters over `server/control`.

Its trainer puts weights into a folder, or broadcasts them. Its own broadcast describes itself by
pickles, which nothing here reads; a broadcaster that is joined has to speak `WeightSender`'s format
(`nano_inference.weights.transports`).
"""

import asyncio
import re
import threading
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Request, Response

from nano_inference.server.control.requests.prime_rl import ROUTES, Join, Update
from nano_inference.server.errors import ApiError, bad_request, retry_after
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import Raw, add_route, add_routes

GROUP = "prime-rl"
MARKER = "STABLE"  # a file that the trainer makes when a step's folder is whole
_STEP = re.compile(r"step_([0-9]{1,18})")


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""

    async def join(given: Join) -> dict[str, str]:
        await server.control.groups.join(
            GROUP,
            given.host,
            given.port,
            rank=1 + given.rank_offset,
            world_size=1 + given.inference_world_size,
            timeout=given.timeout,
        )
        return {"status": "ok"}

    async def liveness(_: Request) -> Response:
        if server.lifecycle.status in ("dead", "stalled"):
            return json_reply(503, {"status": "engine_unresponsive"})
        return json_reply(200, {"status": "ok"})

    add_routes(router, server, ROUTES, {"POST /init_broadcaster": join})
    add_route(router, next(each for each in ROUTES if each.path == "/liveness"), liveness)


async def update_weights(server: Server, raw: Raw) -> Response:
    """`POST /update_weights` with a `weight_dir`.

    Where a broadcaster was joined, the weights come from it, as prime-rl's own server does it: the
    folder then only names the step. Else they are the folder's safetensors. `step_12` in its path
    names the version.
    """
    try:
        await _update(server, raw.read(Update))
    except BaseException:
        # what a broadcaster has sent and was not taken would be taken for the next update
        with suppress(ApiError):  # there is none
            await server.control.groups.leave(GROUP)
        raise
    return json_reply(200, {"status": "ok"})


async def _update(server: Server, given: Update) -> None:
    control, folder, timeout = server.control, given.weight_dir, given.timeout
    has_broadcaster = await control.groups.has(GROUP)
    if folder is None and not has_broadcaster:
        raise ApiError(
            409,
            "no broadcaster is joined; call /init_broadcaster first, or name a weight_dir.",
            "weight_dir",
        )
    step = None if folder is None else _step_of(folder)
    if not has_broadcaster and step is not None:
        await _require_stable(step, timeout or server.config.rl_timeout)
    version = None if step is None else _STEP.sub(r"\1", step.name)
    async with control.updates.updating(version=version, **given.checks):
        if has_broadcaster:
            await control.updates.receive_stream(GROUP)
        else:
            assert folder is not None
            await control.updates.receive_folder(folder, timeout=timeout)
        await control.updates.finish()


def _step_of(folder: str) -> Path | None:
    """The folder of a step: `.../broadcasts/step_12`, or above `.../checkpoints/step_12/weight`;
    else None.
    """
    if "\0" in folder:
        raise bad_request("weight_dir holds a zero byte.", "weight_dir")
    path = Path(folder)
    return next((each for each in (path, path.parent) if _STEP.fullmatch(each.name)), None)


async def _require_stable(step: Path, seconds: float) -> None:
    """A step's folder is read when its trainer has marked it as whole. On a shared file system the
    marker may be seen here later than by who calls; prime-rl comes again after a 503. A share that
    hangs keeps a thread, and no other request.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def look() -> None:
        found = _is_stable(step)
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(found))

    threading.Thread(target=look, name="look for a step", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            stable = await answer
    except TimeoutError:
        message = f"weight_dir: the file system did not answer within {seconds:g} s."
        raise ApiError(504, message, "weight_dir") from None
    if not stable:
        message = f"weight_dir: {step.name} has no {MARKER} marker yet; it may still be written."
        raise ApiError(503, message, "weight_dir", headers=retry_after(1.0))


def _is_stable(step: Path) -> bool:
    try:
        return (step / MARKER).is_file()
    except OSError:
        return False
