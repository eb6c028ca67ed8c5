"""Whole engines over processes, in every mesh, against one rank: the same tokens and logprobs, bit
for bit.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import read_tensors, resolve_model
from nano_inference.config import CacheType
from nano_inference.types import KvPolicy
from tests.models.tiny import tiny_model

MOST_STEPS = 3000
MESHES: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "tp2pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "ep2": {"tensor_parallel": 2, "expert_parallel": 2},
}
FAMILIES = {"llama": {}, "qwen3-moe": {}}
TIGHT_BLOCKS = 7
KV_HEADS = 2  # of the tiny models
# keys and values of a token of the tiny models, in bytes of one number
TOKEN_BYTES = 4 * 2 * 2 * 16
SHARED = [7, 3, 11, 5] * 12


def prompts(long: bool) -> list[list[int]]:
    """Return prompts, some with a shared prefix; with `long`, one exceeds the segments."""
    mixed = [[*SHARED, 20 + i, 40, i + 1] for i in range(4)] + [[9], [12, 13, 14], [5] * 33]
    return [*mixed, [(i * 7) % 200 + 3 for i in range(1300)]] if long else mixed


def outcome(sample: TrainingSample) -> tuple[Any, ...]:
    """Return the fields that must not depend on the mesh."""
    return (
        sample.prompt_tokens,
        sample.completion_tokens,
        sample.logprobs,
        sample.finish_reason,
        sample.seed,
    )


def life(
    engine: InferenceEngine, new: dict[str, torch.Tensor], policy: KvPolicy, long: bool
) -> Sequence[Any]:
    """Run requests, update the weights during them, and run more. Return samples by (request,
    sample).
    """
    samples: list[TrainingSample] = []

    def params(i: int) -> SamplingParams:
        return SamplingParams(
            temperature=(0.8, 0.0, 1.3)[i % 3],
            max_tokens=9 + i % 4,
            seed=100 + i,
            top_p=0.8 if i % 4 == 1 else 1.0,
            top_k=20 if i % 4 == 3 else 0,
            presence_penalty=0.5 if i % 5 == 4 else 0.0,
            ignore_eos=True,
        )

    for i, prompt in enumerate(prompts(long)):
        engine.add_request(prompt, params(i), num_samples=3 if i % 3 == 0 else 1)
    for _ in range(4):
        samples += engine.step()
    update = engine.update_weights(new, blocking=False, kv_policy=policy)
    for i, prompt in enumerate(prompts(False)):
        engine.add_request([3, *prompt], params(i + 50), num_samples=2 if i == 0 else 1)
    for _ in range(MOST_STEPS):
        if not engine.has_pending():
            break
        samples += engine.step()
    assert not engine.has_pending()
    assert update.result(0) == 1
    engine.loop.check()
    return [outcome(each) for each in sorted(samples, key=lambda s: (s.request_id, s.sample_index))]


def config(model: str, **options: Any) -> EngineConfig:
    """Return a config with chunks and several steps. `blocks` makes the cache so small that
    sequences are preempted.
    """
    defaults = {
        "max_chunk_tokens": 23,
        "max_tokens_per_batch": 64,
        "device": "cpu",
        "num_threads": 1,
        "seed": 5,
    }
    return EngineConfig(model_path=model, **(defaults | options))


def changed(model: str) -> dict[str, torch.Tensor]:
    """Return other weights for the folder."""
    generator = torch.Generator().manual_seed(8)
    return {
        name: (tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)).to(
            tensor.dtype
        )
        for name, tensor in read_tensors(resolve_model(model))
        if "norm" not in name
    }


def both(
    model: str,
    mesh: dict[str, int],
    policy: KvPolicy = "wait",
    *,
    preempted: bool = False,
    **options: Any,
) -> None:
    """Run the same life on one rank and on a mesh; with `preempted`, in a cache too small for all
    sequences.
    """
    new, long = changed(model), "context_parallel" in mesh
    if long:
        options |= {"block_size": 1024, "max_chunk_tokens": 391, "max_tokens_per_batch": 700}
    with InferenceEngine(config(model, **options)) as engine:
        alone = life(engine, new, policy, long)
        assert not engine.loop.num_preemptions
    # Memory of a rank. More tensor ranks than KV heads hold copies.
    ranks = prod(
        min(count, KV_HEADS) if name == "tensor_parallel" else count
        for name, count in mesh.items()
        if name != "expert_parallel"
    )
    token = TOKEN_BYTES * (4 if options["dtype"] == "float32" else 2)
    tight = {"kv_cache_memory": TIGHT_BLOCKS * options.get("block_size", 16) * token // ranks}
    with InferenceEngine(
        config(model, **options, **mesh, **(tight if preempted else {}))
    ) as engine:
        together = life(engine, new, policy, long)
        assert bool(engine.loop.num_preemptions) == preempted
    for one, other in zip(alone, together, strict=True):
        assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("cache_type", ["paged", "radix"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_changes_no_bit(tmp_path: Path, mesh: str, family: str, cache_type: CacheType) -> None:
    if mesh == "ep2" and family == "llama":
        pytest.skip("a dense model has no experts")
    model = str(
        tiny_model(
            tmp_path / family,
            family,
            num_attention_heads=4,
            hidden_size=64,
            num_hidden_layers=4,
            max_position_embeddings=2048,
        )
    )
    sizes = MESHES[mesh]
    for dtype, backend in (("float32", "reference"), ("bfloat16", "cpu")):
        options: dict[str, Any] = {"dtype": dtype, "backend": backend, "cache_type": cache_type}
        if "pipeline_parallel" in sizes:
            both(model, sizes, preempted=backend == "cpu", **options)
            continue
        both(model, sizes, preempted=True, **options)
        for lookahead in (0, 1):
            both(model, sizes, "keep" if lookahead else "recompute", lookahead=lookahead, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "ep2"])
def test_smollm2_is_the_same_in_a_mesh(mesh: str) -> None:
    both("smollm2-135m", MESHES[mesh], dtype="bfloat16")
