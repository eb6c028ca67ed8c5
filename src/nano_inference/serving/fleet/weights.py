"""Weights of one replica for another."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nano_inference.serving.client import EngineClient

SYNC_TIMEOUT = 600.0  # seconds in which a replica gets the weights of another one
# From the first engine to the second, those of this version.
BringWeights = Callable[[EngineClient, EngineClient, int], Coroutine[Any, Any, None]]


async def by_folder(donor: EngineClient, client: EngineClient, version: int) -> None:
    """The weights that `donor` serves, for another engine on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="nano-inference-weights-"))
    try:
        path = str(folder / "all")
        await donor.call("save_weights", path=path, version=version, timeout=SYNC_TIMEOUT)
        await client.call("begin_update", session=0, complete=True)
        options = {"session": 0, "seconds": SYNC_TIMEOUT, "timeout": SYNC_TIMEOUT}
        await client.call("receive_folder", path=path, **options)
        await client.call("finish_update", version=version, kv_policy="abort", **options)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)
