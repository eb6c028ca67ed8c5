"""Benchmarks of the GPU path, as far as a CPU can test them: their counts, and a peer that computes
the same model.
"""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import card, idle, kernels, needs, ours
from benchmarks.gpu.models import random_model, weight_bytes
from benchmarks.gpu.parts import PARTS, attempt
from benchmarks.gpu.report import Part, lines_of, median_of, rows_of
from benchmarks.gpu.scale import QWEN3_8B, REAL, TINY, TOY
from benchmarks.gpu.torch_loop import TorchLoop
from benchmarks.gpu.workload import OUTPUT_TOKENS, PROMPT_TOKENS, nano_vllm
from benchmarks.roofline import Rates, Shape, bound_of, shape_of, steps_of
from benchmarks.workloads import NAMES, workload
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.models.spec.read import spec_from_config
from nano_inference.system import c_compiler
from tests.gpu import run as shards

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_check.sh"


def test_workload_is_the_published_one() -> None:
    load, other = nano_vllm(), nano_vllm(seed=1)
    assert (
        (load.prompt_tokens, load.output_tokens)
        == (PROMPT_TOKENS, OUTPUT_TOKENS)
        == (142_827, 133_966)
    )
    # the first length and the first ids after `seed(0)`
    assert load.requests[0].prompt[:2] == (6311, 6890)
    assert [len(r.prompt) for r in other.requests] == [len(r.prompt) for r in load.requests]
    assert other.requests[0].prompt != load.requests[0].prompt
    assert REAL.fit(load) == load


def test_roofline_of_the_workload_is_as_published() -> None:
    """At 3.0 TB/s and 800 TFLOP/s the bound is about 25.6 thousand tokens per second."""
    bound = bound_of(
        steps_of(nano_vllm(), shape_of(spec_from_config(REAL.small))), Rates(800e12, 3.0e12)
    )
    assert nano_vllm().output_tokens / bound.bound == pytest.approx(25_600, rel=0.03)


def test_decode_bound_is_the_slower_resource() -> None:
    shape = Shape(layers=10, head=2, attention=1, weights=100, kv=3)
    assert ours.decode_bound(shape, Rates(1e9, 1.0), 2, 50.0) == 100 + 150
    assert ours.decode_bound(shape, Rates(1.0, 1e9), 2, 50.0) == 2 * 12 + 50


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_is_small_and_known_to_the_tiny_model(name: str) -> None:
    load = TOY.fit(workload(name))
    assert load.output_tokens + load.prompt_tokens < 250
    assert all(token < TINY["vocab_size"] for request in load.requests for token in request.prompt)
    warm = ours.warm_up_of(load, TOY)
    assert [len(r.prompt) for r in warm.requests] == [len(r.prompt) for r in load.requests]


