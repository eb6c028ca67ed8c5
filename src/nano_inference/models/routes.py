"""`RouteRecord`: the experts chosen for every row, stored by the slot of the row's keys and values.

Rows from the prefix cache were routed when their blocks were computed. A record by slots includes
those rows and follows blocks that are copied.
"""

from collections.abc import Callable, Sequence

from nano_inference.arrays import Device, Tensor, host, namespace
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.moe import Note, record_experts


def bytes_per_token(moe: MoeSpec) -> int:
    """Return the bytes that a record needs for each token of KV cache capacity."""
    return sum(moe.layers) * moe.experts_per_token * host.int16.itemsize


class RouteRecord:
    """Expert ids int16 [expert layers, slots + 1, K], ascending in each row. -1: not computed.

    The last slot takes the padding rows of a captured batch. The record keeps its address, so
    captured steps write to it.

    Args:
        moe: Layers of experts.
        num_blocks, block_size: Sizes of the KV cache.
        device: Device of the model.
        write: `Ops.record_experts` of the model's backend.
    """

    def __init__(
        self,
        moe: MoeSpec,
        num_blocks: int,
        block_size: int,
        device: Device,
        write: Callable[[Tensor, Tensor, Tensor], None] = record_experts,
    ) -> None:
        self.block_size, self._write = block_size, write
        counts = [sum(moe.layers[:layer]) for layer in range(len(moe.layers))]
        self._places = {layer: counts[layer] for layer, mixed in enumerate(moe.layers) if mixed}
        shape = (len(self._places), num_blocks * block_size + 1, moe.experts_per_token)
        xp = namespace(device)
        self._ids = xp.full(shape, -1, dtype=xp.int16, device=device)

    def compute(
        self,
        layer: int,
        moe: Callable[[Tensor, Note, Tensor | None], Tensor],
        batch: ForwardBatch,
        out: Tensor,
        x: Tensor,
        routed: Tensor | None = None,
    ) -> None:
        """Compute an expert layer within a trunk (`Ops.call`) and record its choices.

        Rows x [N, H] -> `out` [N, H]. `routed` holds the router's input if it differs from x.
        """
        noted: list[Tensor] = []
        out.copy_(moe(x, noted.append, routed))
        ids = noted[0] if len(noted) == 1 else namespace(x).cat(noted)
        if len(ids) != len(batch.slot_mapping):
            raise RuntimeError(
                f"only {len(ids)} of {len(batch.slot_mapping)} rows were routed on this rank; a "
                "route record needs all of them."
            )
        self.write(layer, batch.slot_mapping, ids)

    def write(self, layer: int, slots: Tensor, ids: Tensor) -> None:
        """Record the experts [N, K] of rows whose keys are in slots [N], except slots below 0."""
        self._write(self._ids[self._places[layer]], slots, ids)

    def read(self, block_ids: Sequence[int], num_rows: int) -> Tensor:
        """Return the experts of the first rows of a sequence, from its blocks.

        int16 [rows, expert layers, K], on the host.
        """
        xp = namespace(self._ids)
        blocks = xp.tensor(block_ids, dtype=xp.int64)
        slots = (blocks[:, None] * self.block_size + xp.arange(self.block_size)).flatten()
        ids = self._ids[:, slots[:num_rows].to(self._ids.device)]
        return ids.swapaxes(0, 1).cpu().contiguous()

    def forget(self, block_ids: Sequence[int]) -> None:
        """Mark the experts of these blocks as unknown, because they were not computed here."""
        blocks = namespace(self._ids).tensor(block_ids, device=self._ids.device)
        self._ids[:, :-1].unflatten(1, (-1, self.block_size))[:, blocks] = -1

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, target), as `KVStorage.copy_blocks` does."""
        pairs = namespace(self._ids).tensor(copies, device=self._ids.device)
        blocks = self._ids[:, :-1].unflatten(1, (-1, self.block_size))
        blocks[:, pairs[:, 1]] = blocks[:, pairs[:, 0]]
