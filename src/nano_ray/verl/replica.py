"""`NanoReplica`: a verl replica, which starts the engine's actor and forwards verl's calls."""
# pyright: reportMissingImports=false

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.utils.net_utils import is_valid_ipv6_address
from verl.workers.rollout.replica import RolloutReplica

from nano_inference.errors import ConfigError
from nano_ray.verl.actor import NanoServer
from nano_ray.verl.settings import require_able


def actor_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Return the name by which the trainer's process finds a replica's actor."""
    return f"nano_server_{kind}{replica_rank}_0{suffix}"


class NanoReplica(RolloutReplica):
    """One engine in one actor, on the node and device of the replica's worker."""

    async def launch_servers(self) -> None:
        """Start the actor and load the model. Raises `ConfigError` for unsupported options."""
        require_able(self.config)
        if self.is_reward_model:
            raise ConfigError(
                "reward models need an HTTP server, which this rollout does not have; choose "
                "another rollout."
            )
        (worker,) = self.workers
        node_id, devices = await worker.__ray_call__.remote(_where)
        kind = "teacher_" if self.is_teacher_model else ""
        platform = get_platform()
        variables = {
            **dict.fromkeys(platform.ray_noset_envvars(), "1"),
            **platform.rollout_env_vars(),
            get_visible_devices_keyword(): devices,
        }
        server = (
            ray.remote(NanoServer)
            .options(
                name=actor_name(self.replica_rank, kind, self.name_suffix),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": variables},
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.rollout_mode.value, self.replica_rank)
        )
        self.servers = [server]
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self._server_handle = server
        self._server_address = (
            f"[{host}]:{port}" if is_valid_ipv6_address(host) else f"{host}:{port}"
        )

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort all requests of the replica."""
        return await self.servers[0].abort_all_requests.remote(reject_request=reject_request)

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Abort one request of the replica."""
        return await self.servers[0].abort_request.remote(request_id)


def _where(_: Any) -> tuple[str, str]:
    """Return the node and the devices of the worker that calls this."""
    context = ray.get_runtime_context()
    return context.get_node_id(), ",".join(
        context.get_accelerator_ids().get(get_resource_name(), [])
    )
