"""top_k, top_p and min_p of the CUDA backend, in Triton's interpreter: the tokens kept, and the
draws from them.
"""

import inspect
import math
import random
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.sampling import sample as reference
from nano_inference.sampling.filters import FilterColumns, rank
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch
from tests.depth import at_depth
from tests.ops.test_cpu_head import random_requests, same_bits

pytest.importorskip("triton")

from nano_inference.ops.cuda import filters, sampling
from nano_inference.ops.cuda.softmax import BLOCK

CALM = settings(deadline=None, max_examples=at_depth(8))
PARTS = ("logprobs", "raw_logprobs", "log_kept_mass", "top_logprobs")


@pytest.fixture(params=[16, 4096], ids=["whole rows", "gathered"])
def capacity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cover both paths of the last launch: over the row itself, and over its gathered
    candidates.
    """
    monkeypatch.setattr(filters, "CAPACITY", request.param)
    return request.param


def rows(num: int, vocab: int, seed: int = 0, scale: float = 3) -> Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def masked(requests: list[DrawRequest]) -> SamplingBatch:
    return replace(sampling_batch(requests), any_kept=True, any_filter=True, any_raw=True)


def draw_kept(logits: Tensor, **params: float) -> tuple[Draw, list[int]]:
    drawn = sampling.draw(logits, masked([DrawRequest(SamplingParams(**params), 0, (7, 0, 1))]))  # pyright: ignore[reportArgumentType]
    assert drawn.kept is not None
    return drawn, drawn.kept[0].nonzero()[:, 0].tolist()


# -- against the reference -------------------------------------------------------------------------


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(5))
@given(
    seed=st.integers(0, 2**20),
    vocab=st.sampled_from([1, 37, 300]),
    scale=st.sampled_from([0.1, 2.0, 20.0]),
    capacity=st.sampled_from([16, 4096]),
)
def test_same_draws_and_masks_as_the_reference(
    seed: int, vocab: int, scale: float, capacity: int
) -> None:
    """top_k and min_p match to the token, top_p wherever no prefix is within rounding of the
    threshold.
    """
    batch = masked(
        random_requests(random.Random(seed), 6, 3, vocab, named=True, top_logprobs=min(3, vocab))
    )
    logits = rows(3, vocab, seed, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CAPACITY", capacity)
        drawn = sampling.draw(logits, batch)
    expected = reference.sample(logits, batch)
    assert drawn.kept is not None
    assert expected.kept is not None
    differ = (drawn.kept != expected.kept).sum(dim=-1)
    assert int(differ.max()) <= 1, "rounding moves a threshold only to a neighbour"
    same = differ == 0
    assert int(same.sum()) >= 5
    assert torch.equal(drawn.token_ids[same], expected.token_ids[same])
    assert torch.equal(drawn.top_ids[same], expected.top_ids[same])
    for name in PARTS:
        torch.testing.assert_close(
            getattr(drawn, name)[same], getattr(expected, name)[same], rtol=1e-5, atol=2e-5
        )


@CALM
@given(
    seed=st.integers(0, 2**20),
    vocab=st.sampled_from([40, 385]),
    scale=st.sampled_from([0.1, 2.0, 20.0]),
    top_k=st.sampled_from([0, 1, 7, 21, 22, 352, 353, 5000]),
    top_p=st.sampled_from([1.0, 0.3, 0.9, 0.999, 1 - 2**-24]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    dead=st.sampled_from([0.0, 0.5, 0.999]),
    capacity=st.sampled_from([16, 4096]),
)
@example(3, 40, 0.1, 21, 1.0, 0.0, 0.0, 4096)  # -0 and +0 are equal
def test_filters_keep_the_shortest_sufficient_prefix(
    seed: int,
    vocab: int,
    scale: float,
    top_k: int,
    top_p: float,
    min_p: float,
    dead: float,
    capacity: int,
) -> None:
    """Logits are multiples of 1/4, so many are equal, including at every threshold."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, vocab, generator=generator) * scale * 4).round() / 4
    masked = torch.rand(vocab, generator=generator) < dead
    masked[seed % vocab] = False
    logits[0, masked] = -math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CAPACITY", capacity)
        drawn, kept = draw_kept(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    order, num, alive = rank(logits).ids[0], len(kept), int((~masked).sum())
    assert sorted(order[:num].tolist()) == kept, "not the highest-ranked tokens"
    odds = (logits[0, order].double() - logits.max().double()).exp()
    most = min(top_k or alive, alive)
    assert 1 <= num <= most
    if (top_p, min_p) == (1, 0):
        assert num == most
    mass = float(odds[:most].sum())
    if top_p < 1:
        assert num == 1 or float(odds[: num - 1].sum()) < top_p * mass * (1 + 1e-6)
    if num < most:
        enough = top_p < 1 and float(odds[:num].sum()) >= top_p * mass * (1 - 1e-6)
        assert enough or float(odds[num]) < min_p * (1 + 1e-6)
    assert num == 1 or float(odds[num - 1]) >= min_p * (1 - 1e-6)
    kept_mass = math.log(float(odds[:num].sum()) / float(odds.sum()))
    assert float(drawn.log_kept_mass[0]) == pytest.approx(kept_mass, abs=1e-5)
    assert float(drawn.log_kept_mass[0]) <= 0
    assert int(drawn.token_ids[0]) in kept
    token = logits[0, drawn.token_ids[0]].double() - logits.max().double()
    assert float(drawn.logprobs[0]) == pytest.approx(
        float(token - odds[:num].sum().log()), abs=1e-5
    )


# -- exact cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "num"),
    [
        ({"top_k": 5}, 5),
        ({"top_k": 39}, 39),
        ({"top_k": 400}, 40),
        ({"top_p": 0.5}, 20),
        ({"top_p": 0.5 + 2**-24}, 21),
        ({"top_p": 2**-20}, 1),
        ({"min_p": 1.0}, 40),
        ({"top_k": 16, "top_p": 0.25}, 4),
        ({"top_k": 16, "top_p": 0.25 + 2**-24}, 5),
        ({"top_k": 3, "min_p": 0.5}, 3),
    ],
)
def test_filter_ties_keep_the_lowest_ids(capacity: int, params: dict[str, float], num: int) -> None:
    drawn, kept = draw_kept(torch.full((1, 40), -3.5), **params)
    assert kept == list(range(num))
    assert drawn.log_kept_mass.tolist() == pytest.approx([math.log(num / 40)], abs=1e-6)
    assert drawn.logprobs.tolist() == pytest.approx([-math.log(num)], abs=1e-6)


