"""The page in Debian's Chromium, driven by playwright in a separate environment (`make test-page`
creates it).
"""

import json
import os
import re
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
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.remote.messages import Generate
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.structured.grammar import Grammar
from tests.cli.running import ENTRY
from tests.server.engines import stats_with
from tests.server.scripted import (
    TEMPLATE,
    THINKS_AND_CALLS,
    Script,
    ScriptedClient,
    with_template,
)
from tests.server.trainers.weight_runs import free_port

PYTHON = Path(sys.prefix) / "page" / "bin" / "python"
CHROMIUM = Path("/usr/bin/chromium")
SCRIPT = Path(__file__).with_name("with_chromium.py")
PATIENCE = 90  # seconds until a server must have started
HOSTILE = "<script>alert(3)</script><img src=x onerror=alert(4)>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists() or not CHROMIUM.exists(),
        reason=f"there is no {PYTHON}, which make test-page makes, or no {CHROMIUM}",
    ),
]


def look(url: str, name: str, meanwhile: Mapping[str, Callable[[], object]] | None = None) -> Any:
    """Return the result of a function of `with_chromium.LOOKS`, and run the actions it requests."""
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
    reply = httpx.post(url + "/v1/completions", json=body | {"seed": 7, "top_p": 1, "logprobs": 5})
    choices = reply.json()["choices"]
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


def test_chat_sample(url: str) -> None:
    seen = look(url, "chat_sample")
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "seed": 7}
    reply = httpx.post(
        url + "/v1/chat/completions", json=body | {"max_tokens": 12, "temperature": 0.8, "top_p": 1}
    )
    assert "".join(seen["columns"][0]) == reply.json()["choices"][0]["message"]["content"]
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
    """Yield a server with updatable weights, and a function that serves them as a new version."""
    engine = EngineConfig(
        "smollm2-135m", device="cpu", max_model_len=1024, kv_cache_memory=2**27, num_threads=1
    )
    with running_server(engine, ServerConfig(port=0, in_process=True, rl=True)) as address:

        def change() -> None:
            body = {"model_path": str(resolve_model("smollm2-135m"))}
            reply = httpx.post(f"{address}/update_weights_from_disk", json=body, timeout=60)
            assert reply.status_code == 200, reply.text

        yield address, change


def test_seed_draws_the_same_again(trained: tuple[str, Callable[[], None]]) -> None:
    address, change = trained
    seen = look(address, "replay", {"change": change})
    assert len({"".join(column) for column in seen["before"]}) == 3
    assert seen["said"].removeprefix("seed ").isdigit()
    assert seen["again"] == f"{seen['said']} · replayed: all 36 tokens are equal"
    # the same tensors as a new version
    assert seen["changed"] == f"{seen['again']}, weights 0, then 1"


def test_dashboard_marks_new_weights(trained: tuple[str, Callable[[], None]]) -> None:
    address, change = trained
    seen = look(address, "versions", {"change": change})
    assert seen["mark"] == ["v1"]
    assert "weight version" in seen["tiles"]
    assert "free" in seen["blocks"]
    assert seen["cells"] > 20
    assert "forward" in seen["phases"]
    assert "1 total" in seen["first"]
    assert seen["between"] >= 1
    assert seen["whole"] >= 1
    assert seen["drafts"] == "Speculative decoding is off."


def test_dashboard_lists_open_requests(trained: tuple[str, Callable[[], None]]) -> None:
    seen = look(trained[0], "requests")
    assert seen["heads"] == [
        *("Request", "State", "Age", "Prompt"),
        *("Sampled", "Blocks", "Version"),
    ]
    assert seen["cells"][1] == "running"
    assert re.fullmatch(r"\d+, \d+ cached", seen["cells"][3])
    assert int(seen["cells"][4]) >= 20  # two samples
    assert int(seen["cells"][5]) > 0
    assert seen["title"].startswith("/v1/completions")


def test_server_may_die_and_come_again() -> None:
    with ExitStack() as first, ExitStack() as second:
        address = first.enter_context(running_server(scripted(), ServerConfig(port=0)))
        port = int(address.rpartition(":")[2])

        def start() -> None:
            second.enter_context(running_server(scripted(), ServerConfig(port=port)))

        seen = look(address, "restart", {"kill": first.close, "start": start})
    assert seen["gone"] == ["3", 2]  # keeps the old samples


