"""Adapters on the CUDA backend in Triton's interpreter: captured steps give the bits of eager steps
and of requests by themselves, while adapters are loaded, updated, unloaded and merged.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_spec
from nano_inference.checkpoints.lora import LoraSettings, targets_of
from nano_inference.device import cuda_runner, graphs
from nano_inference.device.adapters import blank_adapter, columns_of, most_parts, reserved_bytes
from nano_inference.models.sharding.shard import shard_of
from nano_inference.ops.cuda.lora import bounds_of
from nano_inference.rl import score
from tests.device.cuda_cases import CheckingQueue
from tests.device.test_cuda_runner import bare, queue, runner
from tests.invariance.scenario import same_bits
from tests.models.tiny import tiny_model
from tests.weights.weight_cases import Build, drain

pytest.importorskip("triton")

PROMPTS = ([1, 2, 3, 4, 5], [7, 8], [9, 10, 11])


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckingQueue, "warms_up", False)  # to save time
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: CheckingQueue())
    # most batches are padded
    monkeypatch.setattr(graphs, "graph_sizes", lambda largest: (largest,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("llama"),
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=60,
        num_hidden_layers=1,
    )


def matrices(folder: Path, seed: int, kinds: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return random matrices for modules of these kinds, or of all kinds."""
    generator, rank = torch.Generator().manual_seed(seed), 3 + seed
    tensors: dict[str, Tensor] = {}
    for target in targets_of(load_spec(folder)).values():
        if kinds and target.kind not in kinds:
            continue
        out, width = target.slot.shape
        for half, shape in (("A", (rank, width)), ("B", (out, rank))):
            name = f"base_model.model.{target.module}.lora_{half}.weight"
            tensors[name] = torch.randn(shape, generator=generator) * 0.3
    return tensors


LAYERS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def make(build: Build, folder: Path, **changes: Any) -> InferenceEngine:
    options: dict[str, Any] = {
        "model_path": str(folder),
        "backend": "cuda",
        "batch_invariant": True,
        "lookahead": 1,
        "max_batch_size": 4,
        "max_model_len": 24,
        "max_loras": 2,
        "max_lora_rank": 8,
    }
    return build(**(options | changes))


def loaded(engine: InferenceEngine, folder: Path) -> InferenceEngine:
    """Load an adapter of all products, and one of some layers' products."""
    settings = LoraSettings(alpha=8.0)
    engine.load_adapter("whole", matrices(folder, 1), settings)
    engine.load_adapter("layers", matrices(folder, 4, LAYERS), settings)
    return engine


def params(adapter: str | None, seed: int, **options: Any) -> SamplingParams:
    defaults = {"max_tokens": 5, "ignore_eos": True, "raw_logprobs": True}
    return SamplingParams(**(defaults | options), seed=seed, adapter=adapter)


def add(engine: InferenceEngine, *names: str | None, **options: Any) -> None:
    for index, name in enumerate(names):
        engine.add_request(PROMPTS[index], params(name, index, max_tokens=3 + index, **options))


def bits(samples: list[TrainingSample]) -> dict[int, str]:
    return {sample.request_id: repr(bare(sample)) for sample in samples}


MIXES: list[tuple[str | None, ...]] = [
    ("layers", None, "layers"),
    ("whole", "layers", None),
]


@pytest.mark.thorough(cases=["names1"])
@pytest.mark.parametrize("names", MIXES)
def test_captured_adapters_have_the_bits_of_eager_steps(
    build: Build, folder: Path, names: tuple[str | None, ...]
) -> None:
    results: list[dict[int, str]] = []
    for changes in ({}, {"cuda_graphs": False}):
        engine = loaded(make(build, folder, **changes), folder)
        add(engine, *names, top_p=0.9 if names[0] == "whole" else 1.0)
        results.append(bits(drain(engine)))
    assert results[0] == results[1]
    assert runner(engine).num_replays == 0
    reference = loaded(make(build, folder, backend="reference", batch_invariant=None), folder)
    add(reference, *names, top_p=0.9 if names[0] == "whole" else 1.0)
    expected = {sample.request_id: sample for sample in drain(reference)}
    add(engine, *names, top_p=0.9 if names[0] == "whole" else 1.0)
    for sample in drain(engine):
        other = expected[sample.request_id - len(names)]
        assert sample.completion_tokens == other.completion_tokens
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.thorough
def test_adapted_decode_is_replayed_next_to_other_rows(build: Build, folder: Path) -> None:
    engine = loaded(make(build, folder), folder)
    add(engine, "whole", None, "layers")
    together = {sample.request_id: sample for sample in drain(engine)}
    assert runner(engine).num_replays >= 4
    # a step with prompts; decodes: a forward and two draws without adapters, and a forward and four
    # draws with them
    assert queue(engine).num_captures == 1 + 3 + 5
    assert runner(engine).num_eager_steps == 0
    for index, name in enumerate(("whole", None, "layers")):
        lonely = loaded(make(build, folder), folder)
        lonely.add_request(PROMPTS[index], params(name, index, max_tokens=3 + index))
        (alone,) = drain(lonely)
        assert same_bits(alone, together[index])