def test_filters_apply_in_sequence(capacity: int) -> None:
    """Odds are 1, 1/2, 1/4, 1/8 …: among the first three, one token reaches 4/7 and two
    reach 6/7.
    """
    logits = torch.tensor([[-i * math.log(2) for i in range(12)]])
    assert draw_kept(logits, top_k=3, top_p=0.57)[1] == [0]
    assert draw_kept(logits, top_k=3, top_p=0.58)[1] == [0, 1]
    assert draw_kept(logits, top_k=3, top_p=0.86)[1] == [0, 1, 2]
    assert draw_kept(logits, top_k=6, top_p=0.97, min_p=0.12)[1] == [0, 1, 2, 3]
    assert draw_kept(logits, top_k=6, top_p=0.97, min_p=0.13)[1] == [0, 1, 2]


@pytest.mark.thorough(cases=["whole rows"])
def test_ties_cross_the_blocks_of_the_vocabulary(capacity: int) -> None:
    vocab = 2 * BLOCK + 60
    logits = torch.full((1, vocab), 1.0)
    logits[0, [BLOCK - 1, 2 * BLOCK + 3]] = 4.0
    logits[0, 5] = -math.inf
    order = [
        BLOCK - 1,
        2 * BLOCK + 3,
        *[i for i in range(vocab) if i not in (5, BLOCK - 1, 2 * BLOCK + 3)],
    ]
    for top_k in (7, BLOCK + 9):
        assert draw_kept(logits, top_k=top_k)[1] == sorted(order[:top_k])


def test_masks_of_samples_without_filters() -> None:
    logits = rows(1, 50)
    logits[0, 7] = -math.inf
    requests = [DrawRequest(SamplingParams(temperature=t)) for t in (0.0, 1.0)] + [
        DrawRequest(SamplingParams(top_k=2))
    ]
    drawn, expected = (draw(logits, masked(requests)) for draw in (sampling.draw, reference.sample))
    assert drawn.kept is not None
    assert expected.kept is not None
    assert torch.equal(drawn.kept, expected.kept)
    assert drawn.kept.sum(dim=-1).tolist() == [50, 49, 2]


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.thorough
@settings(deadline=None, max_examples=at_depth(3))
@given(seed=st.integers(0, 2**20), vocab=st.sampled_from([37, 300, BLOCK + 1]), data=st.data())
def test_sample_has_same_bits_in_any_batch(seed: int, vocab: int, data: st.DataObject) -> None:
    requests = random_requests(random.Random(seed), 5, 2, vocab, top_logprobs=2)
    logits = rows(2, vocab, seed)
    together = sampling.draw(logits, masked(requests))
    order = data.draw(st.permutations(range(5)))
    assert same_bits(
        together, sampling.draw(logits, masked([requests[i] for i in order])), list(order)
    )
    alone = sampling.draw(logits[requests[2].row :][:1], masked([requests[2]._replace(row=0)]))
    assert same_bits(together, alone, [2])


def test_unfiltered_sample_ignores_filters_of_others() -> None:
    logits = rows(2, BLOCK + 100)
    plain = [
        DrawRequest(SamplingParams(temperature=t), i % 2, (1, i, 0))
        for i, t in enumerate((1.0, 0.0, 0.7))
    ]
    filtered = [
        DrawRequest(SamplingParams(top_k=3), 1, (2, 0, 0)),
        DrawRequest(SamplingParams(min_p=0.1)),
    ]
    apart = sampling.draw(logits, replace(sampling_batch(plain), any_raw=True))
    together = sampling.draw(logits, replace(sampling_batch([*plain, *filtered]), any_raw=True))
    assert same_bits(together, apart, [0, 1, 2])


@pytest.mark.thorough
def test_gathering_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows(2, 500)
    batch = masked(random_requests(random.Random(4), 8, 2, 500, top_logprobs=2))
    gathered = sampling.draw(logits, batch)
    monkeypatch.setattr(filters, "CAPACITY", 1)
    assert same_bits(gathered, sampling.draw(logits, batch))
    assert torch.equal(gathered.kept, sampling.draw(logits, batch).kept)  # pyright: ignore[reportArgumentType]


def test_kernels_support_every_filter() -> None:
    asked = inspect.signature(filters.asks.fn).parameters
    assert {column.name for column in fields(FilterColumns)} < set(asked)


def test_top_p_counts_only_tokens_kept_by_top_k() -> None:
    """The first token has 0.885 of the mass of 20 tokens and 0.875 of the whole mass. Two tokens
    reach 0.9 either way.
    """
    logits = rows(3, 300, seed=1)[1:2]
    batch = sampling_batch(
        [DrawRequest(SamplingParams(temperature=0.7, top_k=20, top_p=0.9), key=(1, 0, 7))]
    )
    got, expected = sampling.draw(logits, batch), reference.sample(logits, batch)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(got.log_kept_mass, expected.log_kept_mass, atol=1e-5, rtol=0)