@contextmanager
def process(port: int, log: Path, *options: str) -> Iterator[psutil.Process]:
    """Run `nano-inference serve` and kill it at the end."""
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
    """Check that the streamed text is kept and that the later samples begin with it."""
    assert all(len(column) > 10 for column in seen["columns"])
    assert all("cut off" in foot for foot in seen["feet"])
    for before, after in zip(seen["columns"], seen["again"], strict=True):
        assert after[: len(before)] == before
        assert len(after) > len(before)
    assert "tokens are equal" in seen["said"]
    assert seen["healed"]


def test_server_is_killed_amid_a_stream(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with ExitStack() as first, ExitStack() as second:
        server = first.enter_context(process(port, log))

        def start() -> None:
            second.enter_context(process(port, log))

        seen = look(f"http://127.0.0.1:{port}", "killed", {"kill": server.kill, "start": start})
    assert seen["problem"] == "Lost the connection to the server. The text shown is incomplete."
    assert seen["status"] == "reconnecting…"
    assert seen["kept"] == seen["columns"]  # although more was requested meanwhile
    require_continued(seen)


def test_engine_is_killed_amid_a_stream(tmp_path: Path) -> None:
    port = free_port()
    with process(port, tmp_path / "log", "--restart-engine") as server:

        def kill() -> None:
            (engine,) = server.children()
            engine.kill()

        seen = look(f"http://127.0.0.1:{port}", "engine_killed", {"kill": kill})
    assert seen["problem"] == "the engine died and is restarting."
    assert seen["status"] == "restarting the engine…"
    require_continued(seen)


def test_text_stays_text() -> None:
    with running_server(scripted(HOSTILE), ServerConfig(port=0)) as address:
        seen = look(address, "hostile")
    for mode in ("raw", "chat"):
        assert all(text.startswith(HOSTILE[:20]) for text in seen[mode])
    assert seen["elements"] == 0
    assert seen["refused"]  # settings that would read HTML are off


def test_key_is_asked_for_and_kept_in_the_tab() -> None:
    with running_server(scripted(), ServerConfig(port=0, api_keys=("right",))) as address:
        seen = look(address, "keys")
    assert seen["locked"] == "API key required"
    assert seen["columns"][0][:2] == ["One", " two"]
    assert seen["kept"] == [["right"], ""]
    assert "right" not in seen["stored"]


def test_on_a_phone(url: str) -> None:
    seen = look(url, "phone")
    assert seen["wide"] == [390] * 5
    assert seen["tip"][0] >= 0
    assert seen["tip"][1] <= 390


# -- samples, dashboard and the whole page ---------------------------------------------------------

CODE = "Here:\n\n```python\nx = 1\n```\nDone."


def test_samples_mark_code_and_their_end() -> None:
    with running_server(scripted(CODE), ServerConfig(port=0)) as address:
        seen = look(address, "shapes")
    assert seen["ends"] == ["end", "end"]
    assert seen["code"] == "```python\nx = 1\n```\n"
    assert all(foot.endswith("finished") for foot in seen["feet"])
    hidden, shown = seen["newline"]
    assert float(hidden) == 0 < float(shown)
    assert not seen["tokens"]
    assert seen["blocks"] == ["x = 1", "x = 1"]


def test_empty_samples_explain_and_reject() -> None:
    client = scripted()
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "empty_samples")
    assert not seen["folded"]
    assert {"Samples", "Temperature"} <= set(seen["visible"].split("\n"))
    assert len(seen["examples"]) == 3
    assert seen["filled"] == ["The capital of France is", "raw"]
    assert seen["about"].startswith("Raw text: the model continues the prompt")
    assert seen["empty"] == "Write a prompt first."
    assert seen["top_p"].startswith("Top p must be a number, more than 0, and at most 1.")
    assert seen["samples"] == 0
    assert client.requests == []


def test_idle_dashboard_has_no_empty_charts() -> None:
    client = scripted()
    client.returns["stats"] = stats_with(num_blocks=64, num_free_blocks=60)
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "idle")
    assert seen["charts"] == ["kv"]
    assert [each.partition(":")[0] for each in seen["said"]] == ["Idle", "Idle", "none"]
    assert seen["status"] == "scripted · context 1,000,000"


def test_tab_follows_the_page() -> None:
    with running_server(scripted(), ServerConfig(port=0)) as address:
        seen = look(address, "keyboard")
    reached = seen["reached"]
    assert reached[:3] == ["Samples", "Dashboard", "API"]
    wanted = ["chats", "chat-new", "Settings", "message", "send"]
    assert [each for each in reached if each in wanted] == wanted


