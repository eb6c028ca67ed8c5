"""A trainer in a separate process that lends its weights as if its shared memory were a card's:
`python -m tests.server.trainers.lender FOLDER`. It executes orders (lines of JSON) from stdin.

The handles, pickles and JSON are those of torch, SGLang and vLLM. Only torch's `_share_cuda_` has a
stand-in, whose handle contains the name of a file in /dev/shm.
"""

import base64
import json
import os
import pickle
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from nano_inference.parallel.shared_tensors import COUNTERS
from tests.server.trainers.group_trainer import new_weights

SHARED = Path("/dev/shm")
CARD = "8e0b1c5a-0000-4a6e-9d1f-000000000001"
OTHER_CARD = "8e0b1c5a-0000-4a6e-9d1f-000000000002"


@dataclass
class FlattenedTensorMetadata:
    """SGLang's class of this name, as it is pickled."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _rebuild_cuda_tensor_modified(*_: Any) -> None:
    """Stand for SGLang's function of this name, which only its pickles name."""


def _publish(thing: Any, module: str) -> None:
    """Make pickles name a thing as part of another package."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        sys.modules.setdefault(name, types.ModuleType(name))
    thing.__module__ = module
    setattr(sys.modules[module], thing.__name__, thing)


_publish(FlattenedTensorMetadata, "sglang.srt.weight_sync.tensor_bucket")
_publish(_rebuild_cuda_tensor_modified, "sglang.srt.utils.patch_torch")


class Memory:
    """Files in shared memory: a counter file as torch's, and a file for each storage.

    Attributes:
        files: Storages as tensors, by the name of their file.
    """

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        self.counter = f"/torch_{os.getpid()}_{os.getpid() + 7}_0"
        (SHARED / self.counter[1:]).write_bytes(bytes(8 * COUNTERS))

    def share(self, content: Tensor) -> tuple[Any, ...]:
        """Copy a tensor into a new file, and return what `_share_cuda_` returns without the
        device.
        """
        name = f"nano-lent-{os.getpid()}-{len(self.files)}"
        flat = content.contiguous().view(-1).view(torch.uint8)
        lead = 64  # bytes of the allocation before the storage
        mapped = torch.from_file(
            str(SHARED / name), shared=True, size=lead + len(flat), dtype=torch.uint8
        )
        mapped[lead:] = flat
        self.files[name] = mapped
        handle = b"\x02c" + name.encode().ljust(64, b"\0")
        return handle, len(flat), lead, self.counter.encode(), len(self.files), bytes(64), True

    def clear(self) -> None:
        """Remove all files, also that of the counters."""
        for name in self.files:
            (SHARED / name).unlink(missing_ok=True)
        self.files.clear()
        (SHARED / self.counter[1:]).unlink(missing_ok=True)


class Lent:
    """Tensor that is pickled as torch pickles one on a card.

    Args:
        tensor: The tensor, or its shape and dtype if it is a view of `memory`.
        device: UUID of the card, or the trainer's number of it.
    """

    def __init__(self, memory: Memory, tensor: Tensor, device: str | int = CARD) -> None:
        shared = memory.share(tensor)
        handle, size, offset, counter, index, event, waits = shared
        self.arguments: list[Any] = [
            *(torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage),
            *(tensor.dtype, device, handle, size, offset, False, counter, index, event, waits),
        ]

    def __reduce__(self) -> Any:
        patched = isinstance(self.arguments[6], str)
        function = _rebuild_cuda_tensor_modified if patched else reductions.rebuild_cuda_tensor
        return function, tuple(self.arguments)


# places in the arguments of `rebuild_cuda_tensor`
PLACES = {
    "start": 3, "device": 6, "handle": 7, "size": 8, "offset": 9, "counter": 11, "index": 12,
    "event": 13,
}  # fmt: skip


class Lender:
    """Weights of the model in a folder, and the memory that is lent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.memory = folder, Memory()

    def bucket(
        self, seed: int, kind: str = "bytes", device: str | int = CARD, **changes: Any
    ) -> str:
        """Return SGLang's flattened bucket, of bytes or of numbers, as base64."""
        weights = self.weights(seed)
        flat = {name: tensor.flatten() for name, tensor in weights.items()}
        if kind == "bytes":
            flat = {name: tensor.view(torch.uint8) for name, tensor in flat.items()}
        metadata: list[FlattenedTensorMetadata] = []
        at = 0
        for name, tensor in weights.items():
            stop = at + len(flat[name])
            metadata.append(
                FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, stop, len(flat[name]))
            )
            at = stop
        for name in ("start_idx", "end_idx"):
            if name in changes:
                setattr(metadata[-1], name, getattr(metadata[-1], name) + changes.pop(name))
        lent = changed(Lent(self.memory, torch.cat([*flat.values()]), device), changes)
        return serialized({"flattened_tensor": lent, "metadata": metadata})

    def direct(self, seed: int, dtype: str = "float32", transposed: bool = False) -> str:
        """Return SGLang's list of names and tensors as base64."""
        pairs: list[tuple[str, Lent]] = []
        for name, tensor in self.weights(seed, dtype).items():
            lent = Lent(self.memory, tensor.T if transposed and tensor.ndim == 2 else tensor)
            if transposed and tensor.ndim == 2:  # the memory has the transpose
                rows, columns = tensor.shape
                lent.arguments[1:3] = [torch.Size((rows, columns)), (1, rows)]
            pairs.append((name, lent))
        return serialized(pairs)

    def vllm(self, seed: int, kind: str, card: str = CARD, **changes: Any) -> dict[str, Any]:
        """Return vLLM's `update_info`: with a function (older), without, or packed."""
        weights = self.weights(seed)
        info: dict[str, Any] = {
            "names": list(weights),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        }
        if kind == "packed":
            flat = [each.flatten().view(torch.uint8) for each in weights.values()]
            lent = changed(Lent(self.memory, torch.cat(flat), 3), changes)
            info["tensor_sizes"] = [len(each) for each in flat]
            handles: Any = {card: tuple(lent.arguments)}
        else:
            each_lent = [changed(Lent(self.memory, each, 3), changes) for each in weights.values()]
            handles = [
                {card: each.__reduce__() if kind == "function" else tuple(each.arguments)}
                for each in each_lent
            ]
        content = pickle.dumps(handles)
        return info | {"ipc_handles_pickled": base64.b64encode(content).decode()}

    def offers(self, seed: int, card: str = CARD) -> list[dict[str, Any]]:
        """Return this package's own JSON."""
        storages: list[dict[str, Any]] = []
        tensors: list[dict[str, Any]] = []
        for name, tensor in self.weights(seed).items():
            handle, size, offset, counter, index, event, waits = self.memory.share(tensor)
            tensors.append(
                {"name": name, "dtype": "float32", "shape": [*tensor.shape], "start": 0,
                 "storage": len(storages)}
            )  # fmt: skip
            storages.append(
                {"card": card, "handle": base64.b64encode(handle).decode(), "size": size,
                 "offset": offset, "counter": counter.decode(), "counter_index": index,
                 "event": base64.b64encode(event).decode(), "waits": waits}
            )  # fmt: skip
        return [{"storages": storages, "tensors": tensors}]

    def scribble(self, byte: int = 0x3F) -> None:
        """Overwrite all lent memory."""
        for mapped in self.memory.files.values():
            mapped.fill_(byte)

    def withdraw(self) -> None:
        """Remove the counter file, as torch does once a process frees what it has lent."""
        (SHARED / self.memory.counter[1:]).unlink()

    def weights(self, seed: int, dtype: str = "float32") -> dict[str, Tensor]:
        """Return new weights of the model."""
        return new_weights(self.folder, seed, dtype)


def changed(lent: Lent, changes: Mapping[str, Any]) -> Lent:
    """Falsify arguments by name. Strings replace bytes."""
    for name, value in changes.items():
        is_bytes = name in ("handle", "counter", "event")
        lent.arguments[PLACES[name]] = value.encode("latin-1") if is_bytes else value
    return lent


def serialized(thing: Any) -> str:
    """Return what SGLang's `MultiprocessingSerializer` returns."""
    return base64.b64encode(bytes(ForkingPickler.dumps(thing))).decode()


def main() -> None:
    """Execute orders until stdin ends."""
    torch.set_num_threads(1)
    lender = Lender(Path(sys.argv[1]))
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(getattr(lender, order.pop("do"))(**order)), flush=True)
    finally:
        lender.memory.clear()


if __name__ == "__main__":
    main()
