"""Adapters on several ranks: rank 0 sends each rank the matrices that it computes with, before the
first request names the adapter, and numbers every version for the messages of steps.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nano_inference.checkpoints.lora import AdapterMemory, Pair, own_pair, targets_of
from nano_inference.models.decoder import Decoder
from nano_inference.models.sharding.shard import shard_of
from nano_inference.ops.lora import Adapter
from nano_inference.parallel.mesh import Place
from nano_inference.ranks.messages import Call
from nano_inference.ranks.worker_group import WorkerGroup

NO_ADAPTER = 0  # in messages


class SentAdapters:
    """Rank 0's end: the numbers of the adapters that the workers hold."""

    def __init__(self, worker_group: WorkerGroup, model: Decoder) -> None:
        spec, mesh = model.part.whole, model.part.position.mesh
        self._worker_group, self._whole = worker_group, targets_of(spec)
        self._targets = [
            targets_of(spec, shard_of(spec, Place(mesh, rank))) for rank in range(mesh.world_size)
        ]
        self._numbers: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(NO_ADAPTER + 1)
        self._removed = deque[int]()  # numbers of adapters that no sequence uses any more

    def give(self, adapter: Adapter, pairs: Mapping[str, Pair]) -> None:
        """Send all ranks their matrices of an adapter.

        Raises `AdapterError` for numbers that are not finite, another error if a rank lacks
        memory, and `RankLost`. Then no rank keeps the adapter.
        """
        number = next(self._count)
        try:
            for rank, targets in enumerate(self._targets[1:], start=1):
                for key, pair in pairs.items():
                    if key in targets:
                        held = own_pair(targets[key], self._whole[key], pair)
                        self._send(rank, number, key, held)
            self._worker_group.call(
                "make_adapter",
                slow=True,
                number=number,
                name=adapter.name,
                version=adapter.version,
            )
        except BaseException:
            self._removed.append(number)
            raise
        self._numbers[adapter] = number
        # messages are sent by the thread that steps; a finalizer may run amid another message
        weakref.finalize(adapter, self._removed.append, number).atexit = False

    def number(self, adapter: Any) -> int:
        """Return the number of an adapter in messages, `NO_ADAPTER` for None."""
        return NO_ADAPTER if adapter is None else self._numbers[adapter]

    def take_removed(self) -> list[int]:
        """Return the numbers of the adapters that the workers can drop, each once."""
        return [self._removed.popleft() for _ in range(len(self._removed))]

    def _send(self, rank: int, number: int, key: str, pair: Pair) -> None:
        arguments = {
            "number": number,
            "key": key,
            "shapes": [list(pair.a.shape), list(pair.b.shape)],
            "a": _bytes_of(pair.a),
            "b": _bytes_of(pair.b),
            "scale": pair.scale,
        }
        self._worker_group.tell_one(rank, Call("add_matrices", arguments))


class HeldAdapters:
    """Worker's end: the adapters by number."""

    def __init__(self, model: Decoder) -> None:
        self._memory = AdapterMemory(model.part, model.device, model.ops.placed)
        self._received: dict[int, dict[str, Pair]] = {}
        self._made: dict[int, Adapter] = {}

    def add(self, number: int, key: str, shapes: Any, a: bytes, b: bytes, scale: float) -> None:
        """Keep the matrices of one module until the adapter is made."""
        pair = Pair(_numbers(a, shapes[0]), _numbers(b, shapes[1]), scale)
        self._received.setdefault(number, {})[key] = pair

    def make(self, number: int, name: str, version: int) -> None:
        """Make an adapter of the received matrices. A stage that it does not adapt has received
        none. Raises `AdapterError`.
        """
        # B has the rows of this rank only, as `own_pair` has cut it
        pairs = self._received.pop(number, {})
        self._made[number] = self._memory.make_held(name, version, pairs)

    def get(self, number: int) -> Adapter | None:
        """Return an adapter by its number, or None for `NO_ADAPTER`."""
        return None if number == NO_ADAPTER else self._made[number]

    def drop(self, number: int) -> Adapter | None:
        """Drop and return an adapter, if it is here."""
        self._received.pop(number, None)
        return self._made.pop(number, None)


def _bytes_of(matrix: Tensor) -> bytes:
    return matrix.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy().tobytes()


def _numbers(data: bytes, shape: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
