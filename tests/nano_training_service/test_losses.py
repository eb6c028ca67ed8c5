"""Loss functions against their formulas, token by token."""

import math

import pytest
import torch

from nano_training_service.errors import Refused
from nano_training_service.losses import LOSSES, loss_of

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


MEAN_RATIO = math.exp(sum(p - q for p, q in zip(P[1:], Q[1:], strict=True)) / 3)


def _gspo(p: float, start: float, a: float) -> float:
    """Return the loss of a token that moves from `start` while the sequence ratio is fixed."""
    ratio = MEAN_RATIO * math.exp(p - start)
    return -min(ratio * a, _clip(ratio, 0.7, 1.1) * a)


def _slope(name: str, p: float, q: float, a: float) -> float:
    """Return the slope of a token's loss by differences. cispo's weight has no gradient."""
    if name == "cispo":
        return -_clip(math.exp(p - q), 0.7, 1.1) * a
    step = 1e-6

    def at(moved: float) -> float:
        return _gspo(moved, p, a) if name == "gspo" else _by_token(name, moved, q, a)

    return (at(p + step) - at(p - step)) / (2 * step)


CLIPS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
CONFIG = {"ppo": CLIPS, "cispo": CLIPS, "gspo": CLIPS, "dro": {"beta": 0.5}}


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name: str) -> None:
    loss, settings = loss_of(name, CONFIG.get(name, {}))
    p = torch.tensor(P, dtype=torch.float64, requires_grad=True)
    weights = {"weights": torch.tensor(A, dtype=torch.float64)}
    others = {
        "logprobs": torch.tensor(Q, dtype=torch.float64),
        "advantages": torch.tensor(A, dtype=torch.float64),
        "sequence_ratio_mask": torch.tensor([0.0, 1.0, 1.0, 1.0]),
    }
    value = loss.compute(p, weights if name == "cross_entropy" else others, settings)
    value.backward()
    rows = list(zip(P, Q, A, strict=True))
    expected = [_gspo(p, p, a) if name == "gspo" else _by_token(name, p, q, a) for p, q, a in rows]
    assert value.item() == pytest.approx(sum(expected))
    assert p.grad is not None
    assert p.grad.tolist() == pytest.approx(
        [_slope(name, *row) for row in rows], rel=1e-5, abs=1e-8
    )


def test_ratio_that_is_multiplied_by_0_is_never_infinite() -> None:
    p = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([-1e4, -1e4, -3.5]),
        "advantages": torch.tensor([0.0, 1.0, 1.0]),
        "mask": torch.tensor([1.0, 0.0, 1.0]),
    }
    for name in ("importance_sampling", "ppo", "cispo"):
        loss, settings = loss_of(name, {})
        value = loss.compute(p, inputs, settings)
        (slope,) = torch.autograd.grad(value, p)
        assert math.isfinite(value.item()), name
        assert slope[:2].tolist() == [0.0, 0.0], name


def test_defaults_are_the_clients() -> None:
    assert loss_of("ppo", {})[1] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert loss_of("cispo", {})[1] == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert loss_of("dro", {})[1] == {"beta": 0.05}
    papers = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    assert loss_of("gspo", {})[1] == papers
    loss, settings = loss_of("cross_entropy", {})
    assert loss.compute(torch.tensor(P), {}, settings).item() == pytest.approx(-sum(P))


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("stable_reinforce", {}, "got 'stable_reinforce'"),
        ("custom", {"loss_id": "x"}, "got 'custom'"),
        ("ppo", {"beta": 1.0}, "beta"),
        ("dro", {"beta": "much"}, "'much' must be a finite number"),
        ("dro", {"beta": math.inf}, "inf must be a finite number"),
        ("cross_entropy", {"x": 1.0}, "it has none"),
    ],
)
def test_unknown_field_is_rejected_by_name(name: str, config: dict, words: str) -> None:
    with pytest.raises(Refused, match=words):
        loss_of(name, config)
