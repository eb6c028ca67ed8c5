"""Graphs of an engine of several ranks: all ranks capture and replay the same steps, sums over
tensor ranks included, messages between stages excluded. The ranks are threads, and a stand-in
replaces the CUDA runtime.
"""

from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.device.backends import captures_graphs
from nano_inference.device.cuda_runner import CudaRunner
from nano_inference.models.spec.read import spec_from_config
from tests.device.cuda_cases import conventional
from tests.device.test_cuda_runner import bare, params
from tests.models.tiny import FAMILIES, MORE_FAMILIES, llama_config, tiny_model
from tests.ranks.rank_threads import ThreadLauncher
from tests.weights.weight_cases import drain

__all__ = ["conventional"]

PROMPTS = [[5, 6, 7], list(range(30, 51)), [8]]


def sampled(engine: InferenceEngine) -> list[str]:
    """Generate filtered, greedy and penalized samples, then prompts next to decodes."""
    how = [params(), params(temperature=0.0), params(top_p=0.9, presence_penalty=0.5)]
    samples = engine.generate(PROMPTS, how)
    for seed in range(3):
        engine.add_request([seed + 1] * (4 * seed + 2), params(seed=seed))
        samples += engine.step()
    samples += drain(engine)
    return [repr(bare(each)) for each in samples]


@pytest.mark.thorough
@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize(
    ("tensor", "stages", "lookahead"),
    [(2, 1, 0), (2, 1, 1), (1, 2, None), (1, 3, None), (2, 2, None)],
)
def test_ranks_replay_graphs(
    tmp_path: Path,
    runners: list[CudaRunner],
    tensor: int,
    stages: int,
    lookahead: int | None,
) -> None:
    folder = str(tiny_model(tmp_path, "llama", num_hidden_layers=3))
    options: dict[str, Any] = {
        "model_path": folder,
        "device": "cpu",
        "kv_cache_memory": 2**20,
        "lookahead": lookahead,
    }
    with InferenceEngine(EngineConfig(backend="reference", **options)) as engine:
        expected = sampled(engine)
    ranks = {"tensor_parallel": tensor, "pipeline_parallel": stages}
    config = EngineConfig(backend="cuda", **ranks, **options)
    with InferenceEngine(config, ThreadLauncher()) as engine:
        assert sampled(engine) == expected
    counts = [(each.num_replays, each.num_trunk_replays, each.num_eager_steps) for each in runners]
    assert counts == counts[:1] * tensor * stages
    assert counts[0][0] > 10
    assert counts[0][1] >= 4
    assert counts[0][2] == 0


@pytest.mark.parametrize(
    ("family", "options", "captures"),
    [
        ("llama", {}, True),
        ("llama", {"tensor_parallel": 2}, True),
        ("llama", {"pipeline_parallel": 2}, True),
        ("llama", {"tensor_parallel": 2, "cuda_graphs": False}, False),
        ("mixtral", {}, True),
        ("mixtral", {"pipeline_parallel": 2}, True),
        ("mixtral", {"tensor_parallel": 2}, False),
        ("mixtral", {"expert_parallel": 2}, False),
    ],
)
def test_graphs_exclude_exchanges_that_the_host_reads(
    family: str, options: dict[str, Any], captures: bool
) -> None:
    fields = llama_config() | (FAMILIES | MORE_FAMILIES)[family]
    spec = spec_from_config({name: value for name, value in fields.items() if value is not None})
    config = EngineConfig("tiny", backend="cuda", device="cpu", **options)
    assert captures_graphs(config, spec) is captures
