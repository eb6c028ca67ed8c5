"""A blocking update returns or raises for every queue, pause owner and order of events."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest

from nano_inference import InferenceEngine, WeightUpdateError
from nano_inference.types import KvPolicy
from tests.weights.weight_cases import NEW, NEWER, NORM, PROMPT, Build, drain, drawn

SECONDS = 30.0  # a case that never ends hangs
POLICIES: tuple[KvPolicy, ...] = get_args(KvPolicy)
CHANGE = {NORM: NEW[NORM]}
OTHER = {NORM: NEWER[NORM]}

Act = Callable[[InferenceEngine], object]


def announce(policy: KvPolicy) -> Act:
    return lambda engine: engine.update_weights(CHANGE, kv_policy=policy)


ACTS: dict[str, Act] = {
    "wait": announce("wait"),
    "finish_old": announce("finish_old"),
    "recompute": announce("recompute"),
    "pause": lambda engine: engine.pause(),
    "pause, wait": lambda engine: engine.pause("wait"),
    "resume": lambda engine: (engine.wake(), engine.resume()),
    "step": lambda engine: engine.step(),
    "sleep": lambda engine: engine.sleep(memory=["kv_cache"]),
}


def cases() -> Iterator[tuple[tuple[str, ...], bool, KvPolicy]]:
    """Yield every order of up to two actions, and of three if something waits and the engine is
    paused.
    """
    for length in range(4):
        for acts in itertools.product(ACTS, repeat=length):
            waits = {"wait", "finish_old"}.intersection(acts)
            if length < 3 or (
                waits and {"pause", "sleep"}.intersection(acts) and "pause, wait" not in acts
            ):
                for policy in POLICIES if length < 3 else POLICIES[:1]:
                    yield acts, True, policy
                    if length < 2:
                        yield acts, False, policy


class Watched:
    """Run cases on a separate thread until one hangs."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.ended = 0
        self.refused: dict[tuple[tuple[str, ...], KvPolicy], bool] = {}  # as expected or not
        self.problem: BaseException | None = None
        self.now: Any = None
        self._moved = threading.Event()

    def run(self) -> None:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        while thread.is_alive():
            self._moved.clear()
            thread.join(0.05)
            if thread.is_alive() and not self._moved.is_set() and not self._moved.wait(SECONDS):
                self.engine.shutdown()  # ends the wait
                thread.join(SECONDS)
                raise AssertionError(f"it hangs: {self.now}")
        if self.problem is not None:
            raise AssertionError(f"in {self.now}") from self.problem

    def _run(self) -> None:
        try:
            for case in cases():
                self.now = case
                self._case(*case)
                self.ended += 1
                self._moved.set()
        except BaseException as problem:
            self.problem = problem

    def _case(self, acts: tuple[str, ...], busy: bool, policy: KvPolicy) -> None:
        engine, before = self.engine, self.engine.get_weight_version()
        if busy:
            engine.add_request(PROMPT, drawn(4))
            engine.step()
        for act in acts:
            ACTS[act](engine)
        announced = sum(act in POLICIES for act in acts)
        serving, paused = engine.get_weight_version(), engine.is_paused()
        try:
            version = engine.update_weights(OTHER, blocking=True, kv_policy=policy).version
        except WeightUpdateError as problem:
            version, reason = serving, str(problem)
            self.refused[acts, policy] = paused and "this thread" in reason
        else:
            announced += 1
            assert version == before + announced
        assert version == engine.get_weight_version()
        engine.wake()
        engine.resume()
        drain(engine)
        assert engine.get_weight_version() == before + announced, (
            "what was queued before is applied"
        )


@contextmanager
def ending(engine: InferenceEngine) -> Iterator[None]:
    """Expect `EngineDead` from any call that hangs inside."""
    ended = threading.Event()

    def watch() -> None:
        if not ended.wait(SECONDS):
            engine.shutdown()

    threading.Thread(target=watch, daemon=True).start()
    yield
    ended.set()


@pytest.mark.thorough
def test_updates_and_pauses_end_in_every_short_order(build: Build) -> None:
    engine = build()
    watched = Watched(engine)
    watched.run()
    refused = watched.refused
    assert all(refused.values())
    for acts in (("wait", "pause"), ("pause", "wait")):
        assert all((acts, policy) in refused for policy in POLICIES)
    assert (("pause",), "wait") in refused
    assert (("pause",), "recompute") not in refused
    assert len(refused) < watched.ended // 2


def test_update_of_another_thread_is_seen_if_it_comes_first(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update arrives after the queue was checked and before the blocking update is queued."""
    engine = build()
    engine.add_request(PROMPT, drawn(8))
    engine.step()
    engine.pause()
    manager = engine._updates.manager
    stage = manager.stage

    def late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(manager, "stage", stage)
        other = threading.Thread(
            target=engine.update_weights, args=(CHANGE,), kwargs={"kv_policy": "wait"}
        )
        other.start()
        other.join()
        return stage(*args, **options)

    monkeypatch.setattr(manager, "stage", late)
    version = engine.get_weight_version()
    with (
        ending(engine),
        pytest.raises(WeightUpdateError, match="weight version 1 with kv_policy='wait'"),
    ):
        engine.update_weights(OTHER, blocking=True, kv_policy="abort")
    assert engine.get_weight_version() == version
    engine.resume()
    (sample,) = drain(engine)
    assert sample.finish_reason == "length", "a withdrawn update aborted a request"
    assert engine.get_weight_version() == 1
    assert engine.update_weights(OTHER, blocking=True).version == 2


def test_blocking_update_waits_for_another_threads_resume(build: Build) -> None:
    engine = build()
    engine.add_request(PROMPT, drawn(4))
    engine.step()
    engine.update_weights(CHANGE, kv_policy="wait")
    engine.pause()
    waiting = threading.Thread(target=engine.update_weights, args=(OTHER, True), daemon=True)
    waiting.start()
    # but the thread that paused must not wait
    with ending(engine), pytest.raises(WeightUpdateError, match="this thread"):
        engine.update_weights(CHANGE, blocking=True)
    assert waiting.is_alive()
    engine.resume()
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    assert engine.get_weight_version() == 2
