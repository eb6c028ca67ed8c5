"""SGLang's routes and their rejections. `test_sglang_updates.py` has updates over a group."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save, save_file

from nano_inference.server.main import running_server
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.sglang_trainer import checksums, checksums_of, post, rollout, version


@pytest.fixture
def url(tiny_folder: Path) -> Iterator[str]:
    """Run a separate server, because the tests change its weights."""
    with running_server(engine_config(tiny_folder), RL) as url:
        yield url


def loads(url: str) -> dict[str, int]:
    return httpx.get(f"{url}/v1/loads?include=core").json()["loads"][0]


@pytest.mark.thorough
def test_server_info_names_the_model(url: str, tiny_folder: Path) -> None:
    for path in ("/model_info", "/get_model_info"):
        reply = httpx.get(url + path).json()
        assert (reply["model_path"], reply["weight_version"], reply["is_generation"]) == (
            str(tiny_folder),
            "0",
            True,
        )
    for path in ("/server_info", "/get_server_info"):  # slime reads both
        reply = httpx.get(url + path).json()
        assert [reply[f"{each}_size"] for each in ("tp", "pp", "dp", "ep")] == [1, 1, 1, 1]
        assert reply["disaggregation_mode"] == "null"
    assert loads(url)["num_total_reqs"] == 0
    assert httpx.get(f"{url}/v1/loads?dp_rank=1").json()["loads"] == []


@pytest.mark.thorough
def test_health_is_a_token(url: str) -> None:
    before = httpx.get(f"{url}/stats").json()["engine"]["num_steps"]
    assert httpx.get(f"{url}/health_generate").json() == {"status": "ok"}
    assert httpx.get(f"{url}/stats").json()["engine"]["num_steps"] > before
    post(url, "/pause_generation")
    assert httpx.get(f"{url}/health_generate").json() == {"status": "paused"}


@pytest.mark.thorough(but=["abort"])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_stops_running_requests_and_flushes_report_it(url: str, mode: str) -> None:
    with rollout(url) as asked:
        assert httpx.get(f"{url}/flush_cache").status_code == 400  # while requests run
        said = post(url, "/pause_generation", {"mode": mode})
        assert said == {"message": "Generation paused successfully.", "status": "ok"}
        # As in SGLang, only a pause in place rejects a flush, even if new requests wait.
        assert httpx.get(f"{url}/flush_cache").status_code == (400 if mode == "in_place" else 200)
        steps = httpx.get(f"{url}/stats").json()["engine"]["num_steps"]
        if mode == "abort":
            asked.result(30)
        assert asked.done() == (mode == "abort")
        assert loads(url)["num_total_reqs"] == (mode != "abort")
        assert httpx.get(f"{url}/stats").json()["engine"]["num_steps"] == steps
        said = post(url, "/continue_generation")
        assert said == {"message": "Generation continued successfully.", "status": "ok"}
        meta = asked.result(30)["meta_info"]
    assert meta["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] > 0


@pytest.mark.thorough
def test_newcomers_of_a_pause_hold_no_flush_back(url: str) -> None:
    """Abort like slime's async rollouts, which immediately repeat aborted requests."""
    post(url, "/pause_generation")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/generate", json={"input_ids": [5]}, timeout=0.3)
    assert httpx.get(f"{url}/flush_cache").status_code == 200
    post(url, "/continue_generation")


@pytest.mark.thorough
def test_abort_ends_all_requests(url: str) -> None:
    with rollout(url) as asked:
        assert post(url, "/abort_request", {"abort_all": True})["num_aborted"] == 1
        assert asked.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    assert "rid is missing" in post(url, "/abort_request", {}, 400)["message"]
    assert "prefix" in post(url, "/abort_request", {"rid": "a", "prefix": True}, 501)["message"]


