"""`nano-inference chat` with piped input."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.cli import chat, conversation
from tests.cli.running import COLOR, FAST, finish, run, spawn
from tests.cli.test_url import Chat
from tests.server.adapters import adapter_folder
from tests.server.scripted_http import scripted_http


def conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Record the prompts of each call of `generate`."""
    seen: list[list[dict[str, str]]] = []
    generate = InferenceEngine.generate

    def remember(self: Any, prompts: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(prompts)
        return generate(self, prompts, *arguments, **named)

    monkeypatch.setattr(InferenceEngine, "generate", remember)
    return seen


def test_chat_keeps_the_conversation(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = conversations(monkeypatch)
    lines = [
        "one",
        "",
        "two",
        "/system Be kind.",
        "three",
        "/reset",
        "/help",
        "four",
        "/system",
        "five",
        "/exit",
        "six",
    ]
    stdin = "\n".join(lines)
    result = run("chat", folders["chat"], "--max-tokens", "4", "--seed", "2", *FAST, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    roles = [[message["role"] for message in each] for each in seen]
    turn = ["user", "assistant"]
    assert roles == [
        ["user"],
        [*turn, "user"],
        ["system", *turn, *turn, "user"],
        ["system", "user"],
        [*turn, "user"],
    ]
    assert [each[-1]["content"] for each in seen] == ["one", "two", "three", "four", "five"]
    assert result.stdout.startswith(seen[1][1]["content"] + "\n" + seen[2][4]["content"] + "\n")
    assert "/reset" in result.stderr


def test_commands_change_and_show_the_conversation(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = conversations(monkeypatch)
    saved = tmp_path / "saved conversation.json"
    lines = [
        "/set system Be kind.",
        "/set parameter temperature 0.25",
        "/set parameter seed none",
        '"""one',
        'and more"""',
        "/show",
        f"/save {saved}",
        "/clear",
        "two",
        f"/load {saved}",
        '"""three"""',
        "/?",
        "/bye",
        "never",
    ]
    result = run("chat", folders["chat"], "--max-tokens", "4", *FAST, stdin="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    assert [each[-1]["content"] for each in seen] == ["one\nand more", "two", "three"]
    assert [len(each) for each in seen] == [2, 2, 4]
    assert all(each[0] == {"role": "system", "content": "Be kind."} for each in seen)
    assert re.search(r"temperature +0\.25\n", result.stderr)
    assert re.search(r"messages +2\n", result.stderr)
    assert "/set parameter NAME VALUE" in result.stderr
    assert json.loads(saved.read_text(encoding="utf-8"))["messages"] == seen[2][1:3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set parameter warmth 1", "unknown parameter 'warmth'"),
        ("/set parameter temperature hot", "temperature must be a number; got 'hot'"),
        ("/set parameter max_tokens 1.5", "--max-tokens must be a whole number"),
        ("/set parameter top_p 7", "--top-p 7.0 must be"),
        ("/set temperature", "write /set parameter NAME VALUE"),
        ("/save", "the file is missing"),
        ("/load", "the file is missing"),
        ("/load /no/such", "cannot read /no/such: there is no folder /no."),
        ("/load /tmp/no-such", "cannot read /tmp/no-such: no such file."),
        ("/load pyproject.toml", "is not a saved conversation"),
        ("/load src", "cannot read src: it is a folder."),
        ("/save /no/such/file", "cannot write /no/such/file: there is no folder /no/such."),
        ("/save src", "cannot write src: it is a folder."),
        ('"""never ends', "has no end"),
    ],
)
def test_commands_report_wrong_usage(folders: dict[str, str], line: str, words: str) -> None:
    result = run("chat", folders["chat"], *FAST, stdin=line + "\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Errno" not in result.stderr


def test_tab_completes_commands_and_parameters() -> None:
    assert conversation.completions("/sy") == ["/system"]
    assert conversation.completions("/b") == ["/bye"]
    assert conversation.completions("/set parameter te") == ["/set parameter temperature "]
    assert conversation.completions("hello") == []


def test_parameter_that_is_set_is_sent_to_a_server() -> None:
    lines = "one\n/set parameter top_k 9\ntwo\n"
    with scripted_http(Chat()) as seen:
        result = run("chat", "--url", seen.url, "--temperature", "0.5", stdin=lines)
    assert result.exit_code == 0, result.stderr
    first, second = seen.bodies("/v1/chat/completions")
    assert (first["temperature"], "top_k" in first) == (0.5, False)
    assert (second["temperature"], second["top_k"]) == (0.5, 9)


def test_chat_with_an_adapter(folders: dict[str, str], tmp_path: Path) -> None:
    folder = adapter_folder(Path(folders["chat"]), tmp_path / "own", 1)
    asked = ("--max-tokens", "8", "--seed", "2", "--lora", f"own={folder}", *FAST)
    plain = run("chat", folders["chat"], *asked, stdin="one")
    own = run("chat", folders["chat"], *asked, "--adapter", "own", stdin="one")
    assert (plain.exit_code, own.exit_code) == (0, 0), own.stderr
    assert plain.stdout != own.stdout
    there = run("chat", "--url", "http://127.0.0.1:1", "--adapter", "own", stdin="one")
    assert "--adapter requires a local engine" in COLOR.sub("", there.output)


def test_chat_ends_with_its_input(folders: dict[str, str]) -> None:
    result = run("chat", folders["chat"], "--max-tokens", "3", *FAST, stdin="one\ntwo")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert run("chat", folders["chat"], *FAST, stdin="").stdout == ""


@pytest.mark.parametrize(
    ("model", "stdin", "words"),
    [
        ("base", "hi\n", "nano-inference generate"),
        ("bare", "hi\n", "tokenizer"),
        ("chat", "/dance\n", "unknown command /dance"),
        ("chat", "x" * 600 + "\n", "/clear starts a new one"),
    ],
)
def test_chat_reports_wrong_usage(
    folders: dict[str, str], model: str, stdin: str, words: str
) -> None:
    result = run("chat", folders[model], "--max-model-len", "512", *FAST, stdin=stdin)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_chat_asks_for_no_more_than_fits(folders: dict[str, str]) -> None:
    result = run("chat", folders["chat"], "--max-model-len", "64", *FAST, stdin="hi\n")
    assert result.exit_code == 0, result.stderr


ANSWERS = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from nano_inference.cli.conversation import Session
from nano_inference.system.http_client import Piece
from nano_inference.types import SamplingParams

def answer(messages, session):
    yield Piece("BEGIN")
    time.sleep(1.0)
    yield Piece("END " + messages[-1]["content"])

Session(answer, SamplingParams(), set()).run()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_keys_typed_during_an_answer_are_read_after_it() -> None:
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ANSWERS],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def until(words: bytes) -> None:
        nonlocal seen
        while words not in seen:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 4096)
        _, _, seen = seen.partition(words)

    until(b">>>")
    os.write(ours, b"one\n")
    until(b"BEGIN")
    os.write(ours, b"two\n")
    until(b"END one")
    until(b"BEGIN")
    os.write(ours, b"\x04")
    until(b"END two")
    with contextlib.suppress(OSError):  # the other side closes
        while select.select([ours], [], [], 20)[0] and os.read(ours, 4096):
            pass
    os.close(ours)
    assert process.wait(timeout=20) == 0


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_keys_of_a_terminal(folders: dict[str, str]) -> None:
    """Press Ctrl-C during an answer, Ctrl-C at the prompt, a mistyped command and Ctrl-D."""
    import pty

    ours, theirs = pty.openpty()
    begin = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from "
        "nano_inference.cli import app; app()"
    )
    words = ["chat", folders["chat"], "--max-tokens", "50000", "--threads", "1"]
    settled = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {
        "TERM": "xterm-256color"
    }
    process = subprocess.Popen(
        [sys.executable, "-c", begin, *words],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env=settled,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def until(what: bytes, key: bytes = b"") -> None:
        """Press a key and read until `what`. Repeat: a starting line editor can lose the key."""
        nonlocal seen
        os.write(ours, key)
        for _ in range(60):
            while what not in seen and select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
            if what in seen:
                _, _, seen = seen.partition(what)
                return
            os.write(ours, key)
        raise AssertionError(f"{what} does not come after {seen}")

    until(b">>>")
    os.write(ours, b"hello\n")
    until(b"\xef\xbf\xbd")  # the answer has begun: random bytes, mostly invalid text
    until(b"stopped", b"\x03")
    until(b">>>")
    until(b"Press Ctrl-D or type /exit to leave.", b"\x03")
    until(b"error: unknown command /dance", b"/dance\n")
    until(b">>>")
    with contextlib.suppress(OSError):  # the other side closes
        until(b"never said", b"\x04")
    os.close(ours)
    assert process.wait(timeout=60) == 0


@pytest.mark.thorough
def test_interrupt_stops_an_answer_and_keeps_the_session(folders: dict[str, str]) -> None:
    process = spawn("chat", folders["chat"], "--max-tokens", "50000", "--threads", "1")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    process.stdout.read(5)  # the answer has begun
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, "/help\n")
    assert code == 0, err
    assert "start a new conversation" in err
    assert "Traceback" not in err


def test_draft_figures_include_tokens_per_step(folders: dict[str, str]) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    said: list[dict[str, str]] = [{"role": "user", "content": "one"}]
    figures: list[str] = []
    for drafting in ({}, {"draft_model": "self", "draft_layers": 2}):
        config = EngineConfig(folders["chat"], kv_cache_memory=2**20, num_threads=1, **drafting)
        with InferenceEngine(config) as engine:
            if engine.drafter is not None:
                engine.drafter.costs = None  # no limit on drafts
            session = conversation.Session(partial(chat._ask_engine, engine), params, set())
            usage = [piece.usage for piece in session.answer(said, session)][-1]
        figures.append(conversation.figures(usage, 1.0, is_cut=False, stopped=False))
    assert "per step" not in figures[0]
    told = re.search(r"tok/s, ([0-9.]+) tokens per step; ", figures[1])
    assert told is not None
    assert float(told[1]) > 1.5
