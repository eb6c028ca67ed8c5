"""vLLM's packed format: tensors end to end in buffers, each of which is one broadcast."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

DEFAULT_PACKED_BUFFER_SIZE_BYTES = 2**30
Item = tuple[str, Tensor]


def packed_nccl_broadcast_producer(
    iterator: Iterable[Item],
    group: PyNcclCommunicator,
    src: int,
    post_iter_func: Callable[[Item], Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    **_: Any,
) -> None:
    """Send named tensors.

    Args:
        iterator: Names and tensors.
        group: Trainer's end of the group.
        src: Sending rank: 0.
        post_iter_func: Function from a name and a tensor to the tensor that is sent.
        buffer_size_bytes: A buffer ends with the tensor that makes it longer.
    """
    parts: list[Tensor] = []
    size = 0
    for item in iterator:
        parts.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > buffer_size_bytes:
            group.broadcast(torch.cat(parts), src)
            parts, size = [], 0
    if parts:
        group.broadcast(torch.cat(parts), src)
