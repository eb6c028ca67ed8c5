"""Release of memory while an engine sleeps.

Weights are saved to a file. The KV cache is discarded.
"""

import tempfile
from collections.abc import Iterable
from typing import IO, Any

from nano_inference.arrays import Tensor, is_tensor, namespace
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.ops.cpu.memory import discard
from nano_inference.types import Memory


class Sleep:
    """Released memory of one kind.

    On a CPU, all tensors keep their addresses and recorded work stays valid.

    Args:
        tensors: Tensors to release.
        models: Models whose recorded work refers to these tensors.
        keep: True to save the contents to a file. Otherwise they are lost.

    Raises `OSError`, with nothing released, if the contents cannot be saved.
    """

    def __init__(self, tensors: Iterable[Tensor], models: Iterable[Decoder], *, keep: bool) -> None:
        self._models = list(models)
        # weight sets may share tensors
        self._tensors = list({tensor.data_ptr(): tensor for tensor in tensors}.values())
        self._file = _saved(self._tensors) if keep else None
        # GPU memory has to be allocated again
        self._sizes = [
            0 if on_cpu(tensor) else tensor.untyped_storage().nbytes() for tensor in self._tensors
        ]
        for tensor in self._tensors:
            if on_cpu(tensor):
                discard(tensor)
            else:
                tensor.untyped_storage().resize_(0)
        self._forget_recorded()
        self._give_to_the_card()

    def end(self) -> None:
        """Reallocate the memory and restore its contents bit for bit.

        Raises `torch.OutOfMemoryError` if the card lacks memory. The engine then stays asleep.
        """
        self._take_memory()
        self._read_back()
        self.forget()

    def _take_memory(self) -> None:
        if all(map(on_cpu, self._tensors)):
            return
        import torch

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
                xp = namespace(tensor)
                buffer = (
                    _bytes(tensor)
                    if tensor.device.type == "cpu"
                    else xp.empty(tensor.nbytes, dtype=xp.uint8)
                )
                if self._file.readinto(buffer.numpy().data) != tensor.nbytes:
                    raise OSError("the file of the sleeping weights is truncated")
                if tensor.device.type != "cpu":
                    _bytes(tensor).copy_(buffer)

    def _give_to_the_card(self) -> None:
        """Release torch's cached memory, which it would otherwise keep for this process."""
        if not all(map(on_cpu, self._tensors)):
            import torch

            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Delete the saved contents."""
        if self._file is not None:
            self._file.close()

    def _forget_recorded(self) -> None:
        """Drop recorded work on GPUs, where tensors move and graphs hold memory."""
        for model in self._models:
            if not on_cpu(model):
                model.forget_recorded()


def give_back(memory: Memory, storages: Iterable[KVStorage], models: Iterable[Decoder]) -> Sleep:
    """Release the memory of the weights or the KV cache.

    Raises `OSError`, with nothing released.
    """
    models = list(models)
    return Sleep(tensors_of(memory, storages, models), models, keep=memory == "weights")


def tensors_of(
    memory: Memory, storages: Iterable[KVStorage], models: Iterable[Decoder]
) -> list[Tensor]:
    """Return the tensors of the weights or the KV cache. Models may share some."""
    if memory == "weights":
        return [memory_of(param) for model in models for param in model.params.values()]
    return [tensor for storage in set(storages) for tensor in storage.tensors]


def _saved(tensors: Iterable[Tensor]) -> Any:
    """Return an anonymous file of the tensors, which disappears with the process.

    Raises `OSError`.
    """
    file: IO[bytes] = tempfile.TemporaryFile(prefix="nano-inference-")  # noqa: SIM115
    try:
        for tensor in tensors:  # one by one, to avoid a second copy of all
            file.write(_bytes(tensor).cpu().numpy().data)
        file.flush()
    except OSError:
        file.close()
        raise
    return file


def on_cpu(held: Any) -> bool:
    """Return True if a tensor or model is in host memory."""
    return held.device.type == "cpu"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(namespace(tensor).uint8)


def memory_of(param: Any) -> Tensor:
    """Return the tensor that stores a parameter, in any layout."""
    return param if is_tensor(param) else param.data
