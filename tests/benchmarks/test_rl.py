"""The benchmark of the trainer's side runs on a tiny model and measures what its rows claim."""

import json
from pathlib import Path

import pytest

from benchmarks import rl
from benchmarks.ours import Options
from tests.models.tiny import tiny_llama


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    folder = tmp_path / "tiny"
    tiny_llama(
        folder,
        vocab_size=49_152,
        hidden=16,
        inner=16,
        num_heads=2,
        num_kv_heads=1,
        layers=1,
        max_position=4096,
    )
    small = {
        "RUNNING": 8,
        "SHARED": 40,
        "MEMBERS": 3,
        "OWN": 4,
        "ABORTED": 8,
        "ABORTED_AT": (1, 3),
        "BATCH": 2,
    }
    for name, value in {**small, "LENGTH": 8}.items():
        monkeypatch.setattr(rl, name, value)
    return Options(model=str(folder), dtype="float32", backend="reference", threads=1, repeats=1)


@pytest.mark.thorough
def test_rl_benchmark_runs_all_parts_but_the_broadcast(options: Options) -> None:
    rows = rl.measure(options, ("update", "score", "abort", "gradients"))
    assert len({row["name"] for row in rows}) == len(rows) == 5 + 3 + 2 + 4
    for row in rows:
        assert ("ratio" in row) != ("seconds" in row)
    named = {row["name"]: row for row in rows}
    assert named["copy of the weights' bytes"]["bytes"] > 49_152 * 16 * 4
    runs = [
        named[name]["seconds"]["runs"] for name in ("blocking update", "copy of the weights' bytes")
    ]
    quotients = [update / copy for update, copy in zip(*runs, strict=True)]
    assert named["blocking update / copy"]["ratio"]["runs"] == pytest.approx(quotients, rel=0.02)
    json.dumps(rows)


@pytest.mark.thorough
def test_broadcast_from_a_second_process(options: Options) -> None:
    rows = rl.measure(options, ("broadcast",))
    assert [len((row.get("seconds") or row["ratio"])["runs"]) for row in rows] == [3, 3, 3]
