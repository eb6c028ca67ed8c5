"""The load tool against a scripted server."""

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from nano_bench import load
from nano_bench.cpu_time import CpuMeter, server_parts
from nano_bench.load import Target, drive, outcome
from nano_bench.outcomes import Load
from nano_bench.shape import (
    CHAT,
    Ask,
    Lengths,
    Shape,
    chat_requests,
    start_times,
    token_requests,
)
from nano_inference.errors import ConfigError
from tests.nano_bench.scripted import (
    USAGE,
    Script,
    Server,
    begin_stream,
    choice,
    event,
    respond,
    streamed,
    whole,
)


def run(script: Script, asks: list[Ask], **options: Any) -> tuple[Load, Server]:
    async def main() -> tuple[Load, Server]:
        server = Server(script)
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            done = await drive(Target(f"http://127.0.0.1:{port}", "m", "secret"), asks, **options)
            listening.close()
        await asyncio.sleep(0.01)  # server side of the connections
        return done, server

    return load.run(main())


def test_closed_loop_keeps_its_concurrency_and_connections() -> None:
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


@pytest.mark.thorough
def test_connection_that_the_server_had_closed_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closing(seconds: float) -> Script:
        """Run a server that closes each connection `after` seconds after its second request."""
        used = set[asyncio.StreamWriter]()

        async def script(server: Server, body: dict[str, Any], writer: Any) -> None:
            if writer in used:
                await asyncio.sleep(seconds)
                writer.close()
            else:
                used.add(writer)
                await whole(server, body, writer)

        return script

    asks = token_requests(12, 5, 3, stream=False)
    with monkeypatch.context() as patch:
        patch.setattr(load, "AT_ONCE", 30.0)  # on a machine of any speed
        done, server = run(closing(0.0), asks, concurrency=3)
    assert done.errors == []
    assert (done.tokens, server.connections) == (36, 12)
    done, _ = run(closing(0.2), asks[:6], concurrency=1)  # the server may have started these
    assert done.row()["errors_by_kind"] == {"cut off": 3}


@pytest.mark.parametrize("make", [token_requests, chat_requests])
def test_stream_is_timed_piece_by_piece(make: Callable[..., list[Ask]]) -> None:
    done, server = run(streamed, make(2, 5, 3, stream=True), concurrency=1)
    assert done.errors == []
    assert server.seen[0][2]["stream_options"] == {"include_usage": True}
    for result in done.outcomes:  # the role and the end are not pieces
        first, second, third = result.pieces
        waits = [first - result.began, second - first, third - second]
        assert all(
            wait >= 0.7 * planned for wait, planned in zip(waits, (0.03, 0.01, 0.02), strict=True)
        ), waits
        assert result.tokens == 3
    assert done.row()["tokens_per_event"] == 1.0


@pytest.mark.thorough
def test_open_loop_keeps_its_rate_at_any_concurrency() -> None:
    async def slow(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await whole(server, body, writer)

    asks = token_requests(40, 1, 3, stream=False)
    done, server = run(slow, asks, starts=start_times(200.0))
    assert done.errors == []
    assert server.most > 8  # 0.1 s at 200 a second
    starts = [each.began for each in done.outcomes]
    assert 0.08 < starts[-1] - starts[0] < 0.5  # 0.195 s on average
    again, _ = run(whole, asks, starts=start_times(200.0))
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
def test_errors_are_counted_and_reported(script: Script, stream: bool, words: str) -> None:
    done, _ = run(script, token_requests(3, 5, 3, stream=stream), concurrency=2)
    assert len(done.errors) == 3
    for error in done.errors:
        assert re.search(words, error), error
    assert done.row()["output_tokens"] == 0


def test_unresponsive_server_times_out() -> None:
    async def silent(_: Server, __: dict[str, Any], ___: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)

    done, _ = run(silent, token_requests(2, 5, 3, stream=False), timeout=0.05)
    assert done.errors == ["no complete reply within 0.05 s"] * 2


def test_pieces_are_counted_without_usage() -> None:
    reply = load.Reply(
        0.0, 200, [(0.1, json.dumps(choice(text="")).encode()), (0.2, b"[DONE]")], ended=0.2
    )
    result = outcome(load.Record(Ask("/v1/completions", {"stream": True}), 0.0, reply))
    assert (result.tokens, result.pieces, result.error) == (1, (0.1,), None)


def test_cpu_time_of_a_tree_is_that_of_its_processes() -> None:
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    run_busy = f"subprocess.run([sys.executable, '-c', {busy!r}])"
    inner = f"import subprocess, sys\ninput()\n{run_busy}\ninput()"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE) as process:
        meter = CpuMeter({"server": process.pid})
        cpu_time = time.process_time()
        before, spent = meter.read(), 0.0
        assert process.stdin is not None
        process.stdin.write(b"\n")  # busy from here on
        process.stdin.flush()
        for _ in range(600):
            spent = meter.read()["server"] - before["server"]
            if spent >= 0.3:
                break
            time.sleep(0.1)
        assert 0.28 <= spent < 1.0
        client = meter.read()["client"] - before["client"]
        assert 0 < client <= time.process_time() - cpu_time  # excludes the busy process
    assert server_parts(os.getpid())["api"] == os.getpid()


