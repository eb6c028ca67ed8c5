"""Start-up of ranks on a fake card: all of them run the largest steps and the warm-up together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.device.warm_up import kinds_of_steps
from nano_inference.models.parameters.table import param_table
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.read import spec_from_config
from nano_inference.parallel.mesh import Mesh, Place
from nano_inference.ranks import parts
from tests.device.card import Card
from tests.device.cuda_cases import conventional
from tests.models.tiny import FAMILIES, MORE_FAMILIES, llama_config, tiny_model
from tests.ranks.rank_threads import ThreadLauncher

__all__ = ["conventional"]

MIB = 2**20


@pytest.mark.usefixtures("conventional")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 3), (2, 2)])
def test_stages_start_with_measured_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: int, stages: int, tied: bool
) -> None:
    monkeypatch.setattr(parts, "memory_of", lambda _: Card(total=64 * MIB, step=MIB))
    config = EngineConfig(
        model_path=str(
            tiny_model(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=tied)
        ),
        device="cpu",
        backend="cuda",
        batch_invariant=True,
        dtype="float32",
        max_batch_size=2,
        max_tokens_per_batch=40,
        max_model_len=24,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
    )
    with InferenceEngine(config, ThreadLauncher()) as engine:
        assert engine.memory_budget.workspace == MIB
        assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))) == 1


def test_stages_warm_up_the_same_row_counts() -> None:
    """Only the first stage has an MLP, but the others must receive the rows of its steps."""
    dense_first = {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    wide = {"hidden_size": 2048, "intermediate_size": 10_944}
    spec = spec_from_config(
        llama_config() | (FAMILIES | MORE_FAMILIES)["qwen3-moe"] | dense_first | wide
    )
    mesh = Mesh(pipeline=3)
    options = EngineConfig(model_path="none", max_tokens_per_batch=4096)

    def counts(position: Place) -> list[int]:
        part = shard_of(spec, position)
        table = param_table(spec, part)
        params = {
            param.name: torch.empty(param.shape, dtype=torch.bfloat16, device="meta")
            for param in table
        }
        model: Any = SimpleNamespace(
            part=part,
            params=params,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            ops=SimpleNamespace(name="cuda", schedule_invariant=True),
        )
        return kinds_of_steps(options, model)

    by_stage = [counts(Place(mesh, rank)) for rank in range(3)]
    assert by_stage[0] == by_stage[1] == by_stage[2]
    assert len(by_stage[0]) > 2
