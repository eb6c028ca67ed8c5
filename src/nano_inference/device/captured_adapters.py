"""Adapters of captured steps, which are unknown at the capture.

Steps with adapters have graphs of their own, so that other steps compute no adapters. Which adapter
computes a row is an input: the address of the adapter's table. So adapters are loaded, updated and
unloaded without a new capture.
"""

from typing import Any

import numpy as np

from nano_inference.device.adapters import columns_of, most_parts
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.cuda.lora import LoraBounds, Unnamed, are_aligned
from nano_inference.ops.interface import StepAdapters
from nano_inference.ops.lora import HEAD


def has_head(batch: ForwardBatch) -> bool:
    """Return True if an adapter of the batch changes the head."""
    return any(HEAD in adapter.parts for adapter in batch.adapters)


class CapturedAdapters:
    """Adapters of a model's captured steps.

    Args:
        model: Model that is captured.
        most_rank: Maximum rank of an adapter. 0: no steps with adapters are captured.

    Attributes:
        kinds: `ForwardBatch.adapters` of each kind of captured step: none, then unnamed ones.
    """

    def __init__(self, model: Decoder, most_rank: int) -> None:
        self._ops: StepAdapters | None = model.ops.step_adapters if most_rank else None
        self.kinds: tuple[tuple[Any, ...], ...] = ((),)
        if self._ops is not None:
            part = model.part
            bounds = LoraBounds(most_parts(part), most_rank, are_aligned(columns_of(part)))
            self.kinds = ((), (Unnamed(bounds),))

    @property
    def any(self) -> bool:
        """True if steps with adapters are captured."""
        return self._ops is not None

    def grouped(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a captured batch with its rows grouped by adapter, if it has adapters."""
        return batch if self._ops is None or not batch.adapters else self._ops.group(batch)

    def addresses(self, batch: ForwardBatch) -> np.ndarray | None:
        """Return the addresses of the adapters of a batch's rows, which are on the host. None: the
        batch has no adapters.
        """
        if self._ops is None or not batch.adapters:
            return None
        by_index = np.append(self._ops.addresses(batch.adapters), 0)
        return by_index[batch.row_adapters.numpy()]  # index -1: no adapter
