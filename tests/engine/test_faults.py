"""A device failure during a step reaches every caller with its reason; nothing hangs, and the
engine can be shut down.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nano_inference import (
    AsyncInferenceEngine,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    NanoInferenceError,
    SamplingParams,
)
from nano_inference.core.failures import DeviceHangs, is_device_failure
from nano_inference.device.sleep import Sleep
from nano_inference.engine.shared_loop import why_dead
from nano_inference.weights.update import WeightUpdate
from tests.weights.weight_cases import NEW, Build, until

PATIENCE = 30.0  # seconds; a hanging test fails
ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\nSearch for it in the documentation."
)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
FAULTS: dict[str, Callable[[], Exception]] = {
    "access": lambda: torch.AcceleratorError(ILLEGAL),
    "kernel": lambda: RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "hang": lambda: DeviceHangs("the device hangs: an illegal memory access, maybe"),
    "memory": lambda: torch.OutOfMemoryError(OUT_OF_MEMORY),
}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Device:
    """Wrap a runner and fail every call from some point on, like a CUDA device.

    `where` is the call that raises: "forward", "sample" or "wait" (asynchronous errors).
    """

    def __init__(
        self, runner: Any, where: str, fault: Callable[[], Exception], after: int = 3
    ) -> None:
        self._runner, self._where, self._fault = runner, where, fault
        self._left = after
        self.broken = False
        self.released = threading.Event()  # hold the failing call until this event is set
        self.released.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, *args: Any) -> Any:
        self._left -= 1
        self._notice("forward")
        return self._runner.forward(*args)

    def sample(self, *args: Any) -> Any:
        self._notice("sample")
        return _Waited(self, self._runner.sample(*args))

    def _notice(self, where: str) -> None:
        if self.broken or (where == self._where and self._left <= 0):
            assert self.released.wait(PATIENCE)
            self.broken = True
            raise self._fault()


class _Waited:
    def __init__(self, device: Device, sampled: Any) -> None:
        self._device, self._sampled = device, sampled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampled, name)

    def wait(self) -> Any:
        self._device._notice("wait")
        return self._sampled.wait()


@pytest.fixture(params=["forward", "sample", "wait"])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[0, 1])
def engine(request: pytest.FixtureRequest, build: Build) -> InferenceEngine:
    return build(lookahead=request.param, kv_cache_memory=2**18)


def broken(engine: InferenceEngine, where: str, fault: str, after: int = 3) -> Device:
    device = Device(engine.loop.runner, where, FAULTS[fault], after)
    engine.loop.runner = device  # pyright: ignore[reportAttributeAccessIssue]
    return device


def told(fault: str) -> str:
    if fault == "memory":
        return (
            r"a step ran out of the device's memory; lower gpu_memory_utilization from 0\.9 "
            r"to 0\.85 or max_tokens"
        )
    return (
        "a step failed on the device, which this process can no longer use: .*illegal memory access"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_ends_the_engine_with_its_reason(
    engine: InferenceEngine, where: str, fault: str
) -> None:
    broken(engine, where, fault)
    with pytest.raises(EngineDead, match=told(fault)):
        engine.generate([[1, 2, 3], [4, 5]], PARAMS, 2)
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate([[1]], PARAMS),
        lambda: engine.add_request([1], PARAMS),
        engine.step,
        lambda: engine.abort(None),
        lambda: engine.update_weights({}, blocking=True),
        engine.weights_checksum,
        engine.pause,
        engine.resume,
        engine.sleep,
        engine.wake,
        engine.flush_cache,
    ]
    for call in calls:
        with pytest.raises(NanoInferenceError, match=told(fault)):
            call()
    assert not engine.has_pending()
    assert engine.stats().num_blocks
    with engine:
        pass
    engine.shutdown()


def test_out_of_memory_is_not_blamed_on_a_sample(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample by itself might have enough memory."""
    engine = build()
    sample = engine.runner.sample

    def full(result: Any, batch: Any) -> Any:
        if len(batch.rows) > 1:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return sample(result, batch)

    monkeypatch.setattr(engine.runner, "sample", full)
    with pytest.raises(EngineDead, match=told("memory")):
        engine.generate([[1, 2, 3], [4, 5]], PARAMS)


