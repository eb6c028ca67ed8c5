"""Clients in this process and across processes give the engine's own bits, errors and results."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import InferenceEngine
from nano_inference.config import EngineConfig
from nano_inference.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    NanoInferenceError,
    RequestAborted,
    RequestTooLarge,
)
from nano_inference.remote.client import EngineClient, RequestStream
from nano_inference.remote.core import EngineCore
from nano_inference.remote.in_process import InProcessClient
from nano_inference.remote.messages import Resume
from nano_inference.remote.process_client import ProcessClient
from nano_inference.types import EngineStats, SamplingParams, TrainingSample, VersionSpan
from tests.server.engines import (
    PATIENCE,
    Run,
    config_of,
    core_of,
    finished,
    idle,
    params_of,
    until,
)

KINDS = [InProcessClient, ProcessClient]

pytestmark = pytest.mark.usefixtures("slow_steps")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Callable[..., list[TrainingSample]]]:
    """Run the requests directly on the engine."""
    threads = torch.get_num_threads()
    with InferenceEngine(config_of(model)) as engine:
        yield engine.generate
    torch.set_num_threads(threads)


@pytest.mark.thorough(cases=["process-False", "process-True"])
@pytest.mark.parametrize("stream", [False, True])
def test_samples_match_a_local_engine(
    client: EngineClient, run: Run, alone: Callable[..., list[TrainingSample]], stream: bool
) -> None:
    prompts = [[1, 5, 6, seed] for seed in range(6)]
    each = [
        SamplingParams(
            max_tokens=10, seed=seed, prompt_logprobs=True, top_logprobs=2, logit_bias={7: 1.5}
        )
        for seed in range(6)
    ]

    async def test() -> None:
        streams = [
            client.submit(prompt, params, 2, stream=stream)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        got = [await finished(stream) for stream in streams]
        for samples, prompt, params in zip(got, prompts, each, strict=True):
            assert core_of(samples) == core_of(alone([prompt], params, 2))
        await idle(client)

    run(test())


@pytest.mark.thorough(cases=["process"])
def test_client_reports_the_engines_rejection(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        for prompt, error in (
            ([1] * 5000, RequestTooLarge),
            ([], InvalidRequest),
            ([10**6], InvalidRequest),
        ):
            stream = client.submit(prompt, params_of(0), stream=True)
            with pytest.raises(error):
                await stream.next()
        with pytest.raises(InvalidRequest, match="tokenizer"):  # the tiny model has none
            await client.submit([1], SamplingParams(stop=("a",)), stream=True).next()
        await idle(client)

    run(test())


@pytest.mark.parametrize("prompt", [[True], [1.5], ["x"], [2**70], None])
def test_invalid_prompt_is_rejected_without_waiting(
    client: EngineClient, run: Run, prompt: Any
) -> None:
    async def test() -> None:
        with pytest.raises(InvalidRequest):
            await asyncio.wait_for(
                client.submit(prompt, params_of(0), stream=True).next(), PATIENCE
            )
        assert len(await finished(client.submit([1], params_of(0), stream=True))) == 1
        await idle(client)

    run(test())


def test_aborted_request_gives_its_memory_back(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        before = (await client.call("stats")).num_steps
        stream = client.submit([1, 2, 3], params_of(0, 450), 2, stream=True)
        await stream.next()
        stream.close()
        with pytest.raises(RequestAborted):
            await stream.next()
        await idle(client)
        stats = await client.call("stats")
        assert stats.num_steps - before < 400

    run(test())


def test_200_requests_and_cancellations_leave_nothing(
    client: EngineClient, run: Run, alone: Callable[..., list[TrainingSample]]
) -> None:
    rng = random.Random(0)
    expected = {seed: core_of(alone([[1, seed]], params_of(seed), 2)) for seed in range(5)}

    async def one() -> bool:
        await asyncio.sleep(rng.random() / 2)
        seed = rng.randrange(5)
        stream = client.submit([1, seed], params_of(seed), 2, stream=rng.random() < 0.5)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() / 10)
            stream.close()
            return False
        assert core_of(await finished(stream)) == expected[seed]
        return True

    async def test() -> None:
        answered = await asyncio.gather(*[one() for _ in range(200)])
        assert 50 < sum(answered) < 150
        await idle(client)
        assert not client._open
        assert not client._calls
        if isinstance(client, InProcessClient) and client._core is not None:
            assert not client._core._requests
            assert not client._core._deltas

    run(test())


def test_calls_return_what_the_engine_says(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        assert isinstance(await client.call("stats"), EngineStats)
        assert await client.call("get_weight_version") == 0
        checksums = await client.call("weights_checksum")
        assert len(checksums["model.norm.weight"]) == 64
        assert await client.call("flush_cache") is None
        for name, arguments in (
            ("shutdown", {}),
            ("__init__", {}),
            ("stats", {"x": 1}),
            ("pause", {"mode": "x"}),
        ):
            with pytest.raises(InvalidRequest):
                await client.call(name, **arguments)

    run(test())


@pytest.mark.thorough
def test_waiting_call_delays_no_other(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        running = client.submit([1, 2], params_of(0, 450), stream=True)
        pausing = asyncio.create_task(client.call("pause", mode="wait"))
        while not (await client.call("stats")).num_running:
            await asyncio.sleep(0)
        held = client.submit([1, 3], params_of(1), stream=True)  # arrives during the pause
        assert len(await finished(running)) == 1
        assert await pausing is True
        assert await client.call("is_paused") is True
        await client.call("resume")
        assert len(await finished(held)) == 1
        await idle(client)

    run(test())


def test_pause_that_aborts_ends_streams_before_it_returns(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        stream = client.submit([1, 2], params_of(0, 450), stream=True)
        first = await stream.next()
        assert await client.call("pause", mode="abort") is True
        assert not client._open  # all deltas have arrived
        await client.call("resume")
        assert stream.samples_left == 1
        (partial,) = await finished(stream, first)
        assert partial.finish_reason == "abort"
        assert first[0].token_ids[0] == partial.completion_tokens[0]
        await idle(client)

    run(test())


def test_abort_takes_many_requests(client: EngineClient, run: Run) -> None:
    """Abort from more concurrent callers than the engine's call limit, during a long step."""
    over = threading.Event()

    def step(core: EngineCore) -> None:
        with core.engine.shared.lock:
            over.wait(PATIENCE)

    async def test() -> None:
        streams = [
            client.submit([1, 2], params_of(0, 450), stream=False, name=str(number))
            for number in range(48)
        ]
        core = client._core if isinstance(client, InProcessClient) else None
        if core is not None:
            threading.Thread(target=step, args=(core,)).start()
        aborts = [asyncio.create_task(client.abort([str(number)])) for number in range(48)]
        await asyncio.sleep(0.1)
        over.set()
        assert await asyncio.gather(*aborts) == [1] * 48
        assert not client._open  # all deltas have arrived
        for stream in streams:
            (sample,) = await finished(stream)
            assert sample.finish_reason == "abort"
        await idle(client)

    run(test())


