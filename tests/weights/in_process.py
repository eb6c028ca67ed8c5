"""A transport for tests: the weights are in this process."""

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.weights.sources import cut_into_buckets
from nano_inference.weights.staging import Bucket
from nano_inference.weights.transports.interface import Deadline, Incoming, Shapes


class InProcess:
    """Deliver a state dict, or buckets from a test, as one update."""

    def __init__(
        self, weights: Mapping[str, Tensor] | Iterable[Bucket], *, version: int | None = None
    ) -> None:
        self.version = version
        buckets = (
            cut_into_buckets(cast(Mapping[str, Tensor], weights))
            if isinstance(weights, Mapping)
            else weights
        )
        self._buckets: Iterator[Bucket] = iter(buckets)

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Receive everything in one call."""
        return Incoming(self.version, self._until(deadline))

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def _until(self, deadline: Deadline) -> Iterator[Bucket]:
        for count, bucket in enumerate(self._buckets):
            if not deadline.left():
                raise WeightUpdateError(f"only {count} buckets came within {deadline.seconds:g} s.")
            yield bucket
