"""Sources of an update: a state dict, a folder or file of safetensors, or an iterable of
buckets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TypeVar

from nano_inference.arrays import Tensor, is_tensor
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.errors import ModelLoadError, WeightUpdateError
from nano_inference.weights.staging import Bucket, Hold, WeightSession

BUCKET_BYTES = 2**26
EMPTY = (
    "weights must be a non-empty state dict (checkpoint names to tensors), a path, or an "
    "iterable of buckets."
)
Item = TypeVar("Item")

# All sources of an update.
Weights = Mapping[str, Tensor] | str | PathLike[str] | Iterable[Bucket]


def fill(
    session: WeightSession, weights: str | PathLike[str] | Iterable[Bucket], hold: Hold
) -> None:
    """Stage all tensors of a folder, a file or an iterable. Raises `WeightUpdateError`."""
    if isinstance(weights, str | PathLike):
        if hold is Hold.BORROW:
            for bucket in read_folder(Path(weights)):
                session.add(bucket, Hold.BORROW)
        else:  # copied before the checks
            for bucket in read_copies(Path(weights)):
                session.add(bucket, Hold.TAKE)
    elif isinstance(weights, Iterable) and not is_tensor(weights):
        for bucket in _listen(weights):
            session.add(bucket, Hold.COPY)
    else:
        raise WeightUpdateError(EMPTY)


def read_folder(path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a safetensors file or folder, one per bucket. Raises
    `WeightUpdateError`.
    """
    if not path.exists():
        raise WeightUpdateError(f"{path} does not exist; pass a safetensors file or folder.")
    try:
        for name, tensor in read_tensors(path):
            yield {name: tensor}
    except ModelLoadError as problem:
        raise WeightUpdateError(str(problem)) from problem


def read_copies(path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the tensors of `read_folder`.

    The tensors of `read_folder` are mapped pages of the file. If the file is overwritten before the
    update is applied, they change. If it is truncated, reading them ends the process.
    """
    for bucket in read_folder(path):
        yield {name: tensor.clone() for name, tensor in bucket.items()}


def _listen(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Yield the buckets. An exception of their source becomes a `WeightUpdateError`."""
    count = 0
    try:
        for bucket in buckets:
            yield bucket
            count += 1
    except WeightUpdateError:
        raise
    except Exception as problem:
        raise WeightUpdateError(
            f"the source of the weights failed after {count} buckets: {problem!r}"
        ) from problem


def cut_into_buckets(
    weights: Mapping[str, Tensor], max_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Split a state dict, in order, into buckets of at most `max_bytes`. A larger tensor gets its
    own bucket.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} must be at least 1.")
    yield from map(dict, in_groups(weights.items(), lambda named: named[1].nbytes, max_bytes))


def in_groups(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Group consecutive items of at most `most` bytes in total. A larger item gets its own
    group.
    """
    group: list[Item] = []
    size = 0
    for item in items:
        more = size_of(item)
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group
