"""All CUDA graphs of an engine: decodes and steps with prompts, and the memory that they take."""

from collections.abc import Callable
from typing import NamedTuple

from nano_inference.config import EngineConfig
from nano_inference.device.captured_adapters import CapturedAdapters
from nano_inference.device.captured_stage import CapturedStage
from nano_inference.device.graphs import DecodeGraphs, DrawResults
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import HostQueue
from nano_inference.device.step_buffers import Uploads
from nano_inference.device.trunk_graphs import TrunkGraphs, largest_graph
from nano_inference.models.decoder import Decoder

PROBED = 2  # graphs of a kind, after its largest, whose memory stands for that of all others


class GraphLimits(NamedTuple):
    """Bounds of the steps that graphs compute.

    Attributes:
        draws: Rows of a decode step.
        rows: Rows of a step.
        chunks: Chunks of a step.
        blocks: Length of a sequence's block table.
        lora_rank: Rank of an adapter. 0: steps have no adapters.
    """

    draws: int
    rows: int
    chunks: int
    blocks: int
    lora_rank: int = 0


def limits_of(config: EngineConfig, max_model_len: int) -> GraphLimits:
    """Return the bounds of an engine's steps."""
    rows = config.max_tokens_per_batch
    return GraphLimits(
        draws=min(config.scheduler.max_draws, rows),
        rows=rows,
        chunks=config.max_batch_size,
        blocks=-(-max_model_len // config.block_size),
        lora_rank=config.max_lora_rank if config.has_adapters else 0,
    )


class StepGraphs(NamedTuple):
    """Graphs of an engine's policy."""

    decodes: DecodeGraphs
    trunks: TrunkGraphs

    def capture_at_start(self) -> None:
        """Capture all decodes, and the largest trunk, into whose memory all others fit."""
        self.trunks.capture(self.trunks.sizes[-1:])
        self.decodes.capture(self.decodes.sizes)

    def measure(self, free: Callable[[], int]) -> int:
        """Return the bytes that all graphs will take, measured by capturing a few of each kind.

        The largest graphs determine the memory that all share. Each other graph takes memory of the
        driver only, as much as the next smaller ones do.

        Args:
            free: Function that returns the free bytes of the card.
        """
        before, others = free(), 0
        for graphs in (self.trunks, self.decodes):
            *smaller, largest = graphs.sizes or (0,)
            if largest:
                graphs.capture((largest,))
            probes = smaller[-PROBED:]
            if probes:
                start = free()
                graphs.capture(probes)
                per_graph = -(-max(start - free(), 0) // len(probes))
                others += per_graph * (len(smaller) - len(probes))
        return max(before - free(), 0) + others


def graphs_of(
    model: Decoder,
    storage: KVStorage,
    queue: HostQueue,
    uploads: Uploads,
    results: DrawResults,
    limits: GraphLimits,
) -> StepGraphs:
    """Return an engine's graphs, none of them captured yet. `results` are those of its draws."""
    parts, adapters = (model, storage, queue, uploads), CapturedAdapters(model, limits.lora_rank)
    stage = CapturedStage(model, largest_graph(limits.draws, limits.rows))
    return StepGraphs(
        DecodeGraphs(*parts, results, adapters, stage, max_blocks=limits.blocks),
        TrunkGraphs(
            *parts,
            results.token_ids,
            adapters,
            stage,
            max_rows=limits.rows,
            max_chunks=limits.chunks,
            max_blocks=limits.blocks,
        ),
    )
