"""The benchmark of the server: its parts on a tiny model, and its handling of servers that fail."""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import arrival, plots, serve, servers
from benchmarks.arrival import gaps_ending_in
from benchmarks.closed_loop import answer
from benchmarks.ours import Options, opened
from benchmarks.peers.compare import OURS
from benchmarks.peers.process import PeerFailed
from benchmarks.serve import ALONE, Choice, Seen, prompts_of, targets, token_prompts
from nano_bench import load
from nano_bench.wire import Broken
from tests.ports import free_port


def test_engine_without_server_runs_the_same_loop(options: Options) -> None:
    with opened(options) as engine:
        prompts = [[100 + place, 200] for place in range(7)]
        done = answer(engine, {"prompts": prompts, "output_tokens": 5, "concurrency": 3})
        singles = answer(engine, {"singles": prompts, "output_tokens": 2})
        before = engine.stats().completion_tokens
    assert done["tokens"] == 35
    assert before == 35 + 14
    assert done["seconds"] > 0
    assert len(singles["first_tokens"]) == 7
    assert min(singles["first_tokens"]) > 0


def engine_processes() -> set[psutil.Process]:
    """Return the engine processes that this process has started, except those of other tests'
    fixtures.
    """
    seen = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "nano_inference" in " ".join(child.cmdline()):
                seen.add(child)
    return seen


@pytest.mark.thorough
def test_throughput_through_a_server_and_without(options: Options, tmp_path: Path) -> None:
    before = engine_processes()
    choice = Choice(requests=6, warm_up=2, concurrency=2, output_tokens=4, cache=tmp_path)
    rows = serve.measure(options, ("throughput",), choice)
    named = {row["name"]: row for row in rows}
    assert set(named) == {
        f"throughput: {ALONE}, whole",
        f"throughput: {OURS}, whole",
        f"throughput: {OURS}, streamed",
    }
    streamed = named[f"throughput: {OURS}, streamed"]
    assert {"client", "api", "engine"} <= set(streamed["cpu_s"])
    assert streamed["runs"][0]["output_tokens"] == 24
    assert streamed["runs"][0]["first_token_ms"]["p50"] > 0
    json.dumps(rows)
    assert engine_processes() <= before


@pytest.mark.slow
def test_first_tokens_through_a_server_and_without(options: Options, tmp_path: Path) -> None:
    rows = serve.measure(options, ("first",), Choice(singles=2, cache=tmp_path))
    assert [row["engine"] for row in rows] == [ALONE, OURS]
    assert all(row["ms"]["median"] > 0 for row in rows)


def test_forms_and_rounds_use_distinct_prompts() -> None:
    choice = Choice(requests=3)
    seen = [prompts_of(choice, -1), prompts_of(choice, 0), prompts_of(choice, 1)]
    seen += [
        [ask.body["prompt"] for ask in token_prompts(choice, number, 3, True)]
        for number in (-1, 0, 1)
    ]
    assert len({tuple(prompt) for prompts in seen for prompt in prompts}) == 18


def test_ratios_are_of_the_same_round() -> None:
    table = {
        (ALONE, "whole"): Seen([100.0, 50.0], [], []),
        (OURS, "whole"): Seen([90.0, 50.0], [], []),
    }
    (line,) = targets(table)
    assert line.startswith("whole: 0.950 [0.900..1.000]")


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked < int(sys.argv[2]) else 200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_server_is_waited_for_and_always_stopped(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), "3"]
    seen: list[psutil.Process] = []

    def fail_with_a_server() -> None:
        with servers.started(command, os.environ, port, tmp_path / "log", 20.0) as running:
            seen.append(psutil.Process(running.pid))
            assert running.target.url.endswith(str(port))
            assert running.memory > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_a_server()
    assert not seen[0].is_running()


