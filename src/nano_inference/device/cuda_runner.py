"""`CudaRunner`: steps on a GPU. The host waits for a step only after it has launched the next one.

The timeline of host and device (`EngineLoop.step`, lookahead 1):

    host    build n+1 | upload and forward n+1 | wait for n | commit n  | draw n+1 | build n+2 | …
    device  … forward n, draw n                | forward n+1 …                     | draw n+1  |
    forward n+2 … in parallel                                  results of n go to the host

- One copy from pinned memory uploads all inputs of a forward. A decode step whose sampling
  parameters equal the previous step's needs no other upload.
- The token that step n draws is an input of step n+1 and is passed on within the device
  (`DrawResults.token_ids`).
- Results are downloaded on a side stream while the next forward computes. The host waits only for
  them.
- Uploads, kernels and graphs share one stream, so no write overtakes a queued read. Draw n+1
  overwrites the results of step n, and is queued after the host has received them.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.core.apply import SampledTokens
from nano_inference.core.gate import Gate
from nano_inference.core.sequence import POLICY
from nano_inference.device.backends import captures_graphs
from nano_inference.device.captured_adapters import has_head
from nano_inference.device.graphs import RESULTS, DrawResults, is_plain, row_by_row
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.pooled_sleep import give_back_pool
from nano_inference.device.pools import EnginePools
from nano_inference.device.queues import Event, HostQueue, queue_of
from nano_inference.device.runner import ModelRunner, StepResult, sampled_tokens
from nano_inference.device.sleep import Sleep
from nano_inference.device.step_buffers import Downloads, Uploads
from nano_inference.device.step_graphs import GraphLimits, StepGraphs, graphs_of, limits_of
from nano_inference.models.decoder import NO_ADAPTERS, Decoder, HeadRows
from nano_inference.ops.batches import ForwardBatch, forward_batch
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch
from nano_inference.types import Memory

_NO_SCORES = torch.empty(0)
_NO_IDS, _NO_LOGPROBS = torch.empty((0, 0), dtype=torch.int64), torch.empty((0, 0))
_NO_NAMED = torch.empty((0, 2))
# columns of a batch that results are computed from after the trunk
_AFTER_TRUNK = (
    *("logits_indices", "best_rows"),
    *("score_rows", "score_targets", "score_temperatures", "score_mask_rows", "score_mask_words"),
)


class Arriving:
    """Samples of a step on their way to the host.

    Args:
        queue: Queue of the device.
        event: Event after which the samples are on the host.
        draw, scores, best: Results in pinned memory, as in `sampled_tokens`.
        held: Source tensors of the copy, kept alive until the event.
    """

    def __init__(
        self,
        queue: HostQueue,
        event: Event,
        draw: Draw,
        scores: Tensor,
        best: Sequence[tuple[Tensor, Tensor]],
        held: Any,
    ) -> None:
        self._queue, self._event, self._held = queue, event, held
        self._draw, self._scores, self._best = draw, scores, best

    def wait(self) -> SampledTokens:
        """Return the samples on the host. In a step, only this call waits for the device.

        Raises `DeviceHangs`, or a CUDA error.
        """
        self._queue.wait(self._event)
        self._held = None
        draw = replace(
            self._draw,
            kept=None if self._draw.kept is None else self._draw.kept.clone(),
            top_ids=self._draw.top_ids.clone(),
            top_logprobs=self._draw.top_logprobs.clone(),
            named_logprobs=self._draw.named_logprobs.clone(),
        )
        return sampled_tokens(draw, self._scores, self._best)


class CudaRunner(ModelRunner):
    """Runner that replays captured graphs for steps of the policy: whole steps of decodes, with or
    without drafts, and the trunk of steps with prompts.

    All other steps run eagerly: steps of other models, and steps beyond the largest graph. Steps of
    drafts replay the trunk if layers have a state.

    Args:
        models, storages: Models and KV tensors by weight set.
        queue: Queue of their device.
        limits: Bounds of the steps that graphs compute.
        graphs: True to capture graphs.
        gate: Coordinator of forwards with other engines, or None if there are none.
        pools: Memory of weights and KV tensors that keeps its addresses in a sleep, or None if
            their memory moves.

    Attributes:
        num_replays: Number of steps of decodes that were replayed.
        num_trunk_replays: Number of other steps whose trunk was replayed.
        num_eager_steps: Number of all other steps.
    """

    def __init__(
        self,
        models: Mapping[str, Decoder],
        storages: Mapping[str, KVStorage],
        queue: HostQueue,
        *,
        limits: GraphLimits,
        graphs: bool = True,
        gate: Gate | None = None,
        pools: EnginePools | None = None,
    ) -> None:
        super().__init__(models, storages, gate)
        self.queue, self.pools = queue, pools
        with queue.current():
            self._uploads, self._downloads = Uploads(queue, self.device), Downloads(queue)
            self._results = DrawResults(limits.draws, self.device)
            self._graphs: StepGraphs | None = None
            if graphs:
                parts = (self.models[POLICY], self.storage, queue, self._uploads, self._results)
                self._graphs = graphs_of(*parts, limits)
        self._newest = self._results.token_ids  # tokens of the latest draw
        self._no_scores = torch.empty(0, device=self.device)
        self.num_replays = self.num_trunk_replays = self.num_eager_steps = 0

    def capture(self) -> None:
        """Capture graphs now instead of on first use. No step may be in flight."""
        if self._graphs is not None:
            with self.queue.current():
                self._graphs.capture_at_start()

    def graph_memory(self, free: Callable[[], int]) -> int:
        """Return the bytes that all graphs will take (`StepGraphs.measure`)."""
        if self._graphs is None:
            return 0
        with self.queue.current():
            return self._graphs.measure(free)

    @torch.inference_mode()
    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> StepResult:
        """Queue the forward of a step, without waiting for it. See `ModelRunner.forward`."""
        with self.queue.current():
            self._copy_blocks(block_copies)
            if self._graphs is not None and self._is_captured(batches, self._graphs):
                (batch,) = batches
                if _is_decode(batch, self._graphs):
                    self.num_replays += 1
                    return self._replay(row_by_row(batch), self._graphs)
                size = self._graphs.trunks.size_of(len(batch.input_ids), len(batch.seq_lens))
                if size is not None:
                    self.num_trunk_replays += 1
                    return self._replay_trunk(batch, size, self._graphs)
            self.num_eager_steps += 1
            return self._compute(self._uploads.send_all(batches), previous)

    def logits(self, result: StepResult, rows: np.ndarray) -> np.ndarray:
        """Return rows of a step's logits on the host, which waits for them."""
        with self.queue.current():
            return super().logits(result, rows)

    @torch.inference_mode()
    def sample(self, result: StepResult, batch: SamplingBatch) -> Arriving:
        """Queue the draw of a step, without waiting for it."""
        with self.queue.current():
            if (
                self._graphs is not None
                and result.graph is not None
                and _draws_every_row(result, batch)
            ):
                _, _, whose = result.drawn[0]
                self._graphs.decodes.draw(result.graph, batch, head=bool(whose.adapters))
                self._newest = self._results.token_ids
                return self._fetch_results(len(batch))
            (moved,) = self._uploads.send_all([batch])
            draw = self._draw(result, moved)
            self._newest = self._results.keep_tokens(draw)
            return self._fetch(draw, result)

    def give_back(self, memory: Memory) -> Sleep:
        """Release the memory of the weights or the KV cache. Graphs stay valid if it has a pool.

        Raises `OSError`, with nothing released, `DeviceHangs`, or a CUDA error.
        """
        if self.pools is None:
            return super().give_back(memory)
        with self.queue.current():
            self.queue.synchronise()
            pool = self.pools[memory]
            return give_back_pool(pool, memory, self.storages.values(), self.sleepers())

    def close(self) -> None:
        """Wait for the device unless it has failed. Then release graphs, weights and KV tensors."""
        if not self.queue.failed:
            with contextlib.suppress(Exception):  # the waiting caller has received the error
                self.queue.synchronise()
        super().close()
        # these hold KV tensors and memory, and the engine object may live longer
        self._graphs = self.pools = None

    def _is_captured(self, batches: Sequence[ForwardBatch], graphs: StepGraphs) -> bool:
        """Return True if graphs find all inputs of a step where they read them."""
        if len(batches) != 1:
            return False
        (batch,) = batches
        is_relayed = len(batch.relay_rows) > 0
        return (
            batch.weight_set == POLICY
            and (not batch.adapters or graphs.decodes.adapters.any)
            and batch.block_tables.shape[1] <= graphs.decodes.max_blocks
            and (not is_relayed or self._newest is self._results.token_ids)
        )

    def _replay(self, batch: ForwardBatch, graphs: StepGraphs) -> StepResult:
        self._count(batch)
        graph, hidden = graphs.decodes.forward(batch)
        whose = NO_ADAPTERS
        if has_head(batch):  # the draw may not be a captured one
            whose = HeadRows(batch.adapters, *self._uploads.send([batch.row_adapters]))
        return StepResult([(self.models[POLICY], hidden, whose)], self._no_scores, [], graph)

    def _replay_trunk(self, batch: ForwardBatch, size: int, graphs: StepGraphs) -> StepResult:
        self._count(batch)
        hidden = graphs.trunks.forward(batch, size)
        head = ("adapters", "row_adapters") if has_head(batch) else ()
        places = {name: getattr(batch, name) for name in (*_AFTER_TRUNK, *head)}
        (rest,) = self._uploads.send_all([forward_batch(POLICY, num_best=batch.num_best, **places)])
        return self._combined([rest], [self.models[POLICY].results(hidden, rest)])

    def _newest_tokens(self, previous: Any) -> Tensor:
        return self._newest

    def _fetch_results(self, rows: int) -> Arriving:
        fetched = self._downloads.fetch([self._results.buffer])
        results = self._results.on_host(fetched.tensors[0], rows)
        named = dict(zip(RESULTS, results, strict=True))
        others = {"top_ids": _NO_IDS, "top_logprobs": _NO_LOGPROBS, "named_logprobs": _NO_NAMED}
        draw = Draw(**named, **others, kept=None)
        return Arriving(self.queue, fetched.event, draw, _NO_SCORES, (), self._results)

    def _fetch(self, draw: Draw, result: StepResult) -> Arriving:
        names = [field.name for field in fields(draw) if getattr(draw, field.name) is not None]
        tensors = [result.scores, *(getattr(draw, name) for name in names)]
        tensors += [tensor for best in result.best for tensor in best]
        fetched = self._downloads.fetch(tensors)
        scores, *arrived = fetched.tensors
        arriving = replace(draw, **dict(zip(names, arrived, strict=False)))
        best = arrived[len(names) :]
        pairs = list(zip(best[::2], best[1::2], strict=True))
        return Arriving(self.queue, fetched.event, arriving, scores, pairs, tensors)


