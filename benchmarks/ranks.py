"""The cost of sending a step to another rank: encoding, socket, and batches, in the real loop
without a model.

The other end is a process that does a worker's tasks up to the model. Both ends use the system
clock.
"""

import gc
import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.host import BLOCK_SIZE, FILTERS, PENALTIES, Bench, Case, NullRunner
from nano_inference.core.batch import Chunks
from nano_inference.ranks.link import Link
from nano_inference.ranks.messages import decode_to_worker, encode
from nano_inference.ranks.replay import Draw, Forward, StepReplay, StepSender
from nano_inference.sampling.sampling_batch import Masks

Row = dict[str, Any]
CASES = (
    *(Case("decode", running) for running in (1, 64, 256)),
    Case("decode, lookahead 1", 256, lookahead=1),
    Case("decode, top_p and top_k", 256, FILTERS),
    Case("decode, penalties", 256, PENALTIES),
    Case("turnover", 256, turnover=64),
)


class TellingRunner(NullRunner):
    """A null model whose steps are sent to another process."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link, self._steps = link, StepSender(BLOCK_SIZE)
        self.began: list[int] = []  # nanoseconds per message
        self.left: list[int] = []
        self.num_bytes = 0

    def announce(self, *step: Any) -> None:
        self.began.append(time.monotonic_ns())
        self._tell(self._steps.forward(*step))

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        self.began.append(time.monotonic_ns())
        self._tell(self._steps.draw(chunks, masks))

    def _tell(self, message: Forward | Draw) -> None:
        frame = encode(message)
        self._link.send(frame)
        self.left.append(time.monotonic_ns())
        self.num_bytes += len(frame)


def worker(end: socket.socket, told: Connection) -> None:
    """Receive steps as the other rank until the link ends. Then report the time at which each
    message's batches were built.
    """
    link, replay, done = Link(end), StepReplay(BLOCK_SIZE), list[int]()
    link.settle(60.0)
    gc.disable()
    while True:
        frame = link.receive()
        if not frame:
            break
        message = decode_to_worker(frame)
        if isinstance(message, Forward):
            replay.forward(message)
        else:
            assert isinstance(message, Draw)
            replay.draw(message)
        done.append(time.monotonic_ns())
    told.send(done)


def measure(steps: int = 128, windows: int = 5) -> list[Row]:
    """Return microseconds per step (both of its messages): the median of the windows' medians.

    `forward_us` covers the first message only: then the other rank computes, and the draw arrives
    meanwhile.
    """
    return [summary(case, [window(case, steps) for _ in range(windows)]) for case in CASES]


def window(case: Case, steps: int) -> dict[str, float]:
    """Return medians over the steps after all prompts are computed."""
    here, there = socket.socketpair()
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(duplex=False)
    process = context.Process(target=worker, args=(there, tells), daemon=True)
    process.start()
    there.close()
    link = Link(here)
    link.settle(60.0)
    try:
        bench = Bench(case, steps)
        runner = TellingRunner(link)
        bench.loop.runner = runner  # pyright: ignore[reportAttributeAccessIssue]
        bench.warm_up()
        first, runner.num_bytes = len(runner.began), 0
        gc.collect()
        for _ in range(steps):
            bench.step()
            # as if a model ran: the worker waits for the next step, not for the previous one
            time.sleep(0.0005)
        link.send(b"")
        done = told.recv()
    finally:
        link.close()
        process.join(10)
    began, left, done = runner.began[first:], runner.left[first:], done[first:]
    whole = [(d - b) / 1e3 for b, d in zip(began, done, strict=True)]
    sending = [(s - b) / 1e3 for b, s in zip(began, left, strict=True)]
    return {
        "step": statistics.median(map(sum, zip(whole[::2], whole[1::2], strict=True))),
        "forward": statistics.median(whole[::2]),
        "rank 0": statistics.median(map(sum, zip(sending[::2], sending[1::2], strict=True))),
        "bytes": runner.num_bytes / steps,
    }


def summary(case: Case, windows: list[dict[str, float]]) -> Row:
    """Return one row of the table."""
    whole = [each["step"] for each in windows]
    return {
        "name": f"{case.name}, {case.running} sequences",
        "case": case.name,
        "running": case.running,
        "step_us": round(statistics.median(whole), 1),
        "least_us": round(min(whole), 1),
        "forward_us": round(statistics.median(each["forward"] for each in windows), 1),
        "rank_0_us": round(statistics.median(each["rank 0"] for each in windows), 1),
        "bytes": round(windows[-1]["bytes"]),
    }
