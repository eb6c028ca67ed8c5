"""The immutable result of scheduling, as parallel tuples with one entry per chunk.

A tuple entry costs a fiftieth of an object.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from nano_inference.kv_cache.manager import CacheAllocation


class Chunk(NamedTuple):
    """Positions [start, start + length) of one sequence.

    Attributes:
        samples: Number of sequences that draw the token after the known ones: 0, 1, or a whole
            group, whose other samples are forked.
        fresh_blocks: Maximum number of KV blocks that the chunk allocates, including a copy of a
            shared block. 0 leaves the block table unchanged.
        drafts: Guesses of the tokens after the known ones, which are the input of the last rows.
            Each of these rows also draws a token, and counts as computed only if its guess was
            drawn.
    """

    seq_id: int
    start: int
    length: int
    samples: int
    weight_set: str
    fresh_blocks: int
    drafts: tuple[int, ...]


class Wait(StrEnum):
    """Reason why a step does not admit a waiting sequence."""

    TOKENS = "the step has no tokens left"
    IN_FLIGHT = "its last token is in flight"
    SAME_PREFIX = "another request computes the same prefix"
    STAGE = "the step may draw for no more sequences"
    PLACES = "max_batch_size is reached"
    MEMORY = "too few KV blocks are free"


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence to admit, and the cached prefix that it starts from."""

    seq_id: int
    cached: CacheAllocation


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's decision. `core.apply.apply` carries it out.

    Attributes:
        seq_ids, starts, lengths, samples, weight_sets, fresh_blocks, drafts: Fields of `Chunk`, one
            entry per chunk.
        admitted: Sequences that leave the waiting list. Each has a chunk.
        preempted_seqs: Sequences that give up their blocks and return to the waiting list. None of
            them has a chunk.
        waits: Sequences that the step tried to admit, with the reason why it could not. Those that
            wait behind the last of them were not tried.
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
    waits: tuple[tuple[int, Wait], ...] = ()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks one at a time."""
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
        """Number of rows in the forward pass."""
        return sum(self.lengths)

    @property
    def prefill_seqs(self) -> tuple[int, ...]:
        """Sequences that compute more than their newest token.

        Informational: the engine does not distinguish prefill from decode.
        """
        return tuple(c.seq_id for c in self.chunks() if c.length > 1 or not c.samples)

    @property
    def decode_seqs(self) -> tuple[int, ...]:
        """Sequences that compute exactly their newest token."""
        return tuple(c.seq_id for c in self.chunks() if c.length == 1 and c.samples)
