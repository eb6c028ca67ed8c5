"""A weight set by the names of its checkpoint."""

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nano_inference.errors import WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.weights import fused_tensors, named_slots, param_table, read

if TYPE_CHECKING:  # it needs an extra
    from nano_inference.engine.workers.sharing import SentUpdates

NOT_A_TENSOR = "is not a tensor of this model; names are those of its checkpoint."


class WeightSet:
    """The weights of one model, as they stand in its parameters.

    Args:
        model: whose parameters they are.
        shares: the other ranks that hold parts of the model; None: there are none.

    Attributes:
        slots: where each tensor goes that an update may name, in the whole model; tied heads too.
        own: the same in this rank's part of the model.
        fused: names of several checkpoint tensors in one piece.
        shapes: of every tensor that an update may name; some names are parts of others.
        names: of the checkpoint's tensors.
    """

    def __init__(self, model: Decoder, shares: "SentUpdates | None" = None) -> None:
        table = param_table(model.part.whole)
        self.model, self.shares = model, shares
        self.slots = named_slots(table)
        self.own = named_slots(param_table(model.part.whole, model.part))
        self.fused = fused_tensors(table)
        self.shapes = {name: fused.shape for name, fused in self.fused.items()}
        self.shapes |= {name: slot.shape for name, slot in self.slots.items()}
        self.names = [name for name, slot in self.slots.items() if slot.tied_to is None]
        self._in_float32 = {param.name for param in table if param.keep_float32}

    def dtype_of(self, name: str) -> torch.dtype:
        """How a tensor is stored, on whichever rank."""
        kept = self.slots[name].param in self._in_float32
        return torch.float32 if kept else self.model.dtype

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the dtype that it is stored in. Raises `WeightUpdateError`."""
        if name not in self.slots:
            raise WeightUpdateError(f"{name!r:.200} {NOT_A_TENSOR}")
        if self.shares is not None:
            return self.shares.whole(self.slots[name].tied_to or name)
        return read(self.model.params, self.own[name])

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors: views, or copies where weights are packed or other ranks hold parts."""
        return {name: self.tensor(name) for name in self.names}

    def checksum(self) -> dict[str, str]:
        """SHA-256 of each tensor: its bytes row by row, in the dtype that it is stored in."""
        return {name: _sha256(self.tensor(name)) for name in self.names if self._holds(name)}

    def _holds(self, name: str) -> bool:
        """Whether this engine has any of a tensor: of engines in lockstep each has some of the
        experts.
        """
        return self.shares is not None or math.prod(self.own[name].local_shape) > 0


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
