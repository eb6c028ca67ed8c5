"""Entropy and KL divergences over the whole vocabulary: values and gradients against autograd in
float64, and against logprobs of all tokens from the engine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import EngineConfig, InvalidRequest
from nano_inference.rl import PolicyModel
from nano_inference.rl import divergence as unit
from tests.depth import at_depth
from tests.models.tiny import tiny_llama

VOCAB = 300
SEQUENCES = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 20], [40, 41]]
KINDS: list[Any] = ["entropy", "reverse", "forward"]


def build(folder: Path, seed: int, **more: Any) -> PolicyModel:
    tiny_llama(folder, seed=seed, vocab_size=VOCAB, **more)
    config = EngineConfig(str(folder), device="cpu", dtype="float32", kv_cache_memory=2**22)
    return PolicyModel(config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PolicyModel, PolicyModel]]:
    policy, teacher = (build(tmp_path_factory.mktemp("model"), seed) for seed in (1, 2))
    yield policy, teacher
    for model in (policy, teacher):
        model.engine.shutdown()


def value_of(kind: str, policy: Tensor, teacher: Tensor) -> Tensor:
    """Return the divergence by its definition."""
    if kind == "entropy":
        return -(policy.exp() * policy).sum(-1)
    if kind == "reverse":
        return (policy.exp() * (policy - teacher)).sum(-1)
    return (teacher.exp() * (teacher - policy)).sum(-1)


@settings(deadline=None, max_examples=at_depth(25))
@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    kind=st.sampled_from(KINDS),
)
def test_terms_equal_autograd_in_float64(seed: int, scale: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, other = ((torch.randn(3, 17, generator=generator) * scale).double() for _ in range(2))
    logits.requires_grad_(True)
    policy, teacher = (torch.log_softmax(each, -1) for each in (logits, other))
    expected = value_of(kind, policy, teacher)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    direction: Any = "forward" if kind == "forward" else "reverse"
    given_teacher = None if kind == "entropy" else teacher
    value, d_logits = unit.terms(policy.detach(), given_teacher, direction)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(d_logits, gradient, rtol=1e-9, atol=1e-10)


def computed(
    kind: str, policy: PolicyModel, teacher: PolicyModel, temperature: float, starts: list[int]
) -> list[Tensor]:
    shared: dict[str, Any] = {"from_position": starts, "temperature": temperature}
    if kind == "entropy":
        return policy.entropy(SEQUENCES, **shared)
    direction: Any = kind
    return policy.kl(SEQUENCES, teacher, direction=direction, teacher_temperature=1.3, **shared)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_divergence_equals_logprobs_of_all_tokens(
    models: tuple[PolicyModel, PolicyModel],
    kind: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's logprobs of the whole vocabulary define the divergence and its gradient."""
    policy, teacher = models
    monkeypatch.setattr(unit, "ROWS", 2)  # several chunks
    starts = [1, 2, 1]
    every = [
        [list(range(VOCAB))] * (len(ids) - start)
        for ids, start in zip(SEQUENCES, starts, strict=True)
    ]

    def all_logprobs(model: PolicyModel, at: float) -> list[Tensor]:
        return model.logprobs(SEQUENCES, from_position=starts, temperature=at, targets=every)

    with torch.no_grad():
        theirs = all_logprobs(teacher, 1.3)
    wanted = [
        value_of(kind, own, other)
        for own, other in zip(all_logprobs(policy, temperature), theirs, strict=True)
    ]
    values = computed(kind, policy, teacher, temperature, starts)
    for value, expected in zip(values, wanted, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 2, sum(map(len, values)))
    params = list(policy.parameters())
    expected = torch.autograd.grad((torch.cat(wanted) * weights).sum(), params)
    gradients = torch.autograd.grad((torch.cat(values) * weights).sum(), params)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()  # of a whole parameter: float32 sums


def test_divergence_from_itself_is_0(models: tuple[PolicyModel, PolicyModel]) -> None:
    policy, _ = models
    for direction in unit.DIRECTIONS:
        values = torch.cat(policy.kl(SEQUENCES, policy, direction=direction, from_position=1))
        assert float(values.detach().abs().max()) < 1e-6


def test_bits_do_not_depend_on_workers(models: tuple[PolicyModel, PolicyModel]) -> None:
    policy, teacher = models
    results: list[list[Tensor]] = []
    for workers in (1, 3):
        policy.num_workers = workers
        loss = torch.cat(policy.kl(SEQUENCES, teacher, from_position=1))
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), [*policy.parameters()])])
    policy.num_workers = None
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_first_token_and_empty_rest_have_no_gradient(
    models: tuple[PolicyModel, PolicyModel],
) -> None:
    policy, _ = models
    whole, empty = policy.entropy([[5, 6, 7], [5, 6]], from_position=[0, 2])
    assert whole.shape == (3,)
    assert bool(whole[0].isnan())
    assert empty.shape == (0,)
    whole[1:].sum().backward()
    assert all(
        bool(each.grad.isfinite().all()) for each in policy.parameters() if each.grad is not None
    )
    policy.zero_grad()


def test_divergence_rejects_what_it_cannot_compute(
    models: tuple[PolicyModel, PolicyModel], tmp_path: Path
) -> None:
    policy, teacher = models
    with pytest.raises(InvalidRequest, match="above 0"):
        policy.entropy(SEQUENCES, temperature=0)
    with pytest.raises(InvalidRequest, match="reverse, forward"):
        policy.kl(SEQUENCES, teacher, direction="both")  # pyright: ignore
    tiny_llama(tmp_path, vocab_size=VOCAB + 20)
    config = EngineConfig(str(tmp_path), device="cpu", dtype="float32", kv_cache_memory=2**20)
    other = PolicyModel(config)
    with pytest.raises(InvalidRequest, match=r"320 tokens, the policy's 300"):
        policy.kl(SEQUENCES, other)
    other.engine.shutdown()


def test_changed_parameter_is_noticed_in_backward(models: tuple[PolicyModel, PolicyModel]) -> None:
    policy, teacher = models
    loss = torch.cat(policy.kl(SEQUENCES, teacher, from_position=1)).sum()
    with torch.no_grad():
        next(policy.parameters()).mul_(1.0)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
