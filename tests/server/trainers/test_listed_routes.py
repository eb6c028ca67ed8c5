"""Every route that trainers rely on exists and answers an empty request as listed.

Other tests check the effects of each route. The list is written by hand, not derived from the code:
a status for each route, requested in this order without a body, with an empty body and with `{}`.
200: no argument is required. 400: the reply names the missing argument. 409: the route is not valid
now. 501: the reply names an alternative. Three statuses are listed if the first call changes later
results.
"""

import httpx
import pytest

VLLM = """
POST /pause 200  POST /resume 200  GET /is_paused 200  POST /abort_requests 200  GET /weight_info 200
POST /inference/v1/abort_requests 400
POST /weight_checker 400  POST /init_weight_transfer_engine 400  POST /start_weight_update 409
POST /update_weights 409  POST /finish_weight_update 409  POST /update_weight_version 400
POST /reset_prefix_cache 200  POST /sleep 200  GET /is_sleeping 200  POST /wake_up 200  GET /get_world_size 200
GET /server_info 200  POST /inference/v1/generate 400  POST /v1/completions 400  GET /v1/models 200  GET /health 200
POST /v1/load_lora_adapter 400  POST /v1/unload_lora_adapter 400
"""
SGLANG = """
POST /generate 400  GET /model_info 200  GET /get_model_info 200  GET /server_info 200  GET /get_server_info 200
GET /get_weight_version 200  GET /health_generate 200  POST /pause_generation 200  POST /continue_generation 200
GET /flush_cache 200  POST /flush_cache 200  POST /abort_request 400  GET /v1/loads 200
POST /init_weights_update_group 400  POST /destroy_weights_update_group 404  POST /update_weights_from_distributed 400
POST /update_weights_from_tensor 400  POST /update_weights_from_disk 400  POST /update_weight_version 400
POST /begin_weight_update 200,409,409  POST /end_weight_update 400,409,409  POST /weights_checker 200
POST /release_memory_occupation 200  POST /resume_memory_occupation 200  POST /pull_weights 501
POST /post_process_weights 501  POST /unload_lora_adapter 400  POST /load_lora_adapter_from_tensors 400
"""
OTHERS = """
POST /init_broadcaster 400  GET /liveness 200  POST /update_weights 409  POST /load_lora_adapter 400
POST /receive_weight_update 409
"""


def routes(listed: str) -> list[tuple[str, str, list[int]]]:
    """Parse lines into method, path and the status for each of three bodies."""
    words = listed.split()
    statuses = [[int(each) for each in word.split(",")] for word in words[2::3]]
    return [
        (method, path, each * 3 if len(each) == 1 else each)
        for method, path, each in zip(words[::3], words[1::3], statuses, strict=True)
    ]


@pytest.mark.parametrize("listed", [VLLM, SGLANG, OTHERS], ids=["vllm", "sglang", "others"])
def test_listed_routes_answer(rl_server: str, listed: str) -> None:
    with httpx.Client(base_url=rl_server, timeout=60) as client:
        for method, path, statuses in routes(listed):
            bodies = (None, b"", b"{}") if method == "POST" else (None,)
            for body, status in zip(bodies, statuses, strict=False):
                reply = client.request(method, path, content=body)
                where = f"{method} {path} {body}: {reply.status_code} {reply.text}"
                assert reply.status_code == status, where
                if path == "/health":
                    continue
                told = reply.json()
                assert told, where
                if reply.status_code != 200:
                    assert told["error"]["message"], where
                    assert told.get("success", False) is False, where
        client.post("/resume").raise_for_status()
        assert client.get("/is_paused").json() == {"is_paused": False}


def test_document_names_them(rl_server: str) -> None:
    documented = (
        httpx.get(f"{rl_server}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    )  # without warnings
    for method, path, _ in routes(VLLM + SGLANG + OTHERS):
        assert method.lower() in documented[path], path


def test_document_has_their_fields(rl_server: str) -> None:
    documented = httpx.get(f"{rl_server}/openapi.json", timeout=60).raise_for_status().json()
    pause, load = (documented["paths"][path]["post"] for path in ("/pause", "/load_lora_adapter"))
    body = pause["requestBody"]
    assert not body["required"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert fields["mode"]["enum"] == ["keep", "wait", "abort"]
    assert fields["clear_cache"]["type"] == "boolean"
    assert load["requestBody"]["required"]
    assert "requestBody" not in documented["paths"]["/resume"]["post"]
