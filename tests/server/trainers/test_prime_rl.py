"""prime-rl: folders of steps, a broadcaster, liveness."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.ports import free_port
from tests.server.scripted import ScriptedClient
from tests.server.trainers.children import PATIENCE
from tests.server.trainers.small_trainer import weights
from tests.server.trainers.small_trainers import Trainer, checksums, trainer
from tests.server.trainers.test_pipeline_rl import serving


def post(url: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=PATIENCE, **more)


@contextmanager
def joined(url: str) -> Iterator[Trainer]:
    """Run a trainer whose group the server joined on request of prime-rl's orchestrator."""
    port = free_port()
    with trainer("prime", url, port) as it:
        body = {
            "host": "127.0.0.1",
            "port": port,
            "rank_offset": 0,
            "inference_world_size": 1,
            "timeout": 20,
        }
        assert post(
            url, "/init_broadcaster", body | {"quantize_in_weight_transfer": False}
        ).json() == {"status": "ok"}
        assert it.hear() == "joined"
        yield it


@pytest.mark.thorough(cases=[""])
@pytest.mark.parametrize("below", ["", "weight"])
def test_step_is_read_when_it_is_whole(
    rl_server: str, tiny_folder: Path, tmp_path: Path, below: str
) -> None:
    """Find the marker next to the weights in `broadcasts/step_N`, and above them in
    `checkpoints/step_N/weight`.
    """
    step = 30 if below else 20
    folder = tmp_path / f"step_{step}" / below
    folder.mkdir(parents=True)
    shutil.copy(tiny_folder / "config.json", folder)
    save_file(weights(step), folder / "model.safetensors")
    before = serving(rl_server)
    reply = post(rl_server, "/update_weights", {"weight_dir": str(folder)})
    assert (reply.status_code, "STABLE" in reply.text, "retry-after" in reply.headers) == (
        503,
        True,
        True,
    )
    assert serving(rl_server) == before
    (tmp_path / f"step_{step}" / "STABLE").touch()
    post(rl_server, "/pause?mode=keep&clear_cache=false").raise_for_status()
    assert post(rl_server, "/update_weights", {"weight_dir": str(folder)}).json() == {
        "status": "ok"
    }
    post(rl_server, "/resume").raise_for_status()
    assert serving(rl_server) == (str(step), checksums(step))


@pytest.mark.thorough
def test_broadcaster_sends_while_requests_wait(rl_server: str) -> None:
    with joined(rl_server) as it:
        post(rl_server, "/pause?mode=keep&clear_cache=false").raise_for_status()
        assert it.update("send", 41) == (200, {"status": "ok"})
        post(rl_server, "/resume").raise_for_status()
        assert serving(rl_server) == ("41", checksums(41))
        assert it.update("unnamed", 42) == (200, {"status": "ok"})  # no folder names the step
        assert serving(rl_server)[1] == checksums(42)


@pytest.mark.thorough
def test_pickles_are_refused_by_the_deadline(rl_server: str) -> None:
    before = serving(rl_server)
    with joined(rl_server) as it:
        status, reply = it.update("pickles", 50)
        assert status in (400, 504), reply
        assert reply["success"] is False
    assert serving(rl_server) == before
    with joined(rl_server) as it:
        assert it.update("send", 51)[0] == 200
    assert serving(rl_server) == ("51", checksums(51))


@pytest.mark.thorough
def test_broadcaster_that_has_died_is_forgotten(rl_server: str) -> None:
    with joined(rl_server) as it:
        assert it.update("send", 60)[0] == 200
    reply = post(rl_server, "/update_weights", {"weight_dir": None})
    assert reply.status_code == 409
    assert "/init_broadcaster" in reply.json()["message"]


@pytest.mark.thorough(cases=["/etc/passwd", "/dev/zero", "\\ud800"])
@pytest.mark.parametrize(
    "folder",
    [
        "/",
        "/etc",
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/mem",
        "a\0b",
        "",
        "\ud800",
        "x" * 100_000,
        "~root",
    ],
)
def test_path_error_reveals_no_more_than_the_request(rl_server: str, folder: str) -> None:
    before = serving(rl_server)
    headers = {"content-type": "application/json"}
    body = json.dumps({"weight_dir": folder})
    reply = httpx.post(
        rl_server + "/update_weights", content=body, headers=headers, timeout=PATIENCE
    )
    assert 400 <= reply.status_code < 500, reply.text
    words = set(reply.json()["message"].split()) - set(re.split(r"[/\s]", folder))
    assert not words & {*os.listdir("/etc"), "root", "Errno"}
    assert len(reply.text) < 2000
    assert serving(rl_server) == before


@pytest.mark.thorough
def test_liveness_reports_a_dead_or_stalled_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    config = ServerConfig(port=0, rl=True, api_keys=("k",), admin_key="a", restart_engine=True)
    with running_server(client, config) as url:
        assert (
            httpx.get(url + "/liveness").status_code,
            httpx.get(url + "/is_paused").status_code,
        ) == (200, 401)
        with monkeypatch.context() as patch:
            patch.setattr(client, "stalled", lambda seconds: True)
            reply = httpx.get(url + "/liveness")
            assert (reply.status_code, reply.json()) == (503, {"status": "engine_unresponsive"})
        assert httpx.get(url + "/liveness").json() == {"status": "ok"}
