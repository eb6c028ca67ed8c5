"""What a model's weights are now, by the names of its checkpoint."""

import hashlib
import math

import torch
from torch import Tensor

from nano_inference.engine.weight_update import Shares
from nano_inference.errors import WeightUpdateError
from nano_inference.models.decoder import Decoder
from nano_inference.models.weights import TIED, param_table, read, slots


class ServedWeights:
    """Weights as they stand in a model's parameters.

    Args:
        model: whose.
        shares: the other ranks that hold parts of it, if there are any.

    Attributes:
        slots: where each checkpoint tensor belongs in the whole model.
        own: and in this rank's part.
    """

    def __init__(self, model: Decoder, shares: Shares | None) -> None:
        self._params, self._shares = model.params, shares
        self.slots = slots(param_table(model.part.whole))
        self.own = slots(param_table(model.part.whole, model.part))

    def checksum(self) -> dict[str, str]:
        """SHA-256 of each tensor: its bytes row by row, in the dtype that the engine holds."""
        return {name: _sha256(self.tensor(name)) for name in self.slots if self._holds(name)}

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors: views, or copies where weights are packed or others hold parts of them."""
        return {name: self.tensor(name) for name in self.slots}

    def _holds(self, name: str) -> bool:
        """Whether this engine has any of a tensor: of engines in lockstep each has some of the
        experts.
        """
        return self._shares is not None or math.prod(self.own[name].local_shape) > 0

    def tensor(self, name: str) -> Tensor:
        """One of them, by its name in the checkpoint, or a tied head's. Raises
        `WeightUpdateError`.
        """
        name = name if name in self.slots else TIED.get(name, name)
        if name not in self.slots:
            raise WeightUpdateError(
                f"{name!r:.200} is not a tensor of this model; names are those of its checkpoint."
            )
        return (
            self._shares.whole(name)
            if self._shares is not None
            else read(self._params, self.own[name])
        )


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
