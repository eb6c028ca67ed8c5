import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.sampling.exponential_noise import exponential_noise
from nano_inference.sampling.noise import noise_keys

CALM = settings(deadline=None)
SEEDS = st.integers(0, 2**64 - 1)
DRAWS = st.tuples(SEEDS, st.integers(0, 2**20), st.integers(0, 2**20))


def keys_of(draws: list[tuple[int, int, int]]) -> Tensor:
    return torch.from_numpy(noise_keys(draws))


@CALM
@given(draws=st.lists(DRAWS, min_size=1, max_size=20, unique=True))
def test_draw_has_a_unique_key_of_two_halves(draws: list[tuple[int, int, int]]) -> None:
    keys = noise_keys(draws)
    assert keys.shape == (len(draws), 2)
    assert keys.dtype == np.int64
    assert (keys >= 0).all()
    assert (keys < 2**32).all()
    assert len({tuple(key) for key in keys.tolist()}) == len(draws)
    assert all((noise_keys([draw])[0] == key).all() for draw, key in zip(draws, keys, strict=True))


@pytest.mark.parametrize(
    "changed", [(8, 3, 5), (7, 4, 5), (7, 3, 6), (3, 7, 5), (7, 5, 3), (2**63 + 7, 3, 5)]
)
def test_seed_index_and_position_each_change_the_key(changed: tuple[int, int, int]) -> None:
    one, other = noise_keys([(7, 3, 5), changed]).tolist()
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_keys_of_zero_draws_are_empty() -> None:
    assert noise_keys([]).shape == (0, 2)


def test_stream_is_pinned() -> None:
    """These values are a promise: a stored seed must sample the same tokens in every later version."""
    assert noise_keys([(0, 0, 0), (1, 2, 3), (2**64 - 1, 5, 100)]).tolist() == [
        [956087953, 595752380],
        [4259537587, 3497215824],
        [3807179616, 2487014456],
    ]
    drawn = exponential_noise(keys_of([(1, 2, 3)]), 5)[0]
    torch.testing.assert_close(
        drawn,
        torch.tensor([0.1272114515, 1.5513213873, 0.2185269594, 0.7674989700, 0.6913493276]),
        rtol=1e-6,
        atol=0,
    )


def ks_distance(values: Tensor) -> float:
    """Return the largest distance between the empirical and the standard exponential distribution."""
    ordered = values.double().sort().values
    cdf = 1 - torch.exp(-ordered)
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return float(torch.maximum((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()))


@pytest.fixture(scope="module")
def million() -> Tensor:
    return exponential_noise(
        keys_of([(11, index, position) for index in range(25) for position in range(40)]), 1000
    )


def test_noise_is_standard_exponential(million: Tensor) -> None:
    flat = million.flatten().double()
    assert len(flat) == 10**6
    assert ks_distance(flat) < 1.95 / math.sqrt(len(flat))  # false alarm rate 1/1000
    for power, moment in [(1, 1.0), (2, 2.0), (3, 6.0)]:
        spread = math.sqrt((math.factorial(2 * power) - moment**2) / len(flat))
        assert abs(float((flat**power).mean()) - moment) < 4 * spread


def test_noise_tail_has_the_expected_probability(million: Tensor) -> None:
    flat = million.flatten()
    for bound in (1e-2, 1e-3, 1e-4):
        expected = len(flat) * -math.expm1(-bound)
        assert abs(int((flat < bound).sum()) - expected) < 4 * math.sqrt(expected)
    assert len(flat[flat < 1e-3].unique()) > 0.99 * int((flat < 1e-3).sum())  # finely resolved


def test_noise_per_token_and_per_row_is_exponential(million: Tensor) -> None:
    bound = 2.5 / math.sqrt(1000)  # far in the tail for one row, because there are two thousand
    assert max(ks_distance(row) for row in million) < bound
    assert max(ks_distance(column) for column in million.T) < bound


@pytest.mark.parametrize("lag", [1, 2, 16, 256])
def test_neighbours_are_uncorrelated(million: Tensor, lag: int) -> None:
    centred = million.double() - 1
    along_tokens = (centred[:, lag:] * centred[:, :-lag]).mean()
    along_draws = (centred[lag:] * centred[:-lag]).mean()
    for correlation, count in [
        (along_tokens, million.shape[0] * (million.shape[1] - lag)),
        (along_draws, million.shape[1] * (million.shape[0] - lag)),
    ]:
        assert abs(float(correlation)) < 4 / math.sqrt(count)


@pytest.mark.parametrize("bits", [0, 1, 2**31 - 129, 2**31 - 128, 2**31 - 1, -1, -(2**31)])
def test_noise_is_positive_and_finite_for_every_bit_pattern(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    monkeypatch.setattr(
        "nano_inference.sampling.exponential_noise._mix32", lambda x: torch.full_like(x, bits)
    )
    value = float(exponential_noise(keys_of([(1, 1, 1)]), 1))
    assert 2.0**-32 <= value < 17


def test_noise_is_monotonic_where_the_formula_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around = torch.arange(2**25 - 2048, 2**25 + 2048, dtype=torch.int32)  # v = 2**-6
    monkeypatch.setattr(
        "nano_inference.sampling.exponential_noise._mix32", lambda x: around.expand(x.shape)
    )
    values = exponential_noise(keys_of([(1, 1, 1)]), len(around))[0]
    v = (around.double() + 0.5) * 2.0**-31
    torch.testing.assert_close(values.double(), -torch.log1p(-v), rtol=3e-6, atol=0)


@CALM
@given(draws=st.lists(DRAWS, min_size=1, max_size=40), vocab_size=st.sampled_from([1, 7, 33, 300]))
def test_noise_row_does_not_depend_on_its_neighbors(
    draws: list[tuple[int, int, int]], vocab_size: int
) -> None:
    together = exponential_noise(keys_of(draws), vocab_size)
    assert together.dtype == torch.float32
    assert together.shape == (len(draws), vocab_size)
    for row, draw in enumerate(draws):
        assert torch.equal(exponential_noise(keys_of([draw]), vocab_size)[0], together[row])


def test_token_has_the_same_noise_in_a_larger_vocabulary() -> None:
    keys = keys_of([(5, 0, 9), (6, 1, 2)])
    assert torch.equal(exponential_noise(keys, 1000)[:, :123], exponential_noise(keys, 123))
