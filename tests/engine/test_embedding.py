"""`embed` compared with transformers, and its bits in shared batches."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
)
from tests.models.tiny import tiny_model

PROMPTS = [[3, 4, 5], [7], list(range(10, 50)), [3, 4, 5, 9]]


def config(folder: Path, backend: str, **options: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_cache_memory": 2**23, "max_model_len": 64, "num_threads": 1}
    return EngineConfig(str(folder), device="cpu", backend=backend, **values | options)  # pyright: ignore


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_embedding_equals_transformers_after_the_last_norm(
    tmp_path: Path, family: str, backend: str
) -> None:
    folder = tiny_model(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with InferenceEngine(config(folder, backend)) as engine:
        actual = engine.embed(PROMPTS)
    for prompt, row in zip(PROMPTS, actual, strict=True):
        with torch.no_grad():
            expected = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert row.dtype == torch.float32
        torch.testing.assert_close(row, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_embedding_bits_do_not_depend_on_the_schedule(tmp_path: Path, backend: str) -> None:
    folder = tiny_model(tmp_path, "llama")
    with InferenceEngine(config(folder, backend, dtype="bfloat16")) as engine:
        alone = [engine.embed([prompt])[0] for prompt in PROMPTS]
        again = engine.embed(PROMPTS)  # from the prefix cache, in one batch
    options = {"max_chunk_tokens": 7, "block_size": 4, "lookahead": 1, "speculation": "suffix"}
    with InferenceEngine(config(folder, backend, dtype="bfloat16", **options)) as engine:
        request = engine.add_request([8, 9, 10], SamplingParams(max_tokens=40, ignore_eos=True))
        sampling = threading.Thread(target=lambda: [engine.step() for _ in range(100)])
        sampling.start()
        in_company = engine.embed(PROMPTS)
        sampling.join()
        assert engine.loop.watches == ()
        assert request not in engine.loop.sequences.by_id
    for rows in (again, in_company):
        for row, first in zip(rows, alone, strict=True):
            assert np.array_equal(row.numpy(), first.numpy())


def test_embedding_uses_updated_weights(tmp_path: Path) -> None:
    with InferenceEngine(config(tiny_model(tmp_path, "llama"), "cpu")) as engine:
        (before,) = engine.embed([[3, 4, 5]])
        engine.update_weights({"model.norm.weight": engine.model.params["norm"] * 2.0})
        (after,) = engine.embed([[3, 4, 5]])
    torch.testing.assert_close(after, 2 * before)


def test_embed_rejects_invalid_prompts(tmp_path: Path) -> None:
    with InferenceEngine(config(tiny_model(tmp_path, "llama"), "cpu")) as engine:
        with pytest.raises(RequestTooLarge):
            engine.embed([list(range(3, 68))])
        with pytest.raises(InvalidRequest):
            engine.embed([[]])
        assert engine.loop.watches == ()


def test_embed_runs_from_many_threads(tmp_path: Path) -> None:
    with InferenceEngine(config(tiny_model(tmp_path, "llama"), "cpu")) as engine:
        (expected,) = engine.embed([[3, 4, 5]])
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda _: engine.embed([[3, 4, 5]])[0], range(40)))
        assert all(torch.equal(row, expected) for row in rows)
        assert engine.loop.watches == ()
