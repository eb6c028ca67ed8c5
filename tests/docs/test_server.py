"""The commands and programs of the server pages run against a server of SmolLM2."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from nano_inference import EngineConfig
from nano_inference.server import paths
from nano_inference.server.config import ServerConfig
from nano_inference.server.http.layers import LEVELS, RL_LEVELS, Level
from nano_inference.server.main import running_server
from tests.docs.test_docs import ROOT
from tests.ports import free_port

ADDRESS = "http://127.0.0.1:8000"  # as the document writes it
PAGES = (
    "server",
    "routes",
    "operations",
    "security",
    "differences",
    "troubleshooting",
    "migrating",
)
TEXT = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
STRUCTURED = (ROOT / "docs" / "structured.md").read_text()  # test_docs.py runs its python blocks
CURL = [
    block
    for block in re.findall(r"^```bash\n(.*?)^```", TEXT + STRUCTURED, flags=re.M | re.S)
    if block.startswith("curl")
]
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S)
TRAINERS = [block for block in BLOCKS if "init_process_group" in block]  # each in its own process
PYTHON = [block for block in BLOCKS if block not in TRAINERS]
Check = Callable[[Any], bool]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    threads = torch.get_num_threads()
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=1024, kv_cache_memory=2**28, num_threads=1
    )
    with running_server(engine, ServerConfig(port=0, in_process=True)) as address:
        yield address
    torch.set_num_threads(threads)


def has_content_or_call(message: dict[str, Any]) -> bool:
    if not message.get("tool_calls"):
        return bool(message["content"])
    (call,) = message["tool_calls"]
    function = call["function"]
    return function["name"] == "weather" and list(json.loads(function["arguments"])) == ["city"]


KINDS: dict[str, Check] = {
    "/v1/chat/completions": lambda body: (
        body["object"] == "chat.completion" and has_content_or_call(body["choices"][0]["message"])
    ),
    "/v1/completions": lambda body: (
        len(body["choices"]) == 2 and body["choices"][1]["logprobs"]["top_logprobs"]
    ),
    "/v1/messages": lambda body: body["type"] == "message" and body["content"][0]["text"],
    "/v1/messages/count_tokens": lambda body: body["input_tokens"] > 4,
    "/tokenize": lambda body: body["count"] == len(body["tokens"]) == 2,
    "/detokenize": lambda body: body["prompt"] == "Hello world",
    "/v1/models": lambda body: body["object"] == "list" and body["data"][0]["id"] == "smollm2-135m",
    "/health": lambda body: body == {"status": "ok", "model_loaded": True},
}


@pytest.mark.thorough(
    cases=[
        'curl http://127.0.0.1:8000/v1/chat/completions -d \'{ "model"',
        "curl -N http://127.0.0.1:8000/v1/chat/completions -d '{ \"mod",
        'curl http://127.0.0.1:8000/v1/completions -d \'{ "model": "sm',
        "curl http://127.0.0.1:8000/v1/chat/completions -d '{ \"respon",
        "curl http://127.0.0.1:8000/v1/chat/completions -d '{ \"messag",
    ]
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("block", CURL, ids=[re.sub(r"\s+", " ", block)[:60] for block in CURL])
def test_curl_lines_are_answered_as_documented(block: str, url: str) -> None:
    assert ADDRESS in block
    command = block.replace(ADDRESS, url)
    done = subprocess.run(
        ["bash", "-c", f"{command.rstrip()} --silent --fail-with-body"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = re.search(rf"{ADDRESS}(\S+)", block)
    assert path is not None
    if '"stream": true' in block:
        *events, last = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert last == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert "".join(
            each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"]
        )
        assert 1 <= chunks[-1]["usage"]["completion_tokens"] <= 16
    else:
        body = json.loads(done.stdout)
        assert KINDS[path[1]](body), done.stdout
        if '"tool_choice"' in block:
            assert body["choices"][0]["finish_reason"] == "tool_calls"
        if '"response_format"' in block:
            assert body["choices"][0]["finish_reason"] == "stop"
            assert set(json.loads(body["choices"][0]["message"]["content"])) == {"city", "country"}


def test_page_shows_every_kind_of_answer() -> None:
    paths = {match[1] for block in CURL if (match := re.search(rf"{ADDRESS}(\S+)", block))}
    assert paths == set(KINDS)


@pytest.mark.thorough
def test_python_blocks_run(url: str) -> None:
    """Run in a subprocess, because the client libraries leave connections open for the garbage
    collector.
    """
    program = "\nprint('\\n-- next block')\n".join(PYTHON).replace(ADDRESS, url)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    printed = ran.stdout.split("\n-- next block\n")
    assert len(printed) == len(PYTHON)
    assert all(text.strip() for text in printed), printed
    (rows,) = [text for code, text in zip(PYTHON, printed, strict=True) if "top_logprobs" in code]
    assert len(rows.strip().splitlines()) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("block", TRAINERS)
def test_trainer_of_plain_torch(block: str) -> None:
    threads = torch.get_num_threads()
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=256, kv_cache_memory=2**26, num_threads=1
    )
    port = free_port()
    with running_server(
        engine, ServerConfig(port=0, in_process=True, rl=True, rl_timeout=60)
    ) as address:
        program = block.replace(ADDRESS, address).replace("29500", str(port))
        assert program.count(str(port)) == 1
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        served = httpx.get(address + "/weight_info").json()
    torch.set_num_threads(threads)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("finished") == 2
    assert served == {"weight_version": "step 2"}


def test_page_has_a_trainer() -> None:
    assert len(TRAINERS) == 1


@pytest.mark.parametrize("path", sorted(paths.CONTROL | paths.GENERATION))
def test_page_names_every_trainer_route(path: str) -> None:
    assert re.search(rf"{re.escape(path)}`", TEXT)


LEVEL_OF = {"none": Level.OPEN, "API": Level.KEY, "admin": Level.ADMIN}


def documented_keys() -> Iterator[tuple[str, Level]]:
    """Yield each route of the tables and the key that its row names. `;` separates routes."""
    for line in TEXT.splitlines():
        routes, *_, keys = line.strip("|").split("|") if line.startswith("| `") else ("", "")
        levels = [LEVEL_OF[key.strip()] for key in keys.split(";") if key.strip() in LEVEL_OF]
        parts = routes.split(";")
        if levels:
            for part, level in zip(
                parts, levels * len(parts) if len(levels) == 1 else levels, strict=True
            ):
                for path in re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", part):
                    yield path, level


def test_tables_state_the_key_of_each_route() -> None:
    levels = LEVELS | RL_LEVELS
    level_of_route = dict(documented_keys())
    assert len(level_of_route) > 60
    wrong = {
        path for path, level in level_of_route.items() if levels.get(path, Level.KEY) is not level
    }
    assert not wrong


def test_routes_without_a_key_are_named() -> None:
    (said,) = re.findall(r"^- If you set API keys, every .*?\. ", TEXT, flags=re.M | re.S)
    levels = LEVELS | RL_LEVELS
    is_open = {path for path, level in levels.items() if level is Level.OPEN}
    files = {f"/page/{name}" for name in paths.PAGE_FILES} | {"/"}
    assert set(re.findall(r"`(/[^`]*)`", said)) == is_open - files
