"""Names that TRL imports for vLLM below 0.28."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import Item, packed_nccl_broadcast_producer


@dataclass
class NCCLTrainerSendWeightsArgs:
    """Arguments of `NCCLWeightTransferEngine.trainer_send_weights`.

    Attributes:
        group: Trainer's end of the group.
        packed: True to send packed buffers, False for one broadcast per tensor.
    """

    group: PyNcclCommunicator
    packed: bool = False


class NCCLWeightTransferEngine:
    """Trainer's half of vLLM's engine of this name."""

    @staticmethod
    def trainer_init(init_info: Mapping[str, Any]) -> PyNcclCommunicator:
        """Make the trainer's end of a group, as `nccl_common.trainer_init`."""
        return trainer_init(init_info)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[Item], trainer_args: NCCLTrainerSendWeightsArgs
    ) -> None:
        """Send named tensors."""
        group = trainer_args.group
        if trainer_args.packed:
            packed_nccl_broadcast_producer(iterator, group, 0, lambda item: item[1])
            return
        for _, tensor in iterator:
            group.broadcast(tensor, 0)
