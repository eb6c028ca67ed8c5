"""Sampling with host arrays and with tensors: the same batches and tokens, and logprobs that differ
in the last bits at most, since numpy and torch round exp and log differently.
"""

from collections.abc import Generator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.arrays import HOST, as_host
from nano_inference.sampling.columns import Entries, columns_of
from nano_inference.sampling.logit_scale import LogitScale
from nano_inference.sampling.parts import VocabPart, sample_part, score_part
from nano_inference.sampling.pipeline import allowed, drawable
from nano_inference.sampling.sample import Draw, sample
from nano_inference.sampling.scaling import scaled
from nano_inference.sampling.tensors import (
    TORCH,
    DrawRequest,
    SamplingBatch,
    arrays_on,
    greedy_batch,
    masked_samples,
    sampling_batch,
    select,
    to_device,
)
from nano_inference.structured.mask_bits import mask_of
from nano_inference.types import SamplingParams
from tests.same_bits import same

CPU = torch.device("cpu")
VOCAB = 1100
PARAMS = [
    SamplingParams(temperature=0, top_logprobs=4),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, sampling_mask=True),
    SamplingParams(min_p=0.05, logit_bias={3: 4.0, 7: -2.0}, raw_logprobs=True),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2),
    SamplingParams(allowed_token_ids=tuple(range(0, VOCAB, 3))),
]
DRAWS = [
    DrawRequest(each, row % 3, (5, row, 9), (1, 2, 3), (2, 9, 2), (11, 12) if row == 4 else ())
    for row, each in enumerate(PARAMS)
]
PLAIN = [draw._replace(params=SamplingParams(temperature=row)) for row, draw in enumerate(DRAWS)]
LOGITS = 3 * torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(1))


def both(draws: list[DrawRequest]) -> tuple[SamplingBatch, SamplingBatch]:
    """Return the draws as a batch of host arrays and as one of tensors."""
    host, plain = sampling_batch(draws, HOST), sampling_batch(draws)  # pyright: ignore
    return host, plain


def check_batches(ours: SamplingBatch, theirs: SamplingBatch) -> None:
    for name in columns_of(SamplingBatch):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, Entries):
            assert all(map(same, mine, other))
        else:
            assert same(mine, other)


def check_draws(ours: Draw, theirs: Draw) -> None:
    for field in fields(Draw):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if other is None:
            assert mine is None
        elif other.dtype == torch.float32:
            np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5, atol=1e-5)
        else:
            assert same(mine, other)


def test_batches_are_the_same() -> None:
    ours, theirs = both(DRAWS)
    check_batches(ours, theirs)
    check_batches(
        select(ours, as_host(torch.tensor([0, 2, 4]))), select(theirs, torch.tensor([0, 2, 4]))
    )
    assert same(masked_samples(ours), masked_samples(theirs))
    assert same(drawable(ours, VOCAB), drawable(theirs, VOCAB))
    check_batches(greedy_batch(3, 2, HOST), greedy_batch(3, 2))  # pyright: ignore
    assert to_device(ours, HOST) is ours  # pyright: ignore


def test_arrays_of_all_devices_of_torch_have_one_factory() -> None:
    assert arrays_on(CPU) is arrays_on(None) is arrays_on(torch.device("cuda", 1)) is TORCH
    assert arrays_on(HOST) is arrays_on(HOST) is not TORCH  # pyright: ignore


def test_short_masks_forbid_the_tokens_behind_them() -> None:
    rows, words = torch.tensor([0, -1]), torch.from_numpy(mask_of([1, 31, 40]))[None]
    may = allowed(rows, words, 100)
    assert may[0].nonzero()[:, 0].tolist() == [1, 31, 40]
    assert same(allowed(as_host(rows), as_host(words), 100), may)


@np.errstate(all="ignore")
def test_tokens_are_the_same() -> None:
    logits = LOGITS.clone()
    logits[2, 5] = -torch.inf
    ours, theirs = both(DRAWS)
    check_draws(sample(as_host(logits), ours), sample(logits, theirs))


def finished(steps: Generator[Any, list[Any], Any]) -> Any:
    """Run an exchange of one rank."""
    try:
        mine = next(steps)
        while True:
            mine = steps.send([mine])
    except StopIteration as done:
        return done.value


@np.errstate(all="ignore")
def test_tokens_of_a_part_are_the_same() -> None:
    part, (ours, theirs) = VocabPart((0, VOCAB), 0), both(PLAIN)
    check_draws(
        finished(sample_part(as_host(LOGITS), ours, part)),
        finished(sample_part(LOGITS, theirs, part)),
    )
    ids, temperatures = torch.tensor([4, 1, 1099]), torch.tensor([1.0, 0.5, 2.0]).double()
    mine = finished(score_part(as_host(LOGITS), as_host(ids), as_host(temperatures), part))
    other = finished(score_part(LOGITS, ids, temperatures, part))
    np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [LogitScale(), LogitScale(2.0), LogitScale(1.5, 30.0)])
def test_scales_agree(scale: LogitScale) -> None:
    logits = 400 * LOGITS
    np.testing.assert_allclose(
        scaled(as_host(logits), scale), scaled(logits, scale).numpy(), rtol=1e-5, atol=1e-5
    )