@pytest.mark.thorough
def test_adapters_change_without_a_new_capture(build: Build, folder: Path) -> None:
    engine = loaded(make(build, folder, enable_prefix_caching=False), folder)
    settings, ask = LoraSettings(alpha=8.0), params("layers", 3)
    (first,) = engine.generate([PROMPTS[0]], ask)
    captures = queue(engine).num_captures
    engine.add_request(PROMPTS[0], ask)
    for _ in range(3):
        engine.step()
    engine.load_adapter("layers", matrices(folder, 2, LAYERS), settings)
    (running,) = drain(engine)
    assert running.logprobs == first.logprobs, "it finishes with its version"
    (updated,) = engine.generate([PROMPTS[0]], ask)
    eager = make(build, folder, cuda_graphs=False)
    eager.load_adapter("layers", matrices(folder, 2, LAYERS), settings)
    (expected,) = eager.generate([PROMPTS[0]], ask)
    assert updated.logprobs == expected.logprobs != first.logprobs
    engine.unload_adapter("whole")
    engine.load_adapter("other", matrices(folder, 4, LAYERS), settings)
    (again,) = engine.generate([PROMPTS[0]], params("other", 3))
    assert again.logprobs == first.logprobs, "the same matrices under another name"
    assert queue(engine).num_captures == captures


@pytest.mark.thorough
def test_steps_without_adapters_compute_none(
    build: Build, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(make(build, folder), folder)
    (expected,) = make(build, folder, max_loras=0).generate([PROMPTS[0]], params(None, 1))
    monkeypatch.setattr("nano_inference.ops.cuda.lora._added", None)
    monkeypatch.setattr("nano_inference.ops.cuda.lora._grouped", None)
    captured = runner(engine)._graphs
    assert captured is not None
    captured.decodes.adapters.kinds = ((),)  # capture only steps without adapters
    (sample,) = engine.generate([PROMPTS[0]], params(None, 1))
    assert repr(bare(sample)) == repr(bare(expected))
    assert runner(engine).num_replays > 2


@pytest.mark.thorough
def test_samples_with_adapters_are_scored_bit_for_bit(build: Build, folder: Path) -> None:
    engine = loaded(make(build, folder), folder)
    for name in ("whole", "layers"):
        (sample,) = engine.generate([PROMPTS[0]], params(name, 2))
        tokens = [*sample.prompt_tokens, *sample.completion_tokens]
        (scores,) = score(engine, [tokens], from_position=len(PROMPTS[0]), adapter=name)
        assert scores.tolist() == list(sample.raw_logprobs or ())


@pytest.mark.thorough
def test_merge_on_the_kernels_restores_the_weights(build: Build, folder: Path) -> None:
    engine = loaded(make(build, folder, enable_prefix_caching=False), folder)
    (plain,) = engine.generate([PROMPTS[0]], params(None, 1))
    (adapted,) = engine.generate([PROMPTS[0]], params("layers", 1))
    engine.merge_adapter("layers")
    (merged,) = engine.generate([PROMPTS[0]], params("layers", 1))
    assert merged.completion_tokens == adapted.completion_tokens
    assert merged.logprobs == pytest.approx(adapted.logprobs, abs=1e-4)
    engine.unmerge_adapter()
    (after,) = engine.generate([PROMPTS[0]], params(None, 1))
    assert after.logprobs == plain.logprobs


def test_model_bounds_cover_every_adapter(folder: Path) -> None:
    part = shard_of(load_spec(folder))
    blank = blank_adapter(part, 8, torch.device("cpu"))
    assert {*blank.parts} == {target.param for target in targets_of(part.whole).values()}
    bounds = bounds_of(blank.parts.values())
    assert (bounds.parts, bounds.rank) == (most_parts(part), 8)
    assert most_parts(part) == 3  # q, k and v
    assert bounds.aligned == (not any(column % 16 for column in columns_of(part)))


def test_memory_is_reserved_for_the_largest_adapters(build: Build, folder: Path) -> None:
    engine = make(build, folder, max_loras=1)
    tensors = matrices(folder, 5)  # of rank 8, the highest
    info = engine.load_adapter("whole", tensors)
    part = engine.model.part
    assert reserved_bytes(engine.config, part) == 2 * info.num_bytes
    assert reserved_bytes(make(build, folder, max_loras=0).config, part) == 0
