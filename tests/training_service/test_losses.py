"""Loss functions, against their formulas token by token."""

import math

import pytest
import torch

from nano_inference.training_service.errors import Refused
from nano_inference.training_service.losses import LOSSES, loss_of

P = [-0.5, -1.0, -3.0, -0.2]
Q = [-1.5, -1.0, -1.0, -0.9]
A = [1.0, -1.0, 2.0, -0.5]


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _by_token(name: str, p: float, q: float, a: float) -> float:
    ratio = math.exp(p - q)
    return {
        "cross_entropy": -a * p,
        "importance_sampling": -ratio * a,
        "ppo": -min(ratio * a, _clip(ratio, 0.7, 1.1) * a),
        "cispo": -_clip(ratio, 0.7, 1.1) * a * p,
        "dro": -(p * a - 0.25 * (p - q) ** 2),
    }[name]


def _slope(name: str, p: float, q: float, a: float) -> float:
    """Of the loss of one token, by differences; cispo's weight is no function of p."""
    if name == "cispo":
        return -_clip(math.exp(p - q), 0.7, 1.1) * a
    step = 1e-6
    return (_by_token(name, p + step, q, a) - _by_token(name, p - step, q, a)) / (2 * step)


CONFIG = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.5},
}


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name: str) -> None:
    loss, settings = loss_of(name, CONFIG.get(name, {}))
    p = torch.tensor(P, dtype=torch.float64, requires_grad=True)
    weights = {"weights": torch.tensor(A, dtype=torch.float64)}
    others = {
        "logprobs": torch.tensor(Q, dtype=torch.float64),
        "advantages": torch.tensor(A, dtype=torch.float64),
    }
    value = loss.compute(p, weights if name == "cross_entropy" else others, settings)
    value.backward()
    rows = list(zip(P, Q, A, strict=True))
    assert value.item() == pytest.approx(sum(_by_token(name, *row) for row in rows))
    assert p.grad is not None
    assert p.grad.tolist() == pytest.approx(
        [_slope(name, *row) for row in rows], rel=1e-5, abs=1e-8
    )


def test_defaults_are_the_clients() -> None:
    assert loss_of("ppo", {})[1] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert loss_of("dro", {})[1] == {"beta": 0.05}
    loss, settings = loss_of("cross_entropy", {})
    assert loss.compute(torch.tensor(P), {}, settings).item() == pytest.approx(-sum(P))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("gspo", {}, "loss_fn='gspo'"),
        ("custom", {"loss_id": "x"}, "loss_fn='custom'"),
        ("ppo", {"beta": 1.0}, "beta"),
        ("dro", {"beta": "much"}, "'much' must be a finite number"),
        ("dro", {"beta": math.inf}, "inf must be a finite number"),
        ("cross_entropy", {"x": 1.0}, "which has none"),
    ],
)
def test_what_is_unknown_is_refused_by_name(name: str, config: dict, words: str) -> None:
    with pytest.raises(Refused, match=words):
        loss_of(name, config)
