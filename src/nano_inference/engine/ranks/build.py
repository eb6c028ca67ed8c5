"""A rank's part of an engine: its groups, its share of the machine, what it must agree on with the
others.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed

from nano_inference.config import EngineConfig
from nano_inference.engine.assembly import EnginePlan, Rank
from nano_inference.engine.memory import MemoryBudget
from nano_inference.engine.ranks.messages import Size
from nano_inference.models.joints import Joints
from nano_inference.models.part import ModelPart
from nano_inference.models.shares import mesh_of
from nano_inference.parallel.clock import RankClock
from nano_inference.parallel.collectives import Group, ProcessGroup
from nano_inference.parallel.mesh import Place

dist: Any = torch.distributed

MakeGroup = Callable[[str, tuple[int, ...]], Group]  # of a name and the ranks in it


def config_here(config: EngineConfig, ranks_here: int, local_rank: int) -> EngineConfig:
    """The config as one of several ranks on a machine takes it: with its share of the cores, and
    its own card.

    No step is captured into a CUDA graph: what ranks exchange is not part of one.
    """
    threads = config.num_threads
    if threads is None:
        threads = max(1, (psutil.cpu_count(logical=False) or torch.get_num_threads()) // ranks_here)
    device = config.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{local_rank}"
    return replace(config, num_threads=threads, device=device, cuda_graphs=False)


def digest_of(plan: EnginePlan) -> str:
    """What the models' configurations say: ranks whose digests differ read other models."""
    return hashlib.sha256(repr(sorted(plan.specs.items())).encode()).hexdigest()


def rank_of(
    config: EngineConfig, rank: int, ranks_here: int, make: MakeGroup, agree: Callable[[Size], Size]
) -> Rank:
    """One rank of an engine, with the groups that it is in."""
    place = Place(mesh_of(config), rank)
    groups = {
        name: make(name, peers) if len(peers) > 1 else None
        for name, peers in (
            ("tensor", place.tensor_peers),
            ("pipeline", place.pipeline_peers),
            ("context", place.context_peers),
        )
    }

    clock = RankClock()

    def joints(part: ModelPart) -> Joints:
        return Joints(part, **groups, clock=clock)

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

    return Rank(place, ranks_here, joints, agreed)


def least(sizes: list[Size]) -> Size:
    """The KV cache that every rank can have."""
    smallest = min(sizes, key=lambda size: (size.num_units, size.num_blocks))
    return Size(smallest.num_blocks, smallest.num_units, min(size.max_model_len for size in sizes))


def process_groups(
    meeting: str, rank: int, device: torch.device, patience: float, host: str
) -> tuple[MakeGroup, list[ProcessGroup]]:
    """How groups of processes are made that meet at "file:PATH" or "tcp:HOST:PORT", and all that
    were made.
    """
    kind, _, where = meeting.partition(":")
    if kind == "file":
        store = dist.FileStore(where, -1)
    else:
        address, _, port = where.rpartition(":")
        store = _joined(address, int(port), patience)
    made: list[ProcessGroup] = []

    def make(name: str, peers: tuple[int, ...]) -> Group:
        room = dist.PrefixStore(f"{name}/{'-'.join(map(str, peers))}", store)
        made.append(ProcessGroup(room, peers.index(rank), len(peers), device, patience, host))
        return made[-1]

    return make, made


def _joined(address: str, port: int, patience: float) -> Any:
    from datetime import timedelta

    return dist.TCPStore(
        address, port, None, False, timedelta(seconds=patience), wait_for_workers=False
    )
