"""`RayLauncher`: the other ranks of a replica as actors in the placement group of rank 0."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_inference.errors import ConfigError
from nano_inference.ranks import Begin

KILL_PATIENCE = 5.0  # timeout in seconds for Ray to report the end of a killed actor


class RankActor:
    """A Ray process that runs a rank."""

    def be(self, begin: bytes) -> None:
        """Run the rank of `begin` until rank 0 ends it."""
        from nano_inference.ranks import run_worker

        run_worker(msgspec.msgpack.decode(begin, type=Begin))


class RayLauncher:
    """A `ranks.launcher.Launcher` in the process of rank 0's actor.

    All ranks of a replica are on one node, since they connect by a Unix socket. Ray ends them
    together with the process of rank 0.
    """

    host: str | None = None
    port = 0

    def ranks_here(self, world_size: int) -> int:
        """Return how many ranks share the visible devices: all on a CPU, one on GPUs, since Ray
        shows each rank only its own.
        """
        return 1 if ray.get_gpu_ids() else world_size

    def start(self, begins: Sequence[Begin]) -> list["RankHandle"]:
        """Start the ranks in their bundles of the placement group. Raises `ConfigError` if there is
        no group.
        """
        group = get_current_placement_group()
        if group is None:
            raise ConfigError(
                "this process was not started by a RayFleet, so its other ranks cannot be placed."
            )
        return [RankHandle(begin, group) for begin in begins]


class RankHandle:
    """A `ranks.launcher.Handle` of a rank's actor."""

    def __init__(self, begin: Begin, group: Any) -> None:
        bundle = group.bundle_specs[begin.rank]
        self._actor = (
            ray.remote(RankActor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=begin.rank
                ),
            )
            .remote()
        )
        self._ended = self._actor.be.remote(msgspec.msgpack.encode(begin))

    def alive(self) -> bool:
        """Return True while the rank runs."""
        ready, _ = ray.wait([self._ended], timeout=0)
        return not ready

    def ended(self) -> str:
        """Describe how the rank ended."""
        if self.alive():
            return "runs"
        try:
            ray.get(self._ended, timeout=KILL_PATIENCE)
        except Exception as problem:  # the rank's own error, or Ray's report of its death
            lines = str(getattr(problem, "cause", None) or problem).strip().splitlines()
            return f"has ended: {lines[0] if lines else type(problem).__name__}"
        return "has ended"

    def kill(self) -> None:
        """Kill the rank and wait for its end."""
        with suppress(RayError):
            ray.kill(self._actor)
            ray.wait([self._ended], timeout=KILL_PATIENCE)
