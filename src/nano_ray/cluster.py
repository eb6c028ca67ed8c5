"""Where replicas run: what a rank needs of a node, and the placement group that holds it."""
# pyright: reportMissingImports=false

import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError, EngineDead

LOOK = 0.2  # seconds between two looks


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one rank of a replica takes of its node, as Ray counts it."""

    cpus: float
    gpus: float

    @property
    def bundle(self) -> dict[str, float]:
        """As a placement group wants it."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def connect(address: str | None) -> bool:
    """Connect this process to a cluster; whether it was not yet.

    None: the one that `RAY_ADDRESS` names, or one that starts on this machine. Raises `EngineDead`.
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
    """What a rank takes: on a CPU as many cores as it has threads (1 unless told), on a GPU a whole
    one and a core.

    `device="auto"` is a GPU where the cluster has any. Raises `ConfigError`.
    """
    if config.expert_parallel > config.tensor_parallel:
        raise ConfigError(
            f"expert_parallel={config.expert_parallel} with "
            f"tensor_parallel={config.tensor_parallel}: engines in "
            "lockstep do not run on Ray; give each replica as many tensor ranks."
        )
    kind, _, number = config.device.partition(":")
    if number:
        raise ConfigError(
            f"device={config.device!r}: on Ray a replica gets its GPU from Ray; say "
            f"device={kind!r}."
        )
    on_gpu = kind == "cuda" or (kind == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    gpus = gpus_per_rank if gpus_per_rank is not None else float(on_gpu)
    if on_gpu != (gpus > 0):
        raise ConfigError(f"gpus_per_rank={gpus_per_rank!r} does not fit device={config.device!r}.")
    cpus = (
        cpus_per_rank
        if cpus_per_rank is not None
        else 1.0
        if on_gpu
        else float(config.num_threads or 1)
    )
    if not cpus > 0:
        raise ConfigError(
            f"cpus_per_rank={cpus_per_rank!r} must be above 0: Ray puts no bound on what takes "
            "nothing."
        )
    return RankNeeds(cpus, gpus)


def rank_config(config: EngineConfig, needs: RankNeeds) -> EngineConfig:
    """The configuration of a rank: the device and the threads that were reserved for it."""
    threads = config.num_threads if config.num_threads is not None else max(1, int(needs.cpus))
    # The only GPU that Ray shows to a rank is its first.
    return replace(config, device="cuda:0" if needs.gpus else "cpu", num_threads=threads)


def num_ranks(config: EngineConfig) -> int:
    """Of one replica."""
    return config.tensor_parallel * config.pipeline_parallel * config.context_parallel


class Placement:
    """The place of one replica: all its ranks on one node. When the node dies, Ray finds it another
    one.

    Args:
        needs: of each rank.
        num_ranks: of the replica.
    """

    def __init__(self, needs: RankNeeds, num_ranks: int) -> None:
        self.needs, self.num_ranks = needs, num_ranks
        self._is_given_up = False
        self._group: PlacementGroup = placement_group(
            [needs.bundle] * num_ranks, strategy="STRICT_PACK"
        )

    def wait(self, seconds: float) -> None:
        """Until there is room. Raises `EngineDead` that says what is missing, and gives the place
        up.
        """
        until = time.monotonic() + seconds
        while not self._group.wait(LOOK):
            if self._is_given_up:
                raise EngineDead("the place of a replica was given up before there was room.")
            if time.monotonic() > until:
                self.remove()
                ranks = f"{self.num_ranks} ranks" if self.num_ranks > 1 else "one rank"
                raise EngineDead(
                    f"no node has had room for a replica within {seconds:g} s: {ranks} of "
                    f"{self.needs.bundle} on one "
                    f"node; free in the whole cluster are {_counted(ray.available_resources())}."
                )

    def options(self, rank: int) -> dict[str, Any]:
        """Of the actor that is a rank."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return {
            "num_cpus": self.needs.cpus,
            "num_gpus": self.needs.gpus,
            "scheduling_strategy": strategy,
        }

    def remove(self) -> None:
        """Give the place back; what runs there ends, and what waits for it."""
        self._is_given_up = True
        if ray.is_initialized():
            remove_placement_group(self._group)


def _counted(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
