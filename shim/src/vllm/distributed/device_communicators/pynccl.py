"""`PyNcclCommunicator`: broadcasts of a trainer, by NCCL on a card and by gloo on a CPU."""

from typing import Any

import torch
from torch import Tensor

from nano_inference.parallel.deadline import Deadline
from nano_inference.parallel.nccl import Communicator, unique_id
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.transports.rendezvous import default_room, join_group
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

TIMEOUT = 300.0  # seconds for each wait
_WHAT = "a tensor of the trainer"


class PyNcclCommunicator:
    """Trainer's end of a group, which is rank 0.

    On a card it sends the id of NCCL as vLLM does, so a server of vLLM could join as well. Without
    one it makes an ordinary gloo group, as nano-inference's servers on CPUs expect.

    Args:
        group: Store of the group.
        device: Device of the tensors: a device, its name, or the number of a card.

    Attributes:
        group: Store of the group. Trainers end it by `group.store = None`.
    """

    def __init__(self, group: StatelessProcessGroup, device: torch.device | str | int) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = _device_of(device)
        deadline = Deadline(TIMEOUT)
        self._nccl: Communicator | None = None
        self._gloo: ProcessGroup | None = None
        if self.device.type == "cuda":
            self._nccl = connected(group, self.device, deadline)
        else:
            place = default_room("gloo"), self.rank, self.world_size, "gloo", self.device
            self._gloo = join_group(group.store, *place, group.store.host, deadline)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send a tensor from the trainer to all ranks, and wait until it may be changed.

        Raises `WeightTransferError` if the server is gone. `stream` has no effect.
        """
        if src != 0:
            raise ValueError(f"src={src} must be 0, the trainer.")
        deadline = Deadline(TIMEOUT)
        content = tensor.detach().to(self.device).contiguous()
        if self._nccl is None:
            assert self._gloo is not None
            self._gloo.broadcast(content, deadline, _WHAT)
            return
        self._nccl.wait(self._nccl.broadcast(content, 0, deadline, _WHAT), deadline, _WHAT)

    def __del__(self) -> None:
        if getattr(self, "_nccl", None) is not None:
            self._nccl.abort()  # pyright: ignore[reportOptionalMemberAccess]
        if getattr(self, "_gloo", None) is not None:
            self._gloo.close()  # pyright: ignore[reportOptionalMemberAccess]


def connected(
    group: StatelessProcessGroup, device: torch.device, deadline: Deadline
) -> Communicator:
    """Send an id of NCCL through the store, as vLLM's trainers do, and connect the ranks. Raises
    `WeightTransferError`.
    """
    made = group.broadcast_obj(ncclUniqueId.from_buffer_copy(unique_id()), src=0)
    communicator = Communicator(bytes(made), group.rank, group.world_size, device, deadline)
    communicator.warm_up(deadline)
    return communicator


def _device_of(device: torch.device | str | int) -> torch.device:
    resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")  # TRL names a card even where there is none
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
