"""Drive a replica with verl's own manager, balancer, clients and weight update, on a one-machine
Ray.

Run by the interpreter of an environment with verl and Ray, because verl needs an older transformers
than the other tests. Arguments: a model folder, a folder with `step4.safetensors` and so on, and a
folder to hand weights over. Prints one line of JSON.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
from handed import Handed
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

FOLDER, STEPS, HANDED = sys.argv[1:]
PATIENCE = 300.0  # timeout in seconds for every wait
PROMPT = [5, 6, 7, 8, 9]
PARAMS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}
SEEDED = PARAMS | {"seed": 3, "ignore_eos": True}
OVERRIDES = [
    "actor_rollout_ref.rollout.name=nano",
    f"actor_rollout_ref.model.path={FOLDER}",
    "+actor_rollout_ref.model.load_tokenizer=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.prompt_length=100",
    "actor_rollout_ref.rollout.response_length=400",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "+actor_rollout_ref.rollout.engine_kwargs.nano.num_threads=1",
    f"+actor_rollout_ref.rollout.engine_kwargs.nano.kv_cache_memory={2**23}",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=handed",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
    "+actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=handed",
    f"+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.handed.path={HANDED}",
]


@ray.remote
class Trainer(Worker):
    """The trainer's side of verl's weight update."""

    def __init__(self, steps: str, path: str) -> None:
        super().__init__()
        self.steps, self.engine = Path(steps), Handed(0, path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> None:
        await self.engine.send_weights(
            iter(load_file(self.steps / f"step{global_steps}.safetensors").items()), global_steps
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


def told(output: Any) -> dict[str, Any]:
    return output.model_dump(include={"token_ids", "log_probs", "stop_reason", "extra_fields"})


async def sampled(server: Any, least: int) -> None:
    """Wait until the engine has sampled at least `least` more tokens."""

    async def count() -> int:
        return (await server.collective_rpc.remote("stats")).completion_tokens

    first = await count()
    while await count() < first + least:
        await asyncio.sleep(0.01)


async def whole(client: Any, seen: dict[str, Any]) -> None:
    """Run a request uninterrupted, one with defaults, and one with an unknown parameter."""
    seen["whole"] = told(
        await client.generate("a", prompt_ids=PROMPT, sampling_params=SEEDED | {"max_tokens": 300})
    )
    seen["plain"] = told(
        await client.generate("b", prompt_ids=PROMPT, sampling_params=dict(PARAMS))
    )
    try:
        await client.generate("c", prompt_ids=PROMPT, sampling_params=PARAMS | {"stop_regex": "x"})
    except ray.exceptions.RayTaskError as problem:
        seen["unknown"] = str(problem.cause)


async def interrupted(manager: LLMServerManager, seen: dict[str, Any]) -> None:
    """Abort in the middle. verl's client for partial rollouts resubmits the partial sample."""
    (replica,) = manager.get_replicas()
    client = manager.get_client(FullyAsyncLLMServerClient)
    params = SEEDED | {"max_tokens": 300}
    running = asyncio.create_task(client.generate("d", prompt_ids=PROMPT, sampling_params=params))
    await sampled(replica.server_handle, 20)
    seen["aborted"] = (await replica.abort_all_requests())["aborted_count"]
    await asyncio.sleep(1.5)  # the client has resubmitted its request, which is parked
    seen["parked"] = not running.done()
    await replica.resume_generation()
    seen["interrupted"] = told(await running)

    running = asyncio.create_task(
        manager.get_client().generate("e", prompt_ids=PROMPT, sampling_params=params)
    )
    await sampled(replica.server_handle, 20)
    await replica.abort_all_requests(reject_request=True)
    seen["partial"] = told(await running)
    seen["rejected"] = told(
        await manager.get_client().generate("f", prompt_ids=PROMPT, sampling_params=params)
    )
    await replica.resume_generation()


async def updated(manager: LLMServerManager, seen: dict[str, Any]) -> None:
    """Run verl's weight update around requests, and through the adapter during requests."""
    (replica,) = manager.get_replicas()
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    trainer = RayWorkerGroup(pool, RayClassWithInitArgs(Trainer, STEPS, HANDED), bin_pack=False)
    config = omega_conf_to_dataclass(manager.rollout_config.checkpoint_engine)
    checkpoints = CheckpointEngineManager(config, trainer, manager.get_replicas())
    client = manager.get_client(FullyAsyncLLMServerClient)
    params = SEEDED | {"max_tokens": 300}
    await checkpoints.update_weights(global_steps=4)
    running = asyncio.create_task(client.generate("g", prompt_ids=PROMPT, sampling_params=params))
    await sampled(replica.server_handle, 20)
    await checkpoints.update_weights(global_steps=5)
    seen["across"] = told(await running)

    server = replica.server_handle
    running = asyncio.create_task(
        manager.get_client().generate("h", prompt_ids=PROMPT, sampling_params=params)
    )
    await sampled(server, 20)
    ray.get(trainer.update_weights(global_steps=6), timeout=PATIENCE)
    # verl's checkpoint engine, then the adapter
    await replica.workers[0].update_weights.remote(global_steps=6)
    seen["under_way"] = not running.done()
    seen["under"] = told(await running)
    seen["after"] = told(await client.generate("i", prompt_ids=PROMPT, sampling_params=params))
    seen["version"] = await server.collective_rpc.remote("get_weight_version")

    (Path(HANDED) / "7").write_bytes(b"no weights")
    try:
        await replica.workers[0].update_weights.remote(global_steps=7)
    except ray.exceptions.RayTaskError as problem:
        seen["broken"] = type(problem.cause).__name__
    seen["still"] = (
        told(await client.generate("j", prompt_ids=PROMPT, sampling_params=params)) == seen["after"]
    )


async def slept(config: Any, seen: dict[str, Any]) -> None:
    """Put a replica that shares its device to sleep during a request, and wake it."""
    rollout = config.actor_rollout_ref.rollout
    replica = get_rollout_replica_class("nano")(
        1, rollout, config.actor_rollout_ref.model, gpus_per_node=1
    )
    await replica.init_colocated(RayResourcePool([1], use_gpu=True, max_colocate_count=1))
    request = {
        "prompt_ids": PROMPT,
        "sampling_params": SEEDED | {"max_tokens": 300},
        "request_id": "k",
    }
    running = replica.server_handle.generate.remote(**request)
    await sampled(replica.server_handle, 20)
    await replica.sleep()
    ready, _ = ray.wait([running], timeout=1)
    seen["asleep"] = not ready
    await replica.wake_up()
    seen["slept"] = told(await running)


async def refused(config: Any) -> str:
    """Return the error of a replica of two processes."""
    rollout = OmegaConf.merge(config.actor_rollout_ref.rollout, {"tensor_model_parallel_size": 2})
    replica = get_rollout_replica_class("nano")(
        9, rollout, config.actor_rollout_ref.model, gpus_per_node=2
    )
    try:
        await replica.launch_servers()
    except ValueError as problem:
        return str(problem)
    return "nothing"


async def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=OVERRIDES)
    seen["two"] = await refused(config)
    ray.init(num_cpus=6, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        manager = await asyncio.wait_for(LLMServerManager.create(config), PATIENCE)
        seen["addresses"] = manager.get_addresses()
        for scene in (
            whole(manager.get_client(), seen),
            interrupted(manager, seen),
            updated(manager, seen),
        ):
            await asyncio.wait_for(scene, PATIENCE)
        await asyncio.wait_for(slept(config, seen), PATIENCE)
    finally:
        ray.shutdown()
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
