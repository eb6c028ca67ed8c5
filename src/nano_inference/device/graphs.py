"""Decode steps as CUDA graphs: a forward and its draw, captured for a few batch sizes.

A step of many sequences that each compute one row launches the same hundreds of kernels every
time. For a small model, launching costs more than computing. A CUDA graph launches all of them
together, with the addresses and shapes of its capture. So step-dependent data is stored at fixed
addresses, a batch is padded to the next captured size, and kernels need no row count from the host.

A step replays two graphs, because the host processes the previous step in between (stop strings,
grammars):

1. the forward: tokens drawn by the previous step (`relay_tokens`), then `Decoder.stage`. Small
   batches use `Ops.few_rows` if the backend has it.
2. the draw: noise keys of this step's positions, the product with the head, the draw, and its
   results at fixed addresses. Adapters of the head have draws of their own.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.device.captured_adapters import CapturedAdapters
from nano_inference.device.captured_stage import CapturedStage
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import Captured, HostQueue
from nano_inference.device.step_buffers import (
    StepInputs,
    TensorPlace,
    Uploads,
    captured_specs,
    carve,
)
from nano_inference.models.decoder import NO_ADAPTERS, Decoder, HeadRows
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.rows import make_noise_keys, relay_tokens
from nano_inference.ops.interface import FEW_ROWS
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import COLUMNS
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device
from nano_inference.types import SamplingParams

SMALL = (1, 2, 4, 8)
STEP = 16  # larger sizes are multiples of this
MOST = 32  # maximum number of multiples, beyond which the step doubles
_POOL = "pool"  # key of the graphs' memory in `Decoder.recorded`


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Return the captured sizes for batches of up to `largest` rows.

    The sizes are 1, 2, 4, 8, 16, 32, 48 …, and always `largest`.
    """
    step = STEP
    while largest // step > MOST:
        step *= 2
    sizes = [*SMALL, STEP, *range(step, largest, step)]
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def row_by_row(batch: ForwardBatch) -> ForwardBatch:
    """Return the same rows with a chunk for each row, as decode graphs compute them.

    Draft rows find preceding rows in the cache, because a layer stores all rows before it attends.
    Layers with a state do not.
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
    """Results of a captured draw at fixed addresses: fields of `Draw`, one entry per row."""

    def __init__(self, largest: int, device: torch.device) -> None:
        dtypes = (torch.int64, torch.float32, torch.float32, torch.float32)
        self._specs = [TensorPlace((largest,), dtype) for dtype in dtypes]
        self.largest = largest
        num_words = sum(spec.num_words for spec in self._specs)
        self.buffer = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._places = carve(self.buffer, self._specs)
        self.token_ids = self._places[0]

    def write(self, draw: Draw) -> None:
        """Copy a draw into this buffer. Runs on the device and can be captured."""
        rows = len(draw.token_ids)
        for target, name in zip(self._places, RESULTS, strict=True):
            target[:rows].copy_(getattr(draw, name))

    def keep_tokens(self, draw: Draw) -> Tensor:
        """Store the tokens of an eager draw for the next step. Return the tensor that holds them.

        Return the draw's own tensor if the buffer is too small.
        """
        rows = len(draw.token_ids)
        if rows > self.largest:  # a group that forks in one step may be wider than any step
            return draw.token_ids
        self.token_ids[:rows].copy_(draw.token_ids)
        return self.token_ids

    def on_host(self, copy: Tensor, rows: int) -> list[Tensor]:
        """Return the `RESULTS` of the first rows from a copy of `buffer`."""
        return [place[:rows] for place in carve(copy, self._specs)]


class DrawParameters:
    """Sampling parameters of a captured draw at fixed addresses, uploaded only after changes."""

    def __init__(self, largest: int, device: torch.device) -> None:
        specs = captured_specs(SamplingBatch, {"R": largest})
        self._device = device
        num_words = sum(spec.num_words for spec in specs.values())
        host = carve(torch.zeros(num_words, dtype=torch.int64), specs.values())
        self._host = dict(zip(specs, host, strict=True))
        for name, column in self._host.items():
            column.fill_(COLUMNS[name].padding or 0)
        self._buffer = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._places = dict(zip(specs, carve(self._buffer, specs.values()), strict=True))
        for name, column in self._places.items():
            column.copy_(self._host[name])
        # streams of the uploaded parameters; see `SamplingBatch.streams`
        self._written: Tensor | None = None

    @property
    def streams(self) -> Tensor:
        """Sources of the noise keys, int64 [largest]."""
        return self._places["streams"]

    def follow(self, batch: SamplingBatch, uploads: Uploads) -> None:
        """Upload the parameters of a batch unless they are already on the device."""
        if batch.streams is self._written:
            return
        for name, column in self._host.items():
            column[: len(batch)].copy_(getattr(batch, name))
        uploads.write(list(self._host.values()), self._buffer)
        self._written = batch.streams

    def batch(self, size: int, keys: Tensor, *, any_filter: bool) -> SamplingBatch:
        """Return the first `size` rows as a batch in which sample i draws from row i of the logits.

        `keys` [size, 2] are the noise keys.
        """
        plain = to_device(sampling_batch([DrawRequest(SamplingParams())] * size), self._device)
        places = {name: place[:size] for name, place in self._places.items()}
        rows = torch.arange(size, device=self._device)
        # The greedy path is captured, too. Other rows keep their bits.
        flags = {"any_filter": any_filter, "any_greedy": True, "any_raw": True}
        return replace(plain, rows=rows, noise_keys=keys, **places, **flags)


def is_plain(batch: SamplingBatch) -> bool:
    """Return True if a captured draw can draw a batch.

    It has no bias, counts or masks, and asks for no kept, top or named ids.
    """
    entries = len(batch.bias.ids) + len(batch.counts.ids) + len(batch.named.ids)
    return not (entries or batch.has_masks or batch.any_kept or batch.most_top)


def pool_of(model: Decoder, queue: HostQueue) -> Any:
    """Return the memory that all graphs of a model share: none is replayed during another.

    The pool is dropped together with the graphs (`forget_recorded`).
    """
    if _POOL not in model.recorded:
        model.recorded[_POOL] = queue.new_pool()
    return model.recorded[_POOL]


class DrawKind(NamedTuple):
    """Properties of a step that select its captured draw."""

    filters: bool
    head: bool  # an adapter changes the head


class DecodeGraph(NamedTuple):
    """Graphs of one batch size, for steps without or with adapters.

    Replay `forward` immediately before one of `draws`: they share memory.
    """

    inputs: StepInputs
    forward: Captured  # output: rows of `Decoder.stage` [size, H], valid until the next forward
    draws: dict[DrawKind, Captured]  # none, unless the rank has the last layers


class DecodeGraphs:
    """Graphs of one model over one KV storage.

    The model holds the captured graphs and drops them when weights or KV tensors move
    (`forget_recorded`). The next step captures new ones: all of them on a GPU, where they are also
    captured at the start. Weights written in place need no new capture.

    Args:
        model: Model whose forward is captured.
        storage: KV tensors of the model.
        queue: Queue of their device.
        uploads: Uploads to their device.
        results: Results of draws, including the tokens for the next step. Its size is that of the
            largest batch.
        adapters: Adapters of captured steps.
        stage: Messages from and to other pipeline stages.
        max_blocks: Maximum length of a sequence's block table.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage,
        queue: HostQueue,
        uploads: Uploads,
        results: DrawResults,
        adapters: CapturedAdapters,
        stage: CapturedStage,
        *,
        max_blocks: int,
    ) -> None:
        self.model, self.storage, self.results = model, storage, results
        self.adapters, self._stage = adapters, stage
        self.largest = largest = results.largest
        self.sizes = graph_sizes(largest)
        self.max_blocks = max_blocks
        self._queue, self._uploads = queue, uploads
        self._parameters = DrawParameters(largest, model.device)
        num_words = StepInputs.num_words(largest, largest, max_blocks, adapted=adapters.any)
        self._inputs = torch.zeros(num_words, dtype=torch.int64, device=model.device)

    def forward(self, batch: ForwardBatch) -> tuple[DecodeGraph, Tensor]:
        """Compute a batch of single rows. Return its graph, and the rows of `Decoder.stage` [N, H]:
        valid until the next forward.
        """
        size = self.sizes[bisect_left(self.sizes, len(batch.input_ids))]
        graph = self._graphs(size)[bool(batch.adapters)]
        self.storage.update_units()
        graph.inputs.write(batch, self._uploads, self.adapters.addresses(batch))
        return graph, self._stage.replay(graph.forward, batch)

    def draw(self, graph: DecodeGraph, batch: SamplingBatch, *, head: bool = False) -> None:
        """Draw one sample of each row that `forward` has just computed with this graph.

        The samples are written to `results`. `head` is True if an adapter changes the head.
        """
        self._parameters.follow(batch, self._uploads)
        graph.draws[DrawKind(batch.any_filter, head)].replay()

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs of some sizes, the largest first: smaller ones fit into its memory."""
        self._queue.synchronise()  # results may be on their way to the host
        # the warm-up also draws, and the next step may need the latest tokens
        before = self.results.buffer.clone()
        pool, graphs = pool_of(self.model, self._queue), self.model.recorded.setdefault(self, {})
        for size in sorted(set(sizes) - set(graphs), reverse=True):
            kinds = self.adapters.kinds
            graphs[size] = tuple(self._capture_one(size, pool, adapters) for adapters in kinds)
        self.results.buffer.copy_(before)

    def _graphs(self, size: int) -> tuple[DecodeGraph, ...]:
        """Return the graphs of a size, for steps without and with adapters."""
        graphs: dict[int, tuple[DecodeGraph, ...]] = self.model.recorded.get(self, {})
        if size not in graphs:
            self.capture(self.sizes if self._queue.captures_early else (size,))
        return self.model.recorded[self][size]

    def _capture_one(self, size: int, pool: object, adapters: tuple[Any, ...]) -> DecodeGraph:
        model, results, parameters = self.model, self.results, self._parameters
        inputs = StepInputs(self._inputs, size, size, self.max_blocks, adapters)
        inputs.clear()
        view = self.storage
        view.update_units()  # now: the capture must not copy from the host
        few_rows = model.ops.few_rows if size <= FEW_ROWS else None

        def forward() -> Tensor:
            relay_tokens(inputs.batch.input_ids, inputs.relay_sources, results.token_ids)
            batch = self.adapters.grouped(inputs.batch)
            if few_rows is not None:
                return few_rows(self._stage.trunk, batch, view)
            return self._stage.trunk(model.ops, batch, view)

        captured = self._queue.capture(forward, pool)
        keys = torch.zeros((size, 2), dtype=torch.int64, device=model.device)

        def draw(sampling: SamplingBatch, head: bool) -> None:
            make_noise_keys(parameters.streams[:size], inputs.batch.positions + 1, keys)
            whose = HeadRows(adapters, inputs.batch.row_adapters) if head else NO_ADAPTERS
            results.write(model.draw(captured.output, sampling, whose))

        draws: dict[DrawKind, Captured] = {}
        if not model.is_last_stage:
            return DecodeGraph(inputs, captured, draws)
        for filters, head in product((False, True), (False, True) if adapters else (False,)):
            run = partial(draw, parameters.batch(size, keys, any_filter=filters), head)
            draws[DrawKind(filters, head)] = self._queue.capture(run, pool)
        return DecodeGraph(inputs, captured, draws)
