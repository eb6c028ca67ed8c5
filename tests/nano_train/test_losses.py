"""Advantages and losses against the formulas of their sources, token by token."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_inference import TrainingSample
from nano_train.losses import ADVANTAGES, advantages, reward_loss
from nano_train.methods import METHODS, Method

REWARDS = st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=6)


@given(REWARDS)
def test_advantages_follow_their_definitions(rewards: list[float]) -> None:
    middle = sum(rewards) / len(rewards)
    for mine, reward in zip(ADVANTAGES["centred"](rewards), rewards, strict=True):
        assert mine == pytest.approx(reward - middle, abs=1e-9)
    for index, mine in enumerate(ADVANTAGES["leave-one-out"](rewards)):
        others = rewards[:index] + rewards[index + 1 :]
        assert mine == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-9)
    grouped = ADVANTAGES["group"](rewards)
    assert sum(grouped) == pytest.approx(0, abs=1e-6)
    spread = len(set(rewards)) > 1
    assert sum(a * a for a in grouped) == pytest.approx(len(rewards) if spread else 0, abs=1e-6)


def test_groups_have_their_own_mean() -> None:
    method = METHODS["dr-grpo"]
    assert advantages([1.0, 0.0, 5.0, 7.0], 2, method) == [0.5, -0.5, -1.0, 1.0]


def sample_of(logprobs: Sequence[float], reference: Sequence[float] | None) -> TrainingSample:
    tokens = tuple(range(len(logprobs)))
    kept = None if reference is None else tuple(reference)
    return TrainingSample((1,), tokens, tuple(logprobs), kept, 0, "stop")


def expected(
    method: Method,
    sampler: list[list[float]],
    policy: list[list[float]],
    reference: list[list[float]],
    advantages: list[float],
    limits: tuple[int, float],
) -> float:
    """Compute the loss in plain Python from the definitions in `methods.py`."""
    max_tokens, kl = limits
    count = sum(map(len, sampler))
    total = 0.0
    for old, new, ref, advantage in zip(sampler, policy, reference, advantages, strict=True):
        apart = [p - q for p, q in zip(new, old, strict=True)]
        if method.ratio == "sequence":
            apart = [sum(apart) / len(apart)]
        terms: list[float] = []
        for index, log_ratio in enumerate(apart):
            ratio = math.exp(log_ratio)
            clipped = min(max(ratio, 1 - method.clip_low), 1 + method.clip_high)
            if method.ratio == "none":
                terms.append(-advantage * new[index])
            else:
                terms.append(-min(ratio * advantage, clipped * advantage))
        k3 = [math.exp(r - p) - (r - p) - 1 for r, p in zip(ref, new, strict=True)]
        for values, factor in ((terms, 1.0), (k3, kl)):
            weight = {
                "token": 1 / count,
                "sample": 1 / len(values) / len(sampler),
                "constant": 1 / len(sampler) / max_tokens,
                "sum": 1 / len(sampler),
            }[method.aggregation]
            total += factor * weight * sum(values)
    return total


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.kind == "rl"])
@given(data=st.data())
def test_loss_follows_the_definition(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    numbers = st.floats(-3, -0.25, width=16)

    def draw() -> list[list[float]]:
        return [data.draw(st.lists(numbers, min_size=n, max_size=n)) for n in lengths]

    sampler, policy, reference = draw(), draw(), draw()
    weights = [data.draw(st.floats(-2, 2, width=16)) for _ in lengths]
    kl = data.draw(st.sampled_from([0.0, 0.1]))
    samples = [sample_of(*pair) for pair in zip(sampler, reference, strict=True)]
    loss = reward_loss(
        *(METHODS[name], samples, [torch.tensor(values) for values in policy], weights, 5, kl)
    )
    wanted = expected(METHODS[name], sampler, policy, reference, weights, (5, kl))
    assert float(loss) == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.kind == "rl"])
@given(mask=st.lists(st.booleans(), min_size=1, max_size=6).filter(any), data=st.data())
def test_loss_ignores_tokens_between_turns(
    name: str, mask: list[bool], data: st.DataObject
) -> None:
    numbers = st.lists(st.floats(-3, -0.25, width=16), min_size=len(mask), max_size=len(mask))
    sampler, policy, reference = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    whole = replace(sample_of(sampler, reference), loss_mask=tuple(mask))
    kept = [place for place, own in enumerate(mask) if own]
    alone = sample_of(*([row[place] for place in kept] for row in (sampler, reference)))
    other = sample_of([-1.0], [-2.0])
    results: list[tuple[float, list[float]]] = []
    for sample, row in ((whole, policy), (alone, [policy[place] for place in kept])):
        values = torch.tensor(row, requires_grad=True)
        loss = reward_loss(
            METHODS[name], [sample, other], [values, torch.tensor([-1.0])], [1.5, -1.0], 5, 0.1
        )
        loss.backward()
        assert values.grad is not None
        results.append((float(loss.detach()), values.grad.tolist()))
    (first, gradients), second = results
    assert (first, [gradients[place] for place in kept]) == second
    assert not any(one for one, own in zip(gradients, mask, strict=True) if not own)


def test_gradient_of_equal_policies_is_the_advantage() -> None:
    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    samples = [sample_of([-1.0, -2.0], None)]
    reward_loss(METHODS["dapo"], samples, [values], [3.0], 5).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [-1.5, -1.5]
