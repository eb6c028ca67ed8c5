"""vLLM's RL routes: pause, weight transfer, sleep, versions. Adapters over `server/control.py`.

Replies are vLLM 0.32's, and so is the order of calls that is asked for; out of order is a 409.
"""

from contextlib import suppress
from typing import Any, get_args

from fastapi import APIRouter, Request, Response

from nano_inference.server.control import Control
from nano_inference.server.errors import ApiError, bad_request, shown
from nano_inference.server.http.replies import json_reply
from nano_inference.server.server import Server
from nano_inference.server.trainers import prime_rl
from nano_inference.server.trainers.reading import (
    Answer,
    Fields,
    add_routes,
    checks_of,
    fields_of,
    tensors_of,
)
from nano_inference.server.trainers.shared import one_field, require_own_name
from nano_inference.types import Memory, PauseMode

GROUP = "vllm"  # its trainers have one group at a time, and give it no name
PACKED_BYTES = 1 << 30  # of a run, unless the trainer says otherwise

# What a memory part is called in `tags`; "scheduling" is what level 0 stops.
_TAGS: tuple[str, ...] = (*get_args(Memory), "scheduling")
_MODES: dict[str, PauseMode] = {mode: mode for mode in get_args(PauseMode)}
# What vLLM answers with an id of its own begins so; clients may name a request by that id.
_PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""
    control = server.control
    transfer = Transfer(control)
    posts: dict[str, Answer] = {
        "/pause": lambda fields: _pause(control, fields),
        "/resume": lambda _: _resume(control),
        "/abort_requests": lambda fields: _abort(control, fields),
        "/inference/v1/abort_requests": lambda fields: _abort_named(control, fields),
        "/init_weight_transfer_engine": transfer.join,
        "/shutdown_weight_transfer_engine": transfer.leave,
        "/start_weight_update": transfer.start,
        "/weight_checker": lambda fields: _check(control, fields),
        "/reset_prefix_cache": lambda fields: _reset_prefix_cache(control, fields),
        "/sleep": lambda fields: _sleep(control, fields),
        "/wake_up": lambda fields: _wake(control, fields),
    }
    gets: dict[str, Answer] = {
        "/is_paused": lambda _: one_field("is_paused", control.is_paused()),
        # as in vLLM, a pause is a light sleep
        "/is_sleeping": lambda _: one_field("is_sleeping", control.is_paused()),
        "/weight_info": lambda _: one_field("weight_version", control.serving_version()),
        "/get_world_size": lambda _: _world_size(server),
    }
    add_routes(router, server, "POST", posts)
    add_routes(router, server, "POST", {"/finish_weight_update": transfer.finish}, transfer.fail)
    add_routes(router, server, "GET", gets)
    _adapter_routes(router, server)

    @router.post(
        "/update_weights", summary="Take part in a transfer of weights: vLLM's, or prime-rl's"
    )
    async def update_weights(request: Request) -> Response:
        fields: Fields | None = None
        try:
            fields = await fields_of(request, server)
            if "weight_dir" in fields.body:
                return await prime_rl.update_weights(server, fields)
            return json_reply(200, await transfer.update(fields))
        except BaseException as problem:
            if fields is None or "weight_dir" not in fields.body:
                await transfer.lose(problem)
            raise


def _adapter_routes(router: APIRouter, server: Server) -> None:
    @router.post("/v1/load_lora_adapter", summary="Serve an adapter, or a new version of it")
    async def load(request: Request) -> Response:
        fields = await fields_of(request, server)
        name, path = fields.text("lora_name"), fields.text("lora_path")
        if not name or not path:
            raise bad_request("Both 'lora_name' and 'lora_path' must be provided.")
        require_own_name(name, server)
        again = fields.flag("load_inplace", default=False)
        await server.control.load_adapter(name, path, again=again)
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", summary="No new request may ask for an adapter")
    async def unload(request: Request) -> Response:
        name = (await fields_of(request, server)).text("lora_name")
        if not name:
            raise bad_request("'lora_name' needs to be provided to unload a LoRA adapter.")
        try:
            await server.control.unload_adapter(name)
        except ApiError as problem:
            if problem.status != 404:
                raise
            text = f"The lora adapter {shown(name)} cannot be found."
            raise ApiError(404, text, "lora_name", problem.code) from problem
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")


