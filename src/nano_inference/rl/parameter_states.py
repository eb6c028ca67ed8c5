"""Detection of writes to parameters, including those through `.data`, numpy views and fused
optimizers.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 8  # bytes
GPU_ROWS = 256  # rows that are multiplied simultaneously
# words in a row; all rows have the same factors, which fit into a core's cache
ROW = 2**14


class State(NamedTuple):
    """Address, version counter, and two hashes of the bits of a parameter, in order."""

    pointer: int
    version: int
    words: int
    halves: int


def states(params: Sequence[Tensor]) -> list[State]:
    """Return the current states of parameters.

    Fused optimizers and writes through `.data` or a numpy view do not change the version counter,
    but they do change the hashes.
    """
    hashes = torch.stack([_hashes(param.detach()) for param in params]).tolist() if params else []
    return [
        State(param.data_ptr(), param._version, *both)
        for param, both in zip(params, hashes, strict=True)
    ]


def parameters_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of parameters' names and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hashes(tensor: Tensor) -> Tensor:
    """Return two sums modulo 2^64, int64 [2]: of words times odd factors, and of their upper halves
    times factors.

    Factors differ between positions. A change of a single 8-byte word always changes the first sum,
    because odd factors are invertible. If several words change, for example if rows swap, both sums
    stay equal with a probability of at most 2^-32. The second sum detects changes of only upper
    bits, whose products overflow. The hashes do not protect against an attacker who chooses bits.
    """
    data = tensor.contiguous().view(-1).view(torch.uint8)
    row_bytes = ROW * WORD
    whole = len(data) // row_bytes * row_bytes
    rest = torch.zeros(
        row_bytes if whole else -(-len(data) // WORD) * WORD, dtype=torch.uint8, device=data.device
    )
    rest[: len(data) - whole] = data[whole:]
    rows = data[:whole].view(torch.int64).view(-1, ROW)
    products = [_products(some) for some in (rows, rest.view(torch.int64)[None]) if some.numel()]
    sums = (
        torch.cat(products, dim=1)
        if products
        else torch.zeros(2, 1, dtype=torch.int64, device=data.device)
    )
    size = 2 ** (sums.shape[1] - 1).bit_length()
    return (sums * _factors("rows", size, data.device)[:, : sums.shape[1]]).sum(dim=1)


def _products(rows: Tensor) -> Tensor:
    """Return both sums of each row [R, W]: [2, R]."""
    words, halves = _factors("words", ROW, rows.device)[:, : rows.shape[1]]
    if rows.device.type != "cpu":  # integer matrix products exist only on CPUs
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
    """Return odd numbers, int64 [2, count]."""
    generator = torch.Generator().manual_seed(2 * count + (which == "rows"))
    return (2 * torch.randint(-(2**62), 2**62, (2, count), generator=generator) + 1).to(device)