@pytest.mark.thorough
def test_memory_is_given_back_part_by_part(url: str) -> None:
    ids = post(
        url,
        "/generate",
        {"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
    )
    said = post(url, "/release_memory_occupation")
    assert sorted(said["sleeping"]) == ["kv_cache", "weights"]
    assert (
        "asleep"
        in post(url, "/update_weights_from_disk", {"model_path": "/nowhere"}, 409)["message"]
    )
    assert post(url, "/resume_memory_occupation", {"tags": ["weights"]})["sleeping"] == ["kv_cache"]
    assert (
        post(url, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})["sleeping"]
        == []
    )
    again = post(
        url,
        "/generate",
        {"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
    )
    assert again["output_ids"] == ids["output_ids"]
    assert (
        "tags contains"
        in post(url, "/release_memory_occupation", {"tags": ["disk"]}, 400)["message"]
    )


@pytest.mark.parametrize("form", ["disk", "bytes", "base64"])
def test_update_of_safetensors(url: str, tmp_path: Path, tiny_folder: Path, form: str) -> None:
    weights = new_weights(tiny_folder, 3)
    assert send_file(url, weights, form, tmp_path, weight_version="step-3")["success"]
    assert version(url) == "step-3"
    assert checksums(url) == checksums_of(weights)
    reply = post(url, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    assert reply["meta_info"]["weight_version"] == "step-3"


def send_file(url: str, weights: dict[str, Any], form: str, folder: Path, **more: Any) -> Any:
    if form == "disk":
        save_file(weights, folder / "model.safetensors")
        return post(url, "/update_weights_from_disk", {"model_path": str(folder), **more})
    content = save(weights)
    if form == "base64":
        fields = {
            "serialized_named_tensors": [base64.b64encode(content).decode()],
            "load_format": "safetensors",
        }
        return post(url, "/update_weights_from_tensor", fields | more)
    headers = {"content-type": "application/octet-stream"}
    reply = httpx.post(
        f"{url}/update_weights_from_tensor", params=more, content=content, headers=headers
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.thorough
def test_files_are_gathered_in_a_pause_until_it_ends(
    url: str, tiny_folder: Path, tmp_path: Path
) -> None:
    weights = new_weights(tiny_folder, 4)
    halves = [dict(list(weights.items())[:9]), dict(list(weights.items())[9:])]
    post(url, "/pause_generation")
    for half in halves:
        send_file(url, half, "bytes", tmp_path, weight_version="4")
        assert version(url) == "0"  # a query changes nothing
    post(url, "/continue_generation")
    assert (version(url), checksums(url)) == ("4", checksums_of(weights))

    post(url, "/pause_generation")
    send_file(url, halves[0], "bytes", tmp_path, weight_version="5")
    post(url, "/pause_generation")  # another trainer, or the same one after a failure
    post(url, "/continue_generation")
    assert version(url) == "4"

    post(url, "/pause_generation")
    # read completely: slime deletes the folder now
    send_file(url, weights, "disk", tmp_path, weight_version="6")
    assert version(url) == "6"
    send_file(url, weights, "bytes", tmp_path, weight_version="7", flush_cache=True)
    assert version(url) == "7"
    send_file(url, weights, "bytes", tmp_path)
    checksums(url)
    assert version(url) == "8"
    post(url, "/continue_generation")


def test_update_without_a_pause_is_whole_while_the_cache_sleeps(
    url: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Update like a trainer on the same device that wakes the cache last and never pauses."""
    weights = new_weights(tiny_folder, 6)
    post(url, "/release_memory_occupation", {"tags": ["kv_cache"]})
    reply = send_file(url, weights, "bytes", tmp_path, weight_version="6")
    assert "are served as version 6" in reply["message"]
    post(url, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert (version(url), checksums(url)) == ("6", checksums_of(weights))

    post(url, "/pause_generation")
    post(url, "/release_memory_occupation", {"tags": ["kv_cache"]})
    send_file(url, weights, "bytes", tmp_path, weight_version="7")
    assert version(url) == "6"
    post(url, "/continue_generation")
    assert version(url) == "7"


@pytest.mark.thorough
def test_update_with_a_beginning_and_an_end(url: str, tiny_folder: Path, tmp_path: Path) -> None:
    weights = new_weights(tiny_folder, 5)
    assert "begin_weight_update first" in post(url, "/end_weight_update", {}, 409)["message"]
    post(url, "/begin_weight_update", {"selector": "all"})
    post(url, "/begin_weight_update", {}, 409)
    send_file(url, weights, "bytes", tmp_path, flush_cache=True)
    assert version(url) == "0"
    post(url, "/update_weight_version", {"new_version": "mine", "abort_all_requests": False})
    assert version(url) == "0"
    assert "version mine" in post(url, "/end_weight_update")["message"]
    assert (version(url), checksums(url)) == ("mine", checksums_of(weights))


@pytest.mark.thorough
def test_checks_of_weights(url: str, tiny_folder: Path, tmp_path: Path) -> None:
    assert "snapshot first" in post(url, "/weights_checker", {"action": "compare"}, 409)["message"]
    post(url, "/weights_checker", {"action": "snapshot"})
    post(url, "/weights_checker", {"action": "compare"})
    send_file(url, {"model.norm.weight": torch.ones(64)}, "bytes", tmp_path)
    reply = post(url, "/weights_checker", {"action": "compare"}, 400)["message"]
    assert "1 tensor(s)" in reply
    assert "model.norm.weight" in reply
    post(url, "/weights_checker", {"action": "compare", "skip_tensor_list": ["norm"]})
    reply = post(url, "/weights_checker")
    assert reply["ranks"][0]["parallelism_info"]["rank"] == 0
    assert httpx.get(f"{url}/weights_checker").json() == reply
    assert (
        "reset_tensors"
        in post(url, "/weights_checker", {"action": "reset_tensors"}, 501)["message"]
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (
            "/pause_generation",
            {"mode": "sleep"},
            400,
            "mode must be one of abort, retract, in_place",
        ),
        ("/init_weights_update_group", {}, 400, "master_address is missing"),
        (
            "/destroy_weights_update_group",
            {"group_name": "nobody"},
            404,
            "group 'nobody' does not exist",
        ),
        ("/update_weights_from_distributed", {}, 400, "names, dtypes and shapes"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["int8"], "shapes": [[-1]]},
            400,
            "the shape",
        ),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": []},
            400,
            "application/octet-stream",
        ),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["*"]},
            400,
            "not valid base64",
        ),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [base64.b64encode(b"\x80\x04\x95aaaaaaaaaaaa.").decode()]},
            400,
            "not a whole pickle",
        ),
        (
            "/update_weights_from_tensor",
            {"load_format": "flattened_bucket"},
            400,
            "must contain one string",
        ),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, ""),
        ("/update_weights_from_disk", {}, 400, "model_path is missing"),
        (
            "/update_weights_from_disk",
            {"model_path": "/a", "load_format": "gguf"},
            400,
            "load_format",
        ),
        (
            "/update_weights_from_disk",
            {"model_path": "/a", "weight_version": 1.5},
            400,
            "weight_version",
        ),
        ("/begin_weight_update", {"selector": "draft"}, 400, "selector must be one of"),
        ("/post_process_weights", {}, 501, "checkpoint"),
        ("/pull_weights", {"target_version": 4}, 501, "update_weights_from_disk"),
        ("/update_weights_from_ipc", {}, 400, "offers is missing"),
        ("/update_weights_from_ipc", {"zmq_handles": {}}, 501, "send offers"),
    ],
)
def test_rejected_call_changes_nothing(
    rl_server: str, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    assert told in post(rl_server, path, body, status)["message"]
    assert version(rl_server) == "0"


def test_non_json_bodies_are_rejected(rl_server: str) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(
        f"{rl_server}/update_weights_from_distributed", content=b"{", headers=headers
    )
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    for body in (b"", b"{}"):  # in the forms of all clients
        assert httpx.post(f"{rl_server}/continue_generation", content=body).status_code == 200
