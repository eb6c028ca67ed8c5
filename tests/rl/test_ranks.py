"""Training and replay on engines whose ranks share the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    LoraSettings,
    SamplingParams,
    TrainingSample,
)
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl import AdamW, LoraPolicy, PolicyModel, differences, one_rank, replay
from tests.engine.test_adapters import matrices
from tests.models.tiny import tiny_llama
from tests.ranks.rank_threads import ThreadLauncher
from tests.rl.training import bits

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 9], [11]]
PARAMS = SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True)
MESHES = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "backend": "cpu"},
    {"pipeline_parallel": 2},
    {"context_parallel": 2, "block_size": 1024, "kv_cache_memory": 2**24},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield tiny_llama(
        tmp_path_factory.mktemp("ranks"), hidden=96, num_heads=6, num_kv_heads=3, std=0.1
    )
    torch.set_num_threads(threads)


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[InferenceEngine]:
    defaults: dict[str, Any] = {"device": "cpu", "backend": "reference", "num_threads": 1}
    defaults |= {"seed": 3, "kv_cache_memory": 2**20, "max_model_len": 64}
    config = EngineConfig(str(folder), **(defaults | options))
    shared = any(option.endswith("_parallel") for option in options)
    with InferenceEngine(config, ThreadLauncher() if shared else None) as engine:
        yield engine


def trained(engine: InferenceEngine) -> tuple[list[TrainingSample], dict[str, torch.Tensor]]:
    """Do two steps of training, and return all samples and the last parameters."""
    policy = PolicyModel(engine)
    optimizer = AdamW(policy.parameters(), lr=1e-2)
    samples: list[TrainingSample] = []
    for _ in range(2):
        drawn = engine.generate(PROMPTS, PARAMS, progress=False)
        samples += drawn
        values = policy.logprobs(
            [sample.prompt_tokens + sample.completion_tokens for sample in drawn],
            from_position=[len(sample.prompt_tokens) for sample in drawn],
            temperature=0.9,
        )
        for value, sample in zip(values, drawn, strict=True):
            assert bits(value) == bits(torch.tensor(sample.logprobs))
        torch.cat([value * (1 + index) for index, value in enumerate(values)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        policy.publish()
    policy.close()
    return samples, {name: param.detach() for name, param in policy.named_parameters()}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh))
def test_policy_trains_on_ranks_as_on_one(folder: Path, mesh: dict[str, Any]) -> None:
    with engine_of(folder, backend=mesh.get("backend", "reference")) as engine:
        samples, params = trained(engine)
    with engine_of(folder, **mesh) as engine:
        shared_samples, shared_params = trained(engine)
        assert engine.get_weight_version() == 2
    assert [(s.completion_tokens, s.logprobs) for s in samples] == [
        (s.completion_tokens, s.logprobs) for s in shared_samples
    ]
    assert all(torch.equal(shared_params[name], param) for name, param in params.items())


def adapted(engine: InferenceEngine) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Do two steps of training an adapter, with an update of the base weights in between, and
    return all samples and the last matrices.
    """
    policy = LoraPolicy(engine, LoraSettings(rank=4))
    optimizer = AdamW(policy.parameters(), lr=5e-2)
    params = replace(PARAMS, adapter="trainer")
    drawn: list[Any] = []
    for _ in range(3):
        policy.publish()
        samples = engine.generate(PROMPTS, params, progress=False)
        drawn += [(sample.completion_tokens, sample.logprobs) for sample in samples]
        values = policy.logprobs(
            [sample.prompt_tokens + sample.completion_tokens for sample in samples],
            from_position=[len(sample.prompt_tokens) for sample in samples],
            temperature=0.9,
        )
        for value, sample in zip(values, samples, strict=True):
            assert bits(value) == bits(torch.tensor(sample.logprobs))
        torch.cat([value * (1 + index) for index, value in enumerate(values)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = engine.weight_sync.state_dict()
        engine.update_weights({name: tensor * 1.01 for name, tensor in weights.items()})
        engine.step()
    policy.close()
    return drawn, {name: param.detach() for name, param in policy.named_parameters()}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(mesh))
def test_adapter_trains_on_ranks_as_on_one(folder: Path, mesh: dict[str, Any]) -> None:
    with engine_of(folder, backend=mesh.get("backend", "reference"), max_loras=1) as engine:
        samples, params = adapted(engine)
    with engine_of(folder, max_loras=1, **mesh) as engine:
        shared_samples, shared_params = adapted(engine)
    assert shared_samples == samples
    assert all(torch.equal(shared_params[name], param) for name, param in params.items())
    assert any(bool(param.any()) for name, param in params.items() if "lora_B" in name)


def test_engine_of_one_rank_replays_adapters(folder: Path) -> None:
    with engine_of(folder, tensor_parallel=2, max_loras=1) as engine:
        engine.load_adapter("own", matrices(folder, 1), version=5)
        params = replace(PARAMS, adapter="own")
        (sample,) = engine.generate(PROMPTS[:1], params, progress=False)
        with one_rank(engine) as whole:
            assert whole.adapters() == engine.adapters()
            assert not differences(sample, replay(whole, sample))


def test_engine_of_one_rank_replays_live_weights(folder: Path) -> None:
    with engine_of(folder, tensor_parallel=2) as engine:
        policy = PolicyModel(engine)
        with torch.no_grad():
            for param in policy.parameters():
                param.mul_(1.25)
        policy.publish(version=7)
        (sample,) = engine.generate(PROMPTS[:1], PARAMS, progress=False)
        with pytest.raises(InvalidRequest, match=r"several ranks.*rl\.one_rank\(engine\)"):
            replay(engine, sample)
        with one_rank(engine) as whole:
            assert whole.get_weight_version() == 7
            assert whole.weights_checksum() == engine.weights_checksum()
            require_one_rank(whole.runner, "replay")
            assert not differences(sample, replay(whole, sample))
        assert policy.logprobs([sample.prompt_tokens])[0].shape == (3,)


def test_closed_policy_of_ranks_still_saves(folder: Path, tmp_path: Path) -> None:
    with engine_of(folder, tensor_parallel=2) as engine:
        policy = PolicyModel(engine)
        policy.close()
        policy.save_pretrained(tmp_path / "saved")
        policy.publish()
        with pytest.raises(InvalidRequest, match="closed"):
            policy.logprobs([[1, 2, 3]])
    with engine_of(tmp_path / "saved") as saved:
        assert saved.generate([[1, 2]], PARAMS, progress=False)


def test_ranks_with_other_bits_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(folder, tensor_parallel=2) as engine:
        summed = replace(engine.numerics, tensor_parallel=2)
        monkeypatch.setattr(engine, "numerics", summed)
        with pytest.raises(ConfigError, match="are not those of one rank"):
            PolicyModel(engine)
