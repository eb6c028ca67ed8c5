"""Adapters in a fleet: all replicas serve the same version, and prefixes belong to one adapter."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.errors import AdapterError, AdapterNotFound
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.kv_cache.block_hash import adapter_key
from nano_inference.remote.client import EngineClient
from nano_inference.remote.directory import names_of
from nano_inference.remote.in_process import InProcessClient
from nano_inference.types import AdapterInfo, SamplingParams, TrainingSample, VersionSpan
from tests.fleet.fleets import fleet, plain, play
from tests.server.adapters import adapter_folder
from tests.server.engines import config_of, finished, params_of, until

PROMPT = list(range(3, 40))
pytestmark = pytest.mark.usefixtures("slow_steps")


@asynccontextmanager
async def serving(model: Path, count: int, **options: Any) -> AsyncIterator[FleetClient]:
    threads = torch.get_num_threads()
    config = replace(config_of(model), max_loras=2)
    client = FleetClient(lambda _: InProcessClient(config, 4096), count, 4096, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()
        torch.set_num_threads(threads)


def with_adapter(tokens: int = 12, name: str | None = "own") -> SamplingParams:
    return replace(params_of(5, tokens), adapter=name)


async def load(client: EngineClient, folder: Path, name: str = "own", **more: Any) -> AdapterInfo:
    return await client.call("load_adapter", name=name, source=str(folder), **more)


async def sample(client: EngineClient, params: SamplingParams) -> TrainingSample:
    (one,) = await finished(client.submit(PROMPT, params, stream=True))
    return one


async def alone(model: Path, folder: Path, params: SamplingParams) -> TrainingSample:
    async with serving(model, 1) as client:
        await load(client, folder)
        return await sample(client, params)


async def moved_at(client: FleetClient, tokens: int) -> None:
    """Move the only request to another replica once it has more than `tokens` tokens."""
    (request,) = client.requests.values()
    await until(lambda: len(request.samples[0].token_ids) > tokens)
    living = client.supervisor.living()
    name = next(name for name, each in living.items() if each is request.client)
    client.drain(name, move=True)
    client.drain(name, draining=False)


def test_moved_sample_keeps_its_bits_and_adapter_versions(model: Path, tmp_path: Path) -> None:
    folder = adapter_folder(model, tmp_path, 1)

    async def test() -> None:
        expected = await alone(model, folder, with_adapter(150))
        async with serving(model, 2) as client:
            await load(client, folder)
            moving = client.submit(PROMPT, with_adapter(150), stream=True)
            for turn in range(4):
                await moved_at(client, 10 + 30 * turn)
            (moved,) = await finished(moving)
            assert plain(moved) == plain(expected)
            assert moved.adapter_versions == (VersionSpan(1, 0, 150),)

    play(test())


def test_moved_sample_reports_both_adapter_versions(model: Path, tmp_path: Path) -> None:
    folder, newer = (adapter_folder(model, tmp_path / str(seed), seed) for seed in (1, 2))

    async def test() -> None:
        async with serving(model, 2) as client:
            await load(client, folder)
            moving = client.submit(PROMPT, with_adapter(100), stream=True)
            await moved_at(client, 10)
            assert (await load(client, newer)).version == 2
            await moved_at(client, 20)
            (moved,) = await finished(moving)
            first, second = moved.adapter_versions
            assert (first.version, second.version, second.end) == (1, 2, 100)
            assert 10 < first.end == second.start < 100

    play(test())


def test_new_replica_has_the_adapter_as_loaded_not_as_on_disk(model: Path, tmp_path: Path) -> None:
    folder = adapter_folder(model, tmp_path, 1)

    async def test() -> None:
        expected = await alone(model, folder, with_adapter())
        async with serving(model, 1) as client:
            await load(client, folder)
            await load(client, folder, "gone")
            await client.call("unload_adapter", name="gone")
            adapter_folder(model, tmp_path, 2)  # the trainer's next step
            name = await client.add()
            client.drain("0")
            assert plain(await sample(client, with_adapter())) == plain(expected)
            new = client.supervisor.replicas[name].client
            assert await new.call("adapters") == await client.call("adapters")
            assert [each.name for each in await new.call("adapters")] == ["own"]
            client.drain("0", draining=False)
            # versions are never reused, even after the engine that had them is removed
            await client.remove("0")
            assert (await load(client, folder, "gone")).version == 2
            with pytest.raises(AdapterError, match="version=1 of adapter 'gone' must be above 2"):
                await load(client, folder, "gone", version=1)

    play(test())


def test_rejected_or_missing_adapter_changes_no_replica(model: Path, tmp_path: Path) -> None:
    good = adapter_folder(model, tmp_path / "good", 1)
    bad = adapter_folder(model, tmp_path / "bad", 1, width=1)

    async def test() -> None:
        async with serving(model, 2) as client:
            before = await load(client, good)
            with pytest.raises(AdapterError, match="belongs to another base model"):
                await load(client, bad)
            with pytest.raises(AdapterNotFound, match="'other' is not loaded"):
                await client.call("unload_adapter", name="other")
            with pytest.raises(AdapterNotFound, match="'other' is not loaded"):
                await sample(client, with_adapter(name="other"))
            assert len(client.supervisor.living()) == 2
            for replica in client.supervisor.living().values():
                assert await replica.call("adapters") == (before,)

    play(test())


def test_prefix_is_fetched_by_adapter(model: Path, tmp_path: Path) -> None:
    folder = adapter_folder(model, tmp_path, 1)

    async def test() -> None:
        async with serving(model, 2, share_prefixes=True) as client:
            await load(client, folder)
            first = await sample(client, with_adapter())
            sharing = client.sharing
            await sharing.look()
            named = names_of(PROMPT, 4, 0, None, adapter_key("own", 1))
            holder = sharing.directory.longest(named)
            assert holder is not None
            assert holder.num_blocks >= len(PROMPT) // 4
            assert sharing.directory.longest(names_of(PROMPT, 4, 0)) is None
            assert sharing.cost is not None
            sharing.cost.prefill_rate, sharing.cost.latency = 1e3, 0.0  # makes computing slow
            client.drain(holder.replica)
            await sample(client, with_adapter(name=None))
            assert sharing.num_fetches == 0
            second = await sample(client, with_adapter())
            assert (sharing.num_fetches, second.cached_tokens) == (1, 36)
            assert plain(second) == plain(first)

    play(test())


def test_replica_without_the_adapter_leaves_until_it_can_load() -> None:
    async def test() -> None:
        info = AdapterInfo("own", 1, 4, ("q_proj",), 64)
        async with fleet() as made:
            for engine in made.engines:
                engine.returns |= {"load_adapter": info, "receive_adapter": info}
                engine.returns |= {"save_adapter": None, "unload_adapter": None}
            failing = made.engines[1]
            failing.fails["receive_adapter"] = AdapterError("there is no memory")
            assert await made.client.call("load_adapter", name="own", source="/a") == info
            assert list(made.client.supervisor.living()) == ["0"]
            failing.fails.clear()
            await until(lambda: len(made.client.supervisor.living()) == 2)
            assert len(failing.said("receive_adapter")) >= 2
            told = [call.arguments["version"] for call in made.engines[0].said("load_adapter")]
            assert told == [1]
            # if the engine that read the adapter dies, another one reads it
            made.engines[0].fails["save_adapter"] = made.engines[0].die
            assert await made.client.call("load_adapter", name="own", source="/b") == info
            assert [call.arguments["source"] for call in failing.said("load_adapter")] == ["/b"]
            await asyncio.sleep(0)

    play(test())
