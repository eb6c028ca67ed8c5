"""Memory of a real card: the engine keeps to its memory share and rejects settings that do not fit,
in one sentence.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.models import random_model
from benchmarks.gpu.scale import REAL
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.errors import ConfigError, NanoInferenceError

pytestmark = pytest.mark.gpu(card=True)

GIB = 1 << 30
BESIDE = GIB  # the CUDA context, lazily loaded modules, the vendor's workspaces


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("qwen"), REAL.small, "cuda")


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def config(model: Path, **changes: object) -> EngineConfig:
    values = {
        "model_path": str(model),
        "dtype": "bfloat16",
        "device": "cuda",
        "max_model_len": 4096,
    } | changes
    return EngineConfig(**values)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_share_is_kept_under_load(model: Path, share: float) -> None:
    """During the largest step and a full batch, the card's use stays within the share. Most of it
    is KV cache.
    """
    total = torch.cuda.mem_get_info()[1]
    with InferenceEngine(config(model, gpu_memory_utilization=share)) as engine:
        budget = engine.memory_budget
        assert budget.kv_cache > 0.5 * share * total or budget.num_tokens >= 256 * 4096
        prompts = [[1 + i % 7] * 3000 for i in range(3)] + [[i + 1] * 40 for i in range(300)]
        engine.generate(
            prompts,
            SamplingParams(max_tokens=4, ignore_eos=True, top_p=0.9, top_logprobs=5),
            progress=False,
        )
        free, _ = torch.cuda.mem_get_info()
        assert total - free <= share * total + BESIDE
        table = str(budget)
        assert "weights" in table
        assert "KV cache" in table


def test_too_large_a_cache_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        InferenceEngine(config(model, kv_cache_memory=1 << 42))


def test_too_small_a_share_names_a_larger_one(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.01"):
        InferenceEngine(config(model, gpu_memory_utilization=0.01))


def test_memory_taken_by_others_is_reported(model: Path) -> None:
    """If another process takes all remaining memory, requests end or the engine reports the cause.
    It never hangs.
    """
    with InferenceEngine(config(model, gpu_memory_utilization=0.5)) as engine:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(max(0, free - 64 * 2**20), dtype=torch.uint8, device="cuda")
        prompts = [[1 + i % 50] * 2000 for i in range(16)]
        params = SamplingParams(max_tokens=4, ignore_eos=True, top_logprobs=20)
        try:
            ended = f"{len(engine.generate(prompts, params, progress=False))} samples"
        except NanoInferenceError as error:
            ended = str(error)
        del hog
        assert ended == "16 samples" or "memory" in ended
