"""External input of a training server: pickles, impossible shapes, bodies and floods of calls.

Keys and pages: `test_access.py`. Paths: `test_prime_rl.py`.
"""

import base64
import io
import json
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save

from nano_inference.server import paths
from nano_inference.server.main import running_server
from tests.ports import free_port
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.small_trainer import weights
from tests.server.trainers.small_trainers import checksums
from tests.server.trainers.test_pipeline_rl import serving

FLAG = Path("/tmp/nano-inference-was-here")


class Evil:
    """Pickled object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (FLAG,))


def evil() -> list[bytes]:
    """Return malicious pickles in every form in which weights arrive."""
    zipped, old = io.BytesIO(), io.BytesIO()
    torch.save({"model.norm.weight": Evil()}, zipped)
    torch.save({"model.norm.weight": Evil()}, old, _use_new_zipfile_serialization=False)
    return [pickle.dumps(Evil(), protocol) for protocol in range(6)] + [
        zipped.getvalue(),
        old.getvalue(),
    ]


@pytest.fixture(scope="module")
def url(tiny_folder: Path) -> Iterator[str]:
    threads = torch.get_num_threads()
    with running_server(engine_config(tiny_folder), RL) as address:
        yield address
    torch.set_num_threads(threads)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as it:
        yield it


def refused(reply: httpx.Response, *statuses: int) -> str:
    """Check that the error is short and has no path or traceback, and return its message."""
    assert reply.status_code in (statuses or (400,)), reply.text
    body = reply.json()
    assert body["success"] is False
    assert len(body["message"]) < 1000
    assert "Traceback" not in body["message"]
    assert "Errno" not in body["message"]
    return body["message"]


@pytest.mark.thorough
def test_pickles_are_never_read(url: str, client: httpx.Client, tmp_path: Path) -> None:
    before = serving(url)
    for number, content in enumerate(evil()):
        raw = {"content": content, "headers": {"content-type": "application/octet-stream"}}
        refused(client.post("/update_weights_from_tensor", **raw))
        tensors = [base64.b64encode(content).decode()]
        for load_format in (None, "flattened_bucket"):
            body = {"serialized_named_tensors": tensors, "load_format": load_format}
            refused(client.post("/update_weights_from_tensor", json=body), 400, 501)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("model.safetensors", "pytorch_model.bin"):
            (folder / name).write_bytes(content)
            refused(client.post("/update_weights", json={"weight_dir": str(folder)}))
            refused(client.post("/update_weights_from_disk", json={"model_path": str(folder)}))
    assert serving(url) == before
    assert not FLAG.exists()
    assert client.post("/update_weights_from_tensor", **_safetensors(7)).status_code == 200
    assert serving(url)[1] == checksums(7)


def _safetensors(version: int) -> dict[str, Any]:
    return {
        "content": save(weights(version)),
        "headers": {"content-type": "application/octet-stream"},
    }


NORM = "model.norm.weight"
SHAPES: list[Any] = [
    [-1], [-(2**70)], [2**40], [2**62, 2], [2**31, 2**31, 2**31], [0], [], [64, 1], [1] * 10_000, [64.0], ["64"],
    [True], [None], [[64]], "64", None, {"64": 1}, [10**400],
]  # fmt: skip
NAMES: list[Any] = [
    "",
    "x" * 100_000,
    "../../etc/passwd",
    "a\0b",
    "\ud800",
    None,
    7,
    ["x"],
    {"a": 1},
]
DTYPES: list[Any] = [
    "float8",
    "object",
    "torch.load",
    "",
    "bfloat16; import os",
    None,
    3,
    ["float32"],
    "x" * 100_000,
]


def rogues() -> list[tuple[Any, Any, Any]]:
    """Draw (name, shape, dtype), each with one fault."""
    wrong = [(NORM, shape, "float32") for shape in SHAPES] + [
        (name, [64], "float32") for name in NAMES
    ]
    return wrong + [(NORM, [64], dtype) for dtype in DTYPES]


def distributed(tensors: list[tuple[Any, Any, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of each dialect that announce tensors."""
    names, shapes, dtypes = (list(each) for each in zip(*tensors, strict=True))
    infos = [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in tensors]
    return [
        (
            "/update_weights",
            {"update_info": {"names": names, "shapes": shapes, "dtype_names": dtypes}},
        ),
        (
            "/update_weights_from_distributed",
            {
                "names": names,
                "shapes": shapes,
                "dtypes": dtypes,
                "group_name": "g",
                "flush_cache": True,
            },
        ),
        ("/receive_weight_update", {"version": 1, "parameters_info": infos}),
    ]


