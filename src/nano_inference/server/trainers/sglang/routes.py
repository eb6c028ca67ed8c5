"""SGLang's RL routes: weights, groups, pauses, memory, checks. Adapters over `server/control`;
replies are SGLang 0.5's.

What is particular to this server:

- Weights that come in several requests take effect together: `Weights` says which.
- Nothing aborts requests unless `abort_all_requests` is sent as true, also where SGLang's default
  is to abort them.
- `flush_cache` of an update frees memory: prefixes of older weights are never used, flushed or not.
- `/update_weights_from_tensor` takes safetensors, as the body or as base64; pickles are refused.
- `/health_generate` draws a token, unless the engine is paused or asleep: then it has to answer, no
  more. Callers share the token of the last second.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

import nano_inference
from nano_inference.server.control.requests.sglang import (
    NOT_HERE,
    ROUTES,
    Abort,
    ChangeMemory,
    Loads,
    LoadTensors,
    Pause,
    Rows,
    UnloadAdapter,
    UpdateFromTensor,
)
from nano_inference.server.errors import NO_RETRY, ApiError
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import (
    Answer,
    add_route,
    add_routes,
    read_with_tensors,
)
from nano_inference.server.trainers.sglang.weights import Weights
from nano_inference.server.trainers.shared import (
    adapters_told,
    one_field,
    require_own_name,
    server_info,
)
from nano_inference.server.trainers.shared_answer import SharedAnswer
from nano_inference.types import KvPolicy, Memory, PauseMode, SamplingParams

HEALTH_PATIENCE = 20.0  # seconds that a token may take
PROBE_FRESH = 1.0  # seconds in which a token speaks for the engine
ANSWER_PATIENCE = 4.0  # and an answer of the engine, which it gives also in the middle of a step
# SGLang's modes -> ours.
_MODES: Mapping[str, tuple[PauseMode, KvPolicy]] = {
    "abort": ("abort", "recompute"),
    "retract": ("keep", "recompute"),
    "in_place": ("keep", "keep"),
}


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""
    control = server.control
    state, weights, health = State(server), Weights(control), Health(server)
    answers: dict[str, Answer] = {
        "GET /model_info": state.model_info,
        "GET /get_model_info": state.model_info,
        "GET /get_server_info": lambda _: server_info(server),
        "GET /get_weights_by_name": state.rows,
        "POST /get_weights_by_name": state.rows,
        "GET /get_weight_version": lambda _: one_field(
            "weight_version", control.engine.serving_version()
        ),
        "GET /health_generate": health.answer,
        "GET /v1/loads": state.loads,
        "GET /weights_checker": lambda given: weights.check(given, commits=False),
        "POST /weights_checker": weights.check,
        "POST /pause_generation": lambda given: state.pause(given, weights),
        "POST /continue_generation": lambda _: state.resume(weights),
        "POST /abort_request": state.abort,
        "POST /release_memory_occupation": lambda given: state.change_memory(
            given, control.memory.sleep
        ),
        "POST /resume_memory_occupation": lambda given: state.change_memory(
            given, control.memory.wake
        ),
        "POST /init_weights_update_group": weights.join,
        "POST /destroy_weights_update_group": weights.leave,
        "POST /begin_weight_update": weights.begin,
        "POST /unload_lora_adapter": state.unload_adapter,
        **{call: _refuser(why) for call, why in NOT_HERE.items()},
    }
    # A refusal of these ends the update: its weights are missing.
    updates: dict[str, Answer] = {
        "POST /update_weights_from_distributed": weights.update_from_distributed,
        "POST /update_weights_from_disk": weights.update_from_disk,
        "POST /end_weight_update": weights.end,
    }
    add_routes(router, server, ROUTES, answers | updates, dict.fromkeys(updates, weights.fail))
    tensor, adapter = (route for route in ROUTES if route.files)

    async def update_from_tensor(request: Request) -> Response:
        try:
            given, content = await read_with_tensors(request, server, tensor, UpdateFromTensor)
            return json_reply(200, await weights.update_from_tensor(given, content))
        except BaseException as problem:
            await weights.fail(problem)
            raise

    async def load_tensors(request: Request) -> Response:
        given, content = await read_with_tensors(request, server, adapter, LoadTensors)
        return json_reply(200, await state.load_tensors(given, content))

    add_route(router, tensor, update_from_tensor)
    add_route(router, adapter, load_tensors)


def _refuser(why: str) -> Answer:
    async def refuse(_: object) -> None:
        raise ApiError(501, why)

    return refuse


class State:
    """Routes about the state of the engine: model, load, memory, adapters."""

    def __init__(self, server: Server) -> None:
        self._server, self._control = server, server.control

    async def model_info(self, _: object) -> dict[str, Any]:
        """`/model_info`."""
        served = self._server.require_served()
        return {
            "model_path": self._control.engine.model_path,
            "served_model_name": served.name,
            "tokenizer_path": served.engine.tokenizer_folder,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": await self._control.engine.serving_version(),
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_model_len": served.engine.max_model_len,
        }

    async def rows(self, given: Rows) -> list[Any]:
        """`/get_weights_by_name`."""
        return await self._control.checksums.rows(given.name, given.truncate_size)

    async def loads(self, given: Loads) -> dict[str, Any]:
        """`/v1/loads`."""
        loads = await self._control.pauses.loads()
        one = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": loads.running,
            "num_waiting_reqs": loads.waiting,
            "num_total_reqs": loads.running + loads.waiting,
        }
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": nano_inference.__version__,
            "dp_rank_count": 1,
            "loads": [one] if given.dp_rank == 0 else [],
        }

    async def pause(self, given: Pause, weights: Weights) -> dict[str, str]:
        """`/pause_generation`."""
        mode, kv_policy = _MODES[given.mode]
        await weights.cancel("the engine was paused anew.")
        await self._control.pauses.pause(mode, kv_policy=kv_policy, timeout=given.timeout)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def resume(self, weights: Weights) -> dict[str, str]:
        """`/continue_generation`."""
        try:
            await weights.commit()
        finally:  # with the old weights, if the new ones could not be taken
            await self._control.pauses.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def abort(self, given: Abort) -> dict[str, Any]:
        """`/abort_request`."""
        names = None if given.abort_all else [given.rid]
        return {"status": "ok", "num_aborted": await self._control.pauses.abort(names)}

    async def change_memory(
        self, given: ChangeMemory, change: Callable[[list[Memory]], Awaitable[None]]
    ) -> dict[str, Any]:
        """`/release_memory_occupation` and `/resume_memory_occupation`."""
        await change(given.parts)
        sleeping = await self._control.engine.call("sleeping")
        return {"success": True, "message": "", "sleeping": sleeping}

    async def load_tensors(self, given: LoadTensors, content: bytes | bytearray) -> dict[str, Any]:
        """`/load_lora_adapter_from_tensors`."""
        require_own_name(given.lora_name, self._server)
        info = await self._control.adapters.load_file(
            given.lora_name, content, given.config_dict, given.version
        )
        return adapters_told(self._server) | {"version": info.version}

    async def unload_adapter(self, given: UnloadAdapter) -> dict[str, Any]:
        """`/unload_lora_adapter`."""
        await self._control.adapters.unload(given.lora_name)
        return adapters_told(self._server)


class Health:
    """`/health_generate`: however many ask, the engine draws one token a second for them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # a pause shows at once
        self._paused = SharedAnswer(
            lambda: server.control.pauses.is_paused(timeout=ANSWER_PATIENCE), fresh=0.0
        )
        self._drawn = SharedAnswer(lambda: _draw_token(server), PROBE_FRESH)

    async def answer(self, _: object) -> dict[str, str]:
        """Raises `ApiError`, 503, if the engine does not answer or draws no token."""
        try:
            if self._server.client.is_silent:
                raise TimeoutError
            if await self._paused.get():  # also while it sleeps
                return {"status": "paused"}
        except TimeoutError:
            raise ApiError(
                503, "the engine does not answer; it may be stopped.", headers=NO_RETRY
            ) from None
        await self._drawn.get()
        return {"status": "ok"}


async def _draw_token(server: Server) -> None:
    """Have the engine draw a token. It goes before all requests, so that a full queue is no fault.
    Raises `ApiError`, 503.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, priority=-(2**31))
    before = server.client.stats
    stream = server.client.submit([0], params, stream=False)
    try:
        async with asyncio.timeout(HEALTH_PATIENCE):
            while stream.samples_left:
                await stream.next()
    except TimeoutError:
        after = server.client.stats
        # else it has others to serve
        if before is None or after is None or after.num_steps <= before.num_steps:
            text = f"the engine has not drawn a token in {HEALTH_PATIENCE:g} seconds."
            raise ApiError(503, text, headers=NO_RETRY) from None
    finally:
        stream.close()
