"""Gradients of `PolicyModel` by the kernels: their coverage, their values and their bits."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import LoraSettings
from nano_inference.rl import LoraPolicy, PolicyModel, scoring_module
from nano_inference.rl.backward.coverage import uncovered
from tests.depth import at_depth
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import FAMILIES, tiny_llama, tiny_model
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available, instruction_set
from tests.rl.training import SEQUENCES, build, coefficients, gradients, weighted_sum

pytestmark = NEEDS_COMPILER
COVERED = [family for family in FAMILIES if family != "nanochat"]  # which has normed embeddings
EXPERTS = ("qwen2-moe", "olmoe", "gpt-oss", "glm4-moe", "granite-moe-shared", "ernie4.5-moe")
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def by_torch(model: PolicyModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """Return the gradients of a backward pass in torch."""
    with monkeypatch.context() as patch:
        patch.setattr(scoring_module, "gradients_of", lambda *_: "torch")
        other = PolicyModel(model.engine, gradient_dtype=torch.float32)
        assert other.gradients == "torch"
        return gradients(other, **options)


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - grad).norm() / grad.norm()) for name, grad in theirs.items())


@DTYPES
@pytest.mark.parametrize("family", COVERED)
def test_gradients_of_covered_families_equal_torch(
    tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roundings to bfloat16 reach a twentieth of the norm in these tiny models, in torch too."""
    with build(tiny_model(tmp_path, family), dtype=dtype) as engine:
        theirs = by_torch(PolicyModel(engine), monkeypatch, temperature=0.8)
        for products, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.15)):
            model = PolicyModel(engine, micro_batch_tokens=64, gradient_dtype=products)
            assert model.gradients == "kernels"
            assert 0 < worst(gradients(model, temperature=0.8), theirs) < error


