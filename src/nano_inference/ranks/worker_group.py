"""Rank 0's view of the others: tells them what to do, waits for answers, and notices when one is
gone.
"""

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
SILENCE = 5.0  # seconds without one after which a rank is named as the one that hangs
BUILD_SECONDS = 3600.0  # for a model to be read
STOP_PATIENCE = 5.0  # seconds that workers get to end by themselves
ENDED = "the engine has ended, and its ranks with it"
LAST_WORDS = 0.5  # seconds for a rank's end to be seen, once another one could not reach it


class Worker:
    """One other rank."""

    def __init__(self, rank: int, link: Link, handle: Handle) -> None:
        self.rank, self.link, self.handle = rank, link, handle
        self.who = f"rank {rank}"
        self.last_beat = time.monotonic()
        self.has_hung_up = False
        self.handled = 0
        self.times: tuple[int, int] = (0, 0)  # nanoseconds: busy, waiting for another stage
        self.answers: dict[int, Answer] = {}


class WorkerGroup:
    """The other ranks.

    Args:
        links: to them, by rank.
        handles: their processes, from rank 1 on.
        timeout: seconds that a rank may take for what others wait for.

    Attributes:
        lost: why the engine cannot go on; None: all are here.
        samples: of steps, where another rank draws them.
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
        """Call `lost` once, when a rank is lost, on whatever thread notices; at once where one is
        lost already. The watcher before hears nothing more.
        """
        with self._changed:
            self._watcher, problem = lost, self.lost
        if problem is not None:
            lost(problem)

    # -- telling -----------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """Tell all. Raises `RankLost`."""
        frame = encode(message)
        for worker in self.workers:
            self._send(worker, frame)

    def tell_one(self, rank: int, message: Any) -> None:
        """Tell one. Raises `RankLost`."""
        self._send(self.workers[rank - 1], encode(message))

    def call(self, name: str, /, *, slow: bool = False, **arguments: Any) -> list[Any]:
        """Let all do something, and wait for it; what came of it, by rank. Raises `RankLost`, or
        what one raised.

        What is `slow` may take as long as it wants, while the worker that does it lives.
        """
        return self.answers(self.ask(name, **arguments), slow=slow)

    def ask(self, name: str, /, **arguments: Any) -> int:
        """Let all do something; give what this returns to `answers`."""
        with self._changed:
            self._num_calls += 1
            call_id = self._num_calls
        self.tell(Call(name, arguments, call_id))
        return call_id

    def answers(self, call_id: int, *, slow: bool = False) -> list[Any]:
        """What came of a call, by rank. Raises `RankLost`, or the first error that there was once
        all have answered.
        """
        seconds = BUILD_SECONDS if slow else self.timeout
        self._wait(lambda worker: call_id in worker.answers, seconds, "an answer", beats=slow)
        with self._changed:
            found = [(worker, worker.answers.pop(call_id)) for worker in self.workers]
        for worker, answer in found:
            _raise_error(worker, answer)
        return [answer.value for _, answer in found]

    # -- the beginning -----------------------------------------------------------------------------

    def begin(self, build: Build) -> None:
        """Let all build their parts; returns when they are about to meet. Raises what keeps one
        from that.
        """
        self.tell(build)
        self._reached(PLANNED)

    def sizes(self) -> list[Size]:
        """How large each rank's KV cache can be. Raises what kept one from being built."""
        return [msgspec.convert(size, Size) for size in self._reached(SIZED)]

    def require_built(self) -> None:
        """Return when all are ready for steps. Raises what kept one from being built."""
        self._reached(BUILT)

    def require_no_refusal(self) -> None:
        """Raise what keeps a rank from being built, if one has said so or is about to."""
        with self._changed:
            if self.lost is not None:  # one that refuses ends, and so do those that waited for it
                self._changed.wait_for(lambda: any(map(_has_refused, self.workers)), LAST_WORDS)
            refused = [worker for worker in self.workers if _has_refused(worker)]
        for worker in refused:
            _raise_error(worker, worker.answers[REFUSED])

    def _reached(self, stage: int) -> list[Any]:
        """Wait for a stage of building; what each rank says with it."""
        try:
            self._wait(
                lambda worker: stage in worker.answers or _has_refused(worker),
                BUILD_SECONDS,
                "its part of the model",
                beats=True,
            )
        except RankLost:
            self.require_no_refusal()
            raise
        self.require_no_refusal()
        return [worker.answers.pop(stage).value for worker in self.workers]

    # -- the end -----------------------------------------------------------------------------------

    def explain(self, problem: BaseException) -> RankLost:
        """Why a wait for the others failed, as soon as it can be known: which rank it was."""
        with self._changed:
            if self._ending:
                return self.lost or RankLost(ENDED)
            self._changed.wait_for(lambda: self.lost is not None, LAST_WORDS)
        if self.lost is None:
            self._lose(self._slowest(), f"does not go on ({problem})")
        return self.lost or RankLost(str(problem))

    def close(self) -> None:
        """End all, in order if that works."""
        self._end_waiting()
        for worker in self.workers:
            with suppress(LinkLost):
                worker.link.send(encode(Stop()))
        if self.lost is None:
            self._wait_for_ends(lambda worker: worker.has_hung_up, STOP_PATIENCE)
            self._wait_for_ends(lambda _: False, LAST_WORDS)  # of those that can be seen
        self.kill()

    def kill(self) -> None:
        """End all at once."""
        self._end_waiting()
        for worker in self.workers:
            worker.link.close()
        for worker in self.workers:
            worker.handle.kill()

    # -- inside ------------------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """Let threads that wait for an answer get none."""
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
        """Until it is so of all workers. With `beats` a worker that is silent for `timeout` is lost
        before that.
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
                        f"did not give {what} within {self.timeout if silent else seconds:g} s",
                    )

    def _slowest(self) -> Worker:
        """Whom all the others wait for: who says nothing any more, else who has done least."""
        return self._silent() or min(self.workers, key=lambda worker: worker.handled)

    def _silent(self) -> Worker | None:
        """The worker that says nothing any more, if any."""
        silent = min(self.workers, key=lambda worker: worker.last_beat)
        return (
            silent if time.monotonic() - silent.last_beat > min(SILENCE, self.timeout / 2) else None
        )

    def _listen(self, worker: Worker) -> None:
        """The thread that takes in what one worker says."""
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
            else:  # it waited for that one in vain, and ended
                self._lose(silent, f"does not go on ({worker.who} {how})")
        except Exception as problem:
            self._lose(worker, f"sent what is not understood: {problem}")

    def _how_it_ended(self, worker: Worker, otherwise: str) -> str:
        if self._ending:
            return "has ended"
        end = time.monotonic() + LAST_WORDS
        while worker.handle.alive() and time.monotonic() < end:
            time.sleep(0.005)
        return f"is lost: {otherwise}" if worker.handle.alive() else worker.handle.ended()

    def _lose(self, worker: Worker, how: str) -> None:
        """A rank is lost, and the engine with it. The first reason stays."""
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
    """Raise what a call has raised there, if it did."""
    if answer.error:
        raise as_error(answer.error, f"{worker.who}: {answer.text}")
