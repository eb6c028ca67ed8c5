"""Blocks as bytes and in messages between two processes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from nano_inference.arrays import as_torch
from nano_inference.engine.block_exchange import BlockFormat, BlockPiece
from nano_inference.errors import InvalidRequest
from nano_inference.kv_cache.block_changes import short_name
from nano_inference.kv_cache.block_hash import Namespace
from nano_inference.remote.block_link import decode, encode
from nano_inference.remote.directory import names_of, pack_names, unpack_names

SHAPES = ((2, 3, 2, 4, 8), (2, 3, 1, 4, 8))


def piece(first: int = 1, salt: str | None = None, dtype: str = "bfloat16") -> BlockPiece:
    tokens = tuple(range(5, 17))
    form = BlockFormat("cpu/1", 4, dtype, SHAPES)
    data = torch.arange((3 - first) * form.block_bytes, dtype=torch.int64).to(torch.uint8)
    names = names_of(tokens, 4, 7, salt)
    return BlockPiece(
        form, Namespace("policy", 7, salt), names, tokens, first, data.view(3 - first, -1)
    )


@pytest.mark.parametrize("salt", [None, "", "salz"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_payload_survives_a_round_trip(salt: str | None, dtype: str) -> None:
    for first in range(3):
        sent = piece(first, salt, dtype)
        got = decode(encode(sent))
        assert replace(got, data=sent.data) == sent
        assert torch.equal(as_torch(got.data), sent.data)


def test_damaged_bytes_are_rejected_or_read() -> None:
    """Parse damaged bytes: the result is an `InvalidRequest` or a piece with as many bytes as
    sent.
    """
    whole, rng = encode(piece()), random.Random(0)
    for cut in (0, 3, 8, 20, len(whole) - 1):
        with pytest.raises(InvalidRequest):
            decode(whole[:cut])
    for bad in (whole + b"x", (1 << 40).to_bytes(8, "little") + whole[8:], b"\xff" * 64):
        with pytest.raises(InvalidRequest):
            decode(bad)
    header = int.from_bytes(whole[:8], "little") + 8
    for _ in range(2000):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] = rng.randrange(256)
        try:
            got = decode(bytes(damaged))
        except InvalidRequest:
            continue
        assert got.data.numel() == len(whole) - header


def test_names_survive() -> None:
    names = names_of(list(range(40)), 4, 3)
    assert len(names) == 10
    assert unpack_names(pack_names(names)) == names
    with pytest.raises(InvalidRequest, match="names"):
        unpack_names(b"x" * 33)
    assert all(0 <= short_name(name) < 1 << 64 for name in names)


def test_unknown_dtypes_and_shapes_are_refused() -> None:
    good = piece()
    bad: list[dict[str, Any]] = [
        {"dtype": "nn"},
        {"dtype": "__doc__"},
        {"shapes": ((2, 0, 2, 4, 8),)},
        {"shapes": ()},
        {"block_size": 0},
    ]
    for change in bad:
        sent = replace(good, format=replace(good.format, **change))
        with pytest.raises(InvalidRequest, match="blocks have invalid shapes"):
            decode(encode(sent))
