"""`ModelRunner`: runs batches on one device, one forward per weight set, and draws the samples."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nano_inference.arrays import Tensor, namespace, without_gradients
from nano_inference.checkpoints.lora import Pair
from nano_inference.core.apply import Applied, SampledTokens
from nano_inference.core.batch import Chunks
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.gate import Gate
from nano_inference.core.interfaces import Pending
from nano_inference.core.sequence import POLICY, PREVIOUS, Sequences
from nano_inference.device.kept_ids import best_rows, kept_ids
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.sleep import Sleep, give_back
from nano_inference.errors import RankLost
from nano_inference.models.decoder import BestTokens, Decoder, ForwardResult, HeadRows
from nano_inference.models.routes import RouteRecord
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.lora import Adapter
from nano_inference.sampling.columns import Arrays
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import Masks
from nano_inference.sampling.tensors import SamplingBatch, arrays_on, to_device
from nano_inference.types import Memory
from nano_inference.weights.update import OtherRanks, WeightUpdate


def sampled_tokens(
    draw: Draw, scores: Tensor, best: Sequence[tuple[Tensor, Tensor]]
) -> SampledTokens:
    """Return the samples of a step on the host.

    Args:
        draw: R samples. `kept` and the top tokens must stay unchanged.
        scores: Scores, float32 [P].
        best: Top ids and logprobs [R, K] of the batches that report them.
    """
    top = masks = None
    if draw.top_ids.shape[1]:
        top = best_rows(draw.top_ids.cpu().numpy(), draw.top_logprobs.cpu().numpy())
    if draw.kept is not None:
        masks = kept_ids(draw.kept.cpu().numpy())
    return SampledTokens(
        token_ids=draw.token_ids.tolist(),
        logprobs=draw.logprobs.tolist(),
        raw_logprobs=draw.raw_logprobs.tolist(),
        log_kept_mass=draw.log_kept_mass.tolist(),
        masks=masks,
        top=top,
        named=named_bytes(draw.named_logprobs) if len(draw.named_logprobs) else None,
        scores=scores.tolist(),
        score_best=[
            pair
            for ids, logprobs in best
            for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ],
    )


def named_bytes(logprobs: Tensor) -> tuple[bytes, bytes]:
    """Return the columns of `Draw.named_logprobs`, little-endian."""
    drawn, raw = logprobs.cpu().numpy().astype("<f4").T
    return drawn.tobytes(), raw.tobytes()


class Sampled:
    """Samples of a step that the device may still be computing."""

    def __init__(self, draw: Draw, scores: Tensor, best: Sequence[BestTokens] = ()) -> None:
        self.draw = draw
        self.scores = scores
        self.best = best

    def wait(self) -> SampledTokens:
        """Return the samples on the host. In a step, only this call waits for the device."""
        return sampled_tokens(self.draw, self.scores, self.best)


class StepResult(NamedTuple):
    """Results of a step's forwards."""

    # model, hidden rows [L, H] to draw from, and their adapters, in the order of the batches
    drawn: list[tuple[Decoder, Tensor, HeadRows]]
    scores: Tensor  # float32 [P], in the order of the batches
    best: list[BestTokens]  # top tokens of the batches that report them
    graph: Any = None  # captured graph that computed the step, if any


class AdapterRanks(Protocol):
    """Other ranks, which compute their parts of adapters."""

    def give(self, adapter: Adapter, pairs: Mapping[str, Pair]) -> None:
        """Send the ranks their matrices of an adapter. Raises `AdapterError` or `RankLost`."""
        ...


