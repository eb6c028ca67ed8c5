"""Rank 0's view of the other ranks: sends messages, waits for answers, and detects lost ranks."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from nano_inference.errors import RankLost
from nano_inference.ranks.launcher import Handle
from nano_inference.ranks.link import Link, LinkLost
from nano_inference.ranks.messages import (
    BUILT,
    PLANNED,
    REFUSED,
    SIZED,
    Answer,
    Beat,
    Build,
    Call,
    Failed,
    Hello,
    Size,
    Stop,
    as_error,
    decode_from_worker,
    encode,
)
from nano_inference.ranks.samples import SampleQueue, Samples

logger = logging.getLogger("nano_inference")

BEAT = 1.0  # seconds between two beats of a worker
SILENCE = 5.0  # seconds without a beat after which a rank is considered to hang
BUILD_SECONDS = 3600.0  # timeout of loading a model
STOP_PATIENCE = 5.0  # seconds that workers get to end by themselves
ENDED = "the engine has ended, and its ranks with it"
LAST_WORDS = 0.5  # seconds to detect a rank's end after another rank could not reach it


class Worker:
    """One of the other ranks."""

    def __init__(self, rank: int, link: Link, handle: Handle) -> None:
        self.rank, self.link, self.handle = rank, link, handle
        self.who = f"rank {rank}"
        self.last_beat = time.monotonic()
        self.has_hung_up = False
        self.handled = 0
        self.times: tuple[int, int] = (0, 0)  # nanoseconds: busy, waiting for another stage
        self.answers: dict[int, Answer] = {}


class WorkerGroup:
    """All other ranks.

    Args:
        links: Links to the ranks, by rank.
        handles: Their processes, beginning with rank 1.
        timeout: Maximum seconds that a rank may take while others wait.

    Attributes:
        lost: Reason why the engine cannot continue, or None.
        samples: Queue of samples, if another rank draws them.
    """

    def __init__(
        self, links: Mapping[int, Link], handles: Sequence[Handle], timeout: float
    ) -> None:
        self.workers = [
            Worker(rank, links[rank], handle) for rank, handle in enumerate(handles, start=1)
        ]
        self.world_size = len(self.workers) + 1
        self.timeout = timeout
        self.lost: RankLost | None = None
        self._watcher: Callable[[RankLost], None] = lambda _: None
        self.samples = SampleQueue(timeout, lambda: self.lost, self.explain)
        self._changed = threading.Condition()
        self._num_calls = 0
        self._ending = False
        for worker in self.workers:
            worker.link.settle(timeout)
            threading.Thread(
                target=self._listen, args=(worker,), name=worker.who, daemon=True
            ).start()

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Call `lost` once when a rank is lost, on any thread, or immediately if one is already
        lost.

        Replaces the previous watcher.
        """
        with self._changed:
            self._watcher, problem = lost, self.lost
        if problem is not None:
            lost(problem)

    # -- telling -----------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """Send a message to all ranks. Raises `RankLost`."""
        frame = encode(message)
        for worker in self.workers:
            self._send(worker, frame)

    def tell_one(self, rank: int, message: Any) -> None:
        """Send a message to one rank. Raises `RankLost`."""
        self._send(self.workers[rank - 1], encode(message))

    def call(self, name: str, /, *, slow: bool = False, **arguments: Any) -> list[Any]:
        """Run a function on all other ranks, and return their results by rank.

        Raises `RankLost`, or an error of the function. A `slow` call may take an hour while its
        workers send heartbeats.
        """
        return self.answers(self.ask(name, **arguments), slow=slow)

    def ask(self, name: str, /, **arguments: Any) -> int:
        """Start a function on all other ranks. Pass the result to `answers`."""
        with self._changed:
            self._num_calls += 1
            call_id = self._num_calls
        self.tell(Call(name, arguments, call_id))
        return call_id

    def answers(self, call_id: int, *, slow: bool = False) -> list[Any]:
        """Return the results of a call, by rank.

        Raises `RankLost`, or the first error after all ranks have answered.
        """
        seconds = BUILD_SECONDS if slow else self.timeout
        self._wait(lambda worker: call_id in worker.answers, seconds, "an answer", beats=slow)
        with self._changed:
            received = [(worker, worker.answers.pop(call_id)) for worker in self.workers]
        for worker, answer in received:
            _raise_error(worker, answer)
        return [answer.value for _, answer in received]

    # -- the beginning -----------------------------------------------------------------------------

    def begin(self, build: Build) -> None:
        """Let all ranks build their parts. Return when they are about to connect to each other.

        Raises the error of a rank that cannot be built.
        """
        self.tell(build)
        self._reached(PLANNED)

    def sizes(self) -> list[Size]:
        """Return the possible size of each rank's KV cache.

        Raise the error of a rank that cannot be built.
        """
        return [msgspec.convert(size, Size) for size in self._reached(SIZED)]

    def require_built(self) -> None:
        """Wait until all ranks are ready for steps.

        Raise the error of a rank that cannot be built.
        """
        self._reached(BUILT)

    def require_no_refusal(self) -> None:
        """Raise the error of a rank that cannot be built, if it has reported one or is about to."""
        with self._changed:
            if self.lost is not None:  # a refusing rank ends, then its waiting peers
                self._changed.wait_for(lambda: any(map(_has_refused, self.workers)), LAST_WORDS)
            refused = [worker for worker in self.workers if _has_refused(worker)]
        for worker in refused:
            _raise_error(worker, worker.answers[REFUSED])

    def _reached(self, stage: int) -> list[Any]:
        """Wait for a stage of building. Return each rank's answer."""
        try:
            self._wait(
                lambda worker: stage in worker.answers or _has_refused(worker),
                BUILD_SECONDS,
                "a report on its part of the model",
                beats=True,
            )
        except RankLost:
            self.require_no_refusal()
            raise
        self.require_no_refusal()
        return [worker.answers.pop(stage).value for worker in self.workers]

    # -- the end -----------------------------------------------------------------------------------

    def explain(self, problem: BaseException) -> RankLost:
        """Return the reason of a failed wait, with the lost rank as soon as it is known."""
        with self._changed:
            if self._ending:
                return self.lost or RankLost(ENDED)
            self._changed.wait_for(lambda: self.lost is not None, LAST_WORDS)
        if self.lost is None:
            self._lose(self._slowest(), f"makes no progress ({problem})")
        return self.lost or RankLost(str(problem))

    def close(self) -> None:
        """End all ranks, gracefully if possible."""
        self._end_waiting()
        for worker in self.workers:
            with suppress(LinkLost):
                worker.link.send(encode(Stop()))
        if self.lost is None:
            self._wait_for_ends(lambda worker: worker.has_hung_up, STOP_PATIENCE)
            self._wait_for_ends(lambda _: False, LAST_WORDS)  # visible processes only
        self.kill()

    def kill(self) -> None:
        """Kill all ranks immediately."""
        self._end_waiting()
        for worker in self.workers:
            worker.link.close()
        for worker in self.workers:
            worker.handle.kill()

    # -- inside ------------------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """Wake threads that wait for an answer, without one."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _send(self, worker: Worker, frame: bytes) -> None:
        if self.lost is not None:
            raise self.lost
        try:
            worker.link.send(frame)
        except LinkLost as problem:
            raise self.explain(problem) from problem

    def _wait_for_ends(self, done: Callable[[Worker], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(
            worker.handle.alive() and not done(worker) for worker in self.workers
        ):
            time.sleep(0.01)

    def _wait(
        self, done: Callable[[Worker], bool], seconds: float, what: str, beats: bool = False
    ) -> None:
        """Wait until `done` is true of all workers.

        With `beats`, a silent worker is lost after `timeout`.
        """
        end = time.monotonic() + seconds
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.lost is not None or self._ending or all(map(done, self.workers)),
                    BEAT,
                )
                if self.lost is not None or self._ending:
                    raise self.lost or RankLost(ENDED)
                left = [worker for worker in self.workers if not done(worker)]
            if not left:
                return
            now = time.monotonic()
            for worker in left:
                silent = beats and now - worker.last_beat > self.timeout
                if now > end or silent:
                    self._lose(
                        worker,
                        f"did not send {what} within {self.timeout if silent else seconds:g} s",
                    )

    def _slowest(self) -> Worker:
        """Return the worker that blocks the others: silent, or with the least progress."""
        return self._silent() or min(self.workers, key=lambda worker: worker.handled)

    def _silent(self) -> Worker | None:
        """Return the worker that has stopped sending beats, if any."""
        silent = min(self.workers, key=lambda worker: worker.last_beat)
        return (
            silent if time.monotonic() - silent.last_beat > min(SILENCE, self.timeout / 2) else None
        )

    def _listen(self, worker: Worker) -> None:
        """Receive the messages of one worker. Runs on a separate thread."""
        try:
            while True:
                message = decode_from_worker(worker.link.receive())
                worker.last_beat = time.monotonic()
                match message:
                    case Beat(handled, busy, waiting):
                        worker.handled, worker.times = handled, (busy, waiting)
                        continue
                    case Samples():
                        self.samples.put(message)
                    case Failed(text):
                        self._lose(worker, f"failed: {text}")
                        return
                    case Answer(call_id):
                        with self._changed:
                            worker.answers[call_id] = message
                            self._changed.notify_all()
                    case Hello(pid, host):
                        worker.who = f"rank {worker.rank} (process {pid} on {host})"
        except LinkLost as problem:
            worker.has_hung_up = True
            how, silent = self._how_it_ended(worker, str(problem)), self._silent()
            if silent is None or silent is worker or "signal" in how:
                self._lose(worker, how)
            else:  # the worker ended because it waited in vain for the silent one
                self._lose(silent, f"makes no progress ({worker.who} {how})")
        except Exception as problem:
            self._lose(worker, f"sent an invalid message: {problem}")

    def _how_it_ended(self, worker: Worker, otherwise: str) -> str:
        if self._ending:
            return "has ended"
        end = time.monotonic() + LAST_WORDS
        while worker.handle.alive() and time.monotonic() < end:
            time.sleep(0.005)
        return f"is lost: {otherwise}" if worker.handle.alive() else worker.handle.ended()

    def _lose(self, worker: Worker, how: str) -> None:
        """Record a lost rank, which ends the engine. The first reason is kept."""
        with self._changed:
            if self.lost is not None or self._ending:
                self._changed.notify_all()
                return
            self.lost = RankLost(f"{worker.who} of {self.world_size} {how}")
            watcher = self._watcher
            self._changed.notify_all()
        self.samples.wake()
        logger.error("%s", self.lost)
        watcher(self.lost)


def _has_refused(worker: Worker) -> bool:
    return REFUSED in worker.answers


def _raise_error(worker: Worker, answer: Answer) -> None:
    """Raise the error of a call on another rank, if any."""
    if answer.error:
        raise as_error(answer.error, f"{worker.who}: {answer.text}")
