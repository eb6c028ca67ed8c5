import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import SamplingParams, sample_with_logprobs
from nano_inference.arrays import as_host
from nano_inference.sampling.columns import Entries
from nano_inference.sampling.logprobs import gather_logprobs, logsumexp
from nano_inference.sampling.noise import noise_keys
from nano_inference.sampling.sample import Draw, sample
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch
from tests.depth import at_depth

VOCAB = 333
CHI_SQUARE_19 = 43.8  # false alarm rate 1/1000 at 19 degrees of freedom
CALM = settings(deadline=None, max_examples=at_depth(50))


@dataclass(frozen=True)
class Row:
    """One sample of a batch: its row of logits, parameters and position."""

    row: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draw: tuple[int, int, int] = (0, 0, 0)
    masked: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    @property
    def filters(self) -> bool:
        return self.params.filters


def batch_of(rows: list[Row], *, raw: bool = True, mask: bool = False) -> SamplingBatch:
    draws = [DrawRequest(row.params, row.row, row.draw, banned=row.masked) for row in rows]
    return replace(sampling_batch(draws), any_raw=raw, any_kept=mask)


ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    draw=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 64), st.integers(0, 4096)),
    masked=st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True).map(tuple),
)


def random_logits(
    num_rows: int, vocab_size: int = VOCAB, scale: float = 3.0, seed: int = 0
) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small here, so more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def full_logprobs(logits: Tensor, row: Row) -> Tensor:
    """Return float64 logprobs of the whole vocabulary at the row's temperature."""
    return torch.log_softmax(logits[row.row].double() / row.temperature, dim=-1)


def allowed_logprobs(logits: Tensor, row: Row) -> Tensor:
    """Return the same logprobs without masked tokens and before filters."""
    allowed = full_logprobs(logits, row)
    allowed[list(row.masked)] = -math.inf
    return torch.log_softmax(allowed, dim=-1)


# -- definitions -----------------------------------------------------------------------------------


@CALM
@given(rows=st.lists(ROWS, min_size=1, max_size=20), seed=st.integers(0, 2**20))
def test_logprobs_and_kept_mass_match_their_definitions(rows: list[Row], seed: int) -> None:
    logits = random_logits(3, seed=seed)
    rows = [replace(row, row=i % 3) for i, row in enumerate(rows)]
    draw = sample(logits, batch_of(rows, mask=True))
    raw = torch.log_softmax(logits.double(), dim=-1)
    for i, row in enumerate(rows):
        token = int(draw.token_ids[i])
        assert token not in row.masked
        assert float(draw.raw_logprobs[i]) == pytest.approx(
            float(raw[row.row, token]), abs=2e-6, rel=2e-6
        )
        if row.temperature == 0:
            assert draw.logprobs[i] == draw.raw_logprobs[i]
            assert draw.log_kept_mass[i] == 0
            continue
        full = full_logprobs(logits, row)
        both = float(draw.logprobs[i]) + float(draw.log_kept_mass[i])
        assert both == pytest.approx(float(full[token]), abs=1e-5, rel=1e-5)
        if not row.filters and not row.masked:
            assert draw.log_kept_mass[i] == 0
            continue
        drawable = torch.isin(
            torch.arange(VOCAB), torch.tensor(row.masked, dtype=torch.int64), invert=True
        )
        if row.filters:
            assert draw.kept is not None
            drawable &= draw.kept[i]
        ids = drawable.nonzero()[:, 0]
        assert token in ids.tolist()
        mass = float(torch.logsumexp(full[ids], dim=0))
        assert float(draw.log_kept_mass[i]) == pytest.approx(mass, abs=1e-5)
        assert float(draw.log_kept_mass[i]) <= 0


