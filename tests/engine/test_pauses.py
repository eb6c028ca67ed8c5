"""Callers that may wait while an engine is paused, and the state after an interrupted pause."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from nano_inference import (
    AsyncInferenceEngine,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    WeightUpdateError,
)
from nano_inference.core.gate import Gate, Stepping
from nano_inference.device.sleep import Sleep
from nano_inference.system.locks import FairLock
from tests.engine.test_control import PATIENCE, drawn, same
from tests.standing import stand_still
from tests.weights.weight_cases import NEW, PROMPT, Build, drain, until


def interrupt_next_step(monkeypatch: pytest.MonkeyPatch, engine: InferenceEngine) -> None:
    """Deliver Ctrl-C once, in the middle of the next step."""
    step = engine.loop.step

    def interrupted() -> Any:
        monkeypatch.setattr(engine.loop, "step", step)
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine.loop, "step", interrupted)


def generates_elsewhere(engine: InferenceEngine) -> bool:
    """Return True if `generate` finishes on another thread; a paused engine makes it wait."""
    ended: list[Any] = []
    thread = threading.Thread(
        target=lambda: ended.extend(engine.generate(PROMPT, drawn())), daemon=True
    )
    thread.start()
    thread.join(PATIENCE)
    return bool(ended)


# -- Ctrl-C ----------------------------------------------------------------------------------------

STOPS: dict[str, Callable[[InferenceEngine], object]] = {
    "wait": lambda engine: engine.pause("wait"),
    "keep": lambda engine: engine.pause("keep"),
    "abort": lambda engine: engine.pause("abort"),
    "sleep": lambda engine: engine.sleep(),
    "sleep of the weights": lambda engine: engine.sleep(weights=True),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_interrupted_pause_leaves_the_engine_running(
    build: Build, monkeypatch: pytest.MonkeyPatch, stop: Callable[[InferenceEngine], object]
) -> None:
    engine = build(lookahead=1)
    expected = engine.generate(PROMPT, drawn())[0]
    engine.add_request(PROMPT, drawn())
    engine.step()
    interrupt_next_step(monkeypatch, engine)
    with pytest.raises(KeyboardInterrupt):
        stop(engine)
    assert not engine.is_paused()
    assert engine.sleeping() == ()
    assert engine.loop.life.admitting
    assert generates_elsewhere(engine)
    drain(engine)
    assert same(engine.generate(PROMPT, drawn())[0], expected)


def test_interrupted_pause_keeps_an_earlier_pause(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.pause()
    interrupt_next_step(monkeypatch, engine)
    with pytest.raises(KeyboardInterrupt):
        engine.pause("abort")
    assert engine.is_paused()
    engine.resume()
    assert not engine.is_paused()


def test_pause_interrupted_twice_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C interrupts a step halfway. The caller still gets `KeyboardInterrupt`."""
    engine = build()
    engine.add_request(PROMPT, drawn())

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine.loop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.pause("wait")


