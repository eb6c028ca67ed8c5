"""The operations of a backward pass at the widths of real models: near those of autograd in double
precision, and the same bits in every run.
"""

from pathlib import Path

import pytest
import torch

from nano_inference.ops.cuda.gradients import CudaGradients
from nano_inference.rl import PolicyModel
from tests.gpu.target import Target
from tests.models.tiny import tiny_model
from tests.ops.gradient_cases import (
    Attentions,
    Case,
    Experts,
    Gates,
    Logits,
    Norms,
    Products,
    Rotations,
    Routes,
    RowProducts,
    Sums,
)
from tests.rl.training import SEQUENCES, build, gradients

pytestmark = pytest.mark.gpu

HEADS = {
    "qwen3-8b": (32, 8, 128),
    "gemma3-270m": (4, 1, 256),
    "gpt-oss-20b": (64, 8, 64),
}


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, target: Target) -> torch.dtype:
    if target.dry and request.param == "bfloat16":
        pytest.skip("the interpreter multiplies matrices of bfloat16 wrongly")
    return getattr(torch, request.param)


def require(case: Case, target: Target) -> None:
    """Run a case twice, compare the bits, and compare the numbers with autograd."""
    side = CudaGradients(case.dtype, torch.device(target.device))
    first, again = ([each.cpu() for each in case.run(side)] for _ in range(2))
    assert all(map(torch.equal, first, again))
    case.require(first)


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("model", HEADS)
def test_attention_gradients_on_a_card(
    target: Target, dtype: torch.dtype, model: str, window: int
) -> None:
    """A prompt and two samples that continue it, one of them from its middle."""
    if target.dry and model != "gpt-oss-20b":
        pytest.skip("a dry run has one shape")
    heads, kv_heads, size = (4, 2, 16) if target.dry else HEADS[model]
    lengths = (5, 3, 7) if target.dry else (200, 100, 330)
    branches = (0, 5, 3) if target.dry else (0, 200, 130)
    for cap, has_sinks in ((0.0, False), (2.0, True)):
        shape = (size, (heads, kv_heads), window, cap, has_sinks)
        require(Attentions(lengths, branches, *shape, dtype, 0), target)


def test_product_gradients_on_a_card(target: Target, dtype: torch.dtype) -> None:
    size = target.size
    for n in (1, size(100, 3), size(512, 5)):
        require(Products(n, size(1024, 9), size(2048, 17), True, dtype, n), target)


def test_row_gradients_on_a_card(target: Target, dtype: torch.dtype) -> None:
    n, hidden, inner = target.size(512, 5), target.size(4096, 40), target.size(12_288, 70)
    require(Norms(n, 1, hidden, True, True, dtype, 0), target)
    require(Norms(n, 8, target.size(128, 16), False, False, dtype, 0), target)
    require(Rotations(n, target.size(64, 8), False, True, 0, True, dtype, 0), target)
    require(Gates("silu", n, inner, dtype, 0), target)
    require(Sums(n, hidden, 7, dtype, 0), target)


def test_expert_gradients_on_a_card(target: Target, dtype: torch.dtype) -> None:
    """Some experts have no rows, and one has all."""
    n, hidden, inner = target.size(512, 5), target.size(2048, 17), target.size(768, 9)
    count, per_row = target.size(32, 7), target.size(8, 2)
    for used, chosen in ((count - 2, per_row), (1, 1)):
        require(Experts(n, count, used, chosen, 2 * inner, hidden, True, dtype, 0), target)
    require(RowProducts(n, hidden, dtype, 0), target)
    for scores, floor, shared in (("softmax", 0.0, "gated"), ("sigmoid", 1e-20, "plain")):
        require(Routes(n, target.size(128, 9), scores, True, floor, shared, dtype, 0), target)


def test_logit_gradients_on_a_card(target: Target) -> None:
    for cap in (0.0, 5.0):
        require(Logits(16, target.size(151_936, 4100), cap, True, torch.float32, 0), target)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_backward_on_a_card_has_the_same_bits_twice(
    target: Target, tmp_path: Path, family: str
) -> None:
    sequences = SEQUENCES[1:3] if target.dry else SEQUENCES
    hidden, inner = target.size(512, 32), target.size(1024, 48)
    folder = tiny_model(tmp_path, family, std=0.05, hidden_size=hidden, intermediate_size=inner)
    options = {"backend": "cuda", "cuda_graphs": False, "device": target.device}
    with build(folder, dtype="float32" if target.dry else "bfloat16", **options) as engine:
        model = PolicyModel(engine)
        assert model.gradients == "kernels"
        first = {name: grad.clone() for name, grad in gradients(model, sequences).items()}
        again = gradients(model, sequences)
        assert all(torch.equal(again[name], grad) for name, grad in first.items())
        assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in first.values())
