"""`nano-inference serve --ray`: a server in this process with replicas on a Ray cluster."""
# pyright: reportMissingImports=false

import ray

from nano_inference.checkpoints import require_shardable
from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError
from nano_inference.server import Door, ServerConfig, serve
from nano_ray.cluster import connect, rank_needs
from nano_ray.fleet_client import RayFleetClient


def serve_on_ray(
    engine: EngineConfig,
    config: ServerConfig,
    address: str | None = None,
    door: Door | None = None,
) -> None:
    """Serve like `server.main.serve`, with `config.replicas` actors on nodes that Ray chooses. If a
    node dies and `config.restart_engine` is set, Ray chooses another one.

    Raises `ConfigError` for `config.in_process`, and `EngineDead` if there is no cluster at
    `address`.
    """
    if config.in_process:
        raise ConfigError(
            "in_process=True is not supported on Ray; every engine has its own process."
        )
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
        serve(client, config, door)
    finally:
        if was_ours:
            ray.shutdown()
