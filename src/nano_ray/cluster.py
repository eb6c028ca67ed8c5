"""Resources of a rank, and the placement group that reserves them for a replica."""
# pyright: reportMissingImports=false

import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError, EngineDead

LOOK = 0.2  # seconds between two checks


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """Resources of one rank of a replica, as Ray counts them."""

    cpus: float
    gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        """Bundle of a placement group."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def connect(address: str | None) -> bool:
    """Connect this process to a Ray cluster. Return False if it was already connected.

    `address=None` uses `RAY_ADDRESS`, or starts a cluster on this machine. Raises `EngineDead`.
    """
    if ray.is_initialized():
        return False
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as problem:
        raise EngineDead(
            f"there is no Ray cluster at {address or 'this machine'}: {problem}"
        ) from problem
    return True


def rank_needs(
    config: EngineConfig, cpus_per_rank: float | None, gpus_per_rank: float | None
) -> RankNeeds:
    """Return the resources of a rank: one core per thread on a CPU (default: 1), one GPU and one
    core on a GPU.

    `device="auto"` is a GPU if the cluster has any. Raises `ConfigError`.
    """
    if config.expert_parallel > config.tensor_parallel:
        raise ConfigError(
            f"expert_parallel={config.expert_parallel} with "
            f"tensor_parallel={config.tensor_parallel}: engines in "
            "lockstep are not supported on Ray; set tensor_parallel to the same number."
        )
    kind, _, number = config.device.partition(":")
    if number:
        raise ConfigError(
            f"device={config.device!r}: Ray assigns the GPU of a replica; set device={kind!r}."
        )
    on_gpu = kind == "cuda" or (kind == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    gpus = gpus_per_rank if gpus_per_rank is not None else float(on_gpu)
    if on_gpu != (gpus > 0):
        raise ConfigError(f"gpus_per_rank={gpus_per_rank!r} contradicts device={config.device!r}.")
    cpus = (
        cpus_per_rank
        if cpus_per_rank is not None
        else 1.0
        if on_gpu
        else float(config.num_threads or 1)
    )
    if not cpus > 0:
        raise ConfigError(
            f"cpus_per_rank={cpus_per_rank!r} must be above 0; otherwise Ray does not limit the "
            "ranks on a node."
        )
    return RankNeeds(cpus, gpus)


def rank_config(config: EngineConfig, needs: RankNeeds) -> EngineConfig:
    """Return the configuration of a rank with its reserved device and threads."""
    threads = config.num_threads if config.num_threads is not None else max(1, int(needs.cpus))
    # Ray shows each rank only its own GPU, which is therefore number 0.
    return replace(config, device="cuda:0" if needs.gpus else "cpu", num_threads=threads)


def num_ranks(config: EngineConfig) -> int:
    """Return the number of ranks of a replica."""
    return config.tensor_parallel * config.pipeline_parallel * config.context_parallel


class Placement:
    """Placement group of one replica, with all ranks on one node. If the node dies, Ray chooses
    another one.

    Args:
        needs: Resources of each rank.
        num_ranks: Number of ranks of the replica.
    """

    def __init__(self, needs: RankNeeds, num_ranks: int) -> None:
        self.needs, self.num_ranks = needs, num_ranks
        self._is_given_up = False
        self._group: PlacementGroup = placement_group(
            [needs.bundle] * num_ranks, strategy="STRICT_PACK"
        )

    def wait(self, seconds: float) -> None:
        """Wait until the resources are reserved. On timeout remove the group and raise
        `EngineDead` with the missing resources.
        """
        until = time.monotonic() + seconds
        while not self._group.wait(LOOK):
            if self._is_given_up:
                raise EngineDead("the placement of a replica was cancelled before a node had room.")
            if time.monotonic() > until:
                self.remove()
                ranks = f"{self.num_ranks} ranks" if self.num_ranks > 1 else "one rank"
                raise EngineDead(
                    f"no node had room for a replica within {seconds:g} s: it needs {ranks} of "
                    f"{self.needs.bundle} on one node, and the whole cluster has "
                    f"{_counted(ray.available_resources())} free."
                )

    def options(self, rank: int) -> dict[str, Any]:
        """Return the options of a rank's actor."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return {
            "num_cpus": self.needs.cpus,
            "num_gpus": self.needs.gpus,
            "scheduling_strategy": strategy,
        }

    def remove(self) -> None:
        """Release the resources. Actors in the group end, and `wait` raises."""
        self._is_given_up = True
        if ray.is_initialized():
            remove_placement_group(self._group)


def _counted(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
