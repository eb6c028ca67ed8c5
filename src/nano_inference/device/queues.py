"""Device services for the CUDA runner: asynchronous copies, events, captured graphs.

`HostQueue` defines the rules and implements them in host memory, where Triton's interpreter runs
kernels: all work is immediate, and a captured graph is the function itself, called again on the
same static tensors. `CudaQueue` implements them on a GPU.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nano_inference.core.failures import DeviceHangs

DEADLINE = 300.0  # maximum seconds of a step on the device
# seconds between two polls of an event: a poll holds the GIL for a microsecond, sleep does not
NAP = 20e-6

Copies = Sequence[tuple[Tensor, Tensor]]  # (source, target), of one shape and dtype
Pool = Any  # memory shared by graphs


class Event:
    """Point in the device's work.

    Host work passes it immediately. On a GPU, a CUDA event takes its place.
    """

    def query(self) -> bool:
        """Return True if the device has passed the event.

        Raises the errors of preceding device work.
        """
        return True


class Captured:
    """Work that was captured once and is replayed on the same tensors by one call.

    On the host, a replay calls the function again and copies its result to the first call's output.

    Attributes:
        output: Tensor that the captured function returned, valid after a replay. Each replay
            overwrites it.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run  # keeps the graph's inputs alive: the graph holds only addresses
        self.output: Any = None

    def replay(self) -> None:
        """Queue the work after all queued work."""
        result = self._run()
        if self.output is None:
            self.output = result.clone() if isinstance(result, Tensor) else result
        elif isinstance(result, Tensor):
            self.output.copy_(result)


def wait_for(event: Event, deadline: float) -> None:
    """Poll an event until the device has passed it. `cudaEventSynchronize` has no timeout.

    The next step is already queued when the host waits, so a delay of microseconds costs nothing.
    """
    if event.query():
        return
    end = time.monotonic() + deadline
    while not event.query():
        if time.monotonic() > end:
            raise DeviceHangs(
                f"the device hangs: it has not finished a step in {deadline:g} seconds; restart "
                "the process, and check the system log for errors of the card (dmesg, nvidia-smi)."
            )
        time.sleep(NAP)


class HostQueue:
    """Ordered work of one device, and copies in parallel to it. This class does all work
    immediately.

    Attributes:
        captures_early: True if all graphs are captured in advance, or False if each is captured on
            first use.
        deadline: Timeout of `wait` in seconds.
        failed: True after a timeout or error of the device. Further waits are then pointless.
    """

    captures_early = False

    def __init__(self) -> None:
        self.deadline, self.failed = DEADLINE, False

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on this device."""
        return contextlib.nullcontext()

    def pinned(self, num_words: int) -> Tensor:
        """Allocate uninitialized host memory for asynchronous copies: int64 [num_words]."""
        return torch.empty(num_words, dtype=torch.int64)

    def upload(self, source: Tensor, target: Tensor) -> Event:
        """Copy pinned memory to the device in stream order.

        `source` may be reused after the event.
        """
        target.copy_(source)
        return Event()

    def download(self, copies: Copies) -> Event:
        """Copy results of the queued work to pinned memory, in parallel to later work.

        The sources must stay unchanged until the event.
        """
        for source, target in copies:
            target.copy_(source)
        return Event()

    def wait(self, event: Event) -> None:
        """Wait until the device has passed an event. Raises `DeviceHangs` or the device's error."""
        try:
            wait_for(event, self.deadline)
        except Exception:
            self.failed = True
            raise

    def synchronise(self) -> None:
        """Wait until all queued work is done. Raises like `wait`."""

    def new_pool(self) -> Pool:
        """Return memory for graphs that are never replayed simultaneously."""
        return None

    def capture(self, run: Callable[[], Any], pool: Pool) -> Captured:
        """Capture a function, on a GPU after a warm-up run that compiles its kernels.

        `run` must not wait or read values from the device. Inputs that change between replays must
        be in tensors allocated outside of `run`.
        """
        return Captured(run)


class _CudaGraph(Captured):
    def __init__(self, graph: "torch.cuda.CUDAGraph", output: Any, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()


class CudaQueue(HostQueue):
    """Queue of a GPU.

    Work is queued on the current stream, so kernels, graphs and uploads have a single order.
    """

    captures_early = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        with self.current():
            self._side = torch.cuda.Stream()  # downloads results while the next step computes
            # one stream for all graphs of a pool, so that they share its memory
            self._capturing = torch.cuda.Stream()

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)  # Triton also launches on the current device

    def pinned(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> Event:
        target.copy_(source, non_blocking=True)
        return self._mark(torch.cuda.current_stream())

    def download(self, copies: Copies) -> Event:
        self._side.wait_event(self._mark(torch.cuda.current_stream()))
        with torch.cuda.stream(self._side):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return self._mark(self._side)

    def synchronise(self) -> None:
        with self.current():
            for stream in (torch.cuda.current_stream(), self._side):
                self.wait(self._mark(stream))

    def new_pool(self) -> Pool:
        """Return a new pool. torch rejects the reuse of a pool after its graphs are gone."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Pool) -> Captured:
        stream = self._capturing
        stream.wait_stream(torch.cuda.current_stream())
        # warm up on the capturing stream: cuBLAS keeps a workspace per stream
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self.synchronise()  # entering the capture also waits, but without a timeout
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile, for example to receive weights. The default mode
        # would abort the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return _CudaGraph(graph, output, run)

    @staticmethod
    def _mark(stream: "torch.cuda.Stream") -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event


def queue_of(device: torch.device) -> HostQueue:
    """Return the queue of a device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
