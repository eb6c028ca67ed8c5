"""`nano-inference run-batch`: on an engine in this process and against failing servers."""

import asyncio
import errno
import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from nano_bench import batches
from nano_bench.batches import (
    AHEAD,
    Answer,
    Gone,
    Output,
    Reader,
    lines_of,
    patiently,
    run_lines,
)
from nano_inference.errors import ConfigError, NanoInferenceError
from tests.cli.running import FAST, run, spawn
from tests.nano_bench.scripted import Script, Server, in_a_thread, respond

COMPLETIONS = "/v1/completions"
URLS = frozenset((COMPLETIONS,))


def line(custom_id: Any, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> str:
    body = {"prompt": f"say {custom_id}", "max_tokens": 5} | body
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


MADE_ANEW = {"id", "request_id", "created", "created_at", "completed_at", "cached_tokens"}


def settled(path: Path) -> bytes:
    """Return the output without fields that vary by run: ids, times and cache hits."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(each) for name, each in value.items() if name not in MADE_ANEW}
        return [without(each) for each in value] if isinstance(value, list) else value

    return json.dumps([(row["id"], without(row)) for row in rows(path)]).encode()


def test_rows_match_the_engine_and_a_run_resumes(folders: dict[str, str], tmp_path: Path) -> None:
    source, whole, again = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "again.jsonl"))
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}
    bodies = {"messages": chat["messages"], "max_tokens": 4}
    greedy = {"temperature": 0, "max_output_tokens": 16}  # does not accept a seed
    lines = [
        line("a"),
        json.dumps({"custom_id": "b", "url": "/v1/chat/completions", "body": bodies}),
        "{half",
        "",
        line("a"),
        line("c", max_tokens=-1),
        line("d", seed=7, n=2),
        line("e", url="/v1/rerank"),
        line("f", stream=True),
        line(None),
        "[]",
        line("g", method="GET"),
        line("h", model="another"),
        json.dumps({"custom_id": "i", "url": "/v1/responses", "body": {"input": "hi"} | greedy}),
        json.dumps({"custom_id": "j", "url": "/v1/embeddings", "body": {"input": ["hi", "you"]}}),
        *(line(f"more {number}") for number in range(6)),
    ]
    source.write_text("\n".join(lines))
    words = ("--model", folders["chat"], *FAST, "-c", "2")
    result = run("run-batch", "-i", str(source), "-o", str(whole), *words)
    assert result.exit_code == 1, result.output
    assert "20 rows, 9 failed" in result.stderr
    found = rows(whole)
    assert [row["custom_id"] for row in found[:8]] == ["a", "b", None, "a", "c", "d", "e", "f"]
    codes = [
        row["error"]["code"] if row["error"] else row["response"]["status_code"] for row in found
    ]
    assert codes[:12] == [
        *(200, 200, "invalid_json_line", "duplicate_custom_id", 400, 200, "invalid_url"),
        *("invalid_body", "missing_custom_id", "invalid_json_line", "invalid_method", 404),
    ]
    assert set(codes[12:]) == {200}
    assert "line 3 is not JSON" in found[2]["error"]["message"]
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert found[1]["response"]["body"]["object"] == "chat.completion"
    assert len(found[5]["response"]["body"]["choices"]) == 2
    assert len(found[13]["response"]["body"]["data"]) == 2

    kept = whole.read_bytes().splitlines(keepends=True)
    again.write_bytes(b"".join(kept[:7]) + kept[7][:20])
    result = run("run-batch", "-i", str(source), "-o", str(again), *words)
    assert result.exit_code == 1, result.output
    assert "Resuming after 7 rows" in result.stderr
    assert again.read_bytes().startswith(b"".join(kept[:7]))
    assert settled(again) == settled(whole)

    again.write_bytes(kept[1] + kept[0])
    result = run("run-batch", "-i", str(source), "-o", str(again), *words)
    assert (result.exit_code, "does not match its line" in result.stderr) == (2, True)
    assert again.read_bytes() == kept[1] + kept[0]


async def echo(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    del server
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    respond(writer, {"choices": [{"text": body["prompt"]}], "usage": usage})


def dies(after: int) -> Script:
    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.seen) > after:
            raise ConnectionError
        await echo(server, body, writer)

    return script


def test_run_resumes_from_whole_rows_after_the_server_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "FIRST_WAIT", 0.001)
    source, out, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_text("".join(line(str(number)) + "\n" for number in range(20)))
    words = ("run-batch", "-i", str(source), "-c", "3")
    with in_a_thread(dies(8)) as url:
        result = run(*words, "-o", str(out), "--server", url)
    assert result.exit_code == 2, result.output
    assert "the connection was closed before a reply" in result.stderr
    assert [row["custom_id"] for row in rows(out)] == [str(number) for number in range(8)]
    with in_a_thread(echo) as url:
        result = run(*words, "-o", str(out), "--server", url)
        assert result.exit_code == 0, result.output
        assert run(*words, "-o", str(whole), "--server", url).exit_code == 0
    assert settled(out) == settled(whole)
    assert [row["response"]["body"]["choices"][0]["text"] for row in rows(out)] == [
        f"say {number}" for number in range(20)
    ]


def test_server_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FIRST_WAIT", 0.001)
    answers = iter([Answer(429, b""), Answer(503, b""), Answer(200, b"{}")])

    async def ask(path: str, body: bytes) -> Answer:
        return next(answers)

    assert asyncio.run(patiently(ask, "/", b"")).status == 200
    answers = iter([Answer(503, b"dead", may_retry=False)])
    with pytest.raises(Gone, match="status 503: dead"):
        asyncio.run(patiently(ask, "/", b""))
    answers = itertools.repeat(Answer(502, b"none"))
    with pytest.raises(Gone, match="502"):
        asyncio.run(patiently(ask, "/", b""))


def test_server_cannot_impose_an_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LONGEST_WAIT", 0.01)
    answers = iter([Answer.of(429, {"retry-after": "9" * 400}, b""), Answer(200, b"{}")])

    async def ask(path: str, body: bytes) -> Answer:
        return next(answers)

    monkeypatch.setattr(batches, "FIRST_WAIT", 0.001)
    assert asyncio.run(asyncio.wait_for(patiently(ask, "/", b""), 5)).status == 200


def test_endlessly_nested_answer_is_a_row(tmp_path: Path) -> None:
    async def ask(path: str, body: bytes) -> Answer:
        return Answer(200, b"[" * 100_000)

    with Output(tmp_path / "out.jsonl") as output:
        lines = iter([(1, line("a").encode())])
        asyncio.run(run_lines(lines, Reader(URLS), ask, output, 1))
    assert rows(output.path)[0]["error"]["code"] == "invalid_response"


def test_lines_in_memory_are_bounded_and_rows_keep_their_order(tmp_path: Path) -> None:
    taken = asked = most = 0

    def endless() -> Any:
        nonlocal taken
        for taken in range(1, 201):
            yield taken, line(str(taken)).encode()

    async def ask(path: str, body: bytes) -> Answer:
        nonlocal asked, most
        asked += 1
        most = max(most, taken - output.counts.rows)
        if asked == 1:
            await asyncio.sleep(0.05)  # the others wait for the first request
        return Answer(200, b'{"usage": {"completion_tokens": 2}}')

    with Output(tmp_path / "out.jsonl") as output:
        asyncio.run(run_lines(endless(), Reader(URLS), ask, output, 3))
    assert [row["custom_id"] for row in rows(output.path)] == [str(n) for n in range(1, 201)]
    assert most <= 3 * AHEAD + 1
    assert output.counts.tokens == 400


def test_late_or_non_json_answer_is_an_error_row(tmp_path: Path) -> None:
    async def odd(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"] == "say slow":
            await asyncio.sleep(60)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nwhy")

    for name, seconds, code in (("odd", "30", "invalid_response"), ("slow", "0.2", "timeout")):
        source, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-out.jsonl"
        source.write_text(line(name))
        with in_a_thread(odd) as url:
            words = ("--server", url, "--timeout", seconds)
            result = run("run-batch", "-i", str(source), "-o", str(out), *words)
        assert result.exit_code == 1
        assert [row["error"]["code"] for row in rows(out)] == [code]


def test_line_that_is_too_long_is_an_error_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_LINE", 200)
    source = tmp_path / "in.jsonl"
    source.write_text(line("a") + "\n" + line("b" * 1000) + "\n" + line("c") + "\n")
    reader = Reader(URLS)
    with source.open("rb") as file:
        read = [reader.read(*each) for each in lines_of(file)]
    assert [each.custom_id for each in read] == ["a", None, "c"]
    assert read[1].error is not None
    assert read[1].error["error"]["code"] == "line_too_long"


@pytest.mark.parametrize("name", ["stream", "background"])
def test_answer_that_comes_in_parts_is_rejected(name: str) -> None:
    read = batches.Reader(URLS).read(3, line("a", **{name: True}).encode())
    assert read.error is not None
    assert f"line 3: {name} is not supported" in json.dumps(read.error)
    assert batches.Reader(URLS).read(3, line("a", **{name: False}).encode()).error is None


def test_seeds_follow_from_the_custom_id() -> None:
    def seeds(seed: int | None) -> list[Any]:
        reader = Reader(URLS, seed)
        lines = [line("a"), line("b"), line("c", seed=5)]
        read = [reader.read(*each) for each in enumerate(map(str.encode, lines), start=1)]
        return [json.loads(each.body).get("seed") for each in read]

    assert seeds(None) == [None, None, 5]
    assert seeds(1) == seeds(1) != seeds(2)
    assert seeds(1)[0] != seeds(1)[1]
    assert seeds(1)[2] == 5


def test_disk_that_is_full_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, calls = os.write, 0

    def full(file: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, "no space left")
        return really(file, data[: len(data) // 2 or 1] if calls == 5 else data)

    async def ask(path: str, body: bytes) -> Answer:
        return Answer(200, b"[]")

    lines = ((number, line(str(number)).encode()) for number in range(1, 10))
    with Output(tmp_path / "out.jsonl") as output:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(NanoInferenceError, match="no space left"):
            asyncio.run(run_lines(lines, Reader(URLS), ask, output, 2))
        monkeypatch.undo()
    assert [row["custom_id"] for row in rows(output.path)] == ["1", "2", "3", "4"]


def test_file_is_written_by_one_run_at_a_time(tmp_path: Path) -> None:
    with Output(tmp_path / "out.jsonl"), pytest.raises(ConfigError, match="in use by another run"):
        Output(tmp_path / "out.jsonl")


def test_ctrl_c_leaves_whole_rows(tmp_path: Path) -> None:
    reached = threading.Event()

    async def stops(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.seen) > 3:
            reached.set()
            await asyncio.sleep(60)
        await echo(server, body, writer)

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(str(number)) + "\n" for number in range(9)))
    with in_a_thread(stops) as url:
        words = ("-i", str(source), "-o", str(out), "--server", url, "-c", "1")
        process = spawn("run-batch", *words)
        assert reached.wait(60)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Interrupted after 3 rows" in stderr
    assert "Traceback" not in stderr
    assert [row["custom_id"] for row in rows(out)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give exactly one of --model and --server"),
        (("--model", "m", "--server", "u"), "give exactly one of --model and --server"),
        (("--server", "http://127.0.0.1:1"), "cannot connect to"),
        (("--server", "http://127.0.0.1:1", "--dtype", "float32"), "requires --model"),
        (("--model", "m", "--api-key", "k"), "requires --server"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--model", "m", "-o", "SOURCE"), "is the input"),
    ],
)
def test_wrong_use_is_exit_code_2(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    out = ("-o", str(tmp_path / "out.jsonl")) if "-o" not in words else ()
    given = [str(source) if word == "SOURCE" else word for word in words]
    result = run("run-batch", "-i", str(source), *out, *given)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