def _text(said: str) -> Response:
    return Response(said, media_type="text/plain")


async def _world_size(server: Server) -> dict[str, Any]:
    return {"world_size": server.client.num_engines}


# -- requests --------------------------------------------------------------------------------------


async def _pause(control: Control, fields: Fields) -> dict[str, Any]:
    mode = _MODES[fields.word("mode", get_args(PauseMode), "abort")]
    clear_cache = fields.flag("clear_cache", default=True)
    await control.pause(mode, kv_policy="recompute" if clear_cache else "keep")
    if clear_cache:
        await control.flush_cache()
    return {"status": "paused"}


async def _resume(control: Control) -> dict[str, Any]:
    await control.resume()
    return {"status": "resumed"}


async def _abort(control: Control, fields: Fields) -> dict[str, Any]:
    ids = fields.texts("request_ids")
    if ids:
        names = set(ids) | {each.removeprefix(prefix) for each in ids for prefix in _PREFIXES}
        return {"status": "aborted", "aborted": await control.abort(names)}
    # vLLM's rule: none named, all meant
    return {"status": "aborted", "aborted": await control.abort(None)}


async def _abort_named(control: Control, fields: Fields) -> dict[str, Any]:
    if fields.texts("request_ids") is None:
        raise bad_request("request_ids is missing; it must be a list of ids.", "request_ids")
    return (
        await _abort(control, fields)
        if fields.texts("request_ids")
        else {"status": "aborted", "aborted": 0}
    )


# -- memory ----------------------------------------------------------------------------------------


async def _reset_prefix_cache(control: Control, fields: Fields) -> dict[str, Any]:
    if fields.flag("reset_running_requests", default=False) and (await control.loads()).running:
        raise ApiError(
            501,
            "reset_running_requests is not supported while requests run: what they have cached is "
            "their own. An update "
            "after /pause?mode=keep&clear_cache=true computes it again.",
            "reset_running_requests",
        )
    fields.flag("reset_external", default=False)  # there is no cache outside
    await control.flush_cache()
    return {"success": True}


async def _sleep(control: Control, fields: Fields) -> dict[str, Any]:
    level = fields.number("level", least=0, most=2)
    level = 1 if level is None else level
    mode = _MODES[fields.word("mode", get_args(PauseMode), "abort")]
    if level:
        control.require_no_update()  # before requests are stopped, or ended
    await control.pause(mode, kv_policy="recompute" if level else "keep")
    if level:
        # vLLM forgets the weights at level 2, for trainers that send them again. Here they stay in
        # a file at either level, so that the version that is reported is always one that can serve.
        await control.sleep(("weights", "kv_cache"))
    return {"status": "sleeping", "level": level}


async def _wake(control: Control, fields: Fields) -> dict[str, Any]:
    tags = fields.texts("tags")
    if unknown := [each for each in tags or () if each not in _TAGS]:
        raise bad_request(f"tags holds {shown(unknown[0])}; there are {', '.join(_TAGS)}.", "tags")
    parts = [part for part in get_args(Memory) if tags is None or part in tags]
    if parts:
        await control.wake(parts)
    awake = not await control.call("sleeping")
    if awake:
        await control.resume()
    return {"status": "awake" if awake else "sleeping", "tags": tags}


# -- weights ---------------------------------------------------------------------------------------


async def _check(control: Control, fields: Fields) -> dict[str, Any]:
    action = fields.word("action", ("checksum", "reset", "compare"), "")
    if action == "":
        raise bad_request("action is missing; it must be checksum, reset or compare.", "action")
    if action == "reset":
        raise ApiError(
            501,
            "action=reset, which overwrites the weights with noise, is not supported.",
            "action",
        )
    baseline = fields.part("baseline")
    if action == "compare" and baseline is None:
        raise bad_request("action=compare needs a baseline: tensor name -> checksum.", "baseline")
    if baseline is None or action == "checksum":
        return {"checksums": await control.checksums()}
    mismatches = await control.changed_tensors(baseline.body)
    return {"match": not mismatches, "mismatches": mismatches}


