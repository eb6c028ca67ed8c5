"""SGLang's RL routes: weights, groups, pauses, memory, checks. Adapters over `server/control`;
replies are those of SGLang 0.5.

Differences from SGLang and special cases:

- Weights sent in several requests take effect together, as `Weights` decides.
- Requests are aborted only if `abort_all_requests` is true, even where SGLang's default is to abort
  them.
- `flush_cache` of an update only frees memory: prefixes of older weights are never used anyway.
- `/update_weights_from_tensor` accepts safetensors, as the body or as base64, and SGLang's pickles
  of CUDA IPC handles, which are read without executing them.
- `/health_generate` draws a token, unless the engine is paused or asleep: then it only has to
  answer. All callers within a second share one token.
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
    only_file,
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

HEALTH_PATIENCE = 20.0  # seconds to draw a token
PROBE_FRESH = 1.0  # seconds for which a drawn token proves health
ANSWER_PATIENCE = 4.0  # seconds for the engine to answer, which it does even during a step
# SGLang's modes -> the engine's modes and policies
_MODES: Mapping[str, tuple[PauseMode, KvPolicy]] = {
    "abort": ("abort", "recompute"),
    "retract": ("keep", "recompute"),
    "in_place": ("keep", "keep"),
}


def routes(router: APIRouter, server: Server) -> None:
    """Add SGLang's control routes."""
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
        "GET /weights_checker": lambda fields: weights.check(fields, commits=False),
        "POST /weights_checker": weights.check,
        "POST /pause_generation": lambda fields: state.pause(fields, weights),
        "POST /continue_generation": lambda _: state.resume(weights),
        "POST /abort_request": state.abort,
        "POST /release_memory_occupation": lambda fields: state.change_memory(
            fields, control.memory.sleep
        ),
        "POST /resume_memory_occupation": lambda fields: state.change_memory(
            fields, control.memory.wake
        ),
        "POST /init_weights_update_group": weights.join,
        "POST /destroy_weights_update_group": weights.leave,
        "POST /begin_weight_update": weights.begin,
        "POST /unload_lora_adapter": state.unload_adapter,
        **{call: _refuser(why) for call, why in NOT_HERE.items()},
    }
    # If one of these is rejected, its weights are missing, so the update is canceled.
    updates: dict[str, Answer] = {
        "POST /update_weights_from_distributed": weights.update_from_distributed,
        "POST /update_weights_from_disk": weights.update_from_disk,
        "POST /update_weights_from_ipc": weights.update_from_ipc,
        "POST /end_weight_update": weights.end,
    }
    add_routes(router, server, ROUTES, answers | updates, dict.fromkeys(updates, weights.fail))
    tensor, adapter = (route for route in ROUTES if route.files)

    async def update_from_tensor(request: Request) -> Response:
        try:
            fields, contents = await read_with_tensors(request, server, tensor, UpdateFromTensor)
            return json_reply(200, await weights.update_from_tensor(fields, contents))
        except BaseException as problem:
            await weights.fail(problem)
            raise

    async def load_tensors(request: Request) -> Response:
        fields, contents = await read_with_tensors(request, server, adapter, LoadTensors)
        content = only_file(contents, "serialized_tensors")
        return json_reply(200, await state.load_tensors(fields, content))

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
        """Answer `/model_info` and `/get_model_info`."""
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

    async def rows(self, fields: Rows) -> list[Any]:
        """Answer GET and POST `/get_weights_by_name`."""
        return await self._control.checksums.rows(fields.name, fields.truncate_size)

    async def loads(self, fields: Loads) -> dict[str, Any]:
        """Answer `GET /v1/loads`."""
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
            "loads": [one] if fields.dp_rank == 0 else [],
        }

    async def pause(self, fields: Pause, weights: Weights) -> dict[str, str]:
        """Answer `POST /pause_generation`."""
        mode, kv_policy = _MODES[fields.mode]
        await weights.cancel("the engine was paused again.")
        await self._control.pauses.pause(mode, kv_policy=kv_policy, timeout=fields.timeout)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def resume(self, weights: Weights) -> dict[str, str]:
        """Answer `POST /continue_generation`."""
        try:
            await weights.commit()
        finally:  # resume with the old weights if the new ones could not be applied
            await self._control.pauses.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def abort(self, fields: Abort) -> dict[str, Any]:
        """Answer `POST /abort_request`."""
        names = None if fields.abort_all else [fields.rid]
        return {"status": "ok", "num_aborted": await self._control.pauses.abort(names)}

    async def change_memory(
        self, fields: ChangeMemory, change: Callable[[list[Memory]], Awaitable[None]]
    ) -> dict[str, Any]:
        """Answer `/release_memory_occupation` and `/resume_memory_occupation`."""
        await change(fields.parts)
        sleeping = await self._control.engine.call("sleeping")
        return {"success": True, "message": "", "sleeping": sleeping}

    async def load_tensors(self, fields: LoadTensors, content: bytes | bytearray) -> dict[str, Any]:
        """Answer `POST /load_lora_adapter_from_tensors`."""
        require_own_name(fields.lora_name, self._server)
        info = await self._control.adapters.load_file(
            fields.lora_name, content, fields.config_dict, fields.version
        )
        return adapters_told(self._server) | {"version": info.version}

    async def unload_adapter(self, fields: UnloadAdapter) -> dict[str, Any]:
        """Answer `POST /unload_lora_adapter`."""
        await self._control.adapters.unload(fields.lora_name)
        return adapters_told(self._server)


class Health:
    """Health check `/health_generate`: the engine draws one token a second for all callers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # not shared for any time, so that a pause shows immediately
        self._paused = SharedAnswer(
            lambda: server.control.pauses.is_paused(timeout=ANSWER_PATIENCE), fresh=0.0
        )
        self._drawn = SharedAnswer(lambda: _draw_token(server), PROBE_FRESH)

    async def answer(self, _: object) -> dict[str, str]:
        """Answer a health check. Raises `ApiError` 503 if the engine does not answer or draw a
        token.
        """
        try:
            if self._server.client.is_silent:
                raise TimeoutError
            if await self._paused.get():  # also true while it sleeps
                return {"status": "paused"}
        except TimeoutError:
            raise ApiError(
                503, "the engine does not answer; it may be stopped.", headers=NO_RETRY
            ) from None
        await self._drawn.get()
        return {"status": "ok"}


async def _draw_token(server: Server) -> None:
    """Draw a token with the highest priority, so that a full queue does not fail the check. Raises
    `ApiError` 503.
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
        # otherwise the engine is making progress with other requests
        if before is None or after is None or after.num_steps <= before.num_steps:
            text = f"the engine did not draw a token within {HEALTH_PATIENCE:g} seconds."
            raise ApiError(503, text, headers=NO_RETRY) from None
    finally:
        stream.close()
