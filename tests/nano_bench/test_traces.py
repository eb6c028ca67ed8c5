"""Traces of agents: formats, their errors, blocks as text, synthetic traces."""

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_bench.traces import TraceError, Turn, read_trace
from nano_bench.traces.make import Statistics, sessions, tool_wait
from nano_bench.traces.model import Blocks, Words, conversation_turns
from nano_inference.errors import ConfigError


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "trace.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(f"{text}\n" for text in texts))
    return file


def text_of(turn: Turn) -> str:
    return " ".join(each.message()["content"] for each in turn.messages)


def row(**more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]} | more


def call(t: float, *ids: int, **more: Any) -> dict[str, Any]:
    length = len(ids) * 4
    return {"t": t, "type": "n", "model": "m", "in": length, "out": 4, "hash_ids": [*ids]} | more


def subagent(t: float, *requests: Any, **more: Any) -> dict[str, Any]:
    about = {"agent_id": "a", "subagent_type": "x", "status": "completed", "models": ["m"]}
    return {"t": t, "type": "subagent", "requests": [*requests]} | about | more


def session(*requests: Any, **more: Any) -> dict[str, Any]:
    about = {"id": "s", "models": ["m"], "block_size": 4, "hash_id_scope": "local"}
    return about | {"requests": [*requests]} | more


def chat(name: str, *turns: Any, **more: Any) -> dict[str, Any]:
    return {"session_id": name, "turns": [*turns]} | more


