"""Adapters on tensor ranks and stages of the CUDA backend: kernels in Triton's interpreter, ranks as
threads that take turns in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("triton")

from nano_inference import EngineConfig, InferenceEngine, TrainingSample
from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import AdapterMemory, LoraSettings, pairs_of, targets_of
from nano_inference.device.adapters import blank_adapter, columns_of, most_parts, reserved_bytes
from nano_inference.device.cuda_runner import CudaRunner
from nano_inference.models.sharding.shard import shard_of
from nano_inference.ops.cuda.lora import GroupedLora, are_aligned, bounds_of
from nano_inference.ops.cuda.lora import placed as lora_placed
from nano_inference.ops.lora import HEAD, placed
from nano_inference.parallel.mesh import Mesh, Place
from tests.device.test_cuda_runner import bare
from tests.device.test_triton_adapters import add, checking, loaded, matrices
from tests.models.tiny import tiny_model
from tests.ranks.rank_threads import ThreadLauncher
from tests.weights.weight_cases import drain

__all__ = ["checking"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("llama"),
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=60,
        num_hidden_layers=2,
    )


@contextmanager
def engine_of(folder: Path, **changes: Any) -> Iterator[InferenceEngine]:
    options: dict[str, Any] = {
        "backend": "cuda",
        "batch_invariant": True,
        "device": "cpu",
        "kv_cache_memory": 2**20,
        "lookahead": 1,
        "max_batch_size": 4,
        "max_model_len": 24,
        "max_loras": 2,
        "max_lora_rank": 8,
    }
    config = EngineConfig(str(folder), **(options | changes))
    shared = any(name.endswith("_parallel") for name in changes)
    with InferenceEngine(config, ThreadLauncher() if shared else None) as engine:
        yield engine


def life(engine: InferenceEngine, folder: Path) -> list[TrainingSample]:
    """Serve two adapters next to plain requests, then a new version of one of them."""
    loaded(engine, folder)
    add(engine, "whole", "layers", None)
    samples = drain(engine)
    engine.unload_adapter("whole")  # the first stage has no part of an adapter of the head
    engine.load_adapter("head", matrices(folder, 2, ("lm_head",)), LoraSettings(alpha=8.0))
    add(engine, "head", "layers", None)
    samples += drain(engine)
    engine.unload_adapter("head")
    engine.load_adapter("whole", matrices(folder, 1), LoraSettings(alpha=8.0))
    engine.load_adapter("layers", matrices(folder, 5), LoraSettings(alpha=8.0))
    add(engine, "layers", "layers", "whole")
    samples += drain(engine)
    engine.unload_adapter("whole")
    add(engine, None, "layers")
    return [*samples, *drain(engine)]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_adapters_on_ranks_match_the_reference(
    folder: Path, mesh: dict[str, int], runners: list[CudaRunner]
) -> None:
    with engine_of(folder, backend="reference", batch_invariant=None) as engine:
        expected = life(engine, folder)
    with engine_of(folder, cuda_graphs=False, **mesh) as engine:
        eager = life(engine, folder)
    for sample, other in zip(eager, expected, strict=True):
        assert sample.completion_tokens == other.completion_tokens
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert sample.adapter_versions == other.adapter_versions
    runners.clear()
    with engine_of(folder, **mesh) as engine:
        samples = life(engine, folder)
    assert [repr(bare(each)) for each in samples] == [repr(bare(each)) for each in eager]
    assert len(runners) == 2
    for runner in runners:
        assert runner.num_replays > 5
        assert runner.num_trunk_replays > 1


def test_adapter_without_a_part_has_no_address(folder: Path) -> None:
    """A table in host memory would be read on the card."""
    spec = load_spec(folder)
    pairs = pairs_of(matrices(folder, 2, ("lm_head",)), LoraSettings(), spec, 8)
    lora = GroupedLora()
    addresses = [
        lora.addresses(
            [
                AdapterMemory(shard_of(spec, Place(Mesh(1, 2), rank)), "cpu", lora_placed)
                .make("own", 1, pairs)
                .adapter
            ]
        )
        for rank in range(2)
    ]
    assert [bool(each[0]) for each in addresses] == [False, True]


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(1, 2), Mesh(2, 2)])
def test_bounds_of_a_rank_cover_every_adapter(folder: Path, mesh: Mesh) -> None:
    spec = load_spec(folder)
    pairs = pairs_of(matrices(folder, 5), LoraSettings(), spec, 8)
    config = EngineConfig(str(folder), max_loras=1, max_lora_rank=8)
    for rank in range(mesh.world_size):
        part = shard_of(spec, Place(mesh, rank))
        adapter = AdapterMemory(part, "cpu", placed).make("own", 1, pairs).adapter
        made = {
            name: [(each.first, *each.a.shape, *each.b.shape) for each in parts]
            for name, parts in adapter.parts.items()
        }
        blank = blank_adapter(part, 8, "cpu")
        assert made == {
            name: [(each.first, *each.a.shape, *each.b.shape) for each in parts]
            for name, parts in blank.parts.items()
        }
        assert reserved_bytes(config, part) == 2 * adapter.num_bytes
        bounds = bounds_of(adapter.parts.values())
        assert (bounds.parts, bounds.rank) == (most_parts(part), 8)
        assert bounds.aligned == are_aligned(columns_of(part))
        assert (HEAD in adapter.parts) is part.position.is_last_stage
        assert {target.param for target in targets_of(spec, part).values()} == {*made}