def test_kinds_of_errors_are_counted() -> None:
    done, _ = run(too_many, token_requests(3, 5, 3, stream=False))
    assert done.row()["errors_by_kind"] == {"status 429": 3}
    cut, _ = run(cut_off, token_requests(2, 5, 3, stream=True))
    assert cut.row()["errors_by_kind"] == {"cut off": 2}


@pytest.mark.parametrize("given", [{"concurrency": 2}, {"starts": start_times(100.0)}])
def test_load_ends_if_the_server_is_gone_and_counts_all_requests(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "GIVE_UP", 0.2)
    monkeypatch.setattr(load, "PAUSE", 0.02)

    async def main() -> Load:
        served = 0

        async def dies(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            nonlocal served
            served += 1
            if served == 4:
                listening.close()
            if served >= 4:
                raise ConnectionError
            await whole(server, body, writer)

        listening = await asyncio.start_server(Server(dies), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        asks = token_requests(400, 1, 3, stream=False)
        return await drive(Target(f"http://127.0.0.1:{port}"), asks, **given)

    done = load.run(main())
    kinds = done.row()["errors_by_kind"]
    assert done.gave_up
    assert len(done.outcomes) == 400
    assert len(done.good) == 3
    assert {"cut off", "unreachable", "not sent"} >= set(kinds) >= {"unreachable", "not sent"}
    assert sum(kinds.values()) == 397


def test_load_starts_no_request_after_its_duration() -> None:
    shape = Shape(Lengths.read("3"), Lengths.read("3"), stream=False)
    done, server = run(whole, shape.asks(0), concurrency=2, seconds=2.0)
    assert done.errors == []
    assert 4 <= len(server.seen) == len(done.outcomes) <= 802
    assert max(each.began for each in done.outcomes) - done.began < 2.0


def test_interrupted_load_returns_what_it_saw() -> None:
    async def main() -> Load:
        reached = asyncio.Event()

        async def sometimes(server: Server, body: Any, writer: asyncio.StreamWriter) -> None:
            if len(server.seen) > 2:
                reached.set()
                await asyncio.sleep(60)
            await whole(server, body, writer)

        async with await asyncio.start_server(Server(sometimes), "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            asks = token_requests(9, 1, 3, stream=False)
            target = Target(f"http://127.0.0.1:{port}")
            task = asyncio.create_task(drive(target, asks, concurrency=1, interruptible=True))
            await asyncio.wait_for(reached.wait(), 60)
            task.cancel()
            done = await task
            listening.close()
        return done

    done = load.run(main())
    assert done.interrupted
    assert [each.kind for each in done.outcomes] == [None, None, "interrupted"]


def test_replies_are_read_while_the_load_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LATE", 3)
    done, _ = run(streamed, token_requests(6, 5, 3, stream=True))
    assert [each.tokens for each in done.outcomes] == [3] * 6


def test_requests_within_limits() -> None:
    done, _ = run(streamed, token_requests(4, 5, 3, stream=True))
    assert done.within({"ttft": 10.0, "itl": 10.0, "tpot": 10.0, "e2e": 10.0}) == 4
    for name in ("ttft", "itl", "tpot", "e2e"):
        assert done.within({name: 0.001, "e2e" if name != "e2e" else "ttft": 10.0}) == 0


def test_times_of_a_rate() -> None:
    def first(count: int, *given: Any, **named: Any) -> list[float]:
        return list(itertools.islice(start_times(*given, **named), count))

    assert first(4, 2.0, evenly=True) == [0.0, 0.5, 1.0, 1.5]
    rises = first(41, 1.0, evenly=True, end_rate=3.0, span=20.0)
    assert rises[40] == pytest.approx(20.0)  # two per second on average
    assert rises[1] - rises[0] == pytest.approx(1.0, rel=0.06)
    assert first(44, 1.0, evenly=True, end_rate=3.0, span=20.0)[43] == pytest.approx(21.0)
    falls = first(41, 3.0, evenly=True, end_rate=1.0, span=20.0)
    assert falls[40] == pytest.approx(20.0)
    assert falls[1] == pytest.approx(1 / 3, rel=0.06)
    random = first(4000, 5.0, seed=3)
    assert random == first(4000, 5.0, seed=3) != first(4000, 5.0, seed=4)
    assert random[-1] == pytest.approx(800.0, rel=0.1)
    assert random == sorted(random)


def test_lengths_follow_their_distribution() -> None:
    rng = __import__("random").Random(1)

    def draws(text: str) -> list[int]:
        return [Lengths.read(text).draw(rng) for _ in range(2000)]

    assert set(draws("7")) == {7}
    uniform = draws("uniform:3:6")
    assert set(uniform) == {3, 4, 5, 6}
    logs = draws("lognormal:100:0.5:300")
    assert sorted(logs)[1000] == pytest.approx(100, rel=0.1)
    assert max(logs) == 300
    assert str(Lengths.read("lognormal:100:0.5")) == "lognormal:100:0.5"


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "1.5", "uniform:3", "uniform:6:3", "gamma:1:2", "lognormal:5:0", "inf", "nan",
     "lognormal:9:1:5", "uniform:1:2:3"],
)  # fmt: skip
def test_length_rejects_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a length"):
        Lengths.read(text)


def test_prompts_of_a_group_begin_alike() -> None:
    shape = Shape(Lengths.read("5"), Lengths.read("3"), shared_prefix=20, groups=3)
    prompts = [ask.body["prompt"] for ask in itertools.islice(shape.asks(1), 40)]
    assert {len(prompt) for prompt in prompts} == {25}
    begins = {tuple(prompt[:20]) for prompt in prompts}
    assert len(begins) == 3
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 40
    other = [ask.body["prompt"] for ask in itertools.islice(shape.asks(2), 40)]
    assert {tuple(prompt[:20]) for prompt in other} == begins  # a warm-up has another seed


@pytest.mark.parametrize(
    ("url", "address", "line"),
    [
        (
            "127.0.0.1:80",
            ("127.0.0.1", 80, False),
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:80",
        ),
        ("https://h/v1", ("h", 443, True), b"GET /v1/models HTTP/1.1\r\nHost: h\r\n"),
        ("http://h/x/v1/", ("h", 80, False), b"GET /x/v1/models HTTP/1.1\r\n"),
    ],
)
def test_addresses(url: str, address: Any, line: bytes) -> None:
    assert Target(url).address == address
    assert Target(url).request("/v1/models").startswith(line)


@pytest.mark.parametrize(
    "target",
    [
        *map(Target, ("ftp://h", "http://:1", "http://[::1", "http://a..b", "http://h:x")),
        Target("h", key="ä"),
    ],
)
def test_address_rejects_other_texts(target: Target) -> None:
    with pytest.raises(ConfigError):
        _ = target.address


def test_chats_are_random_words() -> None:
    one, two = (chat_requests(3, 10, 4, stream=True, seed=seed) for seed in (1, 2))
    assert one == chat_requests(3, 10, 4, stream=True, seed=1) != two
    assert all(
        ask.path == CHAT and len(ask.body["messages"][0]["content"].split()) == 10 for ask in one
    )
