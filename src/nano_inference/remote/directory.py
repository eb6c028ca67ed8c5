"""Which replica holds which blocks, as replicas report it; and whether fetching some is cheaper
than computing them.

Pure: no asyncio, no clock, no engine. The router only guesses from the prompts that a replica was
sent; this knows its blocks, but half a second late: an export looks again, and what was evicted
meanwhile is computed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nano_inference.errors import InvalidRequest
from nano_inference.kv_cache.block_changes import BlockReport, short_name
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys

NAME_BYTES = 32
_POLICY = "policy"


# -- names of blocks -------------------------------------------------------------------------------


def names_of(
    token_ids: Sequence[int],
    block_size: int,
    version: int,
    salt: str | None = None,
    adapter: str | None = None,
) -> tuple[int, ...]:
    """Names of the full blocks of a prompt, as an engine whose weights have this version gives
    them, and with this adapter (`adapter_key`).
    """
    prefix = PrefixKeys(Namespace(_POLICY, version, salt, adapter))
    prefix.extend(token_ids, block_size)
    return tuple(prefix.hashes)


def pack_names(names: Sequence[int]) -> bytes:
    """Names one after the other; msgpack has no integers of 256 bits."""
    return b"".join(name.to_bytes(NAME_BYTES, "little") for name in names)


def unpack_names(data: bytes) -> tuple[int, ...]:
    """The names again. Raises `InvalidRequest` where they are cut short."""
    if len(data) % NAME_BYTES:
        raise InvalidRequest(
            f"{len(data)} bytes are no names of blocks, which have {NAME_BYTES} each."
        )
    return tuple(
        int.from_bytes(data[at : at + NAME_BYTES], "little")
        for at in range(0, len(data), NAME_BYTES)
    )


def report_of(told: Mapping[str, Any]) -> BlockReport:
    """The answer to a `report_blocks` call."""
    published, dropped = (
        tuple(memoryview(told[key]).cast("Q")) for key in ("published", "dropped")
    )
    return BlockReport(told["number"], published, dropped, told["whole"])


# -- who holds them --------------------------------------------------------------------------------


class Holder(NamedTuple):
    """A replica, and how many leading blocks of a prompt it holds."""

    replica: str
    num_blocks: int


@dataclass(slots=True)
class _Reported:
    names: set[int] = field(default_factory=set[int])  # short ones
    number: int | None = None  # of the last report; None: the next one must be whole


class Directory:
    """Short block names by replica.

    Args:
        max_names: names of one replica that are kept; of a replica that has more the rest is not
            known.
    """

    def __init__(self, max_names: int = 1 << 20) -> None:
        self._max_names = max_names
        self._replicas: dict[str, _Reported] = {}

    def add(self, replica: str) -> None:
        """A replica, of which nothing is known yet. Raises `ValueError` for one that is there."""
        if replica in self._replicas:
            raise ValueError(f"there is a replica {replica!r} already.")
        self._replicas[replica] = _Reported()

    def remove(self, replica: str) -> None:
        """It is gone with all that it held. Raises `KeyError` for one that is not there."""
        del self._replicas[replica]

    def take(self, replica: str, report: BlockReport) -> bool:
        """Take in a report. False: one before it was lost, this one was ignored, and a whole one is
        due.

        A report that was taken already changes nothing. Raises `KeyError` for a replica that is not
        there.
        """
        known = self._replicas[replica]
        if report.whole:
            known.names.clear()
        elif known.number is None or report.number > known.number + 1:
            known.number = None
            return False
        elif report.number <= known.number:
            return True
        known.number = report.number
        known.names.difference_update(report.dropped)
        room = self._max_names - len(known.names)
        known.names.update(report.published[: max(0, room)])
        return True

    def count(self, replica: str, names: Sequence[int]) -> int:
        """How many leading blocks of a chain a replica holds. Names may be whole or short."""
        held = self._replicas[replica].names
        return next(
            (place for place, name in enumerate(names) if short_name(name) not in held), len(names)
        )

    def longest(self, names: Sequence[int], among: Collection[str] | None = None) -> Holder | None:
        """The replica that holds the longest head of a chain, of several the one that came first.
        None: the first block is nowhere.

        Args:
            names: of the chain's blocks, from its head on; whole or short.
            among: the replicas that may be named; None: all.
        """
        counts = [
            Holder(replica, self.count(replica, names))
            for replica in self._replicas
            if among is None or replica in among
        ]
        best = max(counts, key=lambda holder: holder.num_blocks, default=None)
        return best if best is not None and best.num_blocks else None


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


def worth_fetching(
    directory: Directory,
    cost: FetchCost,
    names: Sequence[int],
    target: str,
    sources: Collection[str] | None = None,
) -> Holder | None:
    """From where a replica should fetch blocks before it computes a prompt; None: from nowhere.

    Args:
        directory: which replica holds what.
        cost: of fetching and of computing.
        names: of the prompt's full blocks.
        target: the replica that will compute it.
        sources: replicas that may be asked (those that live); None: all.
    """
    here, holder = directory.count(target, names), directory.longest(names, sources)
    if holder is None or holder.num_blocks <= here:
        return None
    return holder if cost.gain(holder.num_blocks - here) > 0 else None
