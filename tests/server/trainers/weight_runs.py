"""Helpers for tests of weight updates by calls: a trainer process, its weights, and concurrent
requests.
"""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from nano_inference.remote.client import EngineClient
from nano_inference.server.control.control import Control
from nano_inference.server.control.requests.field_types import TensorSpec
from nano_inference.server.errors import ApiError
from tests.ports import free_port
from tests.server.engines import PATIENCE, core_of, finished, params_of
from tests.server.trainers.children import GroupTrainer
from tests.server.trainers.group_trainer import new_weights

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


class TrainerProcess(GroupTrainer):
    """A `group_trainer` for coroutine tests."""

    async def answer(self) -> str:
        """Return the next answer."""
        return await asyncio.to_thread(self.hear)

    async def join(self, control: Control, name: str = "group", *, named: bool = True) -> None:
        """Join a new group with the engine."""
        port = free_port()
        self.say("join", name=name, port=port, named=named)
        await control.groups.join(
            name, "127.0.0.1", port, rank=1, world_size=2, named=named, timeout=20.0
        )
        assert await self.answer() == "done"

    async def leave(self, name: str = "group") -> None:
        """Destroy the trainer's side of the group."""
        self.say("leave", name=name)
        assert await self.answer() == "done"


def specs(weights: dict[str, Tensor], names: Iterable[str] | None = None) -> list[TensorSpec]:
    """Return a trainer's description of its tensors."""
    chosen = weights if names is None else {name: weights[name] for name in names}
    return [
        TensorSpec(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in chosen.items()
    ]


def checksums(folder: Path, seed: int, dtype: str = "float32") -> dict[str, str]:
    """Return the checksums of an engine with these weights, by default in float32."""
    return {name: _sha256(tensor) for name, tensor in new_weights(folder, seed, dtype).items()}


def safetensors_of(folder: Path, names: list[str] | None, seed: int = 0) -> bytes:
    """Return a safetensors file of some weights, or of all if `names` is None."""
    weights = new_weights(folder, seed)
    return save({name: weights[name] for name in (weights if names is None else names)})


async def update(
    control: Control,
    trainer: TrainerProcess,
    seed: int,
    *,
    name: str = "group",
    join: bool = True,
    **finish: Any,
) -> str:
    """Run a whole update and return its version."""
    if join:
        await trainer.join(control, name)
    await control.updates.begin(complete=True)
    trainer.say("send", group=name, seed=seed)
    await control.updates.receive_broadcast(name, specs(new_weights(trainer.folder, seed)))
    version = await control.updates.finish(**finish)
    assert await trainer.answer() == "done"
    assert await control.engine.serving_version() == version
    assert await control.checksums.get() == checksums(trainer.folder, seed)
    return version


@asynccontextmanager
async def refused(
    control: Control, status: int, told: str, *, within: float = 15.0, still_open: bool = False
) -> AsyncIterator[None]:
    """Check that the block raises an error in time, with a clean message and an unchanged live
    version.
    """
    before, began = (
        (await control.engine.serving_version(), await control.checksums.get()),
        time.monotonic(),
    )
    with pytest.raises(ApiError, match=told) as caught:
        yield
    assert time.monotonic() - began < within
    assert caught.value.status == status, caught.value
    assert not re.search(r"/\w+/\w+|Traceback|\.py\b|\.cc\b", caught.value.message), (
        caught.value.message
    )
    assert control.updates.is_open == still_open
    assert (await control.engine.serving_version(), await control.checksums.get()) == before


@asynccontextmanager
async def requests_meanwhile(client: EngineClient) -> AsyncIterator[None]:
    """Run requests in a row and check that each has the bits of an undisturbed run."""
    prompt, params, stop = [1, 2, 3], params_of(7, 40), asyncio.Event()
    alone = core_of(await finished(client.submit(prompt, params, 2, stream=False)))
    count = 0

    async def ask() -> None:
        nonlocal count
        while not stop.is_set():
            assert (
                core_of(await finished(client.submit(prompt, params, 2, stream=count % 2 == 0)))
                == alone
            )
            count += 1

    task = asyncio.create_task(ask())
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)
    assert count > 0


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.to(torch.float32).contiguous().view(-1).view(torch.uint8).numpy().data
    ).hexdigest()
