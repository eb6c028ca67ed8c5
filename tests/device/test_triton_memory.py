"""Memory plan of a card: accounted on a fake card, and the largest step run in Triton's
interpreter.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import ConfigError, EngineConfig, InferenceEngine
from nano_inference.checkpoints.loading import load_spec
from nano_inference.core.sequence import POLICY
from nano_inference.device import memory_profile
from nano_inference.device.memory import Claims, MemoryBudget, plan_memory
from nano_inference.device.memory_profile import measure, run_largest_steps
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ranks.build import plan_engine
from nano_inference.ranks.parts import assemble
from tests.depth import at_depth
from tests.device.card import Card
from tests.models.tiny import tiny_llama, tiny_model

GIB = 2**30
CUDA = torch.device("cuda:0")
# bytes per block of the tiny model in bfloat16: 2 layers, 2 heads of 16, keys, values
BLOCK = 16 * 2 * 2 * 16 * 2 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return load_spec(folder)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model_path="tiny", **({"max_batch_size": 10**9} | options))


def planned(spec: ModelSpec, claims: Claims, **options: Any) -> MemoryBudget:
    return plan_memory(config(**options), {POLICY: shard_of(spec)}, claims, torch.bfloat16, CUDA)


@pytest.mark.thorough
@settings(max_examples=at_depth(60), deadline=None)
@given(
    parts=st.tuples(*[st.integers(0, 30 * GIB)] * 4),
    total=st.integers(GIB, 100 * GIB),
    share=st.floats(0.05, 1.0),
    tokens=st.integers(1, 10_000),
)
def test_memory_stays_in_its_share_or_the_error_names_a_setting(
    spec: ModelSpec, parts: tuple[int, int, int, int], total: int, share: float, tokens: int
) -> None:
    claims = Claims(*parts, total=total)
    options = {"gpu_memory_utilization": share, "max_tokens_per_batch": tokens}
    try:
        budget = planned(spec, claims, **options)
    except ConfigError as problem:
        message = str(problem)
        assert any(
            advice in message
            for advice in ("smaller model", "gpu_memory_utilization", "max_tokens_per_batch")
        )
        if match := re.search(r"give it at least (\d\.\d\d)", message):
            assert planned(
                spec, claims, **options | {"gpu_memory_utilization": float(match[1])}
            ).num_blocks
        if match := re.search(r"lower max_tokens_per_batch from \d+ to (\d+)", message):
            fewer = parts[1] * int(match[1]) // tokens  # a workspace is roughly proportional
            assert planned(
                spec, Claims(parts[0], fewer, *parts[2:], total=total), gpu_memory_utilization=share
            )
        return
    assert (budget.workspace, budget.graphs, budget.others) == parts[1:]
    used = budget.weights + budget.workspace + budget.graphs + budget.others + budget.kv_cache
    # maximum that can be used
    assert used <= total * share < used + BLOCK or budget.num_blocks == 10**9 * 32


def test_memory_table_lists_only_actual_uses(spec: ModelSpec) -> None:
    whole = str(planned(spec, Claims(GIB, 2 * GIB, GIB // 2, GIB // 4, total=80 * GIB)))
    for line in (
        "workspace",
        "CUDA graphs",
        "held by others",
        "2,048.0 MiB",
        "512.0 MiB",
        "256.0 MiB",
    ):
        assert line in whole
    plain = str(planned(spec, Claims(GIB, 2 * GIB, total=80 * GIB)))
    assert "CUDA graphs" not in plain
    assert "others" not in plain
    assert "(est.)" not in plain
    assert "workspace (est.)" in str(
        planned(spec, Claims(GIB, 2 * GIB, total=80 * GIB, estimated=True))
    )


@pytest.mark.parametrize(
    ("claims", "options", "message"),
    [
        (
            Claims(15 * GIB, total=24 * GIB, others=12 * GIB),
            {},
            r"weights take 15\.0 GiB, but only 12\.0 GiB of .*'s 24\.0 GiB",
        ),
        (
            Claims(15 * GIB, total=24 * GIB),
            {"gpu_memory_utilization": 0.5},
            r"=0\.5; give it at least 0\.63\.",
        ),
        (
            Claims(15 * GIB, 12 * GIB, total=24 * GIB),
            {},
            r"smaller model, or lower max_tokens_per_batch from 8192 to 4505",
        ),
        (
            Claims(15 * GIB, total=24 * GIB),
            {"kv_cache_memory": 10 * GIB},
            r"leave 9\.0 GiB.*at most 9,663,676,416 bytes",
        ),
        (
            Claims(15 * GIB, others=8 * GIB, total=24 * GIB),
            {},
            r"others on the card \(8\.0 GiB\).*at least 0\.96",
        ),
    ],
)
def test_oversized_plan_names_the_setting_and_its_value(
    spec: ModelSpec, claims: Claims, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(spec, claims, **options)


def test_estimate_rejects_only_oversized_weights(spec: ModelSpec) -> None:
    assert planned(spec, Claims(GIB, 200 * GIB, total=80 * GIB, estimated=True)).num_blocks == 1
    with pytest.raises(ConfigError, match="smaller model"):
        planned(spec, Claims(90 * GIB, total=80 * GIB, estimated=True))


@pytest.fixture
def not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the step: figures are invented, and the interpreter is slow."""
    monkeypatch.setattr(memory_profile, "run_largest_steps", lambda *_: None)


