"""The head of the CPU backend, compared with torch's reference on the same logits and noise, and
bit by bit with itself.

tests/sampling/test_pipeline.py checks the meaning of a draw on these kernels too.
"""

import ctypes
import math
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.ops.cpu import head
from nano_inference.ops.cpu.build import LAWS, Law
from nano_inference.ops.cpu.head import CpuHead
from nano_inference.ops.cpu.weights import PackedWeight
from nano_inference.sampling import sample as reference
from nano_inference.sampling.exponential_noise import exponential_noise
from nano_inference.sampling.filters import rank
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch
from nano_inference.structured.mask_bits import mask_of
from tests.depth import at_depth
from tests.ops.cpu_kernels import as_packed, available
from tests.ops.cpu_kernels import kernels as built

CAPPED = LogitScale(1.5, 3.0)
CALM = settings(deadline=None, max_examples=at_depth(15))
VOCABULARIES = [1, 15, 100, 384, 385, 8193]
VALUES = ("token_ids", "logprobs", "raw_logprobs", "log_kept_mass", "top_ids", "top_logprobs")
CHI_SQUARE_39 = 72.1  # the 99.9 % quantile for 39 degrees of freedom


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return built()


def random_requests(
    rng: random.Random, num: int, num_rows: int, vocab: int, named: bool = False, **fixed: Any
) -> list[DrawRequest]:
    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    def one() -> DrawRequest:
        options: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]),
            "top_k": rng.choice([0, 0, 0, 1, 5, 200, 3000]),
            "top_p": rng.choice([1.0, 1.0, 0.2, 0.95]),
            "min_p": rng.choice([0.0, 0.0, 0.05, 0.5]),
            "presence_penalty": rng.choice([0.0, 0.0, 1.5]),
            "frequency_penalty": rng.choice([0.0, -0.3]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
            "logit_bias": dict.fromkeys(ids(rng.randrange(3)), rng.choice([-2.5, 3.0])),
            "allowed_token_ids": rng.choice([None, None, frozenset(ids(40))]),
            "raw_logprobs": rng.choice([True, False]),
            "logprob_token_ids": rng.sample(range(vocab), min(vocab, rng.choice([0, 1, 9])))
            if named
            else (),
        }
        draw = (rng.randrange(2**64), rng.randrange(9), rng.randrange(4096))
        params = SamplingParams(**(options | fixed))
        banned = {*ids(3)} - {min(params.allowed_token_ids or {0})} if rng.random() < 0.3 else ()
        return DrawRequest(params, rng.randrange(num_rows), draw, ids(20), ids(20), banned)

    return [one() for _ in range(num)]


def same_bits(one: Draw, other: Draw, rows: slice | list[int] = slice(None)) -> bool:
    """True if every row of one is in the other. NaN equals NaN."""
    pairs = [(getattr(one, name)[rows], getattr(other, name)) for name in VALUES]
    if one.kept is not None and other.kept is not None:
        pairs.append((one.kept[rows], other.kept))
    if isinstance(rows, slice):
        pairs.append((one.named_logprobs, other.named_logprobs))
    return all(torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)) for a, b in pairs)


def assert_same_named(drawn: Draw, expected: Draw, batch: SamplingBatch, agree: Tensor) -> None:
    """Compare the logprobs of named tokens with the reference, and bitwise with the draw."""
    both = agree[batch.named.rows]
    torch.testing.assert_close(
        drawn.named_logprobs[both],
        expected.named_logprobs[both],
        rtol=1e-5,
        atol=2e-5,
        equal_nan=True,
    )
    is_drawn = batch.named.ids == drawn.token_ids[batch.named.rows]
    samples = batch.named.rows[is_drawn]
    values = torch.stack([drawn.logprobs, drawn.raw_logprobs], dim=1)[samples]
    assert torch.equal(drawn.named_logprobs[is_drawn].nan_to_num(9e9), values.nan_to_num(9e9))


def hidden_and_weight(
    vocab: int, columns: int, rows: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, PackedWeight]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, columns, generator=generator).to(dtype)
    weight = torch.randn(vocab, columns, generator=generator) * (3 / math.sqrt(columns))
    return hidden, as_packed(weight.to(dtype))


