"""The load tool against a server that follows a script."""

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import load
from benchmarks.__main__ import app
from benchmarks.cpu_time import CpuMeter, server_parts
from benchmarks.load import CHAT, Ask, Load, Target, chat_requests, drive, outcome, token_requests

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
Script = Callable[["Server", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Reads requests and answers each by the script; counts what is under way."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.connections = self.under_way = self.most = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                fields = [each async for each in head_fields(reader)]
                length = int(dict(fields).get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.seen.append((line.decode().strip(), dict(fields), body))
                self.under_way += 1
                self.most = max(self.most, self.under_way)
                await self.script(self, body, writer)
                self.under_way -= 1
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def head_fields(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, str]]:
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        yield name.lower(), value.strip()


def respond(writer: asyncio.StreamWriter, content: Any, status: str = "200 OK") -> None:
    body = json.dumps(content).encode()
    writer.write(
        b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
    )


def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


def event(writer: asyncio.StreamWriter, content: Any) -> None:
    data = b"data: %s\n\n" % (
        content.encode() if isinstance(content, str) else json.dumps(content).encode()
    )
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None} | fields]}


async def whole(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    del server, body
    await asyncio.sleep(0.005)
    respond(writer, {"choices": [{"text": "abc"}], "usage": USAGE})


async def streamed(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Waits of 30, 10 and 20 ms before three pieces."""
    del server
    begin_stream(writer)
    if "messages" in body:
        event(writer, choice(delta={"role": "assistant", "content": ""}))
    for wait in (0.03, 0.01, 0.02):
        await asyncio.sleep(wait)
        event(writer, choice(delta={"content": "x"}) if "messages" in body else choice(text="x"))
    event(writer, choice(text="", delta={}, finish_reason="length"))
    event(writer, {"choices": [], "usage": USAGE})
    event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def run(script: Script, asks: list[Ask], **options: Any) -> tuple[Load, Server]:
    async def main() -> tuple[Load, Server]:
        server = Server(script)
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            done = await drive(Target(f"http://127.0.0.1:{port}", "m", "secret"), asks, **options)
            listening.close()
        await asyncio.sleep(0.01)  # the server's ends of the connections
        return done, server

    return load.run(main())


def test_a_closed_loop_keeps_so_many_under_way_and_its_connections() -> None:
    asks = token_requests(20, 5, 3, stream=False, top_k=7)
    done, server = run(whole, asks, concurrency=4)
    assert done.errors == []
    assert (server.most, server.connections) == (4, 4)
    assert done.tokens == 60
    row = done.row()
    assert (row["prompt_tokens"], row["cached_tokens"], row["first_token_ms"]) == (100, 80, None)
    assert row["output_tokens_per_s"] == pytest.approx(60 / done.seconds, rel=1e-2)
    assert row["whole_ms"]["p50"] >= 5.0
    assert done.seconds >= 5 * 0.005
    line, fields, body = server.seen[0]
    assert line == "POST /v1/completions HTTP/1.1"
    assert fields["authorization"] == "Bearer secret"
    assert body["prompt"] in [ask.body["prompt"] for ask in asks]
    options = {
        "model": "m",
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": False,
        "top_k": 7,
    }
    assert {name: value for name, value in body.items() if name != "prompt"} == options
    assert row["cpu_s"]["client"] > 0


@pytest.mark.parametrize("make", [token_requests, chat_requests])
def test_a_stream_is_timed_piece_by_piece(make: Callable[..., list[Ask]]) -> None:
    done, server = run(streamed, make(2, 5, 3, stream=True), concurrency=1)
    assert done.errors == []
    assert server.seen[0][2]["stream_options"] == {"include_usage": True}
    for each in done.outcomes:  # neither the role nor the end is a piece
        first, second, third = each.pieces
        waits = [first - each.began, second - first, third - second]
        assert all(
            wait >= planned - 0.002 for wait, planned in zip(waits, (0.03, 0.01, 0.02), strict=True)
        ), waits
        assert each.tokens == 3
    assert done.row()["tokens_per_event"] == 1.0


def test_requests_set_out_at_a_rate_however_many_are_under_way() -> None:
    async def slow(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await whole(server, body, writer)

    asks = token_requests(40, 1, 3, stream=False)
    done, server = run(slow, asks, rate=200.0)
    assert done.errors == []
    assert server.most > 8  # 0.1 s at 200 a second
    starts = [each.began for each in done.outcomes]
    assert 0.08 < starts[-1] - starts[0] < 0.5  # 0.195 s on average
    again, _ = run(whole, asks, rate=200.0)
    gaps = [
        [b - a for a, b in itertools.pairwise(x)]
        for x in (starts, [e.began for e in again.outcomes])
    ]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-6)


async def error_event(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin_stream(writer)
    event(writer, choice(text="x"))
    event(writer, {"error": {"message": "the engine is dead"}})
    event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


async def no_done(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin_stream(writer)
    event(writer, choice(text="x"))
    writer.write(b"0\r\n\r\n")


async def cut_off(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    begin_stream(writer)
    event(writer, choice(text="x"))
    raise ConnectionError


async def too_many(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    respond(writer, {"error": {"message": "try later"}}, "429 Too Many Requests")


async def nonsense(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    respond(writer, {"usage": USAGE, "choices": []})


@pytest.mark.parametrize(
    ("script", "stream", "words"),
    [
        (error_event, True, "the engine is dead"),
        (no_done, True, r"without \[DONE\]"),
        (cut_off, True, "middle of a chunked"),
        (too_many, True, "status 429: .*try later"),
        (too_many, False, "status 429: .*try later"),
        (nonsense, False, "no choices"),
    ],
)
def test_what_goes_wrong_is_counted_and_said(script: Script, stream: bool, words: str) -> None:
    done, _ = run(script, token_requests(3, 5, 3, stream=stream), concurrency=2)
    assert len(done.errors) == 3
    for error in done.errors:
        assert re.search(words, error), error
    assert done.row()["output_tokens"] == 0


def test_a_server_that_does_not_answer_is_given_up() -> None:
    async def silent(_: Server, __: dict[str, Any], ___: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)

    done, _ = run(silent, token_requests(2, 5, 3, stream=False), timeout=0.05)
    assert done.errors == ["there was no whole reply within 0.05 s"] * 2


def test_without_usage_the_pieces_are_counted() -> None:
    reply = load.Reply(
        0.0, 200, [(0.1, json.dumps(choice(text="")).encode()), (0.2, b"[DONE]")], ended=0.2
    )
    found = outcome(load._Record(Ask("/v1/completions", {"stream": True}), 0.0, reply))
    assert (found.tokens, found.pieces, found.error) == (1, (0.1,), None)


def test_the_cpu_time_of_a_tree_is_that_of_its_processes() -> None:
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])\ninput()"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE) as process:
        meter = CpuMeter({"server": process.pid})
        before, spent = meter.read(), 0.0
        for _ in range(600):
            spent = meter.read()["server"] - before["server"]
            if spent >= 0.3:
                break
            time.sleep(0.1)
        assert 0.28 <= spent < 1.0
        assert meter.read()["client"] - before["client"] < 0.3
    assert server_parts(os.getpid())["api"] == os.getpid()


@contextmanager
def in_a_thread(script: Script) -> Iterator[str]:
    """A server for a client that has an event loop of its own."""
    loop, places = asyncio.new_event_loop(), list[int]()

    async def start() -> asyncio.Server:
        listening = await asyncio.start_server(Server(script), "127.0.0.1", 0)
        places.append(listening.sockets[0].getsockname()[1])
        return listening

    listening = loop.run_until_complete(start())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{places[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


async def our_server(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if not body:
        respond(writer, {"data": [{"id": "the-model"}]})
    elif body["model"] != "the-model":
        respond(writer, {}, "404 Not Found")
    else:
        await streamed(server, body, writer)


def test_the_command_prints_a_table_and_writes_a_report(tmp_path: Any) -> None:
    out = tmp_path / "load.json"
    with in_a_thread(our_server) as url:
        options = (
            "--requests",
            "6",
            "--concurrency",
            "3",
            "--warm-up",
            "1",
            "--chat",
            "--pid",
            str(os.getpid()),
        )
        result = CliRunner().invoke(app, ["load", url, *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "output tok/s" in result.output
    report = json.loads(out.read_text())
    assert report["rows"][0]["output_tokens"] == 18
    assert report["rows"][0]["first_token_ms"]["p50"] >= 28
    assert "api" in report["rows"][0]["cpu_s"]
    nobody = CliRunner().invoke(app, ["load", "http://127.0.0.1:1"])
    assert nobody.exit_code == 2
    assert "cannot be reached" in nobody.output


def test_errors_fail_the_command() -> None:
    with in_a_thread(too_many) as url:
        result = CliRunner().invoke(
            app, ["load", url, "--model", "m", "--requests", "2", "--warm-up", "0"]
        )
    assert result.exit_code == 1
    assert "2 x status 429" in result.output


def test_chats_are_random_words() -> None:
    one, two = (chat_requests(3, 10, 4, stream=True, seed=seed) for seed in (1, 2))
    assert one == chat_requests(3, 10, 4, stream=True, seed=1) != two
    assert all(
        ask.path == CHAT and len(ask.body["messages"][0]["content"].split()) == 10 for ask in one
    )
