"""Interfaces between the loop and the layers above it, which implement them."""

from collections.abc import Container
from collections.abc import Sequence as Listed
from typing import Any, Protocol

from nano_inference.config import SchedulerConfig
from nano_inference.core.apply import Applied, SampledTokens
from nano_inference.core.batch import Chunks, ForwardBatch
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.sequence import Sequence, Sequences
from nano_inference.kv_cache.block_hash import PrefixKeys
from nano_inference.sampling.columns import Arrays
from nano_inference.sampling.drafted import Drafts
from nano_inference.sampling.sampling_batch import Masks, SamplingBatch


class Pending(Protocol):
    """Samples that a step in flight is drawing."""

    def wait(self) -> SampledTokens:
        """Wait for them."""
        ...


class Runner(Protocol):
    """Computes the loop's steps: on one device, with other ranks, or in a test."""

    @property
    def arrays(self) -> Arrays[Any]:
        """Makes the arrays of the batches that it takes."""
        ...

    def announce(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> None:
        """Called before the batches of a step are built: other ranks build theirs meanwhile."""
        ...

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        """Called before a draw: other ranks draw the same samples of the step."""
        ...

    def forward(
        self,
        batches: tuple[ForwardBatch[Any], ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> Any:
        """Launch a forward; returns what `sample` draws from."""
        ...

    def sample(self, result: Any, batch: SamplingBatch[Any]) -> Pending:
        """Launch the draw."""
        ...

    def idle(self) -> None:
        """Take part in a round of engines in lockstep without a forward of one's own."""
        ...

    def drop(self, weight_set: str) -> None:
        """Free a weight set that no later step names."""
        ...


class Returning(Protocol):
    """Evicted blocks that can be restored: `device.kept_files.KeptFiles`, a layer above."""

    def __len__(self) -> int: ...

    def missing(self, names: Listed[int]) -> range:
        """The places in a chain, behind what the cache has, whose blocks can be brought back."""
        ...

    def bring_back(self, token_ids: Listed[int], prefix: PrefixKeys, places: range) -> list[int]:
        """Restore them into the cache; returns a block table that holds them."""
        ...


class Drafting(Protocol):
    """Proposes draft tokens: `drafts.drafter.Drafter`, a layer above."""

    def propose(self, live: Sequences, pending: Container[int], config: SchedulerConfig) -> Drafts:
        """Drafts for the next step, by sequence id; `pending`: ids of those of which a token is
        being sampled.
        """
        ...

    def learn(self, seqs: Listed[Sequence], drafts: Drafts) -> int:
        """Tokens of these sequences, which may have been computed with drafts, have become known;
        returns how many more than one of each.
        """
        ...
