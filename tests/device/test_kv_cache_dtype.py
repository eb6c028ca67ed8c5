"""Engines with quantized keys and values: memory, rejected options, block exchange, replay."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import ConfigError, EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.ranks.build import plan_engine
from nano_inference.rl import PolicyModel, differences
from nano_inference.rl.replayer import Replayer
from tests.models.tiny import tiny_model
from tests.rl.test_policy_model import drawn_and_scored
from tests.rl.training import gradients
from tests.weights.weight_cases import PROMPT, Build, bits, drawn

CASES = [("reference", "int8"), ("cpu", "int8"), ("reference", "fp8")]


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_block_count_grows_as_rows_shrink(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
    budgets = {
        kept: plan_engine(
            EngineConfig(str(folder), device="cpu", dtype="float32", kv_cache_dtype=kept)
        ).memory_budget
        for kept in ("auto", "int8")
    }
    plain, coded = budgets["auto"].bytes_per_token, budgets["int8"].bytes_per_token
    head_dim = plan_engine(EngineConfig(str(folder), device="cpu")).specs["policy"].head_dim
    assert coded * head_dim * 4 == plain * (head_dim + 4)


def test_planned_cache_size_equals_allocated_size(build: Build) -> None:
    for kept, backend in (("auto", "cpu"), ("int8", "cpu"), ("fp8", "reference")):
        engine = build(backend=backend, kv_cache_dtype=kept)
        storage, budget = engine.runner.storage, engine.memory_budget
        assert storage.keys.nbytes + storage.values.nbytes == budget.kv_cache <= 2**20
        assert budget.num_blocks * budget.bytes_per_token * 4 == budget.kv_cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flex"}, "attention='flex': its kernels read plain keys"),
        ({"kv_cache_dtype": "fp8", "backend": "cpu"}, "'cpu': the CPU kernels have no such codes"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is not available; choose one"),
    ],
)
def test_unsupported_cache_dtypes_are_rejected_early(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("smollm2-135m", **{"kv_cache_dtype": "int8", **options})


def test_latents_are_not_quantized(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "deepseek-v3")
    with pytest.raises(ConfigError, match="has attention over latents: its keys are already small"):
        plan_engine(EngineConfig(str(folder), device="cpu", kv_cache_dtype="int8"))


@pytest.mark.parametrize(("backend", "kept"), CASES)
def test_block_exchange_needs_the_same_cache_dtype(build: Build, backend: str, kept: str) -> None:
    check_exchange(build, kept, {"backend": backend, "dtype": "bfloat16"})


def check_exchange(build: Build, kept: str, options: dict[str, Any]) -> None:
    """Exchange blocks between engines with these options."""
    plain = build(**options)
    source, target = (build(kv_cache_dtype=kept, **options) for _ in range(2))
    assert source.numerics.fingerprint == plain.numerics.fingerprint + f"/kv-{kept}"
    sample = source.generate(PROMPT, drawn())[0]
    names = source.blocks.names(PROMPT)
    piece = source.blocks.export_blocks(names, 0, 1 << 20)
    assert piece is not None
    assert len(names) > 1
    others = [plain]
    if options["backend"] != "cpu":
        others.append(build(kv_cache_dtype="int8" if kept == "fp8" else "fp8", **options))
    for other in others:
        with pytest.raises(InvalidRequest):
            other.blocks.import_blocks(piece)
    assert target.blocks.import_blocks(piece) == len(names)
    again = target.generate(PROMPT, drawn())[0]
    assert again.cached_tokens > 0
    assert bits(again) == bits(sample) != bits(plain.generate(PROMPT, drawn())[0])


@pytest.mark.parametrize(("backend", "kept"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_model_logprobs_equal_the_engine(
    build: Build, backend: str, kept: str, dtype: str
) -> None:
    engine = build(backend=backend, dtype=dtype, kv_cache_dtype=kept, kv_cache_memory=2**22)
    model = PolicyModel(engine)
    reported, scored = drawn_and_scored(model)
    assert scored == reported
    (sample,) = engine.generate(PROMPT, drawn())
    assert not differences(sample, Replayer(engine, None).replay(sample))


@pytest.mark.parametrize(("codes", "most"), [("int8", 0.1), ("fp8", 0.3)])
def test_gradients_use_the_rounded_keys_and_values(build: Build, codes: str, most: float) -> None:
    """The gradients differ everywhere from those of plain keys and values, by about the rounding
    error.
    """
    models = {
        kept: PolicyModel(build(backend="reference", dtype="float32", kv_cache_dtype=kept))
        for kept in ("auto", codes)
    }
    actual = {kept: gradients(model) for kept, model in models.items()}
    apart = torch.stack(
        [
            (grad - actual["auto"][name]).norm() / actual["auto"][name].norm()
            for name, grad in actual[codes].items()
        ]
    )
    assert bool((apart > 0).all())
    assert float(apart.max()) < most
