"""vLLM's RL routes: pause, weight transfer, sleep, versions. Adapters over `server/control`.

Replies are vLLM 0.32's, and so is the order of calls that is asked for; out of order is a 409.
"""

from contextlib import suppress
from typing import Any, get_args

from fastapi import APIRouter, Request, Response

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
    Wake,
)
from nano_inference.server.errors import ApiError, shown
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers import prime_rl
from nano_inference.server.trainers.reading import Answer, Raw, add_route, add_routes, raw_of
from nano_inference.server.trainers.shared import one_field, require_own_name
from nano_inference.types import Memory

GROUP = "vllm"  # its trainers have one group at a time, and give it no name
# What vLLM answers with an id of its own begins so; clients may name a request by that id.
_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""
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
        # as in vLLM, a pause is a light sleep
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

    async def pause(self, given: Pause) -> dict[str, Any]:
        """`/pause`."""
        kv_policy = "recompute" if given.clear_cache else "keep"
        await self._control.pauses.pause(given.mode, kv_policy=kv_policy)
        if given.clear_cache:
            await self._control.memory.flush_cache()
        return {"status": "paused"}

    async def resume(self, _: object) -> dict[str, Any]:
        """`/resume`."""
        await self._control.pauses.resume()
        return {"status": "resumed"}

    async def world_size(self, _: object) -> dict[str, Any]:
        """`/get_world_size`."""
        return {"world_size": self._server.client.num_engines}

    async def abort(self, given: Abort) -> dict[str, Any]:
        """`/abort_requests`."""
        ids = given.request_ids
        names = set(ids) | {each.removeprefix(prefix) for each in ids for prefix in _PREFIXES}
        return {"status": "aborted", "aborted": await self._control.pauses.abort(names or None)}

    async def abort_named(self, given: AbortNamed) -> dict[str, Any]:
        """`/inference/v1/abort_requests`."""
        if not given.request_ids:
            return {"status": "aborted", "aborted": 0}
        return await self.abort(Abort(request_ids=given.request_ids))

    async def reset_prefix_cache(self, given: ResetPrefixCache) -> dict[str, Any]:
        """`/reset_prefix_cache`."""
        if given.reset_running_requests and (await self._control.pauses.loads()).running:
            raise ApiError(
                501,
                "reset_running_requests is not supported while requests run: what they have cached "
                "is their own. An update "
                "after /pause?mode=keep&clear_cache=true computes it again.",
                "reset_running_requests",
            )
        await self._control.memory.flush_cache()
        return {"success": True}

    async def sleep(self, given: Sleep) -> dict[str, Any]:
        """`/sleep`."""
        if given.level:
            self._control.memory.require_no_update()  # before requests are stopped, or ended
        kv_policy = "recompute" if given.level else "keep"
        await self._control.pauses.pause(given.mode, kv_policy=kv_policy)
        if given.level:
            # vLLM forgets the weights at level 2, for trainers that send them again. Here they stay
            # in a file at either level, so that the version that is reported is always one that
            # can serve.
            await self._control.memory.sleep(("weights", "kv_cache"))
        return {"status": "sleeping", "level": given.level}

    async def wake(self, given: Wake) -> dict[str, Any]:
        """`/wake_up`."""
        tags = given.tags
        if parts := [part for part in get_args(Memory) if tags is None or part in tags]:
            await self._control.memory.wake(parts)
        awake = not await self._control.engine.call("sleeping")
        if awake:
            await self._control.pauses.resume()
        return {"status": "awake" if awake else "sleeping", "tags": tags}

    async def check(self, given: CheckWeights) -> dict[str, Any]:
        """`/weight_checker`."""
        if given.action == "checksum":
            return {"checksums": await self._control.checksums.get()}
        mismatches = await self._control.checksums.changed_tensors(given.baseline)
        return {"match": not mismatches, "mismatches": mismatches}


class Transfer:
    """One trainer's transfers of weights: join the group, then start, update as often as it likes,
    finish.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        # of the group's broadcasts; None: a broadcast a tensor
        self._packed_bytes: int | None = None

    async def join(self, given: InitTransfer) -> dict[str, Any]:
        """`/init_weight_transfer_engine`."""
        info = given.init_info
        await self._control.groups.join(
            GROUP,
            info.master_address,
            info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            timeout=given.timeout,
        )
        self._packed_bytes = info.packed_bytes(None)
        return {"message": "Weight transfer initialized"}

    async def leave(self, _: object) -> dict[str, Any]:
        """`/shutdown_weight_transfer_engine`. Without a group it has nothing to do, as in vLLM."""
        if self._control.updates.is_open:
            raise ApiError(
                409, "a weight update is open; finish it before the transfer is shut down."
            )
        try:
            await self._control.groups.leave(GROUP)
        except ApiError as problem:
            if problem.status != 404:
                raise
        return {"message": "Weight transfer shut down"}

    async def start(self, given: StartUpdate) -> dict[str, Any]:
        """`/start_weight_update`."""
        await self._require_group()
        await self._control.updates.begin(**given.checks)
        return {"message": "Weight update started"}

    async def update(self, raw: Raw) -> dict[str, Any]:
        """`/update_weights`."""
        if not self._control.updates.is_open:
            raise ApiError(
                409, "no weight update is open; call /start_weight_update before /update_weights."
            )
        await self._require_group()
        given = raw.read(Update)
        await self._control.updates.receive_broadcast(
            GROUP,
            given.update_info.tensors(),
            packed_bytes=given.update_info.packed_bytes(self._packed_bytes),
            timeout=given.timeout,
        )
        return {"message": "Weights updated"}

    async def fail(self, problem: BaseException) -> None:
        """A request of the update was rejected, or failed: the update ends, and the old weights
        serve.
        """
        await self._control.updates.fail(problem)

    async def lose(self, problem: BaseException) -> None:
        """The same, and the group ends: the trainer may have sent what the next update would take
        for its own.
        """
        await self.fail(problem)
        with suppress(ApiError):  # there is none
            await self._control.groups.leave(GROUP)

    async def finish(self, given: FinishUpdate) -> dict[str, Any]:
        """`/finish_weight_update`."""
        await self._control.updates.finish(version=given.weight_version)
        return {"message": "Weight update finished"}

    async def _require_group(self) -> None:
        if not await self._control.groups.has(GROUP):
            raise ApiError(
                409,
                "there is no weight transfer group with a living trainer; call "
                "/init_weight_transfer_engine first.",
            )


class Adapters:
    """LoRA adapters; the answers are texts."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def load(self, given: LoadAdapter) -> Response:
        """`/v1/load_lora_adapter`."""
        name = given.lora_name
        require_own_name(name, self._server)
        adapters = self._server.control.adapters
        await adapters.load(name, given.lora_path, again=given.load_inplace)
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, given: UnloadAdapter) -> Response:
        """`/v1/unload_lora_adapter`."""
        name = given.lora_name
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
