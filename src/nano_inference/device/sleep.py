"""Giving memory back while an engine sleeps: the KV cache, and the weights, which wait in a
file.
"""

import tempfile
from collections.abc import Iterable
from typing import IO, Any

import torch
from torch import Tensor

from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.ops.cpu.memory import discard
from nano_inference.types import Memory


class Sleep:
    """One part of the memory that was given back. Everything keeps its address on a CPU: nothing is
    recorded anew.

    Args:
        tensors: what it holds.
        models: whose recorded work names them.
        keep: put what stands in them aside, in a file; else it is lost.

    Raises `OSError`, with nothing given back, where it cannot be put aside.
    """

    def __init__(self, tensors: Iterable[Tensor], models: Iterable[Decoder], *, keep: bool) -> None:
        self._models = list(models)
        # weight sets may share some
        self._tensors = list({tensor.data_ptr(): tensor for tensor in tensors}.values())
        self._file = _saved(self._tensors) if keep else None
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        for tensor in self._tensors:
            if on_cpu(tensor):
                discard(tensor)
            else:
                tensor.untyped_storage().resize_(0)
        self._forget_recorded()
        self._give_to_the_card()

    def end(self) -> None:
        """Take the memory again; what was put aside stands in it as before, to the bit.

        Raises `torch.OutOfMemoryError` where another process has it now; it sleeps on then.
        """
        self._take_memory()
        self._read_back()
        self.forget()

    def _take_memory(self) -> None:
        try:
            for tensor, size in zip(self._tensors, self._sizes, strict=True):
                if not on_cpu(tensor):
                    tensor.untyped_storage().resize_(size)
        except torch.OutOfMemoryError:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)
            self._give_to_the_card()
            raise

    def _read_back(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            for tensor in self._tensors:
                there = (
                    _bytes(tensor)
                    if tensor.device.type == "cpu"
                    else torch.empty(tensor.nbytes, dtype=torch.uint8)
                )
                if self._file.readinto(there.numpy().data) != tensor.nbytes:
                    raise OSError("their file is cut short")
                if tensor.device.type != "cpu":
                    _bytes(tensor).copy_(there)

    def _give_to_the_card(self) -> None:
        """Torch would keep it for this process's next tensors."""
        if not all(map(on_cpu, self._tensors)):
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Remove what stands on disk."""
        if self._file is not None:
            self._file.close()

    def _forget_recorded(self) -> None:
        """On a GPU memory moves, and what is recorded holds memory of its own."""
        for model in self._models:
            if not on_cpu(model):
                model.forget_recorded()


def give_back(memory: Memory, storages: Iterable[KVStorage], models: Iterable[Decoder]) -> Sleep:
    """Give the weights or the KV cache back. Raises `OSError`, with nothing given back."""
    models = list(models)
    if memory == "weights":
        return Sleep(
            (_memory(param) for model in models for param in model.params.values()),
            models,
            keep=True,
        )
    caches = (tensor for storage in set(storages) for tensor in storage.tensors)
    return Sleep(caches, models, keep=False)


def _saved(tensors: Iterable[Tensor]) -> Any:
    """A file that has no name, so that it is gone with the process, however that ends. Raises
    `OSError`.
    """
    file: IO[bytes] = tempfile.TemporaryFile(prefix="nano-inference-")  # noqa: SIM115
    try:
        for tensor in tensors:  # one by one: no second copy of them all
            file.write(_bytes(tensor).cpu().numpy().data)
        file.flush()
    except OSError:
        file.close()
        raise
    return file


def on_cpu(held: Any) -> bool:
    """Whether a tensor or a model lies in the host's memory."""
    return held.device.type == "cpu"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _memory(param: Any) -> Tensor:
    """The tensor that a parameter's numbers stand in, in whatever order."""
    return param if isinstance(param, Tensor) else param.data