@pytest.mark.parametrize("temperature", [0.02, 0.7, 1.0, 1e30])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}])
def test_kept_mass_of_a_mask_may_be_tiny(temperature: float, options: dict[str, Any]) -> None:
    """A mass of e**-300 is 0 in float32, but its log is still reported, even one beyond float64."""
    logits = random_logits(1)
    allowed = [3, 100, 331]
    logits[0, allowed] = torch.tensor([-300.0, -301.0, -299.5])
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=frozenset(allowed), **options
    )
    draw = sample(logits, sampling_batch([DrawRequest(params, 0, (1, 0, i)) for i in range(8)]))
    full = torch.log_softmax(logits[0].double() / temperature, dim=-1)[draw.token_ids]
    torch.testing.assert_close(
        (draw.logprobs + draw.log_kept_mass).double(), full, rtol=1e-6, atol=1e-4
    )


def test_masked_logits_must_be_finite() -> None:
    """Corrupt logits are reported even if they could never be sampled."""
    logits = random_logits(3)
    logits[0, 7], logits[1, 7] = math.nan, math.inf
    params = SamplingParams(allowed_token_ids=frozenset({1, 2}))
    draw = sample(logits, sampling_batch([DrawRequest(params, row) for row in range(3)]))
    assert draw.logprobs.isnan().tolist() == [True, True, False]


@CALM
@given(
    temperature=st.sampled_from([0.01, 0.05, 0.1, 0.5]),
    top_k=st.sampled_from([0, 20]),
    seed=st.integers(0, 2**20),
)
def test_low_temperature_keeps_precision(temperature: float, top_k: int, seed: int) -> None:
    """Large scaled logits must not lose the digits of their differences."""
    logits = random_logits(1, seed=seed) + 40
    row = Row(temperature=float(torch.tensor(temperature)), top_k=top_k)
    draw = sample(logits, batch_of([replace(row, draw=(seed, 0, i)) for i in range(32)]))
    full = allowed_logprobs(logits, row)[draw.token_ids]
    torch.testing.assert_close(
        (draw.logprobs + draw.log_kept_mass).double(), full, rtol=1e-5, atol=2e-6
    )


def test_raw_logprobs_ignore_the_mask() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    draw = sample(logits, batch_of([Row(masked=(best,))]))
    expected = torch.log_softmax(logits.double(), dim=-1)[0, int(draw.token_ids[0])]
    assert float(draw.raw_logprobs[0]) == pytest.approx(float(expected), abs=1e-5)
    assert float(draw.logprobs[0]) > float(draw.raw_logprobs[0])


def test_mask_is_returned_only_if_requested() -> None:
    logits = random_logits(1)
    draw = sample(
        logits, batch_of([Row(top_k=3), Row(top_k=7, masked=(int(logits.argmax()),))], mask=True)
    )
    assert draw.kept is not None
    top = logits[0].topk(8).indices.tolist()
    assert set(draw.kept[0].nonzero()[:, 0].tolist()) == set(top[:3])
    assert set(draw.kept[1].nonzero()[:, 0].tolist()) == set(top[1:])
    assert sample(logits, batch_of([Row(top_k=3)])).kept is None


@CALM
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5, unique=True),
    noise=st.integers(0, 2**32),
)
def test_temperature_zero_takes_the_lowest_of_the_best_ids(ids: list[int], noise: int) -> None:
    logits = random_logits(1, seed=noise).clamp(max=5.0)
    logits[0, ids] = 6.0
    draw = sample(
        logits,
        batch_of([Row(temperature=0.0, top_k=2, draw=(noise, 0, 0)), Row(draw=(noise, 0, 0))]),
    )
    assert int(draw.token_ids[0]) == min(ids)
    assert draw.logprobs[0] == draw.raw_logprobs[0]
    expected = torch.log_softmax(logits.double(), dim=-1)[0, min(ids)]
    assert float(draw.logprobs[0]) == pytest.approx(float(expected), abs=1e-5)


def test_greedy_respects_the_mask() -> None:
    logits = random_logits(1)
    first, second = logits[0].topk(2).indices.tolist()
    assert sample(logits, batch_of([Row(temperature=0.0)])).token_ids.tolist() == [first]
    assert sample(logits, batch_of([Row(temperature=0.0, masked=(first,))])).token_ids.tolist() == [
        second
    ]


