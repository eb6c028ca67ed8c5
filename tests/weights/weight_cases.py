"""Helpers shared by the weight update tests: a tiny model, other weights for it, and ways to
inspect an engine.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nano_inference import InferenceEngine, SamplingParams, TrainingSample, WeightSyncManager
from nano_inference.arrays import as_torch
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read, write
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.reference.backend import reference_ops
from tests.models.tiny import Weights, llama_config, llama_weights

Build = Callable[..., InferenceEngine]

OLD, NEW, NEWER = (llama_weights(llama_config(), seed=seed) for seed in (0, 1, 2))
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
PROMPT = list(range(40, 61))


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def drawn(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)


def bits(sample: TrainingSample) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return sample.completion_tokens, sample.logprobs


def drain(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    for _ in range(1000):
        if not engine.has_pending():
            break
        samples += engine.step()
        engine.loop.check()
    assert not engine.has_pending(), "the run never ends"
    return sorted(samples, key=lambda s: (s.request_id, s.sample_index))


async def until(condition: Callable[[], bool], patience: float = 30.0) -> None:
    """Wait for other threads. A hanging test fails."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.001)


def current(engine: InferenceEngine) -> Weights:
    """Return copies of the engine's weights under checkpoint names, as tensors."""
    return {
        name: as_torch(read(engine.model.params, slot)).clone()
        for name, slot in slots(param_table(engine.model.spec)).items()
    }


def assert_holds(engine: InferenceEngine, expected: Mapping[str, Tensor]) -> None:
    held = current(engine)
    assert held.keys() == expected.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def decoder(
    backend: str = "reference",
    dtype: torch.dtype = torch.float32,
    *,
    tie: bool = False,
    **sizes: Any,
) -> Decoder:
    """Return a tiny decoder of zeros without an engine."""
    ops = reference_ops() if backend == "reference" else cpu_ops(2)
    spec = spec_from_config(llama_config(tie=tie, **sizes))
    params = allocate(param_table(spec), dtype, torch.device("cpu"), ops.allocate)
    for slot in slots(param_table(spec)).values():
        write(params, slot, torch.zeros(slot.shape))
    return Decoder(spec, params, ops, 16)


def synced(manager: WeightSyncManager, weights: Any, **options: Any) -> dict[str, str]:
    """Return the checksum after an update."""
    if not manager.stage(weights, **options).done():  # else announcing wrote it
        manager.finish()
    return manager.checksum()
