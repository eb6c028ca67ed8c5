"""Routed experts in the formats of vLLM's and SGLang's clients, also from an engine process."""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_model
from tests.server.trainers.asking import GENERATE, ask
from tests.server.trainers.conftest import RL, TEMPLATE, engine_config

PROMPT = [5, 6, 7, 8, 9]
SHAPE = (8, 3, 3)  # five prompt tokens and four completion tokens
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("routed") / "model", "qwen3-moe", std=0.3)
    write_tokenizer(folder, TEMPLATE)
    return folder


def config_of(folder: Path) -> EngineConfig:
    return replace(engine_config(folder), enable_return_routed_experts=True)


WAYS: dict[str, dict[str, Any]] = {
    "in-process": {},
    "process": {"in_process": False},
    "replicas": {"in_process": False, "replicas": 2},
}


@pytest.fixture(scope="module", params=WAYS)
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    threads = torch.get_num_threads()
    config: ServerConfig = replace(RL, **WAYS[request.param])
    with running_server(config_of(folder), config) as url:
        yield url
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Array:
    """Return the engine's own record of experts."""
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, routed_experts=True)
    with InferenceEngine(config_of(folder)) as engine:
        return np.asarray(engine.generate([PROMPT], params)[0].routed_experts)


def npy(told: str) -> Array:
    return np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False)


def int32(told: str) -> Array:
    return np.frombuffer(base64.b64decode(told), dtype=np.int32).reshape(-1, *SHAPE[1:])


def vllm(url: str, status: int = 200, **sampling: Any) -> Any:
    params = {"max_tokens": 4, "seed": 1, "ignore_eos": True} | sampling
    return ask(url, GENERATE, {"token_ids": PROMPT, "sampling_params": params}, status)


def sglang(url: str, status: int = 200, sampling: dict[str, Any] | None = None, **more: Any) -> Any:
    params = {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True} | (sampling or {})
    body = {"input_ids": PROMPT, "sampling_params": params, **more}
    return ask(url, "/generate", body, status)


@pytest.mark.thorough(but=["in-process"])
def test_vllms_route_returns_experts_as_npy(server: str, expected: Array) -> None:
    (choice,) = vllm(server)["choices"]
    found = npy(choice["routed_experts"])
    assert (found.shape, found.dtype) == (SHAPE, np.uint8)
    assert (found == expected).all()
    assert (
        npy(vllm(server, routed_experts_prompt_start=3)["choices"][0]["routed_experts"])
        == expected[3:]
    ).all()
    assert vllm(server, routed_experts=False)["choices"][0]["routed_experts"] is None
    reply = vllm(server, 400, routed_experts_prompt_start=6)
    assert "routed_experts_prompt_start=6 exceeds the prompt's length (5)" in json.dumps(reply)


@pytest.mark.thorough(cases=["replicas"])
def test_samples_have_separate_experts(server: str) -> None:
    choices = vllm(server, n=3, temperature=2.0)["choices"]
    first, *others = (npy(choice["routed_experts"]) for choice in choices)
    assert all((other[:5] == first[:5]).all() for other in others)
    assert any((other != first).any() for other in others)


@pytest.mark.thorough(cases=["replicas"])
def test_sglangs_route_returns_experts_as_int32(server: str, expected: Array) -> None:
    assert "routed_experts" not in sglang(server)["meta_info"]
    meta = sglang(server, return_routed_experts=True)["meta_info"]
    assert (int32(meta["routed_experts"]) == expected).all()
    meta = sglang(server, return_routed_experts=True, routed_experts_start_len=5)["meta_info"]
    assert (int32(meta["routed_experts"]) == expected[5:]).all()
    scored = sglang(server, return_routed_experts=True, sampling={"max_new_tokens": 0})["meta_info"]
    assert (int32(scored["routed_experts"]) == expected[:4]).all()
    reply = sglang(server, 400, return_routed_experts=True, routed_experts_start_len=6)
    assert "routed_experts_start_len=6 must be in [0, 5]" in reply["message"]
    many = ask(
        server,
        "/generate",
        {
            "input_ids": [PROMPT, PROMPT],
            "sampling_params": {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True},
            "return_routed_experts": [True, False],
        },
    )
    assert (int32(many[0]["meta_info"]["routed_experts"]) == expected).all()
    assert "routed_experts" not in many[1]["meta_info"]


