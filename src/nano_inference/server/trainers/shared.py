"""The routes that two dialects have under one path. Their replies hold the fields of both."""

from collections.abc import Awaitable, Mapping
from typing import Any

from fastapi import APIRouter

import nano_inference
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import Answer, Fields, add_routes


def routes(router: APIRouter, server: Server) -> None:
    """The routes."""
    gets: Mapping[str, Answer] = {
        "/flush_cache": lambda _: _flush_cache(server),
        "/server_info": lambda fields: _info(server, fields),
    }
    posts: Mapping[str, Answer] = {
        "/flush_cache": lambda _: _flush_cache(server),
        "/load_lora_adapter": lambda fields: _load_adapter(server, fields),
        "/update_weight_version": lambda fields: _name_version(server, fields),
    }
    add_routes(router, server, "GET", gets)
    add_routes(router, server, "POST", posts)


async def _info(server: Server, fields: Fields) -> dict[str, Any]:
    said = await server_info(server)
    if fields.word("config_format", ("json", "text"), "json") == "text":
        said["vllm_config"] = str(said["vllm_config"])
    return said


async def _name_version(server: Server, fields: Fields) -> dict[str, Any]:
    version = fields.version("new_version")
    if version is None:
        raise bad_request("new_version is missing; it must be a string.", "new_version")
    # SGLang's default would end every request with each version; only a client that says so gets
    # that.
    if fields.flag("abort_all_requests", default=False):
        await server.control.abort(None)
    await server.control.name_version(version)
    message = f"the weights that serve are version {version}."
    return {"success": True, "message": message, "new_version": version}


async def _flush_cache(server: Server) -> dict[str, Any]:
    try:
        await server.control.flush_cache(only_idle=True)
    except ApiError as problem:
        if problem.status != 409:
            raise
        raise ApiError(400, problem.message) from None  # at which SGLang's clients ask again
    return {"success": True, "flushed": True, "message": "the prefix cache is empty."}


async def _load_adapter(server: Server, fields: Fields) -> dict[str, Any]:
    """SGLang's and prime-rl's. As the latter wants it, a name that is loaded gets a new version."""
    fields.flag("pinned", default=False)  # all stay until they are unloaded
    name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
    require_own_name(name, server)
    await server.control.load_adapter(name, path)
    return adapters_told(server)


def require_own_name(name: str, server: Server) -> None:
    """Raise `ApiError`, 400, if an adapter would be called as the model is."""
    if name in server.require_served().all_names:
        raise bad_request(
            f"The lora adapter name '{name}' conflicts with a served base model.", "lora_name"
        )


async def one_field(name: str, value: Awaitable[object]) -> dict[str, Any]:
    """An answer of one field."""
    return {name: await value}


def adapters_told(server: Server) -> dict[str, Any]:
    """What SGLang answers when adapters have changed; `status` is prime-rl's."""
    loaded = {each.name: each.folder or each.name for each in server.control.adapters.values()}
    return {"success": True, "error_message": "", "loaded_adapters": loaded, "status": "ok"}


async def server_info(server: Server) -> dict[str, Any]:
    """What both dialects' clients read in it."""
    served = server.require_served()
    info: dict[str, Any] = await server.control.call("describe")
    adapters = {name: info.pop(name, 0) for name in ("max_loras", "max_lora_rank")}
    dtype = str(info.get("dtype", "float32")).removeprefix("torch.")
    return {
        "version": nano_inference.__version__,
        "model_path": server.control.model_path,
        "served_model_name": served.name,
        "max_model_len": served.engine.max_model_len,
        "weight_version": await server.control.serving_version(),
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,  # slime wants to find its own setting here
        # SGLang's word for the room of its cache
        "max_total_num_tokens": info.get("kv_cache_tokens"),
        **info,
        "vllm_config": {
            # TRL asks only whether it is null. "nccl" is vLLM's word for a group that the trainer
            # opens as rank 0; on a CPU the group is gloo's.
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {
                "model": served.engine.model_path,
                "dtype": f"torch.{dtype}",
                "max_model_len": served.engine.max_model_len,
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
            },
            # null: no adapters are taken, and TRL's trainers send all weights
            "lora_config": adapters if adapters["max_loras"] else None,
        },
    }