# -- against the reference -------------------------------------------------------------------------


@CALM
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from(VOCABULARIES))
def test_same_tokens_as_the_reference_on_the_same_logits(
    kernels: ctypes.CDLL, seed: int, vocab: int
) -> None:
    rng = random.Random(seed)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    requests = random_requests(rng, 20, 3, vocab, named=True, top_logprobs=min(4, vocab))
    batch = replace(sampling_batch(requests), any_raw=True, any_kept=True)
    drawn = CpuHead(kernels, 2).sample_logits(logits, batch)
    expected = reference.sample(logits, batch)
    agree = drawn.token_ids == expected.token_ids
    assert int((~agree).sum()) <= 1, "rounding may decide only rare ties"
    if drawn.kept is not None and expected.kept is not None:
        others = (drawn.kept != expected.kept).sum(dim=-1)
        assert int(others.max()) <= 2, "rounding moves a threshold only to a neighbour"
        agree &= others == 0
    for name in ("logprobs", "raw_logprobs", "log_kept_mass"):
        torch.testing.assert_close(
            getattr(drawn, name)[agree], getattr(expected, name)[agree], rtol=1e-5, atol=2e-5
        )
    assert torch.equal(drawn.top_ids[agree], expected.top_ids[agree])
    assert_same_named(drawn, expected, batch, agree)


def test_unknown_plan_column_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.COLUMNS, "unknown", head.COLUMNS["top_p"])
    with pytest.raises(AssertionError, match="lacks unknown"):
        head._pointers()


def test_noise_equals_the_reference(kernels: ctypes.CDLL) -> None:
    """All tokens are equally likely, so the smallest noise wins."""
    vocab, num = 8193, 200
    batch = sampling_batch([DrawRequest(SamplingParams(), 0, (5, i, 2 * i)) for i in range(num)])
    drawn = CpuHead(kernels, 2).sample_logits(torch.full((1, vocab), -7.5), batch)
    assert torch.equal(drawn.token_ids, exponential_noise(batch.noise_keys, vocab).argmin(dim=-1))
    assert drawn.logprobs.tolist() == pytest.approx([-math.log(vocab)] * num, abs=1e-6)


@pytest.mark.thorough(cases=["dtype0-49152", "dtype0-151936", "dtype1-49152", "dtype1-151936"])
@pytest.mark.parametrize("vocab", [100, 8193, 49152, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_of_hidden_rows_are_those_of_their_logits(
    kernels: ctypes.CDLL, vocab: int, dtype: torch.dtype
) -> None:
    hidden, weight = hidden_and_weight(vocab, 7, 5, dtype)
    requests = random_requests(random.Random(vocab), 24, 5, vocab, named=True, top_logprobs=3)
    batch = replace(sampling_batch(requests), any_kept=True)
    logits = CpuHead(kernels, 2).logits(hidden, weight, CAPPED)
    streamed = CpuHead(kernels, 2).sample(hidden, weight, CAPPED, batch)
    assert same_bits(streamed, CpuHead(kernels, 1).sample_logits(logits, batch))
    expected = reference.sample(logits, batch)
    assert int((streamed.token_ids != expected.token_ids).sum()) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_the_products_scaled(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 33, generator=generator).to(dtype) for n in (70, 1000))
    exact = hidden.double() @ weight.double().T / 2.5
    for cap, expected in ((0.0, exact), (1.5, 1.5 * torch.tanh(exact / 1.5))):
        logits = CpuHead(kernels, 2).logits(hidden, as_packed(weight), LogitScale(2.5, cap))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [1, 15, 100, 385, 8193])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 1e30}]
)
def test_padding_never_wins(kernels: ctypes.CDLL, vocab: int, params: dict[str, Any]) -> None:
    """All real logits are far below 0, the logit of padding."""
    weight = as_packed(torch.full((vocab, 8), -20.0))
    batch = sampling_batch([DrawRequest(SamplingParams(**params), 0, (1, 1, i)) for i in range(50)])
    drawn = CpuHead(kernels, 2).sample(torch.ones(1, 8), weight, UNSCALED, batch)
    assert int(drawn.token_ids.max()) < vocab
    if not batch.any_filter and not batch.any_greedy:
        assert drawn.logprobs.tolist() == pytest.approx([-math.log(vocab)] * 50, abs=1e-6)


