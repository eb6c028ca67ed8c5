"""SGLang's RL routes: weights, groups, pauses, memory, checks. Adapters over `server/control.py`;
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
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, get_args

from fastapi import APIRouter, Request, Response

import nano_inference
from nano_inference.server.control import Control
from nano_inference.server.errors import NO_RETRY, ApiError, bad_request, shown
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import (
    Answer,
    Fields,
    add_routes,
)
from nano_inference.server.trainers.sglang.weights import Weights, tensors_and_fields
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
_NOTHING_TO_RELEASE = "cuda_graph"  # a tag of SGLang's; here its memory goes with the cache's

_NOT_HERE: Mapping[str, str] = {
    "/post_process_weights": "weights are not repacked here; send them as they stand in a "
    "checkpoint.",
    "/pull_weights": "the engine fetches no weights; send them, or give a folder to "
    "/update_weights_from_disk.",
    "/update_weights_from_ipc": "weights are not shared between processes; send them by a group, "
    "or as safetensors.",
}


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""
    control, weights = server.control, Weights(server.control)
    gets: Mapping[str, Answer] = {
        "/model_info": lambda _: _model_info(server),
        "/get_model_info": lambda _: _model_info(server),
        "/get_server_info": lambda _: server_info(server),
        "/get_weights_by_name": lambda fields: _rows(control, fields),
        "/get_weight_version": lambda _: one_field("weight_version", control.serving_version()),
        "/health_generate": _Health(server).answer,
        "/v1/loads": lambda fields: _loads(control, fields),
        "/weights_checker": lambda fields: weights.check(fields, commits=False),
    }
    posts: Mapping[str, Answer] = {
        "/pause_generation": lambda fields: _pause(control, weights, fields),
        "/continue_generation": lambda _: _continue(control, weights),
        "/abort_request": lambda fields: _abort(control, fields),
        "/release_memory_occupation": lambda fields: _change_memory(control, control.sleep, fields),
        "/resume_memory_occupation": lambda fields: _change_memory(control, control.wake, fields),
        "/init_weights_update_group": lambda fields: _done(weights.join(fields)),
        "/destroy_weights_update_group": lambda fields: _done(weights.leave(fields)),
        "/get_weights_by_name": lambda fields: _rows(control, fields),
        "/begin_weight_update": lambda fields: _done(weights.begin(fields)),
        "/weights_checker": weights.check,
        "/unload_lora_adapter": lambda fields: _unload_adapter(server, fields),
        **{path: _refuser(why) for path, why in _NOT_HERE.items()},
    }
    # A refusal of these ends the update: its weights are missing.
    updates: Mapping[str, Answer] = {
        "/update_weights_from_distributed": lambda fields: _done(
            weights.update_from_distributed(fields)
        ),
        "/update_weights_from_disk": lambda fields: _done(
            weights.update_from_disk(fields), num_paused_requests=0
        ),
        "/end_weight_update": lambda _: _done(weights.end()),
    }
    add_routes(router, server, "GET", gets)
    add_routes(router, server, "POST", posts)
    add_routes(router, server, "POST", updates, weights.fail)

    @router.post("/load_lora_adapter_from_tensors", summary="An adapter of safetensors")
    async def load_lora_adapter_from_tensors(request: Request) -> Response:
        return json_reply(200, await _load_tensors(request, server))

    @router.post("/update_weights_from_tensor", summary="An update of safetensors, in the body")
    async def update_weights_from_tensor(request: Request) -> Response:
        try:
            return json_reply(200, await _done(weights.update_from_tensor(request, server)))
        except BaseException as problem:
            await weights.fail(problem)
            raise


async def _done(message: Awaitable[str], **more: object) -> dict[str, object]:
    return {"success": True, "message": await message, **more}


def _refuser(why: str) -> Answer:
    async def refuse(_: Fields) -> None:
        raise ApiError(501, why)

    return refuse


# -- what serves -----------------------------------------------------------------------------------


async def _model_info(server: Server) -> dict[str, Any]:
    served = server.require_served()
    return {
        "model_path": server.control.model_path,
        "served_model_name": served.name,
        "tokenizer_path": served.engine.tokenizer_folder,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": await server.control.serving_version(),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_model_len": served.engine.max_model_len,
    }


class _Health:
    """`/health_generate`: however many ask, the engine draws one token a second for them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # a pause shows at once
        self._paused = SharedAnswer(
            lambda: server.control.is_paused(timeout=ANSWER_PATIENCE), fresh=0.0
        )
        self._drawn = SharedAnswer(lambda: _draw_token(server), PROBE_FRESH)

    async def answer(self, _: Fields) -> dict[str, str]:
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


