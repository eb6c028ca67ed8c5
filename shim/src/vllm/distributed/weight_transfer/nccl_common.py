"""`trainer_init`, which makes the trainer's end of a group."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup


def trainer_init(init_info: Mapping[str, Any]) -> PyNcclCommunicator:
    """Serve the group's store, and wait until the server has joined.

    Args:
        init_info: The `init_info` of `POST /init_weight_transfer_engine`: `master_address`,
            `master_port` and `world_size`.
    """
    group = StatelessProcessGroup.create(
        init_info["master_address"], init_info["master_port"], 0, init_info["world_size"]
    )
    return PyNcclCommunicator(group, "cuda" if torch.cuda.is_available() else "cpu")
