"""`RankedRunner`: what the loop drives where several ranks share the models. It tells the others
each step, then runs rank 0's own part of it.
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
        own: rank 0's.
        worker_group: the other ranks.
        groups: that rank 0 is in.
        block_size: of the cache.
        units: what stands behind blocks, where that is not the blocks themselves.
    """

    def __init__(
        self,
        own: ModelRunner,
        worker_group: WorkerGroup,
        groups: list[ProcessGroup],
        block_size: int,
        units: UnitPool | None,
    ) -> None:
        self.own, self.worker_group = own, worker_group
        self.models, self.storages, self.device = own.models, own.storages, own.device
        self.shares = self._sent = SentUpdates(worker_group, own.models[POLICY])
        self._steps = StepSender(block_size, units)
        self._groups, self._units = groups, units
        # what waits for a rank that hangs goes on, and fails
        worker_group.watch(lambda _: worker_group.kill())
        weakref.finalize(self, worker_group.kill)  # an engine that was not shut down

    @property
    def tokens_computed(self) -> int:  # pyright: ignore
        """Counted by rank 0."""
        return self.own.tokens_computed

    @property
    def prompt_tokens_computed(self) -> int:  # pyright: ignore
        """Counted by rank 0."""
        return self.own.prompt_tokens_computed

    def restart_counters(self) -> None:
        """See `ModelRunner`."""
        self.own.restart_counters()

    def rank_times(self) -> list[tuple[int, int]]:
        """See `ModelRunner`. The others' are those of their last beat."""
        return [*self.own.rank_times(), *(worker.times for worker in self.worker_group.workers)]

    def announce(self, decision: SchedulerOutput, applied: Applied, sequences: Sequences) -> None:
        """See `ModelRunner`."""
        self.worker_group.tell(self._steps.forward(decision, applied, sequences))
        # else rank 0's own mirror does it
        if self._units is not None and self.device.type == "cpu":
            self._units.changed.clear()

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        """See `ModelRunner`."""
        self.worker_group.tell(self._steps.draw(chunks, masks))

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> Any:
        """See `ModelRunner`."""
        return self._together(lambda: self.own.forward(batches, block_copies, previous))

    def sample(self, result: Any, batch: SamplingBatch) -> Any:
        """See `ModelRunner`. What it raises is never one sample's: the others have drawn
        already.
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
        """See `ModelRunner`. On all ranks or, as far as it is new, on none."""
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
        """See `ModelRunner`."""
        self.worker_group.tell(Call("drop", {"weight_set": weight_set}))
        self.own.drop(weight_set)

    def give_back(self, memory: Memory) -> "RankedSleep":
        """See `ModelRunner`. Of all ranks."""
        return RankedSleep(self.worker_group, memory, lambda: self.own.give_back(memory))

    def block_shapes(self) -> list[tuple[int, ...]]:
        """See `ModelRunner`. Raises `InvalidRequest` where blocks are not their own memory on every
        rank.
        """
        # what stands behind blocks travels with steps, and these have none
        if self._units is not None:
            raise InvalidRequest(
                "blocks of layers with a window are not exchanged by engines of several ranks."
            )
        return [
            *self.own.block_shapes(),
            *(tuple(shape) for shape in self.worker_group.call("block_shape")),
        ]

    def read_blocks(self, block_ids: Sequence[int]) -> list[Tensor]:
        """See `ModelRunner`."""
        asked = self.worker_group.ask("read_blocks", block_ids=list(block_ids))
        own = self.own.read_blocks(block_ids)
        others = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for data in self.worker_group.answers(asked)
        ]
        return [*own, *(data.view(len(block_ids), -1) for data in others)]

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[Tensor]) -> None:
        """See `ModelRunner`."""
        own, *others = parts
        for worker, part in zip(self.worker_group.workers, others, strict=True):
            arguments = {"block_ids": list(block_ids), "data": part.contiguous().numpy().tobytes()}
            self.worker_group.tell_one(worker.rank, Call("write_blocks", arguments))
        self.own.write_blocks(block_ids, [own])

    def watch(self, lose: Callable[[RankLost], None]) -> None:
        """See `ModelRunner`."""
        method, worker_group = weakref.WeakMethod(lose), self.worker_group

        def lost(problem: RankLost) -> None:
            worker_group.kill()  # what waits for a rank that hangs goes on, and fails
            if (found := method()) is not None:
                found(problem)

        worker_group.watch(lost)

    def end(self) -> None:
        """See `ModelRunner`."""
        self.worker_group.kill()

    def close(self) -> None:
        """End the other ranks, and let go of weights and KV tensors."""
        self.worker_group.close()
        for group in self._groups:
            group.close()
        self.own.close()

    def _together(self, run: Callable[[], Any]) -> Any:
        """What a part of a step gives, that waits for the other ranks. Raises `RankLost`, which
        says for which.
        """
        try:
            return run()
        except RankLost as problem:
            lost = self.worker_group.explain(problem)
            if lost is problem:
                raise
            raise lost from problem


class RankedSleep(Sleep):
    """The memory of all ranks that was given back. Raises like `Sleep`, with nothing given back."""

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
        """See `Sleep`."""
        self._worker_group.call("wake", slow=True, memory=self._memory)
        if self._own is not None:
            self._own.end()
            self._own = None

    def forget(self) -> None:
        """See `Sleep`."""
        if self._own is not None:
            self._own.forget()  # the others' files go with them
