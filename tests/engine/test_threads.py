"""Several threads on one engine: no unbounded waits, no starvation, no wait for an event that has
passed.
"""

import asyncio
import signal
import threading
import time
from typing import Any

import pytest

from nano_inference import (
    AsyncInferenceEngine,
    Delta,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    TrainingSample,
    WeightUpdate,
    WeightUpdateError,
)
from nano_inference.rl import PolicyModel, replay
from nano_inference.system.locks import FairLock
from tests.standing import stand_still
from tests.weights.weight_cases import (
    NEW,
    NEWER,
    NORM,
    OLD,
    PROMPT,
    UP,
    Build,
    assert_holds,
    bits,
    drain,
    drawn,
    until,
)

PATIENCE = 20.0  # seconds; a hanging test fails


@pytest.fixture
def engine(build: Build) -> InferenceEngine:
    return build()


# -- the lock --------------------------------------------------------------------------------------


def wait_until_waited_for(lock: FairLock) -> None:
    """Return once another thread is queued for the lock."""
    deadline = time.monotonic() + PATIENCE
    while lock._turn.acquire(blocking=False):  # otherwise the queued thread holds it
        lock._turn.release()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_fair_lock_lets_waiters_in_between_reacquisitions() -> None:
    """With a plain lock the loop reacquires hundreds of times before the waiting thread wakes up."""
    lock, turns = FairLock(), list[str]()

    def wait() -> None:
        with lock:
            turns.append("the one that waits")

    for _ in range(20):
        waiting = threading.Thread(target=wait)
        with lock:
            waiting.start()
            wait_until_waited_for(lock)
        with lock:
            turns.append("the one that had it")
        waiting.join(PATIENCE)
    assert turns == ["the one that waits", "the one that had it"] * 20


def test_fair_lock_is_reentrant_only_for_its_owner() -> None:
    lock, acquired = FairLock(), list[bool]()
    with lock, lock:
        assert lock.acquire(blocking=False)
        lock.release()
        other = threading.Thread(target=lambda: acquired.append(lock.acquire(blocking=False)))
        other.start()
        other.join(PATIENCE)
    assert acquired == [False]
    with pytest.raises(RuntimeError, match="does not hold the lock"):
        lock.release()
    assert lock.acquire(blocking=False)
    lock.release()


