import math

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.sampling.filters import keep_min_p, keep_top_k, keep_top_p, rank

CALM = settings(deadline=None)
# Quarters make ties; -inf is a masked token.
LOGITS = st.lists(
    st.one_of(st.integers(-12, 12).map(lambda n: n / 4), st.just(-math.inf)),
    min_size=1,
    max_size=40,
).filter(lambda row: max(row) > -math.inf)
TOP_K = st.one_of(st.just(0), st.integers(1, 45))
TOP_P = st.one_of(st.just(1.0), st.floats(0.01, 0.99))
MIN_P = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 0.99))
NEAR = 1e-5  # float32 and float64 may disagree this close to a threshold


def kept_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    ranking = rank(logits)
    keep_top_k(ranking, top_k)
    keep_top_p(ranking, top_p)
    keep_min_p(ranking, min_p)
    return torch.zeros_like(ranking.keep).scatter_(1, ranking.ids, ranking.keep)


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    rows = torch.tensor([logits], dtype=torch.float32)
    keep = kept_tokens(rows, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert keep.shape == rows.shape
    return set(keep[0].nonzero()[:, 0].tolist())


def expected(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Apply the three filters one after another in float64. Reject examples too close to a
    threshold.
    """
    ranking = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranking = [i for i in ranking if logits[i] > -math.inf]
    first = ranking[0]
    odds = {i: math.exp(logits[i] - logits[first]) for i in ranking}
    if top_k:
        ranking = ranking[:top_k]
    if top_p < 1:
        total, reached, prefix = sum(odds[i] for i in ranking), 0.0, []
        for i in ranking:
            assume(abs(reached - top_p * total) > NEAR * total)
            if reached >= top_p * total:
                break
            prefix.append(i)
            reached += odds[i]
        ranking = prefix
    assume(all(abs(odds[i] - min_p) > NEAR or odds[i] == min_p == 1 for i in ranking))
    return {first} | {i for i in ranking if odds[i] >= min_p}


@CALM
@given(logits=LOGITS, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P)
@example([0.0] * 40, 5, 1.0, 0.0)
@example([0.0] * 40, 0, 0.31, 0.0)
@example([1.0, 1.0, 1.0, 0.75], 0, 1.0, 1.0)
@example([0.0, -math.inf, 0.0], 0, 1.0, 0.0)
def test_filters_agree_with_the_plain_definitions(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    assert kept(logits, top_k, top_p, min_p) == expected(logits, top_k, top_p, min_p)


@CALM
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**20), TOP_K, TOP_P, MIN_P), min_size=1, max_size=20),
    vocab_size=st.sampled_from([5, 64, 301]),
)
def test_row_does_not_depend_on_its_neighbors(
    rows: list[tuple[int, int, float, float]], vocab_size: int
) -> None:
    def draw(seed: int) -> Tensor:
        return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3

    logits = torch.stack([draw(seed) for seed, *_ in rows])
    options = (
        torch.tensor([k for _, k, _, _ in rows]),
        torch.tensor([p for _, _, p, _ in rows]),
        torch.tensor([m for _, _, _, m in rows]),
    )
    together = kept_tokens(logits, *options)
    for row in range(len(rows)):
        alone = kept_tokens(logits[row : row + 1], *(option[row : row + 1] for option in options))
        assert torch.equal(alone[0], together[row])


@CALM
@given(logits=LOGITS, top_k=st.integers(1, 45))
def test_top_k_keeps_exactly_k(logits: list[float], top_k: int) -> None:
    possible = sum(logit > -math.inf for logit in logits)
    assert len(kept(logits, top_k=top_k)) == min(top_k, possible)


@CALM
@given(logits=LOGITS, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P)
def test_best_token_stays_and_masked_tokens_never_do(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    ids = kept(logits, top_k, top_p, min_p)
    assert logits.index(max(logits)) in ids
    assert all(logits[i] > -math.inf for i in ids)


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    assert kept([0.0, 1.0, 1.0, 1.0, 0.0], top_k=2) == {1, 2}


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    quarters = [0.0] * 4
    assert kept(quarters, top_p=0.5) == {0, 1}  # reached exactly: no extra token
    assert kept(quarters, top_p=0.5001) == {0, 1, 2}
    assert kept(quarters, top_p=1e-6) == {0}


def test_top_p_applies_to_the_mass_left_by_top_k() -> None:
    probabilities = [0.3, 0.3, 0.2, 0.1, 0.1]
    logits = [math.log(p) for p in probabilities]
    assert kept(logits, top_p=0.55) == {0, 1}
    assert kept(logits, top_k=3, top_p=0.70) == {0, 1}  # 0.6 of 0.8 is 0.75
    assert kept(logits, top_p=0.70) == {0, 1, 2}


def test_min_p_is_relative_to_the_best_remaining_token() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.11, 0.09)]
    assert kept(logits, min_p=0.2) == {0, 1, 2}
    assert kept(logits, top_k=2, min_p=0.2) == {0, 1}
    assert kept(logits, top_p=0.5, min_p=0.2) == {0}
    # min_p before top_p would leave 0.8, of which the best token is 0.625
    assert kept(logits, top_p=0.6, min_p=0.5) == {0, 1}


def test_best_token_survives_a_top_p_that_rounds_to_zero() -> None:
    assert kept([0.0, 1.0, 0.5], top_p=1e-46) == {1}


def test_single_possible_token_survives_every_filter() -> None:
    assert kept([-math.inf, 2.0, -math.inf], top_k=1, top_p=0.01, min_p=1.0) == {1}
