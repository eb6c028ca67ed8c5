"""`NanoRollout`: verl's handle of a replica in the process with the trainer's weights."""
# pyright: reportMissingImports=false

import asyncio
import os
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from nano_inference.errors import WeightUpdateError
from nano_ray.verl.buckets import NamedTensors, parcels
from nano_ray.verl.replica import actor_name

TIMEOUT = 300.0  # seconds until the actor must reply to a call


class NanoRollout(BaseRollout):
    """Memory and weights of one replica, for a worker of a trainer or checkpoint engine.

    Weights are sent as arrays in Ray's object store. GPU tensors are copied to host memory first.

    Args:
        config: verl's `RolloutConfig`.
        model_config: verl's `HFModelConfig`.
        device_mesh: The trainer's device mesh, which is not used.
        replica_rank: Number of the replica. -1: `RANK` of the worker.
    """

    is_leader_rank = True

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._actor: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Reallocate the replica's memory: `"weights"`, `"kv_cache"`."""
        await self._call("wake_up", tags)

    async def release(self) -> None:
        """Release the replica's memory."""
        await self._call("sleep")

    async def update_weights(
        self,
        weights: NamedTensors,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **options: Any,
    ) -> None:
        """Send (name, tensor) pairs and wait until they are live as version `global_steps`.
        Requests continue meanwhile.

        Raises `WeightUpdateError`, with the old version still live, for names, shapes or types that
        differ from the model's, another `wire_format`, or a LoRA adapter.
        """
        if wire_format != "named_tensors":
            raise WeightUpdateError(f"wire_format must be 'named_tensors'; got {wire_format!r}.")
        if options.get("peft_config") and options.get("base_sync_done"):
            raise WeightUpdateError(
                "LoRA adapters are not supported without merging; set model.lora.merge=True."
            )
        max_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        number = await self._call("begin_update", global_steps)
        under_way: list[Any] = []  # one bucket is sent while the next is gathered
        try:
            async for parcel in parcels(weights, max_bytes):
                await _answers(under_way)
                under_way = [self._begin("receive", number, *parcel)]
            await _answers(under_way)
            await self._call("finish_update", number)
        except BaseException:
            await self._call("cancel_update", number)
            raise

    async def _call(self, method: str, *args: Any) -> Any:
        (answer,) = await _answers([self._begin(method, *args)])
        return answer

    def _begin(self, method: str, *args: Any) -> Any:
        """Call the actor and return Ray's reference to the reply. The caller may modify the
        arguments afterwards.
        """
        if self._actor is None:  # a hybrid engine starts the actor after this object
            self._actor = ray.get_actor(actor_name(self.replica_rank))
        return getattr(self._actor, method).remote(*args)


async def _answers(calls: list[Any]) -> list[Any]:
    return [await asyncio.wait_for(call, TIMEOUT) for call in calls]
