"""The engine on a card: graphs, lookahead, updates under graphs, sleep and wake change no bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import InferenceEngine, LoraSettings, SamplingParams, TrainingSample
from nano_inference.device.cuda_runner import CudaRunner
from tests.gpu.target import Target, adapter_tensors
from tests.models.tiny import Weights, llama_config, llama_weights, tiny_llama, tiny_model

pytestmark = pytest.mark.gpu

VOCAB = 300
SMALL = {"layers": 1, "hidden": 32, "inner": 48, "num_heads": 2, "num_kv_heads": 1}


@pytest.fixture(scope="module")
def sizes(target: Target) -> dict[str, Any]:
    return (
        SMALL
        if target.dry
        else {"layers": 3, "hidden": 128, "inner": 256, "num_heads": 8, "num_kv_heads": 2}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB, **sizes)


def ask(target: Target, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of all kinds. Sequences end one by one, so every number of
    running sequences occurs.
    """
    lengths = [target.size(20 + 13 * (i % 7), 3 + i % 2) for i in range(count)]
    prompts = [
        [(5 * i + 7 * j) % 290 + 3 for j in range(length)] for i, length in enumerate(lengths)
    ]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 40},
        {"raw_logprobs": True},
    ]
    params = [
        SamplingParams(
            max_tokens=target.size(6 + 3 * i, 2 + i),
            seed=i,
            ignore_eos=True,
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]
    return prompts, params


def bits(samples: list[TrainingSample]) -> list[tuple[Any, ...]]:
    return [(s.completion_tokens, s.logprobs, s.raw_logprobs, s.log_kept_mass) for s in samples]


def num_replays(engine: InferenceEngine) -> int:
    """Return the number of steps replayed from a graph."""
    assert isinstance(engine.runner, CudaRunner)
    return engine.runner.num_replays


def complete(
    model: Path, target: Target, dtype: str = "float32", **changes: Any
) -> list[tuple[Any, ...]]:
    with InferenceEngine(target.config(model, dtype, **changes)) as engine:
        return bits(engine.generate(*ask(target, target.size(24, 3)), progress=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_graphs_equal_eager(model: Path, target: Target, dtype: str) -> None:
    if target.dry and dtype != "float32":
        pytest.skip("a dry run has one dtype")
    with InferenceEngine(target.config(model, dtype)) as engine:
        replayed = bits(engine.generate(*ask(target, target.size(24, 3)), progress=False))
        assert num_replays(engine) > 0
    assert complete(model, target, dtype, cuda_graphs=False) == replayed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_under_graphs(model: Path, target: Target, dtype: str) -> None:
    """Captured steps equal eager steps, and serve adapters that were loaded after the capture."""
    if target.dry and dtype != "float32":
        pytest.skip("a dry run has one dtype")
    prompts, params = ask(target, target.size(24, 3))
    names = (None, "first", "second")
    params = [replace(one, adapter=names[i % 3]) for i, one in enumerate(params)]
    results: list[list[tuple[Any, ...]]] = []
    for graphs in (True, False):
        config = target.config(model, dtype, max_loras=2, max_lora_rank=16, cuda_graphs=graphs)
        with InferenceEngine(config) as engine:
            for seed, name in enumerate(names[1:]):
                engine.load_adapter(name, adapter_tensors(model, seed), LoraSettings(alpha=8.0))
            results.append(bits(engine.generate(prompts, params, progress=False)))
            engine.load_adapter("first", adapter_tensors(model, 7), LoraSettings(alpha=8.0))
            results.append(bits(engine.generate(prompts, params, progress=False)))
            assert (num_replays(engine) > 0) == graphs
    assert results[0] == results[2]
    assert results[1] == results[3]
    assert results[0] != results[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lookahead_changes_no_bit(model: Path, target: Target, dtype: str) -> None:
    if target.dry and dtype != "float32":
        pytest.skip("a dry run has one dtype")
    assert complete(model, target, dtype, lookahead=0) == complete(
        model, target, dtype, lookahead=1
    )


def test_second_run_equals_the_first(model: Path, target: Target) -> None:
    """No state leaks from one run to the next, also with the fast kernels if the schedule is the
    same.
    """
    changes = {"batch_invariant": False, "enable_prefix_caching": False}
    with InferenceEngine(target.config(model, **changes)) as engine:
        first = bits(engine.generate(*ask(target, target.size(24, 3)), progress=False))
        assert bits(engine.generate(*ask(target, target.size(24, 3)), progress=False)) == first


@pytest.mark.parametrize("policy", ["recompute", "keep", "finish_old"])
def test_new_weights_under_graphs(
    model: Path, target: Target, sizes: dict[str, Any], tmp_path: Path, policy: Any
) -> None:
    """Graphs record addresses, so an in-place update takes effect. Samples equal those of an engine
    started with the new weights.
    """
    weights = new_weights(sizes)
    with InferenceEngine(target.config(model)) as engine:
        engine.generate(*ask(target, 2), progress=False)
        request = engine.add_request(
            [3, 4, 5], SamplingParams(max_tokens=target.size(30, 4), seed=1, ignore_eos=True)
        )
        for _ in range(3):
            engine.step()
        engine.update_weights(weights, kv_policy=policy)
        while engine.has_pending():
            engine.step()
        assert request >= 0
        replays = num_replays(engine)
        updated = bits(engine.generate(*ask(target, target.size(24, 3)), progress=False))
        assert num_replays(engine) > replays
    folder = tiny_llama(tmp_path, vocab_size=VOCAB, seed=1, **sizes)
    assert complete(folder, target) == updated


def new_weights(sizes: dict[str, Any]) -> Weights:
    return llama_weights(llama_config(vocab_size=VOCAB, **sizes), seed=1)


@pytest.mark.parametrize("weights", [False, True])
def test_sleep_and_wake_under_graphs(model: Path, target: Target, weights: bool) -> None:
    """Memory keeps its addresses, and its contents if the weights sleep."""
    with InferenceEngine(target.config(model)) as engine:
        before = bits(engine.generate(*ask(target, target.size(8, 2)), progress=False))
        used, addresses = used_bytes(target), addresses_of(engine)
        for _ in range(3):
            graphs = dict(engine.model.recorded)
            engine.sleep(weights=weights)
            if not target.dry:
                assert engine.runner.pools is not None  # pyright: ignore[reportAttributeAccessIssue]
                assert used_bytes(target) < used, "no memory was freed"
            engine.wake()
            assert addresses_of(engine) == addresses
            assert engine.model.recorded == graphs
            assert bits(engine.generate(*ask(target, target.size(8, 2)), progress=False)) == before


def addresses_of(engine: InferenceEngine) -> list[int]:
    tensors = [*engine.model.params.values(), *engine.runner.storage.tensors]
    return [tensor.data_ptr() for tensor in tensors]


def used_bytes(target: Target) -> int:
    if target.dry:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows_under_graphs(tmp_path: Path, target: Target, family: str) -> None:
    """Blocks leave the window and their units are reused while graphs, which read the map of units,
    are replayed.
    """
    if target.dry:
        pytest.skip("too slow in the interpreter")
    model = tiny_model(tmp_path, family)
    prompts, params = (
        [[3 + i] * 30 for i in range(6)],
        SamplingParams(max_tokens=120, seed=1, ignore_eos=True),
    )
    results = []
    for graphs in (True, False):
        with InferenceEngine(
            target.config(model, cuda_graphs=graphs, kv_cache_memory=1 << 19)
        ) as engine:
            results.append(bits(engine.generate(prompts, params, progress=False)))
    assert results[0] == results[1]
