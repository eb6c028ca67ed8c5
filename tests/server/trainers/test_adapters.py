"""Adapters over HTTP on one engine and on two: load and unload by three dialects, use by model
name.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.checkpoints.lora import WEIGHTS
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.adapters import adapter_folder
from tests.server.trainers.asking import GENERATE, PATIENCE, ask, body, look, running
from tests.server.trainers.conftest import RL, engine_config

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TENSORS = "/load_lora_adapter_from_tensors"
PROMPT = list(range(3, 40))
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "ab"}],
    "max_tokens": 12,
    "seed": 3,
    "logprobs": True,
    "ignore_eos": True,
    "return_token_ids": True,
}
SERVERS = {"one": {}, "two": {"replicas": 2, "in_process": False}}


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create folders: two valid adapters, one of another base model, one without an adapter."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": str(adapter_folder(tiny_folder, root / "a", 1)),
        "b": str(adapter_folder(tiny_folder, root / "b", 2)),
        "wide": str(adapter_folder(tiny_folder, root / "wide", 3, width=8)),
        "empty": str(root),
    }


@pytest.fixture(scope="module", params=SERVERS)
def url(
    request: pytest.FixtureRequest, tiny_folder: Path, folders: dict[str, str]
) -> Iterator[str]:
    threads = torch.get_num_threads()
    config = replace(engine_config(tiny_folder), max_loras=3, loras=(f"first={folders['a']}",))
    options: Any = SERVERS[request.param]
    with running_server(config, replace(RL, **options)) as server:
        yield server
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path, folders: dict[str, str]) -> Iterator[InferenceEngine]:
    """Build an engine of the same model with both adapters."""
    with InferenceEngine(replace(engine_config(tiny_folder), max_loras=3)) as local_engine:
        local_engine.load_adapter("a", folders["a"])
        local_engine.load_adapter("b", folders["b"])
        yield local_engine


def post(url: str, path: str, body: Any, status: int = 200, **headers: str) -> httpx.Response:
    reply = httpx.post(url + path, json=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == status, reply.text
    return reply


def load(url: str, name: str, path: str, status: int = 200, **more: Any) -> str:
    """Load an adapter and return the text of vLLM's reply."""
    return post(url, LOAD, {"lora_name": name, "lora_path": path, **more}, status).text


def unload(url: str, name: str, status: int = 200) -> str:
    return post(url, UNLOAD, {"lora_name": name}, status).text


def models(url: str) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in look(url, "/v1/models")["data"]}


