"""`RouteRecord`: the experts that every row went through, kept by the slot of the row's keys and
values.

A row that comes from the prefix cache was routed when its block was computed. A record by slots has
those rows too, and follows blocks where they are copied.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.moe import Note


def bytes_per_token(moe: MoeSpec) -> int:
    """What a record takes for each token that the KV cache has room for."""
    return sum(moe.layers) * moe.experts_per_token * torch.int16.itemsize


class RouteRecord:
    """Expert ids int16 [layers of experts, slots + 1, K], rising in each row; -1 where nothing was
    computed yet.

    The last slot takes the rows that fill up a captured batch.
    """

    def __init__(
        self, moe: MoeSpec, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        counts = [sum(moe.layers[:layer]) for layer in range(len(moe.layers))]
        self._places = {layer: counts[layer] for layer, mixed in enumerate(moe.layers) if mixed}
        shape = (len(self._places), num_blocks * block_size + 1, moe.experts_per_token)
        self._ids = torch.full(shape, -1, dtype=torch.int16, device=device)

    def compute(
        self,
        layer: int,
        moe: Callable[[Tensor, Note, Tensor | None], Tensor],
        batch: ForwardBatch,
        out: Tensor,
        x: Tensor,
        routed: Tensor | None = None,
    ) -> None:
        """A layer of experts in the middle of a trunk (`Ops.call`): rows x [N, H] -> `out` [N, H],
        chosen by rows of the router's own where there are such. Its choices are noted.
        """
        found: list[Tensor] = []
        out.copy_(moe(x, found.append, routed))
        ids = torch.cat(found)
        if len(ids) != len(batch.slot_mapping):
            raise RuntimeError(
                f"{len(ids)} rows were routed here of {len(batch.slot_mapping)}; other ranks "
                "route some."
            )
        self.write(layer, batch.slot_mapping, ids)

    def write(self, layer: int, slots: Tensor, ids: Tensor) -> None:
        """Note the experts [N, K] of rows whose keys lie in slots [N]; a slot below 0 is that of no
        row.
        """
        own = self._ids[self._places[layer]]
        own.index_copy_(0, torch.where(slots < 0, len(own) - 1, slots), ids.to(torch.int16))

    def read(self, block_ids: Sequence[int], num_rows: int) -> Tensor:
        """The experts of the first rows of a sequence with these blocks: int16 [rows, layers of
        experts, K], on the host.
        """
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[
            :num_rows
        ]
        return self._ids[:, slots.to(self._ids.device)].transpose(0, 1).cpu().contiguous()

    def forget(self, block_ids: Sequence[int]) -> None:
        """The rows of these blocks were computed elsewhere: their experts are not known here."""
        blocks = torch.tensor(block_ids, device=self._ids.device)
        self._ids[:, :-1].unflatten(1, (-1, self.block_size))[:, blocks] = -1

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, target), as `KVStorage.copy_blocks` does."""
        pairs = torch.tensor(copies, device=self._ids.device)
        blocks = self._ids[:, :-1].unflatten(1, (-1, self.block_size))
        blocks[:, pairs[:, 1]] = blocks[:, pairs[:, 0]]