async def _loads(control: Control, fields: Fields) -> dict[str, Any]:
    loads = await control.loads()
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
        "loads": [one] if fields.number("dp_rank", least=0) in (None, 0) else [],
    }


# -- requests --------------------------------------------------------------------------------------


async def _pause(control: Control, weights: Weights, fields: Fields) -> dict[str, str]:
    mode, kv_policy = _MODES[fields.word("mode", tuple(_MODES), "abort")]
    await weights.cancel("the engine was paused anew.")
    await control.pause(mode, kv_policy=kv_policy, timeout=fields.seconds("timeout"))
    return {"message": "Generation paused successfully.", "status": "ok"}


async def _continue(control: Control, weights: Weights) -> dict[str, str]:
    try:
        await weights.commit()
    finally:  # with the old weights, if the new ones could not be taken
        await control.resume()
    return {"message": "Generation continued successfully.", "status": "ok"}


async def _abort(control: Control, fields: Fields) -> dict[str, Any]:
    if fields.flag("prefix", default=False):
        raise ApiError(
            501,
            "prefix is not supported: name each request by its rid, or send abort_all.",
            "prefix",
        )
    rid = fields.text("rid")
    if not fields.flag("abort_all", default=False) and not rid:
        raise bad_request("rid is missing; or send abort_all as true.", "rid")
    names = None if fields.flag("abort_all", default=False) else [rid or ""]
    return {"status": "ok", "num_aborted": await control.abort(names)}


# -- adapters --------------------------------------------------------------------------------------


async def _load_tensors(request: Request, server: Server) -> dict[str, Any]:
    """`/load_lora_adapter_from_tensors`; a name that is loaded gets a new version."""
    fields, content = await tensors_and_fields(
        request, server, "serialized_tensors", "serialized_named_tensors"
    )
    name = fields.required_text("lora_name")
    require_own_name(name, server)
    fields.flag("pinned", default=False)  # all stay until they are unloaded
    if fields.value("added_tokens_config"):
        raise bad_request(
            "added_tokens_config is not supported: adapters add no tokens; leave it out.",
            "added_tokens_config",
        )
    version = fields.number("version", least=0)
    info = await server.control.load_adapter_file(name, content, _config(fields), version)
    return adapters_told(server) | {"version": info.version}


def _config(fields: Fields) -> Mapping[str, Any]:
    """PEFT's configuration: an object of the JSON, or JSON in the query."""
    given = fields.value("config_dict")
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    if not isinstance(given, dict):
        raise bad_request(
            "config_dict must be an object, what PEFT's adapter_config.json says (r, lora_alpha), "
            f"not {shown(given)}.",
            "config_dict",
        )
    return given


async def _unload_adapter(server: Server, fields: Fields) -> dict[str, Any]:
    await server.control.unload_adapter(fields.required_text("lora_name"))
    return adapters_told(server)


# -- memory ----------------------------------------------------------------------------------------


async def _change_memory(
    control: Control, change: Callable[[list[Memory]], Awaitable[None]], fields: Fields
) -> dict[str, Any]:
    """Let the parts that a request names sleep, or wake."""
    await change(_memory(fields))
    return {"success": True, "message": "", "sleeping": await control.call("sleeping")}


def _memory(fields: Fields) -> list[Memory]:
    tags = fields.texts("tags")
    parts = get_args(Memory)
    if unknown := [each for each in tags or () if each not in (*parts, _NOTHING_TO_RELEASE)]:
        raise bad_request(f"tags holds {shown(unknown[0])}; there are {', '.join(parts)}.", "tags")
    return [part for part in parts if tags is None or part in tags]


async def _rows(control: Control, fields: Fields) -> list[Any]:
    name, count = fields.required_text("name"), fields.number("truncate_size", least=1, most=2**31)
    return await control.weight_rows(name, 100 if count is None else count)
