"""Receipts over HTTP: each route returns a line that `nano-inference verify` finds true, from an
engine in a process of its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.data import read_jsonl
from nano_inference.rl.verifier import verify
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_model
from tests.ops.compiler import NEEDS_COMPILER

pytestmark = [NEEDS_COMPILER, pytest.mark.thorough]
IDS = [70, 71, 72, 73]
COMMON = {"n": 2, "seed": 7, "temperature": 1.0, "receipt": True, "stop": ["e"]}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": IDS, "max_tokens": 9, **COMMON}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 9, **COMMON},
    ),
    "vllm": (
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {"max_tokens": 9, **COMMON}},
    ),
    "sglang": ("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 9, **COMMON}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=259)
    write_tokenizer(folder, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22, backend="cpu")


@pytest.fixture(scope="module")
def url(config: EngineConfig) -> Iterator[str]:
    options = ServerConfig(port=0, rl=True, rl_open=True, hide_cached_tokens=True)
    with running_server(config, options) as url:
        yield url


def receipts_of(answer: Any) -> list[dict[str, Any]]:
    """Return the lines of an answer, which is a list for SGLang."""
    if isinstance(answer, list):
        return [each["meta_info"]["receipt"] for each in answer]
    return [choice["receipt"] for choice in answer["choices"]]


@pytest.mark.parametrize("name", ROUTES)
def test_answers_hold_true_receipts(
    url: str, config: EngineConfig, name: str, tmp_path: Path
) -> None:
    path, body = ROUTES[name]
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = receipts_of(answer.json())
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = read_jsonl(tmp_path / "a.jsonl")
    assert [sample.sample_index for sample in samples] == [0, 1]
    assert [sample.cached_tokens for sample in samples] == [0, 0]
    with InferenceEngine(config) as engine:
        assert [verdict.outcome for verdict in verify(engine, samples)] == ["true"] * 2


def test_streams_end_with_receipts(url: str) -> None:
    path, body = ROUTES["chat"]
    whole = httpx.post(url + path, json=body, timeout=60).json()
    text = httpx.post(url + path, json=body | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ends = [choice for event in events for choice in event["choices"] if "receipt" in choice]
    heads = [line["receipt"]["head"] for line in receipts_of(whole)]
    streamed = sorted(ends, key=lambda choice: choice["index"])
    assert [choice["receipt"]["receipt"]["head"] for choice in streamed] == heads


def test_answers_without_receipts_are_smaller(url: str) -> None:
    for path, body in ROUTES.values():
        text = json.dumps(body).replace('"receipt": true', '"receipt": false')
        answer = httpx.post(url + path, content=text, timeout=60)
        assert '"receipt"' not in answer.text


def test_hidden_completion_has_no_receipt(url: str) -> None:
    path, body = ROUTES["completions"]
    scoring = body | {"max_tokens": 0, "echo": True, "logprobs": 1, "stop": None}
    answer = httpx.post(url + path, json=scoring, timeout=60)
    assert answer.status_code == 200, answer.text
    assert '"receipt"' not in answer.text


def test_other_protocols_reject_the_field(url: str) -> None:
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{url}/v1/messages", json=body | {"receipt": True}, timeout=60)
    assert answer.status_code == 400
    assert "receipt" in answer.text
