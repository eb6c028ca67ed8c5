"""The library of an engine's arrays changes no bit: an engine on the CPU kernels computes the same
with host arrays and with torch tensors.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.arrays import HostArray, as_host, is_tensor
from nano_inference.checkpoints.loading import load_spec
from nano_inference.device import backends
from nano_inference.drafts.sources import GUESSED
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from tests.checkpoints.quantisers import write_quantised
from tests.engine.test_adapters import matrices
from tests.invariance.scenario import threads_restored
from tests.models.tiny import llama_config, llama_weights, tiny_model

SHARED = tuple(range(5, 45))  # a prefix of several blocks
PROMPTS = [SHARED, (*SHARED, 3, 9), (*SHARED[:30], 7), (11,), tuple(range(250, 100, -2))]
DRAWN = SamplingParams(max_tokens=10, ignore_eos=True, seed=5, raw_logprobs=True, top_logprobs=3)
PARAMS = [
    DRAWN,
    replace(DRAWN, top_k=9, top_p=0.9, min_p=0.01, temperature=1.3),
    replace(DRAWN, presence_penalty=0.3, repetition_penalty=1.1, logit_bias={4: 2.0}),
    replace(DRAWN, temperature=0.0, prompt_logprobs=True),
    replace(DRAWN, prompt_logprobs=True, prompt_top_logprobs=2),
]


@dataclass(frozen=True)
class Case:
    """A model, the options of its engine, and what the run does beyond generating."""

    family: str = "llama"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    quantiser: str | None = None
    adapter: bool = False
    reference: bool = False
    updated: bool = True


CASES = {
    "float32": Case(options={"dtype": "float32"}),
    "bfloat16": Case(),
    "int8": Case(options={"quantization": "int8"}),
    "int4": Case(options={"quantization": "int4"}),
    "int8 keys and values": Case(options={"kv_cache_dtype": "int8"}),
    "tiles": Case(options={"cpu_sums": "tiles"}),
    "own draft": Case(options={"draft_model": "self", "draft_layers": 1, "max_drafts": 3}),
    "reference model": Case(reference=True),
    "adapter": Case(options={"max_loras": 1}, adapter=True),
    "adapter, int8": Case(options={"max_loras": 1, "quantization": "int8"}, adapter=True),
    "int8 of a file": Case(
        options={"quantization": "file"}, quantiser="compressed-int8", updated=False
    ),
    "gptq of a file": Case(options={"quantization": "file"}, quantiser="gptq", updated=False),
    "windows": Case("gemma3"),
    "caps": Case("gemma2", {"dtype": "float32"}),
    "biases": Case("qwen2", {"kv_cache_dtype": "int8"}),
    "half of the pairs": Case("glm4"),
    "experts": Case("qwen3-moe", {"quantization": "int8"}),
    "shared keys": Case("gemma4"),
    "experts with shared keys": Case("gemma4-moe", {"dtype": "float32"}),
    "latents": Case("deepseek-v3"),
    "convolutions": Case("lfm2"),
    "states": Case("qwen3_5"),
}


QUICK = ("bfloat16", "int8 keys and values", "adapter, int8", "gptq of a file", "latents", "states")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with threads_restored():
        yield


def written(case: Case, folder: Path) -> Path:
    if case.quantiser is None:
        return tiny_model(folder, case.family)
    config = llama_config(hidden=128, inner=128)
    write_quantised(folder, case.quantiser, config, llama_weights(config))
    return folder


def new_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return random values for a third of the tensors."""
    generator = torch.Generator().manual_seed(8)
    chosen = list(slots(param_table(load_spec(folder))).items())[::3]
    return {
        name: torch.randn(slot.shape, generator=generator) * 0.2 + (len(slot.shape) == 1)
        for name, slot in chosen
    }


def drained(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    return samples


def run(case: Case, folder: Path) -> tuple[list[TrainingSample], str, dict[str, str], type]:
    """Return the samples, hashes of final hidden states and of the weights, and the kind of the
    weights' arrays.
    """
    options: dict[str, Any] = {"dtype": "bfloat16", "block_size": 8} | case.options
    if case.reference:
        options["ref_model_path"] = str(folder)
    config = EngineConfig(
        str(folder), backend="cpu", device="cpu", num_threads=2, kv_cache_memory=2**22, **options
    )
    samples: list[TrainingSample] = []
    with InferenceEngine(config) as engine:
        params = PARAMS
        if case.adapter:
            engine.load_adapter("own", matrices(folder, 1))
            params = [replace(each, adapter="own") for each in PARAMS[::2]] + PARAMS[1::2]
        for _ in range(2):  # the second time with prefixes in the cache
            samples += engine.generate([*map(list, PROMPTS)], params)
        assert any(each.cached_tokens for each in samples)
        for prompt, sampling in zip(PROMPTS, params, strict=True):
            engine.add_request(list(prompt), sampling, num_samples=2)
        for _ in range(4):
            samples += engine.step()
        if case.updated:  # while requests run
            engine.update_weights(new_weights(folder), kv_policy="recompute")
        if case.adapter:
            engine.load_adapter("own", matrices(folder, 2))
        samples += drained(engine)
        states = engine.embed([list(prompt) for prompt in PROMPTS])
        digest = hashlib.sha256(b"".join(as_host(each).tobytes() for each in states)).hexdigest()
        checksum = engine.weights_checksum()
        (kind,) = {
            HostArray if isinstance(each, HostArray) else torch.Tensor
            for each in engine.model.params.values()
            if is_tensor(each)
        }
    samples.sort(key=lambda each: (each.request_id, each.sample_index))
    return samples, digest, checksum, kind


@pytest.mark.thorough(but=QUICK)
@pytest.mark.parametrize("name", CASES)
def test_tensors_and_host_arrays_compute_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    folder = written(case, tmp_path / "model")
    # the update in flight follows a number of steps, so drafts must not depend on measured times
    monkeypatch.setattr("nano_inference.engine.engine.measure_costs", lambda *_: GUESSED)
    *on_host, kind = run(case, folder)
    assert kind is HostArray
    monkeypatch.setattr(backends, "_runs_on_host", lambda _: False)
    *on_torch, kind = run(case, folder)
    assert kind is torch.Tensor
    assert on_host == on_torch
