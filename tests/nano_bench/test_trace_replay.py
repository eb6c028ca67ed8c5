"""`nano-inference bench --trace` against scripted servers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nano_bench.load import Target
from nano_bench.outcomes import Load
from nano_bench.traces import read_trace
from nano_bench.traces.replay import Options, Played, replay
from tests.cli.running import run
from tests.nano_bench.scripted import (
    Server,
    begin_stream,
    choice,
    event,
    in_a_thread,
    respond,
)
from tests.nano_bench.test_traces import call, chat, row, say, session, subagent, written

Script = Callable[[Server, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


async def echo(_: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer with the number of messages. The usage counts words, of which half are cached."""
    if not body:
        respond(writer, {"data": [{"id": "the-model"}]})
        return
    begin_stream(writer)
    for piece in ("m", str(len(body["messages"]))):
        event(writer, choice(delta={"content": piece}))
    event(writer, choice(delta={}, finish_reason="length"))
    count = len(" ".join(m.get("content", "") for m in body["messages"]).split())
    details = {"prompt_tokens_details": {"cached_tokens": count // 2}}
    usage = {"prompt_tokens": count, "completion_tokens": 2} | details
    event(writer, {"choices": [], "usage": usage})
    event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def play(file: Path, script: Script = echo, **options: Any) -> tuple[Load, list[Played], Server]:
    async def both() -> tuple[Load, list[Played], Server]:
        server = Server(script)
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        target = Target(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "the-model")
        try:
            done, played = await replay(target, read_trace(file), Options(**options))
        finally:
            listening.close()
        return done, played, server

    return asyncio.run(both())


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_turns_carry_the_servers_real_answers(tmp_path: Path) -> None:
    lines = chat("a", say("one", forks=[{"child": "b", "background": True}]), say("two"))
    _, played, server = play(written(tmp_path, lines, chat("b", say("three"))))
    sent = sorted(contents(body) for _, _, body in server.seen)
    assert sent == [["one"], ["one", "m1", "three"], ["one", "m1", "two"]]
    assert {(each.conversation, each.depth) for each in played} == {("a", 0), ("b", 1)}
    assert all(body["model"] == "the-model" for _, _, body in server.seen)


def test_spawned_agent_starts_afresh_and_is_awaited(tmp_path: Path) -> None:
    order: list[str] = []
    release = asyncio.Event()

    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        name = contents(body)[-1]
        order.append(name)
        if name == "child":  # the parent's turn would come first if it did not wait
            asyncio.get_running_loop().call_later(0.05, release.set)
            await release.wait()
            order.append("child ended")
        await echo(server, body, writer)

    lines = chat("a", say("one", spawns=["b"]), say("two")), chat("b", say("child"))
    _, played, server = play(written(tmp_path, *lines), script)
    assert order == ["one", "child", "child ended", "two"]
    assert contents(server.seen[1][2]) == ["child"]
    assert all(each.outcome.error is None for each in played)


def test_tool_calls_of_answers_are_put_together(tmp_path: Path) -> None:
    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(body["messages"]) > 1:
            await echo(server, body, writer)
            return
        begin_stream(writer)
        for part in (
            {"id": "c1", "function": {"name": "f", "arguments": "{"}},
            {"function": {"arguments": "}"}},
        ):
            event(writer, choice(delta={"tool_calls": [{"index": 0} | part]}))
        event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    _, _, server = play(written(tmp_path, chat("a", say(), say())), script)
    (tool_call,) = server.seen[1][2]["messages"][1]["tool_calls"]
    assert tool_call == {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }


def test_reusable_tokens_are_blocks_sent_before(tmp_path: Path) -> None:
    file = written(tmp_path, session(call(0.0, 1, 2), call(0.0, 1, 2, 3), call(0.0, 1, 9)))
    _, played, _ = play(file)
    assert [each.reusable for each in played] == [0, 8, 4]


def test_sessions_in_progress_are_limited(tmp_path: Path) -> None:
    async def slow(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        await echo(server, body, writer)

    file = written(tmp_path, *(session(call(0.0, 1), id=str(index)) for index in range(6)))
    _, played, server = play(file, slow, at_once=2)
    assert (len(played), server.most) == (6, 2)


def test_failed_turn_ends_only_its_conversation(tmp_path: Path) -> None:
    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "bad" in contents(body):
            respond(writer, {"error": {"message": "too long"}}, "400 Bad Request")
        else:
            await echo(server, body, writer)

    lines = (
        chat("a", say("bad", spawns=["b"]), say()),
        chat("b", say("child")),
        chat("c", say(), say()),
    )
    _, played, _ = play(written(tmp_path, *lines), script)
    kinds = {(each.conversation, each.index): each.outcome.kind for each in played}
    assert kinds == {
        ("a", 0): "status 400",
        ("a", 1): "not sent",
        ("b", 0): "not sent",
        ("c", 0): None,
        ("c", 1): None,
    }


def test_llama_cpp_timings_count_as_cached_tokens(tmp_path: Path) -> None:
    async def script(_: Server, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begin_stream(writer)
        event(writer, choice(delta={"content": "x"}))
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        event(writer, {"choices": [], "usage": usage, "timings": {"cache_n": 7, "prompt_n": 2}})
        event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    _, (played,), _ = play(written(tmp_path, chat("a", say())), script)
    assert (played.outcome.prompt_tokens, played.outcome.cached_tokens) == (9, 7)


def test_trace_report_has_turns_hits_and_goodput(tmp_path: Path) -> None:
    child = subagent(1.0, call(1.0, 7))
    file = written(tmp_path, session(call(0.0, 1, 2), child, call(3600.0, 1, 2, 3, 4)))
    out = tmp_path / "out.json"
    with in_a_thread(echo) as url:
        words = ("--trace", str(file), "--time-scale", "0", "--out", str(out))
        limits = ("--goodput", "ttft:30000,e2e:1m", "--warm-up", "0")
        result = run("bench", url, *words, *limits)
    assert result.exit_code == 0, result.output
    assert "weka trace, 1 sessions, 3 turns, 1 subagents" in result.output
    assert "3 of 3, 1 of subagents" in result.output
    report = json.loads(out.read_text())
    summary = report["summary"]
    assert (summary["turns"], summary["turns_of_subagents"], summary["sessions"]) == (3, 1, 1)
    assert summary["hit_share"] == pytest.approx(0.5, abs=0.05)
    assert summary["possible_hit_share"] == pytest.approx(8 / 28, abs=1e-4)
    assert summary["within_limits"] == 3
    assert report["limits"] == {"ttft": 30.0, "e2e": 60.0}
    rows = [(each["conversation"], each["turn"], each["depth"]) for each in report["requests"]]
    assert rows == [("s", 0, 0), ("s/a", 0, 1), ("s", 1, 0)]


def test_length_scale_scales_prompts_and_outputs(tmp_path: Path) -> None:
    file = written(tmp_path, row(input_length=1024, output_length=40))
    trace = read_trace(file).limited(length_scale=0.25)
    (turn,) = trace.conversations["#1"].turns
    assert (len(turn.messages[0].message()["content"].split()), turn.output) == (256, 10)


def test_dying_server_ends_the_replay_with_its_results(tmp_path: Path) -> None:
    """The server dies in its third answer, and nothing listens any more."""
    sessions = [session(*(call(0.0, *range(1, n + 2)) for n in range(4)), id=str(i)) for i in "ab"]
    file, out = written(tmp_path, *sessions), tmp_path / "out.json"

    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body and len(server.seen) >= 4:
            assert server.listening is not None
            server.listening.close()
            begin_stream(writer)
            await writer.drain()
            raise ConnectionError
        await echo(server, body, writer)

    with in_a_thread(script) as url:
        words = ("--trace", str(file), "-c", "1", "--warm-up", "0", "--out", str(out))
        result = run("bench", url, *words)
    assert result.exit_code == 1, result.output
    assert "ended early: lost the connection" in result.stderr
    kinds = [each["error_kind"] for each in json.loads(out.read_text())["requests"]]
    assert kinds.count(None) == 2
    assert kinds.count("cut off") == 1
    assert kinds.count("unreachable") == 1
    assert len(kinds) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--trace", "FILE", "--requests", "3"), "--trace and --requests exclude each other"),
        (("--trace", "FILE", "--rate", "3"), "--trace and --rate exclude each other"),
        (("--time-scale", "2"), "--time-scale requires --trace"),
        (("--trace", "/no/such/file"), "cannot read /no/such/file"),
        (("--trace", "FILE"), "trace.jsonl, line 2: timestamp is -5"),
    ],
)
def test_wrong_trace_sends_nothing(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    file = str(written(tmp_path, row(), row(timestamp=-5)))
    seen: list[Any] = []

    async def script(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(body)
        await echo(server, body, writer)

    with in_a_thread(script) as url:
        result = run("bench", url, *(file if word == "FILE" else word for word in words))
    assert result.exit_code == 2
    assert said in result.stderr
    assert not seen


def test_make_trace_writes_a_trace_that_replays(tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    lengths = ("--turns", "3", "--input-tokens", "300", "--output-tokens", "4")
    result = run("make-trace", str(file), "-n", "2", *lengths, "--subagents", "1")
    assert result.exit_code == 0, result.output
    with in_a_thread(echo) as url:
        words = ("--trace", str(file), "--time-scale", "0", "--warm-up", "0", "--max-turns", "2")
        result = run("bench", url, *words)
    assert result.exit_code == 0, result.output
    assert run("make-trace", str(tmp_path / "a" / "b")).exit_code == 2
