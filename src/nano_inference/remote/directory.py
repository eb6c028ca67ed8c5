"""Directory of the blocks that replicas report, and the decision to fetch blocks or to compute
them.

This module is pure: no asyncio, no clock, no engine. The router estimates a replica's blocks from
the prompts sent to it. The directory has the actual blocks, about half a second late. An export
checks again, and evicted blocks are computed.
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
    """Return the names of a prompt's full blocks, for an engine with this weight version and
    adapter (`adapter_key`).
    """
    prefix = PrefixKeys(Namespace(_POLICY, version, salt, adapter))
    prefix.extend(token_ids, block_size)
    return tuple(prefix.hashes)


def pack_names(names: Sequence[int]) -> bytes:
    """Concatenate names as bytes, since msgpack has no 256-bit integers."""
    return b"".join(name.to_bytes(NAME_BYTES, "little") for name in names)


def unpack_names(data: bytes) -> tuple[int, ...]:
    """Return the names from bytes. Raises `InvalidRequest` for a partial name."""
    if len(data) % NAME_BYTES:
        raise InvalidRequest(
            f"{len(data)} bytes are not a whole number of block names ({NAME_BYTES} bytes each)."
        )
    return tuple(
        int.from_bytes(data[at : at + NAME_BYTES], "little")
        for at in range(0, len(data), NAME_BYTES)
    )


def report_of(answer: Mapping[str, Any]) -> BlockReport:
    """Decode the answer to a `report_blocks` call."""
    published, dropped = (
        tuple(memoryview(answer[key]).cast("Q")) for key in ("published", "dropped")
    )
    return BlockReport(answer["number"], published, dropped, answer["whole"])


# -- holders of blocks -----------------------------------------------------------------------------


class Holder(NamedTuple):
    """A replica and the number of leading blocks of a prompt that it holds."""

    replica: str
    num_blocks: int


@dataclass(slots=True)
class _Reported:
    names: set[int] = field(default_factory=set[int])  # short names
    number: int | None = None  # last report's number; None: the next report must be whole


class Directory:
    """Short block names by replica.

    Args:
        max_names: Maximum names stored per replica. Further names are ignored.
    """

    def __init__(self, max_names: int = 1 << 20) -> None:
        self._max_names = max_names
        self._replicas: dict[str, _Reported] = {}

    def add(self, replica: str) -> None:
        """Add a replica without blocks. Raises `ValueError` if it exists."""
        if replica in self._replicas:
            raise ValueError(f"replica {replica!r} already exists.")
        self._replicas[replica] = _Reported()

    def remove(self, replica: str) -> None:
        """Remove a replica and its blocks. Raises `KeyError` if it does not exist."""
        del self._replicas[replica]

    def take(self, replica: str, report: BlockReport) -> bool:
        """Apply a report. Return False if an earlier report was lost: this one is ignored, and a
        whole one is needed.

        An old report changes nothing. Raises `KeyError` if the replica does not exist.
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
        """Return the number of leading blocks of a chain that a replica holds. Names may be whole
        or short.
        """
        held = self._replicas[replica].names
        return next(
            (place for place, name in enumerate(names) if short_name(name) not in held), len(names)
        )

    def longest(self, names: Sequence[int], among: Collection[str] | None = None) -> Holder | None:
        """Return the replica that holds the most leading blocks of a chain; the oldest replica wins
        ties. None: no replica holds the first block.

        Args:
            names: Names of the chain's blocks from its head on, whole or short.
            among: Replicas to choose from. None: all.
        """
        counts = [
            Holder(replica, self.count(replica, names))
            for replica in self._replicas
            if among is None or replica in among
        ]
        best = max(counts, key=lambda holder: holder.num_blocks, default=None)
        return best if best is not None and best.num_blocks else None


class FetchCost:
    """Estimate of the time that fetching saves: bytes / bandwidth against tokens / prefill rate.

    Both rates are measured while the fleet runs (`fetched`, `prefilled`), as moving averages in
    which a new measurement has weight 0.2. They start from the arguments.

    Args:
        block_size: Tokens in a block.
        block_bytes: Encoded bytes of a block.
        bandwidth: Bytes per second between replicas.
        prefill_rate: Prompt tokens that a replica computes per second.
        latency: Seconds of an empty fetch.
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
            raise ValueError("sizes and rates must be positive, and latency at least 0.")
        self.block_size, self.block_bytes = block_size, block_bytes
        self.bandwidth, self.prefill_rate, self.latency = bandwidth, prefill_rate, latency

    def fetched(self, num_blocks: int, seconds: float) -> None:
        """Record the duration of a fetch."""
        spent = seconds - self.latency
        if num_blocks > 0 and spent > 0:
            self.bandwidth += self.WEIGHT * (num_blocks * self.block_bytes / spent - self.bandwidth)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of computing prompt tokens."""
        if num_tokens > 0 and seconds > 0:
            self.prefill_rate += self.WEIGHT * (num_tokens / seconds - self.prefill_rate)

    def gain(self, num_blocks: int) -> float:
        """Return the seconds saved by fetching. Negative: computing is faster."""
        fetching = self.latency + num_blocks * self.block_bytes / self.bandwidth
        return num_blocks * self.block_size / self.prefill_rate - fetching


def worth_fetching(
    directory: Directory,
    cost: FetchCost,
    names: Sequence[int],
    target: str,
    sources: Collection[str] | None = None,
) -> Holder | None:
    """Return the replica from which to fetch a prompt's blocks. None: compute them.

    Args:
        directory: Blocks of each replica.
        cost: Cost of fetching and computing.
        names: Names of the prompt's full blocks.
        target: Replica that will compute the prompt.
        sources: Live replicas to fetch from. None: all.
    """
    here, holder = directory.count(target, names), directory.longest(names, sources)
    if holder is None or holder.num_blocks <= here:
        return None
    return holder if cost.gain(holder.num_blocks - here) > 0 else None
