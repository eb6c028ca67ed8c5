"""Assembly of an engine of several ranks: start workers, build all parts, agree on the KV cache."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nano_inference.checkpoints.shard_checks import mesh_of
from nano_inference.config import EngineConfig
from nano_inference.device.backends import choose_device
from nano_inference.device.memory import MemoryBudget
from nano_inference.errors import ConfigError, RankLost, WeightUpdateError
from nano_inference.models.sharding.rank_exchange import RankClock, RankExchange
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.parallel.mesh import AXES, Place
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.ranks.build import EnginePlan, Rank, plan_engine
from nano_inference.ranks.launcher import Handle, Launcher, LocalLauncher
from nano_inference.ranks.messages import Build, Size
from nano_inference.ranks.parts import Parts, assemble
from nano_inference.ranks.rendezvous import Rendezvous
from nano_inference.ranks.runner import RankedRunner
from nano_inference.ranks.worker_group import WorkerGroup
from nano_inference.system.machine import usable_cores
from nano_inference.system.version import __version__
from nano_inference.weights.transports.rendezvous import serve_store

logger = logging.getLogger("nano_inference")

dist: Any = torch.distributed

MEET_SECONDS = 120.0  # timeout of the other ranks' start

MakeGroup = Callable[[str, tuple[int, ...]], ProcessGroup]  # arguments: name, ranks


def assemble_ranks(
    config: EngineConfig, launcher: Launcher | None = None, meet_seconds: float = MEET_SECONDS
) -> Parts:
    """Load rank 0's part of an engine, and let all other ranks load theirs.

    Args:
        config: Config of the engine, whose mesh has more than one rank.
        launcher: Launcher of the other ranks. None means this machine.
        meet_seconds: Timeout of their start in seconds.

    Raises `ConfigError` or `ModelLoadError` after all ranks have ended.
    """
    launcher = launcher if launcher is not None else LocalLauncher()
    world_size = mesh_of(config).world_size
    ranks_here = launcher.ranks_here(world_size)
    local_config = config_here(config, ranks_here, 0)
    plan = plan_engine(local_config)  # report errors of the config before any rank starts
    rendezvous = Rendezvous(launcher, world_size, __version__)
    handles: Sequence[Handle] = []
    worker_group: WorkerGroup | None = None
    try:
        handles = launcher.start(rendezvous.begins())
        worker_group = WorkerGroup(
            rendezvous.collect(handles, meet_seconds), handles, config.rank_timeout
        )
        where, _store = _place_of_groups(rendezvous, launcher)  # keep it until all are connected
        build = Build(
            config,
            digest_of(plan),
            plan.numerics.fingerprint,
            where,
            ranks_here,
            config.rank_timeout,
        )
        worker_group.begin(build)
        parts = _built(local_config, worker_group, where, ranks_here, launcher.host or "")
        worker_group.require_built()
        return parts
    except BaseException as problem:
        if worker_group is not None:
            worker_group.kill()
        for handle in handles:
            with suppress(OSError):
                if handle.alive():
                    handle.kill()
        if isinstance(problem, RankLost):
            raise ConfigError(f"building the engine failed: {problem}.") from problem
        raise
    finally:
        rendezvous.close()


def _built(
    config: EngineConfig, worker_group: WorkerGroup, where: str, ranks_here: int, host: str
) -> Parts:
    """Return rank 0's part.

    An error of another rank takes precedence over its consequences here.
    """

    def agree(size: Size) -> Size:
        agreed = least([size, *worker_group.sizes()])
        worker_group.tell(agreed)
        return agreed

    try:
        make, groups = process_groups(
            where, 0, choose_device(config.device), worker_group.timeout, host
        )
        parts = assemble(config, rank=rank_of(config, 0, ranks_here, make, agree))
    except RankLost as problem:
        worker_group.require_no_refusal()
        lost = worker_group.explain(problem)
        if lost is problem:
            raise
        raise lost from problem
    runner = RankedRunner(parts.runner, worker_group, groups, config.block_size, parts.cache.units)
    return replace(parts, runner=runner)


def _place_of_groups(rendezvous: Rendezvous, launcher: Launcher) -> tuple[str, Any]:
    """Return the rendezvous address of process groups: a file in a private folder, or a store."""
    if rendezvous.folder is not None:
        return f"file:{rendezvous.folder}/groups", None
    assert launcher.host is not None
    try:
        store = serve_store((launcher.host, 0), MEET_SECONDS)
    except WeightUpdateError as problem:
        raise ConfigError(f"cannot start the store that connects the ranks: {problem}") from problem
    return f"tcp:{launcher.host}:{store.port}", store


def config_here(config: EngineConfig, ranks_here: int, local_rank: int) -> EngineConfig:
    """Return the config of one of several ranks on a machine, with its share of cores and its
    GPU.
    """
    threads = config.num_threads
    if threads is None:
        threads = max(1, usable_cores() // ranks_here)
    device = config.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{local_rank}"
    return replace(config, num_threads=threads, device=device)


def digest_of(plan: EnginePlan) -> str:
    """Return a digest of the models' specifications.

    Ranks with different digests have read different models.
    """
    return hashlib.sha256(repr(sorted(plan.specs.items())).encode()).hexdigest()


def rank_of(
    config: EngineConfig, rank: int, ranks_here: int, make: MakeGroup, agree: Callable[[Size], Size]
) -> Rank:
    """Return one rank of an engine with its process groups."""
    mesh_place = Place(mesh_of(config), rank)
    peers = {axis: mesh_place.peers(axis) for axis in AXES}
    groups = {axis: make(axis, each) if len(each) > 1 else None for axis, each in peers.items()}
    clock = RankClock()

    def rank_exchange(part: ModelShard) -> RankExchange:
        return RankExchange(part, **groups, clock=clock)

    def agreed(budget: MemoryBudget) -> MemoryBudget:
        size = agree(Size(budget.num_blocks, budget.num_units, budget.max_model_len))
        unit = budget.kv_cache // budget.num_units
        return replace(
            budget,
            num_blocks=size.num_blocks,
            num_units=size.num_units,
            max_model_len=size.max_model_len,
            kv_cache=unit * size.num_units,
        )

    return Rank(mesh_place, ranks_here, rank_exchange, agreed)


def least(sizes: list[Size]) -> Size:
    """Return the size of the KV cache that fits on every rank."""
    smallest = min(sizes, key=lambda size: (size.num_units, size.num_blocks))
    return Size(smallest.num_blocks, smallest.num_units, min(size.max_model_len for size in sizes))


def process_groups(
    meeting: str, rank: int, device: torch.device, patience: float, host: str
) -> tuple[MakeGroup, list[ProcessGroup]]:
    """Return a factory for process groups whose rendezvous is "file:PATH" or "tcp:HOST:PORT".

    The second value lists all groups that the factory has made.
    """
    kind, _, where = meeting.partition(":")
    if kind == "file":
        store = dist.FileStore(where, -1)
    else:
        address, _, port = where.rpartition(":")
        store = dist.TCPStore(
            address, int(port), None, False, timedelta(seconds=patience), wait_for_workers=False
        )
    made: list[ProcessGroup] = []

    def make(name: str, peers: tuple[int, ...]) -> ProcessGroup:
        room = dist.PrefixStore(f"{name}/{'-'.join(map(str, peers))}", store)
        made.append(ProcessGroup.meet(room, peers.index(rank), len(peers), device, patience, host))
        return made[-1]

    return make, made