def make_runner(
    config: EngineConfig,
    models: Mapping[str, Decoder],
    storages: Mapping[str, KVStorage],
    *,
    max_model_len: int,
    gate: Gate | None = None,
    pools: EnginePools | None = None,
) -> ModelRunner:
    """Return the runner of the CUDA backend. On a GPU its graphs are captured."""
    runner = _runner(config, models, storages, max_model_len, gate, pools)
    if runner.queue.captures_early:
        runner.capture()
    return runner


def _runner(
    config: EngineConfig,
    models: Mapping[str, Decoder],
    storages: Mapping[str, KVStorage],
    max_model_len: int,
    gate: Gate | None = None,
    pools: EnginePools | None = None,
) -> CudaRunner:
    return CudaRunner(
        models,
        storages,
        queue_of(models[POLICY].device),
        limits=limits_of(config, max_model_len),
        graphs=captures_graphs(config, models[POLICY].part.whole),
        gate=gate,
        pools=pools,
    )


def graph_memory(
    config: EngineConfig,
    models: Mapping[str, Decoder],
    storages: Mapping[str, KVStorage],
    *,
    max_model_len: int,
) -> int:
    """Return the bytes that an engine's graphs take, measured by capturing a few over `storages`.

    Return 0 if graphs are off.
    """
    device = models[POLICY].device

    def free() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    before = free()
    runner = _runner(config, models, storages, max_model_len)
    buffers = before - free()
    taken = max(buffers, 0) + runner.graph_memory(free)
    models[POLICY].forget_recorded()
    del runner
    torch.cuda.empty_cache()
    return taken


def _is_decode(batch: ForwardBatch, graphs: StepGraphs) -> bool:
    """Return True if a step only draws, at each of its rows."""
    rows = len(batch.input_ids)
    return (
        rows == len(batch.logits_indices)
        and rows <= graphs.decodes.largest
        and not len(batch.score_rows)
        # a draft row reads the state of preceding rows, which a chunk computes in order
        and (graphs.decodes.storage.states is None or rows == len(batch.seq_lens))
    )


def _draws_every_row(result: StepResult, batch: SamplingBatch) -> bool:
    """Return True if a captured draw can draw a step: one plain sample per row, in order."""
    rows = len(result.drawn[0][1])
    return (
        len(batch) == rows
        and is_plain(batch)
        and np.array_equal(batch.rows.numpy(), np.arange(rows))
    )
