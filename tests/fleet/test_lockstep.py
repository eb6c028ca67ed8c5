"""A fleet whose engines share their experts: processes, a joint update and a joint end."""

import asyncio
import time
from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.errors import ConfigError, EngineDead
from nano_inference.fleet.errors import ReplicaConflict
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.remote.client import EngineClient
from nano_inference.remote.errors import EngineRestarting
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import engine_client
from tests.models.tiny import tiny_model
from tests.server.engines import until

PARAMS = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=5)
PROMPTS = [list(range(3, 3 + length)) for length in (1, 20, 7, 40)]


def config_of(folder: Path, **options: object) -> EngineConfig:
    common: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": 2**20,
        "num_threads": 1,
    }
    return EngineConfig(model_path=str(folder), **(common | options))  # pyright: ignore[reportArgumentType]


async def complete(client: EngineClient, prompt: list[int]) -> list[int]:
    stream, tokens = client.submit(prompt, PARAMS, stream=True), list[int]()
    while stream.samples_left:
        for delta in await stream.next():
            tokens += delta.token_ids
    return tokens


@pytest.mark.slow
def test_experts_are_shared_by_two_processes(tmp_path: Path) -> None:
    old, new = (
        tiny_model(tmp_path / "old", "mixtral"),
        tiny_model(tmp_path / "new", "mixtral", seed=1),
    )
    expected, checksums = [], []
    for folder in (old, new):
        with InferenceEngine(config_of(folder)) as engine:
            expected.append(
                [list(sample.completion_tokens) for sample in engine.generate(PROMPTS, PARAMS)]
            )
            checksums.append(engine.weights_checksum())

    async def test() -> None:
        client = engine_client(
            config_of(old, expert_parallel=2), ServerConfig(replicas=2, restart_engine=True)
        )
        assert isinstance(client, FleetClient)
        await client.start()
        try:
            assert [await complete(client, PROMPTS[1])] == expected[0][1:2]  # one idle rank
            assert (
                await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
                == expected[0]
            )
            assert await client.call("weights_checksum") == checksums[0]
            running = asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
            await client.call("sleep", timeout=60, memory=["kv_cache", "weights"])
            assert sorted(await client.call("sleeping")) == ["kv_cache", "weights"]
            await client.call("wake", timeout=60)
            assert await running == expected[0]
            running = asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
            await client.call("begin_update", timeout=20, session=1)
            await client.call("receive_folder", timeout=20, session=1, path=str(new), seconds=20.0)
            options = {"session": 1, "version": 1, "kv_policy": "keep", "seconds": 20.0}
            await client.call("finish_update", timeout=20, **options)
            await running
            assert await client.call("weights_checksum") == checksums[1]
            assert (
                await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
                == expected[1]
            )
            for change in (client.add, lambda: client.remove("1")):
                with pytest.raises(ReplicaConflict, match="in lockstep share their experts"):
                    await change()
            assert await complete(client, PROMPTS[1]) == expected[1][1]
            began = time.monotonic()
            next(iter(client.supervisor.replicas.values())).client.kill()
            with pytest.raises((EngineDead, EngineRestarting)):
                await complete(client, PROMPTS[0])
            assert time.monotonic() - began < 20
            await until(lambda: client.why_dead is None and len(client.supervisor.living()) == 2)
            assert (
                await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
                == expected[0]
            )
        finally:
            await client.close()

    asyncio.run(test())


def test_fleet_in_lockstep_checks_its_configuration(tmp_path: Path) -> None:
    engine = config_of(tiny_model(tmp_path, "mixtral"), expert_parallel=2)
    for options in ({}, {"replicas": 3}):
        with pytest.raises(ConfigError, match="replicas=2, not"):
            engine_client(engine, ServerConfig(**options))
    with pytest.raises(
        ConfigError, match="in_process=True is not possible for engines in lockstep"
    ):
        engine_client(engine, ServerConfig(replicas=2, in_process=True))
