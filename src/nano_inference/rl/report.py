"""`mismatch_report`: differences between a trainer's logprobs and the engine's, token by token."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_inference.data.columns import DataError
from nano_inference.errors import ConfigError
from nano_inference.rl.history import was_sampled
from nano_inference.types import TrainingSample

# bounds of the ratio trainer / engine; importance sampling clips outside a band like this
BAND = (0.9, 1.1)


@dataclass(frozen=True)
class MismatchReport:
    """Differences of logprobs, delta = engine - trainer, over the sampled tokens.

    Values are nan if there are no tokens to compute them from.

    Attributes:
        num_tokens: Number of finite pairs, from which all values below are computed.
        num_not_finite: Number of pairs left out because one logprob is nan or infinite.
        num_equal: Number of bitwise equal pairs.
        kl_k1: Mean of delta: the plain estimate of KL(engine || trainer) from the engine's tokens.
        kl_k3: Mean of r - 1 - log r with r = trainer / engine: the same in expectation, with less
            variance and never negative (http://joschu.net/blog/kl-approx.html).
        max_abs, mean_abs, std: Maximum and mean of |delta|, and standard deviation of delta over
            all tokens, around the mean.
        p95_abs, p99_abs: 95th and 99th percentile of |delta| (linear interpolation).
        outside: Share of ratios trainer / engine outside [0.9, 1.1].
        by_version: Reports for the tokens of each weight version, if there are several.
        deltas: Delta of every finite pair, float64, in the order of the samples.
    """

    num_tokens: int
    num_not_finite: int
    num_equal: int
    kl_k1: float
    kl_k3: float
    max_abs: float
    mean_abs: float
    std: float
    p95_abs: float
    p99_abs: float
    outside: float
    by_version: tuple[tuple[int, "MismatchReport"], ...] = ()
    deltas: Any = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        left_out = f", {self.num_not_finite:,} non-finite left out" if self.num_not_finite else ""
        lines = [
            f"tokens compared    {self.num_tokens:,}{left_out}",
            f"bitwise equal      {self.num_equal:,} "
            f"({self.num_equal / max(self.num_tokens, 1):.2%})",
            f"KL(engine|trainer) {self.kl_k1:.3e} (k1), {self.kl_k3:.3e} (k3)",
            f"|engine - trainer| max {self.max_abs:.3e}, mean {self.mean_abs:.3e}, 95 % "
            f"{self.p95_abs:.3e}, "
            f"99 % {self.p99_abs:.3e}",
            f"standard deviation {self.std:.3e}",
            f"ratio outside [{BAND[0]}, {BAND[1]}]: {self.outside:.2%}",
        ]  # fmt: skip
        lines += [
            f"version {version}: {part.num_tokens:,} tokens, k3 {part.kl_k3:.3e}, max "
            f"{part.max_abs:.3e}, outside "
            f"{part.outside:.2%}"
            for version, part in self.by_version
        ]
        return "\n".join(lines)

    def histogram(self, path: str | os.PathLike[str], *, num_bins: int = 81) -> None:
        """Write a PNG with the distribution of delta, on a log scale, and the band of the ratio.

        Raises `ConfigError` if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as problem:
            raise ConfigError(
                "a histogram needs matplotlib; install it with `pip install "
                "'nano-inference[plots]'`."
            ) from problem
        deltas: np.ndarray = self.deltas if self.deltas is not None else np.zeros(0)
        figure = Figure(figsize=(7, 4), layout="constrained", dpi=150)
        axes = figure.subplots()
        reach = max(1.1 * float(np.abs(deltas).max(initial=0.0)), 1e-8)
        axes.hist(
            deltas, bins=num_bins, range=(-reach, reach), color="#3b6fb6", log=len(deltas) > 0
        )
        axes.set_ylim(bottom=0.5)  # makes a bin of one token visible
        low, high = (-float(np.log(edge)) for edge in reversed(BAND))
        for edge, name in ((low, f"ratio {BAND[1]}"), (high, f"ratio {BAND[0]}")):
            if abs(edge) <= reach:
                axes.axvline(edge, color="#b63b3b", linestyle="--", linewidth=1)
                axes.annotate(name, (edge, 0.98), xycoords=("data", "axes fraction"), ha="center",
                              va="top",
                              fontsize=8, color="#b63b3b", backgroundcolor="white")  # fmt: skip
        axes.set_xlabel("engine logprob - trainer logprob")
        axes.set_ylabel("tokens")
        axes.set_title(
            f"{self.num_tokens:,} tokens, {self.num_equal / max(self.num_tokens, 1):.1%} bitwise "
            f"equal, max {self.max_abs:.2g}, {self.outside:.2%} outside [{BAND[0]}, {BAND[1]}]",
            fontsize=9,
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="png")


def mismatch_report(
    samples: Sequence[TrainingSample],
    trainer_logprobs: Any,
    *,
    mask: Any = None,
    renormalized: bool = False,
) -> MismatchReport:
    """Compare the samples' logprobs with those of a trainer for the same tokens.

    Args:
        samples: Samples of an engine. Appended tokens (`loss_mask`) are skipped.
        trainer_logprobs: Logprobs of the completion tokens for each sample: tensors, arrays or
            lists. With `mask`: one padded tensor [B, T].
        mask: bool or 0/1 [B, T], true at completion tokens, as TRL's `completion_mask`, or only at
            sampled ones.
        renormalized: The trainer also divides by the mass that masks and filters left. Otherwise
            its logprobs are over the whole vocabulary at the sampling temperature, and
            `log_kept_mass` is added to the engine's. At temperature 0 the engine's logprobs are
            those of temperature 1.

    Raises:
        DataError: Numbers of samples or tokens differ. The message names the sample.
    """
    rows = _rows(samples, trainer_logprobs, mask)
    engine: list[np.ndarray] = []
    trainer: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        sampled = np.array(was_sampled(sample), dtype=bool)
        logprobs = np.array(sample.logprobs, dtype=np.float64)
        if len(sampled) != len(logprobs) or len(logprobs) != len(sample.completion_tokens):
            raise DataError(
                f"sample {number}: logprobs and loss_mask must have one entry for each completion "
                "token."
            )
        if not renormalized and sample.log_kept_mass is not None and any(sample.log_kept_mass):
            # as the trainer computes them
            logprobs = (
                (logprobs + np.array(sample.log_kept_mass)).astype(np.float32).astype(np.float64)
            )
        engine.append(logprobs[sampled])
        trainer.append(_aligned(row, sampled, number))
        versions.append(_versions(sample)[sampled])
    columns = (np.concatenate([np.zeros(0), *parts]) for parts in (engine, trainer, versions))
    return _report(*columns)


def _rows(samples: Sequence[TrainingSample], trainer_logprobs: Any, mask: Any) -> list[np.ndarray]:
    """Return one float64 row for each sample."""
    if mask is None:
        rows = [_array(row) for row in trainer_logprobs]
        if len(rows) != len(samples):
            raise DataError(
                f"got {len(rows)} rows of trainer logprobs for {len(samples)} samples; pass one "
                "for each sample."
            )
        return rows
    padded, chosen = _array(trainer_logprobs), _array(mask)
    if padded.shape != chosen.shape or padded.ndim != 2 or len(padded) != len(samples):
        raise DataError(
            f"trainer logprobs {padded.shape} and mask {chosen.shape} must both be "
            f"[{len(samples)}, T], one row for each sample."
        )
    return [row[keep != 0] for row, keep in zip(padded, chosen, strict=True)]


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise DataError(f"trainer logprobs must be numbers: {problem}.") from problem


def _aligned(row: np.ndarray, sampled: np.ndarray, number: int) -> np.ndarray:
    """Return a row at the sampled tokens; `row` has only those, or all of the completion."""
    if row.shape == sampled.shape:
        return row[sampled]
    if row.shape == (int(sampled.sum()),):
        return row
    hint = "; pass a mask with padded tensors" if row.ndim == 1 and len(row) > len(sampled) else ""
    raise DataError(
        f"sample {number} has {len(sampled)} completion tokens ({int(sampled.sum())} sampled), "
        f"but its trainer logprobs have shape {row.shape}{hint}."
    )


def _versions(sample: TrainingSample) -> np.ndarray:
    versions = np.full(len(sample.completion_tokens), sample.weight_version, dtype=np.int64)
    for span in sample.weight_versions:
        versions[span.start : span.end] = span.version
    return versions


def _report(engine: np.ndarray, trainer: np.ndarray, versions: np.ndarray) -> MismatchReport:
    finite = np.isfinite(engine) & np.isfinite(trainer)
    delta = engine[finite] - trainer[finite]
    parts: tuple[tuple[int, MismatchReport], ...] = ()
    distinct = np.unique(versions)
    if len(distinct) > 1:
        parts = tuple(
            (
                int(v),
                _report(engine[versions == v], trainer[versions == v], versions[versions == v]),
            )
            for v in distinct
        )
    some = delta if len(delta) else np.full(1, np.nan)
    absolute = np.abs(some)
    # if a trainer finds a token e^710 times likelier, the ratio is infinite and counts as outside
    with np.errstate(over="ignore"):
        ratio, surprise = np.exp(-some), np.expm1(-some) + some
    outside = (ratio < BAND[0]) | (ratio > BAND[1])
    return MismatchReport(
        num_tokens=len(delta),
        num_not_finite=int((~finite).sum()),
        num_equal=int((delta == 0).sum()),
        kl_k1=float(some.mean()),
        kl_k3=float(surprise.mean()),
        max_abs=float(absolute.max()),
        mean_abs=float(absolute.mean()),
        std=float(some.std()),
        p95_abs=float(np.quantile(absolute, 0.95)),
        p99_abs=float(np.quantile(absolute, 0.99)),
        outside=float(outside.mean()) if len(delta) else float("nan"),
        by_version=parts,
        deltas=delta,
    )