def drawn(url: str, model: str | None, prompt: list[int] = PROMPT, tokens: int = 12) -> Any:
    """Return tokens and logprobs of vLLM's generation."""
    (choice,) = ask(url, GENERATE, body(prompt, tokens) | {"model": model})["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def expected(engine: InferenceEngine, name: str | None, tokens: int = 12) -> Any:
    params = SamplingParams(max_tokens=tokens, seed=5, ignore_eos=True, adapter=name)
    (sample,) = engine.generate([PROMPT], params)
    return list(sample.completion_tokens), list(sample.logprobs)


@pytest.mark.thorough(cases=["two"])
def test_name_of_a_model_chooses_the_adapter_to_the_bit(
    url: str, folders: dict[str, str], engine: InferenceEngine
) -> None:
    said = load(url, "b", folders["b"])
    assert said == "Success: LoRA adapter 'b' added successfully."
    listed = models(url)
    assert list(listed) == ["tiny", "first", "b"]
    assert (listed["tiny"]["parent"], listed["tiny"]["root"]) == (None, "tiny")
    assert (listed["b"]["parent"], listed["b"]["root"]) == ("tiny", folders["b"])
    assert look(url, "/v1/models/b") == listed["b"]
    every = [drawn(url, "tiny"), drawn(url, "first"), drawn(url, "b")]
    assert every == [expected(engine, name) for name in (None, "a", "b")]
    assert len({str(ids) for ids, _ in every}) == 3
    chat = ask(url, "/v1/chat/completions", CHAT | {"model": "b"})
    assert chat["model"] == "b"
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, adapter="b")
    (sample,) = engine.generate([CHAT["messages"]], params)
    (choice,) = chat["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert (choice["token_ids"], logprobs) == (
        list(sample.completion_tokens),
        list(sample.logprobs),
    )
    text = ask(
        url, "/v1/completions", {"model": "b", "prompt": PROMPT, "max_tokens": 12, "seed": 5}
    )
    assert text["model"] == "b"
    asked = {"model": "b", "max_tokens": 4, "messages": CHAT["messages"]}
    assert ask(url, "/v1/messages", asked)["model"] == "b"
    sglang = {"input_ids": [PROMPT, PROMPT], "lora_path": ["first", None]}
    sglang |= {"sampling_params": {"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True}}
    told = [each["output_ids"] for each in ask(url, "/generate", sglang)]
    assert told == [expected(engine, name)[0] for name in ("a", None)]
    unload(url, "b")


@pytest.mark.thorough(cases=["two"])
def test_name_is_uploaded_twice(url: str, folders: dict[str, str], engine: InferenceEngine) -> None:
    load(url, "own", folders["a"])
    before = drawn(url, "own")
    again = load(url, "own", folders["b"], 400)
    assert "The lora adapter 'own' has already been loaded." in again
    assert drawn(url, "own") == before == expected(engine, "a")
    load(url, "own", folders["b"], load_inplace=True)
    assert [drawn(url, "own") for _ in range(4)] == [expected(engine, "b")] * 4
    assert unload(url, "own") == "Success: LoRA adapter 'own' removed successfully."


@pytest.mark.thorough(cases=["two"])
def test_adapter_in_use_is_unloaded_after_its_requests(
    url: str, folders: dict[str, str], engine: InferenceEngine
) -> None:
    load(url, "own", folders["b"])
    with running(url, body(PROMPT, 60) | {"model": "own"}) as it:
        unload(url, "own")
        ask(url, GENERATE, body(PROMPT, 4) | {"model": "own"}, 404)
        assert it.end()["finish_reason"] == "length"
    assert (it.token_ids, it.logprobs) == expected(engine, "b", 60)
    assert "own" not in models(url)
    load(url, "own", folders["a"])  # its name is free again and does not share old prefixes
    assert drawn(url, "own") == expected(engine, "a")
    unload(url, "own")


@pytest.mark.thorough(cases=["two"])
def test_invalid_adapter_changes_nothing(url: str, folders: dict[str, str]) -> None:
    before = models(url)
    assert "adapter_config.json is missing" in load(url, "own", folders["empty"], 404)
    assert "is not an adapter folder" in load(url, "own", "/nowhere/at all", 404)
    assert "is not an adapter folder" in load(url, "own", "x" * 5000, 404)
    assert "belongs to another base model" in load(url, "own", folders["wide"], 400)
    assert "conflicts with a served base model" in load(url, "tiny", folders["a"], 400)
    assert "lora_name must be a printable string" in load(url, "x" * 300, folders["a"], 400)
    missing = post(url, LOAD, {"lora_name": "own"}, 400).json()["message"]
    assert missing == "Both 'lora_name' and 'lora_path' must be provided."
    cannot = post(url, UNLOAD, {"lora_name": "none"}, 404).json()
    assert cannot["message"] == 'The lora adapter "none" cannot be found.'
    assert "'lora_name' needs to be provided" in post(url, UNLOAD, {}, 400).text
    load(url, "b", folders["b"])
    load(url, "c", folders["b"])
    assert "adapters are already loaded; unload one of" in load(url, "d", folders["b"], 400)
    unload(url, "b")
    unload(url, "c")
    assert models(url) == before


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", {"max_tokens": 4, "messages": CHAT["messages"]}),
        (GENERATE, body(PROMPT, 4)),
        ("/generate", {"input_ids": PROMPT}),
    ],
)
def test_adapter_that_is_not_there_is_a_404(
    rl_server: str, path: str, asked: dict[str, Any]
) -> None:
    field = "lora_path" if path == "/generate" else "model"
    assert "nobody" in str(ask(rl_server, path, asked | {field: "nobody"}, 404))


def test_engine_without_adapters_says_so(rl_server: str, folders: dict[str, str]) -> None:
    assert "adapters are disabled; set max_loras" in load(rl_server, "a", folders["a"], 400)


@pytest.mark.thorough(cases=["two"])
def test_sglangs_and_prime_rls_routes(url: str, folders: dict[str, str]) -> None:
    fields = {"lora_name": "own", "lora_path": folders["b"]}
    reply = ask(url, "/load_lora_adapter", fields | {"pinned": True})
    loaded = {"first": folders["a"], "own": folders["b"]}
    assert reply == {
        "success": True,
        "error_message": "",
        "loaded_adapters": loaded,
        "status": "ok",
    }
    assert ask(url, "/load_lora_adapter", fields) == reply  # prime-rl reuses the name
    assert ask(url, "/load_lora_adapter", fields | {"lora_path": folders["wide"]}, 400)
    gone = ask(url, "/unload_lora_adapter", {"lora_name": "own"})
    assert gone["loaded_adapters"] == {"first": folders["a"]}
    assert "not loaded" in str(ask(url, "/unload_lora_adapter", {"lora_name": "own"}, 404))