def say(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | more


def test_mooncake_rows_start_at_their_times(tmp_path: Path) -> None:
    rows = row(timestamp=1500), row(hash_ids=[1, 3])
    trace = read_trace(written(tmp_path, *rows, ""))
    assert [trace.conversations[name].start for name in trace.roots] == [0.0, 1.5]
    late, early = (trace.conversations[name].turns[0] for name in ("#1", "#2"))
    assert (late.output, late.line, early.line) == (5, 1, 2)
    assert text_of(late).split()[:512] == text_of(early).split()[:512]
    assert text_of(late).split()[512:] != text_of(early).split()[512:]
    assert len(text_of(late).split()) == 600


def test_mooncake_session_appends_new_blocks(tmp_path: Path) -> None:
    rows = row(session_id="a"), row(session_id="a", delay=250, input_length=10, hash_ids=[9])
    del rows[1]["timestamp"]
    trace = read_trace(written(tmp_path, *rows))
    first, second = trace.conversations["a"].turns
    assert (first.appends, second.appends, second.wait) == (True, True, 0.25)
    assert len(text_of(second).split()) == 10


def test_mooncake_messages_are_sent_as_written(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    content = {"messages": messages, "output_length": 3, "tools": tools, "extra": {"top_k": 1}}
    (turn,) = read_trace(written(tmp_path, content)).conversations["#1"].turns
    assert [each.message() for each in turn.messages] == messages
    assert (turn.fields, turn.appends) == ({"tools": tools, "top_k": 1}, False)


def test_weka_subagents_run_between_turns(tmp_path: Path) -> None:
    child = subagent(2.0, call(2.5, 7), call(4.0, 7, 8, think_time=0.5))
    content = session(call(0.0, 1, api_time=1.0), child, call(6.0, 1, 2))
    trace = read_trace(written(tmp_path, content))
    first, second = trace.conversations["s"].turns
    assert (first.spawns, second.joins) == (("s/a",), ("s/a",))
    assert second.wait == pytest.approx(2.0)  # the subagent ended at 4
    inner = trace.conversations["s/a"]
    assert inner.start == pytest.approx(1.0)
    assert [turn.wait for turn in inner.turns] == [0.0, 0.5]
    assert trace.roots == ("s",)


def test_weka_background_subagent_is_not_awaited(tmp_path: Path) -> None:
    child = subagent(0.5, call(0.5, 7), status="async_launched")
    trace = read_trace(written(tmp_path, session(call(0.0, 1), child, call(1.0, 1, 2))))
    assert trace.conversations["s"].turns[1].joins == ()


def test_weka_times_of_subagents_may_be_relative(tmp_path: Path) -> None:
    content = session(call(0.0, 1), subagent(5.0, call(0.0, 7), call(1.0, 7, 8)), call(9.0, 1, 2))
    trace = read_trace(written(tmp_path, content))
    assert trace.conversations["s/a"].turns[1].wait == pytest.approx(1.0)
    assert trace.conversations["s"].turns[1].wait == pytest.approx(3.0)


def test_weka_file_may_be_one_indented_object(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(session(call(0.0, 1)), indent=1))
    assert read_trace(file).turns == read_trace(tmp_path).turns == 1


def test_weka_prompt_becomes_a_conversation(tmp_path: Path) -> None:
    calls = call(0, 1, 2, 3), call(1, 1, 2, 3, 4, 5, 6), call(2, 1, 9)
    content = session(*calls, system_tokens=4)
    first, second, third = read_trace(written(tmp_path, content)).conversations["s"].turns
    roles = [
        [part.role for part in turn.messages if isinstance(part, Words)]
        for turn in (first, second, third)
    ]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert second.messages[:2] != first.messages[:2]  # other prompts
    assert [m.message() for m in second.messages[:2]] == [m.message() for m in first.messages]
    assert third.messages[0].message() == first.messages[0].message()


def test_dag_forks_and_spawns(tmp_path: Path) -> None:
    lines = (
        chat("root", say(spawns=["s"], delay=500), say(forks=["f"])),
        chat("s", say("hello")),
        chat("f", say("go on"), say("more", tools=[{"type": "function"}])),
    )
    trace = read_trace(written(tmp_path, *lines))
    first, second = trace.conversations["root"].turns
    assert (first.spawns, first.wait, second.joins, second.spawns) == (("s",), 0.5, ("s",), ("f",))
    assert (trace.conversations["f"].forks, trace.conversations["s"].forks) == (True, False)
    assert trace.roots == ("root",)


@pytest.mark.parametrize(
    ("lines", "line", "said"),
    [
        ([row(), row(timestamp=-1)], 2, "timestamp is -1"),
        ([row(), row(timestamp=float("nan"))], 2, "timestamp is nan"),
        ([row(), row(delay=-1)], 2, "delay is -1"),
        ([{"timestamp": 0, "input_length": 1}], 1, "output_length is missing"),
        ([row(), {"timestamp": 0, "output_length": 1}], 2, "input_length is missing"),
        ([row(), row(hash_ids=[1, 2, 3])], 2, "3 hash_ids do not fit 600 tokens"),
        ([row(), row(hash_ids=[1])], 2, "1 hash_ids do not fit 600 tokens"),
        ([row(hash_ids=["a"])], 1, "hash_ids must be"),
        ([row(), row(input_length=0)], 2, "input_length is 0"),
        ([row(), row(output_length=True)], 2, "output_length is True"),
        ([row(), row(wait=1)], 2, "unknown field 'wait'"),
        ([row(session_id="a", timestamp=9), row(session_id="a", timestamp=8)], 2, "before the"),
        ([row(), "{"], 2, "invalid JSON"),
        ([row(), "[]"], 2, "is not a JSON object"),
        ([row(messages=[{"role": "user"}])], 1, "exclude each other"),
        ([{"messages": [{}], "output_length": 1}], 1, "messages[0] has no role"),
        ([{"a": 1}], 1, "no known format"),
        ([session(call(1.0, 1), call(0.5, 1))], 1, "requests[1]: t is 0.5, before"),
        ([session(call(0.0, 1), call(-1, 1))], 1, "requests[1]: t is -1"),
        ([session(call(0.0, 1, 2, 3, **{"in": 8}))], 1, "3 hash_ids do not fit 8 tokens"),
        ([session(call(0.0, 1)), session(call(0.0, 1))], 2, "the id 's' occurs twice"),
        ([session(call(0.0, 1), think_time=1)], 1, "unknown field 'think_time'"),
        ([session(call(0.0, 1, think_time=-1.0))], 1, "think_time is -1.0"),
        ([session(subagent(0.0, call(0.0, 1)))], 1, "no requests besides subagents"),
        ([session()], 1, "requests must be a list with at least one"),
        ([session(call(0.0, 1, type="x"))], 1, "type is 'x'"),
        ([chat("a", say(forks=["b"]), say())], 1, "a fork ends its conversation"),
        ([chat("a", say(spawns=["b"]), say())], 1, "no line has the session_id 'b'"),
        (
            [chat("a", say(), say(spawns=[{"children": ["b"], "join_at": 0}]), say())],
            1,
            "join_at is 0; it must be a turn after this one",
        ),
        ([chat("r", say(forks=["a"])), chat("a", say(forks=["a"]))], 2, "is a cycle"),
        ([chat("a", say()), chat("a", say())], 2, "occurs twice"),
        ([chat("a", say(delay=-1))], 1, "turns[0]: delay is -1"),
        ([chat("a", say(max_token=1))], 1, "unknown field 'max_token'"),
        ([chat("a", say(), {"messages": [{"role": "system"}]})], 1, "turns[1] has a system"),
        ([{"session_id": "a", "orchestrator": True}], 1, "are not supported"),
    ],
)
def test_invalid_trace_is_an_error_with_its_line(
    tmp_path: Path, lines: list[Any], line: int, said: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, *lines))
    assert said in str(caught.value)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"trace.jsonl, line {line}: ")


def test_empty_or_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no requests"):
        read_trace(written(tmp_path, "", ""))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent")


