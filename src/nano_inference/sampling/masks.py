"""Masks: which tokens may be drawn at all, whatever their probability. Filters cut what masks
leave.

All masks of a batch meet in `drawable`, and `log_kept_mass` counts what is missing there: a new
kind of mask is a field of `SamplingBatch` and a line here (and in `ops/cpu/kernels/head_plan.cpp`
and `ops/cuda/masks.py`, which do the same).
"""

from torch import Tensor

from nano_inference.sampling.sampling_batch import SamplingBatch


def drawable(batch: SamplingBatch, vocab_size: int) -> Tensor:
    """Whether each sample may draw each token, bool [R, V]: what is allowed, without what is
    banned.
    """
    may = (~batch.restricted)[:, None].expand(len(batch), vocab_size).clone()
    may[tuple(batch.allowed[:2])] = True
    may[tuple(batch.banned[:2])] = False
    return may
