"""The page in Debian's Chromium, by playwright in an environment of its own (`make test-page` makes
it).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nano_inference import EngineConfig
from nano_inference.models.loading import resolve_model
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.main import running_server
from tests.cli.running import ENTRY
from tests.serving.engines import stats_with
from tests.serving.rl.weight_runs import free_port
from tests.serving.scripted import Script, ScriptedClient

PYTHON = Path(sys.prefix) / "page" / "bin" / "python"
CHROMIUM = Path("/usr/bin/chromium")
SCRIPT = Path(__file__).with_name("with_chromium.py")
PATIENCE = 90  # seconds that a server may take to start
HOSTILE = "<script>alert(3)</script><img src=x onerror=alert(4)>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists() or not CHROMIUM.exists(),
        reason=f"there is no {PYTHON}, which make test-page makes, or no {CHROMIUM}",
    ),
]


def look(url: str, name: str, meanwhile: Mapping[str, Callable[[], object]] | None = None) -> Any:
    """What one of `with_chromium.LOOKS` sees; what it asks for meanwhile is done."""
    with subprocess.Popen(
        [PYTHON, SCRIPT, url, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NODE_OPTIONS": ""},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = ""
        try:
            for line in child.stdout:
                if line.strip() in (meanwhile or {}):
                    (meanwhile or {})[line.strip()]()
                    child.stdin.write("\n")
                    child.stdin.flush()
        except BaseException:
            child.kill()
            raise
        assert child.stderr is not None
        said = child.stderr.read()
        assert child.wait() == 0, said[-4000:]
    seen = json.loads(line)
    assert seen.pop("problems") == []
    return seen


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=1024, kv_cache_memory=2**27, num_threads=1
    )
    with running_server(engine, ServerConfig(port=0, in_process=True)) as address:
        yield address


def scripted(text: str = "One two three.", **script: Any) -> ScriptedClient:
    client = ScriptedClient(Script(text, **script), max_model_len=1_000_000)
    client.returns["stats"] = stats_with(num_running=3, num_blocks=64, num_free_blocks=60)
    return client


def test_samples_stand_side_by_side_token_by_token(url: str) -> None:
    seen = look(url, "tokens")
    body = {"prompt": "The sky is blue because", "n": 3, "max_tokens": 12, "temperature": 0.8}
    told = httpx.post(url + "/v1/completions", json=body | {"seed": 7, "top_p": 1, "logprobs": 5})
    choices = told.json()["choices"]
    assert ["".join(column) for column in seen["columns"]] == [each["text"] for each in choices]
    assert seen["columns"] == [each["logprobs"]["tokens"] for each in choices]
    assert seen["tints"] > 8
    logprobs = choices[0]["logprobs"]
    for shown in (seen["hovered"], seen["focused"]):
        assert f"logprob {logprobs['token_logprobs'][2]:.4f}" in shown
        for other in logprobs["top_logprobs"][2]:
            assert json.dumps(other)[1:-1].replace(" ", "␣") in shown
    assert seen["alternatives"] == len(logprobs["top_logprobs"][2]) >= 5
    assert seen["left"]
    assert seen["closed"]
    assert all("12 tokens" in foot and "tok/s" in foot for foot in seen["feet"])


def test_a_chat(url: str) -> None:
    seen = look(url, "chat")
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "seed": 7}
    told = httpx.post(
        url + "/v1/chat/completions", json=body | {"max_tokens": 12, "temperature": 0.8, "top_p": 1}
    )
    assert "".join(seen["columns"][0]) == told.json()["choices"][0]["message"]["content"]
    assert seen["problem"] == ""


def test_stop(url: str) -> None:
    client = scripted("again", ends=False, delay=0.02)
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "stop")
        assert all(1 <= len(column) < 1000 for column in seen["columns"])
        assert seen["run"]
        assert client.aborted


@pytest.fixture
def trained() -> Iterator[tuple[str, Callable[[], None]]]:
    """A server whose weights may change, and what serves them again under a new version."""
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=1024, kv_cache_memory=2**27, num_threads=1
    )
    with running_server(engine, ServerConfig(port=0, in_process=True, rl=True)) as address:

        def change() -> None:
            body = {"model_path": str(resolve_model("smollm2-135m"))}
            reply = httpx.post(f"{address}/update_weights_from_disk", json=body, timeout=60)
            assert reply.status_code == 200, reply.text

        yield address, change


def test_a_seed_draws_the_same_again(trained: tuple[str, Callable[[], None]]) -> None:
    address, change = trained
    seen = look(address, "replay", {"change": change})
    assert len({"".join(column) for column in seen["before"]}) == 3
    assert seen["said"].removeprefix("seed ").isdigit()
    assert seen["again"] == f"{seen['said']} · replayed: all 36 tokens are equal"
    # the same tensors under a new version
    assert seen["changed"] == f"{seen['again']}, weights 0, then 1"


def test_the_dashboard_marks_new_weights(trained: tuple[str, Callable[[], None]]) -> None:
    address, change = trained
    seen = look(address, "versions", {"change": change})
    assert seen["mark"] == ["v1"]
    assert "weight version" in seen["tiles"]
    assert "free" in seen["blocks"]
    assert seen["cells"] > 20
    assert "forward" in seen["phases"]
    assert "1 in all" in seen["first"]
    assert seen["between"] >= 1
    assert seen["whole"] >= 1
    assert seen["drafts"] == "This engine makes no drafts."


def test_a_server_may_die_and_come_again() -> None:
    with ExitStack() as first, ExitStack() as second:
        address = first.enter_context(running_server(scripted(), ServerConfig(port=0)))
        port = int(address.rpartition(":")[2])

        def start() -> None:
            second.enter_context(running_server(scripted(), ServerConfig(port=port)))

        seen = look(address, "restart", {"kill": first.close, "start": start})
    assert seen["gone"] == ["3", 2]  # it keeps what it has


@contextmanager
def process(port: int, log: Path, *options: str) -> Iterator[psutil.Process]:
    """`nano-inference serve`, killed at the end."""
    small = ("--threads", "1", "--max-model-len", "1024", "--kv-cache-memory", "128MiB")
    command = [*ENTRY, "serve", "smollm2-135m", "--port", str(port), *small, *options]
    with log.open("a") as said, subprocess.Popen(command, stdout=said, stderr=said) as child:
        try:
            ends = time.monotonic() + PATIENCE
            while not is_healthy(port):
                assert child.poll() is None, log.read_text()
                assert time.monotonic() < ends, log.read_text()
                time.sleep(0.1)
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def require_continued(seen: Any) -> None:
    """What was streamed is there still, and is what the samples begin with that came later."""
    assert all(len(column) > 10 for column in seen["columns"])
    assert all("cut off" in foot for foot in seen["feet"])
    for before, after in zip(seen["columns"], seen["again"], strict=True):
        assert after[: len(before)] == before
        assert len(after) > len(before)
    assert "tokens are equal" in seen["said"]
    assert seen["healed"]


def test_a_server_is_killed_amid_a_stream(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with ExitStack() as first, ExitStack() as second:
        server = first.enter_context(process(port, log))

        def start() -> None:
            second.enter_context(process(port, log))

        seen = look(f"http://127.0.0.1:{port}", "killed", {"kill": server.kill, "start": start})
    assert seen["problem"] == "the stream ended before its end: the server has gone."
    assert seen["status"] == "reconnecting…"
    assert seen["kept"] == seen["columns"]  # although more was asked for meanwhile
    require_continued(seen)


def test_an_engine_is_killed_amid_a_stream(tmp_path: Path) -> None:
    port = free_port()
    with process(port, tmp_path / "log", "--restart-engine") as server:

        def kill() -> None:
            (engine,) = server.children()
            engine.kill()

        seen = look(f"http://127.0.0.1:{port}", "engine_killed", {"kill": kill})
    assert seen["problem"] == "the engine has died, and is being started again."
    assert seen["status"] == "the engine starts again…"
    require_continued(seen)


def test_text_stays_text() -> None:
    with running_server(scripted(HOSTILE), ServerConfig(port=0)) as address:
        seen = look(address, "hostile")
    for mode in ("raw", "chat"):
        assert all(text.startswith(HOSTILE[:20]) for text in seen[mode])
    assert seen["elements"] == 0
    assert seen["refused"]  # what would read HTML is off


def test_a_key_is_asked_for_and_kept_in_the_tab() -> None:
    with running_server(scripted(), ServerConfig(port=0, api_keys=("right",))) as address:
        seen = look(address, "keys")
    assert seen["locked"] == "a key is needed"
    assert seen["columns"][0][:2] == ["One", " two"]
    assert seen["kept"] == [["right"], {}, ""]


def test_on_a_phone(url: str) -> None:
    seen = look(url, "phone")
    assert seen["wide"] == [390, 390]
    assert seen["tip"][0] >= 0
    assert seen["tip"][1] <= 390
