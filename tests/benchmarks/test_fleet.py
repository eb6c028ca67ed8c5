"""Simulated fleets: the same seed gives the same run, nothing gets lost, and the document says what
code says.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import machine
from benchmarks.__main__ import app
from benchmarks.fleet import tables
from benchmarks.fleet.arithmetic import (
    M8,
    M70,
    MODELS,
    MOE,
    Plan,
    choices,
    kv_tokens,
    tensor_bytes,
    weight_bytes,
)
from benchmarks.fleet.broadcast import Broadcast, arrivals
from benchmarks.fleet.load import Conversation, Load, Turn, prompt_of
from benchmarks.fleet.replica import Machine, Replica
from benchmarks.fleet.simulation import Scenario, Simulation, measure

SMALL = Scenario("small", replicas=12, requests=1500, load=Load(rate=12.0, stems=40))


def test_a_seed_names_a_run_and_every_request_ends() -> None:
    scenario = replace(SMALL, lost=2, sessions=True)
    first, second = measure(scenario), measure(scenario)
    assert first == second
    assert first["requests"] == 1500
    assert measure(replace(scenario, seed=1)) != first
    run = Simulation(scenario).run()
    assert len(run.ended) == len({turn.number for turn in run.ended}) == 1500
    assert all(turn.arrival <= turn.first_token <= turn.ended for turn in run.ended)
    assert run.moved
    assert {turn.number for turn in run.moved} <= {turn.number for turn in run.ended}
    assert all(turn.pause >= scenario.pause for turn in run.moved if turn.had_begun)
    assert len(run.alive) == len(run.router.replicas) == 10
    assert all(run.router.score(name) == 0 for name in run.router.replicas), (
        "the router counts what has ended"
    )


def test_the_router_finds_prefixes_and_spreads_load() -> None:
    by_router = measure(SMALL)
    around = measure(replace(SMALL, policy="round robin"))
    alone = measure(replace(SMALL, router={"piece_worth": 0}))
    assert (
        around["hit_rate"]
        < alone["hit_rate"]
        < by_router["hit_rate"]
        <= by_router["hit_rate_ideal"]
    )
    assert alone["balance_mean"] < around["balance_mean"]
    assert by_router["first_token"]["p99"] < around["first_token"]["p99"]
    slow = replace(SMALL, slow=1)
    assert (
        measure(slow)["whole"]["p99"] < measure(replace(slow, policy="round robin"))["whole"]["p99"]
    )


def test_a_replica_computes_what_it_says() -> None:
    """By hand: two prompts one behind the other, then two sequences in one batch."""
    machine = Machine(step=0.01, per_sequence=0.001, prefill_rate=1000, chunk=100, max_batch=2)
    replica = Replica(machine)
    turns = [
        Turn(number, 0.0, Conversation(number, 0, 50, 50), 200, completion, known=200)
        for number, completion in ((1, 3), (2, 2))
    ]
    for turn in turns:
        replica.add(turn)
    assert replica.size == 2
    ends: list[tuple[float, list[int], list[int]]] = []
    while (now := replica.next_end()) < float("inf"):
        replica.advance(now)
        first, done = replica.ended()
        ends.append(
            (round(now, 4), [turn.number for turn in first], [turn.number for turn in done])
        )
    # 200 tokens: 2 steps of 0.01 + 0.1. Then 152 (48 of the stem are cached): two steps of 76, one
    # sequence running.
    assert ends[0] == (0.22, [1], [])
    assert ends[1] == (0.22 + 2 * (0.011 + 0.076), [2], [1])
    assert ends[2] == (round(0.22 + 2 * 0.087 + 0.011, 4), [], [2])
    assert turns[1].cached == 48
    assert replica.computed == 352


def test_pieces_of_prompts_are_equal_where_their_tokens_are() -> None:
    def piece(stem: int, conversation: int, length: int, start: int) -> object:
        turn = Turn(0, 0.0, Conversation(conversation, stem, 300, 300), length, 1, known=length)
        return prompt_of(turn)[start : start + 128]

    assert piece(1, 1, 700, 0) == piece(1, 2, 400, 0) != piece(2, 1, 700, 0)
    assert piece(1, 1, 700, 256) == piece(1, 1, 900, 256) != piece(1, 2, 700, 256), (
        "the end of the stem is in it"
    )


def test_weights_reach_everybody_at_the_times_of_a_tree() -> None:
    flat = arrivals(Broadcast(10, 10, 100.0, 100.0, bandwidth=10.0, latency=0.5))
    np.testing.assert_allclose(sorted(flat), [10 * place + 0.5 for place in range(1, 11)])
    pair = arrivals(Broadcast(6, 2, 100.0, 100.0, bandwidth=10.0, latency=0.5))
    np.testing.assert_allclose(sorted(pair), [10.5, 20.5, 21, 31, 31, 41])
    chain = arrivals(Broadcast(5, 1, 100.0, 10.0, bandwidth=10.0, latency=0.5))
    np.testing.assert_allclose(chain, [10.5 + 1.5 * hop for hop in range(5)])
    for degree in (1, 2, 3, 7):
        times = arrivals(Broadcast(50, degree, 100.0, 5.0, bandwidth=10.0, latency=0.1))
        assert len(times) == 50
        # Nobody is served faster than its parent can send to all its children.
        assert times.max() >= 10 * min(degree, 49)
        assert times.min() >= 10


def test_arithmetic_of_shapes_that_are_known() -> None:
    assert M8.parameters == pytest.approx(8.03e9, rel=1e-3)  # Llama 3.1: 8.03 and 70.6 billion
    assert M70.parameters == pytest.approx(70.55e9, rel=1e-3)
    assert M8.kv_bytes == 131072
    for shape in MODELS:
        assert weight_bytes(shape, Plan()) == 2 * shape.parameters
        halves = [
            weight_bytes(shape, plan) for plan in (Plan(tensor=2), Plan(tensor=2, expert=True))
        ]
        router = 2 * shape.layers * shape.hidden * shape.experts  # every rank routes
        assert halves == [shape.parameters + router / 2, halves[0]]
    assert weight_bytes(M70, Plan(tensor=16)) > weight_bytes(M70, Plan()) / 16, (
        "KV heads are copied"
    )
    assert kv_tokens(M70, Plan()) == 0
    assert (
        tensor_bytes(M8, 2, "gather")
        == tensor_bytes(M8, 2, "exchange")
        == tensor_bytes(M8, 2, "columns")
    )
    assert not choices(MOE, 8)
    assert all(found.step <= 0.05 or found.batch == 1 for found in choices(M70, 64))


def test_the_document_has_the_tables_of_the_code_and_of_the_report() -> None:
    text = tables.DOCUMENT.read_text()
    assert set(tables.TABLES) == {mark[1] for mark in tables.MARKED.findall(text)}
    assert tables.filled(text, tables.report_rows()) == text, (
        "run python -m benchmarks.fleet.tables"
    )


def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "machine", dict)  # measures for seconds
    out = tmp_path / "fleet.json"
    command = ["fleet", "--replicas", "8", "--requests", "2000", "--runs", "router;1 % lost"]
    done = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["options"]["seed"] == 0
    assert {"versions", "machine", "rows"} <= set(report)
    assert [row["name"] for row in report["rows"][:2]] == ["router", "1 % lost"]
    assert report["rows"][1]["moved"]["requests"] > 0
    assert len(report["rows"]) == 20