@pytest.mark.thorough(but=["glm4-moe", "gpt-oss"])
@pytest.mark.parametrize("family", EXPERTS)
def test_gradients_of_experts_equal_torch(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts, gates, biases, softmax and sigmoid, dense layers, windows and sinks."""
    case = CASES[family]
    strong_model(tmp_path, case.class_name, **case.config)
    with build(tmp_path, dtype="float32") as engine:
        model = PolicyModel(engine, micro_batch_tokens=64)
        assert model.gradients == "kernels"
        ours = gradients(model, temperature=0.8)
        theirs = by_torch(model, monkeypatch, temperature=0.8)
    unchosen = {name for name, grad in theirs.items() if not grad.any()}  # by any row
    assert unchosen == {name for name, grad in ours.items() if not grad.any()}
    for name in theirs.keys() - unchosen:
        assert float((ours[name] - theirs[name]).norm() / theirs[name].norm()) < 2e-5, name


@pytest.mark.thorough
@DTYPES
def test_instruction_sets_agree_on_gradients_of_experts(tmp_path: Path, dtype: str) -> None:
    case = CASES["qwen2-moe"]  # a shared expert with a gate
    strong_model(tmp_path, case.class_name, **case.config)
    results: list[dict[str, Tensor]] = []
    for number, name in enumerate(available("pairs")):
        with instruction_set(name), build(tmp_path, dtype=dtype) as engine:
            model = PolicyModel(engine, micro_batch_tokens=64, num_workers=1 + number % 3)
            results.append(gradients(model))
    for other in results[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in results[0].items())


@DTYPES
def test_instruction_sets_and_threads_agree_on_gradients(tmp_path: Path, dtype: str) -> None:
    folder = tiny_llama(tmp_path, hidden=96, inner=160, num_heads=6, num_kv_heads=2, std=0.1)
    results: list[dict[str, Tensor]] = []
    for number, name in enumerate(available("pairs")):
        with instruction_set(name), build(folder, dtype=dtype) as engine:
            model = PolicyModel(engine, micro_batch_tokens=64, num_workers=1 + number % 3)
            results.append(gradients(model))
    assert len(results) > 1
    for other in results[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in results[0].items())


@DTYPES
def test_adapter_gradients_equal_torch(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LoraSettings(rank=4, targets=("q_proj", "v_proj", "up_proj", "down_proj", "lm_head"))
    results: list[dict[str, Tensor]] = []
    theirs: dict[str, Tensor] = {}
    for name in available("pairs"):
        folder = tiny_llama(tmp_path / name, std=0.1, tie=True)
        with instruction_set(name), build(folder, dtype=dtype, max_loras=1) as engine:
            model = LoraPolicy(engine, settings, micro_batch_tokens=64)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
            assert model.gradients == "kernels"
            results.append({key: grad.clone() for key, grad in gradients(model).items()})
            with monkeypatch.context() as patch:
                patch.setattr(LoraPolicy, "gradients", "torch")
                theirs = gradients(model)
    for other in results[1:]:
        assert all(torch.equal(other[key], grad) for key, grad in results[0].items())
    assert worst(results[0], theirs) < (1e-5 if dtype == "float32" else 0.05)


TREES = st.lists(st.lists(st.integers(5, 8), min_size=2, max_size=40), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyModel]:
    folder = tiny_llama(tmp_path_factory.mktemp("strong"), std=0.1, tie=True)
    with build(folder) as engine:
        yield PolicyModel(engine)


@settings(max_examples=at_depth(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sequences=TREES, max_rows=st.integers(1, 60), temperature=st.sampled_from([0.5, 1.0]))
def test_gradients_of_shared_prefixes_equal_torch(
    strong: PolicyModel, sequences: list[list[int]], max_rows: int, temperature: float
) -> None:
    strong.micro_batch_tokens = max_rows
    ours = gradients(strong, sequences, temperature=temperature)
    with pytest.MonkeyPatch.context() as patch:
        theirs = by_torch(strong, patch, sequences=sequences, temperature=temperature)
    whole = math.hypot(*(float(grad.norm()) for grad in theirs.values()))
    for name, grad in theirs.items():
        # Equal tokens have a q_proj gradient of 0, which torch gives as rounding errors of others.
        assert float((ours[name] - grad).norm()) <= 2e-5 * float(grad.norm()) + 2e-6 * whole, name


def test_gradients_equal_finite_differences(strong: PolicyModel) -> None:
    """A step along a direction changes the loss by the gradient times the direction."""
    strong.micro_batch_tokens = 512
    sequences = SEQUENCES[:3]
    grads = gradients(strong, sequences)
    generator = torch.Generator().manual_seed(5)
    weights = coefficients([len(each) for each in sequences])
    params = dict(strong.named_parameters())

    def loss() -> float:
        with torch.no_grad():
            logprobs = [each.double() for each in strong.logprobs(sequences)]
        return float(weighted_sum(logprobs, [each.double() for each in weights]))

    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ):
        param, direction = params[name], torch.randn(grads[name].shape, generator=generator)
        before, size = param.detach().clone(), 2e-3
        with torch.no_grad():
            param.copy_(before + size * direction)
            above = loss()
            param.copy_(before - size * direction)
            below = loss()
            param.copy_(before)
        expected = float((grads[name].double() * direction.double()).sum())
        assert (above - below) / (2 * size) == pytest.approx(expected, rel=0.05, abs=0.05), name


def test_gradients_are_limited_to_wanted_parameters(strong: PolicyModel) -> None:
    strong.micro_batch_tokens = 64
    whole = {name: grad.clone() for name, grad in gradients(strong).items()}
    try:
        for name, param in strong.named_parameters():
            param.requires_grad_(name.startswith("model.layers.1."))
            param.grad = None
        part = gradients(strong)
    finally:
        strong.requires_grad_(True)
    assert set(part) == {name for name in whole if name.startswith("model.layers.1.")}
    assert all(torch.equal(whole[name], grad) for name, grad in part.items())


@pytest.mark.thorough
@pytest.mark.parametrize("family", CASES)
def test_table_of_coverage_names_the_rest(tmp_path: Path, family: str) -> None:
    """Every family without kernels has a part that the table names."""
    case = CASES[family]
    strong_model(tmp_path, case.class_name, **case.config)
    with build(tmp_path, backend=case.backend) as engine:
        spec, backend = engine.spec, engine.model.ops.name
        if spec.state is not None:
            return
        chosen = PolicyModel(engine).gradients
    assert chosen == ("torch" if uncovered(spec) or backend != "cpu" else "kernels")


def test_other_backends_differentiate_in_torch(tmp_path: Path) -> None:
    with build(tiny_llama(tmp_path), backend="reference") as engine:
        assert PolicyModel(engine).gradients == "torch"


def test_product_dtype_does_not_depend_on_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path, dtype=torch.bfloat16, std=0.1)
    with build(folder, dtype="bfloat16") as engine:
        results: list[dict[str, Tensor]] = []
        for native in (False, True):
            monkeypatch.setattr(
                "nano_inference.rl.scoring_module.cpu_multiplies_bf16", lambda native=native: native
            )
            results.append(gradients(PolicyModel(engine)))
    assert all(torch.equal(results[1][name], grad) for name, grad in results[0].items())
