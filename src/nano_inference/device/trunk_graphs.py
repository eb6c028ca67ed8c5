"""Steps with prompts as CUDA graphs: the trunk, captured for a few numbers of rows.

Each launch of a Triton kernel costs the host 20 to 90 µs, so an eager step of hundreds of kernels
takes 8 to 20 ms whatever it computes, and the decodes in it wait as long. No kernel needs the
length of a chunk from the host. One graph therefore computes any chunks and decodes that fit into
its numbers of rows and of chunks. Results (draws, scores) are computed eagerly from its hidden
rows, because they are a few kernels, and differ from step to step.

A graph is captured when a step first needs its size. The capture compiles nothing and costs about
two eager steps. On a GPU the largest graph is captured before all others, because they fit into its
memory.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.device.captured_adapters import CapturedAdapters
from nano_inference.device.captured_stage import CapturedStage
from nano_inference.device.graphs import pool_of
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import Captured, HostQueue
from nano_inference.device.step_buffers import StepInputs, Uploads
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.rows import relay_tokens

LEAST = 16  # sizes up to 128 are multiples of it
PARTS = 4  # sizes per doubling beyond 64, so that at most a fifth of a graph's rows is padding
MOST_ROWS = 2048  # a larger step computes longer than its launches take


def trunk_sizes(largest: int) -> tuple[int, ...]:
    """Return the captured numbers of rows for steps of up to `largest` rows.

    The sizes are 16, 32, 48, 64, 80, 96, 112, 128, 160 … 2048, and always `largest`, if that is
    below 2048. A step of one row has no graph.
    """
    largest = min(largest, MOST_ROWS)
    sizes, step = [LEAST], LEAST
    while sizes[-1] < MOST_ROWS:
        sizes.append(sizes[-1] + step)
        step = max(LEAST, 2 ** (sizes[-1].bit_length() - 1) // PARTS)
    return tuple(sorted({size for size in sizes if size < largest} | {largest} - {0, 1}))


def largest_graph(draws: int, rows: int) -> int:
    """Return the rows of an engine's largest graph, for its most draws and most rows of a step."""
    return max(min(draws, rows), min(rows, MOST_ROWS))


class TrunkGraph(NamedTuple):
    """Graph of one number of rows, for steps without or with adapters."""

    inputs: StepInputs
    forward: Captured  # output: rows of `Decoder.stage` [size, H], valid until the next forward


class TrunkGraphs:
    """Graphs of one model over one KV storage. The model holds them, as in `DecodeGraphs`.

    Args:
        model: Model whose trunk is captured.
        storage: KV tensors of the model.
        queue: Queue of their device.
        uploads: Uploads to their device.
        tokens: Tokens of the previous draw, at a fixed address.
        adapters: Adapters of captured steps.
        stage: Messages from and to other pipeline stages.
        max_rows: Number of rows of the largest step.
        max_chunks: Maximum number of chunks of a step.
        max_blocks: Maximum length of a sequence's block table.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        queue: HostQueue,
        uploads: Uploads,
        tokens: Tensor,
        adapters: CapturedAdapters,
        stage: CapturedStage,
        *,
        max_rows: int,
        max_chunks: int,
        max_blocks: int,
    ) -> None:
        self.model, self.storage, self.max_blocks = model, storage, max_blocks
        self.sizes = trunk_sizes(max_rows)
        self._max_chunks, self._adapters, self._stage = max_chunks, adapters, stage
        self._queue, self._uploads, self._tokens = queue, uploads, tokens
        largest = self.sizes[-1] if self.sizes else 0
        chunks = self._chunks(largest)
        num_words = StepInputs.num_words(largest, chunks, max_blocks, adapted=adapters.any)
        self._inputs = torch.zeros(num_words, dtype=torch.int64, device=model.device)

    def size_of(self, rows: int, chunks: int) -> int | None:
        """Return the size of the graph that computes a step, or None if the step is too large."""
        for size in self.sizes[bisect_left(self.sizes, rows) :]:
            if chunks <= self._chunks(size):
                return size
        return None

    def forward(self, batch: ForwardBatch, size: int) -> Tensor:
        """Compute a batch with the graph of a size. Return the rows of `Decoder.stage` [N, H]."""
        graph = self._graph(size, bool(batch.adapters))
        self.storage.update_units()
        graph.inputs.write(batch, self._uploads, self._adapters.addresses(batch))
        return self._stage.replay(graph.forward, batch)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs of some sizes, the largest first."""
        adapted = range(len(self._adapters.kinds))
        self._capture((size, bool(kind)) for size in sizes for kind in adapted)

    @torch.inference_mode()
    def _capture(self, kinds: Iterable[tuple[int, bool]]) -> None:
        """Capture graphs of these sizes, each without or with adapters."""
        pool, graphs = pool_of(self.model, self._queue), self.model.recorded.setdefault(self, {})
        for size, adapted in sorted(set(kinds) - set(graphs), reverse=True):
            graphs[size, adapted] = self._capture_one(size, pool, adapted)

    def _chunks(self, size: int) -> int:
        """Return the number of chunks of a graph.

        It is below the number of rows: otherwise attention would plan for single rows only.
        """
        return max(min(self._max_chunks, size - 1), 0)

    def _graph(self, size: int, adapted: bool) -> TrunkGraph:
        graphs: dict[tuple[int, bool], TrunkGraph] = self.model.recorded.get(self, {})
        if (size, adapted) not in graphs:
            if self._queue.captures_early and not graphs:
                self.capture(self.sizes[-1:])
            self._capture([(size, adapted)])
        return self.model.recorded[self][size, adapted]

    def _capture_one(self, size: int, pool: object, adapted: bool) -> TrunkGraph:
        model, storage, tokens = self.model, self.storage, self._tokens
        adapters, chunks = self._adapters.kinds[adapted], self._chunks(size)
        inputs = StepInputs(self._inputs, size, chunks, self.max_blocks, adapters)
        inputs.clear()
        storage.update_units()  # now: the capture must not copy from the host

        def forward() -> Tensor:
            relay_tokens(inputs.batch.input_ids, inputs.relay_sources, tokens)
            return self._stage.trunk(model.ops, self._adapters.grouped(inputs.batch), storage)

        return TrunkGraph(inputs, self._queue.capture(forward, pool))
