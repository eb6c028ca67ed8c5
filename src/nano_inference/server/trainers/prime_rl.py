"""Routes that prime-rl adds to vLLM's. Adapters over `server/control`.

Its trainer writes weights to a folder, or broadcasts them over a group of vLLM's PyNccl, described
by pickles of which nothing is executed (`weights/transports/layer_pickles.py`). An engine on a CPU
joins a group of `torch.distributed` instead, over which `WeightSender` sends.
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
MARKER = "STABLE"  # file by which the trainer marks a step's folder as complete
_STEP = re.compile(r"step_([0-9]{1,18})")


def routes(router: APIRouter, server: Server) -> None:
    """Add prime-rl's routes."""

    async def join(fields: Join) -> dict[str, str]:
        await server.control.groups.join(
            GROUP,
            fields.host,
            fields.port,
            rank=1 + fields.rank_offset,
            world_size=1 + fields.inference_world_size,
            pynccl=fields.pynccl,
            timeout=fields.timeout,
        )
        return {"status": "ok"}

    async def liveness(_: Request) -> Response:
        if server.lifecycle.status in ("dead", "stalled"):
            return json_reply(503, {"status": "engine_unresponsive"})
        return json_reply(200, {"status": "ok"})

    add_routes(router, server, ROUTES, {"POST /init_broadcaster": join})
    add_route(router, next(each for each in ROUTES if each.path == "/liveness"), liveness)


async def update_weights(server: Server, raw: Raw) -> Response:
    """Answer `POST /update_weights` with a `weight_dir`.

    If a broadcaster is joined, the weights come from it, as in prime-rl's own server, and the
    folder only names the step. Otherwise they are the folder's safetensors. `step_12` in its path
    names the version.
    """
    try:
        await _update(server, raw.read(Update))
    except BaseException:
        # the broadcaster may have sent tensors that the next update would take for its own
        with suppress(ApiError):  # there may be no group
            await server.control.groups.leave(GROUP)
        raise
    return json_reply(200, {"status": "ok"})


async def _update(server: Server, fields: Update) -> None:
    control, folder, timeout = server.control, fields.weight_dir, fields.timeout
    has_broadcaster = await control.groups.has(GROUP)
    if folder is None and not has_broadcaster:
        raise ApiError(
            409,
            "no broadcaster is joined; call /init_broadcaster first, or set weight_dir.",
            "weight_dir",
        )
    step = None if folder is None else _step_of(folder)
    if not has_broadcaster and step is not None:
        await _require_stable(step, timeout or server.config.rl_timeout)
    version = None if step is None else _STEP.sub(r"\1", step.name)
    async with control.updates.updating(version=version, **fields.checks):
        if has_broadcaster:
            await control.updates.receive_stream(GROUP, timeout=timeout)
        else:
            assert folder is not None
            await control.updates.receive_folder(folder, timeout=timeout)
        await control.updates.finish()


def _step_of(folder: str) -> Path | None:
    """Return the folder of a step, or None: `.../broadcasts/step_12`, or the parent of
    `.../checkpoints/step_12/weight`.
    """
    if "\0" in folder:
        raise bad_request("weight_dir contains a zero byte.", "weight_dir")
    path = Path(folder)
    return next((each for each in (path, path.parent) if _STEP.fullmatch(each.name)), None)


async def _require_stable(step: Path, seconds: float) -> None:
    """Raise unless the trainer has marked a step's folder as complete.

    On a shared file system the marker may appear here later than at the caller. prime-rl retries
    after a 503. A share that hangs blocks a thread, but no other request.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def look() -> None:
        stable = _is_stable(step)
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(stable))

    threading.Thread(target=look, name="look for a step", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            stable = await answer
    except TimeoutError:
        message = f"weight_dir: the file system did not answer within {seconds:g} s."
        raise ApiError(504, message, "weight_dir") from None
    if not stable:
        message = f"weight_dir: {step.name} has no {MARKER} marker yet; it may be incomplete."
        raise ApiError(503, message, "weight_dir", headers=retry_after(1.0))


def _is_stable(step: Path) -> bool:
    try:
        return (step / MARKER).is_file()
    except OSError:
        return False
