"""`CudaQueue` without a GPU: its torch calls, their streams and their order."""

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.core.failures import DeviceHangs
from nano_inference.device.queues import CudaQueue


class FakeCuda:
    """Fake `torch.cuda` that records calls per stream. `stuck`: events never complete."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = ["main"]
        self.names = iter(["side", "capture"])
        self.stuck = False
        fake = self

        class Stream:
            def __init__(self, name: str | None = None) -> None:
                self.name = name or next(fake.names)

            def wait_event(self, event: "Event") -> None:
                fake.log.append(f"{self.name} waits for {event.place}")

            def wait_stream(self, stream: "Stream") -> None:
                fake.log.append(f"{self.name} waits for {stream.name}")

        class Event:
            order = ""

            def record(self, stream: Stream) -> None:
                self.place = f"{stream.name}#{len(fake.log)}"
                fake.log.append(f"event {self.place}")

            def query(self) -> bool:
                return not fake.stuck

        class CUDAGraph:
            def replay(self) -> None:
                fake.log.append(f"replay on {fake.streams[-1]}")

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"begin {pool} {capture_error_mode}")
        with self.stream(stream):
            yield
        self.log.append("end")

    def current_stream(self) -> Any:
        return self.Stream(self.streams[-1])

    def graph_pool_handle(self) -> str:
        return "pool"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "Stream",
        "Event",
        "CUDAGraph",
        "device",
        "stream",
        "graph",
        "current_stream",
        "graph_pool_handle",
    ):
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    copy = Tensor.copy_

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking, "the host would wait"
        fake.log.append(f"copy on {fake.streams[-1]}")
        return copy(target, source)

    monkeypatch.setattr(Tensor, "copy_", copied)
    return fake


def test_torch_device_passes_arguments_through() -> None:
    assert {"pool", "stream", "capture_error_mode"} <= inspect.signature(
        torch.cuda.graph
    ).parameters.keys()


def test_results_are_copied_after_the_draw_during_the_next_step(cuda: FakeCuda) -> None:
    queue = CudaQueue(torch.device("cuda"))
    queue.download([(torch.ones(2), torch.zeros(2)), (torch.ones(1), torch.zeros(1))])
    assert cuda.log == [
        "event main#0",
        "side waits for main#0",
        "copy on side",
        "copy on side",
        "event side#4",
    ]
    cuda.log.clear()
    queue.upload(torch.ones(2), torch.zeros(2))
    assert cuda.log == ["copy on main", "event main#1"]


def test_capture_is_warmed_up_on_its_own_idle_stream(cuda: FakeCuda) -> None:
    queue = CudaQueue(torch.device("cuda"))

    def run() -> str:
        cuda.log.append(f"run on {cuda.streams[-1]}")
        return "output"

    captured = queue.capture(run, queue.new_pool())
    seen = [line for line in cuda.log if not line.startswith("event")]
    assert seen == [
        "capture waits for main",
        "run on capture",
        "main waits for capture",
        "begin pool thread_local",
        "run on capture",
        "end",
    ]
    assert captured.output == "output"
    captured.replay()
    assert cuda.log[-1] == "replay on main"


def test_graph_keeps_its_inputs_alive(cuda: FakeCuda) -> None:
    """A graph holds only addresses: it would read memory that was reused."""
    queue = CudaQueue(torch.device("cuda"))

    def capture() -> tuple[Any, weakref.ref[Tensor]]:
        read = torch.ones(3)
        return queue.capture(lambda: read + 1, queue.new_pool()), weakref.ref(read)

    captured, read = capture()
    assert read() is not None
    del captured
    assert read() is None


def test_stuck_queue_times_out(cuda: FakeCuda) -> None:
    queue = CudaQueue(torch.device("cuda"))
    queue.synchronise()
    assert not queue.failed
    queue.deadline, cuda.stuck = 0.02, True
    with pytest.raises(DeviceHangs, match="nvidia-smi"):
        queue.synchronise()
    assert queue.failed
    with pytest.raises(DeviceHangs):
        queue.capture(lambda: None, queue.new_pool())
    assert not any(line.startswith("begin") for line in cuda.log)