@pytest.mark.thorough
def test_calls_have_a_limit(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        running = client.submit([1, 2], params_of(0, 480), stream=True)
        await running.next()
        calls = [asyncio.create_task(client.call("pause", mode="wait")) for _ in range(40)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [
            each
            for each in answers
            if isinstance(each, InvalidRequest) and "calls are running" in str(each)
        ]
        assert 0 < len(refused) <= 8
        running.close()
        await client.call("resume")
        await idle(client)

    run(test())


@pytest.mark.thorough(cases=["process"])
def test_heartbeats_bring_statistics(client: EngineClient, run: Run) -> None:
    async def test() -> None:
        before = (await client.call("stats")).completion_tokens
        await finished(client.submit([1, 2], params_of(0), stream=True))
        await until(
            lambda: client.stats is not None and client.stats.completion_tokens == before + 12
        )
        assert not client.stalled(0.0)

    run(test())


@pytest.mark.thorough(cases=["ProcessClient"])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_build_failure_is_reported(kind: Any, model: Path, tmp_path: Path) -> None:
    async def test() -> None:
        for config, error in (
            (EngineConfig(str(tmp_path / "nothing")), ModelLoadError),
            (EngineConfig(str(model), max_batch_size=2, kv_cache_memory=1), ConfigError),
        ):
            client: EngineClient = kind(config, 4096)
            with pytest.raises(error):
                await asyncio.wait_for(client.start(), PATIENCE)
            with pytest.raises(EngineDead):
                client.submit([1], params_of(0), stream=True)
            await client.close()

    asyncio.run(test())


def in_process(model: Path, test: Callable[[InProcessClient], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        client = InProcessClient(config_of(model), 4096)
        await client.start()
        try:
            await asyncio.wait_for(test(client), PATIENCE)
        finally:
            await client.close()

    asyncio.run(whole())


def test_bug_in_the_core_fails_only_its_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: InProcessClient) -> None:
        assert client._core is not None
        other = client.submit([1, 2], params_of(0, 100), stream=True)
        with monkeypatch.context() as patched:
            patched.setattr(client._core.engine, "submit", lambda *_, **__: 1 // 0)
            with pytest.raises(NanoInferenceError, match="ZeroDivisionError"):
                await client.submit([1], params_of(0), stream=True).next()
        assert len(await finished(other)) == 1
        await idle(client)

    in_process(model, test)


def test_request_that_ends_before_it_is_noted_down_is_forgotten(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: InProcessClient) -> None:
        assert client._core is not None
        submit = client._core.engine.submit

        def slow(*args: Any, **options: Any) -> int:
            request_id = submit(*args, **options)
            time.sleep(0.5)  # the other thread steps meanwhile
            return request_id

        monkeypatch.setattr(client._core.engine, "submit", slow)
        stream = client.submit([1, 2], params_of(0, 2), stream=True)
        assert not client._core.has_requests
        assert len(await finished(stream)) == 1

    in_process(model, test)


@pytest.mark.thorough
@pytest.mark.parametrize("is_answered", [False, True])
def test_request_that_waits_for_old_weights_can_be_ended(model: Path, is_answered: bool) -> None:
    async def test(client: InProcessClient) -> None:
        assert client._core is not None
        (whole,) = await finished(client.submit([1, 2], params_of(0, 400), stream=True))
        cut = slice(0, 3)
        part = replace(
            whole,
            completion_tokens=whole.completion_tokens[cut],
            logprobs=whole.logprobs[cut],
            log_kept_mass=None if whole.log_kept_mass is None else whole.log_kept_mass[cut],
            loss_mask=whole.loss_mask[cut],
            weight_versions=(VersionSpan(0, 0, 3),),
            finish_reason="abort",
        )
        request = RequestStream(1, 4096, lambda: None)
        with client._core.engine.shared.lock:  # a step holds the lock too
            number = client.begin(request, Resume(0, [part], stream=True, version=0), 1)
            client.end_soon([number]) if is_answered else client.give_up(number)
            await asyncio.sleep(0.05)
            steps = client._core.engine.loop.num_steps
        if is_answered:
            (*_, last) = await request.next()
            assert last.finished is not None
            assert (last.finished.finish_reason, last.finished.completion_tokens) == (
                "abort",
                part.completion_tokens,
            )
        await asyncio.sleep(0.3)
        await idle(client)
        assert client._core.engine.loop.num_steps - steps < 10
        assert not client._core._coming

    in_process(model, test)


def test_failed_step_ends_everything_with_a_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: InProcessClient) -> None:
        assert client._core is not None
        stream = client.submit([1, 2], params_of(0, 480), stream=True)
        await stream.next()
        monkeypatch.setattr(client._core.engine.runner, "forward", lambda *_: 1 // 0)
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            await finished(stream)
        assert "ZeroDivisionError" in (client.why_dead or "")
        with pytest.raises(EngineDead):
            await client.call("stats")

    in_process(model, test)
