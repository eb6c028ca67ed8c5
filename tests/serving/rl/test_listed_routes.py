"""Every route that trainers may count on is there: it answers, or says by a 501 what to do instead.

What each of them does is seen in the tests of its dialect; this one keeps the list, which is written down here and not
taken from the code.
"""

import httpx
import pytest

VLLM = """
POST /pause  POST /resume  GET /is_paused  POST /abort_requests  GET /weight_info  POST /weight_checker
POST /init_weight_transfer_engine  POST /start_weight_update  POST /update_weights  POST /finish_weight_update
POST /update_weight_version  POST /reset_prefix_cache  POST /sleep  GET /is_sleeping  POST /wake_up  GET /get_world_size
GET /server_info  POST /inference/v1/generate  POST /v1/completions  GET /v1/models  GET /health
"""
SGLANG = """
POST /generate  GET /model_info  GET /get_model_info  GET /server_info  GET /get_server_info  GET /get_weight_version
GET /health_generate  POST /pause_generation  POST /continue_generation  GET /flush_cache  POST /flush_cache
POST /abort_request  GET /v1/loads  POST /init_weights_update_group  POST /destroy_weights_update_group
POST /update_weights_from_distributed  POST /update_weights_from_tensor  POST /update_weights_from_disk
POST /update_weight_version  POST /begin_weight_update  POST /end_weight_update  POST /weights_checker
POST /release_memory_occupation  POST /resume_memory_occupation  POST /pull_weights  POST /post_process_weights
"""
OTHERS = """
POST /init_broadcaster  GET /liveness  POST /update_weights  POST /load_lora_adapter  POST /receive_weight_update
"""


@pytest.mark.parametrize("listed", [VLLM, SGLANG, OTHERS], ids=["vllm", "sglang", "others"])
def test_each_answers(rl_server: str, listed: str) -> None:
    words = listed.split()
    with httpx.Client(base_url=rl_server, timeout=60) as client:
        for method, path in zip(words[::2], words[1::2], strict=True):
            for body in (None, b"", b"{}") if method == "POST" else (None,):
                reply = client.request(method, path, content=body)
                where = f"{method} {path} {body}: {reply.status_code} {reply.text}"
                # 404 would be an unknown route, but for a group that there is none of
                assert reply.status_code in (200, 400, 409, 501) or path == "/destroy_weights_update_group", where
                if path == "/health":
                    continue
                told = reply.json()
                assert told, where
                if reply.status_code != 200:
                    assert told["error"]["message"], where
                    assert told.get("success", False) is False, where
        client.post("/resume").raise_for_status()
        assert client.get("/is_paused").json() == {"is_paused": False}


def test_the_document_names_them(rl_server: str) -> None:
    documented = (
        httpx.get(f"{rl_server}/openapi.json", timeout=60).raise_for_status().json()["paths"]
    )  # without warnings
    words = (VLLM + SGLANG + OTHERS).split()
    for method, path in zip(words[::2], words[1::2], strict=True):
        assert method.lower() in documented[path], path
