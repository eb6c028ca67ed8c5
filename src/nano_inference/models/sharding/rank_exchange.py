"""`RankExchange`: the exchange of data among ranks: sums of tensor parallel layers, the residual
stream between pipeline stages, and rows for experts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from nano_inference.arrays import Tensor, namespace, with_columns
from nano_inference.models.sharding.shard import ModelShard, expert_bounds
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.moe import Experts, MoeSteps, summed

if TYPE_CHECKING:
    from nano_inference.parallel.process_group import ProcessGroup

# rows of each rank per exchange, if all ranks know the number of rows
ROW_BLOCK = 512


class ExpertExchange:
    """Computation of a layer's experts that are spread over ranks, as `Ops.moe` calls it.

    Args:
        group: The ranks, in the order of their experts.
        bounds: First expert of each rank, and the number of experts.
        shared: All ranks have the same rows, and each routes a share. False: each rank has its
            own rows, possibly none.
    """

    def __init__(self, group: "ProcessGroup", bounds: Sequence[int], *, shared: bool) -> None:
        self.group = group
        self._bounds = tuple(bounds)
        self._shared = shared

    def __call__(self, steps: MoeSteps, x: Tensor, experts: Experts) -> Tensor:
        """Compute x [N, H] -> float32 [N, H]. All ranks call it with weights of the same layer."""
        if not self._shared:
            return self._exchanged(steps, x, experts)
        blocks = [
            self._share(steps, rows, experts) for rows in x.split(ROW_BLOCK * self.group.size)
        ]
        return blocks[0] if len(blocks) == 1 else namespace(x).cat(blocks)

    def _share(self, steps: MoeSteps, x: Tensor, experts: Experts) -> Tensor:
        """Compute rows that every rank has: each rank routes an even share."""
        size, rank = self.group.size, self.group.rank
        share = x[len(x) * rank // size : len(x) * (rank + 1) // size]
        mine = self._exchanged(steps, share, experts)
        return namespace(x).cat(self.group.all_to_all([mine] * size))

    def _exchanged(self, steps: MoeSteps, x: Tensor, experts: Experts) -> Tensor:
        ids, weights = steps.route(x, experts)
        # [N, K]
        xp = namespace(x)
        owners = xp.searchsorted(xp.tensor(self._bounds[1:], device=ids.device), ids, right=True)
        # (row, index among its K experts)
        wanted = [(owners == rank).nonzero(as_tuple=True) for rank in range(self.group.size)]
        sent: list[Tensor] = []  # rows for each rank, without duplicates
        # [pairs, 2]: index among these rows, index of the expert at its rank
        asked: list[Tensor] = []
        for rank, (rows, which) in enumerate(wanted):
            unique, places = rows.unique(return_inverse=True)
            sent.append(x[unique])
            asked.append(xp.stack((places, ids[rows, which] - self._bounds[rank]), dim=1))
        received, questions = self.group.all_to_all(sent), self.group.all_to_all(asked)
        answers = self.group.all_to_all(_products(steps, received, questions, experts))
        products = answers[0].new_empty((*ids.shape, x.shape[1]))
        for (rows, which), answer in zip(wanted, answers, strict=True):
            products[rows, which] = answer
        return summed(steps, products, weights, x, experts)


def _products(
    steps: MoeSteps, received: Sequence[Tensor], questions: Sequence[Tensor], experts: Experts
) -> list[Tensor]:
    """Compute the products that each rank requested from the experts held here."""
    counts = [len(each) for each in questions]
    cat = namespace(received[0]).cat
    firsts = accumulate((len(rows) for rows in received[:-1]), initial=0)
    rows = cat([each[:, 0] + first for each, first in zip(questions, firsts, strict=True)])
    held = cat([each[:, 1] for each in questions])
    return list(
        steps.products(cat(list(received)), rows.contiguous(), held.contiguous(), experts).split(
            counts
        )
    )


@dataclass(slots=True)
class RankClock:
    """Time that a rank spends, in nanoseconds on the host since construction.

    Only one thread writes it.

    Attributes:
        busy: Time in its part of steps.
        waiting: Time in steps spent waiting for another stage's rows.
    """

    busy: int = 0
    waiting: int = 0


@dataclass(frozen=True, eq=False)
class RankExchange:
    """The part of a model that a rank holds, and the ranks that it exchanges rows with.

    Its methods are functions for `Ops.call`.

    Attributes:
        part: Part held by this rank.
        tensor: Ranks that share its layers, by tensor rank. None: not shared.
        pipeline: Corresponding ranks of all stages, by stage. None: there is one stage.
        context: Ranks that share its keys and values, by context rank. None: not shared.
        engines: Engines that share the experts, by number, this one included. None: not shared,
            or shared with its tensor ranks.
        clock: Clock of the rank, shared by all its models.
    """

    part: ModelShard
    tensor: "ProcessGroup | None" = None
    pipeline: "ProcessGroup | None" = None
    context: "ProcessGroup | None" = None
    engines: "ProcessGroup | None" = None
    clock: RankClock = field(default_factory=RankClock)

    @cached_property
    def exchange(self) -> ExpertExchange | None:
        """Exchange of rows with the ranks that hold the experts. None: all experts are here."""
        group = self.engines if self.engines is not None else self.tensor
        if self.part.whole.moe is None or group is None:
            return None
        return ExpertExchange(
            group, expert_bounds(self.part.whole, group.size), shared=self.engines is None
        )

    def add_up(
        self, _batch: ForwardBatch, out: Tensor, partial: Tensor, bias: Tensor | None = None
    ) -> None:
        """Sum float32 [N, columns] of all tensor ranks, and add a bias [columns]."""
        assert self.tensor is not None
        out.copy_(self.tensor.tree_sum(partial))
        if bias is not None:
            out += bias

    def gather_columns(
        self, _batch: ForwardBatch, out: Tensor, x: Tensor, counts: tuple[int, ...]
    ) -> None:
        """Gather rows [N, counts[r]] of each tensor rank r as columns of one tensor."""
        assert self.tensor is not None
        parts = self.tensor.all_gather(with_columns(x, max(counts)))
        firsts = accumulate(counts, initial=0)
        for part, first, count in zip(parts, firsts, counts, strict=False):
            out[:, first : first + count] = part[:, :count]

    def receive(self, _batch: ForwardBatch, out: Tensor) -> None:
        """Receive the residual stream [N, H] of the previous stage."""
        assert self.pipeline is not None
        began = time.perf_counter_ns()
        rows = self.pipeline.receive(out.shape, out.dtype, self.part.position.stage - 1)
        self.clock.waiting += time.perf_counter_ns() - began
        out.copy_(rows)

    def send(self, _batch: ForwardBatch, out: Tensor, residual: Tensor) -> None:
        """Pass on the residual stream [N, H], and return it."""
        self.pass_on(residual)
        out.copy_(residual)

    def pass_on(self, residual: Tensor) -> None:
        """Send the residual stream [N, H] to the next stage, without waiting for its arrival."""
        assert self.pipeline is not None
        self.pipeline.send(residual.clone(), self.part.position.stage + 1)
