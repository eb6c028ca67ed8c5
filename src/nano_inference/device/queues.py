"""What the CUDA runner asks of a device: copies that the host does not wait for, events, captured
graphs.

`HostQueue` says the rules, and keeps them in the host's memory, where Triton's interpreter runs
kernels: everything is done at once, and a captured graph is the function itself, called again on
the same static tensors. `CudaQueue` is a GPU.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nano_inference.core.failures import DeviceHangs

DEADLINE = 300.0  # seconds for which a step may keep the device busy
# seconds between two looks at an event; a look holds Python's lock for a microsecond, a nap does
# not
NAP = 20e-6

Copies = Sequence[tuple[Tensor, Tensor]]  # (source, target), of one shape and dtype
Pool = Any  # memory that graphs share


class Event:
    """A place in the device's work. The host's memory has passed it at once; of a GPU it is CUDA's
    own.
    """

    def query(self) -> bool:
        """Whether the device has passed it. Raises what the device raised on the way."""
        return True


class Captured:
    """Work that was captured once and runs again, on the same tensors, by one call. On the host it
    is the function itself; what it returns is copied to where that of the first call stands.

    Attributes:
        output: what the captured function returned, known after a replay: a tensor that each replay
            writes to.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run  # keeps alive what a graph reads: it knows addresses only
        self.output: Any = None

    def replay(self) -> None:
        """Queue it behind all that is queued."""
        found = self._run()
        if self.output is None:
            self.output = found.clone() if isinstance(found, Tensor) else found
        elif isinstance(found, Tensor):
            self.output.copy_(found)


def wait_for(event: Event, deadline: float) -> None:
    """Look at an event until the device has passed it. `cudaEventSynchronize` would know no
    deadline.

    The next step is queued already when the host waits: a look that comes some microseconds late
    costs nothing.
    """
    if event.query():
        return
    end = time.monotonic() + deadline
    while not event.query():
        if time.monotonic() > end:
            raise DeviceHangs(
                f"the device hangs: it has not finished a step in {deadline:g} seconds; restart "
                "the process, and look "
                "for errors of the card in the system's log (dmesg, nvidia-smi)."
            )
        time.sleep(NAP)


class HostQueue:
    """The work of one device, in order, and copies beside it. Here the host's memory, as a device
    that does everything at once.

    Attributes:
        captures_early: graphs are captured before they are needed, all at once; else one by one, as
            they are.
        deadline: seconds that `wait` waits.
        failed: it has not answered, or with an error: there is no need to wait for it again.
    """

    captures_early = False

    def __init__(self) -> None:
        self.deadline, self.failed = DEADLINE, False

    def current(self) -> AbstractContextManager[Any]:
        """Within it, kernels are launched on this device."""
        return contextlib.nullcontext()

    def pinned(self, num_words: int) -> Tensor:
        """Host memory that copies may read or write while the host goes on: int64 [num_words], not
        initialised.
        """
        return torch.empty(num_words, dtype=torch.int64)

    def upload(self, source: Tensor, target: Tensor) -> Event:
        """Copy pinned memory to the device, in order with its work. `source` may be written again
        after the event.
        """
        target.copy_(source)
        return Event()

    def download(self, copies: Copies) -> Event:
        """Copy to pinned memory what the work queued so far computes, beside work that is queued
        later.

        Sources must stay as they are until the event.
        """
        for source, target in copies:
            target.copy_(source)
        return Event()

    def wait(self, event: Event) -> None:
        """Return once the device has passed an event. Raises `DeviceHangs`, or what the device
        raised.
        """
        try:
            wait_for(event, self.deadline)
        except Exception:
            self.failed = True
            raise

    def synchronise(self) -> None:
        """Return once all that is queued is done; raises like `wait`."""

    def new_pool(self) -> Pool:
        """Memory for graphs that are never replayed at the same time."""
        return None

    def capture(self, run: Callable[[], Any], pool: Pool) -> Captured:
        """Capture a function, after a run that compiles and warms up all that it calls, where there
        is such a thing.

        `run` waits for nothing and reads no value of the device; what it is to read anew in each
        replay stands in tensors that it did not make.
        """
        return Captured(run)


class _CudaGraph(Captured):
    def __init__(self, graph: "torch.cuda.CUDAGraph", output: Any, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()


class CudaQueue(HostQueue):
    """A GPU. Work goes to the stream that is current, so kernels, graphs and uploads stand in one
    order.
    """

    captures_early = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        with self.current():
            self._side = torch.cuda.Stream()  # results leave on it while the next step computes
            # one for all graphs of a pool: then they share its memory
            self._capturing = torch.cuda.Stream()

    def current(self) -> AbstractContextManager[Any]:
        """See `HostQueue`."""
        return torch.cuda.device(self.device)  # also Triton launches on the device that is current

    def pinned(self, num_words: int) -> Tensor:
        """See `HostQueue`."""
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> Event:
        """See `HostQueue`."""
        target.copy_(source, non_blocking=True)
        return self._mark(torch.cuda.current_stream())

    def download(self, copies: Copies) -> Event:
        """See `HostQueue`."""
        self._side.wait_event(self._mark(torch.cuda.current_stream()))
        with torch.cuda.stream(self._side):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return self._mark(self._side)

    def synchronise(self) -> None:
        """See `HostQueue`."""
        with self.current():
            for stream in (torch.cuda.current_stream(), self._side):
                self.wait(self._mark(stream))

    def new_pool(self) -> Pool:
        """See `HostQueue`. A pool is not used again once its graphs are gone: torch refuses
        that.
        """
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Pool) -> Captured:
        """See `HostQueue`."""
        stream = self._capturing
        stream.wait_stream(torch.cuda.current_stream())
        # this one: the vendor's library keeps a workspace for each stream
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self.synchronise()  # entering the capture waits too, but knows no deadline
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile, to receive weights for one. The default would end
        # the capture for that.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = run()
        return _CudaGraph(graph, output, run)

    @staticmethod
    def _mark(stream: "torch.cuda.Stream") -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event


def queue_of(device: torch.device) -> HostQueue:
    """The queue of a device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
