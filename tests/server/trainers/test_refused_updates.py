"""Rejected updates, at any stage and by any route: the old weights serve, and the next update
works.
"""

import base64
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from nano_inference.checkpoints import loading
from nano_inference.server.trainers import prime_rl
from nano_inference.system.regular_files import open_regular
from tests.models.tiny import llama_weights
from tests.server.trainers.asking import GENERATE, ask, body, look

NORM = "model.norm.weight"
BYTES = {"content-type": "application/octet-stream"}
SEEDS = itertools.count(10)


@pytest.fixture
def client(rl_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rl_server, timeout=60) as it:
        yield it


def new_weights(folder: Path) -> dict[str, Tensor]:
    """Return different weights for each call."""
    return llama_weights(json.loads((folder / "config.json").read_text()), next(SEEDS))


def serving(url: str) -> tuple[str, dict[str, str]]:
    return look(url, "/weight_info")["weight_version"], ask(
        url, "/weight_checker", {"action": "checksum"}
    )["checksums"]


def nan(place: int = 17) -> dict[str, Tensor]:
    norm = torch.ones(64)
    norm[place] = torch.nan
    return {NORM: norm}


def part(content: bytes = b"", **query: str) -> dict[str, Any]:
    return {"content": content or save({NORM: torch.ones(64)}), "headers": BYTES, "params": query}


def in_json(**fields: Any) -> dict[str, Any]:
    tensors = [base64.b64encode(save({NORM: torch.ones(64)})).decode()]
    return {"json": {"serialized_named_tensors": tensors} | fields}


TENSOR, DISK, GROUP = (
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
)
VERSIONS: list[Any] = ["\n", "", "x" * 257, -5, 10**30, True, ["7"], {}]
TOLD = {"names": [NORM], "dtypes": ["float32"], "shapes": [[64]]}

# (path, request) in SGLang's dialect that the server rejects.
SGLANG: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"bytes, version {each[:2]!r}": (TENSOR, part(weight_version=each))
        for each in ("\n", "", "x" * 257)
    },
    **{
        f"json, version {str(each)[:5]!r}": (TENSOR, in_json(weight_version=each))
        for each in VERSIONS
    },
    "load_format": (TENSOR, part(load_format="flattened_bucket")),
    "selector": (TENSOR, part(selector="draft")),
    "flush_cache": (TENSOR, part(flush_cache="maybe")),
    "abort_all_requests": (TENSOR, part(abort_all_requests="2")),
    "check_finite": (TENSOR, part(check_finite="perhaps")),
    "pickle": (TENSOR, part(b"\x80\x04" + b"x" * 50)),
    "no header": (TENSOR, part(b"x" * 50)),
    "half a header": (TENSOR, part(save({NORM: torch.ones(64)})[:30])),
    "half a file": (TENSOR, part(save({NORM: torch.ones(64)})[:-4])),
    "name": (TENSOR, part(save({"model.nobody.weight": torch.ones(64)}))),
    "shape": (TENSOR, part(save({NORM: torch.ones(65)}))),
    "dtype": (TENSOR, part(save({NORM: torch.ones(64, dtype=torch.int32)}))),
    "nan": (TENSOR, part(save(nan()))),
    "infinity": (TENSOR, part(save({NORM: torch.full((64,), -torch.inf)}))),
    "incomplete": (TENSOR, part(complete="true", flush_cache="true")),
    "no json": (TENSOR, {"content": b"{"}),
    "json list": (TENSOR, {"content": b"[]"}),
    "no base64": (TENSOR, in_json(serialized_named_tensors=["?"])),
    "two files": (TENSOR, in_json(serialized_named_tensors=["QQ==", "QQ=="])),
    "no path": (DISK, {"json": {}}),
    "empty path": (DISK, {"json": {"model_path": ""}}),
    "path is a number": (DISK, {"json": {"model_path": 7}}),
    "nothing there": (DISK, {"json": {"model_path": "/nobody/was/here"}}),
    "zero byte": (DISK, {"json": {"model_path": "/tmp/\0"}}),
    "long path": (DISK, {"json": {"model_path": "/x" * 5000}}),
    "this folder": (DISK, {"json": {"model_path": "."}}),
    "manifest": (DISK, {"json": {"model_path": "/tmp", "manifest": {}}}),
    "timeout": (DISK, {"json": {"model_path": "/tmp", "timeout": -1}}),
    "disk, no json": (DISK, {"content": b"{"}),
    "disk, version": (DISK, {"json": {"model_path": "/tmp", "weight_version": "\t"}}),
    "no group": (GROUP, {"json": TOLD}),
    "no names": (GROUP, {"json": {}}),
    "lists of two lengths": (GROUP, {"json": TOLD | {"dtypes": []}}),
    "group, version": (GROUP, {"json": TOLD | {"weight_version": "\0"}}),
    "group, no json": (GROUP, {"content": b"\xff"}),
    "group, timeout": (GROUP, {"json": TOLD | {"timeout": "never"}}),
}
Before = Callable[[httpx.Client], object]


