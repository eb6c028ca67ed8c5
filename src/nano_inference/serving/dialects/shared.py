"""The routes that two dialects have under one path. Their replies hold what either of them looks for."""

from typing import Any

from fastapi import APIRouter, Request, Response

import nano_inference
from nano_inference.serving.dialects.reading import Fields, fields_of
from nano_inference.serving.edge.replies import json_reply
from nano_inference.serving.errors import ApiError, bad_request
from nano_inference.serving.server import Server


def routes(server: Server) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/server_info", summary="What serves, as trainers ask for it")
    async def info(request: Request) -> Response:
        fields = await fields_of(request, server)
        said = await server_info(server)
        if fields.word("config_format", ("json", "text"), "json") == "text":
            said["vllm_config"] = str(said["vllm_config"])
        return json_reply(200, said)

    @router.post("/update_weight_version", summary="Name the weights that serve")
    async def update_weight_version(request: Request) -> Response:
        return await _name_version(server, await fields_of(request, server))

    @router.api_route("/flush_cache", methods=["GET", "POST"], summary="Forget cached prefixes, if nothing runs")
    async def flush_cache(request: Request) -> Response:
        await fields_of(request, server)
        return await _flush_cache(server)

    return router


async def _name_version(server: Server, fields: Fields) -> Response:
    version = fields.version("new_version")
    if version is None:
        raise bad_request("new_version is missing; it must be a string.", "new_version")
    # SGLang's default would end every request with each version; only a client that says so gets that.
    if fields.flag("abort_all_requests", default=False):
        await server.control.abort(None)
    await server.control.name_version(version)
    message = f"the weights that serve are version {version}."
    return json_reply(200, {"success": True, "message": message, "new_version": version})


async def _flush_cache(server: Server) -> Response:
    try:
        await server.control.flush_cache(only_idle=True)
    except ApiError as problem:
        if problem.status != 409:
            raise
        raise ApiError(400, problem.message) from None  # at which SGLang's clients ask again
    return json_reply(200, {"success": True, "flushed": True, "message": "the prefix cache is empty."})


async def server_info(server: Server) -> dict[str, Any]:
    """What both dialects' clients read in it."""
    served = server.require_served()
    info = await server.control.info()
    dtype = str(info.get("dtype", "float32")).removeprefix("torch.")
    return {
        "version": nano_inference.__version__,
        "model_path": served.engine.model_path,
        "served_model_name": served.name,
        "max_model_len": served.engine.max_model_len,
        "weight_version": await server.control.serving_version(),
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,  # slime wants to find its own setting here
        **info,
        "vllm_config": {
            # TRL asks only whether it is null. "nccl" is vLLM's word for a group that the trainer opens as rank 0; on
            # a CPU the group is gloo's.
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {
                "model": served.engine.model_path,
                "dtype": f"torch.{dtype}",
                "max_model_len": served.engine.max_model_len,
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
            "lora_config": None,
        },
    }
