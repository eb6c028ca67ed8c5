"""Interfaces that the loop calls and higher layers implement."""

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
from nano_inference.types import TrainingSample


class Pending(Protocol):
    """Samples that a step in flight is drawing."""

    def wait(self) -> SampledTokens:
        """Wait for the draw and return its samples."""
        ...


class Runner(Protocol):
    """Computes the loop's steps: on one device, with other ranks, or in a test."""

    @property
    def arrays(self) -> Arrays[Any]:
        """Factory of the arrays in this runner's batches."""
        ...

    def announce(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> None:
        """Announce a step before its batches are built, so that other ranks build theirs."""
        ...

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        """Announce a draw before its launch, so that other ranks draw the same samples."""
        ...

    def forward(
        self,
        batches: tuple[ForwardBatch[Any], ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> Any:
        """Launch a forward pass and return its result, which `sample` draws from."""
        ...

    def logits(self, result: Any, rows: Any) -> Any:
        """Return rows of a result's logits on the host: int64 [n] -> float32 [n, V]."""
        ...

    def sample(self, result: Any, batch: SamplingBatch[Any]) -> Pending:
        """Launch the draw of a step's samples."""
        ...

    def idle(self) -> None:
        """Take part in a round of engines in lockstep without computing a step."""
        ...

    def drop(self, weight_set: str) -> None:
        """Free a weight set that no later step uses."""
        ...


class Returning(Protocol):
    """Evicted blocks that can be restored.

    `device.kept_files.KeptFiles`, in a higher layer, implements it.
    """

    def __len__(self) -> int: ...

    def missing(self, names: Listed[int]) -> range:
        """Return the chain indices of restorable blocks that directly follow the cached blocks."""
        ...

    def bring_back(self, token_ids: Listed[int], prefix: PrefixKeys, places: range) -> list[int]:
        """Restore these blocks into the cache and return a block table that holds them."""
        ...


class Receipts(Protocol):
    """Adds receipts to finished samples.

    `engine.receipts.ReceiptMaker`, in a higher layer, implements it.
    """

    def note(self, seq: Sequence) -> None:
        """Record the weights and the adapter that compute a sequence from now on."""
        ...

    def add(self, sample: TrainingSample) -> TrainingSample:
        """Return a finished sample with its receipt, if it wants one."""
        ...


class Drafting(Protocol):
    """Proposes draft tokens.

    `drafts.drafter.Drafter`, in a higher layer, implements it.
    """

    def propose(self, live: Sequences, pending: Container[int], config: SchedulerConfig) -> Drafts:
        """Return drafts for the next step by sequence id.

        `pending` holds the ids of sequences that have a token in flight.
        """
        ...

    def learn(self, seqs: Listed[Sequence], drafts: Drafts) -> int:
        """Record that tokens of these sequences have become known.

        Return how many tokens the accepted drafts added: those beyond one for each sequence.
        """
        ...