def test_pause_takes_effect_within_a_few_steps(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request(PROMPT, drawn(40))
    step, paused_after = engine.loop.step, list[int]()
    pausing = threading.Thread(
        target=lambda: (engine.pause(), paused_after.append(engine.loop.num_steps))
    )

    def step_and_meet() -> list[TrainingSample]:
        if pausing.ident is None:
            pausing.start()
            wait_until_waited_for(engine.shared.lock)
        return step()

    monkeypatch.setattr(engine.loop, "step", step_and_meet)
    for _ in range(30):
        engine.step()
    pausing.join(PATIENCE)
    assert paused_after == [1]


# -- in the middle of another thread's step --------------------------------------------------------


def test_sample_delivered_by_another_thread_is_not_lost(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample has left the loop and has not arrived: no work remains, but a result is pending."""
    ended, step = threading.Event(), engine.loop.step

    def slow_step() -> list[TrainingSample]:
        samples = step()
        if samples:
            ended.set()
            time.sleep(0.2)
        return samples

    monkeypatch.setattr(engine.loop, "step", slow_step)
    deltas = engine.generate(PROMPT, drawn(4), stream=True)
    received: list[Delta] = [next(deltas)]

    def step_on() -> None:
        while not ended.is_set():
            engine.step()

    other = threading.Thread(target=step_on)
    other.start()
    assert ended.wait(PATIENCE)
    assert engine.loop.sequences.by_id == {}
    received += deltas
    other.join(PATIENCE)
    assert received[-1].finished is not None


def test_queued_request_counts_as_work(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, enter = threading.Event(), engine.loop._enter

    def slow_enter(sequence: Any) -> Any:
        taken.set()
        time.sleep(0.2)
        return enter(sequence)

    monkeypatch.setattr(engine.loop, "_enter", slow_enter)
    engine.add_request(PROMPT, drawn(4))
    other = threading.Thread(target=engine.shared.handle)
    other.start()
    assert taken.wait(PATIENCE)
    assert engine.has_pending()
    other.join(PATIENCE)
    assert len(drain(engine)) == 1


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["shutdown", "failure"])
def test_update_wait_ends_if_the_engine_ended(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    engine.add_request(PROMPT, drawn(40))
    engine.step()
    pending = engine.update_weights(NEW, kv_policy="wait")
    receiving = engine.weight_sync.begin()
    if how == "shutdown":
        engine.shutdown()
    else:
        monkeypatch.setattr(engine.runner, "forward", lambda *_: 1 // 0)
        with pytest.raises(EngineDead):
            engine.step()
    for update in (pending, receiving):
        with pytest.raises(
            WeightUpdateError, match="shut down" if how == "shutdown" else "a step failed"
        ):
            update.result(PATIENCE)
    with pytest.raises(WeightUpdateError):
        engine.weight_sync.begin()
    engine.shutdown()
    assert not engine.model.params, "a failed engine releases its memory"


def test_shutdown_ends_callers_of_a_paused_engine(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_still(monkeypatch, engine.loop)

    async def main() -> None:
        a = AsyncInferenceEngine(engine)
        task = asyncio.create_task(a.generate(PROMPT, drawn(100)))
        await until(lambda: engine.loop.num_steps == 3)
        await a.pause()
        assert not task.done()
        await asyncio.sleep(0.05)  # the stepping thread is waiting for work by now
        engine.shutdown()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(task, PATIENCE)
        a.stop()

    asyncio.run(main())


def test_interrupted_step_ends_the_engine(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks become matchable when their computation launches, and its progress is unknown here."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, drawn())
    monkeypatch.undo()
    with pytest.raises(EngineDead, match="interrupted"):
        engine.generate(PROMPT, drawn())


# -- weights that are asleep -----------------------------------------------------------------------


def test_weight_readers_wait_for_weight_writers(engine: InferenceEngine) -> None:
    model = PolicyModel(engine)
    sample = engine.generate(PROMPT, drawn())[0]
    before = model.logprobs([PROMPT])[0].detach()
    engine.sleep(weights=True)
    for read in (lambda: replay(engine, sample), lambda: PolicyModel(engine)):
        with pytest.raises(InvalidRequest, match="asleep"):
            read()
    for param in model.parameters():
        param.data.mul_(0.5)
    with pytest.raises(InvalidRequest, match="asleep"):
        model.logprobs([PROMPT])  # if written now, waking would overwrite it
    engine.wake()
    after = model.logprobs([PROMPT])[0].detach()
    assert not after[1:].equal(before[1:])
    model.publish()
    assert engine.generate([*PROMPT], drawn())[0].weight_version == 1
    assert replay(engine, engine.generate(PROMPT, drawn())[0]).weight_version == 1


# -- updates between other calls -------------------------------------------------------------------


@pytest.mark.parametrize("late", ["request", "update"])
def test_tensors_belong_to_the_caller_after_the_update(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """An update that seemed immediate has to wait because of another thread's action."""
    if late == "update":
        engine.add_request(PROMPT, drawn())
        engine.step()
    stage = engine.weight_sync.stage

    def stage_and_meet(*args: Any, **options: Any) -> WeightUpdate:
        monkeypatch.undo()
        if late == "request":
            engine.add_request(PROMPT, drawn())
        else:
            other = threading.Thread(
                target=lambda: engine.update_weights({UP: NEW[UP]}, kv_policy="wait")
            )
            other.start()
            other.join(PATIENCE)
        return stage(*args, **options)

    monkeypatch.setattr(engine.weight_sync, "stage", stage_and_meet)
    tensors = {NORM: NEWER[NORM].clone()}
    update = engine.update_weights(tensors, kv_policy="wait" if late == "request" else "keep")
    assert not update.done()
    tensors[NORM].zero_()
    drain(engine)
    assert_holds(engine, OLD | {NORM: NEWER[NORM]} | ({UP: NEW[UP]} if late == "update" else {}))


def test_weight_manager_leaves_writes_to_its_engine(engine: InferenceEngine) -> None:
    """If written without the loop, new weights would be used with the old cache and version."""
    engine.weight_sync.start_sync({NORM: NEW[NORM]})
    with pytest.raises(WeightUpdateError, match="update_weights"):
        engine.weight_sync.maybe_finish_sync()
    with pytest.raises(WeightUpdateError, match="update_weights"):
        engine.weight_sync.sync_blocking(NEWER)
    assert engine.update_weights({UP: NEW[UP]}, blocking=True).version == 2
    assert engine.get_weight_version() == engine.loop.sequences.versions["policy"] == 2
    assert_holds(engine, OLD | {NORM: NEW[NORM], UP: NEW[UP]})


def test_ctrl_c_takes_effect_between_steps(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(PROMPT, drawn(12))
    forward, calls = engine.runner.forward, list[int]()

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(*arguments)

    monkeypatch.setattr(engine.runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, [5, 6]], drawn(12))
    assert len(calls) == 3, "at the end of that very step"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not engine.loop.sequences.by_id
    engine.loop.check()
    again = engine.generate(PROMPT, drawn(12))
    assert [bits(sample) for sample in again] == [bits(sample) for sample in expected]


def test_second_ctrl_c_does_not_wait(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine.runner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, drawn(4))
    with pytest.raises(EngineDead, match="interrupted"):
        engine.generate(PROMPT, drawn(4))