def small(folder: Path, **options: Any) -> EngineConfig:
    sizes = {
        "max_batch_size": 3,
        "max_tokens_per_batch": 9,
        "max_model_len": 24,
        "block_size": 8,
        "num_threads": 1,
    }
    return EngineConfig(model_path=str(folder), device="cpu", backend="cuda", **(sizes | options))


@pytest.mark.thorough
@pytest.mark.usefixtures("not_run")
@pytest.mark.parametrize("pooled", [False, True])
def test_engine_plan_uses_measured_memory(folder: Path, pooled: bool) -> None:
    weights = plan_engine(small(folder)).memory_budget.weights
    sizes = {"others": GIB, "weights": weights, "step": 3 * GIB, "cached": GIB // 2}
    card = Card(total=10 * GIB, pooled=pooled, **sizes)
    order: list[tuple[str, bool]] = []

    def graphs(models: Any, storages: Any) -> int:
        order.append(("graphs", card.cached == 0))
        assert storages[POLICY].num_blocks == memory_profile.SCRATCH_BLOCKS
        return GIB

    parts = assemble(small(folder), card, graphs)
    budget = parts.memory_budget
    assert order == [("graphs", True)]
    assert (budget.workspace, budget.graphs, budget.others) == (3 * GIB, GIB, GIB)
    assert not budget.estimated
    parts.runner.storages.clear()


@pytest.mark.thorough
def test_measured_step_has_the_maximum_rows_samples_and_keys(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover every block size, limited chunks, and a storage of few blocks."""
    seen: list[tuple[int, int, int, int]] = []
    with InferenceEngine(
        small(
            folder,
            max_chunk_tokens=3,
            kv_cache_memory=2**20,
            max_batch_size=2,
            max_tokens_per_batch=4,
        )
    ) as engine:
        forward = type(engine.model).forward

        def spy(model: Any, batch: Any, cache: Any) -> Any:
            assert int(batch.slot_mapping.max()) < memory_profile.SCRATCH_BLOCKS * 8
            chunks = batch.cu_seqlens_q.diff()
            seen.append(
                (
                    len(batch.input_ids),
                    len(chunks),
                    int(batch.seq_lens.min()),
                    len(batch.score_rows),
                )
            )
            assert int(chunks.max()) <= 3
            return forward(model, batch, cache)

        monkeypatch.setattr(type(engine.model), "forward", spy)
        models = {POLICY: engine.model}
        run_largest_steps(engine.config, models, memory_profile._scratch(engine.config, models))
        assert seen == [(4, 2, 24, 4), (2, 2, 24, 0)]


@pytest.mark.thorough
def test_oversized_step_names_the_token_count_that_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with InferenceEngine(small(folder, kv_cache_memory=2**20)) as engine:
        card = Card(total=10 * GIB, weights=9 * GIB)
        with monkeypatch.context() as patch:
            patch.setattr(memory_profile, "run_largest_steps", full)
            with pytest.raises(
                ConfigError, match=r"max_tokens_per_batch=9 .* lower max_tokens_per_batch to 4"
            ):
                measure(engine.config, {POLICY: engine.model}, 9 * GIB, card)
        with pytest.raises(
            ConfigError, match=r"max_batch_size=3 do not fit .* lower max_batch_size to 1"
        ):
            measure(engine.config, {POLICY: engine.model}, 9 * GIB, card, full)


@pytest.mark.thorough
def test_windows_are_measured(tmp_path: Path) -> None:
    card = Card(total=10 * GIB, step=GIB)
    tiny = small(tiny_model(tmp_path, "gemma3"), max_batch_size=1, max_tokens_per_batch=2)
    budget = assemble(tiny, card).memory_budget
    assert budget.workspace == GIB
    assert budget.max_model_len == 24


@pytest.mark.thorough
def test_kernel_failure_at_full_size_names_the_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory\nmore")

    monkeypatch.setattr(memory_profile, "run_largest_steps", fails)
    with pytest.raises(
        ConfigError,
        match=r"\(RuntimeError: out of resource: shared memory\); use backend='reference'",
    ):
        assemble(small(folder), Card(total=10 * GIB))
    monkeypatch.setattr(memory_profile, "run_largest_steps", lambda *_: None)
    with pytest.raises(ConfigError, match=r"cannot be captured \(RuntimeError: out of resource"):
        assemble(small(folder), Card(total=10 * GIB), fails)


@pytest.mark.thorough
@pytest.mark.usefixtures("not_run")
def test_lowered_max_model_len_names_the_needed_share(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = Card(total=2 * 2**20, weights=0, step=0, others=2**20)
    with caplog.at_level("WARNING", logger="nano_inference"):
        asked = small(
            folder,
            max_model_len=500,
            gpu_memory_utilization=0.6,
            dtype="float32",
            max_tokens_per_batch=3,
        )
        budget = assemble(asked, card).memory_budget
    match = re.search(
        r"lowered to (\d+)\. gpu_memory_utilization of at least (0\.\d+) would hold 500",
        caplog.text,
    )
    assert match
    assert int(match[1]) == budget.max_model_len < 500
    card = Card(total=2 * 2**20, weights=0, step=0, others=2**20)
    share = float(match[2])
    enough = assemble(
        small(
            folder,
            max_model_len=500,
            gpu_memory_utilization=share,
            dtype="float32",
            max_tokens_per_batch=3,
        ),
        card,
    )
    assert enough.memory_budget.max_model_len == 500