def test_shapes_have_the_sizes_that_they_are_named_by() -> None:
    assert weight_bytes(REAL.small) / 2 == pytest.approx(0.6e9, rel=0.01)
    assert weight_bytes(QWEN3_8B) / 2 == pytest.approx(8.19e9, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_time_counts_every_moment_once(drawn: list[tuple[int, int]]) -> None:
    spans = sorted((float(start), float(start + length)) for start, length in drawn)
    moments = {moment for start, end in spans for moment in range(int(start), int(end))}
    wall, busy = idle.busy(spans)
    assert busy == len(moments)
    assert wall == (max(end for _, end in spans) - spans[0][0] if spans else 0)


def test_trace_counts_only_device_events(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "ts": 10, "dur": 4},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
        {"cat": "gpu_memcpy", "ts": 16, "dur": 4},
        {"ph": "M"},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert idle.idle_share(tmp_path / "trace.json.gz", "cuda") == (pytest.approx(0.2), 0.01, 2)


@pytest.mark.parametrize("tied", [True, False])
def test_plain_loop_computes_the_same_model(tmp_path: Path, tied: bool) -> None:
    """Its greedy tokens (a temperature near 0) equal the engine's, for prompts of several lengths
    in one batch.
    """
    folder = random_model(
        tmp_path, TINY | {"num_hidden_layers": 2, "tie_word_embeddings": tied}, "cpu"
    )
    prompts, steps = [[5, 6, 7], [9] * 11, [1, 2, 3, 4, 50]], 9
    loop = TorchLoop(folder, len(prompts), 32, "cpu", torch.float32, temperature=1e-5)
    loop.prefill(prompts)
    made = [loop.tokens.tolist()]
    for step in range(steps - 1):
        loop.decode(1, 11 + step)
        made.append(loop.tokens.tolist())
    config = EngineConfig(
        str(folder), device="cpu", dtype="float32", backend="reference", kv_cache_memory=1 << 20
    )
    with InferenceEngine(config) as engine:
        samples = engine.generate(
            prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        )
    assert list(zip(*made, strict=True)) == [sample.completion_tokens for sample in samples]


def test_missing_packages_are_reported_first_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [
        needs.Need("torch", "2.11"),
        needs.Need(
            "transformers", "not installed", "transformers is not installed", ("transformers",)
        ),
        needs.Need("card memory", "24 GiB", "24 GiB; more is wanted", ("large",)),
    ]
    assert needs.skipped(missing) == ["large", "transformers"]
    lines = needs.text(missing).splitlines()
    assert lines[:3] == [
        "missing: transformers is not installed",
        "missing: 24 GiB; more is wanted",
        "left out: large, transformers",
    ]
    assert needs.too_old("torch", "2.10.1+cu128") == "torch 2.10.1+cu128 is older than 2.11"
    assert needs.too_old("triton", "3.6.0") is None
    monkeypatch.setattr(c_compiler.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    assert "there is no C compiler" in str(needs.compiler().problem)
    monkeypatch.undo()
    assert not any(
        need.problem for need in needs.find(tmp_path, tmp_path / "none" / "there", dry_run=True)
    )


def test_rows_are_written_to_disk_immediately(tmp_path: Path) -> None:
    part = Part(tmp_path, "engine")
    part.add("rate", [3.0, 1.0, 2.0], "tok/s", at_least=2.5)
    part.fail("other", "RuntimeError: no")
    assert median_of(tmp_path, "engine", "rate") == 2.0
    assert [row["name"] for row in rows_of(tmp_path)] == ["rate", "other"]
    stages = [{"stage": "engine", "seconds": 3, "limit": 9, "ended": "ok"}]
    text = "\n".join(
        lines_of(
            {"machine": {}, "stages": stages, "rows": rows_of(tmp_path), "published_by_others": []}
        )
    )
    assert "2 [1..3] tok/s  (target >= 2.5: missed)" in text
    assert "FAILED: RuntimeError: no" in text


def test_stages_end_before_the_machine_is_released() -> None:
    """Each of three commands takes at most ten minutes, including a few seconds for the report."""
    groups: dict[str, int] = {}
    names: list[str] = []
    for line in check("--list", seconds=60).stdout.splitlines():
        name, group, limit = line.split()
        names.append(name)
        groups[group] = groups.get(group, 0) + int(limit)
    assert tuple(names) == needs.STAGES
    assert list(groups) == ["right", "speed", "causes"]
    assert max(groups.values()) <= 535
    assert set(PARTS) == set(names) - {"precompile", "smoke", "law", "tests", "sanitize", "races"}


def test_missing_grammar_packages_skip_no_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        needs.importlib.util,
        "find_spec",
        lambda name: None if name == "llguidance" else find(name),
    )
    packages = needs.packages()
    assert "missing: llguidance is not installed: no request of the tests has a grammar" in (
        needs.text(packages).splitlines()
    )
    assert needs.skipped(packages) == []
    assert not any(need.fatal and need.problem for need in packages)


def test_kernel_times_count_launches_of_a_step() -> None:
    events = [
        {"cat": "kernel", "name": "attention_kernel", "ts": 0, "dur": 4},
        {"cat": "kernel", "name": "attention_kernel", "ts": 4, "dur": 6},
        {"cat": "kernel", "name": "nvjet_tst_64x8", "ts": 12, "dur": 20},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
    ]
    times = kernels.times_of(events, 2, idle.ON_DEVICE)
    assert times == [
        kernels.KernelTime("nvjet_tst_64x8", 0.5, 10.0),
        kernels.KernelTime("attention_kernel", 1.0, 5.0),
    ]
    assert [kernels.group_of(time.name) for time in times] == ["products", "attention"]
    shape = Shape(layers=10, head=2, attention=1, weights=1000, kv=3)
    floors = kernels.floors_of(shape, TOY, 2, 50.0, Rates(1.0, 1e6))
    assert floors == {"products": 1000, "attention": 150, "draw": 2 * TINY["vocab_size"] * 4}


def test_source_tree_hash_equals_the_git_tree_hash(tmp_path: Path) -> None:
    """Results from a machine without .git can therefore name their sources."""
    folder = tmp_path / "src"
    for name, text in (("a.py", "1"), ("a/b.py", "2"), ("a.b/c", "3"), ("run.sh", "4")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "run.sh").chmod(0o755)
    for command in (["init", "-q"], ["add", "src"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    tree = subprocess.run(
        ["git", "write-tree", "--prefix=src/"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (folder / "a" / "__pycache__").mkdir()
    (folder / "a" / "__pycache__" / "b.cpython-311.pyc").write_bytes(b"5")
    assert card.tree_hash(folder) == tree


def test_failing_part_keeps_its_traceback(tmp_path: Path) -> None:
    part = Part(tmp_path, "engine")

    def fails() -> None:
        raise ValueError("no such thing")

    attempt(part, "decode", fails)
    (row,) = rows_of(tmp_path)
    assert row["problem"] == "ValueError: no such thing"
    assert "in fails" in row["stack"]


def test_stopped_shard_keeps_its_output(tmp_path: Path) -> None:
    path = tmp_path / "shard.txt"
    command = ["bash", "-c", "echo so far; exec sleep 600"]
    for seconds in (1.0, 5.0, 30.0):  # a busy machine takes longer to write the line
        assert shards.run_command(command, path, seconds) == shards.STOPPED
        if path.read_text():
            break
    assert path.read_text() == "so far\n"
    assert shards.run_command([sys.executable, "-c", "raise SystemExit(3)"], path, 60.0) == 3


def test_gpu_tests_are_each_in_one_shard() -> None:
    """The memory tests come first, because they need the whole card."""
    chosen = [*shards.ALONE, *shards.TOGETHER, *shards.LAW]
    files = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert {shard.file for shard in chosen} == files - {
        "test_triton_compile.py",
        "test_kernel_sets.py",
    }
    assert len({shard.name for shard in chosen}) == len(chosen)
    assert [shard.file for shard in shards.ALONE] == ["test_gpu_memory.py"]
    nccl = next(shard for shard in chosen if shard.file == "test_nccl.py")
    assert "gpu" not in shards.command_of(nccl, dry=False)


def check(*options: str, seconds: int) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), "--python", sys.executable, *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        env=dict(os.environ),
    )


def slow_python(folder: Path) -> Path:
    """Replace Python by a program that logs its arguments. Its smoke test never ends."""
    path = folder / "python"
    path.write_text(
        """#!/bin/bash
[[ "$*" == -c* ]] || echo "asked: $*, PYTHONPATH $PYTHONPATH"
if [[ "$*" == *tests.gpu.smoke* ]]; then
    echo "verdict: 1 of 2"
    echo ready > "$READY"
    exec sleep 600
fi
"""
    )
    path.chmod(0o755)
    return path


def test_killed_check_archives_its_results(tmp_path: Path) -> None:
    """The archive includes the running stage, with and without loss of the machine."""
    ready, out = tmp_path / "ready", tmp_path / "out"
    (tmp_path / "bin").mkdir()
    python = slow_python(tmp_path / "bin")
    environment = os.environ | {"READY": str(ready), "PYTHONPATH": "/else/where"}
    command = ["bash", str(SCRIPT), "--python", str(python), "--only", "precompile,smoke", str(out)]
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    running.communicate(timeout=30)  # immediately, before the stage ends
    assert running.returncode == 1
    with tarfile.open(out / "gpu_check.tgz") as archive:
        names = set(archive.getnames())
        log = archive.extractfile("./stages/smoke.txt")
        assert log is not None
        assert b"PYTHONPATH src:.:/else/where" in log.read()
    assert {"./stages/precompile.txt", "./stages/smoke.txt", "./stages.jsonl"} <= names
    stages = [json.loads(line) for line in (out / "stages.jsonl").read_text().splitlines()]
    assert [stage["ended"] for stage in stages] == ["ok", "stopped by a signal: 1 of 2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fast"], "unknown option --fast"),
        (["--only", "tests,fast"], "unknown stage fast"),
        (["--seconds", "soon"], "--seconds soon is not a number"),
        (["--only"], "--only needs a value"),
        (["one", "two"], "two folders are named"),
    ],
)
def test_script_rejects_unknown_arguments(options: list[str], said: str) -> None:
    done = check(*options, seconds=60)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_check_without_a_gpu_reports_it_and_stops(tmp_path: Path) -> None:
    done = check(str(tmp_path), seconds=120)
    assert done.returncode == 2
    assert "missing: torch" in done.stdout
    assert "nothing can be run here" in done.stderr


@pytest.mark.slow
def test_dry_run_goes_through_every_stage(tmp_path: Path) -> None:
    done = check("--dry-run", str(tmp_path), seconds=2400)
    stages = [json.loads(line) for line in (tmp_path / "stages.jsonl").read_text().splitlines()]
    ended = {stage["stage"]: stage["ended"].split(":")[0] for stage in stages}
    assert ended == dict.fromkeys(needs.STAGES, "ok"), done.stdout[-4000:]
    assert done.returncode == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["part"] for row in report["rows"]} == set(PARTS)
    assert not [row for row in report["rows"] if "problem" in row]
    assert (tmp_path / "trace-decode-1.json.gz").stat().st_size < idle.MOST_BYTES
