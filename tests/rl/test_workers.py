"""Workers and `GradientShards`: gradients whose bits the number of workers does not change."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from nano_inference import ConfigError
from nano_inference.errors import InvalidRequest, RankLost
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.rl import GradientShards, Workers
from tests.models.tiny import tiny_llama
from tests.ports import free_port
from tests.rl.training import bits

dist: Any = torch.distributed
CPU = torch.device("cpu")
SHAPES = ((3, 5), (7,), (2, 2))


def together(size: int, run: Callable[[Workers], Any], patience: float = 30.0) -> list[Any]:
    """Return each worker's result or exception. Workers are threads with real gloo groups."""
    store = dist.HashStore()
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            group = ProcessGroup.meet(store, rank, size, CPU, patience) if size > 1 else None
            with Workers(group) as workers:
                results[rank] = run(workers)
        except Exception as problem:
            results[rank] = problem

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


class Bare(nn.Module):
    """Parameters with an engine's fingerprint, without an engine."""

    def __init__(self, numerics: str = "cpu", seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES
        )
        self.engine = SimpleNamespace(numerics=SimpleNamespace(fingerprint=numerics))


def drawn(shard: int, index: int, absent: set[tuple[int, int]]) -> torch.Tensor | None:
    """Return a gradient of very different magnitudes, so that any other order shows."""
    if (shard, index) in absent:
        return None
    generator = torch.Generator().manual_seed(31 * shard + index)
    scale = 10.0 ** torch.randint(-6, 7, SHAPES[index], generator=generator)
    return torch.randn(SHAPES[index], generator=generator) * scale


def summed(workers: Workers, num_shards: int, absent: set[tuple[int, int]]) -> list[Any]:
    policy: Any = Bare()
    shards = GradientShards(policy, num_shards, workers)
    for shard in shards.mine:
        for index, param in enumerate(policy.weights):
            param.grad = drawn(shard, index, absent)
        shards.add()
    shards.finish()
    return [None if p.grad is None else bits(p.grad) for p in policy.weights]


@pytest.mark.parametrize("num_shards", [1, 4, 8])
def test_gradient_shards_sum_to_equal_bits_on_any_workers(num_shards: int) -> None:
    absent = {(0, 0), (3, 0), (2, 1), *((shard, 2) for shard in range(num_shards))}
    (expected,) = together(1, lambda workers: summed(workers, num_shards, absent))
    assert expected[2] is None
    for size in (2, 4, 8):
        if size <= num_shards:
            results = together(size, lambda workers: summed(workers, num_shards, absent))
            assert results == [expected] * size


def test_gradient_shards_follow_a_tree() -> None:
    parts = [drawn(shard, 0, set()) for shard in range(4)]
    tree = (parts[0] + parts[1]) + (parts[2] + parts[3])  # type: ignore[operator]
    (result,) = together(1, lambda workers: summed(workers, 4, set()))
    assert result[0] == bits(tree)


def test_gradient_shards_require_every_shard() -> None:
    policy: Any = Bare()
    shards = GradientShards(policy, 2)
    shards.add()
    with pytest.raises(InvalidRequest, match="1 of this worker's 2 shards were added"):
        shards.finish()
    shards.add()
    with pytest.raises(InvalidRequest, match="all 2 shards of this worker were added"):
        shards.add()


def test_gradient_shards_reject_gradients_of_the_last_step() -> None:
    policy: Any = Bare()
    shards = GradientShards(policy, 1)
    for _ in range(2):
        for param in policy.parameters():
            param.grad = torch.ones_like(param)  # a new tensor, as after zero_grad()
        shards.add()
        shards.finish()
    with pytest.raises(InvalidRequest, match="zero_grad"):
        shards.add()


@pytest.mark.parametrize(("size", "num_shards"), [(1, 3), (1, 0), (4, 2)])
def test_shards_reject_other_numbers(size: int, num_shards: int) -> None:
    for result in together(size, lambda workers: workers.shards(num_shards)):
        assert isinstance(result, ConfigError)
        assert f"num_shards={num_shards}" in str(result)


def test_workers_reject_three_processes() -> None:
    for result in together(3, lambda workers: None):
        assert isinstance(result, ConfigError)
        assert "start 1, 2, 4, 8" in str(result)


