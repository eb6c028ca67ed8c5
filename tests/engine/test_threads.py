"""Several threads at one engine: nobody waits for ever, for long, or for what has ended already."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nano_inference import Delta, EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.engine.fair_lock import FairLock
from tests.models.tiny import tiny_llama

PROMPT = list(range(40, 61))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[InferenceEngine]:
    threads = torch.get_num_threads()
    config = EngineConfig(model_path=str(tiny_llama(tmp_path)), num_threads=1, kv_cache_memory=2**20, block_size=4)
    with InferenceEngine(config) as engine:
        yield engine
    torch.set_num_threads(threads)


def drawn(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True)


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_taken_in_a_loop_goes_to_those_who_wait() -> None:
    """A plain lock is taken again before the waiting thread has woken up: hundreds of times."""
    lock, stop, rounds = FairLock(), threading.Event(), [0]

    def step_on() -> None:
        while not stop.is_set():
            with lock:
                rounds[0] += 1
                time.sleep(0.001)

    stepping = threading.Thread(target=step_on)
    stepping.start()
    try:
        for _ in range(20):
            before = rounds[0]
            with lock:
                assert rounds[0] - before <= 3
    finally:
        stop.set()
        stepping.join(10)


def test_a_lock_is_taken_again_by_its_owner_alone() -> None:
    lock, found = FairLock(), list[bool]()
    with lock, lock:
        assert lock.acquire(blocking=False)
        lock.release()
        other = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        other.start()
        other.join(10)
    assert found == [False]
    with pytest.raises(RuntimeError, match="not this thread's"):
        lock.release()
    assert lock.acquire(blocking=False)
    lock.release()


def test_a_pause_comes_after_a_step_and_not_after_hundreds(engine: InferenceEngine) -> None:
    for _ in range(20):
        engine.add_request(PROMPT, drawn(400))
    stop = threading.Event()

    def step_on() -> None:
        while not stop.is_set():
            engine.step()

    stepping = threading.Thread(target=step_on)
    stepping.start()
    try:
        for _ in range(5):
            before = engine.loop.num_steps
            engine.pause()
            assert engine.loop.num_steps - before <= 5
            engine.resume()
    finally:
        stop.set()
        stepping.join(10)
