"""`RankedRunner`: runner of an engine whose models are shared by several ranks.

Each step is announced to the other ranks before rank 0 runs its own part.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_inference.core.apply import Applied
from nano_inference.core.batch import Chunks
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.failures import is_device_failure
from nano_inference.core.sequence import POLICY, PREVIOUS, Sequences
from nano_inference.device.runner import ModelRunner
from nano_inference.device.sleep import Sleep
from nano_inference.errors import InvalidRequest, NanoInferenceError, RankLost
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.ops.batches import ForwardBatch
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.ranks.adapters import SentAdapters
from nano_inference.ranks.messages import Call
from nano_inference.ranks.replay import StepSender
from nano_inference.ranks.sharing import SentUpdates
from nano_inference.ranks.worker_group import WorkerGroup
from nano_inference.sampling.sampling_batch import Masks
from nano_inference.sampling.tensors import SamplingBatch
from nano_inference.types import Memory
from nano_inference.weights.update import WeightUpdate


class RankedRunner(ModelRunner):
    """All ranks as one runner.

    Args:
        local: Runner of rank 0.
        worker_group: Other ranks.
        groups: Process groups that include rank 0.
        block_size: Tokens per block.
        units: Units of blocks, or None if a block is its unit.
    """

    def __init__(
        self,
        local: ModelRunner,
        worker_group: WorkerGroup,
        groups: list[ProcessGroup],
        block_size: int,
        units: UnitPool | None,
    ) -> None:
        self.own, self.worker_group = local, worker_group
        self.models, self.storages, self.device = local.models, local.storages, local.device
        self.shares = self._sent = SentUpdates(worker_group, local.models[POLICY])
        self.adapters = SentAdapters(worker_group, local.models[POLICY])
        self._steps = StepSender(block_size, units, self.adapters)
        self._groups, self._units = groups, units
        # kill the others, so that waits for a hanging rank fail
        worker_group.watch(lambda _: worker_group.kill())
        weakref.finalize(self, worker_group.kill)  # in case the engine is not shut down

    @property
    def tokens_computed(self) -> int:  # pyright: ignore
        """Number of computed tokens, counted by rank 0."""
        return self.own.tokens_computed

    @property
    def prompt_tokens_computed(self) -> int:  # pyright: ignore
        """Number of computed prompt tokens, counted by rank 0."""
        return self.own.prompt_tokens_computed

    def restart_counters(self) -> None:
        self.own.restart_counters()

    def rank_times(self) -> list[tuple[int, int]]:
        """Return the times of all ranks.

        Those of the other ranks are from their latest heartbeat.
        """
        return [*self.own.rank_times(), *(worker.times for worker in self.worker_group.workers)]

    def announce(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> None:
        self.worker_group.tell(self._steps.forward(decision, applied, sequences))
        # on a GPU, rank 0's mirror clears it
        if self._units is not None and self.device.type == "cpu":
            self._units.changed.clear()

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        self.worker_group.tell(self._steps.draw(chunks, masks))

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> Any:
        return self._together(lambda: self.own.forward(batches, block_copies, previous))

    def sample(self, result: Any, batch: SamplingBatch) -> Any:
        """Draw the samples of a step.

        Errors concern the whole engine, because the other ranks have already drawn.
        """
        if not self.own.models[POLICY].part.position.is_last_stage:
            return self.worker_group.samples.expect()
        try:
            return self._together(lambda: self.own.sample(result, batch))
        except Exception as problem:
            if is_device_failure(problem):
                raise
            raise RankLost(
                f"rank 0 of {self.worker_group.world_size} failed in a draw: {problem!r}"
            ) from problem

    def set_aside_for(self, update: WeightUpdate) -> None:
        """Preserve the policy on all ranks. On failure, no rank keeps a new copy."""
        is_new = PREVIOUS not in self.models
        asked = self.worker_group.ask(
            "set_aside", weight_set=POLICY, name=PREVIOUS, update=self._sent.number(update)
        )
        try:
            try:
                self.own.set_aside_for(update)
            finally:
                self.worker_group.answers(asked, slow=True)
        except RankLost:
            raise
        except Exception as problem:
            if is_new:
                self.worker_group.tell(Call("drop", {"weight_set": PREVIOUS}))
                if PREVIOUS in self.models:
                    self.own.drop(PREVIOUS)
            raise MemoryError(str(problem)) from problem

    def drop(self, weight_set: str) -> None:
        self.worker_group.tell(Call("drop", {"weight_set": weight_set}))
        self.own.drop(weight_set)

    def give_back(self, memory: Memory) -> "RankedSleep":
        """Release the memory of weights or KV cache on all ranks."""
        return RankedSleep(self.worker_group, memory, lambda: self.own.give_back(memory))

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Return the block shapes of all ranks. Raise `InvalidRequest` if blocks have units."""
        # unit tables are sent with steps, and block exchanges are not steps
        if self._units is not None:
            raise InvalidRequest(
                "engines of several ranks cannot exchange blocks of layers with a window."
            )
        return [
            *self.own.block_shapes(),
            *(tuple(shape) for shape in self.worker_group.call("block_shape")),
        ]

    def read_blocks(self, block_ids: Sequence[int]) -> list[Tensor]:
        asked = self.worker_group.ask("read_blocks", block_ids=list(block_ids))
        local = self.own.read_blocks(block_ids)
        others = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for data in self.worker_group.answers(asked)
        ]
        return [*local, *(data.view(len(block_ids), -1) for data in others)]

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[Tensor]) -> None:
        local, *others = parts
        for worker, part in zip(self.worker_group.workers, others, strict=True):
            arguments = {"block_ids": list(block_ids), "data": part.contiguous().numpy().tobytes()}
            self.worker_group.tell_one(worker.rank, Call("write_blocks", arguments))
        self.own.write_blocks(block_ids, [local])

    def watch(self, lose: Callable[[RankLost], None]) -> None:
        """Call `lose` when a rank is lost, without keeping its object alive."""
        method, worker_group = weakref.WeakMethod(lose), self.worker_group

        def lost(problem: RankLost) -> None:
            worker_group.kill()  # so that waits for a hanging rank fail
            if (alive := method()) is not None:
                alive(problem)

        worker_group.watch(lost)

    def end(self) -> None:
        self.worker_group.kill()

    def close(self) -> None:
        """End the other ranks, and release weights and KV tensors."""
        self.worker_group.close()
        for group in self._groups:
            group.close()
        self.own.close()

    def _together(self, run: Callable[[], Any]) -> Any:
        """Run a part of a step that waits for other ranks. Raise `RankLost`, which names the lost
        rank.
        """
        try:
            return run()
        except RankLost as problem:
            lost = self.worker_group.explain(problem)
            if lost is problem:
                raise
            raise lost from problem


class RankedSleep(Sleep):
    """Released memory of all ranks. Raises like `Sleep`, with nothing released."""

    def __init__(
        self, worker_group: WorkerGroup, memory: Memory, give_back: Callable[[], Sleep]
    ) -> None:
        self._worker_group, self._memory = worker_group, memory
        self._own: Sleep | None = None
        try:
            worker_group.call("sleep", slow=True, memory=memory)
            self._own = give_back()
        except RankLost:
            raise
        except (NanoInferenceError, OSError, torch.OutOfMemoryError) as problem:
            worker_group.call("wake", slow=True, memory=memory)
            raise OSError(str(problem)) from problem

    def end(self) -> None:
        self._worker_group.call("wake", slow=True, memory=self._memory)
        if self._own is not None:
            self._own.end()
            self._own = None

    def forget(self) -> None:
        if self._own is not None:
            self._own.forget()  # the other ranks' files disappear with their processes