# -- the distribution ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.5),
        Row(temperature=3.0),
        Row(top_k=6),
        Row(top_p=0.8),
        Row(min_p=0.1),
        Row(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
        Row(masked=(3, 4)),
    ],
)
def test_draws_follow_the_distribution(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    # Rows are independent, and a short row gets little padding.
    monkeypatch.setattr("nano_inference.sampling.sample.ROW_TILE", 50_000)
    monkeypatch.setattr("nano_inference.sampling.logprobs.VOCAB_BLOCK", 20)
    num = 200_000
    logits = random_logits(1, vocab_size=20, scale=1.0, seed=4)
    few = batch_of([replace(row, draw=(9, 0, 0))], mask=row.filters)
    keys = torch.from_numpy(noise_keys([(9, i % 8, i // 8) for i in range(num)]))
    many = replace(
        few,
        noise_keys=keys,
        banned=Entries(
            torch.arange(num).repeat_interleave(len(row.masked)),
            few.banned.ids.repeat(num),
            few.banned.values.repeat(num),
        ),
        **{
            field.name: getattr(few, field.name).expand(num)
            for field in fields(few)
            if isinstance(getattr(few, field.name), Tensor)
            and field.name not in ("noise_keys", "mask_words")
        },
    )
    draw = sample(logits, many)
    full = allowed_logprobs(logits, row)
    keep = draw.kept[0] if draw.kept is not None else torch.ones(20, dtype=torch.bool)
    probabilities = torch.where(keep, full, -math.inf).softmax(dim=-1)
    counts = torch.bincount(draw.token_ids, minlength=20).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    distance = (
        (counts - num * probabilities)[possible] ** 2 / (num * probabilities)[possible]
    ).sum()
    assert float(distance) < CHI_SQUARE_19
    torch.testing.assert_close(
        draw.logprobs.double(), probabilities.log()[draw.token_ids], rtol=1e-5, atol=1e-5
    )


def test_single_call_sampler_follows_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.sampling.logprobs.VOCAB_BLOCK", 20)
    num = 200_000
    logits = random_logits(1, vocab_size=20, scale=1.0, seed=5)
    keys = torch.from_numpy(noise_keys([(3, 0, i) for i in range(num)]))
    tokens, logprobs = sample_with_logprobs(logits.expand(num, 20), torch.full((num,), 0.8), keys)
    probabilities = (logits[0].double() / 0.8).softmax(dim=-1)
    counts = torch.bincount(tokens, minlength=20).double()
    assert (
        float(((counts - num * probabilities) ** 2 / (num * probabilities)).sum()) < CHI_SQUARE_19
    )
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], rtol=1e-5, atol=1e-5)


# -- extremes --------------------------------------------------------------------------------------


@CALM
@given(
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([1.0, 100.0, 1e4]),
    alive=st.integers(1, VOCAB),
    temperature=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 100.0, 1e6]),
    top_p=st.sampled_from([1.0, 0.5]),
)
def test_sampled_token_is_possible_and_its_logprob_finite(
    seed: int, scale: float, alive: int, temperature: float, top_p: float
) -> None:
    logits = random_logits(4, scale=scale, seed=seed)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, order[alive:]] = -math.inf
    rows = [Row(row=i, temperature=temperature, top_p=top_p, draw=(seed, 0, i)) for i in range(4)]
    draw = sample(logits, batch_of(rows))
    for i in range(4):
        assert logits[i, int(draw.token_ids[i])] > -math.inf
    for values in (draw.logprobs, draw.raw_logprobs, draw.log_kept_mass):
        assert torch.isfinite(values).all()
        assert (values <= 0).all()
    tokens, logprobs = sample_with_logprobs(logits, torch.full((4,), temperature))
    assert (logits.gather(1, tokens[:, None]) > -math.inf).all()
    assert torch.isfinite(logprobs).all()