@pytest.mark.thorough
def test_draws_across_blocks_follow_the_distribution(kernels: ctypes.CDLL) -> None:
    num, vocab = 100_000, 1000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 2
    one = sampling_batch([DrawRequest(SamplingParams(temperature=1.3), 0, (3, 0, 0))])
    whole = {
        f.name: getattr(one, f.name)
        for f in fields(one)
        if isinstance(getattr(one, f.name), Tensor) and f.name != "mask_words"
    }
    many = replace(one, **{name: part.expand(num, *part.shape[1:]) for name, part in whole.items()})
    generator = torch.Generator().manual_seed(8)
    many = replace(many, noise_keys=torch.randint(0, 2**32, (num, 2), generator=generator))
    drawn = CpuHead(kernels, 2).sample_logits(logits, many)
    probabilities = (logits[0].double() / 1.3).softmax(dim=-1)
    bins = torch.arange(vocab) // 25
    expected = num * torch.zeros(40, dtype=torch.float64).index_add_(0, bins, probabilities)
    counts = torch.bincount(bins[drawn.token_ids], minlength=40)
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_39
    torch.testing.assert_close(
        drawn.logprobs.double(), probabilities.log()[drawn.token_ids], rtol=1e-5, atol=1e-5
    )


# -- filters ---------------------------------------------------------------------------------------


