"""Ranks as processes: their results, a lost rank, and no leaked processes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("msgspec")

import msgspec

from nano_inference import (
    ConfigError,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    ModelLoadError,
    SamplingParams,
    WeightUpdateError,
)
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.ranks.messages import Begin
from nano_inference.weights.staging import WeightPatch
from tests.models.tiny import tiny_model

TIMEOUT = 20.0
LONG = SamplingParams(max_tokens=300, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("ranks") / "model"
    tiny_model(
        model,
        "llama",
        num_attention_heads=4,
        hidden_size=64,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )
    return str(model)


@pytest.fixture
def engines(folder: str) -> Iterator[Any]:
    made: list[InferenceEngine] = []
    threads = torch.get_num_threads()

    def make(**options: Any) -> InferenceEngine:
        defaults = {
            "device": "cpu",
            "num_threads": 1,
            "seed": 1,
            "kv_cache_memory": 2**21,
            "rank_timeout": TIMEOUT,
        }
        made.append(InferenceEngine(EngineConfig(folder, **(defaults | options))))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()
    torch.set_num_threads(threads)
    assert not workers()


def workers() -> list[psutil.Process]:
    processes = []
    for child in psutil.Process().children(recursive=True):
        try:
            if (
                "nano_inference.ranks.worker" in child.cmdline()
                and child.status() != psutil.STATUS_ZOMBIE
            ):
                processes.append(child)
        except psutil.NoSuchProcess:
            pass
    return processes


def run_to_the_end(engine: InferenceEngine) -> None:
    while engine.has_pending():
        engine.step()
    engine.shared.require_alive()


def new_weights(folder: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in read_tensors(Path(folder))
    }


@pytest.mark.thorough
def test_ranks_in_processes_match_one_rank(engines: Any, folder: str) -> None:
    """Cover samples, an update in flight with `finish_old`, patches, checksums and sleep."""

    def life(engine: InferenceEngine) -> list[Any]:
        results: list[Any] = [engine.weights_checksum()]
        params = [
            SamplingParams(max_tokens=30, seed=s, temperature=0.8, top_p=0.9, ignore_eos=True)
            for s in range(3)
        ]
        for prompt, prompt_params in zip(([1, 2, 3], [4] * 40, [5, 6]), params, strict=True):
            engine.add_request(prompt, prompt_params, num_samples=2)
        samples = [sample for _ in range(6) for sample in engine.step()]
        update = engine.update_weights(new_weights(folder, 1), kv_policy="finish_old")
        engine.add_request([7, 8, 9], params[0])
        while engine.has_pending():
            samples += engine.step()
        assert update.result(0) == 1
        name = "model.layers.1.mlp.down_proj.weight"
        places = torch.tensor([0, 95, 96, 3000, 6143])
        engine.update_weights([WeightPatch(name, places, torch.linspace(-1, 1, 5))], blocking=True)
        results.append(engine.weights_checksum())
        with pytest.raises(WeightUpdateError, match="NaN"):
            engine.update_weights(
                {name: torch.full((64, 96), torch.nan)}, check_finite=True, blocking=True
            )
        engine.sleep(weights=True)
        engine.wake()
        samples += engine.generate([[3, 1, 4]], params[1])
        results.append([(s.completion_tokens, s.logprobs, s.weight_version) for s in samples])
        results.append(engine.stats().tokens_computed)
        return results

    alone = life(engines(backend="cpu"))
    together = life(engines(backend="cpu", tensor_parallel=2, lookahead=1))
    assert alone[:3] == together[:3]
    assert not torch.distributed.is_initialized()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "when",
    [
        "decode",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("prefill", "idle", "hung")),
    ],
)
def test_lost_rank_ends_the_engine_and_names_the_requests(engines: Any, when: str) -> None:
    engine: InferenceEngine = engines(backend="reference", tensor_parallel=2, max_chunk_tokens=2)
    (worker,) = workers()
    ids = [engine.add_request([1] * 60, LONG), engine.add_request([2] * 5, LONG)]
    for _ in range(0 if when == "idle" else 3 if when == "prefill" else 40):
        engine.step()
    began = time.monotonic()
    if when == "hung":
        os.kill(worker.pid, signal.SIGSTOP)
    else:
        os.kill(worker.pid, signal.SIGKILL)
    while when == "idle" and worker.is_running() and time.monotonic() < began + 30:
        time.sleep(0.01)
    with pytest.raises(EngineDead) as raised:
        run_to_the_end(engine)
    assert time.monotonic() - began < TIMEOUT + 20
    text = str(raised.value)
    assert "rank 1" in text
    assert f"process {worker.pid}" in text
    assert ("makes no progress" if when == "hung" else "killed by signal 9") in text
    assert f"requests lost: {ids[0]}, {ids[1]}" in text
    assert not workers()
    with pytest.raises(EngineDead):
        engine.generate([[1]], LONG)


@pytest.mark.slow
def test_rank_death_during_an_update_ends_the_engine(engines: Any, folder: str) -> None:
    engine: InferenceEngine = engines(backend="reference", tensor_parallel=2)
    (worker,) = workers()
    engine.add_request([2] * 5, LONG)
    engine.step()

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(new_weights(folder, 2).items()):
            if index == 5:
                worker.kill()
            yield {name: tensor}

    with pytest.raises((WeightUpdateError, EngineDead)):
        engine.update_weights(buckets(), blocking=True)
    with pytest.raises(EngineDead, match="rank 1"):
        run_to_the_end(engine)


def test_rank_construction_error_reaches_the_caller(folder: str) -> None:
    with pytest.raises(
        ConfigError,
        match="tensor_parallel=8 exceeds the model's 4 attention heads; use at most 4",
    ):
        InferenceEngine(EngineConfig(folder, device="cpu", tensor_parallel=8))
    with pytest.raises(ModelLoadError):
        InferenceEngine(EngineConfig(f"{folder}/nowhere", device="cpu", tensor_parallel=2))
    assert not workers()


@pytest.mark.slow
def test_workers_end_with_an_abandoned_engine(folder: str) -> None:
    engine = InferenceEngine(EngineConfig(folder, device="cpu", tensor_parallel=2, num_threads=1))
    assert len(workers()) == 1
    del engine
    gc.collect()
    end = time.monotonic() + 30
    while workers() and time.monotonic() < end:
        time.sleep(0.02)
    assert not workers()
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ") and t.is_alive()]


@pytest.mark.slow
def test_workers_end_with_rank_0(folder: str) -> None:
    """Rank 0 is killed in mid-step without a message to the workers."""
    script = (
        "import sys; from nano_inference import *\n"
        f"engine = InferenceEngine(EngineConfig({folder!r}, device='cpu', tensor_parallel=2, "
        f"num_threads=1))\n"
        "engine.add_request([1] * 9, SamplingParams(max_tokens=400, ignore_eos=True))\n"
        "engine.step(); print('stepping', flush=True)\n"
        "while True: engine.step() if engine.has_pending() else None\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        assert rank_0.stdout.readline() == b"stepping\n"
        (worker,) = workers()
        rank_0.kill()
    assert psutil.wait_procs([worker], timeout=30)[1] == []


@pytest.mark.slow
def test_worker_removes_the_rendezvous_if_rank_0_is_killed(
    tmp_path: Path,
) -> None:
    socket_path = tmp_path / "meeting"
    socket_path.mkdir()
    begin = Begin(1, 2, f"unix:{socket_path}/rank0", b"x" * 32, parent=os.getpid())
    command = [sys.executable, "-P", "-m", "nano_inference.ranks.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        worker.communicate(msgspec.json.encode(begin) + b"\n", timeout=60)
    assert worker.returncode == 1
    assert not socket_path.exists()
