"""Giving memory back while an engine sleeps: the KV cache, and the weights too, which wait in a file."""

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference.engine.storage import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.models.weights import param_table, read, slots, write
from nano_inference.ops.cpu.memory import discard


class Sleep:
    """Memory that was given back. Everything keeps its address on a CPU, so nothing has to be recorded anew."""

    def __init__(self, storages: Iterable[KVStorage], models: Mapping[str, Decoder], *, weights: bool) -> None:
        self.holds_weights = weights
        self._tensors = [tensor for storage in set(storages) for tensor in (storage.keys, storage.values)]
        self._models = dict(models)
        self._folder = Path(tempfile.mkdtemp(prefix="nano-inference-sleep-")) if weights else None  # mode 0700
        if self._folder is not None:
            for name, model in self._models.items():
                places = slots(param_table(model.spec)).items()
                save_file({key: read(model.params, slot).contiguous() for key, slot in places}, self._folder / name)
            self._tensors += [_memory(param) for model in self._models.values() for param in model.params.values()]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        for tensor in self._tensors:
            if tensor.device.type == "cpu":
                discard(tensor)
            else:
                tensor.untyped_storage().resize_(0)

    def end(self) -> None:
        """Take the memory again and put the weights back, to the bit."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            if tensor.device.type != "cpu":
                tensor.untyped_storage().resize_(size)
        for name, model in self._models.items():
            if self._folder is not None:
                _fill(model, self._folder / name)
            if model.device.type != "cpu":
                model.forget_recorded()
        self.forget()

    def forget(self) -> None:
        """Remove what stands on disk."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _fill(model: Decoder, file: Path) -> None:
    places = slots(param_table(model.spec))
    for key, tensor in load_file(file).items():
        write(model.params, places[key], tensor)


def _memory(param: Any) -> Tensor:
    """The tensor that a parameter's numbers stand in, in whatever order."""
    return param if isinstance(param, Tensor) else param.data
