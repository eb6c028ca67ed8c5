"""What tells whether parameters were written since: also through `.data`, numpy views and fused
optimizers.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 8  # bytes
GPU_ROWS = 256  # that are multiplied at once
# words that are multiplied by the same factors as those of every other row; they stay in a core's
# cache
ROW = 2**14


class State(NamedTuple):
    """Of a parameter: where it lies, its version counter, and two hashes of its bits in their
    order.
    """

    pointer: int
    version: int
    words: int
    halves: int


def states(params: Sequence[Tensor]) -> list[State]:
    """The states of parameters as they are now.

    Fused optimizers and what is written through `.data` or a numpy view leave the counter as it
    was, not the bits.
    """
    hashes = torch.stack([_hashes(param.detach()) for param in params]).tolist() if params else []
    return [
        State(param.data_ptr(), param._version, *both)
        for param, both in zip(params, hashes, strict=True)
    ]


def _hashes(tensor: Tensor) -> Tensor:
    """Two sums modulo 2^64, int64 [2]: of words times odd factors, and of their upper halves times
    factors.

    Factors differ from place to place. A single word of 8 bytes that has changed changes the first
    sum for certain, since odd factors can be divided by. Where several have, such as rows that
    changed places, both sums stay as they were with a chance of at most 2^-32: the second is for
    changes of upper bits alone, whose products overflow. It is no defence against an attacker
    who chooses the bits for that.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    row_bytes = ROW * WORD
    whole = len(data) // row_bytes * row_bytes
    rest = torch.zeros(
        row_bytes if whole else -(-len(data) // WORD) * WORD, dtype=torch.uint8, device=data.device
    )
    rest[: len(data) - whole] = data[whole:]
    rows = data[:whole].view(torch.int64).view(-1, ROW)
    found = [_products(some) for some in (rows, rest.view(torch.int64)[None]) if some.numel()]
    sums = (
        torch.cat(found, dim=1)
        if found
        else torch.zeros(2, 1, dtype=torch.int64, device=data.device)
    )
    size = 2 ** (sums.shape[1] - 1).bit_length()
    return (sums * _factors("rows", size, data.device)[:, : sums.shape[1]]).sum(dim=1)


def _products(rows: Tensor) -> Tensor:
    """Both sums of each row [R, W]: [2, R]."""
    words, halves = _factors("words", ROW, rows.device)[:, : rows.shape[1]]
    if rows.device.type != "cpu":  # where integers have no products of matrices
        some = rows.split(GPU_ROWS)
        sums = (
            [(r * words).sum(dim=1) for r in some],
            [((r >> 32) * halves).sum(dim=1) for r in some],
        )
        return torch.stack([torch.cat(each) for each in sums])
    scratch = torch.empty(rows.shape[1], dtype=torch.int64)
    upper = [torch.dot(torch.bitwise_right_shift(row, 32, out=scratch), halves) for row in rows]
    return torch.stack([rows @ words, torch.stack(upper)])


@cache
def _factors(which: str, count: int, device: torch.device) -> Tensor:
    """Odd numbers int64 [2, count]."""
    generator = torch.Generator().manual_seed(2 * count + (which == "rows"))
    return (2 * torch.randint(-(2**62), 2**62, (2, count), generator=generator) + 1).to(device)