def test_fault_reaches_every_waiting_caller(engine: InferenceEngine, where: str) -> None:
    """Cover two callers of `generate`, one waiting for a pause, one for an update, and one asyncio
    caller.
    """
    device = broken(engine, where, "access")
    device.released.clear()
    ended: dict[str, BaseException] = {}

    def run(name: str, call: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            try:
                call()
            except BaseException as problem:
                ended[name] = problem

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    weights = {name: engine.model.params["norm"].clone() for name in ("model.norm.weight",)}
    threads = [run("first", lambda: engine.generate([1, 2, 3], PARAMS))]
    threads.append(run("second", lambda: engine.generate([4, 5], PARAMS)))
    deadline = time.monotonic() + PATIENCE
    while not engine.loop.num_steps:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    threads.append(run("pause", lambda: engine.pause("wait")))
    threads.append(
        run("update", lambda: engine.update_weights(weights, blocking=True, kv_policy="wait"))
    )
    device.released.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for name in ("first", "second", "pause"):
        assert isinstance(ended[name], EngineDead), name
        assert "illegal memory access" in str(ended[name])
    assert isinstance(ended["update"], NanoInferenceError)
    engine.shutdown()


def test_fault_while_writing_weights_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    update = engine.update_weights
    weights = {"model.norm.weight": engine.model.params["norm"].clone()}

    def fails(*_: Any) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr("nano_inference.weights.update.WeightUpdate.write_to", fails)
    with pytest.raises(EngineDead, match="illegal memory access"):
        update(weights, blocking=True)
    with pytest.raises(EngineDead, match="illegal memory access"):
        engine.generate([1], PARAMS)
    engine.shutdown()


@pytest.mark.parametrize("weights", [False, True])
def test_failed_release_of_memory_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    engine = build()

    def fails(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(Sleep, "__init__", fails)
    with pytest.raises(EngineDead, match="could not be released: AcceleratorError: CUDA error"):
        engine.sleep(weights)
    with pytest.raises(EngineDead):
        engine.generate([1], PARAMS)
    engine.shutdown()


def test_wake_retries_if_the_card_is_full(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    (before,) = engine.generate([1, 2], PARAMS)
    engine.sleep(weights=True)
    end = Sleep.end

    def full(_: Any) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(Sleep, "end", full)
    with pytest.raises(
        NanoInferenceError, match=r"not enough memory to wake weights.* stays asleep"
    ) as problem:
        engine.wake()
    assert not isinstance(problem.value, EngineDead)
    assert engine.sleeping() == ("weights", "kv_cache")
    monkeypatch.setattr(Sleep, "end", end)
    engine.wake()
    (after,) = engine.generate([1, 2], PARAMS)
    assert after.completion_tokens == before.completion_tokens


class Resized:
    """Fake tensor on a card that can release its memory."""

    device = torch.device("cuda")

    def __init__(self, address: int, refusals: list[int]) -> None:
        self.place, self.size, self.refusals = address, 100 + address, refusals

    def data_ptr(self) -> int:
        return self.place

    def untyped_storage(self) -> "Resized":
        return self

    def nbytes(self) -> int:
        return self.size

    def resize_(self, size: int) -> None:
        if size and self.place in self.refusals:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        self.size = size


def test_partial_reallocation_is_released() -> None:
    refusals = [2]
    tensors: list[Any] = [Resized(place, refusals) for place in range(4)]
    part = Sleep(tensors, (), keep=False)
    assert [tensor.size for tensor in tensors] == [0, 0, 0, 0]
    with pytest.raises(torch.OutOfMemoryError):
        part.end()
    assert [tensor.size for tensor in tensors] == [0, 0, 0, 0]
    refusals.clear()
    part.end()
    assert [tensor.size for tensor in tensors] == [100, 101, 102, 103]


def test_device_faults_are_recognized_with_a_remedy() -> None:
    config = EngineConfig("tiny", gpu_memory_utilization=0.06, max_tokens_per_batch=1)
    text, public = why_dead(torch.OutOfMemoryError(OUT_OF_MEMORY), config)
    assert "gpu_memory_utilization from 0.06 to 0.03 (" in text
    assert "max_tokens_per_batch" not in text
    assert public.endswith("from 0.06 to 0.03"), "the error exposes memory of other processes"
    for text in (
        "CUBLAS_STATUS_EXECUTION_FAILED when calling",
        "NCCL error in: x.cpp",
        "CUDA driver error: unknown",
    ):
        assert is_device_failure(RuntimeError(text))
    for problem in (RuntimeError("shape"), ValueError("CUDA error"), KeyError(1)):
        assert not is_device_failure(problem)
    assert why_dead(ValueError("/home"), config) == (
        "a step failed: ValueError: /home",
        "a step failed: ValueError",
    )


# -- samples that ended before ---------------------------------------------------------------------

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def failing_with_a_sample(build: Build, steps: int = 4) -> InferenceEngine:
    """Build an engine that fails in its fourth step, after the third token of a sample."""
    engine = build(lookahead=1)
    device: Any = Device(engine.runner, "sample", FAULTS["access"], steps)
    engine.loop.runner = device
    return engine


def step_until_dead(engine: InferenceEngine) -> None:
    while True:
        assert engine.step() == []


def test_failed_step_delivers_finished_samples_to_sinks(build: Build) -> None:
    engine = failing_with_a_sample(build)
    finished: list[Any] = []
    for params in (SHORT, PARAMS):
        engine.submit([5, 6, 7], params, 1, lambda delta: finished.append(delta), stream=False)
    with pytest.raises(EngineDead, match="illegal memory"):
        step_until_dead(engine)
    assert [delta.finished.finish_reason for delta in finished] == ["length"]
    assert len(finished[0].finished.completion_tokens) == 3


def test_failed_step_raises_with_finished_samples(build: Build) -> None:
    engine = failing_with_a_sample(build)
    request_id = engine.add_request([5, 6, 7], SHORT)
    engine.add_request([5, 6, 7], PARAMS)
    with pytest.raises(EngineDead, match="illegal memory") as raised:
        step_until_dead(engine)
    (sample,) = raised.value.samples
    assert sample.request_id == request_id
    assert sample.finish_reason == "length"
    with pytest.raises(EngineDead) as again:
        engine.step()
    assert not again.value.samples, "each is returned once"


def test_generate_returns_samples_that_ended_before_a_failure(build: Build) -> None:
    engine = failing_with_a_sample(build)
    engine.add_request([5, 6, 7], PARAMS)
    (sample,) = engine.generate([5, 6, 7], SHORT)
    assert sample.finish_reason == "length"
    with pytest.raises(EngineDead):
        engine.generate([5, 6, 7], SHORT)


def test_generate_raises_with_finished_samples(build: Build) -> None:
    engine = failing_with_a_sample(build, steps=10)
    middle = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with pytest.raises(EngineDead) as raised:
        engine.generate([[5, 6], [5, 6, 7], [7]], [middle, PARAMS, SHORT])
    assert [len(sample.completion_tokens) for sample in raised.value.samples] == [5, 3]
    cause = raised.value.__cause__
    assert cause is not None
    assert is_device_failure(cause)  # type: ignore[arg-type]


def test_stream_yields_samples_that_ended_before_the_failure(build: Build) -> None:
    engine = failing_with_a_sample(build)
    deltas: list[Any] = []
    stream = engine.generate([[5, 6, 7], [5, 6]], [SHORT, PARAMS], stream=True)
    with pytest.raises(EngineDead, match="illegal memory"):
        deltas.extend(stream)
    tokens = [token for delta in deltas if delta.request_id == 0 for token in delta.token_ids]
    (sample,) = [delta.finished for delta in deltas if delta.finished is not None]
    assert tuple(tokens) == sample.completion_tokens
    assert len(tokens) == 3


def test_async_generate_returns_if_it_ended_before_the_failure(build: Build) -> None:
    engine = failing_with_a_sample(build)

    async def main() -> list[Any]:
        async with AsyncInferenceEngine(engine) as a:
            engine.pause()
            calls = [asyncio.create_task(a.generate([5, 6, 7], each)) for each in (SHORT, PARAMS)]
            await until(lambda: len(engine.loop.sequences.by_id) == 2)
            engine.resume()
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)

    (sample,), problem = asyncio.run(main())
    assert sample.finish_reason == "length"
    assert isinstance(problem, EngineDead)


def test_failed_write_of_an_update_delivers_finished_samples(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update retires the step in flight, whose sample has ended."""
    engine = build(lookahead=1)
    request_id = engine.add_request([5, 6, 7], SHORT)
    for _ in range(3):
        assert engine.step() == []
    assert engine.loop.in_flight

    def write_to(*_: Any) -> None:
        raise FAULTS["access"]()

    monkeypatch.setattr(WeightUpdate, "write_to", write_to)
    engine.update_weights(NEW)
    with pytest.raises(EngineDead) as raised:
        engine.step()
    assert [sample.request_id for sample in raised.value.samples] == [request_id]
