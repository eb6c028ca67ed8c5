"""Engines of a tiny model for tests of weight updates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine
from tests.models.tiny import Weights, llama_config, tiny_llama, write_model
from tests.weights.weight_cases import Build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture
def build(model: Path, tmp_path: Path) -> Iterator[Build]:
    """Build engines on the old weights, or on `weights`."""
    threads, engines = torch.get_num_threads(), list[InferenceEngine]()

    def make(weights: Weights | None = None, **options: Any) -> InferenceEngine:
        folder = model
        if weights is not None:
            folder = write_model(tmp_path / f"model{len(engines)}", llama_config(), weights)
        settled = {
            "model_path": str(folder),
            "num_threads": 1,
            "kv_cache_memory": 2**20,
            "seed": 0,
            "block_size": 4,
        }
        engines.append(InferenceEngine(EngineConfig(**(settled | options))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tied", tie=True)
