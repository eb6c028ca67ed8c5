"""Routes that vLLM's and SGLang's dialects share. Their replies contain the fields of both."""

from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter

import nano_inference
from nano_inference.server.control.requests.shared import (
    ROUTES,
    LoadAdapter,
    NameVersion,
    ServerInfo,
)
from nano_inference.server.errors import ApiError, bad_request
from nano_inference.server.server import Server
from nano_inference.server.trainers.reading import Answer, add_routes


def routes(router: APIRouter, server: Server) -> None:
    """Add the routes that two dialects share."""

    async def flush_cache(_: object) -> dict[str, Any]:
        try:
            await server.control.memory.flush_cache(only_idle=True)
        except ApiError as problem:
            if problem.status != 409:
                raise
            raise ApiError(400, problem.message) from None  # SGLang's clients retry on a 400
        return {"success": True, "flushed": True, "message": "the prefix cache is empty."}

    async def info(fields: ServerInfo) -> dict[str, Any]:
        said = await server_info(server)
        if fields.config_format == "text":
            said["vllm_config"] = str(said["vllm_config"])
        return said

    async def name_version(fields: NameVersion) -> dict[str, Any]:
        # SGLang's default would end every request at each version; here clients must ask for it.
        if fields.abort_all_requests:
            await server.control.pauses.abort(None)
        version = fields.new_version
        await server.control.updates.name_version(version)
        message = f"the served weights are now called version {version}."
        return {"success": True, "message": message, "new_version": version}

    async def load_adapter(fields: LoadAdapter) -> dict[str, Any]:
        """Load an adapter for SGLang and prime-rl. As prime-rl expects, a loaded name gets a new
        version.
        """
        require_own_name(fields.lora_name, server)
        await server.control.adapters.load(fields.lora_name, fields.lora_path)
        return adapters_told(server)

    answers: dict[str, Answer] = {
        "GET /flush_cache": flush_cache,
        "POST /flush_cache": flush_cache,
        "GET /server_info": info,
        "POST /load_lora_adapter": load_adapter,
        "POST /update_weight_version": name_version,
    }
    add_routes(router, server, ROUTES, answers)


def require_own_name(name: str, server: Server) -> None:
    """Raise `ApiError` 400 if an adapter has the model's name."""
    if name in server.require_served().all_names:
        raise bad_request(
            f"The lora adapter name '{name}' conflicts with a served base model.", "lora_name"
        )


async def one_field(name: str, value: Awaitable[object]) -> dict[str, Any]:
    """Return a reply with one field."""
    return {name: await value}


def adapters_told(server: Server) -> dict[str, Any]:
    """Return SGLang's reply after a change of adapters. `status` is for prime-rl."""
    loaded = {
        each.name: each.folder or each.name for each in server.control.adapters.loaded().values()
    }
    return {"success": True, "error_message": "", "loaded_adapters": loaded, "status": "ok"}


async def server_info(server: Server) -> dict[str, Any]:
    """Return the server's properties with the fields that clients of both dialects read."""
    served = server.require_served()
    info: dict[str, Any] = await server.control.engine.call("describe")
    adapters = {name: info.pop(name, 0) for name in ("max_loras", "max_lora_rank")}
    dtype = str(info.get("dtype", "float32")).removeprefix("torch.")
    return {
        "version": nano_inference.__version__,
        "model_path": server.control.engine.model_path,
        "served_model_name": served.name,
        "max_model_len": served.engine.max_model_len,
        "weight_version": await server.control.engine.serving_version(),
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,  # slime expects its own setting here
        # SGLang's name for the size of the KV cache
        "max_total_num_tokens": info.get("kv_cache_tokens"),
        **info,
        "vllm_config": {
            # TRL only checks that it is not null. "nccl" is vLLM's word for a group that the
            # trainer opens as rank 0; on a CPU the group uses gloo.
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
            # null: adapters are off, and TRL's trainers send all weights
            "lora_config": adapters if adapters["max_loras"] else None,
        },
    }