def send(url: str, name: str, content: bytes, status: int = 200, **more: Any) -> Any:
    """Send an adapter's tensors as the body, and other fields in the query."""
    fields = {"lora_name": name, "config_dict": json.dumps({"r": 4, "lora_alpha": 8}), **more}
    headers = {"content-type": "application/octet-stream"}
    reply = httpx.post(url + TENSORS, params=fields, content=content, headers=headers, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


@pytest.mark.thorough(cases=["two"])
def test_tensors_come_over_the_wire(
    url: str, folders: dict[str, str], engine: InferenceEngine
) -> None:
    a, b = ((Path(folders[name]) / WEIGHTS).read_bytes() for name in "ab")
    reply = send(url, "wired", a)
    assert (reply["success"], reply["version"]) == (True, 1)
    assert reply["loaded_adapters"] == {"first": folders["a"], "wired": "wired"}
    assert [drawn(url, "wired") for _ in range(4)] == [expected(engine, "a")] * 4
    assert send(url, "wired", b, version=7)["version"] == 7
    assert [drawn(url, "wired") for _ in range(4)] == [expected(engine, "b")] * 4
    with running(url, body(PROMPT, 60) | {"model": "wired"}) as it:
        body_of = {"lora_name": "wired", "config_dict": {"r": 4, "lora_alpha": 8}}
        encoded = base64.b64encode(a).decode()
        for field in ({"serialized_tensors": encoded}, {"serialized_named_tensors": [encoded]}):
            assert ask(url, TENSORS, body_of | field)["success"]
        assert it.end()["finish_reason"] == "length"
    assert (it.token_ids, it.logprobs) == expected(engine, "b", 60)  # keeps its first weights
    assert drawn(url, "wired") == expected(engine, "a")
    unload(url, "wired")


@pytest.mark.thorough(cases=["two"])
def test_tensors_that_cannot_serve_change_nothing(
    url: str, folders: dict[str, str], engine: InferenceEngine
) -> None:
    a, wide = ((Path(folders[name]) / WEIGHTS).read_bytes() for name in ("a", "wide"))
    tensors = load_tensors(a)
    send(url, "kept", a, version=3)
    before = models(url)
    broken = dict(tensors)
    broken[sorted(tensors)[-1]] = torch.full_like(tensors[sorted(tensors)[-1]], torch.nan)
    half = {name: tensor for name, tensor in tensors.items() if "lora_A" in name}
    refused = {
        "a pickle, which is not supported": (b"\x80\x04" + a, {}),
        "as torch.save makes it": (b"PK" + a, {}),
        "the file is not a safetensors file": (b"", {}),
        "the adapter's file": (a[:-5], {}),
        "belongs to another base model": (wide, {}),
        "is not finite": (save(broken), {}),
        "lora_B of 'lm_head' is missing": (save(half), {}),
        "version=3 of adapter 'kept' must be": (a, {"version": 3}),
        "version must be an integer": (a, {"version": "x"}),
        "config_dict must be an object": (a, {"config_dict": "[]"}),
        "use_dora=True is not supported": (a, {"config_dict": '{"use_dora": true}'}),
        "alpha=[] must be": (a, {"config_dict": '{"lora_alpha": []}'}),
        "conflicts with a served base model": (a, {"lora_name": "tiny"}),
        "lora_name must be a printable string": (a, {"lora_name": "x" * 300}),
        "flattened_bucket": (a, {"load_format": "flattened_bucket"}),
        "added_tokens_config is not supported": (a, {"added_tokens_config": "{}"}),
    }
    for text, (content, more) in refused.items():
        told = str(send(url, "kept", content, 400, **more))
        assert text in told
        assert "/tmp" not in told
    missing = ask(url, TENSORS, {"lora_name": "kept", "config_dict": {}}, 400)
    assert "serialized_tensors must contain one string" in str(missing)
    assert "is not valid base64" in str(ask(url, TENSORS, {"serialized_tensors": "*"}, 400))
    assert models(url) == before
    assert drawn(url, "kept") == expected(engine, "a")
    assert send(url, "kept", a)["version"] == 4
    unload(url, "kept")


def test_adapter_folders_are_named_only_by_an_administrator(
    tiny_folder: Path, folders: dict[str, str]
) -> None:
    config = replace(RL, api_keys=("user",), admin_key="admin")
    named = {"lora_name": "a", "lora_path": folders["a"]}
    engine = replace(engine_config(tiny_folder), max_loras=1)
    with running_server(engine, config) as server:
        for path in (LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter", TENSORS):
            post(server, path, named, 401)
            post(server, path, named, 403, authorization="Bearer user")
        post(server, LOAD, named, authorization="Bearer admin")
        users = {"authorization": "Bearer user"}
        post(server, GENERATE, body(PROMPT, 2) | {"model": "a"}, **users)
    with running_server(engine, ServerConfig(port=0, in_process=True)) as server:
        post(server, LOAD, named, 404)  # without --rl


def adapters_are_sent_alone(info: Any) -> bool:
    """Return the decision of TRL's `select_adapter_sync`: by vLLM's configuration of adapters."""
    config = info["vllm_config"]
    lora = config.get("lora_config")
    return (
        lora is not None
        and lora["max_loras"] >= 2  # the live version and the next one
        and lora["max_lora_rank"] >= 4
        and config["parallel_config"]["data_parallel_size"] == 1
    )


@pytest.mark.thorough(cases=["two"])
def test_server_info_says_how_many_adapters_are_taken(url: str, rl_server: str) -> None:
    info = httpx.get(f"{url}/server_info?config_format=json").json()
    assert info["vllm_config"]["lora_config"] == {"max_loras": 3, "max_lora_rank": 64}
    assert adapters_are_sent_alone(info)
    none = httpx.get(f"{rl_server}/server_info").json()
    assert none["vllm_config"]["lora_config"] is None
    assert not adapters_are_sent_alone(none)
