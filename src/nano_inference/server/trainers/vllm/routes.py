"""vLLM's RL routes: pause, weight transfer, sleep, versions. Adapters over `server/control`.

Replies and the order of calls are those of vLLM 0.32. A call out of order is a 409.
"""

from contextlib import suppress
from typing import Any, get_args

from fastapi import APIRouter, Request, Response

from nano_inference.parallel.shared_tensors import Offer
from nano_inference.server.control.control import Control
from nano_inference.server.control.requests.vllm import (
    ROUTES,
    Abort,
    AbortNamed,
    CheckWeights,
    FinishUpdate,
    InitTransfer,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Sleep,
    StartUpdate,
    UnloadAdapter,
    Update,
    UpdateInfo,
    Wake,
)
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers import prime_rl
from nano_inference.server.trainers.handles import offers_of_vllm
from nano_inference.server.trainers.reading import (
    Answer,
    Raw,
    add_route,
    add_routes,
    decoded,
    raw_of,
)
from nano_inference.server.trainers.shared import one_field, require_own_name
from nano_inference.types import Memory

GROUP = "vllm"  # vLLM's trainers have one unnamed group at a time
# Prefixes of the ids that vLLM itself puts on replies. Clients may abort requests by such an id.
_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")


def routes(router: APIRouter, server: Server) -> None:
    """Add vLLM's control routes."""
    control = server.control
    state, transfer, adapters = State(server), Transfer(control), Adapters(server)
    answers: dict[str, Answer] = {
        "POST /pause": state.pause,
        "POST /resume": state.resume,
        "GET /is_paused": lambda _: one_field("is_paused", control.pauses.is_paused()),
        "POST /abort_requests": state.abort,
        "POST /inference/v1/abort_requests": state.abort_named,
        "POST /init_weight_transfer_engine": transfer.join,
        "POST /shutdown_weight_transfer_engine": transfer.leave,
        "POST /start_weight_update": transfer.start,
        "POST /finish_weight_update": transfer.finish,
        "GET /weight_info": lambda _: one_field("weight_version", control.engine.serving_version()),
        "POST /weight_checker": state.check,
        "POST /reset_prefix_cache": state.reset_prefix_cache,
        "POST /sleep": state.sleep,
        "POST /wake_up": state.wake,
        # as in vLLM, a pause counts as light sleep
        "GET /is_sleeping": lambda _: one_field("is_sleeping", control.pauses.is_paused()),
        "GET /get_world_size": state.world_size,
        "POST /v1/load_lora_adapter": adapters.load,
        "POST /v1/unload_lora_adapter": adapters.unload,
    }
    add_routes(router, server, ROUTES, answers, {"POST /finish_weight_update": transfer.fail})

    async def update_weights(request: Request) -> Response:
        raw: Raw | None = None
        try:
            raw = await raw_of(request, server)
            if "weight_dir" in raw.body:
                return await prime_rl.update_weights(server, raw)
            return json_reply(200, await transfer.update(raw))
        except BaseException as problem:
            if raw is None or "weight_dir" not in raw.body:
                await transfer.lose(problem)
            raise

    add_route(
        router, next(each for each in ROUTES if each.path == "/update_weights"), update_weights
    )


class State:
    """Routes about the state of the engine: pauses, sleep, cache, versions."""

    def __init__(self, server: Server) -> None:
        self._server, self._control = server, server.control

    async def pause(self, fields: Pause) -> dict[str, Any]:
        """Answer `POST /pause`."""
        kv_policy = "recompute" if fields.clear_cache else "keep"
        await self._control.pauses.pause(fields.mode, kv_policy=kv_policy)
        if fields.clear_cache:
            await self._control.memory.flush_cache()
        return {"status": "paused"}

    async def resume(self, _: object) -> dict[str, Any]:
        """Answer `POST /resume`."""
        await self._control.pauses.resume()
        return {"status": "resumed"}

    async def world_size(self, _: object) -> dict[str, Any]:
        """Answer `GET /get_world_size`."""
        return {"world_size": self._server.client.num_engines}

    async def abort(self, fields: Abort) -> dict[str, Any]:
        """Answer `POST /abort_requests`."""
        ids = fields.request_ids
        names = set(ids) | {each.removeprefix(prefix) for each in ids for prefix in _PREFIXES}
        return {"status": "aborted", "aborted": await self._control.pauses.abort(names or None)}

    async def abort_named(self, fields: AbortNamed) -> dict[str, Any]:
        """Answer `POST /inference/v1/abort_requests`."""
        if not fields.request_ids:
            return {"status": "aborted", "aborted": 0}
        return await self.abort(Abort(request_ids=fields.request_ids))

    async def reset_prefix_cache(self, fields: ResetPrefixCache) -> dict[str, Any]:
        """Answer `POST /reset_prefix_cache`."""
        if fields.reset_running_requests and (await self._control.pauses.loads()).running:
            raise ApiError(
                501,
                "reset_running_requests is not supported while requests run, since they use "
                "their own cached blocks. To recompute them, update the weights after "
                "/pause?mode=keep&clear_cache=true.",
                "reset_running_requests",
            )
        await self._control.memory.flush_cache()
        return {"success": True}

    async def sleep(self, fields: Sleep) -> dict[str, Any]:
        """Answer `POST /sleep`."""
        if fields.level:
            self._control.memory.require_no_update()  # check before requests are paused or aborted
        kv_policy = "recompute" if fields.level else "keep"
        await self._control.pauses.pause(fields.mode, kv_policy=kv_policy)
        if fields.level:
            # At level 2, vLLM discards the weights, and trainers send them again. Here they are
            # kept in a file at either level, so that the reported version can always serve.
            await self._control.memory.sleep(("weights", "kv_cache"))
        return {"status": "sleeping", "level": fields.level}

    async def wake(self, fields: Wake) -> dict[str, Any]:
        """Answer `POST /wake_up`."""
        tags = fields.tags
        if parts := [part for part in get_args(Memory) if tags is None or part in tags]:
            await self._control.memory.wake(parts)
        awake = not await self._control.engine.call("sleeping")
        if awake:
            await self._control.pauses.resume()
        return {"status": "awake" if awake else "sleeping", "tags": tags}

    async def check(self, fields: CheckWeights) -> dict[str, Any]:
        """Answer `POST /weight_checker`."""
        if fields.action == "checksum":
            return {"checksums": await self._control.checksums.get()}
        mismatches = await self._control.checksums.changed_tensors(fields.baseline)
        return {"match": not mismatches, "mismatches": mismatches}


