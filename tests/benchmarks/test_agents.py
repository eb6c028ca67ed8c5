"""The benchmark of agents' traces: its traces fit the model, and its targets."""

import itertools
from typing import Any

import pytest

from benchmarks.agents import CONTEXT, PARTS, Choice, targets, trace_of
from benchmarks.measure import spread
from nano_bench.traces import Trace

A_MESSAGE = 8  # tokens that a template puts around a message, at most


def longest(trace: Trace) -> int:
    return max(
        turn.blocks.length + (turn.output or 0) + A_MESSAGE * len(turn.messages)
        for each in trace.conversations.values()
        for turn in each.turns
        if turn.blocks is not None
    )


@pytest.mark.parametrize("part", PARTS)
def test_traces_of_all_rounds_fit_the_model(part: str) -> None:
    traces = [trace_of(PARTS[part](Choice(), number)) for number in range(5)]
    assert max(map(longest, traces)) < CONTEXT
    assert len({str(trace.conversations) for trace in traces}) == 5


def test_8k_part_keeps_a_prefix_near_the_context() -> None:
    trace = trace_of(PARTS["8k"](Choice(), 0))
    (session,) = trace.conversations.values()
    lengths = [turn.blocks.length for turn in session.turns if turn.blocks is not None]
    assert lengths[0] == 6800
    assert {later - earlier for earlier, later in itertools.pairwise(lengths)} == {64}


def test_targets_compare_with_llama_cpp() -> None:
    def row(engine: str, turn: float, late: float) -> dict[str, Any]:
        figures = {"turn_ms": spread([turn]), "first_token_p95_ms": spread([late])}
        return {"part": "8k", "weights": "Q8_0", "engine": engine} | figures

    assert targets([row("nano-inference", 100.0, 140.0), row("llama.cpp", 170.0, 300.0)]) == [
        "8k, Q8_0: llama.cpp takes 1.70 x our time for a later turn (target 1.5)",
        "8k, Q8_0: p95 to the first token 140 ms (target 150)",
    ]