@CALM
@given(
    seed=st.integers(0, 2**20),
    vocab=st.sampled_from([40, 385, 8193]),
    scale=st.sampled_from([0.1, 2.0, 20.0]),
    top_k=st.sampled_from([0, 1, 7, 21, 22, 50, 352, 353, 5000]),
    top_p=st.sampled_from([1.0, 0.3, 0.9, 0.999, 1 - 2**-24]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    dead=st.sampled_from([0.0, 0.5, 0.999]),
)
@example(3, 40, 0.1, 21, 1.0, 0.0, 0.0)  # -0 and +0 are equal
def test_filters_keep_the_shortest_sufficient_prefix(
    kernels: ctypes.CDLL,
    seed: int,
    vocab: int,
    scale: float,
    top_k: int,
    top_p: float,
    min_p: float,
    dead: float,
) -> None:
    """Logits are multiples of 1/4, so many are equal, including at every threshold."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, vocab, generator=generator) * scale * 4).round() / 4
    masked = torch.rand(vocab, generator=generator) < dead
    masked[seed % vocab] = False
    logits[0, masked] = -math.inf
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    batch = replace(
        sampling_batch([DrawRequest(params, 0, (seed, 0, 0))]), any_kept=True, any_filter=True
    )
    drawn = CpuHead(kernels, 1).sample_logits(logits, batch)
    assert drawn.kept is not None
    order = rank(logits).ids[0]
    alive = int((~masked).sum())
    num = int(drawn.kept[0].sum())
    assert bool(drawn.kept[0, order[:num]].all()), "not the highest-ranked tokens"
    odds = (logits[0, order].double() - logits.max().double()).exp()
    assert num <= (min(top_k, alive) if top_k else alive)
    if params == SamplingParams(top_k=top_k):
        assert num == (min(top_k, alive) if top_k else alive)
    mass = float(odds[: min(top_k, alive) if top_k else alive].sum())
    # float32 sums in ranking order: equal terms all round in one direction
    slack = 1e-5 + alive * 2**-24
    if top_p < 1:
        assert num == 1 or float(odds[: num - 1].sum()) < top_p * mass * (1 + slack)
    if num < min(top_k or alive, alive):
        enough = top_p < 1 and float(odds[:num].sum()) >= top_p * mass * (1 - slack)
        assert enough or float(odds[num]) < min_p * (1 + 1e-5)
    assert num == 1 or float(odds[num - 1]) >= min_p * (1 - 1e-5)
    kept_mass = math.log(float(odds[:num].sum()) / float(odds.sum()))
    assert float(drawn.log_kept_mass[0]) == pytest.approx(kept_mass, abs=1e-5)
    assert float(drawn.log_kept_mass[0]) <= 0
    assert bool(drawn.kept[0, drawn.token_ids[0]])


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.thorough
@CALM
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from(VOCABULARIES), data=st.data())
def test_sample_has_same_bits_in_any_batch_and_threads(
    kernels: ctypes.CDLL, seed: int, vocab: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    hidden, weight = hidden_and_weight(vocab, 9, 4, torch.bfloat16, seed)
    requests = random_requests(rng, 16, 4, vocab)
    together = CpuHead(kernels, 1).sample(hidden, weight, UNSCALED, _raw(requests))
    assert same_bits(together, CpuHead(kernels, 2).sample(hidden, weight, UNSCALED, _raw(requests)))
    order = data.draw(st.permutations(range(16)))
    moved = CpuHead(kernels, 2).sample(hidden, weight, UNSCALED, _raw([requests[i] for i in order]))
    assert same_bits(together, moved, list(order))
    for i, request in enumerate(requests):
        row = hidden[request.row : request.row + 1]
        alone = CpuHead(kernels, 1).sample(row, weight, UNSCALED, _raw([request._replace(row=0)]))
        assert same_bits(together, alone, [i])


def _raw(requests: list[DrawRequest]) -> SamplingBatch:
    return replace(sampling_batch(requests), any_raw=True)


@CALM
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from(VOCABULARIES))
def test_logprobs_of_a_row_agree_bitwise(kernels: ctypes.CDLL, seed: int, vocab: int) -> None:
    """The rows are plain at temperature 1, greedy, raw with other options, best tokens,
    and scores.
    """
    hidden, weight = hidden_and_weight(vocab, 8, 1, torch.bfloat16, seed)
    plain = SamplingParams()
    others = [
        {"temperature": 0.0},
        {"temperature": 0.4},
        {"top_k": 3},
        {"logit_bias": {0: 2.0}},
        {"top_p": 0.5},
    ]
    requests = [DrawRequest(plain, 0, (seed, 0, i)) for i in range(20)]
    requests += [
        DrawRequest(SamplingParams(**other), 0, (seed, 1, i)) for i, other in enumerate(others)
    ]
    drawn = CpuHead(kernels, 2).sample(hidden, weight, UNSCALED, _raw(requests))
    assert torch.equal(drawn.logprobs[:21], drawn.raw_logprobs[:21])
    rows = hidden.expand(len(requests), -1).contiguous()
    scores = CpuHead(kernels, 2).gather_logprobs(
        rows, weight, UNSCALED, drawn.token_ids, torch.ones(len(rows))
    )
    assert torch.equal(scores, drawn.raw_logprobs)
    best = [
        DrawRequest(SamplingParams(top_logprobs=vocab, temperature=float(t)), 0) for t in (0, 1)
    ]
    shown = CpuHead(kernels, 1).sample(hidden, weight, UNSCALED, sampling_batch(best))
    for i in range(2):
        rows = (
            hidden.expand(vocab, -1).contiguous()
            if vocab < 1000
            else hidden.expand(5, -1).contiguous()
        )
        ids = shown.top_ids[i, : len(rows)]
        scores = CpuHead(kernels, 1).gather_logprobs(
            rows, weight, UNSCALED, ids, torch.ones(len(rows))
        )
        assert torch.equal(scores, shown.top_logprobs[i, : len(rows)])


def test_score_at_a_temperature_equals_the_plain_logprob(kernels: ctypes.CDLL) -> None:
    hidden, weight = hidden_and_weight(700, 8, 4, torch.float32)
    temperatures = [0.6, 1.0, 1e-3, 0.6]
    requests = [
        DrawRequest(SamplingParams(temperature=t), i, (1, 2, i)) for i, t in enumerate(temperatures)
    ]
    drawn = CpuHead(kernels, 2).sample(hidden, weight, UNSCALED, sampling_batch(requests))
    wanted = torch.tensor(temperatures, dtype=torch.float64)
    assert torch.equal(
        CpuHead(kernels, 2).gather_logprobs(hidden, weight, UNSCALED, drawn.token_ids, wanted),
        drawn.logprobs,
    )


def test_group_samples_equal_draws_from_separate_rows(
    kernels: ctypes.CDLL,
) -> None:
    hidden, weight = hidden_and_weight(2000, 8, 2, torch.bfloat16)
    group = [DrawRequest(SamplingParams(top_p=(1.0, 0.8)[i % 2]), 1, (4, i, 10)) for i in range(32)]
    drawn = CpuHead(kernels, 2).sample(hidden, weight, UNSCALED, sampling_batch(group))
    apart = [request._replace(row=i) for i, request in enumerate(group)]
    rows = hidden[1:].expand(32, -1).contiguous()
    assert same_bits(
        drawn, CpuHead(kernels, 2).sample(rows, weight, UNSCALED, sampling_batch(apart))
    )
    assert len(set(drawn.token_ids.tolist())) > 16


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_has_same_bits_on_all_instruction_sets(dtype: torch.dtype, law: Law) -> None:
    builds = available(law)
    if len(builds) < 2:
        pytest.skip("this machine has one instruction set only")
    hidden, weight = hidden_and_weight(8193, 31, 6, dtype)
    hidden[5, 0] = math.nan
    requests = random_requests(random.Random(6), 60, 6, 8193, named=True, top_logprobs=3)
    draws = {
        name: CpuHead(built(name), 2).sample(hidden, weight, CAPPED, _raw(requests))
        for name in builds
    }
    first = draws[builds[0]]
    assert all(same_bits(first, other) for other in draws.values()), draws.keys()


# -- extremes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"logit_bias": {3: 1.0}}]
)
def test_broken_row_is_reported_without_affecting_others(
    kernels: ctypes.CDLL, poison: float, options: dict[str, Any]
) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    batch = _raw(
        [DrawRequest(SamplingParams(top_logprobs=2, **options), i, (1, 1, i)) for i in range(3)]
    )
    clean = CpuHead(kernels, 2).sample_logits(logits, batch)
    for token in (0, 401, 999):
        broken = logits.clone()
        broken[1, token] = poison
        drawn = CpuHead(kernels, 2).sample_logits(broken, batch)
        assert drawn.token_ids[1] == 0
        assert drawn.logprobs[1].isnan()
        assert not drawn.top_logprobs[1].isfinite().any()
        for i in (0, 2):
            assert all(
                torch.equal(getattr(clean, name)[i], getattr(drawn, name)[i]) for name in VALUES
            )


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-3, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_single_remaining_token_is_drawn_with_certainty(
    kernels: ctypes.CDLL, temperature: float, filters: dict[str, Any]
) -> None:
    logits = torch.full((1, 900), -math.inf)
    logits[0, 777] = -3e5
    batch = sampling_batch(
        [DrawRequest(SamplingParams(temperature=temperature, **filters), 0, (2, 2, 2))]
    )
    drawn = CpuHead(kernels, 2).sample_logits(logits, batch)
    assert drawn.token_ids.tolist() == [777]
    assert drawn.logprobs.tolist() == drawn.log_kept_mass.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [0.02, 0.7, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}])
def test_kept_mass_of_a_mask_may_be_tiny(
    kernels: ctypes.CDLL, temperature: float, options: dict[str, Any]
) -> None:
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(0)) * 3
    allowed = [3, 100, 831]
    logits[0, allowed] = torch.tensor([-300.0, -301.0, -299.5])
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=frozenset(allowed), **options
    )
    batch = sampling_batch([DrawRequest(params, 0, (1, 0, i), banned=[100]) for i in range(8)])
    drawn = CpuHead(kernels, 2).sample_logits(logits, batch)
    full = torch.log_softmax(logits[0].double() / temperature, dim=-1)[drawn.token_ids]
    torch.testing.assert_close(
        (drawn.logprobs + drawn.log_kept_mass).double(), full, rtol=1e-6, atol=1e-4
    )
    logits[0, 5] = math.nan  # an invalid distribution is reported, because it cannot be sampled
    assert bool(CpuHead(kernels, 2).sample_logits(logits, batch).logprobs.isnan().all())


@CALM
@given(
    seed=st.integers(0, 2**20),
    left=st.sampled_from([0.005, 0.5, 0.97, 1.0]),
    temperature=st.sampled_from([0.4, 1.0]),
    num_samples=st.sampled_from([1, 3]),
)
def test_masked_draw_equals_draw_from_allowed_tokens(
    kernels: ctypes.CDLL, seed: int, left: float, temperature: float, num_samples: int
) -> None:
    """The mask removes whole blocks, a block's maximum, or other tokens only."""
    vocab, generator = 384 * 4 + 100, torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab, generator=generator) * 3
    may = torch.rand(2, vocab, generator=generator) < left
    may[0, 384 * (seed % 4) :][:384] = False
    may[1, 384:768] |= logits[1, 384:768] > 4
    may[:, 3] = True
    params = SamplingParams(temperature=temperature)
    requests = [
        DrawRequest(params, row, (seed, i, 5), mask=mask_of(may[row].nonzero().flatten().tolist()))
        for row in range(2)
        for i in range(num_samples)
    ]
    head = CpuHead(kernels, 2)
    masked = head.sample_logits(logits, sampling_batch(requests))
    plain = sampling_batch([request._replace(mask=None) for request in requests])
    expected = head.sample_logits(logits.masked_fill(~may, -math.inf), plain)
    assert torch.equal(masked.token_ids, expected.token_ids)
    assert torch.equal(masked.logprobs, expected.logprobs)


