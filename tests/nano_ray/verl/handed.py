"""A checkpoint engine for verl that hands weights over in a file.

The trainer's side writes the file, the replica's side waits for it and reads it. verl's own engines
(NCCL, NIXL) need GPUs. It imports others by `custom_backend_module`.
"""
# pyright: reportMissingImports=false

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("handed")
class Handed(CheckpointEngine):
    def __init__(self, bucket_size: int, path: str, is_master: bool = False) -> None:
        self.path = Path(path)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple:
        return {"size": [actor_wg_world_size] * actor_wg_world_size}, {
            "size": [rollout_world_size] * rollout_world_size
        }

    def init_process_group(self, **_: Any) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> None:
        draft = self.path / "draft"
        save_file(dict(weights), draft)
        draft.rename(self.path / str(global_steps))

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Tensor]]:
        there, deadline = self.path / str(global_steps), time.monotonic() + 60
        while not there.exists():
            assert time.monotonic() < deadline, f"nobody wrote {there}"
            time.sleep(0.05)
        yield from load_file(there).items()
