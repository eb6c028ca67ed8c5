"""Invariance for 8-bit and 4-bit weights: no bit depends on the schedule, in any kind of layer."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.gguf.file import describe_gguf
from nano_inference.config import Backend
from nano_inference.models.parameters.storage import formats_of
from tests.checkpoints.hf_to_gguf import TOKEN_IDS, metadata_of, tensors_of
from tests.checkpoints.quantisers import write_quantised
from tests.invariance.scenario import Request, Schedule, require_same_samples, run
from tests.models.tiny import family_weights, llama_config, tiny_model
from tests.models.tiny_gguf import gguf, write_gguf

BYTES = 2**10  # per token; at least the size for the tiny models
PARAMS = SamplingParams(max_tokens=9, raw_logprobs=True, prompt_logprobs=True, ignore_eos=True)
WORK = [
    Request(
        tuple(range(3, 3 + length)), replace(PARAMS, seed=length, temperature=warm), count, arrives
    )
    for length, warm, count, arrives in ((40, 0.7, 2, 0), (33, 0.0, 1, 0), (70, 1.0, 1, 3))
]
ALONE = Schedule(num_blocks=16, num_threads=1)
SCHEDULES = {
    "tight": Schedule(block_size=4, num_blocks=24, max_tokens_per_batch=17, max_batch_size=3),
    "chunks": Schedule(num_blocks=24, max_chunk_tokens=7, cache_type="radix", lookahead=1),
    "drafts": Schedule(num_blocks=24, drafts="real", enable_prefix_caching=False),
}
STATES = ("qwen3_5", "lfm2")  # without drafts
FAMILIES: dict[Backend, dict[str, tuple[str, ...]]] = {  # with experts, states, latents, tied heads
    "cpu": {
        "int8": ("llama", "qwen3_5", "deepseek-v3"),
        "int8-32": ("gemma3", "lfm2", "qwen3-moe"),
        "int4": ("llama", "deepseek-v3", "gemma3"),
        "file": ("Q4_K", "Q8_0", "awq-64", "compressed-int8"),  # llama
    },
    "reference": {
        "int8": ("llama",),
        "int8-32": ("lfm2", "gemma3"),
        "int4": ("deepseek-v3",),
        "file": ("awq-64",),
    },
}
CASES = [
    (backend, quantization, family)
    for backend, by_format in FAMILIES.items()
    for quantization, families in by_format.items()
    for family in families
]


def engine(quantization: Any, config: EngineConfig) -> AbstractContextManager[InferenceEngine]:
    made = InferenceEngine(replace(config, quantization=quantization))
    assert {"layers.0.qkv", "layers.0.down"} & formats_of(made.model.params).keys()
    return made


def model_of(folder: Path, quantization: str, family: str) -> Path:
    """Return a Llama with quantized matrices of a kind, loaded from files."""
    if quantization != "file":
        return tiny_model(folder, family)
    config = llama_config(hidden=256, inner=256)
    weights = family_weights(config)
    if not family.startswith("Q"):
        write_quantised(folder / "coded", family, config, weights)
        return folder / "coded"
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    tensors = tensors_of("llama", config, arrays)
    keys = metadata_of("llama", config).items()
    metadata = {f"llama.{key}": value for key, value in keys if value is not None}
    kind = gguf.GGMLQuantizationType[family]
    raw = {name: (blocks(each, kind), kind) for name, each in tensors.items() if each.ndim > 1}
    path = folder / "m.gguf"
    write_gguf(path, tensors, {**metadata, **TOKEN_IDS}, raw=raw)
    return describe_gguf(path, folder / "cache", tokenizer_writer=lambda *_: None, coded=True)


def blocks(weight: np.ndarray, kind: Any) -> np.ndarray:
    """Return a matrix in blocks. The `gguf` package cannot write Q4_K, so its blocks are random
    with about these sizes.
    """
    if kind.name != "Q4_K":
        return gguf.quantize(weight, kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(weight.size)
    codes = drawn.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=np.uint8)
    for at, number in ((0, 1e-3), (2, 7.5e-3)):  # of a scale and of a minimum
        codes[..., at : at + 2] = np.array([number], np.float16).view(np.uint8)
    return codes.reshape(len(weight), -1)


@pytest.mark.thorough(
    cases=[
        "cpu-int8-qwen3_5",
        "cpu-file-compressed-int8",
        "reference-int8-llama",
        "reference-int8-32-lfm2",
        "reference-int8-32-gemma3",
        "reference-int4-deepseek-v3",
        "reference-file-awq-64",
    ]
)
@pytest.mark.parametrize(("backend", "quantization", "family"), CASES)
def test_same_bits_under_any_schedule(
    tmp_path: Path, backend: Backend, quantization: str, family: str
) -> None:
    folder, make = model_of(tmp_path, quantization, family), partial(engine, quantization)
    expected: dict[tuple[int, int], Any] = {}
    for number, request in enumerate(WORK):
        lonely = [replace(request, arrives=0)]
        samples, _ = run(folder, "bfloat16", lonely, replace(ALONE, backend=backend), BYTES, make)
        expected |= {(number, index): sample for (_, index), sample in samples.items()}
    known = {key: sample.completion_tokens for key, sample in expected.items()}
    for schedule in SCHEDULES.values():
        if schedule.drafts == "none" or family not in STATES:
            schedule = replace(schedule, backend=backend)
            together, _ = run(folder, "bfloat16", WORK, schedule, BYTES, make, known=known)
            require_same_samples(WORK, together, expected)
