"""Each field of each trainer route with extreme values: never a 500, never an open session."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from nano_inference.server import paths
from nano_inference.server.main import running_server
from tests.server.trainers.conftest import RL, engine_config

NORM = "model.norm.weight"
HOST = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "timeout": 0.02,
}
INFO = {
    "names": [NORM],
    "dtype_names": ["float32"],
    "shapes": [[64]],
    "packed": False,
    "packed_buffer_size_bytes": 9,
}
STORAGE = {
    "card": "8e0b1c5a",
    "handle": "QQ==",
    "size": 256,
    "offset": 0,
    "counter": "/torch_1_2_3",
    "counter_index": 0,
    "event": "QQ==",
    "waits": True,
}
# Path -> a valid request. Each field in turn gets other values, in the JSON and in the query.
BODIES: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "a", "abort_all": False, "prefix": False},
    "/abort_requests": {"request_ids": ["a"]},
    "/begin_weight_update": {"selector": "all", "complete": False, "check_finite": True},
    "/destroy_weights_update_group": {"group_name": "a"},
    "/end_weight_update": {},
    "/finish_weight_update": {"weight_version": "a"},
    "/get_weights_by_name": {"name": NORM, "truncate_size": 3},
    "/inference/v1/abort_requests": {"request_ids": ["a"]},
    "/init_broadcaster": {
        "host": "127.0.0.1", "port": 1, "inference_world_size": 1, "rank_offset": 0, "timeout": 0.02,
        "session_id": "default",
    },
    "/init_weight_transfer_engine": {"init_info": HOST | {"packed": False}, "timeout": 0.02},
    "/init_weights_update_group": HOST | {"group_name": "a", "backend": "gloo"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "b", "pinned": True},
    "/unload_lora_adapter": {"lora_name": "a"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/pause": {"mode": "keep", "clear_cache": False},
    "/pause_generation": {"mode": "in_place", "timeout": 1.0},
    "/receive_weight_update": {"version": 1, "parameters_info": [{"name": NORM, "shape": [64], "dtype": "float32"}]},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/reset_prefix_cache": {"reset_running_requests": False, "reset_external": False},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
    "/sleep": {"level": 0, "mode": "keep", "tags": ["weights"]},
    "/start_weight_update": {"is_checkpoint_format": True, "complete": False, "check_finite": True},
    "/update_weight_version": {"new_version": "a", "abort_all_requests": False},
    "/update_weights": {"update_info": INFO, "timeout": 0.5, "weight_dir": "/nobody/step_3"},
    "/update_weights_from_disk": {
        "model_path": "/nobody", "weight_version": "a", "load_format": "auto", "manifest": None, "timeout": 1.0,
        "flush_cache": False, "abort_all_requests": False, "selector": "all", "complete": False, "check_finite": True,
    },
    "/update_weights_from_distributed": {
        "names": [NORM], "dtypes": ["float32"], "shapes": [[64]], "group_name": "a", "weight_version": "a",
        "load_format": "auto", "timeout": 1.0,
    },
    "/load_lora_adapter_from_tensors": {
        "lora_name": "a", "serialized_tensors": "QQ==", "config_dict": {"r": 4}, "version": 1, "pinned": True,
        "added_tokens_config": {}, "load_format": "auto",
    },
    "/update_weights_from_ipc": {
        "offers": [{"storages": [STORAGE], "tensors": [{"name": NORM, "dtype": "float32", "shape": [64],
                                                        "start": 0, "storage": 0, "strides": [1]}]}],
        "weight_version": "a", "flush_cache": False,
    },
    "/update_weights_from_tensor": {"serialized_named_tensors": ["QQ=="], "load_format": "auto", "weight_version": "a"},
    "/wake_up": {"tags": ["weights"]},
    "/weight_checker": {"action": "compare", "baseline": {NORM: "a"}},
    "/weights_checker": {"action": "checksum", "skip_tensor_list": ["a"], "allow_quant_error": False},
}  # fmt: skip
EXTREMES: list[Any] = [
    None, True, -1, 0, 2**31, -(2**63) - 1, 10**400, 0.5, 1e308, -0.0, "", "\0", "\n", "a\ud800", "x" * 300, "." * 70,
    ".".join(["a" * 64] * 5), "/" * 5000, "..", "[::1", "%00", "1e999", "nan", "٣", [], [[]], ["\0"], [None], [-1],
    [{"name": NORM, "shape": [2**62, 4], "dtype": "float32"}], {}, {"": {}}, {"x": [[[[1]]]]},
]  # fmt: skip


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    threads = torch.get_num_threads()
    group = {
        "weight_update_group_init_method": "tcp://127.0.0.1:1",
        "weight_update_group_world_size": 2,
        "actor_llm_idx": 0,
    }
    with running_server(
        engine_config(tiny_folder), dataclasses.replace(RL, rl_timeout=0.5, **group)
    ) as url:
        yield url
    torch.set_num_threads(threads)


def variants(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return bodies in which one field, nested ones included, has one extreme value."""
    for name, value in body.items():
        for extreme in EXTREMES:
            yield body | {name: extreme}
        if isinstance(value, dict):
            yield from ({**body, name: each} for each in variants(value))


def as_query(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def asked(client: httpx.Client, path: str, **request: Any) -> None:
    reply = client.post(path, **request)
    assert reply.status_code in (200, 400, 404, 409, 501, 503, 504), (
        f"{path} {str(request)[:300]}: {reply.text}"
    )
    if reply.status_code != 200:
        said = reply.json()["message"]
        assert len(said) < 1500
        assert "Errno" not in said


def tidy(client: httpx.Client) -> None:
    """Check that nothing sleeps or is paused and that no update is open after a rejection."""
    for path in ("/wake_up", "/resume"):
        client.post(path).raise_for_status()


@pytest.mark.thorough(
    cases=[
        "/abort_request",
        "/begin_weight_update",
        "/init_broadcaster",
        "/init_weight_transfer_engine",
        "/init_weights_update_group",
        "/receive_weight_update",
        "/start_weight_update",
        "/update_weights",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/weights_checker",
    ]
)
@pytest.mark.parametrize("path", BODIES)
def test_extremes_are_refused_in_a_sentence(url: str, path: str) -> None:
    opens = path in ("/begin_weight_update", "/start_weight_update")
    with httpx.Client(base_url=url, timeout=60) as client:
        for body in variants(BODIES[path]):
            content = json.dumps(body).encode()
            asked(client, path, content=content, headers={"content-type": "application/json"})
            if opens:
                client.post("/finish_weight_update", json={})
        for name in BODIES[path]:
            for extreme in EXTREMES:
                if "\ud800" not in (text := as_query(extreme)) and len(text) < 1000:
                    asked(client, path, params={name: text})
                    if opens:
                        client.post("/finish_weight_update", json={})
        for content in (b"", b"{", b"[]", b"\xff", b'{"a":' * 300, b'{"x": NaN}', b"7"):
            asked(client, path, content=content)
            if opens:
                client.post("/finish_weight_update", json={})
        tidy(client)
        reply = client.post("/begin_weight_update")
        assert reply.status_code == 200, reply.text  # 409: an update is open
        # incomplete, or silent for more than half a second
        assert client.post("/end_weight_update").status_code in (400, 409)
        asked(
            client,
            "/generate",
            json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}},
        )


def test_extremes_cover_all_changing_routes() -> None:
    nothing_to_say = {
        "/continue_generation", "/flush_cache", "/post_process_weights", "/pull_weights", "/resume",
        "/shutdown_weight_transfer_engine",
    }  # fmt: skip
    assert set(BODIES) | nothing_to_say == paths.CHANGING
