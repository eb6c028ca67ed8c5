"""A re-raised error is not its own cause: a loop over `__cause__` must end."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nano_inference import WeightUpdateError
from nano_inference.errors import RankLost
from nano_inference.ranks.runner import RankedRunner
from tests.weights.weight_cases import NORM, Build


def test_rejected_bucket_is_not_its_own_cause(build: Build) -> None:
    manager = build().weight_sync
    manager.begin()
    with pytest.raises(WeightUpdateError, match="shape") as raised:
        manager.receive({NORM: torch.ones(3)})
    assert raised.value.__cause__ is not raised.value


def test_lost_rank_is_not_its_own_cause() -> None:
    group = SimpleNamespace(explain=lambda problem: problem)
    runner = cast(RankedRunner, SimpleNamespace(worker_group=group))

    def lose() -> None:
        raise RankLost("rank 1 is gone.")

    with pytest.raises(RankLost) as raised:
        RankedRunner._together(runner, lose)
    assert raised.value.__cause__ is not raised.value


@pytest.mark.parametrize("call", ["add", "finish"])
def test_rejected_ray_fleet_update_is_not_its_own_cause(call: str) -> None:
    pytest.importorskip("ray")
    from nano_ray.fleet_client import RayUpdate

    async def refuse(name: str, **_: Any) -> None:
        raise WeightUpdateError("it is refused.")

    async def main() -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        update = RayUpdate(cast(Any, SimpleNamespace(call=refuse)), 1, 0, lock)
        await (update.add({}) if call == "add" else update.finish(None, "keep", 1.0))

    with pytest.raises(WeightUpdateError, match="it is refused") as raised:
        asyncio.run(main())
    assert raised.value.__cause__ is not raised.value
