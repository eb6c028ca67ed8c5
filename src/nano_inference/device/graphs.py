"""Decode steps as captured graphs: a forward and its draw, for a handful of batch sizes.

A step of many sequences that each compute one row launches the same kernels every time, hundreds of
them, and for a small model launching costs more than computing. A CUDA graph launches them all at
once, with the addresses and the shapes that it was captured with. So whatever changes from step to
step stands at fixed places, a batch is padded to the next size that was captured, and no kernel
learns from the host how much of it is padding.

A step replays two graphs, because the host looks at the step before in between (stop strings,
grammars):

1. the forward: tokens that the step before has drawn (`relay_tokens`), then `Decoder.trunk`, for a
  few rows by
   `Ops.few_rows` where the backend has it;
2. the draw: noise keys of this step's positions, the head's product, the draw, its results to their
  fixed places.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import Captured, HostQueue
from nano_inference.device.step_buffers import (
    DecodeInputs,
    TensorPlace,
    Uploads,
    captured_specs,
    carve,
)
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.rows import make_noise_keys, relay_tokens
from nano_inference.ops.interface import FEW_ROWS
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import COLUMNS
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device
from nano_inference.types import SamplingParams

SMALL = (1, 2, 4, 8)
STEP = 16  # sizes from here on are multiples of it
MOST = 32  # multiples at most; beyond them the step doubles


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that are captured for batches of up to `largest` rows: 1, 2, 4, 8, 16, 32, 48 …,
    always itself.
    """
    step = STEP
    while largest // step > MOST:
        step *= 2
    sizes = [*SMALL, STEP, *range(step, largest, step)]
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def row_by_row(batch: ForwardBatch) -> ForwardBatch:
    """The same rows, each a chunk of its own, as the graphs of decodes compute them: a draft sees
    the rows before it in the cache, where a layer has put all of them before it attends.
    """
    rows = len(batch.input_ids)
    if rows == len(batch.seq_lens):
        return batch
    return replace(
        batch,
        row_chunks=torch.arange(rows),
        cu_seqlens_q=torch.arange(rows + 1),
        seq_lens=batch.positions + 1,
        block_tables=batch.block_tables[batch.row_chunks],
    )


RESULTS = ("token_ids", "logprobs", "raw_logprobs", "log_kept_mass")  # fields of `Draw`


class DrawResults:
    """What a captured draw gives, at fixed places: fields of `Draw`, one entry a row."""

    def __init__(self, largest: int, device: torch.device) -> None:
        dtypes = (torch.int64, torch.float32, torch.float32, torch.float32)
        self._specs = [TensorPlace((largest,), dtype) for dtype in dtypes]
        self.largest = largest
        num_words = sum(spec.num_words for spec in self._specs)
        self.buffer = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._places = carve(self.buffer, self._specs)
        self.token_ids = self._places[0]

    def write(self, draw: Draw) -> None:
        """Bring a draw here. On the device; can be captured."""
        rows = len(draw.token_ids)
        for place, name in zip(self._places, RESULTS, strict=True):
            place[:rows].copy_(getattr(draw, name))

    def keep_tokens(self, draw: Draw) -> Tensor:
        """Where the next step finds the tokens of a draw that was not captured: here, if there is
        room for them.
        """
        rows = len(draw.token_ids)
        if rows > self.largest:  # a group that forks in one step may be wider than any step
            return draw.token_ids
        self.token_ids[:rows].copy_(draw.token_ids)
        return self.token_ids

    def on_host(self, copy: Tensor, rows: int) -> list[Tensor]:
        """`RESULTS` of the first rows, in a copy of `buffer`."""
        return [place[:rows] for place in carve(copy, self._specs)]


class DrawParameters:
    """How the rows of a captured draw are drawn, at fixed places. Brought here only when they have
    changed.
    """

    def __init__(self, largest: int, device: torch.device) -> None:
        specs = captured_specs(SamplingBatch, {"R": largest})
        self._device = device
        num_words = sum(spec.num_words for spec in specs.values())
        host = carve(torch.zeros(num_words, dtype=torch.int64), specs.values())
        self._host = dict(zip(specs, host, strict=True))
        for name, place in self._host.items():
            place.fill_(COLUMNS[name].padding or 0)
        self._buffer = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._places = dict(zip(specs, carve(self._buffer, specs.values()), strict=True))
        for name, place in self._places.items():
            place.copy_(self._host[name])
        # the streams that stand here; see `SamplingBatch.streams`
        self._written: Tensor | None = None

    @property
    def streams(self) -> Tensor:
        """What the noise keys are made of, int64 [largest]."""
        return self._places["streams"]

    def follow(self, batch: SamplingBatch, uploads: Uploads) -> None:
        """Bring the parameters of a batch here, unless they are here already."""
        if batch.streams is self._written:
            return
        for name, place in self._host.items():
            place[: len(batch)].copy_(getattr(batch, name))
        uploads.write(list(self._host.values()), self._buffer)
        self._written = batch.streams

    def batch(self, size: int, keys: Tensor, *, any_filter: bool) -> SamplingBatch:
        """The first `size` rows as a batch, row i of the logits for sample i; `keys` [size, 2] are
        its noise keys.
        """
        plain = to_device(sampling_batch([DrawRequest(SamplingParams())] * size), self._device)
        places = {name: place[:size] for name, place in self._places.items()}
        rows = torch.arange(size, device=self._device)
        # Some may be greedy; rows that are not have the same bits either way.
        flags = {"any_filter": any_filter, "any_greedy": True, "any_raw": True}
        return replace(plain, rows=rows, noise_keys=keys, **places, **flags)


