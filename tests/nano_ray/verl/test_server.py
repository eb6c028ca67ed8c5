"""`RolloutServer` on a tiny model, without Ray and verl: requests, aborts, updates with requests in
flight, memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference import (
    AsyncInferenceEngine,
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
    WeightUpdateError,
)
from nano_inference.core.loop import EngineLoop
from nano_ray.verl.buckets import Parcel, opened, parcels
from nano_ray.verl.mapping import RequestDefaults
from nano_ray.verl.server import Mode, RolloutServer
from tests.models.tiny import Weights, llama_config, llama_weights, tiny_llama
from tests.standing import slowed

PATIENCE = 60.0  # seconds: a hang fails instead of blocking
PROMPT = [5, 6, 7, 8, 9]
LONG = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "logprobs": True,
    "seed": 3,
    "ignore_eos": True,
}
NEW = llama_weights(llama_config(), seed=9)
DEFAULTS = RequestDefaults(prompt_length=100, response_length=500, max_model_len=512)

Scene = Callable[[RolloutServer], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InferenceEngine]:
    monkeypatch.setattr(EngineLoop, "step", slowed(EngineLoop.step))
    threads = torch.get_num_threads()
    config = EngineConfig(
        str(folder), num_threads=1, kv_cache_memory=2**23, block_size=4, max_model_len=512, seed=0
    )
    with InferenceEngine(config) as engine:
        yield engine
    torch.set_num_threads(threads)


@pytest.fixture
def play(engine: InferenceEngine) -> Callable[..., None]:
    def run(scene: Scene, mode: Mode = "hybrid", **options: Any) -> None:
        async def on_an_engine() -> None:
            driver = AsyncInferenceEngine(engine)
            try:
                async with asyncio.timeout(PATIENCE):
                    await scene(RolloutServer(driver, DEFAULTS, mode=mode, **options))
            finally:
                await asyncio.to_thread(driver.stop)

        asyncio.run(on_an_engine())

    return run


async def begun(server: RolloutServer, num_steps: int = 5) -> None:
    """Wait until requests are in flight."""
    loop = server._engine.loop
    first = loop.num_steps
    while loop.num_steps < first + num_steps:
        await asyncio.sleep(0.001)


async def send(
    server: RolloutServer, weights: Weights, step: int | None, max_bytes: int = 50_000
) -> int:
    number = await server.begin_update(step)
    async for parcel in parcels(iter(weights.items()), max_bytes):
        await server.receive(number, *parcel)
    return await server.finish_update(number)


def alone(folder: Path, max_tokens: int, weights: Weights | None = None) -> TrainingSample:
    """Run the same request on a separate engine."""
    with InferenceEngine(EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22)) as engine:
        if weights is not None:
            engine.update_weights(weights, blocking=True)
        params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)
        return engine.generate([PROMPT], params)[0]


def test_sample_matches_the_engine_bit_for_bit(play: Callable[..., None], folder: Path) -> None:
    expected = alone(folder, 12)

    async def scene(server: RolloutServer) -> None:
        output = await server.generate(PROMPT, LONG | {"max_new_tokens": 12}, "a")
        assert output["token_ids"] == list(expected.completion_tokens)
        assert output["log_probs"] == list(expected.logprobs)
        assert output["stop_reason"] == "completed"
        assert output["extra_fields"]["global_steps"] is None
        await server.set_global_steps(7)
        output = await server.generate(PROMPT, LONG | {"max_tokens": 1}, "b")
        assert output["extra_fields"] == {
            "global_steps": 7, "min_global_steps": 7, "max_global_steps": 7, "num_cached_tokens": 4
        }  # fmt: skip

    play(scene)


def test_prompt_logprobs_as_the_distillation_wants_them(play: Callable[..., None]) -> None:
    async def scene(server: RolloutServer) -> None:
        own = (await server.generate(PROMPT, {"max_tokens": 1, "prompt_logprobs": 0}, "a"))[
            "extra_fields"
        ]
        best = (await server.generate(PROMPT, {"max_tokens": 1, "prompt_logprobs": 300}, "b"))[
            "extra_fields"
        ]
        assert own["prompt_ids"] == [[token_id] for token_id in [*PROMPT[1:], 0]]
        assert len(own["prompt_logprobs"]) == len(best["prompt_logprobs"]) == len(PROMPT)
        for (token_id,), (logprob,), ids, logprobs in zip(
            own["prompt_ids"][:-1],
            own["prompt_logprobs"][:-1],
            best["prompt_ids"],
            best["prompt_logprobs"],
            strict=False,
        ):
            assert logprobs[ids.index(token_id)] == logprob
            assert sorted(logprobs, reverse=True) == logprobs

    play(scene)


@pytest.mark.thorough
def test_aborted_sample_keeps_its_tokens_and_can_continue(
    play: Callable[..., None], folder: Path
) -> None:
    expected = alone(folder, 480)

    async def scene(server: RolloutServer) -> None:
        whole = LONG | {"max_tokens": 480}
        running = asyncio.create_task(server.generate(PROMPT, whole, "a"))
        await begun(server)
        assert await server.abort_all_requests() == {"aborted_count": 1, "request_ids": ["a"]}
        part = await running
        tokens = part["token_ids"]
        assert part["stop_reason"] == "aborted"
        assert 0 < len(tokens) == len(part["log_probs"]) < 480
        late = asyncio.create_task(
            server.generate(PROMPT + tokens, whole | {"max_tokens": 480 - len(tokens)}, "b")
        )  # fmt: skip
        steps = server._engine.loop.num_steps
        await asyncio.sleep(0.1)
        assert not late.done()
        assert server._engine.loop.num_steps == steps
        await server.resume_generation()
        rest = await late
        assert tokens + rest["token_ids"] == list(expected.completion_tokens)
        assert part["log_probs"] + rest["log_probs"] == list(expected.logprobs)

    play(scene)


def test_server_that_leaves_turns_requests_away(play: Callable[..., None]) -> None:
    async def scene(server: RolloutServer) -> None:
        await server.set_global_steps(4)
        assert await server.abort_all_requests(reject_request=True) == {
            "aborted_count": 0,
            "request_ids": [],
        }
        output = await server.generate(PROMPT, LONG, "a")
        assert (output["token_ids"], output["stop_reason"]) == ([], "aborted")
        assert output["extra_fields"] == {"global_steps": 4}
        await server.resume_generation()
        assert (await server.generate(PROMPT, LONG | {"max_tokens": 2}, "b"))[
            "stop_reason"
        ] == "completed"

    play(scene)


def test_request_is_aborted_by_its_name(play: Callable[..., None]) -> None:
    async def scene(server: RolloutServer) -> None:
        one, other = (
            asyncio.create_task(server.generate(PROMPT, LONG | {"max_tokens": count}, name))
            for name, count in (("one", 480), ("other", 60))
        )
        await begun(server)
        assert (await server.abort_request("one"))["aborted"]
        assert (await one)["stop_reason"] == "aborted"
        assert len((await other)["token_ids"]) == 60
        assert not (await server.abort_request("one"))["aborted"]

    play(scene)


@pytest.mark.thorough
def test_new_weights_serve_requests_that_are_under_way(
    play: Callable[..., None], folder: Path
) -> None:
    expected = alone(folder, 1, NEW)

    async def scene(server: RolloutServer) -> None:
        running = asyncio.create_task(server.generate(PROMPT, LONG | {"max_tokens": 480}, "a"))
        await begun(server)
        assert await send(server, NEW, 17) == 17
        assert not running.done()
        fresh = await server.generate(PROMPT, LONG | {"max_tokens": 1}, "b")
        assert fresh["log_probs"] == list(expected.logprobs)
        assert fresh["extra_fields"]["min_global_steps"] == 17
        output = await running
        assert len(output["token_ids"]) == 480
        assert output["extra_fields"]["max_global_steps"] == 17
        assert await send(server, NEW, 17) == 18  # the same or an earlier step
        assert (await server.generate(PROMPT, LONG, "c"))["extra_fields"]["global_steps"] == 17

    play(scene)


def test_failed_update_keeps_the_old_weights_and_the_next_works(
    play: Callable[..., None],
) -> None:
    async def scene(server: RolloutServer) -> None:
        before = await server.collective_rpc("weights_checksum")
        name = "model.norm.weight"
        for wrong in (
            {"no.such": NEW[name]},
            {name: NEW[name][:-1]},
            {name: NEW[name].to(torch.int32)},
        ):
            with pytest.raises(WeightUpdateError):
                await send(server, {**dict(list(NEW.items())[:3]), **wrong}, 5)
        number = await server.begin_update(5)
        (good,) = [each async for each in parcels(iter([(name, NEW[name])]), 10**6)]
        with pytest.raises(WeightUpdateError, match="described as"):
            await server.receive(number, good.description, good.content[:-16])
        with pytest.raises(WeightUpdateError, match="not open"):
            await server.finish_update(number)
        dead = await server.begin_update(6)  # this trainer dies here
        await server.receive(dead, *good)
        assert await server.collective_rpc("weights_checksum") == before
        assert await send(server, NEW, 7) == 7  # the next update does not wait for it
        with pytest.raises(WeightUpdateError, match="not open"):
            await server.receive(dead, *good)
        assert await server.collective_rpc("weights_checksum") != before

    play(scene)


@pytest.mark.thorough
def test_hybrid_server_frees_and_reallocates_memory_in_parts(
    play: Callable[..., None], folder: Path
) -> None:
    expected = alone(folder, 3, NEW)

    async def scene(server: RolloutServer) -> None:
        running = asyncio.create_task(server.generate(PROMPT, LONG | {"max_tokens": 480}, "a"))
        await begun(server)
        await server.sleep()
        assert sorted(server._engine.sleeping()) == ["kv_cache", "weights"]
        with pytest.raises(InvalidRequest, match="asleep"):
            await server.begin_update(5)
        await server.wake_up(["weights"])
        assert server._engine.sleeping() == ("kv_cache",)
        assert await send(server, NEW, 5) == 5
        assert not running.done()
        await server.wake_up(["kv_cache"])
        output = await running
        assert len(output["token_ids"]) == 480
        assert output["extra_fields"]["max_global_steps"] == 5
        fresh = await server.generate(PROMPT, LONG | {"max_tokens": 3}, "b")
        assert fresh["log_probs"] == list(expected.logprobs)

    play(scene)


def test_verl_updates_a_server_with_its_own_device(play: Callable[..., None]) -> None:
    async def scene(server: RolloutServer) -> None:
        await server.sleep()
        assert server._engine.sleeping() == ()
        running = asyncio.create_task(server.generate(PROMPT, LONG | {"max_tokens": 480}, "a"))
        await begun(server)
        await server.abort_all_requests()
        assert (await running)["stop_reason"] == "aborted"
        await server.release_kv_cache()
        assert server._engine.sleeping() == ("kv_cache",)
        late = asyncio.create_task(server.generate(PROMPT, LONG | {"max_tokens": 5}, "b"))
        assert await send(server, NEW, 2) == 2
        await server.resume_kv_cache()
        assert server._engine.sleeping() == ()
        assert server._engine.is_paused()
        assert not late.done()
        await server.resume_generation()
        assert (await late)["extra_fields"]["min_global_steps"] == 2

    play(scene, "standalone")


def test_memory_is_kept_if_verl_requests_it(play: Callable[..., None]) -> None:
    async def scene(server: RolloutServer) -> None:
        for call in (server.sleep, server.release_kv_cache):
            await call()
            assert server._engine.sleeping() == ()
        await server.wake_up()
        assert (await server.generate(PROMPT, LONG | {"max_tokens": 2}, "a"))[
            "stop_reason"
        ] == "completed"

    play(scene, gives_memory_back=False)


def test_remote_calls_use_only_reporting_methods(play: Callable[..., None]) -> None:
    async def scene(server: RolloutServer) -> None:
        assert await server.collective_rpc("get_weight_version") == 0
        for method in ("shutdown", "__reduce__", "pause"):
            with pytest.raises(InvalidRequest, match=method):
                await server.collective_rpc(method)

    play(scene)


def test_parcels_hold_a_copy_of_every_tensor_once() -> None:
    async def scene(max_bytes: int) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in NEW.items()}
        room = torch.empty(10**6)

        async def lent() -> Any:
            for name, tensor in NEW.items():
                view = room[: tensor.numel()].view(tensor.shape).copy_(tensor)
                yield name, view
                room.fill_(torch.nan)

        many = [each async for each in parcels(lent(), max_bytes)]
        assert len(many) > 1 or max_bytes > 10**6
        arrived = [opened(parcel, shapes) for parcel in many]
        assert [name for each in arrived for name in each] == list(NEW)
        assert all(
            torch.equal(tensor, NEW[name]) for each in arrived for name, tensor in each.items()
        )
        many[0].content.setflags(write=False)
        first = opened(many[0], shapes)
        next(iter(first.values())).zero_()  # separate memory
        assert many[0].content.any()

    for max_bytes in (1, 40_000, 10**9):
        asyncio.run(scene(max_bytes))


def test_empty_parcels_are_rejected() -> None:
    async def scene() -> None:
        with pytest.raises(WeightUpdateError, match="the update is empty"):
            async for _ in parcels(iter(()), 10):
                pass

    asyncio.run(scene())


def test_foreign_parcel_is_rejected() -> None:
    with pytest.raises(WeightUpdateError):
        opened(Parcel(b"\x80\x04.", np.zeros(16, dtype=np.uint8)), {})
