"""What an update may be given as: a state dict, a folder or file of safetensors, or buckets one
after the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from nano_inference.checkpoints.loading import read_tensors
from nano_inference.errors import ModelLoadError, WeightUpdateError
from nano_inference.weights.staging import Bucket, Hold, WeightSession

BUCKET_BYTES = 2**26
EMPTY = (
    "weights must be a non-empty state dict (checkpoint names to tensors), a path, or "
    "buckets of them."
)
Item = TypeVar("Item")

# All that an update may be given as.
Weights = Mapping[str, Tensor] | str | PathLike[str] | Iterable[Bucket]


def fill(
    session: WeightSession, weights: str | PathLike[str] | Iterable[Bucket], hold: Hold
) -> None:
    """Put all of a folder, a file or an iterable aside. Raises `WeightUpdateError`."""
    if isinstance(weights, str | PathLike):
        if hold is Hold.BORROW:
            for bucket in read_folder(Path(weights)):
                session.add(bucket, Hold.BORROW)
        else:  # copied before they are checked
            for bucket in read_copies(Path(weights)):
                session.add(bucket, Hold.TAKE)
    elif isinstance(weights, Iterable) and not isinstance(weights, Tensor):
        for bucket in _listen(weights):
            session.add(bucket, Hold.COPY)
    else:
        raise WeightUpdateError(EMPTY)


def read_folder(path: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a safetensors file or a folder of them, one a bucket. Raises
    `WeightUpdateError`.
    """
    if not path.exists():
        raise WeightUpdateError(f"there are no weights at {path}: no such file or folder.")
    try:
        for name, tensor in read_tensors(path):
            yield {name: tensor}
    except ModelLoadError as problem:
        raise WeightUpdateError(str(problem)) from problem


def read_copies(path: Path) -> Iterator[dict[str, Tensor]]:
    """As `read_folder`, in memory of their own. The tensors of a file are its pages: if the file is
    written over before the update is applied, they are the new file's; if it is cut short, reading
    them ends the process.
    """
    for bucket in read_folder(path):
        yield {name: tensor.clone() for name, tensor in bucket.items()}


def _listen(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """The buckets; what goes wrong where they come from is an error of the update."""
    count = 0
    try:
        for bucket in buckets:
            yield bucket
            count += 1
    except WeightUpdateError:
        raise
    except Exception as problem:
        raise WeightUpdateError(
            f"the weights ended after {count} buckets: {problem!r}"
        ) from problem


def cut_into_buckets(
    weights: Mapping[str, Tensor], max_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """A state dict in parts of at most `max_bytes` each, in order; a tensor that is larger goes
    alone.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} must be at least 1.")
    yield from map(dict, in_groups(weights.items(), lambda named: named[1].nbytes, max_bytes))


def in_groups(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Neighbours together, as many as are at most `most` bytes; one that is larger goes alone."""
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
