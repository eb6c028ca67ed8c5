"""Every write to a parameter is detected by its bits and positions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.rl import parameter_states
from nano_inference.rl.parameter_states import states
from tests.depth import at_depth


def swap_rows(words: Tensor, one: int, other: int) -> None:
    """Swap two runs of a few words of a flattened matrix."""
    size = min(4, len(words) - max(one, other), abs(one - other))
    first, second = words[one : one + size].clone(), words[other : other + size].clone()
    words[one : one + size], words[other : other + size] = second, first


def flip_signs(words: Tensor, one: int, other: int) -> None:
    """Flip two signs so that the sum of the two words stays the same modulo 2^16 or 2^32."""
    sign = torch.iinfo(words.dtype).min
    words[one] ^= sign
    if one != other:
        words[other] ^= sign


def flip_bit(words: Tensor, one: int, other: int) -> None:
    words[one] ^= 1 << other % (8 * words.element_size() - 1)


def shift(words: Tensor, one: int, other: int) -> None:
    words.copy_(words.roll(1 + one + other))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda tensor: tensor.data,
    "numpy": lambda tensor: torch.from_numpy(tensor.detach().numpy()),
    "detach": lambda tensor: tensor.detach(),
}


@settings(max_examples=at_depth(200), deadline=None)
@given(
    shape=st.sampled_from([(1,), (3,), (5, 7), (64, 33), (130, 64), (520, 33)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    write=st.sampled_from([swap_rows, flip_signs, flip_bit, shift]),
    way=st.sampled_from(sorted(WAYS)),
    places=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    constant=st.booleans(),
    seed=st.integers(0, 99),
)
def test_states_detect_every_changed_bit(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    write: Any,
    way: str,
    places: Any,
    constant: bool,
    seed: int,
) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    param = torch.nn.Parameter((torch.ones(shape) if constant else drawn).to(dtype))
    words = torch.int32 if dtype == torch.float32 else torch.int16
    before, (state,) = param.detach().view(words).clone(), states([param])
    assert states([param]) == [state]
    view = WAYS[way](param).view(-1).view(words)
    write(view, *(place % len(view) for place in places))
    same = torch.equal(param.detach().view(words), before)
    after = states([param])[0]
    assert ((after.words, after.halves) == (state.words, state.halves)) == same
    if way != "detach":
        assert after.version == state.version, "torch has not seen it"


@pytest.mark.parametrize("row", [1, 2, 3, 8])
def test_states_distinguish_rows_from_words(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover every pair of values of a tensor with several rows and a tail: swapped, and with
    flipped signs.
    """
    monkeypatch.setattr(parameter_states, "ROW", row)
    parameter_states._factors.cache_clear()
    data = torch.arange(1, 24, dtype=torch.float32)
    words = states([data])[0][2:]
    for one in range(23):
        for other in range(one):
            swapped, negated = data.clone(), data.clone()
            swapped[one], swapped[other] = data[other], data[one]
            negated[one], negated[other] = -data[one], -data[other]
            assert states([swapped])[0][2:] != words
            assert states([negated])[0][2:] != words
    parameter_states._factors.cache_clear()
