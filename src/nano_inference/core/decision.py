"""The frozen result of scheduling: parallel tuples, one entry a chunk (a tuple costs a fiftieth of
an object).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nano_inference.kv_cache.manager import CacheAllocation


class Chunk(NamedTuple):
    """Positions [start, start + length) of one sequence.

    Attributes:
        samples: sequences that draw the token behind its known ones: 0, 1, or a whole group, whose
            others are forked.
        fresh_blocks: how many KV blocks it takes at most, the copy of one that it shares included.
            0: its block table stays as it is.
        drafts: guesses of the tokens behind the known ones, the input of its last rows. Each of
            these rows draws a token too, and counts as computed only when its guess was drawn.
    """

    seq_id: int
    start: int
    length: int
    samples: int
    weight_set: str
    fresh_blocks: int
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence that enters, and the cached prefix that it starts from."""

    seq_id: int
    cached: CacheAllocation


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's decision. Nothing has happened yet: `core.apply.apply` carries it out.

    Attributes:
        seq_ids, starts, lengths, samples, weight_sets, fresh_blocks, drafts: one entry a chunk; see
            `Chunk`.
        admitted: sequences that leave the waiting list. Each has a chunk.
        preempted_seqs: sequences that give up their blocks and return to the waiting list. None has
            a chunk.
    """

    seq_ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    weight_sets: tuple[str, ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted_seqs: tuple[int, ...] = ()

    def chunks(self) -> Iterator[Chunk]:
        """The chunks, one at a time."""
        columns = (
            self.seq_ids,
            self.starts,
            self.lengths,
            self.samples,
            self.weight_sets,
            self.fresh_blocks,
            self.drafts,
        )
        return itertools.starmap(Chunk, zip(*columns, strict=True))

    @property
    def num_tokens(self) -> int:
        """Rows that go through the forward."""
        return sum(self.lengths)

    @property
    def prefill_seqs(self) -> tuple[int, ...]:
        """Sequences that compute more than their newest token. A view for readers; the engine makes
        no difference.
        """
        return tuple(c.seq_id for c in self.chunks() if c.length > 1 or not c.samples)

    @property
    def decode_seqs(self) -> tuple[int, ...]:
        """Sequences that compute exactly their newest token."""
        return tuple(c.seq_id for c in self.chunks() if c.length == 1 and c.samples)
