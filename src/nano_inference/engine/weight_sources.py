"""What an update may be given as: a state dict, a folder or file of safetensors, or buckets one
after the other.
"""

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import cast

from torch import Tensor

from nano_inference.engine.weight_session import EMPTY, Hold, WeightSession
from nano_inference.engine.weight_update import Bucket
from nano_inference.errors import ModelLoadError, WeightUpdateError
from nano_inference.models.loading import read_tensors

# All that an update may be given as.
Weights = Mapping[str, Tensor] | str | PathLike[str] | Iterable[Bucket]


def fill(session: WeightSession, weights: Weights, hold: Hold) -> None:
    """Put all of it aside. Raises `WeightUpdateError`."""
    if isinstance(weights, Mapping):
        session.add(cast(Bucket, weights), hold)
    elif isinstance(weights, str | PathLike):
        for bucket in read_folder(Path(weights)):
            session.add(bucket, hold)
    elif isinstance(weights, Iterable) and not isinstance(weights, Tensor):
        for bucket in _listen(weights):
            session.add(bucket, Hold.COPY)
    else:
        raise WeightUpdateError(EMPTY)


def read_folder(path: Path) -> Iterator[Bucket]:
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