# -- the chat --------------------------------------------------------------------------------------


def asked(client: ScriptedClient) -> list[str]:
    """Return the received prompts as text."""
    return [client.tokenizer.decode(each.prompt) for each in client.requests]


def test_chat_has_a_history_and_survives_a_reload() -> None:
    client = scripted("Fine.")
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "chat")
    shown = ["One\ntwo", "Fine.", "Three", "Fine."]
    assert seen["first"] == "chat"
    assert seen["hint"] == "0.7"  # the model recommends no parameters
    assert seen["typed"] == "One\ntwo"
    assert seen["shown"] == shown
    # tokens that arrive together have no speed
    foot = r"\d+ tokens( · [\d.,]+ tok/s)? · finished · seed \d+"
    assert all(re.fullmatch(foot, each) for each in seen["feet"])
    assert seen["again"] == [shown, "0.25"]
    assert seen["system"] == "Be brief."
    assert seen["fresh"] == [[], ""]
    assert seen["titles"] == ["New chat", "One\ntwo"]
    assert seen["back"] == shown
    assert seen["deleted"] == [[], ["New chat"]]
    last = asked(client)[-1]
    places = [last.index(each) for each in ("Be brief.", "One\ntwo", "Fine.", "Three")]
    assert places == sorted(places)
    params = client.requests[-1].params
    assert params.temperature == 0.25
    assert params.max_tokens == 1024


def test_chat_takes_what_the_context_leaves() -> None:
    client = ScriptedClient(Script("Fine."), max_model_len=100)
    client.returns["stats"] = stats_with()
    with running_server(client, ServerConfig(port=0)) as address:
        look(address, "chat")
    for request in client.requests:
        assert len(request.prompt) + request.params.max_tokens == 100


MARKDOWN = (
    "# Title\n\nSome **bold** and *soft* `a<b` text.\n\n- one\n- two\n\n1. first\n\n> said\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```html\n<script>alert(1)</script>\n```\n"
    "[good](https://example.com/x) [bad](javascript:alert(2)) ![picture](https://example.com/y.png)\n"
    "[worse](data:text/html,hi) <img src=x onerror=alert(3)> <a href='https://evil.example'>z</a>"
)


def test_markdown_is_rendered_and_text_stays_text() -> None:
    with running_server(scripted(MARKDOWN), ServerConfig(port=0)) as address:
        seen = look(address, "markdown")
    tags = {"H3", "P", "STRONG", "EM", "CODE", "UL", "OL", "LI", "BLOCKQUOTE", "TABLE", "PRE", "A"}
    assert tags <= set(seen["tags"])
    assert not {"IMG", "SCRIPT", "IFRAME", "STYLE", "FORM"} & set(seen["tags"])
    assert not [name for name in seen["attributes"] if name.startswith("on")]
    words = ("good", "picture", "https://evil.example")
    links = [each for each in seen["links"] if each[2] in words]
    assert [href for href, _, _ in links] == [
        *("https://example.com/x", "https://example.com/y.png", "https://evil.example")
    ]
    assert links == seen["links"]
    assert all("noopener" in rel for _, rel, _ in links)
    for text in ("[bad](javascript:alert(2))", "<img src=x onerror=alert(3)>", "<script>alert(1)"):
        assert text in seen["text"]
    assert "monospace" in seen["font"]
    assert seen["code"] == "<script>alert(1)</script>"
    assert seen["copied"] == MARKDOWN


def test_answer_is_continued_drawn_again_and_a_message_edited() -> None:
    client = scripted("one two three four five six seven", delay=0.001)
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "turns")
    first = client.tokenizer.decode(
        client.tokenizer.encode("one two three four five six seven")[:5]
    )
    assert "cut at 5 tokens" in seen["cut"]
    assert seen["continued"][0] == ["Count", first + first]
    assert "10 tokens" in seen["continued"][1]
    assert seen["again"] == ["Count", first]
    assert seen["edited"] == ["Begin anew", first]
    prompts = asked(client)
    assert prompts[1].endswith(first)  # continues within the answer
    assert prompts[2] == prompts[0]
    assert "Count" not in prompts[-1]
    seeds = [each.params.seed for each in client.requests]
    assert seeds[0] == seeds[1] != seeds[2]


