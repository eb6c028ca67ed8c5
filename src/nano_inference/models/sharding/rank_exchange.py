"""`RankExchange`: what the ranks that share a model exchange: sums of tensor parallel layers, the
residual stream between pipeline stages, keys and values, rows for experts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from nano_inference.models.sharding.shard import ModelShard, expert_bounds
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.moe import Experts, MoeSteps, summed
from nano_inference.parallel.process_group import ProcessGroup

# rows of a rank that are computed at once, where all ranks know how many rows there are
ROW_BLOCK = 512


class ExpertExchange:
    """What `Ops.moe` asks where the experts of a layer are spread over ranks.

    Args:
        group: these ranks, by whose experts they hold.
        bounds: the first expert of each rank, and the number of experts.
        shared: all ranks have the same rows, of which each routes a share; else each has rows of
            its own, maybe none.
    """

    def __init__(self, group: ProcessGroup, bounds: Sequence[int], *, shared: bool) -> None:
        self.group = group
        self._bounds = tuple(bounds)
        self._shared = shared

    def __call__(self, steps: MoeSteps, x: Tensor, experts: Experts) -> Tensor:
        """X [N, H] -> float32 [N, H]. All ranks call it, with the weights of the same layer."""
        if not self._shared:
            return self._exchanged(steps, x, experts)
        blocks = [
            self._share(steps, rows, experts) for rows in x.split(ROW_BLOCK * self.group.size)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _share(self, steps: MoeSteps, x: Tensor, experts: Experts) -> Tensor:
        """Rows that every rank has: each looks after an even share of them."""
        size, rank = self.group.size, self.group.rank
        own = x[len(x) * rank // size : len(x) * (rank + 1) // size]
        mine = self._exchanged(steps, own, experts)
        return torch.cat(self.group.all_to_all([mine] * size))

    def _exchanged(self, steps: MoeSteps, x: Tensor, experts: Experts) -> Tensor:
        ids, weights = steps.route(x, experts)
        # [N, K]
        owners = torch.searchsorted(
            torch.tensor(self._bounds[1:], device=ids.device), ids, right=True
        )
        # (row, which of its K)
        wanted = [(owners == rank).nonzero(as_tuple=True) for rank in range(self.group.size)]
        sent: list[Tensor] = []  # each rank's rows, each once
        # [pairs, 2]: place among these rows, place of the expert at its rank
        asked: list[Tensor] = []
        for rank, (rows, which) in enumerate(wanted):
            unique, places = rows.unique(return_inverse=True)
            sent.append(x[unique])
            asked.append(torch.stack((places, ids[rows, which] - self._bounds[rank]), dim=1))
        given, questions = self.group.all_to_all(sent), self.group.all_to_all(asked)
        answers = self.group.all_to_all(_products(steps, given, questions, experts))
        products = answers[0].new_empty((*ids.shape, x.shape[1]))
        for (rows, which), answer in zip(wanted, answers, strict=True):
            products[rows, which] = answer
        return summed(steps, products, weights, x, experts)


def _products(
    steps: MoeSteps, given: Sequence[Tensor], questions: Sequence[Tensor], experts: Experts
) -> list[Tensor]:
    """What each rank asked of the experts that are here."""
    counts = [len(each) for each in questions]
    firsts = torch.tensor([0, *(len(rows) for rows in given[:-1])]).cumsum(0).tolist()
    rows = torch.cat([each[:, 0] + first for each, first in zip(questions, firsts, strict=True)])
    held = torch.cat([each[:, 1] for each in questions])
    return list(
        steps.products(torch.cat(list(given)), rows.contiguous(), held.contiguous(), experts).split(
            counts
        )
    )


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
