"""`AdamW` and `clip_grad_norm_`: torch's arguments, errors, states and results up to rounding."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nano_inference import ConfigError
from nano_inference.rl import AdamW, clip_grad_norm_
from tests.depth import at_depth
from tests.ops.compiler import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
FEW = settings(max_examples=at_depth(30), deadline=None)
OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, torch.tensor(0.02)]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.95)]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)
SHAPES = [(3, 70), (5,), (), (129,)]


def params_of(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@FEW
@given(OPTIONS, st.integers(0, 9))
def test_steps_equal_those_of_torch(options: dict[str, Any], seed: int) -> None:
    ours, theirs = params_of(seed), params_of(seed)
    steppers = AdamW(ours, **options), torch.optim.AdamW(theirs, **options, foreach=False)
    for step in range(5):
        for params, stepper in zip((ours, theirs), steppers, strict=True):
            set_gradients(params, 100 * seed + step)
            params[1].grad = None if step == 2 else params[1].grad
            stepper.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    results: list[list[Tensor]] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            params = params_of(3, dtype)
            optimizer = AdamW(params, lr=0.1, max_grad_norm=0.5)
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
            results.append([param.detach() for param in params])
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@FEW
@given(st.sampled_from([0.01, 1.0, 1e3]), st.integers(0, 9))
def test_clipped_gradients_equal_those_of_torch(most: float, seed: int) -> None:
    ours, theirs = params_of(seed), params_of(seed)
    set_gradients(ours, seed)
    set_gradients(theirs, seed)
    norm, other = clip_grad_norm_(ours, most), nn.utils.clip_grad_norm_(theirs, most)
    torch.testing.assert_close(norm, other)
    for mine, param in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, param.grad)


def test_limit_of_the_norm_equals_clipping_first() -> None:
    limited, clipped = params_of(1), params_of(1)
    for params in (limited, clipped):
        set_gradients(params, 2)
    AdamW(limited, lr=0.1, max_grad_norm=0.3).step()
    clip_grad_norm_(clipped, 0.3)
    AdamW(clipped, lr=0.1).step()
    assert all(map(torch.equal, limited, clipped))


def test_states_move_between_the_two_optimizers() -> None:
    params = params_of(4)
    set_gradients(params, 5)
    theirs = torch.optim.AdamW(params, lr=0.1, foreach=False)
    theirs.step()
    ours = AdamW(params, lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert {int(state["step"]) for state in ours.state.values()} == {2}
    theirs.load_state_dict(ours.state_dict())
    theirs.step()
    assert {int(state["step"]) for state in theirs.state.values()} == {3}


def test_closure_is_called_with_gradients() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([{"params": [param], "lr": 0.5}])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3.0
    assert float(param.detach().max()) < 1.0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lr": -1.0}, ValueError, "learning rate"),
        ({"betas": (1.0, 0.9)}, ValueError, "beta"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"foreach": True}, ConfigError, "foreach=True"),
        ({"fused": True}, ConfigError, "fused=True"),
        ({"capturable": True}, ConfigError, "capturable=True"),
        ({"max_grad_norm": 0.0}, ConfigError, "max_grad_norm=0"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        AdamW(params_of(0), **options)


def test_unsupported_parameters_are_rejected_before_a_change() -> None:
    good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AdamW([good, bad])
    for param in (good, bad):
        param.grad = torch.ones_like(param)
    with pytest.raises(ConfigError, match="float64"):
        optimizer.step()
    with pytest.raises(ConfigError, match="max_norm=-1"):
        clip_grad_norm_([good], -1.0)
    assert torch.equal(good.detach(), torch.ones(3))
    assert not optimizer.state