@CALM
@given(
    temperature=st.sampled_from([1e-45, 1e-40, 1e-38, 1e-37, 1e-30, 1e-20]),
    top_k=st.sampled_from([0, 5]),
)
@example(1e-38, 0)
def test_temperature_next_to_zero_is_nearly_greedy(temperature: float, top_k: int) -> None:
    """`SamplingParams` accepts any positive temperature: the smallest must not overflow into NaN."""
    logits = random_logits(2, seed=1)
    draw = sample(
        logits, batch_of([Row(row=i, temperature=temperature, top_k=top_k) for i in range(2)])
    )
    assert draw.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert draw.logprobs[0] <= 0  # not NaN
    assert torch.isfinite(draw.logprobs).all()
    assert torch.isfinite(draw.log_kept_mass).all()


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e300])
def test_huge_temperature_is_nearly_uniform(temperature: float) -> None:
    logits = random_logits(1, seed=1)
    draw = sample(logits, batch_of([Row(temperature=temperature, masked=(5,))]))
    assert float(draw.logprobs[0]) == pytest.approx(-math.log(VOCAB - 1), abs=1e-4)
    assert int(draw.token_ids[0]) != 5


def test_non_finite_row_is_reported_and_spares_the_others() -> None:
    logits = random_logits(3)
    clean = sample(logits, batch_of([Row(row=i) for i in range(3)]))
    logits[1, 7] = math.nan
    broken = sample(logits, batch_of([Row(row=i) for i in range(3)]))
    assert not math.isfinite(float(broken.logprobs[1]))
    for i in (0, 2):
        assert broken.token_ids[i] == clean.token_ids[i]
        assert broken.logprobs[i] == clean.logprobs[i]


# -- independent rows ------------------------------------------------------------------------------


def same(one: Draw, i: int, other: Draw, j: int) -> bool:
    names = ("token_ids", "logprobs", "raw_logprobs", "log_kept_mass")
    return all(torch.equal(getattr(one, name)[i], getattr(other, name)[j]) for name in names)


@CALM
@given(
    rows=st.lists(ROWS, min_size=2, max_size=40),
    vocab_size=st.sampled_from([VOCAB, 512, 1500]),
    data=st.data(),
)
def test_sampled_row_does_not_depend_on_its_neighbors(
    rows: list[Row], vocab_size: int, data: st.DataObject
) -> None:
    logits = random_logits(len(rows), vocab_size)
    rows = [replace(row, row=i) for i, row in enumerate(rows)]
    together = sample(logits, batch_of(rows))
    order = data.draw(st.permutations(range(len(rows))))
    moved = sample(logits, batch_of([rows[i] for i in order]))
    for position, i in enumerate(order):
        assert same(together, i, moved, position)
        assert same(together, i, sample(logits[i : i + 1], batch_of([replace(rows[i], row=0)])), 0)


@pytest.mark.parametrize("vocab_size", [VOCAB, 40_000])
def test_number_of_threads_changes_nothing(vocab_size: int) -> None:
    rows = [
        Row(row=i, top_k=(0, 40)[i % 2], temperature=(1.0, 0.0, 0.7)[i % 3], draw=(1, 0, i))
        for i in range(20)
    ]
    logits = random_logits(20, vocab_size)
    draws: list[Draw] = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        draws.append(sample(logits, batch_of(rows)))
    assert all(same(draws[0], i, other, i) for other in draws[1:] for i in range(20))


def test_group_samples_share_a_row_but_not_noise() -> None:
    logits = random_logits(2, scale=0.1)
    draw = sample(logits, batch_of([Row(row=1, draw=(4, index, 10)) for index in range(32)]))
    assert len(set(draw.token_ids.tolist())) > 16
    assert (
        len(
            {
                float(value)
                for value in gather_logprobs(logits[1:].expand(32, VOCAB), draw.token_ids)
            }
        )
        > 16
    )


# -- logsumexp -------------------------------------------------------------------------------------


