"""`RankExchange`: what the ranks that share a model exchange: sums of tensor parallel layers, the
residual stream between pipeline stages, keys and values, rows for experts.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from nano_inference.models.sharding.expert_exchange import ExpertExchange
from nano_inference.models.sharding.shard import ModelShard, expert_bounds
from nano_inference.ops.batches import ForwardBatch
from nano_inference.parallel.process_group import ProcessGroup


@dataclass(slots=True)
class RankClock:
    """Where a rank's time goes, in nanoseconds on the host since it was built. One thread writes.

    Attributes:
        busy: in its part of steps.
        waiting: in steps, for what another stage computes.
    """

    busy: int = 0
    waiting: int = 0


@dataclass(frozen=True, eq=False)
class RankExchange:
    """What a rank holds, and the ranks that it exchanges rows with. Its methods are functions for
    `Ops.call`.

    Attributes:
        part: what it holds.
        tensor: the ranks that share its layers, by tensor rank; None: it has them to itself.
        pipeline: the ranks in its place of every stage, by stage; None: there is one stage.
        context: the ranks that share its keys and values, by context rank; None: it has them to
            itself.
        engines: the engines that have the experts in common, by number, of which this is one; None:
            it has them to itself, or shares them with its tensor ranks.
        clock: of the rank; all its models have the same.
    """

    part: ModelShard
    tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    context: ProcessGroup | None = None
    engines: ProcessGroup | None = None
    clock: RankClock = field(default_factory=RankClock)

    @cached_property
    def exchange(self) -> ExpertExchange | None:
        """Who brings rows to their experts and back; None: all experts are here."""
        group = self.engines if self.engines is not None else self.tensor
        if self.part.whole.moe is None or group is None:
            return None
        return ExpertExchange(
            group, expert_bounds(self.part.whole, group.size), shared=self.engines is None
        )

    def add_up(
        self, _batch: ForwardBatch, out: Tensor, partial: Tensor, bias: Tensor | None = None
    ) -> None:
        """Float32 [N, columns] of every tensor rank -> their sum, and a bias [columns] added to
        it.
        """
        assert self.tensor is not None
        out.copy_(self.tensor.tree_sum(partial))
        if bias is not None:
            out += bias

    def receive(self, _batch: ForwardBatch, out: Tensor) -> None:
        """The residual stream [N, H] of the stage before."""
        assert self.pipeline is not None
        began = time.perf_counter_ns()
        rows = self.pipeline.receive(out.shape, out.dtype, self.part.place.stage - 1)
        self.clock.waiting += time.perf_counter_ns() - began
        out.copy_(rows)

    def send(self, _batch: ForwardBatch, out: Tensor, residual: Tensor) -> None:
        """Hand the residual stream [N, H] on to the next stage; what follows here need not wait for
        that.
        """
        assert self.pipeline is not None
        self.pipeline.send(residual.clone(), self.part.place.stage + 1)
        out.copy_(residual)