def test_disallowed_tokens_are_never_drawn(kernels: ctypes.CDLL) -> None:
    logits = torch.randn(1, 1500, generator=torch.Generator().manual_seed(0))
    allowed = frozenset({5, 390, 1400, 1499})
    for options in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 1e30}):
        params = SamplingParams(allowed_token_ids=allowed, **options)
        batch = sampling_batch([DrawRequest(params, 0, (1, 0, i), banned=[390]) for i in range(64)])
        drawn = set(CpuHead(kernels, 2).sample_logits(logits, batch).token_ids.tolist())
        assert drawn <= allowed - {390}, options
        assert len(drawn) >= 2 or "top_k" in options or params.temperature == 0


def test_mismatched_arguments_are_rejected(kernels: ctypes.CDLL) -> None:
    hidden, weight = hidden_and_weight(100, 8, 2, torch.float32)
    with pytest.raises(IndexError, match="2 rows"):
        CpuHead(kernels, 1).sample(
            hidden, weight, UNSCALED, sampling_batch([DrawRequest(SamplingParams(), 2)])
        )
    biased = sampling_batch([DrawRequest(SamplingParams(logit_bias={100: 1.0}))])
    with pytest.raises(IndexError, match="100"):
        CpuHead(kernels, 1).sample(hidden, weight, UNSCALED, biased)
    with pytest.raises(IndexError, match="100"):
        CpuHead(kernels, 1).gather_logprobs(
            hidden, weight, UNSCALED, torch.tensor([3, 100]), torch.ones(2)
        )
    with pytest.raises(ValueError, match="hidden rows"):
        CpuHead(kernels, 1).logits(hidden.bfloat16(), weight, UNSCALED)
    with pytest.raises(ValueError, match="float32"):
        CpuHead(kernels, 1).sample_logits(hidden.bfloat16(), sampling_batch([]))


def test_empty_batch_draws_nothing(kernels: ctypes.CDLL) -> None:
    hidden, weight = hidden_and_weight(100, 8, 0, torch.float32)
    assert (
        len(CpuHead(kernels, 2).sample(hidden, weight, UNSCALED, sampling_batch([])).token_ids) == 0
    )
    assert CpuHead(kernels, 2).gather_logprobs(
        hidden, weight, UNSCALED, torch.empty(0, dtype=torch.int64), torch.empty(0)
    ).shape == (0,)
    assert CpuHead(kernels, 2).logits(hidden, weight, UNSCALED).shape == (0, 100)