@pytest.mark.thorough
def test_unhealthy_server_is_stopped(tmp_path: Path) -> None:
    port, before = free_port(), set(psutil.Process().children())
    command = [sys.executable, "-c", SERVER, str(port), "1000000"]
    with (
        pytest.raises(PeerFailed, match=r"not healthy within 1\.5 s"),
        servers.started(command, os.environ, port, tmp_path / "log", 1.5),
    ):
        pass
    with (
        pytest.raises(PeerFailed, match="no such model"),
        servers.started(
            [sys.executable, "-c", "raise SystemExit('no such model')"],
            {},
            port,
            tmp_path / "log",
            20.0,
        ),
    ):
        pass
    assert set(psutil.Process().children()) <= before


QUICK, SLOW, LONG = 0.004, 0.06, 0.9


async def shared(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: dict[str, Any]
) -> None:
    """Simulate streams that slow down while a request of many tokens is running."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    body = json.loads(await reader.readexactly(length))
    state["open"] += 1
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    event = b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
    try:
        if len(body["prompt"]) > 1000:
            state["slow"] = True
            await asyncio.sleep(LONG)
            state["slow"] = False
            writer.write(event + b"data: [DONE]\n\n")
        else:
            for _ in range(min(body["max_tokens"], state["most"])):
                await asyncio.sleep(SLOW if state["slow"] else QUICK)
                writer.write(event)
                await writer.drain()
            writer.write(b"data: [DONE]\n\n")
    except (ConnectionError, RuntimeError):
        # uvloop reports the second message for a closed connection
        state["dropped"] += 1
    writer.close()
    state["open"] -= 1


def arrive(most: int) -> tuple[arrival.Arrival, dict[str, Any]]:
    state = {"slow": False, "dropped": 0, "most": most, "open": 0}

    async def main() -> arrival.Arrival:
        async with await asyncio.start_server(
            lambda r, w: shared(r, w, state), "127.0.0.1", 0
        ) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            try:
                return await arrival.arrive(load.Target(url), 2000)
            finally:
                async with asyncio.timeout(30):
                    while state["open"]:
                        await asyncio.sleep(0.01)
                listening.close()

    return load.run(main()), state


@pytest.mark.thorough
def test_long_prompt_effect_on_running_streams_is_measured() -> None:
    streams, state = arrive(10_000)
    assert QUICK * 1e3 <= streams.before < streams.during
    assert streams.during >= SLOW * 1e3
    assert streams.waited >= LONG
    assert state["dropped"] == arrival.STREAMS


@pytest.mark.thorough
def test_streams_ending_early_are_an_error() -> None:
    with pytest.raises(Broken, match="ended early"):
        arrive(20)
    with pytest.raises(Broken, match="ended before the long prompt"):
        arrive(arrival.QUIET + 8)


def test_gaps_belong_to_the_time_in_which_they_end() -> None:
    stream = list(itertools.accumulate([1.0] * (arrival.SETTLE + 2) + [5.0, 1.0]))
    begin = stream[arrival.SETTLE + 1]
    assert gaps_ending_in([stream], 0.0, begin) == [1.0]
    assert gaps_ending_in([stream, stream], begin, begin + 5.0) == [5.0, 5.0]


def test_report_becomes_a_picture(tmp_path: Path) -> None:
    def rows(part: str, **more: Any) -> list[dict[str, Any]]:
        figure = {"median": 3.0, "min": 2.0, "max": 4.0}
        figures = ("output_tokens_per_s", "before_p99_ms", "during_p99_ms")
        return [{"part": part, **dict.fromkeys(figures, figure), **more}]

    assert plots.server(tmp_path) is None
    written = rows("throughput", engine=OURS, form="whole") + rows(
        "throughput", engine="vllm", form="streamed"
    )
    written += rows("first") + rows("arrival", budget=40) + rows("arrival", budget=None)
    (tmp_path / "serve.json").write_text(json.dumps({"rows": written}))
    (path,) = plots.draw(tmp_path, tmp_path / "pictures")
    assert path.name == "benchmark-serve.png"
