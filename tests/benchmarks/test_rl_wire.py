"""The benchmark of RL over HTTP: its parts on a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks import rl_wire
from benchmarks.ours import Options
from benchmarks.peers.compare import OURS
from benchmarks.serve import Choice
from benchmarks.wire_trainer import FLOWS

# Servers and trainers are separate processes.
pytestmark = pytest.mark.slow


def test_wire_forms_all_generate_all_tokens(options: Options, tmp_path: Path) -> None:
    choice = Choice(
        engines=(OURS,), requests=4, warm_up=1, concurrency=2, output_tokens=3, cache=tmp_path
    )
    rows = rl_wire.measure(options, ("logprobs",), choice)
    assert [row["form"] for row in rows] == [*rl_wire.OUR_FORMS]
    assert rows[0]["of_none"]["median"] == 1
    assert all(row["output_tokens_per_s"]["median"] > 0 for row in rows)
    json.dumps(rows)


def test_updates_happen_during_running_streams(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl_wire, "LEAD", 40)
    monkeypatch.setattr(rl_wire, "STREAMED", 300)
    in_process, *flows = rl_wire.measure(
        options, ("update",), Choice(engines=(OURS,), cache=tmp_path)
    )
    assert in_process["seconds"]["median"] > 0
    assert [row["name"].rpartition(", ")[2] for row in flows] == [*FLOWS]
    assert all(0 < row["usual_gap_s"]["median"] < row["update_s"]["median"] for row in flows)
    json.dumps(flows)