def is_plain(batch: SamplingBatch) -> bool:
    """Whether a captured draw can draw this: nothing that has a size of its own, or a result of its
    own.
    """
    entries = len(batch.bias.ids) + len(batch.counts.ids)
    return not (entries or batch.has_masks or batch.any_kept or batch.most_top)


class DecodeGraph(NamedTuple):
    """The graphs of one size. `forward` must be replayed right before one of `draws`: they share
    memory.
    """

    inputs: DecodeInputs
    forward: Captured  # its output: hidden rows [size, H], good until the next forward
    draws: dict[bool, Captured]  # by whether there are filters


class DecodeGraphs:
    """The graphs of one model over one KV storage.

    Captured graphs are kept with the model, which forgets them when weights or KV tensors move
    (`forget_recorded`); they are then captured again. Weights that are written in place need
    nothing.

    Args:
        model: whose forward is captured.
        storage: its KV tensors.
        queue: of their device.
        uploads: how steps get there.
        results: of draws, and their tokens for the next step; its size is that of the largest
            batch.
        max_blocks: of a sequence's block table.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        queue: HostQueue,
        uploads: Uploads,
        results: DrawResults,
        *,
        max_blocks: int,
    ) -> None:
        self.model, self.storage, self.results = model, storage, results
        self.largest = largest = results.largest
        self.sizes = graph_sizes(largest)
        self.max_blocks = max_blocks
        self._queue, self._uploads = queue, uploads
        self._parameters = DrawParameters(largest, model.device)
        num_words = DecodeInputs.num_words(largest, max_blocks)
        self._inputs = torch.zeros(num_words, dtype=torch.int64, device=model.device)

    def forward(self, batch: ForwardBatch) -> tuple[DecodeGraph, Tensor]:
        """Compute a batch of single rows; returns its graph, and the rows after the last norm [N,
        H].
        """
        graph = self._graph(self.sizes[bisect_left(self.sizes, len(batch.input_ids))])
        if self.storage.unit_map is not None:
            self.storage.unit_map.units()  # what the graph reads is up to date
        graph.inputs.write(batch, self._uploads)
        graph.forward.replay()
        return graph, graph.forward.output[: len(batch.input_ids)]

    def draw(self, graph: DecodeGraph, batch: SamplingBatch) -> None:
        """Draw one sample of each row that `forward` has just computed with this graph, into
        `results`.
        """
        self._parameters.follow(batch, self._uploads)
        graph.draws[batch.any_filter].replay()

    def capture_all(self) -> None:
        """Capture all sizes, the largest first: smaller ones fit into its memory."""
        self.model.recorded[self] = self._capture(self.sizes)

    def _graph(self, size: int) -> DecodeGraph:
        if self._queue.captures_early and self not in self.model.recorded:
            self.capture_all()
        graphs: dict[int, DecodeGraph] = self.model.recorded.setdefault(self, {})
        if size not in graphs:
            graphs |= self._capture((size,))
        return graphs[size]

    @torch.inference_mode()
    def _capture(self, sizes: Sequence[int]) -> dict[int, DecodeGraph]:
        self._queue.synchronise()  # results may be on their way to the host
        # warming up draws too, and the next step may want the newest tokens
        before = self.results.buffer.clone()
        pool = self._queue.new_pool()
        graphs = {size: self._capture_one(size, pool) for size in sorted(sizes, reverse=True)}
        self.results.buffer.copy_(before)
        return graphs

    def _capture_one(self, size: int, pool: object) -> DecodeGraph:
        model, results, parameters = self.model, self.results, self._parameters
        inputs = DecodeInputs(self._inputs, size, self.max_blocks)
        inputs.clear()
        view = self.storage
        if view.unit_map is not None:
            view.unit_map.units()  # what a graph asks of it must be answered without a copy
        few_rows = model.ops.few_rows if size <= FEW_ROWS else None

        def forward() -> Tensor:
            relay_tokens(inputs.batch.input_ids, inputs.relay_sources, results.token_ids)
            if few_rows is not None:
                return few_rows(model.trunk, inputs.batch, view)
            return model.trunk(model.ops, inputs.batch, view)

        captured = self._queue.capture(forward, pool)
        keys = torch.zeros((size, 2), dtype=torch.int64, device=model.device)

        def draw(sampling: SamplingBatch) -> None:
            make_noise_keys(parameters.streams[:size], inputs.batch.positions + 1, keys)
            results.write(model.draw(captured.output, sampling))

        batches = {
            filters: parameters.batch(size, keys, any_filter=filters) for filters in (False, True)
        }
        draws = {
            filters: self._queue.capture(lambda batch=batch: draw(batch), pool)
            for filters, batch in batches.items()
        }
        return DecodeGraph(inputs, captured, draws)
