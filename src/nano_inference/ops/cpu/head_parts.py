"""Draws and scores on the CPU where each rank holds a part of the vocabulary; see `HeadParts`.

Each rank's kernels look at their own blocks, with the ids of the whole vocabulary; the statistics
of the blocks and the best token of each sample travel in one exchange; and what one rank does after
its last block is done on every rank.
"""

import ctypes
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from nano_inference.ops.backend import HeadParts
from nano_inference.ops.cpu.head import (
    HeadInput,
    HeadPart,
    PackedWeight,
    Request,
    Targets,
    check,
    products,
)
from nano_inference.ops.cpu.weights import as_packed
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch

BLOCK = 384  # VOCAB_BLOCK of head.h
BEST = 32  # bytes of `Best` of noise.h


def head_parts(kernels: Any, num_threads: int) -> HeadParts:
    """The two generators, by these kernels."""

    def sample(
        hidden: Tensor, weight: PackedWeight, divisor: float, batch: SamplingBatch, part: VocabPart
    ) -> Generator[Tensor, list[Tensor], Draw]:
        request = Request(batch, part.vocab_size)
        given = _part_of(products(hidden, as_packed(weight), divisor, num_threads), part)
        calls = kernels.nano_draw_part, kernels.nano_draw_whole
        yield from _exchange(calls, given, request.address, len(batch), part)
        return request.draw

    def score(
        hidden: Tensor,
        weight: PackedWeight,
        divisor: float,
        token_ids: Tensor,
        temperatures: Tensor,
        part: VocabPart,
    ) -> Generator[Tensor, list[Tensor], Tensor]:
        targets = Targets(token_ids, temperatures)
        given = _part_of(products(hidden, as_packed(weight), divisor, num_threads), part)
        calls = kernels.nano_score_part, kernels.nano_score_whole
        yield from _exchange(calls, given, targets.address, len(token_ids), part)
        return targets.logprobs

    return HeadParts(BLOCK, sample, score)


def _part_of(given: HeadInput, part: VocabPart) -> HeadInput:
    if given.vocab != part.size:
        raise ValueError(
            f"the weight has {given.vocab} rows; rank {part.rank} holds {part.size} tokens."
        )
    given.first, given.whole = part.first, part.vocab_size
    return given


def _exchange(
    calls: tuple[Any, Any], given: HeadInput, request: int, num: int, part: VocabPart
) -> Generator[Tensor, list[Tensor], None]:
    """Both calls, and between them the yield of what this rank has found: bytes, as many on every
    rank.
    """
    if num == 0:
        return
    counts = part.num_blocks(BLOCK)
    own, most = counts[part.rank], max(counts)
    statistics, best = torch.empty((2, 3 * num * own)), torch.empty((num, BEST), dtype=torch.uint8)
    found = HeadPart(statistics[0].data_ptr(), statistics[1].data_ptr(), best.data_ptr(), 0)
    check(calls[0](ctypes.addressof(given), request, ctypes.addressof(found)), given)
    views = found.num_views
    message = torch.zeros((2, views, most))
    message[:, :, :own] = statistics[:, : views * own].view(2, views, own)
    gathered = yield torch.cat([message.view(-1).view(torch.uint8), best.view(-1)])
    size = message.numel() * message.element_size()
    every = [each[:size].view(torch.float32).view(2, views, most) for each in gathered]
    whole = torch.cat(
        [each[:, :, :count] for each, count in zip(every, counts, strict=True)], dim=2
    ).contiguous()
    bests = torch.cat([each[size:] for each in gathered])
    parts = HeadPart(whole[0].data_ptr(), whole[1].data_ptr(), bests.data_ptr(), views)
    together = HeadInput(num_rows=given.num_rows, vocab=part.vocab_size, num_threads=1)
    check(
        calls[1](ctypes.addressof(together), request, ctypes.addressof(parts), len(gathered)),
        together,
    )