@pytest.mark.parametrize(
    ("of_rank_1", "name"), [({"numerics": "cpu/tiles"}, "numerics"), ({"seed": 1}, "SHA-256")]
)
def test_gradient_shards_reject_unlike_workers(of_rank_1: dict[str, Any], name: str) -> None:
    def run(workers: Workers) -> None:
        policy: Any = Bare(**(of_rank_1 if workers.rank else {}))
        GradientShards(policy, 2, workers)

    for result in together(2, run):
        assert isinstance(result, ConfigError)
        assert name in str(result)


def test_workers_gather_bytes_of_any_length() -> None:
    data = [b"", b"a", bytes(range(256)), b"last"]
    assert together(4, lambda workers: workers.gather(data[workers.rank])) == [data] * 4
    assert together(4, lambda workers: workers.total(workers.rank)) == [6] * 4


def test_lost_worker_is_an_error_of_the_others() -> None:
    left = threading.Event()

    def run(workers: Workers) -> Any:
        if workers.rank:
            left.set()
            return None  # leaves the group
        assert left.wait(30)
        return workers.total(1)

    first, _ = together(2, run)
    assert isinstance(first, RankLost)


SCRIPT = """
import json, os, signal, sys
from pathlib import Path

import torch

from nano_inference import NanoInferenceError
from nano_inference.rl import GradientShards, LoraPolicy, PolicyModel, Workers
from nano_inference.rl.parameter_states import parameters_sha256
from nano_inference import LoraSettings
from tests.rl.training import SEQUENCES, build, coefficients, weighted_sum

model, saved, dies_at, rank = json.loads(sys.argv[1])
weights = coefficients([len(each) for each in SEQUENCES])
saved = Path(saved)
with Workers.meet() as workers, build(Path(model), max_loras=1) as engine:
    # workers need not agree on activations
    options = {"num_workers": 1, "recompute_activations": workers.rank % 2 == 1}
    policy = PolicyModel(engine, **options) if rank == 0 else LoraPolicy(
        engine, LoraSettings(rank=rank, alpha=2.0), **options
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, foreach=False)
    steps = sorted(saved.glob("*.pt"), key=lambda path: int(path.stem))
    if steps:
        state = torch.load(steps[-1], weights_only=True)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
    shards = GradientShards(policy, 4, workers)
    first = int(steps[-1].stem) + 1 if steps else 0
    for step in range(first, 3):
        for shard in shards.mine:
            if [workers.rank, step] == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            logprobs = policy.logprobs(SEQUENCES[shard::4])
            weighted_sum(logprobs, weights[shard::4]).backward()
            shards.add()
        try:
            shards.finish()
        except NanoInferenceError as problem:
            sys.exit(type(problem).__name__)
        optimizer.step()
        optimizer.zero_grad()
        policy.publish()
        if workers.rank == 0:
            state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, saved / f"{step}.pt.new")
            (saved / f"{step}.pt.new").rename(saved / f"{step}.pt")
    print(parameters_sha256(policy.named_parameters()))
"""


def trained(
    model: Path, saved: Path, size: int, rank: int = 0, dies_at: list[int] | None = None
) -> list[tuple[int, str]]:
    """Train with processes as torchrun starts them. Return exit codes and last lines.

    `dies_at` is a worker and the step at which it kills itself. `rank` is that of the adapter to
    train, 0 to train all weights.
    """
    saved.mkdir(exist_ok=True)
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    arguments = json.dumps([str(model), str(saved), dies_at, rank])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, arguments],
            env={**os.environ, **shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(size)
    ]
    results = []
    for worker in workers:
        out, problem = worker.communicate(timeout=300)
        results.append((worker.returncode, (out or problem).strip().splitlines()[-1:]))
    return [(code, lines[0] if lines else "") for code, lines in results]


@pytest.mark.thorough
@pytest.mark.parametrize(("rank", "sizes"), [(0, (2, 4)), (4, (2,))])
def test_workers_train_to_the_sha_of_one(tmp_path: Path, rank: int, sizes: tuple[int]) -> None:
    model = tiny_llama(tmp_path / "model")
    ((code, sha),) = trained(model, tmp_path / "1", 1, rank)
    assert (code, len(sha)) == (0, 64)
    for size in sizes:
        assert trained(model, tmp_path / str(size), size, rank) == [(0, sha)] * size


@pytest.mark.thorough
def test_killed_worker_stops_the_others_and_resumes(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    ((_, sha),) = trained(model, tmp_path / "quiet", 1)
    killed = trained(model, tmp_path / "run", 2, dies_at=[1, 1])
    assert killed == [(1, "RankLost"), (-9, "")]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["0.pt"]
    assert trained(model, tmp_path / "run", 4) == [(0, sha)] * 4