@CALM
@given(
    vocab_size=st.sampled_from([1, 2, 511, 512, 513, 5000]),
    seed=st.integers(0, 100),
    scale=st.sampled_from([1, 1e3]),
)
def test_logsumexp_agrees_with_float64(vocab_size: int, seed: int, scale: float) -> None:
    logits = random_logits(3, vocab_size, scale=scale, seed=seed)
    torch.testing.assert_close(
        sum(logsumexp(logits)),
        torch.logsumexp(logits.double(), dim=-1).float(),
        rtol=1e-6,
        atol=1e-5,
    )


# -- sample_with_logprobs --------------------------------------------------------------------------


def test_sampler_is_pure_given_its_noise() -> None:
    logits, temperatures = random_logits(5), torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0])
    noise = torch.from_numpy(noise_keys([(1, 0, i) for i in range(5)]))
    inputs = [tensor.clone() for tensor in (logits, temperatures, noise)]
    state = torch.random.get_rng_state()
    first = sample_with_logprobs(logits, temperatures, noise)
    second = sample_with_logprobs(logits, temperatures, noise)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(inputs, (logits, temperatures, noise), strict=True)
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert first[0][[0, 4]].tolist() == logits.argmax(dim=-1)[[0, 4]].tolist()
    assert first[0].dtype == torch.int64
    assert first[1].dtype == torch.float32


def test_sampler_matches_the_engine() -> None:
    logits, temperatures = random_logits(4), torch.tensor([0.0, 0.5, 1.0, 2.0])
    rows = [Row(row=i, temperature=float(t), draw=(1, 2, i)) for i, t in enumerate(temperatures)]
    batch = batch_of(rows)
    tokens, logprobs = sample_with_logprobs(logits, temperatures, batch.noise_keys)
    draw = sample(logits, batch)
    assert torch.equal(tokens, draw.token_ids)
    assert torch.equal(logprobs, draw.logprobs)


def test_sampler_uses_the_seed_of_torch_without_noise() -> None:
    logits, temperatures = random_logits(64, scale=0.1), torch.ones(64)
    torch.manual_seed(3)
    first = sample_with_logprobs(logits, temperatures)[0]
    other = sample_with_logprobs(logits, temperatures)[0]
    torch.manual_seed(3)
    again = sample_with_logprobs(logits, temperatures)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sampler_draws_from_host_arrays_with_the_seed_of_numpy() -> None:
    logits, temperatures = as_host(random_logits(64, scale=0.1)), as_host(torch.ones(64))
    state = np.random.get_state()
    first = sample_with_logprobs(logits, temperatures)[0]
    other = sample_with_logprobs(logits, temperatures)[0]
    np.random.set_state(state)
    assert sample_with_logprobs(logits, temperatures)[0].tolist() == first.tolist()
    assert first.tolist() != other.tolist()


def test_sampler_accepts_any_floating_dtype() -> None:
    logits, temperatures = random_logits(3).bfloat16(), torch.tensor([0.0, 1.0, 0.5])
    noise = torch.from_numpy(noise_keys([(1, 0, i) for i in range(3)]))
    halves = sample_with_logprobs(logits, temperatures, noise)
    floats = sample_with_logprobs(logits.float(), temperatures.double(), noise)
    assert all(torch.equal(a, b) for a, b in zip(halves, floats, strict=True))


@pytest.mark.parametrize(
    ("shape", "temperatures"),
    [
        ((2, 5), [1.0]),
        ((5,), [1.0]),
        ((2, 5), [[1.0, 1.0]]),
        ((2, 5), [1.0, -0.1]),
        ((2, 5), [1.0, math.nan]),
    ],
)
def test_sampler_rejects_bad_shapes_and_negative_values(
    shape: tuple[int, ...], temperatures: list[float]
) -> None:
    with pytest.raises(ValueError, match="temperatures"):
        sample_with_logprobs(torch.zeros(shape), torch.tensor(temperatures))
