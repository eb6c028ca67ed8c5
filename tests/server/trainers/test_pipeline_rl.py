"""PipelineRL: a group at start, updates while requests decode, trainers that fail, die and
rejoin.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.ports import free_port
from tests.server.scripted import ScriptedClient
from tests.server.trainers.children import PATIENCE
from tests.server.trainers.conftest import engine_config
from tests.server.trainers.golden import replay
from tests.server.trainers.small_trainers import Trainer, checksums, trainer

UPDATE = "/receive_weight_update"


def config(port: int, **options: Any) -> ServerConfig:
    group = {
        "weight_update_group_init_method": f"tcp://127.0.0.1:{port}",
        "weight_update_group_world_size": 2,
    }
    return ServerConfig(
        port=0,
        in_process=True,
        served_model_name="tiny",
        rl=True,
        return_tokens_as_token_ids=True,
        actor_llm_idx=0,
        **(group | {"rl_timeout": 15.0} | options),
    )


@contextmanager
def joined(url: str, port: int) -> Iterator[Trainer]:
    with trainer("pipeline", url, port) as it:
        assert it.hear() == "joined"
        yield it


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the URL of a server and the address of its future group."""
    threads, port = torch.get_num_threads(), free_port()
    with running_server(engine_config(tiny_folder), config(port)) as url:
        yield url, port
    torch.set_num_threads(threads)


def serving(url: str) -> tuple[str, dict[str, str]]:
    """Return the live version and the checksums."""
    reply = httpx.post(url + "/weight_checker", json={"action": "checksum"})
    return httpx.get(url + "/weight_info").json()["weight_version"], reply.json()["checksums"]


def test_server_serves_while_it_waits_for_its_trainer(served: tuple[str, int]) -> None:
    assert httpx.get(served[0] + "/health").json()["status"] == "ok"
    assert (
        httpx.post(served[0] + "/v1/completions", json={"prompt": [5], "max_tokens": 2}).status_code
        == 200
    )


@pytest.mark.thorough
def test_updates_come_while_requests_decode(served: tuple[str, int]) -> None:
    url, port = served
    with joined(url, port) as it:
        # the first update names no greater version
        assert it.update("send", 0) == (200, {"status": "ok"})
        assert serving(url) == ("0", checksums(0))
        body = {
            "prompt": [5, 6, 7],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
            first = json.loads(next(lines).removeprefix("data: "))
            assert it.update("send", 512) == (200, {"status": "ok"})
            chunks = [first, *(json.loads(line.removeprefix("data: ")) for line in lines)]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert sum(len(choice.get("token_ids") or ()) for choice in choices) == 400
        assert choices[-1]["finish_reason"] == "length"
        assert serving(url) == ("512", checksums(512))
        assert it.update("send", 1024)[0] == 200
        assert serving(url) == ("1024", checksums(1024))


def test_chat_as_its_actor_asks(served: tuple[str, int]) -> None:
    """Chat like its actor, which reads tokens from names in logprobs, special and last ones
    included.
    """
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": 1,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 1,
    }
    reply = httpx.post(served[0] + "/v1/chat/completions", json=body).json()
    choice, usage = reply["choices"][0], reply["usage"]
    ids = [int(each["token"].split(":")[-1]) for each in choice["logprobs"]["content"]]
    assert len(ids) == usage["completion_tokens"]
    asked = httpx.post(
        served[0] + "/v1/chat/completions", json=body | {"return_token_ids": True}
    ).json()["choices"][0]
    assert asked["token_ids"] == ids
    plain = httpx.post(
        served[0] + "/v1/chat/completions", json=body | {"return_tokens_as_token_ids": False}
    ).json()
    assert not any(
        "token_id:" in each["token"] for each in plain["choices"][0]["logprobs"]["content"]
    )


@pytest.mark.thorough
def test_failed_update_changes_nothing_and_frees_the_group(served: tuple[str, int]) -> None:
    url, port = served
    before = serving(url)
    for action, word in (("misnamed", "no.such.tensor"), ("misshapen", "shape")):
        with joined(url, port) as it:
            status, reply = it.update(action, 3)
            assert (status, reply["success"]) == (400, False)
            assert word in reply["message"]
        assert serving(url) == before
    with joined(url, port) as it:  # in the middle of a broadcast
        it.write("die 5")
        assert it.hear() == "ended"
    assert serving(url) == before
    with joined(url, port) as it:
        assert it.update("send", 6)[0] == 200
    assert serving(url) == ("6", checksums(6))


@pytest.mark.thorough
def test_trainer_that_never_comes(tiny_folder: Path) -> None:
    """Wait for a trainer that never joins: the request times out, and the server still ends."""
    with running_server(engine_config(tiny_folder), config(free_port(), rl_timeout=1.0)) as url:
        body = {
            "version": 1,
            "parameters_info": [{"name": "a", "shape": [2], "dtype": "torch.float32"}],
        }
        reply = httpx.post(url + UPDATE, json=body, timeout=PATIENCE)
        assert reply.status_code == 504
        assert "did not form within 1 seconds" in reply.json()["message"]
        assert httpx.get(url + "/weight_info").json() == {"weight_version": "0"}
        started = time.monotonic()
    assert time.monotonic() - started < 14


NO_TENSORS: list[object] = [
    None,
    [],
    "x",
    [[]],
    [{"name": "a", "dtype": "torch.float32"}],
    [{"name": "a", "shape": [-1], "dtype": "float32"}],
    [{"name": "a", "shape": [2**80], "dtype": "float32"}],
    [{"name": "a", "shape": [True], "dtype": "float32"}],
    [{"name": "", "shape": [1], "dtype": "float32"}],
    [{"name": "a", "shape": [1], "dtype": 3}],
]


@pytest.mark.thorough
def test_invalid_list_of_tensors_is_rejected() -> None:
    client = ScriptedClient()
    client.returns["leave_group"] = False
    with running_server(client, config(1)) as url:
        for tensors in NO_TENSORS:
            reply = httpx.post(url + UPDATE, json={"version": 1, "parameters_info": tensors})
            assert reply.status_code == 400, tensors
            assert reply.json()["error"]["param"].startswith("parameters_info")


@pytest.mark.thorough
def test_update_is_rejected_without_a_group() -> None:
    with running_server(ScriptedClient(), config(1, disable_weight_updates=True)) as url:
        reply = httpx.post(url + UPDATE, json={"version": 1, "parameters_info": []})
        assert reply.status_code == 409
        assert "--weight-update-group-init-method" in reply.json()["message"]


@pytest.mark.thorough
def test_golden_exchanges(
    served: tuple[str, int], tiny_folder: Path, request: pytest.FixtureRequest
) -> None:
    url, port = served

    @contextmanager
    def sending() -> Iterator[None]:
        with joined(url, port) as it:
            it.write("beside 9000")
            yield
            assert it.hear() == "sent"

    update = request.config.getoption("--update-golden")
    replay(url, "with_trainers/pipeline_rl", {}, update=update, beside={"trainer": sending})