def gathering(client: httpx.Client) -> None:
    """Send one bucket between a pause and its end."""
    client.post("/pause_generation").raise_for_status()
    client.post(TENSOR, **part(weight_version="gathered")).raise_for_status()


def begun(client: httpx.Client) -> None:
    client.post("/begin_weight_update").raise_for_status()
    client.post(TENSOR, **part()).raise_for_status()


STAGES: Mapping[str, tuple[Before, list[tuple[str, int]]]] = {
    "alone": (lambda _: None, []),
    "gathering": (gathering, [("/continue_generation", 200)]),
    "begun": (begun, [("/end_weight_update", 409)]),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("why", SGLANG)
def test_sglangs_requests(
    rl_server: str, client: httpx.Client, tiny_folder: Path, why: str, stage: str
) -> None:
    before, after = STAGES[stage]
    was = serving(rl_server)
    before(client)
    path, request = SGLANG[why]
    reply = client.post(path, **request)
    if stage == "begun" and why == "incomplete":  # reports it too late
        assert "complete=True differs from" in reply.text
    assert reply.status_code in (400, 409, 501), reply.text
    assert reply.json()["success"] is False
    for ending, status in after:
        assert client.post(ending).status_code == status
    assert serving(rl_server) == was
    new = new_weights(tiny_folder)
    reply = client.post(TENSOR, **part(save(new), weight_version=f"after {why!a}"))
    assert reply.status_code == 200, reply.text
    version, held = serving(rl_server)
    assert version == f"after {why!a}"
    assert all(held[name] != was[1][name] for name in new)


# (path, body) in vLLM's dialect that the server rejects after /start_weight_update.
VLLM: dict[str, tuple[str, dict[str, Any]]] = {
    "no group": (
        "/update_weights",
        {"json": {"update_info": {**TOLD, "dtype_names": ["float32"]}}},
    ),
    "no info": ("/update_weights", {"json": {}}),
    "no json": ("/update_weights", {"content": b"{"}),
    "list": ("/update_weights", {"content": b"[1]"}),
    "timeout": ("/update_weights", {"json": {"update_info": TOLD, "timeout": 0}}),
    "nothing came": ("/finish_weight_update", {"json": {}}),
    "finish, no json": ("/finish_weight_update", {"content": b"{"}),
    **{
        f"finish, version {str(each)[:5]!r}": (
            "/finish_weight_update",
            {"json": {"weight_version": each}},
        )
        for each in VERSIONS
    },
}


@pytest.mark.parametrize("why", VLLM)
def test_vllms_requests(rl_server: str, client: httpx.Client, tiny_folder: Path, why: str) -> None:
    """Require a group before an update begins. A session of another dialect counts too."""
    was = serving(rl_server)
    client.post("/begin_weight_update").raise_for_status()
    path, request = VLLM[why]
    reply = client.post(path, **request)
    assert reply.status_code in (400, 409), reply.text
    assert client.post("/finish_weight_update").status_code == 409, "nothing is open"
    assert serving(rl_server) == was
    assert client.post(TENSOR, **part(save(new_weights(tiny_folder)))).status_code == 200
    assert serving(rl_server)[1] != was[1]


@pytest.mark.parametrize(
    "wrong", [{"is_checkpoint_format": False}, {"check_finite": 7}, {"complete": "x"}]
)
def test_update_that_cannot_begin(
    rl_server: str, client: httpx.Client, wrong: dict[str, Any]
) -> None:
    assert client.post("/start_weight_update", json=wrong).status_code in (400, 409)
    assert client.post("/finish_weight_update").status_code == 409


def folders(at: Path) -> dict[str, dict[str, Any]]:
    """Return prime-rl requests that the server rejects."""
    for name in ("step_3", "step_4", "step_5"):
        (at / name).mkdir()
        (at / name / "STABLE").touch()
    (at / "step_4" / "model.safetensors").write_bytes(save(nan()))
    os.mkfifo(at / "step_5" / "model.safetensors")
    (at / "loop").symlink_to(at / "loop")
    return {
        "empty folder": {"weight_dir": str(at / "step_3")},
        "nan": {"weight_dir": str(at / "step_4")},
        "fifo": {"weight_dir": str(at / "step_5")},
        "loop": {"weight_dir": str(at / "loop")},
        "zero byte": {"weight_dir": "/tmp/\0"},
        "number": {"weight_dir": 3},
        "null": {"weight_dir": None},
        "checks": {"weight_dir": str(at / "step_3"), "complete": 5},
    }


def test_prime_rls_requests(
    rl_server: str, client: httpx.Client, tiny_folder: Path, tmp_path: Path
) -> None:
    was = serving(rl_server)
    for why, request in folders(tmp_path).items():
        reply = client.post("/update_weights", json=request)
        assert reply.status_code in (400, 409), f"{why}: {reply.text}"
        assert str(tmp_path) not in reply.text
        assert serving(rl_server) == was, why
    assert client.post(TENSOR, **part(save(new_weights(tiny_folder)))).status_code == 200
    assert serving(rl_server)[1] != was[1]


@pytest.mark.thorough
def test_hung_share_blocks_no_other_request(
    rl_server: str,
    client: httpx.Client,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was, hung, back = serving(rl_server), threading.Event(), threading.Event()

    def hangs(path: Path) -> Any:
        hung.set()
        back.wait(60)
        return open_regular(path)

    (tmp_path / "model.safetensors").write_bytes(save(new_weights(tiny_folder)))
    monkeypatch.setattr(loading, "open_regular", hangs)
    replies: list[httpx.Response] = []
    fields = {"model_path": str(tmp_path), "timeout": 1.5}
    asking = threading.Thread(target=lambda: replies.append(client.post(DISK, json=fields)))
    asking.start()
    assert hung.wait(20)
    assert ask(rl_server, GENERATE, body([1, 2, 3], 20))["choices"][0]["finish_reason"] == "length"
    asking.join(20)
    assert replies[0].status_code == 504, replies[0].text
    assert serving(rl_server) == was
    back.set()
    assert client.post(DISK, json=fields | {"timeout": 20.0}).status_code == 200
    assert serving(rl_server)[1] != was[1]


def test_share_that_hangs_before_a_step_is_read(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    monkeypatch.setattr(prime_rl, "_is_stable", lambda step: back.wait(60))
    reply = client.post(
        "/update_weights", json={"weight_dir": str(tmp_path / "step_3"), "timeout": 0.2}
    )
    back.set()
    assert reply.status_code == 504
    assert reply.json()["message"] == "weight_dir: the file system did not answer within 0.2 s."


def test_nan_is_accepted_on_request(
    rl_server: str, client: httpx.Client, tiny_folder: Path
) -> None:
    was = serving(rl_server)
    reply = client.post(TENSOR, **part(save(nan(63))))
    assert reply.status_code == 400
    assert "check_finite" in reply.json()["message"]
    assert serving(rl_server) == was
    assert client.post(TENSOR, **part(save(nan()), check_finite="false")).status_code == 200
    assert serving(rl_server)[1][NORM] != was[1][NORM]
    assert client.post(TENSOR, **part(save(new_weights(tiny_folder)))).status_code == 200


def test_update_says_that_it_is_whole(
    rl_server: str, client: httpx.Client, tiny_folder: Path
) -> None:
    was = serving(rl_server)
    reply = client.post(TENSOR, **part(complete="true"))
    assert reply.status_code == 400
    assert "is missing" in reply.json()["message"]
    assert serving(rl_server) == was
    assert (
        client.post(TENSOR, **part(save(new_weights(tiny_folder)), complete="true")).status_code
        == 200
    )
