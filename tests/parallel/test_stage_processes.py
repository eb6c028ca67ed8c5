"""Stages as processes: equal to one rank, and clean after one is killed."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("msgspec")

from nano_inference import (
    ConfigError,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
)
from nano_inference.checkpoints.loading import read_tensors
from tests.models.tiny import tiny_model

TIMEOUT = 20.0


def settled(model: Path, **options: Any) -> EngineConfig:
    """Return a config with small chunks and a cache too small for all sequences."""
    return EngineConfig(
        str(model),
        **{
            "device": "cpu",
            "num_threads": 1,
            "seed": 0,
            "max_chunk_tokens": 13,
            "rank_timeout": TIMEOUT,
        }
        | options,
    )


def life(engine: InferenceEngine, new: dict[str, torch.Tensor]) -> list[Any]:
    """Run requests, an update during them, a sleep, and more requests. Return fields independent of
    stages.
    """
    params = [
        SamplingParams(max_tokens=14, seed=1, ignore_eos=True, raw_logprobs=True, top_logprobs=2),
        SamplingParams(
            max_tokens=9, seed=2, temperature=0.0, prompt_logprobs=True, prompt_top_logprobs=3
        ),
        SamplingParams(max_tokens=12, seed=3, top_p=0.8, sampling_mask=True, presence_penalty=0.5),
    ]
    prompts = [[5, 6, 7, 8] * 9, [1, 2, 3], [5, 6, 7, 8] * 8 + [9, 9], [11] * 40, [4]]
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params[index % 3], num_samples=1 + index % 3)
    samples: list[TrainingSample] = [sample for _ in range(8) for sample in engine.step()]
    update = engine.update_weights(new, kv_policy="wait")
    for prompt in prompts:
        engine.add_request(prompt[::-1], params[0])
    while engine.has_pending():
        samples += engine.step()
    engine.loop.check()
    assert update.result(0) == 1
    engine.sleep(weights=True)
    engine.wake()
    samples += engine.generate([[3, 1, 4], [1, 5]], params[2])
    names = (
        "completion_tokens",
        "logprobs",
        "raw_logprobs",
        "top_logprobs",
        "sampling_mask",
        "prompt_top_logprobs",
    )
    samples.sort(key=lambda sample: (sample.request_id, sample.sample_index))
    fields = [[getattr(sample, name) for name in names] for sample in samples]
    return [fields, [(s.prompt_logprobs or ())[1:] for s in samples], engine.weights_checksum()]


def stages() -> list[psutil.Process]:
    """Return the workers of this process. Children of other tests may be unreaped."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # also true of a zombie
            if "nano_inference.ranks.worker" in " ".join(child.cmdline()):
                processes.append(child)
    return processes


@pytest.mark.thorough
def test_stages_match_one_rank_until_one_is_killed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "gemma3", num_hidden_layers=4)
    new = {name: tensor * 1.1 for name, tensor in read_tensors(model)}
    threads = torch.get_num_threads()
    with InferenceEngine(settled(model, backend="cpu", kv_cache_memory=2**18)) as engine:
        alone = life(engine, new)
    # A stage has half of the layers, so the same bytes hold more blocks. Fewer bytes keep memory
    # short.
    config = settled(
        model, backend="cpu", kv_cache_memory=2**15, pipeline_parallel=2, cache_type="radix"
    )
    with InferenceEngine(config) as engine:
        together = life(engine, new)
        assert together == alone
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert len(stats.ranks_busy) == 2
        request = engine.add_request([5] * 30, SamplingParams(max_tokens=150, ignore_eos=True))
        while len(engine.loop.in_flight) == 0 or engine.loop.num_steps % 20:
            engine.step()
        [stage] = stages()
        began = time.monotonic()
        stage.kill()
        with pytest.raises(
            EngineDead, match=rf"rank 1 .*killed by signal 9.*requests lost: {request}"
        ):
            engine.generate([[1]], SamplingParams(max_tokens=2))
        assert time.monotonic() - began < TIMEOUT
        assert not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_hanging_stage_is_named_even_if_others_end_first(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama", num_hidden_layers=4)
    options: dict[str, Any] = {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "rank_timeout": TIMEOUT,
    }
    with InferenceEngine(settled(model, **options)) as engine:
        engine.add_request([5] * 30, SamplingParams(max_tokens=150, ignore_eos=True))
        for _ in range(20):
            engine.step()
        workers = stages()
        workers[-1].suspend()  # its neighbor waits for it too, and times out
        with pytest.raises(EngineDead, match=r"rank 3 .*makes no progress"):
            engine.generate([[1]], SamplingParams(max_tokens=2))


def test_stages_beyond_the_layer_count_are_rejected(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match="pipeline_parallel=3 exceeds the model's 2 layers"):
        InferenceEngine(settled(model, pipeline_parallel=3))
