"""A device failure at any call of `CudaRunner` hangs no caller and reaches every caller."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nano_inference import AsyncInferenceEngine, EngineDead, InferenceEngine, SamplingParams
from nano_inference.core.failures import DeviceHangs
from nano_inference.device import cuda_runner
from tests.device.cuda_cases import CheckingQueue, conventional
from tests.weights.weight_cases import Build

__all__ = ["conventional"]
pytestmark = pytest.mark.usefixtures("conventional")

PATIENCE = 30.0  # seconds
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
FAULTS: dict[str, Callable[[], Exception]] = {
    "access": lambda: torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered"
    ),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "hang": lambda: DeviceHangs("the device hangs: it has not finished a step in 300 seconds"),
}
TOLD = {
    "access": "illegal memory access",
    "memory": "out of the device's memory; lower",
    "hang": "the device hangs",
}
PLACES = ("upload", "download", "wait", "capture", "replay")


class Failing(CheckingQueue):
    """Fail at one call, and from then on at every other, like a device."""

    where = ""
    fault = "access"
    broken = False
    left = 0  # remaining calls that succeed

    def _touch(self, where: str) -> None:
        if where == self.where and self.left:
            self.left -= 1
        elif self.broken or where == self.where:
            self.broken = self.failed = True
            raise FAULTS[self.fault]()

    def upload(self, source: Any, target: Any) -> Any:
        self._touch("upload")
        return super().upload(source, target)

    def download(self, copies: Any) -> Any:
        self._touch("download")
        return super().download(copies)

    def wait(self, event: Any) -> None:
        self._touch("wait")
        super().wait(event)

    def synchronise(self) -> None:
        assert not self.broken, "a failed device was waited for"

    def capture(self, run: Callable[[], Any], pool: Any) -> Any:
        self._touch("capture")
        return _Replayed(super().capture(run, pool), self)


class _Replayed:
    def __init__(self, captured: Any, queue: Failing) -> None:
        self._captured, self._queue, self.output = captured, queue, captured.output

    def replay(self) -> None:
        self._queue._touch("replay")
        self._captured.replay()


@pytest.fixture
def failing(build: Build, monkeypatch: pytest.MonkeyPatch) -> Callable[..., InferenceEngine]:
    def make(where: str, fault: str, left: int = 2, **options: Any) -> InferenceEngine:
        queue = Failing()
        queue.where, queue.fault, queue.left = where, fault, left
        monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: queue)
        return build(backend="cuda", **options)

    return make


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", PLACES)
def test_cuda_fault_ends_the_engine_with_its_reason(
    failing: Callable[..., InferenceEngine], where: str, fault: str
) -> None:
    engine = failing(where, fault, lookahead=1)
    with pytest.raises(EngineDead, match=TOLD[fault]) as problem:
        engine.generate([[1, 2, 3], [4, 5]], PARAMS)
    assert TOLD[fault] in problem.value.public
    with pytest.raises(EngineDead, match=TOLD[fault]):
        engine.generate([[1]], PARAMS)
    engine.shutdown()


@pytest.mark.parametrize("where", PLACES)
def test_cuda_fault_reaches_awaiting_tasks(
    failing: Callable[..., InferenceEngine], where: str
) -> None:
    async def one(engine: AsyncInferenceEngine, seed: int) -> None:
        async for _ in engine.stream([seed, 2], PARAMS):
            pass

    async def run() -> None:
        async with AsyncInferenceEngine(failing(where, "access", lookahead=1)) as engine:
            ended = await asyncio.wait_for(
                asyncio.gather(*(one(engine, i) for i in range(3)), return_exceptions=True),
                PATIENCE,
            )
        assert all(isinstance(each, EngineDead) for each in ended), ended
        assert all("illegal memory access" in str(each) for each in ended)

    asyncio.run(run())


@pytest.mark.parametrize("where", ["capture", "upload"])
def test_cuda_fault_after_a_sleep_ends_the_engine(
    failing: Callable[..., InferenceEngine], where: str
) -> None:
    """Graphs are captured again after memory has moved."""
    engine = failing(where, "memory", left=10**6, lookahead=1)
    assert engine.generate([[1, 2]], PARAMS)
    engine.sleep()
    engine.wake()
    engine.model.forget_recorded()  # simulates moved memory
    engine.runner.queue.left = 0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineDead, match=TOLD["memory"]):
        engine.generate([[1, 2]], PARAMS)
    engine.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_bug_in_the_stepping_thread_reaches_awaiting_tasks(build: Build) -> None:
    engine = build(backend="reference")

    def fails() -> None:
        raise KeyError("a bug")

    engine.loop.audit = fails

    async def run() -> None:
        async with AsyncInferenceEngine(engine) as shared:
            with pytest.raises(EngineDead, match="the stepping thread has ended: KeyError"):
                await asyncio.wait_for(shared.generate([[1, 2]], PARAMS), PATIENCE)
            with pytest.raises(EngineDead):
                await asyncio.wait_for(shared.generate([[1, 2]], PARAMS), PATIENCE)

    asyncio.run(run())