def test_answer_can_be_stopped() -> None:
    client = scripted("again and", ends=False, delay=0.02)
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "halt")
    assert len(seen["messages"]) == 2
    assert "stopped" in seen["foot"]
    assert " tok/s · " in seen["foot"]
    assert seen["draft"] == "next"
    assert seen["send"]
    assert client.aborted
    assert len(client.requests) == 1


def test_link_fills_in_and_sends_nothing() -> None:
    client = scripted("Fine.")
    count: list[int] = []
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "link", {"count": lambda: count.append(len(client.requests))})
    assert count == [1]  # from the preceding message
    assert seen["filled"] == ["Name a fruit.", "7", "0.3", "Be brief."]
    assert seen["sent"] == []
    assert seen["opened"] == [["Name a fruit.", "Fine."], "And another."]
    assert seen["samples"] == ["The sky", "raw", "2", "5"]
    assert seen["url"].endswith("#/samples")
    assert len(client.requests) == 3
    assert client.requests[0].params.temperature == 0.7  # empty field
    assert client.requests[1].params.seed == 7
    assert client.requests[1].params.temperature == 0.3
    assert "Be brief." in asked(client)[1]


def test_bad_settings_are_rejected_with_a_word() -> None:
    client = scripted()
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "words")
    assert client.requests == []
    assert seen["empty"] == "Write a message first."
    begins = {
        "top_p": "Top p must be a number, more than 0, and at most 1.",
        "temperature": "Temperature must be a number, 0 or more, and at most 2.",
        "max_tokens": "Max tokens must be a whole number, 1 or more.",
        "seed": "Seed must be a whole number, 0 or more",
        "tools": "Tools is not valid JSON: ",
        "grammar": "The JSON schema is empty.",
    }
    for name, begin in begins.items():
        assert seen[name].startswith(begin), seen[name]


def test_tools_are_called_and_answers_follow_grammars(tmp_path: Path) -> None:
    def play(request: Generate, index: int) -> Script:
        if "sunny" in client.tokenizer.decode(request.prompt):
            return Script("yes")
        return Script(THINKS_AND_CALLS)

    folder = with_template(tmp_path / "tokenizer", TEMPLATE)
    client = ScriptedClient(play, tokenizer_folder=folder, max_model_len=4096)
    client.returns["stats"] = stats_with()
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "calls")
    assert seen["name"] == "weather"
    assert json.loads(seen["given"]) == {"city": "Köln", "days": 2}
    assert "calls a tool" in seen["foot"]
    assert "The weather." in seen["thoughts"]
    assert seen["shown"] == ["How is the weather?", "sunny", "yes", "Sure?", "yes"]
    first, second, third = client.requests
    assert first.params.grammar is None
    assert "weather" in asked(client)[1]
    assert second.params.grammar is None
    grammar = third.params.grammar
    assert grammar is not None
    wanted = Grammar.choice(["yes", "no"])
    assert (grammar.kind, grammar.text) == (wanted.kind, wanted.text)


def test_answer_that_is_cut_off_stays() -> None:
    client = scripted("One two three four five six.", die_after=4, delay=0.01)
    with running_server(client, ServerConfig(port=0)) as address:
        seen = look(address, "died")
    assert seen["kept"][0] == "Hello"
    assert seen["kept"][1].startswith("One two")
    assert "cut off" in seen["foot"]
    assert seen["after"] == seen["kept"]  # although more was requested meanwhile
    assert seen["draft"] == "Is there anybody?"


# -- /docs -----------------------------------------------------------------------------------------


def test_docs_fill_in_the_model_and_try_calls() -> None:
    config = ServerConfig(port=0, served_model_name="poet-1b")
    with running_server(scripted(), config) as address:
        seen = look(address, "docs")
    assert not any("MODEL" in each for each in seen["commands"])
    assert any('"model": "poet-1b"' in each for each in seen["commands"])
    assert any("model='poet-1b'" in each for each in seen["commands"])
    status, answer = seen["good"]
    assert status.startswith("200 · ")
    assert json.loads(answer)["choices"][0]["message"]["content"] == "One two three."
    assert seen["bad"].startswith("The body is not valid JSON")
    assert seen["hash"] == "#administration" or seen["hash"] == "#metrics-and-health"
    assert seen["tried"] >= 10


def test_docs_ask_for_a_key_where_one_is_needed() -> None:
    config = ServerConfig(port=0, api_keys=("right",), served_model_name="poet-1b")
    with running_server(scripted(), config) as address:
        seen = look(address, "docs_key")
    assert "MODEL" in seen["before"]
    assert '"poet-1b"' in seen["after"]
