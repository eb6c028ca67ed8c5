"""Giving memory back while an engine sleeps: the KV cache, and the weights too, which wait in a file."""

import tempfile
from collections.abc import Iterable
from typing import IO, Any

import torch
from torch import Tensor

from nano_inference.engine.storage import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.ops.cpu.memory import discard


class Sleep:
    """Memory that was given back. Everything keeps its address on a CPU, so nothing has to be recorded anew.

    Raises `OSError`, with nothing given back, where the weights cannot be written.
    """

    def __init__(self, storages: Iterable[KVStorage], models: Iterable[Decoder], *, weights: bool) -> None:
        self.holds_weights = weights
        self._models = list(models)
        caches = [tensor for storage in set(storages) for tensor in (storage.keys, storage.values)]
        held = [_memory(param) for model in self._models for param in model.params.values()] if weights else []
        self._weights = list({tensor.data_ptr(): tensor for tensor in held}.values())  # sets may share some
        self._file = _saved(self._weights) if weights else None
        self._tensors = [*caches, *self._weights]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        for tensor in self._tensors:
            if on_cpu(tensor):
                discard(tensor)
            else:
                tensor.untyped_storage().resize_(0)

    def end(self) -> None:
        """Take the memory again and put the weights back, to the bit."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            if not on_cpu(tensor):
                tensor.untyped_storage().resize_(size)
        if self._file is not None:
            self._file.seek(0)
            for tensor in self._weights:
                there = _bytes(tensor) if tensor.device.type == "cpu" else torch.empty(tensor.nbytes, dtype=torch.uint8)
                if self._file.readinto(there.numpy().data) != tensor.nbytes:
                    raise OSError("their file is cut short")
                if tensor.device.type != "cpu":
                    _bytes(tensor).copy_(there)
        for model in self._models:
            if not on_cpu(model):
                model.forget_recorded()
        self.forget()

    def forget(self) -> None:
        """Remove what stands on disk."""
        if self._file is not None:
            self._file.close()


def _saved(tensors: Iterable[Tensor]) -> Any:
    """A file that has no name, so that it is gone with the process, however that ends. Raises `OSError`."""
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
