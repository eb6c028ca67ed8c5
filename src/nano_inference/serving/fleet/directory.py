"""Which replica holds which blocks, as replicas report it; and whether fetching some is cheaper
than computing them.

Pure: no asyncio, no clock, no engine. The router's own guess is coarse and says who *was sent* a
prefix; this says who *has* it, block by block. Still it may be behind: an export looks again, and
what is gone is computed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nano_inference.kv_cache.news import BlockReport, short_name


class Holder(NamedTuple):
    """Who holds how many leading blocks of a prompt."""

    replica: str
    num_blocks: int


@dataclass(slots=True, eq=False)
class _Replica:
    bit: int
    names: set[int]
    number: int | None = None  # of its last report; None: its next one must be whole


class Directory:
    """Block names by replica, and the other way round. A change, and a look at one name, are O(1).

    Replicas are the bits of an integer for each name, so which of a thousand hold a whole chain is
    one `and` a block.

    Args:
        max_names: names of one replica that are kept; of a replica that has more the rest is not
            known.
    """

    def __init__(self, max_names: int = 1 << 20) -> None:
        self._max_names = max_names
        self._replicas: dict[str, _Replica] = {}
        self._by_slot: list[str | None] = []
        self._holders: dict[int, int] = {}  # short name -> replicas, a bit each

    @property
    def num_names(self) -> int:
        """Names that somebody holds."""
        return len(self._holders)

    def add(self, replica: str) -> None:
        """A replica, of which nothing is known yet. Raises `ValueError` for one that is there."""
        if replica in self._replicas:
            raise ValueError(f"there is a replica {replica!r} already.")
        if None in self._by_slot:
            slot = self._by_slot.index(None)
            self._by_slot[slot] = replica
        else:
            slot = len(self._by_slot)
            self._by_slot.append(replica)
        self._replicas[replica] = _Replica(1 << slot, set())

    def remove(self, replica: str) -> None:
        """It is gone with all that it held. Raises `KeyError` for one that is not there."""
        record = self._replicas.pop(replica)
        self._clear(record)
        self._by_slot[record.bit.bit_length() - 1] = None

    def take(self, replica: str, report: BlockReport) -> bool:
        """Take in a report. False: one before it was lost, this one was ignored, and a whole one is
        due.

        A report that was taken already changes nothing. Raises `KeyError` for a replica that is not
        there.
        """
        record = self._replicas[replica]
        if report.whole:
            self._clear(record)
        elif record.number is None or report.number > record.number + 1:
            record.number = None
            return False
        elif report.number <= record.number:
            return True
        record.number = report.number
        for name in report.dropped:
            self._drop(record, name)
        room = self._max_names - len(record.names)
        for name in report.published[: max(0, room)]:
            if name not in record.names:
                record.names.add(name)
                self._holders[name] = self._holders.get(name, 0) | record.bit
        return True

    def count(self, replica: str, names: Sequence[int]) -> int:
        """How many leading blocks of a chain a replica holds. Names may be whole or short."""
        held = self._replicas[replica].names
        return next(
            (place for place, name in enumerate(names) if short_name(name) not in held), len(names)
        )

    def longest(self, names: Sequence[int], among: Collection[str] | None = None) -> Holder | None:
        """Who holds the longest head of a chain, of several the one that came first. None: nobody
        holds its first block.

        Args:
            names: of the chain's blocks, from its head on; whole or short.
            among: the replicas that may be named; None: all.
        """
        mask = -1
        if among is not None:
            mask = 0
            for replica in among:
                mask |= self._replicas[replica].bit
        holders, count = self._holders, 0
        for name in names:
            there = mask & holders.get(short_name(name), 0)
            if not there:
                break
            mask, count = there, count + 1
        if not count:
            return None
        replica = self._by_slot[(mask & -mask).bit_length() - 1]
        assert replica is not None
        return Holder(replica, count)

    def check(self) -> None:
        """Assert that both directions agree. For tests; O(names)."""
        made: dict[int, int] = {}
        for name, record in self._replicas.items():
            assert self._by_slot[record.bit.bit_length() - 1] == name
            assert len(record.names) <= self._max_names
            for short in record.names:
                made[short] = made.get(short, 0) | record.bit
        assert made == self._holders, "names by replica and replicas by name disagree"

    def _clear(self, record: _Replica) -> None:
        for name in list(record.names):
            self._drop(record, name)

    def _drop(self, record: _Replica, name: int) -> None:
        if name in record.names:
            record.names.discard(name)
            left = self._holders[name] & ~record.bit
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]


class FetchCost:
    """Whether blocks are worth fetching: their bytes over the bandwidth against their tokens over
    the prefill rate.

    Both rates are measured while the fleet runs (`fetched`, `prefilled`): means in which the last
    measurement counts for a fifth. Before the first of each kind the given ones hold.

    Args:
        block_size: tokens of a block.
        block_bytes: of one block on the wire.
        bandwidth: bytes a second from replica to replica.
        prefill_rate: tokens a second that a replica computes.
        latency: seconds of a fetch of no bytes.
    """

    WEIGHT = 0.2

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        *,
        bandwidth: float = 1e9,
        prefill_rate: float = 1e4,
        latency: float = 0.005,
    ) -> None:
        if min(block_size, block_bytes, bandwidth, prefill_rate) <= 0 or latency < 0:
            raise ValueError("sizes and rates are positive, and a latency is not negative.")
        self.block_size, self.block_bytes = block_size, block_bytes
        self.bandwidth, self.prefill_rate, self.latency = bandwidth, prefill_rate, latency

    def fetched(self, num_blocks: int, seconds: float) -> None:
        """A fetch took so long."""
        spent = seconds - self.latency
        if num_blocks > 0 and spent > 0:
            self.bandwidth += self.WEIGHT * (num_blocks * self.block_bytes / spent - self.bandwidth)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A replica computed so many tokens of prompts in so long."""
        if num_tokens > 0 and seconds > 0:
            self.prefill_rate += self.WEIGHT * (num_tokens / seconds - self.prefill_rate)

    def gain(self, num_blocks: int) -> float:
        """Seconds that fetching saves; negative: computing is faster."""
        fetching = self.latency + num_blocks * self.block_bytes / self.bandwidth
        return num_blocks * self.block_size / self.prefill_rate - fetching


class Fetch(NamedTuple):
    """Blocks that are worth fetching: [first, end) of a chain, from a replica."""

    source: str
    first: int
    end: int
    gain: float


def worth_fetching(
    directory: Directory,
    cost: FetchCost,
    names: Sequence[int],
    target: str,
    sources: Collection[str] | None = None,
) -> Fetch | None:
    """What a replica should fetch before it computes a prompt; None: nothing.

    Args:
        directory: who holds what.
        cost: of fetching and of computing.
        names: of the prompt's full blocks.
        target: the replica that will compute it.
        sources: replicas that may be asked (those that live); None: all.
    """
    first = directory.count(target, names)
    holder = directory.longest(names, sources)
    if holder is None or holder.replica == target or holder.num_blocks <= first:
        return None
    gain = cost.gain(holder.num_blocks - first)
    return Fetch(holder.replica, first, holder.num_blocks, gain) if gain > 0 else None