class Transfer:
    """Weight transfers of one trainer: join the group, then start, update any number of times,
    finish.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        # size of the group's packed runs; None: one broadcast per tensor
        self._packed_bytes: int | None = None
        self._lends = False  # the trainer sends handles of memory instead of broadcasts

    async def join(self, fields: InitTransfer) -> dict[str, Any]:
        """Answer `POST /init_weight_transfer_engine`."""
        info = fields.init_info
        if info.has_group:
            assert info.rank_offset is not None
            assert info.world_size is not None
            await self._control.groups.join(
                GROUP,
                info.master_address or "",
                info.master_port or 0,
                rank=info.rank_offset,
                world_size=info.world_size,
                pynccl=info.pynccl,
                unique_id=info.nccl_unique_id_b64,
                timeout=fields.timeout,
            )
        self._packed_bytes, self._lends = info.packed_bytes(None), not info.has_group
        return {"message": "Weight transfer initialized"}

    async def leave(self, _: object) -> dict[str, Any]:
        """Answer `POST /shutdown_weight_transfer_engine`. As in vLLM, it succeeds without a
        group.
        """
        if self._control.updates.is_open:
            raise ApiError(
                409, "a weight update is open; finish it before you shut the transfer down."
            )
        self._lends = False
        try:
            await self._control.groups.leave(GROUP)
        except ApiError as problem:
            if problem.status != 404:
                raise
        return {"message": "Weight transfer shut down"}

    async def start(self, fields: StartUpdate) -> dict[str, Any]:
        """Answer `POST /start_weight_update`."""
        await self._require_transfer()
        await self._control.updates.begin(**fields.checks)
        return {"message": "Weight update started"}

    async def update(self, raw: Raw) -> dict[str, Any]:
        """Answer `POST /update_weights`."""
        if not self._control.updates.is_open:
            raise ApiError(
                409, "no weight update is open; call /start_weight_update before /update_weights."
            )
        await self._require_transfer()
        fields = raw.read(Update)
        info, updates = fields.update_info, self._control.updates
        if self._lends:
            await updates.receive_lent(_offers(info))
        elif info.ipc_handles_pickled is not None:
            raise ApiError(
                409,
                "the trainer joined a group; to send handles, call /init_weight_transfer_engine "
                "with an empty init_info.",
                "ipc_handles_pickled",
            )
        else:
            await updates.receive_broadcast(
                GROUP,
                info.tensors(),
                packed_bytes=info.packed_bytes(self._packed_bytes),
                timeout=fields.timeout,
            )
        return {"message": "Weights updated"}

    async def fail(self, problem: BaseException) -> None:
        """Cancel the update after one of its requests was rejected or failed. The old weights keep
        serving.
        """
        await self._control.updates.fail(problem)

    async def lose(self, problem: BaseException) -> None:
        """Cancel the update and leave the group: the trainer may have sent tensors that the next
        update would take for its own.
        """
        await self.fail(problem)
        with suppress(ApiError):  # there may be no group
            await self._control.groups.leave(GROUP)

    async def finish(self, fields: FinishUpdate) -> dict[str, Any]:
        """Answer `POST /finish_weight_update`."""
        await self._control.updates.finish(version=fields.weight_version)
        return {"message": "Weight update finished"}

    async def _require_transfer(self) -> None:
        if not self._lends and not await self._control.groups.has(GROUP):
            raise ApiError(
                409,
                "no weight transfer group with a live trainer; call "
                "/init_weight_transfer_engine first.",
            )


def _offers(info: UpdateInfo) -> list[Offer]:
    """Return the offers of an update's handles. Raises `ApiError` 400."""
    field, text = "ipc_handles_pickled", info.ipc_handles_pickled
    if text is None:
        raise bad_request(f"{field} is missing; it must be vLLM's handles as base64.", field)
    return offers_of_vllm(decoded(text, field), info.tensors(), info.tensor_sizes, field)


class Adapters:
    """Routes for LoRA adapters, which answer with plain text."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def load(self, fields: LoadAdapter) -> Response:
        """Answer `POST /v1/load_lora_adapter`."""
        name = fields.lora_name
        require_own_name(name, self._server)
        adapters = self._server.control.adapters
        await adapters.load(name, fields.lora_path, again=fields.load_inplace)
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, fields: UnloadAdapter) -> Response:
        """Answer `POST /v1/unload_lora_adapter`."""
        name = fields.lora_name
        try:
            await self._server.control.adapters.unload(name)
        except ApiError as problem:
            if problem.status != 404:
                raise
            text = f"The lora adapter {shown(name)} cannot be found."
            raise ApiError(404, text, "lora_name", problem.code) from problem
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")


def _text(said: str) -> Response:
    return Response(said, media_type="text/plain")
