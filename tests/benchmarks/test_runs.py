"""The benchmarks run on a tiny model: throughput in this process, and the engine as a peer in a
subprocess.
"""

import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import latency, prefill, throughput
from benchmarks.machine import ROOT
from benchmarks.models import RANDOM
from benchmarks.ours import Options, opened
from benchmarks.peers import compare
from benchmarks.peers.compare import OURS, Choice, best, compete, ratio, wanted
from benchmarks.peers.process import PeerFailed, Worker
from benchmarks.workloads import workload
from nano_inference.models.parameters.storage import num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config
from tests.models.tiny import tiny_llama


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(
        folder,
        vocab_size=49_152,
        hidden=16,
        inner=16,
        num_heads=2,
        num_kv_heads=1,
        layers=1,
        tie=True,
    )
    return Options(model=str(folder), dtype="float32", backend="reference", threads=1, repeats=1)


@pytest.mark.thorough
def test_throughput_of_a_tiny_model(options: Options) -> None:
    (row,) = throughput.measure(options, ["W1"])
    assert row["name"] == "W1, 1 thread"
    assert row["output_tokens_per_s"]["median"] == pytest.approx(
        128 / row["seconds"]["median"], rel=1e-3
    )
    assert row["first_token_s"]["median"] < row["seconds"]["median"]
    json.dumps(row)


def test_sequences_stream_a_first_token_and_gaps(options: Options) -> None:
    with opened(options) as engine:
        first, gaps = latency.arrivals(engine, workload("W2").cut(3))
    assert len(first) == 64
    assert len(gaps) == 64 * 2
    assert min(first) > 0


@pytest.mark.thorough
def test_prefill_by_length_and_chunk(options: Options) -> None:
    rows = prefill.measure(options, (20, 40), (16,), ())
    assert [row["name"] for row in rows] == ["20 tokens", "40 tokens", "40 tokens, chunks of 16"]
    assert all(row["prompt_tokens_per_s"]["median"] > 0 for row in rows)


@pytest.mark.thorough
def test_worker_takes_its_turn_and_is_stopped_in_between(options: Options, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers.ours_worker", json.dumps(options.as_dict())]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    worker = Worker(OURS, "default", command, environment, tmp_path / "worker.log", "")
    try:
        assert "schedule-invariant" in worker.config
        (process,) = worker.processes.members()
        assert process.status() == psutil.STATUS_STOPPED
        (row,) = compete("W1", [worker], 2, limit=60.0)
        assert len(row["seconds"]["runs"]) == 2
        assert process.status() == psutil.STATUS_STOPPED
    finally:
        worker.stop()
    assert not process.is_running()


@pytest.mark.thorough
def test_transformers_takes_turns_with_ours(options: Options, tmp_path: Path) -> None:
    choice = Choice(engines=(OURS, "transformers"), cache=tmp_path)
    rows = compare.measure(options, ["W1"], choice)
    assert [row["engine"] for row in rows] == [OURS, "transformers"]
    assert "transformers, float32, 1 threads" in rows[1]["config"]
    for row in rows:
        for figure in ("seconds", "decode_tokens_per_s", "cpu_seconds", "others_busy_cores"):
            assert len(row[figure]["runs"]) == 1
        assert row["cpu_seconds"]["min"] > 0


def test_models_of_the_benchmarks_are_of_the_size_in_their_names() -> None:
    sizes = {
        name: num_bytes(param_table(spec_from_config(config)), torch.bfloat16) / 2
        for name, config in RANDOM.items()
    }
    assert {name: round(size / 1e9, 1) for name, size in sizes.items()} == {
        "qwen3-0.6b-random": 0.6,
        "qwen3-4b-random": 4.0,
        "qwen3-8b-18-layers-random": 4.7,
        "gpt-oss-20b-4-layers-random": 4.5,
        "gemma3-4b-random": 3.9,
        "qwen3-30b-a3b-8-layers-random": 5.6,
        "qwen3.5-0.6b-random": 0.6,
        "qwen3-4-layers-random": 0.2,
        "qwen3.5-4b-16-layers-random": 2.4,
        "qwen3-moe-0.8b-random": 0.8,
    }


def test_exiting_worker_reports_its_last_output(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no such model"):
        Worker(
            "broken",
            "",
            [sys.executable, "-c", "raise SystemExit('no such model')"],
            {},
            tmp_path / "log",
            "",
        )


def test_best_setting_counts_and_rounds_are_paired() -> None:
    def row(engine: str, setting: str, runs: list[float]) -> dict:
        seconds = {"median": sorted(runs)[len(runs) // 2], "runs": runs}
        return {"workload": "W1", "engine": engine, "setting": setting, "seconds": seconds}

    rows = [
        row(OURS, "default", [1.0, 2.0, 1.0]),
        row("vllm", "slow", [9.0]),
        row("vllm", "fast", [3.0, 4.0, 2.0]),
    ]
    ours, peer = best(rows, "W1", OURS), best(rows, "W1", "vllm")
    assert ours is not None
    assert peer is not None
    assert peer["setting"] == "fast"
    assert ratio(ours, peer)["runs"] == [3.0, 2.0, 2.0]
    assert best(rows, "W1", "llama.cpp") is None


def test_settings_of_a_peer_take_one_pass_each() -> None:
    choice = Choice(vllm=("compiled", "eager"))
    assert wanted("W1", choice, 0) == [
        (OURS, "default"),
        ("vllm", "compiled"),
        ("llama.cpp", "unified KV"),
    ]
    assert wanted("W1", choice, 1) == [("vllm", "eager")]
    assert wanted("W2", Choice(engines=("llama.cpp",)), 0) == [("llama.cpp", "own KV")]


def test_uninstalled_peer_is_skipped(
    options: Options, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert compare.measure(options, ["W1"], Choice(engines=("vllm",), cache=tmp_path)) == []
    assert "make peers" in capsys.readouterr().out
