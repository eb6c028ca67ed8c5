"""Concurrent callers on one async engine: no lost samples, no leaks, no busy waiting."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    AsyncInferenceEngine,
    Delta,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
)
from tests.models.tiny import tiny_llama
from tests.standing import stand_still

PATIENCE = 120.0  # seconds; a hanging test fails


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[InferenceEngine]:
    config = EngineConfig(
        model_path=str(tiny_llama(tmp_path)),
        device="cpu",
        kv_cache_memory=64 * 4 * 512,
        block_size=4,
        max_batch_size=24,
        num_threads=1,
    )
    with InferenceEngine(config) as engine:
        yield engine


def params(seed: int, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7 + i) % 250 for i in range(1 + seed % 9)]


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def settle(engine: InferenceEngine) -> None:
    """Wait until the stepping thread has handled the last aborts."""
    deadline = time.monotonic() + PATIENCE
    while engine.loop.has_pending():
        assert time.monotonic() < deadline, "a request remains in the engine"
        time.sleep(0.01)


async def until_step(engine: InferenceEngine, number: int) -> None:
    """Wait until `number` steps have run."""
    while engine.loop.num_steps < number:
        await asyncio.sleep(0.001)


async def collect(deltas: Any) -> list[Delta]:
    return [delta async for delta in deltas]


@pytest.mark.thorough
def test_async_engine_survives_random_cancellation(engine: InferenceEngine) -> None:
    r = random.Random(1)
    alone = {
        seed: engine.generate(prompt(seed), params(seed))[0].completion_tokens
        for seed in range(0, 200, 20)
    }
    cancelled = {seed for seed in range(200) if seed % 20 and r.random() < 0.4}

    async def main() -> dict[int, Any]:
        async with AsyncInferenceEngine(engine) as a:

            async def caller(seed: int) -> Any:
                if seed % 2:
                    return await collect(a.stream(prompt(seed), params(seed)))
                return await a.generate(prompt(seed), params(seed))

            tasks = {seed: asyncio.create_task(caller(seed)) for seed in range(200)}

            async def cancel(seed: int, num_steps: int) -> None:
                while engine.loop.num_steps < num_steps and not tasks[seed].done():
                    await asyncio.sleep(0.001)
                tasks[seed].cancel()

            began = engine.loop.num_steps
            killers = [
                asyncio.create_task(cancel(seed, began + r.randrange(100)))
                for seed in sorted(cancelled)
            ]
            results = await asyncio.gather(*tasks.values(), return_exceptions=True)
            await asyncio.gather(*killers)
            await asyncio.to_thread(settle, engine)
            task = asyncio.current_task()
            left = [t for t in asyncio.all_tasks() if t is not task and not t.done()]
            assert len(left) <= 1, "a task leaked"  # the timeout of `wait_for`
        return dict(zip(tasks, results, strict=True))

    results = run(main())
    ended = {
        seed: result
        for seed, result in results.items()
        if not isinstance(result, asyncio.CancelledError)
    }
    assert set(range(200)) - cancelled <= set(ended)
    assert len(ended) < 200, "no caller was cancelled in time"
    for seed, result in ended.items():
        assert not isinstance(result, BaseException), result
        sample = result[0] if isinstance(result[0], TrainingSample) else result[-1].finished
        assert len(sample.completion_tokens) == 12
        if seed in alone:
            assert sample.completion_tokens == alone[seed]
    engine.loop.check()
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks, "a block leaked"
    assert not engine.shared.delivery.open_requests()
    assert not engine.loop.sequences.by_id
    assert not engine.has_pending(), "samples of cancelled callers remain"


def test_stream_joins_to_the_sample(engine: InferenceEngine) -> None:
    async def main() -> list[Delta]:
        async with AsyncInferenceEngine(engine) as a:
            return await collect(a.stream([5, 6, 7], params(3), num_samples=3))

    deltas = run(main())
    finished = {d.sample_index: d.finished for d in deltas if d.finished is not None}
    assert set(finished) == {0, 1, 2}
    for index, sample in finished.items():
        mine = [d for d in deltas if d.sample_index == index]
        assert mine[-1].finished is sample
        assert tuple(t for d in mine for t in d.token_ids) == sample.completion_tokens
        assert tuple(p for d in mine for p in d.logprobs) == sample.logprobs
        assert len(mine) > 5, "tokens came all at once"


def test_results_keep_the_order_of_prompts(engine: InferenceEngine) -> None:
    async def main() -> list[TrainingSample]:
        async with AsyncInferenceEngine(engine) as a:
            param_list = [params(i, max_tokens=20 - i) for i in range(6)]
            return await a.generate([prompt(i) for i in range(6)], param_list, 2)

    samples = run(main())
    assert [s.prompt_tokens for s in samples] == [
        tuple(prompt(i)) for i in range(6) for _ in range(2)
    ]
    assert [s.sample_index for s in samples] == [0, 1] * 6


def test_stream_aborts_if_the_caller_leaves_it(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_still(monkeypatch, engine.loop)

    async def main() -> int:
        async with AsyncInferenceEngine(engine) as a:
            stream = a.stream([5], params(1, max_tokens=200))
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 3:
                    break
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.to_thread(settle, engine)
        return engine.stats().completion_tokens

    assert run(main()) == 3
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks


def test_update_between_two_awaits_is_live_for_the_second(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = stand_still(monkeypatch, engine.loop)

    async def main() -> tuple[list[TrainingSample], int, list[TrainingSample]]:
        async with AsyncInferenceEngine(engine) as a:
            before = asyncio.create_task(a.generate([5, 6], params(1, max_tokens=20)))
            await until_step(engine, 3)
            version = await a.update_weights(
                {"model.norm.weight": torch.full((64,), 0.5)}, version=7
            )
            go_on.set()
            return await before, version, await a.generate([5, 6], params(1))

    (before,), version, (after,) = run(main())
    assert version == 7
    assert [span.version for span in before.weight_versions] == [0, 7]
    assert after.weight_version == 7


def test_rejected_request_fails_only_its_caller(engine: InferenceEngine) -> None:
    async def main() -> list[TrainingSample]:
        async with AsyncInferenceEngine(engine) as a:
            good = asyncio.create_task(a.generate([5, 6], params(1)))
            with pytest.raises(InvalidRequest, match="outside the vocabulary"):
                await a.generate([[5], [5000]], params(1))
            with pytest.raises(InvalidRequest, match="tokenizer"):
                await a.generate("text", params(1))
            return await good

    assert len(run(main())[0].completion_tokens) == 12


def test_failed_step_raises_in_every_awaiting_task(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    go_on = stand_still(monkeypatch, engine.loop)

    async def main() -> list[Any]:
        async with AsyncInferenceEngine(engine) as a:
            tasks = [
                asyncio.create_task(a.generate(prompt(i), params(i, max_tokens=100)))
                for i in range(5)
            ]
            await until_step(engine, 3)
            monkeypatch.setattr(engine.runner, "forward", broken)
            go_on.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(EngineDead):
                await a.generate([1], params(1))
        return results

    assert all(isinstance(result, EngineDead) for result in run(main()))


def test_shutdown_wakes_waiting_tasks(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_still(monkeypatch, engine.loop)

    async def main() -> Any:
        a = AsyncInferenceEngine(engine)
        task = asyncio.create_task(a.generate([5], params(1, max_tokens=200)))
        await until_step(engine, 3)
        await asyncio.to_thread(a.stop)
        return (await asyncio.gather(task, return_exceptions=True))[0]

    assert isinstance(run(main()), EngineDead)


@pytest.mark.thorough
def test_idle_engine_uses_no_time(engine: InferenceEngine) -> None:
    async def main() -> float:
        async with AsyncInferenceEngine(engine) as a:
            await a.generate([5], params(1))
            gc.collect()  # not in the meantime
            began = time.process_time()
            await asyncio.sleep(0.5)
            return time.process_time() - began

    assert run(main()) < 0.2, "a thread is busy waiting"


def test_engine_is_shared_by_threads_and_tasks(engine: InferenceEngine) -> None:
    blocking: list[TrainingSample] = []
    thread = threading.Thread(
        target=lambda: blocking.extend(engine.generate([9, 9], params(4, 40)))
    )

    async def main() -> list[TrainingSample]:
        async with AsyncInferenceEngine(engine) as a:
            thread.start()
            samples = await a.generate([5, 6], params(1, 40))
            await asyncio.to_thread(thread.join, PATIENCE)
        return samples

    samples = run(main())
    assert len(samples[0].completion_tokens) == len(blocking[0].completion_tokens) == 40


def test_generate_async_names_the_async_engine(engine: InferenceEngine) -> None:
    with pytest.raises(AttributeError, match="use AsyncInferenceEngine"):
        engine.generate_async  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'generate_asinc'"):
        engine.generate_asinc  # type: ignore[attr-defined] # noqa: B018


def test_resume_from_cancelled_early_leaves_no_request(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request(prompt(1), params(1, max_tokens=40))
    engine.step()
    (partial,) = engine.abort()
    aborted: list[list[int]] = []
    monkeypatch.setattr(engine, "abort_soon", lambda ids: aborted.append(list(ids)))

    async def cancel() -> None:
        async with AsyncInferenceEngine(engine) as wrapped:
            with engine.shared.lock:  # steps are slow
                task = asyncio.create_task(wrapped.resume_from(partial))
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])

    run(cancel())
    assert aborted == [[partial.request_id + 1]]