@pytest.mark.thorough
def test_shapes_and_names_that_no_model_has(url: str, client: httpx.Client) -> None:
    before, memory = serving(url), psutil.Process().memory_info().rss
    for rogue in rogues():
        for path, body in distributed([rogue]):
            content = json.dumps(body)
            reply = client.post(path, content=content, headers={"content-type": "application/json"})
            refused(reply, 400, 404, 409)
    assert serving(url) == before
    assert psutil.Process().memory_info().rss < memory + 2**28


@pytest.mark.thorough
def test_million_tensor_names_are_rejected(url: str, client: httpx.Client) -> None:
    """Send a million names: the server rejects them and keeps serving others."""
    before = serving(url)
    many = [(f"n{i}", [1], "float32") for i in range(60_000)]
    for path, body in distributed(many):
        refused(client.post(path, json=body), 400, 404, 409)
    names = json.dumps(
        {"update_info": {"names": ["n"] * 1_000_000, "shapes": [], "dtype_names": []}}
    )
    refused(
        client.post("/update_weights", content=names, headers={"content-type": "application/json"}),
        400,
        409,
    )
    shapes = '{"names": ["n"], "dtypes": ["float32"], "shapes": [' + "[1]," * 999_999 + "[1]]}"
    headers = {"content-type": "application/json"}
    refused(client.post("/update_weights_from_distributed", content=shapes, headers=headers), 400)
    assert serving(url) == before


BODIES: list[bytes] = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[]",
    b'"x"',
    b"7",
    b"{",
    b"\xff\xfe",
    b"\x00" * 100,
    b'{"a": 1e99999}',
    b'{"a": NaN}',
    b'{"version": ' + b"9" * 5000 + b"}",
    b'{"group_name": "' + b"x" * 100_000 + b'"}',
    b'{"master_port": -1, "master_address": "", "world_size": 1e9}',
    b'{"timeout": -1}',
    b'{"timeout": 1e300}',
    b'{"tags": [1, null, {}]}',
    b'{"names": {}, "shapes": 3, "dtypes": "x"}',
    b'{"new_version": "' + b"x" * 10_000 + b'"}',
    b'{"init_info": [], "update_info": []}',
    b'{"init_info": {"master_address": 3, "master_port": "x", "rank_offset": [], "world_size": '
    b"{}}}",
]


@pytest.mark.thorough
def test_nonsense_bodies_are_rejected(url: str, client: httpx.Client) -> None:
    """Send nonsense to every route: no reply is a 500, and the engine still serves."""
    headers = {"content-type": "application/json"}
    before = serving(url)[1]
    for path in sorted(paths.CHANGING - {"/sleep", "/release_memory_occupation"}):
        for body in BODIES:
            reply = client.post(path, content=body, headers=headers)
            assert reply.status_code < 500 or reply.status_code == 501, (
                f"{path} {body[:80]}: {reply.text}"
            )
    for path in ("/resume", "/continue_generation", "/wake_up"):
        assert client.post(path).status_code == 200
    assert serving(url)[1] == before
    reply = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
    assert reply.status_code == 200


@pytest.mark.thorough
def test_flood_of_calls_leaves_no_state(url: str, client: httpx.Client) -> None:
    """Form groups that never complete, under one name and many: no waiting thread remains."""
    process, closed = psutil.Process(), free_port()
    before = threading.active_count(), process.num_fds()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        httpx.Client(base_url=url, timeout=60) as mine,
    ):

        def join(number: int) -> int:
            port = closed if number % 3 else silent.getsockname()[1]
            body = {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1,
                "world_size": 2,
            }
            body |= {"group_name": f"g{number % 40}", "backend": "gloo", "timeout": 0.3}
            return mine.post("/init_weights_update_group", json=body).status_code

        with ThreadPoolExecutor(24) as pool:
            assert set(pool.map(join, range(1000))) <= {400, 409, 504}
        assert mine.get("/health").status_code == 200
        assert mine.get("/stats").status_code == 200
    deadline = time.monotonic() + 30
    while threading.active_count() > before[0] + 24 or process.num_fds() > before[1] + 20:
        assert time.monotonic() < deadline, (before, threading.active_count(), process.num_fds())
        time.sleep(0.1)
    for number in range(40):
        refused(
            client.post("/destroy_weights_update_group", json={"group_name": f"g{number}"}),
            400,
            404,
        )
    assert client.post("/update_weights_from_tensor", **_safetensors(8)).status_code == 200
    assert serving(url)[1] == checksums(8)
