"""Engines of several ranks on threads give the tokens and logprobs of one rank, bit for bit."""

from collections.abc import Iterator
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
    ModelLoadError,
    NanoInferenceError,
    SamplingParams,
    WeightUpdateError,
)
from nano_inference.ranks import shard
from nano_inference.ranks.shard import Shard
from nano_inference.ranks.sharing import StagedUpdates
from nano_inference.rl.replayer import Replayer
from nano_inference.types import KvPolicy
from tests.models.tiny import tiny_model
from tests.parallel.test_meshes import changed, life
from tests.ranks.rank_threads import ThreadLauncher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    model = tmp_path_factory.mktemp("lives") / "model"
    # Odd head counts: two ranks have 2 and 3 query heads, and both hold some of the KV heads.
    sizes: dict[str, Any] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_size": 96,
    }
    tiny_model(
        model, "llama", num_hidden_layers=2, max_position_embeddings=512, vocab_size=301, **sizes
    )
    yield model
    torch.set_num_threads(threads)


def lived(folder: Path, policy: KvPolicy, launcher: ThreadLauncher | None, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "backend": "reference",
        "num_threads": 1,
        "seed": 5,
    }
    defaults |= {"max_chunk_tokens": 23, "max_tokens_per_batch": 64}
    with InferenceEngine(EngineConfig(str(folder), **(defaults | options)), launcher) as engine:
        lives = life(engine, changed(str(folder)), policy, False)
        return lives, engine.weights_checksum(), engine.stats().num_preemptions


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "cache_type", "lookahead", "policy", "blocks"),
    [
        (2, "radix", 1, "keep", 12),
        (4, "paged", 0, "finish_old", 40),
        pytest.param(2, "paged", 0, "recompute", 12, marks=pytest.mark.slow),
        pytest.param(4, "radix", 1, "wait", 12, marks=pytest.mark.slow),
    ],
)
def test_ranks_change_no_bit(
    folder: Path, ranks: int, cache_type: str, lookahead: int, policy: KvPolicy, blocks: int
) -> None:
    options = {"cache_type": cache_type, "lookahead": lookahead, "ref_model_path": str(folder)}
    # A token takes 2 (K, V) * 2 layers * 3 heads * 16 numbers of 4 bytes, both for the policy and
    # the reference.
    alone = lived(folder, policy, None, kv_cache_memory=blocks * 16 * 768, **options)
    heads = 3 // ranks + (1 if 3 % ranks else 0)
    together = lived(
        folder,
        policy,
        ThreadLauncher(),
        tensor_parallel=ranks,
        kv_cache_memory=blocks * 16 * 256 * heads,
        **options,
    )
    assert alone[:2] == together[:2]
    assert [each[2] > 0 for each in (alone, together)] == [blocks == 12] * 2  # preemptions


@pytest.fixture
def pair(folder: Path) -> Iterator[InferenceEngine]:
    config = EngineConfig(
        str(folder),
        device="cpu",
        backend="reference",
        num_threads=1,
        kv_cache_memory=2**20,
        tensor_parallel=2,
        seed=1,
    )
    with InferenceEngine(config, ThreadLauncher()) as engine:
        yield engine


@pytest.mark.thorough
def test_update_rejected_by_one_rank_changes_no_rank(
    pair: InferenceEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run out of memory while staging a slice, then while keeping old weights. No rank changes."""
    new, before = changed(str(folder)), pair.weights_checksum()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    quiet = pair.generate([[5, 6, 7]], params)[0]

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(StagedUpdates, "_change", fails)
        with pytest.raises(
            WeightUpdateError, match=r"not every rank can take the update: rank 1.*no memory left"
        ):
            pair.update_weights(new, blocking=True)
    pair.add_request([5, 6, 7], params)
    pair.step()
    with monkeypatch.context() as patched:
        patched.setattr(Shard, "_on_set_aside", fails)
        update = pair.update_weights(new, kv_policy="finish_old")
        (same,) = [sample for _ in range(20) for sample in pair.step()]
        with pytest.raises(
            WeightUpdateError, match="not enough memory to keep the old weights: rank 1"
        ):
            update.result(0)
    assert pair.weights_checksum() == before
    assert (same.completion_tokens, same.logprobs) == (quiet.completion_tokens, quiet.logprobs)
    assert pair.generate([[5, 6, 7]], params)[0].logprobs == quiet.logprobs
    assert pair.update_weights(new, blocking=True, complete=False).version == 1
    assert pair.generate([[5, 6, 7]], params)[0].logprobs != quiet.logprobs


def test_operations_on_the_whole_model_are_rejected(pair: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="replay is not possible with several ranks"):
        Replayer(pair)


@pytest.mark.thorough(cases=["problem1"])
@pytest.mark.parametrize(
    "problem", [ModelLoadError("/models/m is missing"), ValueError("unforeseen")]
)
def test_failed_rank_construction_is_reported(
    folder: Path, problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: EngineConfig) -> None:
        raise problem

    monkeypatch.setattr(shard, "plan_engine", fails)
    config = EngineConfig(
        str(folder), device="cpu", backend="reference", num_threads=1, tensor_parallel=2
    )
    with pytest.raises(
        type(problem) if isinstance(problem, ModelLoadError) else NanoInferenceError
    ) as raised:
        InferenceEngine(config, ThreadLauncher())
    assert str(raised.value).startswith("rank 1 (process ")
    assert str(problem) in str(raised.value)


@pytest.mark.thorough
def test_numerics_agree_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = shard.plan_engine

    def differs(config: EngineConfig) -> Any:
        plan = planned(config)
        return replace(plan, numerics=replace(plan.numerics, torch="1.0"))

    monkeypatch.setattr(shard, "plan_engine", differs)
    config = EngineConfig(
        str(folder), device="cpu", backend="reference", num_threads=1, tensor_parallel=2
    )
    with pytest.raises(ConfigError, match=r"rank 1 .*torch-1\.0, but .* on rank 0"):
        InferenceEngine(config, ThreadLauncher())