class ModelRunner:
    """Runner that owns the models and KV tensors by weight set, and counts computed tokens.

    Attributes:
        shares: Other ranks' parts of weight updates, or None if there are no other ranks.
        adapters: Adapters of other ranks, or None if there are no other ranks.
        awake: Weight sets in the memory of a trainer's parameters, which do not sleep.
    """

    shares: OtherRanks | None = None
    adapters: AdapterRanks | None = None

    def __init__(
        self,
        models: Mapping[str, Decoder],
        storages: Mapping[str, KVStorage],
        gate: Gate | None = None,
    ) -> None:
        self.models = dict(models)
        self.awake: set[str] = set()
        # weight sets may share KV tensors of equal shape: each block belongs to one set
        self.storages = dict(storages)
        self.device = self.storage.keys.device
        self.gate = gate or Gate()
        self.clock = self.models[POLICY].rank_exchange.clock
        self.tokens_computed = 0
        self.prompt_tokens_computed = 0  # policy only

    def restart_counters(self) -> None:
        """Reset the counters of tokens to 0."""
        self.tokens_computed = self.prompt_tokens_computed = 0

    def rank_times(self) -> list[tuple[int, int]]:
        """Return each rank's nanoseconds busy in steps and waiting in steps for another stage."""
        return [(self.clock.busy, self.clock.waiting)]

    def _working_time(self) -> int:
        """Return a nanosecond clock that stops while this rank waits for another stage."""
        return time.perf_counter_ns() - self.clock.waiting

    @property
    def arrays(self) -> Arrays[Tensor]:
        """Factory of a batch's arrays."""
        return arrays_on(self.device)

    @property
    def storage(self) -> KVStorage:
        """KV tensors of the policy."""
        return self.storages[POLICY]

    def announce(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> None:
        """Do nothing: there are no other ranks. See `Runner`."""

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        """Do nothing: there are no other ranks. See `Runner`."""

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> StepResult:
        """Copy blocks, then compute every batch.

        Return the hidden rows to draw from, and all scores.
        """
        began = self._working_time()
        self._copy_blocks(block_copies)
        result = self._compute([to_device(batch, self.device) for batch in batches], previous)
        self.clock.busy += self._working_time() - began
        return result

    def idle(self) -> None:
        """Serve the other engines in lockstep, without a batch of this engine."""
        self._forward_all((), None)

    def set_aside(self, weight_set: str, name: str, changing: Collection[str]) -> None:
        """Preserve a weight set under another name before an update changes the named tensors.

        If the other name exists, it keeps its tensors. Only tensors that are still shared are
        copied.
        """
        model = self.models[weight_set]
        kept = self.models[name].params if name in self.models else model.params
        shared = [key for key in changing if kept[key] is model.params[key]]
        if shared or name not in self.models:
            params = {**kept, **{key: model.params[key].clone() for key in shared}}
            # both sets use the same slots
            self.models[name] = model.twin(params, routes=model.routes)
            self.storages[name] = self.storages[weight_set]

    def set_aside_for(self, update: WeightUpdate) -> None:
        """Preserve the policy as the previous weights before an update is written."""
        self.set_aside(POLICY, PREVIOUS, update.params)

    def give_back(self, memory: Memory) -> Sleep:
        """Release the memory of the weights or the KV cache.

        Raises `OSError`, with nothing released.
        """
        return give_back(memory, self.storages.values(), self.sleepers())

    def sleepers(self) -> list[Decoder]:
        """Return the models whose weights may sleep."""
        return [model for name, model in self.models.items() if name not in self.awake]

    def drop(self, weight_set: str) -> None:
        """Remove a weight set. Steps in flight may still hold it."""
        del self.models[weight_set], self.storages[weight_set]
        self.awake.discard(weight_set)

    @without_gradients
    def logits(self, result: StepResult, rows: np.ndarray) -> np.ndarray:
        """Return rows of a step's logits on the host: int64 [n] -> float32 [n, V]."""
        xp = namespace(self.device)
        wanted = xp.from_numpy(rows).to(self.device)
        if len(result.drawn) == 1:
            model, hidden, whose = result.drawn[0]
            logits = model.logits(hidden[wanted], whose.of(wanted))
        else:
            parts = [model.logits(hidden, whose) for model, hidden, whose in result.drawn]
            logits = xp.cat(parts)[wanted]
        return logits.cpu().numpy()

    @without_gradients
    def sample(self, result: StepResult, batch: SamplingBatch) -> Pending:
        """Draw the samples of a step."""
        began = self._working_time()
        sampled = Sampled(
            self._draw(result, to_device(batch, self.device)), result.scores, result.best
        )
        self.clock.busy += self._working_time() - began
        return sampled

    def watch(self, lose: Callable[[RankLost], None]) -> None:
        """Do nothing: no rank can be lost.

        Other runners call `lose` without keeping its object alive.
        """

    def end(self) -> None:
        """Do nothing: there are no other ranks to terminate after the engine has failed."""

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of one block in `read_blocks`, by rank (`KVStorage.block_shape`)."""
        return [self.storage.block_shape]

    def read_blocks(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Copy the policy's blocks to the host, by rank: each uint8 [blocks, bytes].

        No step may be in flight.
        """
        return [self.storage.read_blocks(block_ids)]

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Write the result of `read_blocks` into blocks that nothing reads."""
        (part,) = parts
        self.storage.write_blocks(block_ids, part)
        for record in self._records():
            record.forget(block_ids)

    def close(self) -> None:
        """Release weights and KV tensors."""
        for model in self.models.values():
            model.close()
        self.storages.clear()

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        if copies:
            for storage in set(self.storages.values()):
                storage.copy_blocks(copies)
            for record in self._records():
                record.copy_blocks(copies)

    def _records(self) -> set[RouteRecord]:
        """Return the records of routed experts, if any. Weight sets may share one."""
        return {model.routes for model in self.models.values() if model.routes is not None}

    def _compute(self, batches: Sequence[ForwardBatch], previous: Any) -> StepResult:
        """Compute batches on the device and combine their results."""
        return self._combined(batches, self._forward_all(batches, previous))

    def _combined(
        self, batches: Sequence[ForwardBatch], results: Sequence[ForwardResult]
    ) -> StepResult:
        """Combine the results of a step's batches."""
        drawn = [
            (self.models[batch.weight_set], result.hidden, result.rows)
            for batch, result in zip(batches, results, strict=True)
            if len(result.hidden)
        ]
        scores = (
            results[0].scores
            if len(results) == 1
            else namespace(results[0].scores).cat([result.scores for result in results])
        )
        return StepResult(
            drawn, scores, [result.best for result in results if result.best is not None]
        )

    def _forward_all(self, batches: Sequence[ForwardBatch], previous: Any) -> list[ForwardResult]:
        by_set = {batch.weight_set: batch for batch in batches}
        results: dict[str, ForwardResult] = {}
        for name in self.gate.begin(by_set):
            if name in by_set:
                results[name] = self._forward_one(by_set[name], previous)
            else:
                self.models[name].serve_others()
        return [results[batch.weight_set] for batch in batches]

    def _count(self, batch: ForwardBatch) -> None:
        self.tokens_computed += len(batch.input_ids)
        if batch.weight_set == POLICY:
            self.prompt_tokens_computed += batch.num_prompt_tokens

    def _newest_tokens(self, previous: Any) -> Tensor:
        """Return the tokens that a step in flight is sampling, on the device."""
        return previous.draw.token_ids

    def _draw(self, result: StepResult, batch: SamplingBatch) -> Draw:
        """Draw the samples of a step whose batch is on the device."""
        if len(result.drawn) == 1:
            model, hidden, whose = result.drawn[0]
            return model.draw(hidden, batch, whose)
        ops, xp = self.models[POLICY].ops, namespace(self.device)
        if not result.drawn:
            return ops.sample_logits(xp.empty((0, 1), device=self.device), batch)
        return ops.sample_logits(
            xp.cat([model.logits(hidden, whose) for model, hidden, whose in result.drawn]),
            batch,
        )

    @without_gradients
    def _forward_one(self, batch: ForwardBatch, previous: Any) -> ForwardResult:
        if len(batch.relay_rows):
            if previous is None:
                raise RuntimeError(
                    "a row needs a token of the previous step, but no step is in flight."
                )
            batch.input_ids[batch.relay_rows] = self._newest_tokens(previous)[batch.relay_sources]
        self._count(batch)
        return self.models[batch.weight_set].forward(batch, self.storages[batch.weight_set])
