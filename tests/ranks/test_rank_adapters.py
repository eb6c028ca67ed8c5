"""Adapters on several ranks: the bits of one rank, updates, unloads, merges and copies."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("msgspec")

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    LoraSettings,
    SamplingParams,
    TrainingSample,
)
from nano_inference.errors import AdapterError
from nano_inference.ops.lora import Adapter
from tests.engine.test_adapters import matrices
from tests.models.tiny import tiny_llama
from tests.ranks.rank_threads import ThreadLauncher

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 9], [11, 12]]
MESHES = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 4},
    {"tensor_parallel": 2, "backend": "cpu"},
    {"tensor_parallel": 2, "backend": "cpu", "dtype": "bfloat16"},
    {"pipeline_parallel": 2},
    {"context_parallel": 2, "block_size": 1024, "kv_cache_memory": 2**24},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "backend": "cpu"},
]


def params(adapter: str | None, seed: int = 0, **options: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.9, "ignore_eos": True}
    return SamplingParams(adapter=adapter, seed=seed, **(fields | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("ranks")
    yield tiny_llama(folder, hidden=96, num_heads=6, num_kv_heads=3, std=0.1, max_position=1024)
    torch.set_num_threads(threads)


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[InferenceEngine]:
    fields: dict[str, Any] = {"device": "cpu", "backend": "reference", "num_threads": 1}
    fields |= {"seed": 3, "kv_cache_memory": 2**20, "max_model_len": 64, "max_loras": 2}
    config = EngineConfig(str(folder), **(fields | options))
    shared = any(option.endswith("_parallel") for option in options)
    with InferenceEngine(config, ThreadLauncher() if shared else None) as engine:
        yield engine


def rest(engine: InferenceEngine) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    engine.shared.require_alive()
    return samples


def told(samples: list[TrainingSample]) -> list[Any]:
    return sorted(
        (
            *(sample.request_id, sample.sample_index, sample.completion_tokens),
            *(sample.logprobs, sample.prompt_logprobs, sample.adapter_versions),
        )
        for sample in samples
    )


def life(engine: InferenceEngine, folder: Path, policies: tuple[Any, ...]) -> list[Any]:
    """Serve requests with two adapters and none next to each other, and update an adapter amid
    them.
    """
    results: list[Any] = []
    engine.load_adapter("left", matrices(folder, 1))
    engine.load_adapter("right", matrices(folder, 2))
    for policy in policies:
        for index, name in enumerate(("left", None, "right")):
            asked = params(name, index, prompt_logprobs=index == 2)
            engine.add_request(PROMPTS[index], asked, num_samples=1 + index)
        samples = [sample for _ in range(3) for sample in engine.step()]
        engine.load_adapter("left", matrices(folder, 3 + len(results)), kv_policy=policy)
        engine.add_request(PROMPTS[1], params("left", 7))
        results.append(told([*samples, *rest(engine)]))
    return results


@pytest.mark.thorough(but=["tensor_parallel-backend"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh))
def test_adapters_on_ranks_match_one_rank(folder: Path, mesh: dict[str, Any]) -> None:
    alike = {key: mesh[key] for key in ("backend", "dtype") if key in mesh}
    # stages have other tokens in flight when an update comes
    at_once = ("recompute", "keep") if "pipeline_parallel" not in mesh else ()
    policies = ("finish_old", *at_once)
    with engine_of(folder, **alike) as engine:
        expected = life(engine, folder, policies)
        plain = engine.generate(PROMPTS, params(None), progress=False)
    assert {line[2] for line in expected[0]}.isdisjoint(s.completion_tokens for s in plain[::2])
    with engine_of(folder, **mesh) as engine:
        assert life(engine, folder, policies) == expected
        again = engine.generate(PROMPTS, params(None), progress=False)
    assert [s.logprobs for s in again] == [s.logprobs for s in plain]


def test_ranks_drop_adapters_that_no_request_uses(folder: Path) -> None:
    def held() -> list[int]:
        gc.collect()
        every = (each for each in gc.get_objects() if type(each) is Adapter)
        return sorted(each.version for each in every if each.name == "dropped")

    with engine_of(folder, tensor_parallel=2) as engine:
        for seed in range(3):
            engine.load_adapter("dropped", matrices(folder, seed))
            engine.generate([PROMPTS[0]], params("dropped"), progress=False)
        assert held() == [3, 3]  # rank 0's and rank 1's
        engine.unload_adapter("dropped")
        engine.generate([PROMPTS[0]], params(None), progress=False)  # its steps bring the news
        assert held() == []


def test_ranks_reject_matrices_that_are_not_finite(folder: Path) -> None:
    """Rank 1 alone holds the wrong number."""
    wrong = matrices(folder, 1)
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight"
    wrong[name][-1, 0] = torch.nan
    with engine_of(folder, tensor_parallel=2) as engine:
        with pytest.raises(AdapterError, match=r"lora_B of .*gate_proj.* is not finite"):
            engine.load_adapter("own", wrong)
        assert engine.adapters() == []
        engine.load_adapter("own", matrices(folder, 1))
        assert engine.generate([PROMPTS[0]], params("own"), progress=False)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_ranks_compare_the_head_of_an_adapter(folder: Path, mesh: dict[str, Any]) -> None:
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    name = "base_model.model.lm_head.base_layer.weight"
    with engine_of(folder, **mesh) as engine:
        engine.load_adapter("own", {**matrices(folder, 1), name: head}, LoraSettings(4))
        for changed in (head * 1.5, head[1:]):
            with pytest.raises(AdapterError, match="differs from the model's head"):
                engine.load_adapter("no", {**matrices(folder, 1), name: changed}, LoraSettings(4))
    with engine_of(folder, quantization="int8", **mesh) as engine:
        with pytest.raises(AdapterError, match=r"codes on several ranks; use one rank\. Or save"):
            engine.load_adapter("no", {**matrices(folder, 1), name: head}, LoraSettings(4))
        assert not engine.adapters()


def test_context_ranks_take_adapters_of_their_rows(folder: Path) -> None:
    """Both ranks hold rows of each prompt."""
    prompts = [[(7 * i + 3 * k) % 290 + 3 for i in range(600)] for k in range(3)]
    sizes = {"max_model_len": 1024, "block_size": 1024, "kv_cache_memory": 2**25}

    def results(engine: InferenceEngine) -> list[Any]:
        engine.load_adapter("left", matrices(folder, 1))
        engine.load_adapter("right", matrices(folder, 2))
        for index, name in enumerate(("left", None, "right")):
            asked = params(name, index, prompt_logprobs=True, max_tokens=2)
            engine.add_request(prompts[index], asked)
        return told(rest(engine))

    with engine_of(folder, **sizes) as engine:
        expected = results(engine)
    with engine_of(folder, context_parallel=2, **sizes) as engine:
        assert results(engine) == expected


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[4]], ids=lambda mesh: "-".join(mesh))
def test_merges_and_copies_on_ranks_match_one_rank(
    folder: Path, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    def results(engine: InferenceEngine, path: str) -> list[Any]:
        engine.merge_adapter("own")
        merged = engine.generate(PROMPTS, params("own"), progress=False)
        sums = engine.weights_checksum()
        engine.unmerge_adapter()
        engine.adapter_table.copy_to("own", path)
        return [[s.logprobs for s in merged], sums, engine.weights_checksum()]

    inner = {key: each for key, each in matrices(folder, 1).items() if "lm_head" not in key}
    with engine_of(folder) as engine:
        engine.load_adapter("own", inner)
        expected = results(engine, str(tmp_path / "one"))
        served = engine.generate(PROMPTS, params("own"), progress=False)
    with engine_of(folder, **mesh) as engine:
        engine.load_adapter("own", inner)
        assert results(engine, str(tmp_path / "ranks")) == expected
    with engine_of(folder, **mesh) as engine:
        engine.adapter_table.copy_from(str(tmp_path / "one"))
        copied = engine.generate(PROMPTS, params("own"), progress=False)
    assert [s.logprobs for s in copied] == [s.logprobs for s in served]
    one, ranks = (load_file(tmp_path / name) for name in ("one", "ranks"))
    assert one.keys() == ranks.keys()
    assert all(torch.equal(ranks[name], tensor) for name, tensor in one.items())