@pytest.mark.thorough(cases=["replicas"])
def test_streams_end_with_them(server: str, expected: Array) -> None:
    def last(path: str, body: dict[str, Any]) -> Any:
        reply = httpx.post(server + path, json=body | {"stream": True}, timeout=60)
        assert reply.status_code == 200, reply.text
        return json.loads(reply.text.split("\n\n")[-3].removeprefix("data: "))

    sampling = {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True}
    meta = last("/generate", body)["meta_info"]
    assert (int32(meta["routed_experts"]) == expected).all()
    sampling = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
    for asked in (None, True):
        body = {"token_ids": PROMPT, "sampling_params": sampling | {"routed_experts": asked}}
        told = last(GENERATE, body)["choices"][0]["routed_experts"]
        assert told is None if asked is None else (npy(told) == expected).all()


@pytest.mark.thorough(cases=["replicas-asked0", "replicas-asked1"])
@pytest.mark.parametrize("asked", [{"routed_experts": True}, {"return_token_ids": True}])
def test_openais_routes_return_experts_on_request(
    server: str, expected: Array, asked: dict[str, Any]
) -> None:
    fields = {"max_tokens": 4, "seed": 1, "ignore_eos": True, "temperature": 1}
    body = {"prompt": PROMPT, **fields}
    assert ask(server, "/v1/completions", body)["choices"][0]["routed_experts"] is None
    told = ask(server, "/v1/completions", body | asked)["choices"][0]["routed_experts"]
    assert (npy(told) == expected).all()
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    reply = ask(server, "/v1/chat/completions", body | asked)
    tokens = reply["usage"]["total_tokens"]
    assert npy(reply["choices"][0]["routed_experts"]).shape == (tokens - 1, *SHAPE[1:])
    scored = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    told = ask(server, "/v1/completions", scored | asked)["choices"][0]["routed_experts"]
    assert (npy(told) == expected[:4]).all()


def test_server_without_a_record_says_how_to_get_one(rl_server: str) -> None:
    reply = sglang(rl_server, 400, return_routed_experts=True)
    assert "start it with --enable-return-routed-experts" in reply["message"]
    for path, body in [
        (GENERATE, {"token_ids": PROMPT, "sampling_params": {"routed_experts": True}}),
        ("/v1/completions", {"prompt": PROMPT, "routed_experts": True}),
    ]:
        reply = ask(rl_server, path, body, 400)
        assert "start it with --enable-return-routed-experts" in json.dumps(reply)
    assert vllm(rl_server)["choices"][0]["routed_experts"] is None


def test_experts_that_were_not_asked_for_cost_nothing(folder: Path) -> None:
    """Exceed the budget only with experts: a token has 9 expert ids and one other entry."""
    config = replace(config_of(folder), max_request_entries=3 * (5 + 4) + 8)
    with running_server(config, RL) as url:
        assert vllm(url, n=1)["choices"][0]["routed_experts"] is not None
        many = vllm(url, n=3)["choices"]
        assert [choice["routed_experts"] for choice in many] == [None] * 3
        assert "max_request_entries=35" in json.dumps(vllm(url, 400, n=3, routed_experts=True))
        body = {"prompt": [PROMPT] * 3, "max_tokens": 4, "ignore_eos": True, "seed": 1}
        for given, told in [(1, False), (3, True)]:
            body = body | {"prompt": [PROMPT] * given, "return_token_ids": True}
            choices = ask(url, "/v1/completions", body)["choices"]
            assert [choice["routed_experts"] is None for choice in choices] == [told] * given
        ask(url, "/v1/completions", body | {"routed_experts": True}, 400)
        chat = {"messages": [{"role": "user", "content": "a" * 8}], "max_tokens": 4}
        ask(url, "/v1/chat/completions", chat | {"return_token_ids": True})


def test_start_logs_nothing_without_routed_experts(rl_server: str) -> None:
    assert "routed_experts" not in sglang(rl_server, routed_experts_start_len=6)["meta_info"]
