"""TRL's `vllm_mode="server"` with this engine: weights are sent over a gloo group.

TRL imports the package `vllm` and takes the trainer's half of the weight transfer from it: a PyNccl
group, which needs CUDA and sends its id as a pickle. This file stands in for that package. Copy it
next to your script and import it before `trl`:

    import vllm_gloo

    vllm_gloo.install()
    from trl import GRPOConfig, GRPOTrainer

The server is `nano-inference serve MODEL --rl`. TRL moves the tensors to the device of the group;
gloo sends CPU tensors, so GPU tensors are copied to the host first.
"""

import socket
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VERSION = "0.31.0"  # a version of vLLM that TRL accepts
TIMEOUT = timedelta(seconds=60)


def install() -> None:
    """Put the stand-in into `sys.modules`. Raises `RuntimeError` if vLLM is already imported."""
    if "vllm" in sys.modules:
        raise RuntimeError("vllm is already imported; call install() before you import trl.")
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": VERSION}
        | dict.fromkeys(("LLM", "RequestOutput", "SamplingParams"), object),
        "vllm.sampling_params": {"StructuredOutputsParams": object},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1", "get_open_port": free_port},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": send},
    }
    for name, content in parts.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(content)
        sys.modules[name] = module


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Communicator:
    """Group of trainer and server with the interface of vLLM's. TRL ends a group by deleting its
    store and socket.
    """

    def __init__(self) -> None:
        self.group = types.SimpleNamespace(store=None, socket=None)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Send a tensor from rank `src` to all ranks."""
        dist.broadcast(tensor.cpu(), src)


def trainer_init(info: dict[str, Any]) -> Communicator:
    """Join the group as rank 0. `info` has `master_address`, `master_port` and `world_size`."""
    address = f"tcp://{info['master_address']}:{info['master_port']}"
    size = info["world_size"]
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=size, timeout=TIMEOUT)
    return Communicator()


def send(
    iterator: Iterator[tuple[str, Tensor]],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    """Send named tensors in vLLM's packed format, in one message."""
    flat = [
        post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8) for item in iterator
    ]
    group.broadcast(torch.cat(flat), src)
