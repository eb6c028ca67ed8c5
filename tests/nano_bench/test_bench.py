"""`nano-inference bench` against scripted servers."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import run, spawn
from tests.nano_bench.scripted import Server, in_a_thread, our_server, respond

FEW = ("--requests", "6", "--concurrency", "3", "--warm-up", "1")


async def too_many(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    respond(writer, {"error": {"message": "try later"}}, "429 Too Many Requests")


def dies_at(number: int) -> Any:
    """Server that breaks the connection in the middle of this answer and of all later ones."""

    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body and len(server.seen) >= number:
            raise ConnectionError
        await our_server(server, body, writer)

    return script


@pytest.mark.thorough
def test_load_writes_a_table_a_report_and_a_picture(tmp_path: Path) -> None:
    out, picture = tmp_path / "load.json", tmp_path / "load.png"
    with in_a_thread(our_server) as url:
        result = run(
            *("bench", url, *FEW, "--prompts", "chat", "--pid", str(os.getpid())),
            *("--slo", "ttft=5s,itl=5000ms", "--out", str(out), "--plot", str(picture)),
        )
    assert result.exit_code == 0, result.output
    assert "output tokens/s" in result.stdout
    assert "counted by usage" in result.stdout
    report = json.loads(out.read_text())
    summary = report["summary"]
    assert (summary["output_tokens"], summary["requests"], summary["errors"]) == (18, 6, 0)
    assert summary["first_token_ms"]["p50"] >= 28
    assert summary["within_limits"] == 6
    assert summary["goodput_per_s"] == pytest.approx(summary["requests_per_s"], rel=1e-3)
    assert "api" in summary["cpu_s"]
    assert len(report["requests"]) == 6
    assert all(row["first_token_s"] >= 0.028 for row in report["requests"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_open_loop_that_rises() -> None:
    with in_a_thread(our_server) as url:
        rising = ("--rate", "50", "--ramp", "200", "--duration", "300ms", "--warm-up", "0")
        result = run("bench", url, *rising, "--no-stream", "--model", "the-model")
    # streams every reply: the command must report that it cannot read the reply
    assert result.exit_code == 1, result.output
    assert "50 to 200 per second" in result.output
    assert "unreadable reply" in result.output


@pytest.mark.thorough
def test_server_that_fails_in_the_middle(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    with in_a_thread(dies_at(5)) as url:
        result = run("bench", url, *FEW, "--out", str(out), "--model", "the-model")
    assert result.exit_code == 1
    assert "(3 cut off)" in result.output
    rows = json.loads(out.read_text())["requests"]
    assert [row["error_kind"] for row in rows] == [None] * 3 + ["cut off"] * 3
    assert "middle" in rows[-1]["error"] or "closed" in rows[-1]["error"]


def test_errors_fail_the_command() -> None:
    with in_a_thread(too_many) as url:
        result = run("bench", url, "--model", "m", "--requests", "2", "--warm-up", "0")
    assert result.exit_code == 1
    assert "2 x status 429" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "cannot connect to"),
        (("--ramp", "3"), "require --rate"),
        (("--rate", "2", "-c", "3"), "give one"),
        (("--slo", "speed=3s"), "is not a limit"),
        (("--duration", "soon"), "is not a time"),
        (("--prompt-tokens", "many"), "is not a length"),
        (("--out", "/no/such/folder/x.json"), "cannot write /no/such/folder/x.json"),
    ],
)
def test_missing_server_and_wrong_usage_exit_with_code_2(words: tuple[str, ...], said: str) -> None:
    result = run("bench", "http://127.0.0.1:1", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_ctrl_c_shows_what_was_seen(tmp_path: Path) -> None:
    out, reached = tmp_path / "load.json", threading.Event()

    async def silent(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.seen) > 3:
            reached.set()
            await asyncio.sleep(60)
        await our_server(server, body, writer)

    with in_a_thread(silent) as url:
        words = ("-n", "9", "-c", "1", "--warm-up", "0", "--out", str(out))
        process = spawn("bench", url, *words)
        assert reached.wait(60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "1 interrupted" in stdout
    kinds = [row["error_kind"] for row in json.loads(out.read_text())["requests"]]
    assert kinds == [None, None, "interrupted"]
    assert "Traceback" not in stderr
