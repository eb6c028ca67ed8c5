"""`ExpertExchange`: rows go to the ranks of their experts and their products come back, without a
bit changed.

Every rank routes rows of its own, sends each row once to every rank that holds some of its experts,
and gets back one product for each expert. Those it adds up as one rank would: by rising expert id,
in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