class Transfer:
    """One trainer's transfers of weights: join the group, then start, update as often as it likes,
    finish.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        # of the group's broadcasts; None: a broadcast a tensor
        self._packed_bytes: int | None = None

    async def join(self, fields: Fields) -> dict[str, Any]:
        """`/init_weight_transfer_engine`."""
        info = _part(fields, "init_info")
        if info.value("nccl_unique_id_b64") is not None:
            raise ApiError(
                501,
                "nccl_unique_id_b64 is not supported: the trainer opens a torch.distributed group "
                "as rank 0, at "
                "master_address and master_port.",
                "init_info.nccl_unique_id_b64",
            )
        host = info.required_text("master_address")
        port = info.required_number("master_port", least=1, most=65535)
        world_size = info.required_number("world_size", least=2, most=2**16)
        rank = info.required_number("rank_offset", least=1, most=world_size - 1)
        packed_bytes = _packed_bytes(info, None)
        timeout = fields.seconds("timeout")
        await self._control.join_group(
            GROUP, host, port, rank=rank, world_size=world_size, timeout=timeout
        )
        self._packed_bytes = packed_bytes
        return {"message": "Weight transfer initialized"}

    async def leave(self, _: Fields) -> dict[str, Any]:
        """`/shutdown_weight_transfer_engine`. Without a group it has nothing to do, as in vLLM."""
        if self._control.session_open:
            raise ApiError(
                409, "a weight update is open; finish it before the transfer is shut down."
            )
        try:
            await self._control.leave_group(GROUP)
        except ApiError as problem:
            if problem.status != 404:
                raise
        return {"message": "Weight transfer shut down"}

    async def start(self, fields: Fields) -> dict[str, Any]:
        """`/start_weight_update`."""
        if not fields.flag("is_checkpoint_format", default=True):
            raise bad_request(
                "is_checkpoint_format must be true: tensors are named as in the checkpoint."
            )
        await self._require_group()
        await self._control.begin_update(**checks_of(fields))
        return {"message": "Weight update started"}

    async def update(self, fields: Fields) -> dict[str, Any]:
        """`/update_weights`."""
        if not self._control.session_open:
            raise ApiError(
                409, "no weight update is open; call /start_weight_update before /update_weights."
            )
        await self._require_group()
        info = _update_info(fields)
        if info.value("num_updates_list") is not None:
            raise bad_request(
                "num_updates_list is not supported: tensors are sent whole.", "num_updates_list"
            )
        await self._control.receive_broadcast(
            GROUP,
            tensors_of(info, "dtype_names"),
            packed_bytes=_packed_bytes(info, self._packed_bytes),
            timeout=fields.seconds("timeout"),
        )
        return {"message": "Weights updated"}

    async def fail(self, problem: BaseException) -> None:
        """A request of the update was refused, or failed: the update ends, and the old weights
        serve on.
        """
        await self._control.fail_update(problem)

    async def lose(self, problem: BaseException) -> None:
        """The same, and the group ends: the trainer may have sent what the next update would take
        for its own.
        """
        await self.fail(problem)
        with suppress(ApiError):  # there is none
            await self._control.leave_group(GROUP)

    async def finish(self, fields: Fields) -> dict[str, Any]:
        """`/finish_weight_update`."""
        await self._control.finish_update(version=fields.version("weight_version"))
        return {"message": "Weight update finished"}

    async def _require_group(self) -> None:
        if not await self._control.has_group(GROUP):
            raise ApiError(
                409,
                "there is no weight transfer group with a living trainer; call "
                "/init_weight_transfer_engine first.",
            )


def _part(fields: Fields, name: str) -> Fields:
    part = fields.part(name)
    if part is None:
        raise bad_request(f"{name} is missing; it must be an object.", name)
    return part


def _update_info(fields: Fields) -> Fields:
    """One for all workers, or a list of one a worker; there is one worker."""
    given = fields.value("update_info")
    if isinstance(given, list) and len(given) == 1:
        return _part(Fields({"update_info": given[0]}, {}), "update_info")
    return _part(fields, "update_info")


def _packed_bytes(info: Fields, default: int | None) -> int | None:
    """Bytes of a packed run. vLLM says it of the group; before 0.28 it did so of each update."""
    packed = info.flag("packed", default=default is not None)
    size = info.number("packed_buffer_size_bytes", least=1, most=2**40)
    info.number("packed_num_buffers", least=1)  # the sender's own affair
    return (size or default or PACKED_BYTES) if packed else None
