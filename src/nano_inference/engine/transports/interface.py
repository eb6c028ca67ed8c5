"""What every transport is: something that yields buckets until done, before a deadline."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

from nano_inference.engine.weights.update import Bucket
from nano_inference.parallel.deadline import Deadline as Deadline

Item = TypeVar("Item")
Begun = TypeVar("Begun")
Done = TypeVar("Done")
Shapes = Mapping[str, tuple[int, ...]]  # of every tensor that an update of the model may name


class Incoming(NamedTuple):
    """An update that begins to arrive."""

    version: int | None  # that the trainer gave it
    buckets: Iterator[Bucket]  # the caller owns a bucket's tensors


class WeightTransport(Protocol):
    """A way for weights to arrive. One update at a time."""

    def receive(self, shapes: Shapes, deadline: Deadline) -> Incoming:
        """Wait for an update to begin. Raises `WeightUpdateError`, as the buckets' iterator does.

        What the peer says is checked against `shapes`, the model's own table, before anything is
        allocated.
        """
        ...

    def close(self) -> None:
        """Tear down what is open; called from another thread while `receive` or its iterator may
        wait, or twice.

        A later `receive` starts anew.
        """
        ...


def overlapped(
    items: Iterable[Item],
    begin: Callable[[Item], Begun],
    finish: Callable[[Begun], Done],
    depth: int = 2,
) -> Iterator[Done]:
    """Each item begun, then finished when `depth` of them are under way: in order, so that one
    travels while the one before it is worked on.
    """
    under_way: deque[Begun] = deque()
    for item in items:
        under_way.append(begin(item))
        if len(under_way) == depth:
            yield finish(under_way.popleft())
    while under_way:
        yield finish(under_way.popleft())
