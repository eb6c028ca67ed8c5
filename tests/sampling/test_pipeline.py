"""The whole sampling pipeline, in torch and in the CPU kernels, against a plain float64
implementation; its parts as a table.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import SamplingParams, SamplingPipeline
from nano_inference.ops.cpu.head import CpuHead
from nano_inference.sampling import pipeline
from nano_inference.sampling import sample as reference
from nano_inference.sampling.columns import Entries, columns_of
from nano_inference.sampling.logprobs import best_tokens
from nano_inference.sampling.noise import noise_keys
from nano_inference.sampling.pipeline import (
    STANDARD,
    Bias,
    Masks,
    MinP,
    Penalties,
    Temperature,
    TopK,
    TopP,
)
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch
from tests.depth import at_depth
from tests.ops import cpu_kernels

VOCAB = 61
CALM = settings(deadline=None, max_examples=at_depth(80))
IDS = st.integers(0, VOCAB - 1)
Sample = Callable[[Tensor, SamplingBatch], Draw]
NEAR = 1e-4  # float32 and float64 may disagree this close to a filter's threshold

PARAMS = st.builds(
    dict[str, Any],
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 10.0]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, -2.5, 3.0, 100.0]), max_size=4),
    allowed_token_ids=st.one_of(st.none(), st.none(), st.sets(IDS, min_size=1, max_size=30)),
    top_logprobs=st.sampled_from([0, 3, VOCAB]),
).map(lambda options: SamplingParams(**options))
DRAWS = st.builds(
    DrawRequest,
    params=PARAMS,
    row=st.integers(0, 2),
    key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 4096)),
    prompt=st.lists(IDS, max_size=12),
    completion=st.lists(IDS, max_size=12),
    banned=st.sets(IDS, max_size=3),
    mask=st.none(),
).filter(
    lambda draw: (
        draw.params.allowed_token_ids is None
        or bool(draw.params.allowed_token_ids - set(draw.banned))
    )
)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def sample(request: pytest.FixtureRequest) -> Sample:
    if request.param == "torch":
        return reference.sample
    kernels = cpu_kernels.kernels()
    return lambda logits, batch: CpuHead(kernels, 2).sample_logits(logits, batch)


def logits_of(seed: int, rows: int = 3, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def written_down(
    logits: Tensor, draw: DrawRequest, clear: Callable[[bool], object] = assume
) -> tuple[list[float], list[float], set[int]]:
    """Return logits after bias, penalties and temperature, the masked logits, and the kept ids, all
    in Python floats.
    """
    params = draw.params
    row = [float(x) for x in logits[draw.row].double()]
    counts, seen = Counter(draw.completion), set(draw.prompt) | set(draw.completion)
    for i in range(len(row)):
        row[i] += params.logit_bias.get(i, 0.0)
        if i in seen:
            row[i] = (
                row[i] / params.repetition_penalty
                if row[i] > 0
                else row[i] * params.repetition_penalty
            )
        row[i] -= params.frequency_penalty * counts[i] + (
            params.presence_penalty if counts[i] else 0.0
        )
        row[i] /= params.temperature or 1.0
    full = list(row)
    for i in range(len(row)):
        allowed = params.allowed_token_ids is None or i in params.allowed_token_ids
        if i in draw.banned or not allowed:
            row[i] = -math.inf
    ranking = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    if not params.temperature:
        return full, row, set(ranking)
    odds = {i: math.exp(row[i] - row[ranking[0]]) for i in ranking}
    kept = ranking[: params.top_k or None]
    if params.top_k and params.top_k < len(ranking):
        clear(abs(odds[ranking[params.top_k - 1]] - odds[ranking[params.top_k]]) > 1e-9)
    if params.top_p < 1:
        total, reached, prefix = sum(odds[i] for i in kept), 0.0, []
        for i in kept:
            clear(abs(reached - params.top_p * total) > NEAR * total)
            if reached >= params.top_p * total:
                break
            prefix.append(i)
            reached += odds[i]
        kept = prefix
    clear(all(abs(odds[i] - params.min_p) > NEAR for i in kept))
    return full, row, {i for i in kept if odds[i] >= params.min_p}


def log_softmax(row: list[float], ids: set[int]) -> dict[int, float]:
    highest = max(row[i] for i in ids)
    total = math.log(sum(math.exp(row[i] - highest) for i in ids)) + highest
    return {i: row[i] - total for i in ids}


@CALM
@given(draw=DRAWS, seed=st.integers(0, 2**16))
def test_draw_agrees_with_float64(sample: Sample, draw: DrawRequest, seed: int) -> None:
    logits = logits_of(seed)
    full, row, kept = written_down(logits, draw)
    possible = {i for i in range(VOCAB) if row[i] > -math.inf}
    batch = replace(sampling_batch([draw]), any_raw=True, any_kept=True)
    drawn = sample(logits, batch)
    token = int(drawn.token_ids[0])
    raw = torch.log_softmax(logits[draw.row].double(), dim=-1)
    assert float(drawn.raw_logprobs[0]) == pytest.approx(float(raw[token]), abs=1e-5)
    if draw.params.temperature == 0:
        best = max(row)
        assert row[token] == pytest.approx(best, abs=1e-4)
        assert drawn.logprobs[0] == drawn.raw_logprobs[0]
        shown = {i: float(raw[i]) for i in range(VOCAB)}
    else:
        assert token in kept
        shown = log_softmax(row, kept)
        assert float(drawn.logprobs[0]) == pytest.approx(shown[token], abs=2e-4, rel=1e-5)
        whole = log_softmax(full, set(range(VOCAB)))
        mass = whole[token] - shown[token]
        assert float(drawn.log_kept_mass[0]) == pytest.approx(mass, abs=2e-4, rel=1e-5)
        both = float(drawn.logprobs[0]) + float(drawn.log_kept_mass[0])
        assert both == pytest.approx(whole[token], abs=2e-4, rel=1e-5)
        if drawn.kept is not None:
            assert set(drawn.kept[0].nonzero()[:, 0].tolist()) & possible == kept
    best = [
        (int(i), float(p))
        for i, p in zip(drawn.top_ids[0], drawn.top_logprobs[0], strict=True)
        if p > -math.inf
    ]
    assert len(best) == min(draw.params.top_logprobs, len(shown))
    assert [p for _, p in best] == sorted((p for _, p in best), reverse=True)
    for i, p in best:
        assert p == pytest.approx(shown[i], abs=2e-4, rel=1e-5)


@CALM
@given(draws=st.lists(DRAWS, min_size=1, max_size=40), seed=st.integers(0, 2**16))
def test_draw_does_not_depend_on_its_batch(
    sample: Sample, draws: list[DrawRequest], seed: int
) -> None:
    """40 draws exceed a tile."""
    logits = logits_of(seed)
    together = sample(logits, sampling_batch(draws))
    for i, draw in enumerate(draws):
        batch = sampling_batch([draw])
        alone = sample(logits, batch)
        assert alone.token_ids[0] == together.token_ids[i]
        k = draw.params.top_logprobs
        assert torch.equal(alone.top_ids[0, :k], together.top_ids[i, :k])
        for name in ("logprobs", "log_kept_mass"):
            one, other = getattr(alone, name)[0], getattr(together, name)[i]
            assert torch.equal(one, other) or (one.isnan() and other.isnan()), name


def repeated(batch: SamplingBatch, num: int) -> SamplingBatch:
    """Repeat one sample's parameters for many draws with different noise."""
    many: dict[str, Any] = {}
    for field in fields(batch):
        part = getattr(batch, field.name)
        if isinstance(part, Entries):
            many[field.name] = Entries(
                torch.arange(num).repeat_interleave(len(part.ids)),
                part.ids.repeat(num),
                part.values.repeat(num),
            )
        elif isinstance(part, Tensor) and columns_of(SamplingBatch)[field.name].sizes[0] == "R":
            many[field.name] = part.expand(num, *part.shape[1:])
    many["noise_keys"] = torch.from_numpy(noise_keys([(9, i % 8, i // 8) for i in range(num)]))
    return replace(batch, **many)


@pytest.mark.thorough
def test_draws_follow_the_distribution_over_a_million_samples(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Combine bias, an allowed set, penalties, temperature and filters. Check with Pearson's
    chi-square.
    """
    monkeypatch.setattr("nano_inference.sampling.sample.ROW_TILE", 100_000)
    monkeypatch.setattr("nano_inference.sampling.logprobs.VOCAB_BLOCK", 20)
    num, vocab = 1_000_000, 20
    logits = logits_of(4, rows=1, vocab=vocab) / 3
    params = SamplingParams(
        temperature=1.3,
        top_k=15,
        top_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias={2: 1.5, 5: -1.0},
        allowed_token_ids=frozenset(range(19)),
    )
    draw = DrawRequest(params, prompt=[1, 2, 3], completion=[3, 3, 7], banned=[11])
    _, row, kept = written_down(logits, draw, clear=bool)
    probabilities = torch.zeros(vocab, dtype=torch.float64)
    for i, logprob in log_softmax(row, kept).items():
        probabilities[i] = math.exp(logprob)
    drawn = sample(logits, repeated(sampling_batch([draw]), num))
    counts = torch.bincount(drawn.token_ids, minlength=vocab).double()
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    distance = (
        (counts - num * probabilities)[possible] ** 2 / (num * probabilities)[possible]
    ).sum()
    assert int(possible.sum()) - 1 >= 10
    # false alarm rate 1/1000 at 16 degrees of freedom, the maximum here
    assert float(distance) < 39.3


def test_table_accepts_another_pipeline_order() -> None:
    logits = logits_of(1)
    batch = sampling_batch(
        [DrawRequest(SamplingParams(temperature=0.7, top_k=5, top_p=0.5), row) for row in range(3)]
    )
    without_top_p = SamplingPipeline([Temperature, TopK])(logits, batch)
    assert (without_top_p > -math.inf).sum(dim=-1).tolist() == [5, 5, 5]
    both = SamplingPipeline([Temperature, TopK, TopP])(logits, batch)
    assert ((both > -math.inf).sum(dim=-1) < 5).any()
    assert torch.equal(both, STANDARD(logits, batch))
    assert STANDARD.stages == (Bias, Penalties, Masks, Temperature, TopK, TopP, MinP)
    assert torch.equal(logits, logits_of(1)), "the logits were written to"


def test_stages_run_only_if_a_row_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("ran for nothing")

    stages = [
        stage._replace(apply=never) if stage is not Temperature else stage
        for stage in STANDARD.stages
    ]
    SamplingPipeline(stages)(
        logits_of(1), sampling_batch([DrawRequest(SamplingParams(), row) for row in range(3)])
    )
    assert pipeline.STANDARD is STANDARD


@CALM
@given(
    row=st.lists(
        st.one_of(st.integers(-3, 3).map(float), st.just(-math.inf)), min_size=1, max_size=30
    ),
    k=st.integers(0, 35),
)
def test_best_tokens_are_sorted_with_ties_by_lower_id(row: list[float], k: int) -> None:
    assume(max(row) > -math.inf)
    ids, logprobs = best_tokens(torch.tensor([row, row[::-1]]), k)
    for values, best, numbers in zip((row, row[::-1]), ids.tolist(), logprobs, strict=True):
        expected = sorted(range(len(row)), key=lambda i: (-values[i], i))[:k]
        assert best == expected
        exact = torch.log_softmax(torch.tensor(values, dtype=torch.float64), dim=-1)[expected]
        torch.testing.assert_close(numbers.double(), exact, rtol=1e-5, atol=1e-5)


def test_broken_row_loses_only_its_own_best_tokens() -> None:
    logits = logits_of(2)
    alone = best_tokens(logits[2:], 4)
    logits[0] = math.nan
    logits[1, 5] = math.inf
    ids, logprobs = best_tokens(logits, 4)
    assert torch.equal(ids[2], alone[0][0])
    assert torch.equal(logprobs[2], alone[1][0])
    assert not logprobs[0].isfinite().any()