def test_sleep_interrupted_while_freeing_memory_completes(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    expected = engine.generate(PROMPT, drawn())[0]
    give_back = engine.runner.give_back

    def interrupted(part: Any) -> Any:
        if part == "weights":
            signal.raise_signal(signal.SIGINT)
        return give_back(part)

    monkeypatch.setattr(engine.runner, "give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.sleep(weights=True)
    assert engine.sleeping() == ("weights", "kv_cache")
    engine.wake()
    assert same(engine.generate(PROMPT, drawn())[0], expected)


@pytest.mark.parametrize("what", ["sleep", "wake"])
def test_sleep_interrupted_halfway_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After a second Ctrl-C the state of the memory is unknown."""
    engine = build()

    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    if what == "wake":
        engine.sleep(weights=True)
        monkeypatch.setattr(Sleep, "_read_back", interrupted)
    else:
        monkeypatch.setattr(engine.runner, "give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, what)()
    with pytest.raises(EngineDead, match="interrupted"):
        engine.generate(PROMPT, drawn())


class InterruptedGate(Gate):
    """Fake peers that hold the weights awake until Ctrl-C."""

    alone = False

    def await_sleep(self, engine: Stepping) -> None:
        raise KeyboardInterrupt


def test_sleep_interrupted_while_busy_leaves_the_engine_running(
    build: Build,
) -> None:
    engine = build()
    engine.loop.gate = InterruptedGate()
    with pytest.raises(KeyboardInterrupt):
        engine.sleep(weights=True)
    assert not engine.loop.life.wants_sleep
    assert not engine.is_paused()
    assert generates_elsewhere(engine)


# -- asyncio ---------------------------------------------------------------------------------------


def run_with_one_worker(main: Callable[[], Any]) -> Any:
    """Run a coroutine whose `asyncio.to_thread` has a single worker thread."""

    async def inside() -> Any:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await asyncio.wait_for(main(), PATIENCE)

    return asyncio.run(inside())


def test_async_resume_from_queues_while_paused(build: Build) -> None:
    engine = build()
    expected = engine.generate(PROMPT, drawn(20))[0]
    short = engine.generate(PROMPT, drawn(8))[0]

    async def main() -> Any:
        async with AsyncInferenceEngine(engine) as a:
            await a.pause()
            resumed = asyncio.create_task(a.resume_from(short, max_new_tokens=12))
            await until(lambda: len(engine.loop.sequences.by_id) == 1 or resumed.done())
            await a.resume()
            return await resumed

    assert same(run_with_one_worker(main), expected)


@pytest.mark.parametrize("stop", ["pause", "sleep"])
def test_async_blocking_update_waits_while_paused(
    build: Build, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    engine = build()
    go_on = stand_still(monkeypatch, engine.loop)

    async def main() -> int:
        async with AsyncInferenceEngine(engine) as a:
            task = asyncio.create_task(a.generate(PROMPT, drawn()))
            await until(lambda: engine.loop.num_steps == 3)
            await asyncio.to_thread(getattr(engine, stop))
            updating = asyncio.create_task(a.update_weights(NEW, True, kv_policy="wait"))
            await until(lambda: bool(engine.weight_sync.pending) or updating.done())
            go_on.set()
            engine.wake() if stop == "sleep" else engine.resume()
            await task
            return await updating

    assert run_with_one_worker(main) == 1


def test_sync_generate_in_a_pool_waits_while_paused(build: Build) -> None:
    """A task resumes the engine, because the pool thread that paused it has no owner."""
    engine = build()

    async def main() -> Any:
        await asyncio.to_thread(engine.pause)
        generating = asyncio.create_task(asyncio.to_thread(engine.generate, PROMPT, drawn()))
        await until(lambda: len(engine.loop.sequences.by_id) == 1 or generating.done())
        engine.resume()
        return await generating

    assert len(run_with_one_worker(main)) == 1


def test_pause_on_the_event_loop_rejects_a_blocking_generate(build: Build) -> None:
    engine = build()

    async def other_task() -> None:
        with pytest.raises(InvalidRequest, match="paused the engine"):
            engine.generate(PROMPT, drawn())

    async def main() -> None:
        engine.pause()
        await asyncio.create_task(other_task())

    asyncio.run(main())


# -- one thread ------------------------------------------------------------------------------------


def test_submit_accepts_requests_while_paused(build: Build) -> None:
    """`submit` does not wait, so the pausing thread may call it."""
    engine = build()
    deltas: list[Any] = []
    engine.pause()
    engine.submit(PROMPT, drawn(), 1, deltas.append, stream=False)
    engine.resume()
    drain(engine)
    assert [delta.finished.finish_reason for delta in deltas] == ["length"]


@pytest.mark.parametrize("stop", ["pause", "sleep"])
def test_generate_rejects_a_pause_by_the_consumer_of_its_stream(build: Build, stop: str) -> None:
    engine = build()
    verb = "paused the engine" if stop == "pause" else "put the engine to sleep"
    deltas = engine.generate(PROMPT, drawn(), stream=True)
    next(deltas)
    getattr(engine, stop)()
    with pytest.raises(InvalidRequest, match=verb):
        list(deltas)
    engine.wake() if stop == "sleep" else engine.resume()
    assert not engine.loop.sequences.by_id, "its request has ended"
    assert len(engine.generate(PROMPT, drawn())) == 1


def test_generate_rejects_a_pause_by_its_progress_function(build: Build) -> None:
    engine = build()
    with pytest.raises(InvalidRequest, match="paused the engine"):
        engine.generate(PROMPT, drawn(), progress=lambda *_: engine.pause() and None)
    engine.resume()
    assert len(engine.generate(PROMPT, drawn())) == 1


def test_generate_continues_after_a_consumer_pauses_and_resumes(build: Build) -> None:
    engine = build()
    expected = engine.generate(PROMPT, drawn())[0]
    for delta in engine.generate(PROMPT, drawn(), stream=True):
        engine.pause()
        engine.resume()
        if delta.finished is not None:
            assert same(delta.finished, expected)


def test_generate_ends_after_its_consumer_pauses_with_wait(build: Build) -> None:
    engine = build()
    samples = 0
    for delta in engine.generate(PROMPT, drawn(), stream=True):
        if not engine.is_paused():
            engine.pause("wait")
        samples += delta.finished is not None
    assert samples == 1
    engine.resume()


def test_pause_survives_a_sleep_of_another_thread(build: Build) -> None:
    engine = build()
    engine.pause()

    def sleep_and_wake() -> None:
        engine.sleep()
        engine.wake(memory=["kv_cache"])

    thread = threading.Thread(target=sleep_and_wake)
    thread.start()
    thread.join(PATIENCE)
    assert engine.is_paused()
    with pytest.raises(InvalidRequest, match="paused the engine"):
        engine.generate(PROMPT, drawn())


def test_pauses_of_two_engines_are_both_remembered(build: Build) -> None:
    one, other = build(), build()
    one.pause()
    other.pause()
    for engine in (one, other):
        with pytest.raises(InvalidRequest, match="paused the engine"):
            engine.generate(PROMPT, drawn())
    other.resume()
    with pytest.raises(InvalidRequest, match="paused the engine"):
        one.generate(PROMPT, drawn())
    one.add_request(PROMPT, drawn())
    with contextlib.suppress(InvalidRequest):
        one.resume()
    one.step()
    one.pause()
    with pytest.raises(WeightUpdateError, match="would wait for paused requests"):
        one.update_weights(NEW, blocking=True, kv_policy="wait")


# -- Ctrl-C near the lock --------------------------------------------------------------------------


def interrupted_at(event: int, act: Callable[[], object]) -> bool:
    """Call `act` and deliver Ctrl-C at call number `event` of a built-in function, where CPython
    checks for signals. Return True if Ctrl-C was delivered.
    """
    seen = 0

    def profile(_: Any, kind: str, __: Any) -> None:
        nonlocal seen
        seen += kind == "c_return"
        if kind == "c_return" and seen == event:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("blocking", [True, False])
def test_fair_lock_is_free_after_an_interrupted_acquire(blocking: bool) -> None:
    event = 0
    for event in range(1, 20):
        lock = FairLock()
        if not interrupted_at(event, partial(lock.acquire, blocking)):
            break
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lock.acquire, False).result(PATIENCE), f"leaked at event {event}"
    assert event > 2, "it was interrupted"
