"""`mismatch_report` against its definitions, written out by hand, and its errors."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import ConfigError, SamplingParams, TrainingSample, VersionSpan
from nano_inference.data import DataError
from nano_inference.rl.report import MismatchReport, mismatch_report
from tests.depth import at_depth


def sample_of(
    logprobs: list[float], mask: list[bool] | None = None, cut: int | None = None
) -> TrainingSample:
    length = len(logprobs)
    spans = (
        (VersionSpan(1, 0, length),)
        if cut is None
        else (VersionSpan(1, 0, cut), VersionSpan(2, cut, length))
    )
    return TrainingSample(
        prompt_tokens=(1, 2),
        completion_tokens=(5,) * length,
        logprobs=tuple(logprobs),
        ref_logprobs=None,
        weight_version=spans[-1].version,
        finish_reason="length",
        weight_versions=spans,
        loss_mask=tuple(mask) if mask is not None else (),
        sampling_params=SamplingParams(),
    )


LOGPROB = st.floats(-20, 0, width=32)


@settings(max_examples=at_depth(100), deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(LOGPROB, LOGPROB, st.booleans()), max_size=6),
        min_size=1,
        max_size=5,
    ),
    as_tensor=st.booleans(),
)
def test_report_matches_its_definitions(rows: list[list[Any]], as_tensor: bool) -> None:
    samples = [
        sample_of([a for a, _, _ in row], [keep for _, _, keep in row], len(row) // 2)
        for row in rows
    ]
    trainer: Any = [[b for _, b, _ in row] for row in rows]
    padded = np.full((len(rows), 9), 77.0)
    mask = np.zeros((len(rows), 9), dtype=bool)
    for position, row in enumerate(rows):
        padded[position, 1 : 1 + len(row)] = trainer[position]
        mask[position, 1 : 1 + len(row)] = True
    report = mismatch_report(
        samples, [torch.tensor(row) for row in trainer] if as_tensor else trainer
    )
    for other in (
        mismatch_report(samples, torch.from_numpy(padded), mask=torch.from_numpy(mask).int()),
        mismatch_report(samples, [[b for _, b, keep in row if keep] for row in rows]),
    ):
        assert str(other) == str(report)
        assert repr(other) == repr(report)  # NaN never compares equal
    pairs = [(a, b) for row in rows for a, b, keep in row if keep]
    assert report.num_tokens == len(pairs)
    assert report.num_not_finite == 0
    if not pairs:
        assert all(
            math.isnan(x)
            for x in (report.kl_k1, report.kl_k3, report.max_abs, report.std, report.outside)
        )
        return
    delta = [a - b for a, b in pairs]
    ratio = [math.exp(b - a) for a, b in pairs]
    sizes = sorted(map(abs, delta))
    assert report.num_equal == sum(a == b for a, b in pairs)
    assert report.kl_k1 == pytest.approx(sum(delta) / len(delta), abs=1e-12)
    assert report.kl_k3 == pytest.approx(
        sum(r - 1 - math.log(r) for r in ratio) / len(ratio), rel=1e-6, abs=1e-12
    )
    assert report.kl_k3 >= 0
    assert report.max_abs == sizes[-1]
    assert report.mean_abs == pytest.approx(sum(sizes) / len(sizes))
    assert report.std == pytest.approx(np.std(delta), abs=1e-12)
    for share, value in ((0.95, report.p95_abs), (0.99, report.p99_abs)):
        position = share * (len(sizes) - 1)
        low, rest = int(position), position - int(position)
        assert value == pytest.approx(
            sizes[low] + rest * (sizes[min(low + 1, len(sizes) - 1)] - sizes[low])
        )
    assert report.outside == pytest.approx(sum(not 0.9 <= r <= 1.1 for r in ratio) / len(ratio))
    expected = {
        version: [
            (a, b)
            for row in rows
            for i, (a, b, keep) in enumerate(row)
            if keep and (i >= len(row) // 2) == late
        ]
        for version, late in ((1, False), (2, True))
    }
    by_version = dict(report.by_version)
    assert by_version.keys() == ({1, 2} if expected[1] and expected[2] else set())
    for version, part in by_version.items():
        assert part.num_tokens == len(expected[version])
        assert part.max_abs == max(abs(a - b) for a, b in expected[version])


def test_non_finite_values_are_counted_and_skipped() -> None:
    samples = [sample_of([-1.0, -2.0, -math.inf, math.nan, -1.0, -1.0])]
    report = mismatch_report(samples, [[-1.0, -1.5, -1.0, -1.0, math.nan, -math.inf]])
    assert (report.num_tokens, report.num_not_finite, report.num_equal) == (2, 4, 1)
    assert (report.kl_k1, report.max_abs, report.outside) == (-0.25, 0.5, 0.5)
    assert "4 non-finite left out" in str(report)
    far = mismatch_report([sample_of([-2000.0, -1.0])], [[-1.0, -2000.0]])
    assert far.kl_k3 == math.inf
    assert far.outside == 1.0
    none = mismatch_report([sample_of([])], [[]])
    assert none.num_tokens == 0
    assert "tokens compared    0" in str(none)


def test_filters_are_accounted_for() -> None:
    sample = replace(sample_of([-0.5, -0.25]), log_kept_mass=(-0.125, 0.0))
    assert mismatch_report([sample], [[-0.625, -0.25]]).num_equal == 2
    assert mismatch_report([sample], [[-0.5, -0.25]], renormalized=True).num_equal == 2
    assert mismatch_report([sample], [[-0.5, -0.25]]).max_abs == 0.125


def test_low_precision_trainer_is_detected() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(500, generator=generator) * 8
    report = mismatch_report([sample_of(logprobs.tolist())], [logprobs.bfloat16()])
    assert 0 < report.mean_abs < report.p95_abs <= report.p99_abs <= report.max_abs < 0.04
    assert "KL(engine|trainer)" in str(report)


@pytest.mark.parametrize(
    ("trainer", "mask", "problem"),
    [
        ([[-1.0] * 3], None, "1 rows of trainer logprobs for 2 samples"),
        (
            [[-1.0] * 3, [-1.0] * 4],
            None,
            r"sample 1 has 3 completion tokens \(2 sampled\), .* shape \(4,\); pass a mask",
        ),
        ([[-1.0] * 3, [-1.0]], None, r"sample 1 has 3 .* shape \(1,\)\.$"),
        ([[-1.0] * 3, [[-1.0] * 3]], None, r"sample 1 .* shape \(1, 3\)"),
        ([[-1.0] * 3, ["x"] * 3], None, "must be numbers"),
        (
            torch.zeros(2, 3),
            torch.ones(2, 4),
            r"logprobs \(2, 3\) and mask \(2, 4\) must both be \[2, T\]",
        ),
        (torch.zeros(3, 3), torch.ones(3, 3), r"must both be \[2, T\], one row for each sample"),
        (
            torch.zeros(2, 3),
            torch.tensor([[1, 1, 1], [1, 0, 0]]),
            "sample 1 has 3 completion tokens",
        ),
    ],
)
def test_mismatched_shapes_are_rejected(trainer: Any, mask: Any, problem: str) -> None:
    samples = [sample_of([-1.0] * 3), sample_of([-1.0] * 3, [True, False, True])]
    with pytest.raises(DataError, match=problem):
        mismatch_report(samples, trainer, mask=mask)
    with pytest.raises(DataError, match="sample 0: logprobs and loss_mask"):
        mismatch_report([replace(samples[0], logprobs=(-1.0,))], [[-1.0] * 3])


def normal_report() -> MismatchReport:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(5000, generator=generator) * 5
    noise = (
        torch.randn(5000, generator=generator)
        * 0.05
        * (torch.rand(5000, generator=generator) < 0.8)
    )
    return mismatch_report([sample_of(logprobs.tolist())], [logprobs + noise])


@pytest.mark.thorough
def test_histogram_is_a_png(tmp_path: Path) -> None:
    for report in (
        normal_report(),
        mismatch_report([sample_of([-1.0])], [[-1.0]]),
        mismatch_report([], []),
    ):
        report.histogram(tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'nano-inference\[plots\]'"):
        normal_report().histogram(tmp_path / "a.png")
