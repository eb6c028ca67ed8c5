"""`nano-inference serve --ray`: the server in this process, its replicas on the nodes of a
cluster.
"""
# pyright: reportMissingImports=false

import ray

from nano_inference.checkpoints import require_shardable
from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError
from nano_inference.server import ServerConfig, serve
from nano_ray.cluster import connect, rank_needs
from nano_ray.fleet_client import RayFleetClient


def serve_on_ray(engine: EngineConfig, config: ServerConfig, address: str | None = None) -> None:
    """As `server.main.serve`. Each of `config.replicas` is an actor; Ray finds it a node, and
    another one when that dies and `config.restart_engine` asks for it.

    Raises `ConfigError` for `config.in_process`, and `EngineDead` if there is no cluster at
    `address`.
    """
    if config.in_process:
        raise ConfigError("in_process=True: on Ray every engine has a process of its own.")
    require_shardable(engine)
    was_ours = connect(address)
    try:
        client = RayFleetClient(
            engine,
            rank_needs(engine, None, None),
            config.replicas,
            config.max_backlog,
            restart=config.restart_engine,
            stall_timeout=config.stall_timeout,
            prefill_replicas=config.prefill_replicas,
            share_prefixes=config.share_prefixes,
        )
        serve(client, config)
    finally:
        if was_ours:
            ray.shutdown()