def test_own_texts_cannot_be_scaled(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, chat("a", say())))
    with pytest.raises(TraceError, match="line 1: its messages have a text"):
        trace.limited(length_scale=0.5)


def test_limits_cut_sessions_turns_and_subagents(tmp_path: Path) -> None:
    child = subagent(2.0, call(2.0, 7))
    one = session(call(0.0, 1), call(1.0, 1, 2, think_time=1.0), child, call(6.0, 1, 2))
    trace = read_trace(written(tmp_path, one, one | {"id": "t"}))
    cut = trace.limited(max_sessions=1, max_turns=2, time_scale=0.5)
    assert [*cut.conversations] == ["s/a", "s"] or [*cut.conversations] == ["s", "s/a"]
    assert cut.conversations["s"].turns[1].wait == 0.5
    assert [*trace.limited(max_turns=1).conversations] == ["s", "t"]


blocks_lists = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(
    blocks_lists,
    blocks_lists,
    st.integers(1, 20),
    st.floats(0.01, 1.0),
    st.randoms(use_true_random=False),
)
def test_equal_blocks_are_equal_text_at_any_scale(
    left: list[int], right: list[int], size: int, scale: float, rng: random.Random
) -> None:
    def made(ids: list[int]) -> Blocks:
        return Blocks("s", tuple(ids), len(ids) * size - rng.randrange(size), size, scale)

    first, second = made(left), made(right)
    shared = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        shared += 1
    common = min(shared * size, first.length, second.length)
    assert first.text(0, common) == second.text(0, common)
    cuts = sorted(rng.randrange(first.length + 1) for _ in range(3))
    cuts = [0, *cuts, first.length]
    positions = [first.position(cut) for cut in cuts]
    assert positions == sorted(positions)
    parts = [first.text(a, b) for a, b in pairwise(cuts) if first.position(a) < first.position(b)]
    assert " ".join(parts) == first.text(0, first.length) or not parts


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8))
def test_growing_prompt_keeps_all_earlier_messages(steps: list[tuple[int, int]]) -> None:
    prompts: list[tuple[Blocks, int]] = []
    ids: list[int] = []
    for added, output in steps:
        ids += range(len(ids), len(ids) + added)
        prompts.append((Blocks("s", tuple(ids), len(ids) * 4, 4), output))
    turns = [[part.message() for part in parts] for parts in conversation_turns(prompts, 3)]
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
        assert [each["role"] for each in after[len(before) :]] == ["assistant", "user"]
    words = [len(" ".join(m["content"] for m in turn).split()) for turn in turns]
    assert words == [prompt.length for prompt, _ in prompts]


def requests_of(holder: dict[str, Any]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for entry in holder["requests"]:
        calls += requests_of(entry) if entry["type"] == "subagent" else [entry]
    return calls


def test_made_trace_has_the_published_statistics() -> None:
    made = [*sessions(100, Statistics())]
    main = [sum(each["type"] != "subagent" for each in one["requests"]) for one in made]
    calls = [each for one in made for each in requests_of(one)]
    assert statistics.median(main) == pytest.approx(43, rel=0.15)
    assert statistics.median(each["in"] for each in calls) == pytest.approx(142_000, rel=0.1)
    assert statistics.median(each["out"] for each in calls) == pytest.approx(444, rel=0.1)
    with_subagents = sum(
        len(one["requests"]) > turns for one, turns in zip(made, main, strict=True)
    )
    assert with_subagents == 44
    seen: set[int] = set()
    hits = 0
    for request in calls:
        ids = request["hash_ids"]
        hits += next((at for at, name in enumerate(ids) if name not in seen), len(ids))
        seen.update(ids)
    assert hits / sum(len(each["hash_ids"]) for each in calls) > 0.96


def test_tool_waits_have_the_published_shares() -> None:
    rng = random.Random(0)
    waits = [tool_wait(rng) for _ in range(20_000)]
    assert sum(wait < 1 for wait in waits) / len(waits) == pytest.approx(0.86, abs=0.01)
    assert sum(wait < 10 for wait in waits) / len(waits) == pytest.approx(0.95, abs=0.01)


def test_made_trace_is_seeded_and_readable(tmp_path: Path) -> None:
    about = Statistics(6, 400, 8, 1.0)
    first, again, other = ([*sessions(3, about, seed)] for seed in (1, 1, 2))
    assert first == again != other
    trace = read_trace(written(tmp_path, *first))
    assert len(trace.roots) == 3
    assert trace.turns == sum(len(requests_of(one)) for one in first)
    for conversation in trace.conversations.values():
        for turn in conversation.turns:
            blocks = turn.blocks
            assert blocks is not None
            assert len(text_of(turn).split()) == blocks.length
