"""`RayLauncher`: the other ranks of a replica as actors beside rank 0, in the replica's placement
group.
"""
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

KILL_PATIENCE = 5.0  # seconds for Ray to say that a killed actor has ended


class RankActor:
    """A process that is a rank."""

    def be(self, begin: bytes) -> None:
        """Be that rank, until rank 0 ends it."""
        from nano_inference.ranks import run_worker

        run_worker(msgspec.msgpack.decode(begin, type=Begin))


class RayLauncher:
    """See `ranks.launcher.Launcher`. Of the actor that is rank 0, in its process.

    All ranks of a replica are on one node: they meet at a socket in a folder. They end with rank 0,
    to whose process Ray ties them.
    """

    host: str | None = None
    port = 0

    def ranks_here(self, world_size: int) -> int:
        """How many ranks share what a rank sees of the machine: all, but on GPUs, of which Ray
        shows each its own.
        """
        return 1 if ray.get_gpu_ids() else world_size

    def start(self, begins: Sequence[Begin]) -> list["RankHandle"]:
        """See `Launcher`. Raises `ConfigError` outside of a placement group, which has a place for
        each.
        """
        group = get_current_placement_group()
        if group is None:
            raise ConfigError(
                "this process was not placed by a RayFleet; its other ranks have no place."
            )
        return [RankHandle(begin, group) for begin in begins]


class RankHandle:
    """See `ranks.launcher.Handle`."""

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
        """See `Handle`."""
        ready, _ = ray.wait([self._ended], timeout=0)
        return not ready

    def ended(self) -> str:
        """See `Handle`."""
        if self.alive():
            return "runs"
        try:
            ray.get(self._ended, timeout=KILL_PATIENCE)
        except Exception as problem:  # whatever it raised, or that it died
            lines = str(getattr(problem, "cause", None) or problem).strip().splitlines()
            return f"has ended: {lines[0] if lines else type(problem).__name__}"
        return "has ended"

    def kill(self) -> None:
        """See `Handle`."""
        with suppress(RayError):
            ray.kill(self._actor)
            ray.wait([self._ended], timeout=KILL_PATIENCE)
