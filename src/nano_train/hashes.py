"""Hashes of the parts of a step, by which `runs bisect` finds the first difference.

Logged hashes find differences, not forgeries: a tensor has a CRC-32, which is four times as fast as
SHA-256. Checkpoints have SHA-256.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from nano_inference import TrainingSample

THREADS = 2


def hash_of(value: Any) -> str:
    """Return a hash of a JSON value, 16 hex digits. Floats count with all their bits."""
    text = json.dumps(_exact(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("<d", value).hex()
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _exact(item) for key, item in value.items()}
    return value


def hash_of_samples(samples: Iterable[TrainingSample]) -> str:
    """Return a hash of the samples' tokens, logprobs, seeds and versions."""
    return hash_of(
        [
            [
                *(sample.prompt_tokens, sample.completion_tokens, sample.logprobs),
                *(sample.ref_logprobs, sample.seed, sample.sample_index, sample.finish_reason),
                [(span.version, span.start, span.end) for span in sample.weight_versions],
            ]
            for sample in samples
        ]
    )


def hashes_of_values(values: Iterable[Tensor]) -> list[str]:
    """Return the CRC-32 of the bits of each float32 tensor, 8 hex digits."""
    return [f"{zlib.crc32(_bytes(value.detach().float())):08x}" for value in values]


def hashes_of_tensors(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the CRC-32 of each tensor's bytes, 8 hex digits, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(lambda tensor: zlib.crc32(_bytes(tensor)), named.values())
        return {name: f"{value:08x}" for name, value in zip(named, sums, strict=True)}


def sha256_of_tensors(named: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all tensors' names and bytes, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        digest.update(name.encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def first_difference(samples: Sequence[TrainingSample], trainer: Sequence[Tensor]) -> str | None:
    """Describe the first token whose two logprobs differ in a bit. None if all are equal."""
    for number, (sample, values) in enumerate(zip(samples, trainer, strict=True)):
        mine, theirs = values.detach(), torch.tensor(sample.logprobs)
        differs = mine.view(torch.int32) != theirs.view(torch.int32)
        if not all(sample.loss_mask):  # tokens between turns have no logprob
            differs &= torch.tensor(sample.loss_mask)
        if differs.any():
            at = int(differs.nonzero()[0])
            return (
                f"sample {number}, position {len(sample.prompt_tokens) + at}, token "
                f"{sample.completion_tokens[at]}: engine {float(theirs[at])!r}, trainer "
                f"{float(mine[at])!r}"
            )
    return None


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
