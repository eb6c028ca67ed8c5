"""Worker process: `python -m nano_inference.ranks.worker`, started by `LocalLauncher`, or
`run_worker` in any process.

The process builds its part of the model, then handles rank 0's messages until it is stopped,
or rank 0 or its parent process ends.
"""

import logging
import os
import select
import shutil
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from nano_inference.core.failures import OUT_OF_MEMORY, is_out_of_memory
from nano_inference.errors import ConfigError, NanoInferenceError, RankLost
from nano_inference.ranks.link import Link, LinkLost, connect
from nano_inference.ranks.messages import (
    BUILT,
    PLANNED,
    REFUSED,
    SIZED,
    Answer,
    Beat,
    Begin,
    Build,
    Call,
    Failed,
    Hello,
    Piece,
    Size,
    Stop,
    decode_to_worker,
    encode,
)
from nano_inference.ranks.rendezvous import Identity, NotOurs, greet_rank_0
from nano_inference.ranks.replay import Draw, Forward
from nano_inference.system.child_process import be_child
from nano_inference.system.version import __version__

logger = logging.getLogger("nano_inference")

CONNECT_SECONDS = 60.0
GREETING_SECONDS = 20.0
BEAT = 1.0  # seconds between two beats
LAST_WORDS = 1.0  # seconds to deliver the last message before the process ends
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


def main() -> None:
    """Run a worker until the end. Never returns."""
    begin = be_child(Begin, _leave)
    logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {begin.rank} %(name)s %(message)s")
    logging.getLogger("nano_inference").setLevel(begin.log_level)
    try:
        run_worker(begin)
    except NanoInferenceError as problem:
        logger.error("%s", problem)
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    """Exit immediately, because other threads may be in a call that does not return."""
    logging.shutdown()
    os._exit(code)


def run_worker(begin: Begin, end: Callable[[int], object] = _end) -> None:
    """Serve as one rank of an engine until rank 0 ends it.

    Raises `ConfigError` if rank 0 rejects this process, and `RankLost` if rank 0 is lost. If rank 0
    is lost during a step, `end` is called with an exit code, because nothing can be raised.
    """
    identity = Identity(begin.token, __version__, begin.world_size, begin.rank)
    link: Link | None = None
    try:
        link = connect(begin.address, CONNECT_SECONDS)
        greet_rank_0(link, identity, GREETING_SECONDS)
    except (LinkLost, NotOurs) as problem:
        if link is not None:
            link.close()
        raise ConfigError(f"rank {begin.rank} cannot join the engine: {problem}") from problem
    link.settle(CONNECT_SECONDS)
    ours = WorkerProcess(link, begin, end)
    try:
        ours.run()
    finally:
        ours.close()


class WorkerProcess:
    """Rank that handles messages of rank 0."""

    def __init__(self, link: Link, begin: Begin, end: Callable[[int], object]) -> None:
        self._link, self._begin, self._end = link, begin, end
        self._handled = 0
        self._times: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._ended = threading.Event()

    def run(self) -> None:
        """Build the rank's part, and handle messages until the end. Raises `RankLost`."""
        self._tell(Hello(os.getpid(), socket.gethostname()))
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name="rank", daemon=True).start()
        message = self._next()
        if isinstance(message, Stop):
            return
        if not isinstance(message, Build):
            raise RankLost(f"rank 0 sent {type(message).__name__} instead of Build.")
        part = self._built(message)
        if part is not None:
            self._serve(part)

    def close(self) -> None:
        """Close the link to rank 0."""
        self._ended.set()
        self._link.close()

    def _built(self, message: Build) -> Any:
        """Return this rank's part, or None if it cannot be built, which is reported to rank 0."""
        # imported late, because torch takes seconds, during which rank 0 may end
        from nano_inference.ranks.shard import Shard

        try:
            part = Shard(message, self._begin, lambda: self._tell(Answer(PLANNED)), self._agree)
        except RankLost:
            raise
        except Exception as problem:
            if not isinstance(problem, NanoInferenceError):
                logger.exception("rank %d cannot build its part", self._begin.rank)
                problem = NanoInferenceError(f"{type(problem).__name__}: {problem}")
            self._tell(Answer(REFUSED, None, type(problem).__name__, str(problem)))
            self._linger()
            return None
        self._tell(Answer(BUILT))
        return part

    def _agree(self, size: Size) -> Size:
        self._tell(Answer(SIZED, size))
        answer = self._next()
        if not isinstance(answer, Size):
            raise RankLost("rank 0 has stopped building the engine.")
        return answer

    def _serve(self, part: Any) -> None:
        self._times = lambda: part.times
        try:
            while True:
                message = self._next()
                match message:
                    case Forward():
                        part.forward(message)
                    case Draw():
                        samples = part.draw(message)
                        if samples is not None:
                            self._tell(samples)
                    case Piece():
                        part.updates.take(message)
                    case Call():
                        self._call(part, message)
                    case Stop():
                        return
                    case _:
                        raise RankLost(f"rank 0 sent an unexpected {type(message).__name__}.")
                self._handled += 1
        except RankLost:
            raise
        except Exception as problem:
            logger.exception("rank %d has failed", self._begin.rank)
            self._tell(Failed(f"{type(problem).__name__}: {problem}"))
            self._linger()
            raise RankLost(f"a step failed on rank {self._begin.rank}: {problem}") from problem
        finally:
            part.close()

    def _call(self, part: Any, call: Call) -> None:
        if not call.call_id:
            part.call(call.name, call.arguments)
            return
        try:
            answer = Answer(call.call_id, part.call(call.name, call.arguments))
        except Exception as problem:
            if not isinstance(problem, NanoInferenceError | OSError | MemoryError | RuntimeError):
                raise
            # a subclass of torch's error is out of memory for rank 0, too
            name = OUT_OF_MEMORY if is_out_of_memory(problem) else type(problem).__name__
            answer = Answer(call.call_id, None, name, str(problem))
        self._tell(answer)

    def _next(self) -> Any:
        try:
            return decode_to_worker(self._link.receive())
        except LinkLost as problem:
            raise RankLost(f"rank 0 is gone: {problem}.") from problem

    def _tell(self, message: Any) -> None:
        try:
            self._link.send(encode(message))
        except LinkLost as problem:
            raise RankLost(f"rank 0 is gone: {problem}.") from problem

    def _linger(self) -> None:
        """Give rank 0 time to read the last message and close the link."""
        self._ended.wait(LAST_WORDS)

    def _beat(self) -> None:
        """Send heartbeats to rank 0, also during a step."""
        parent = self._begin.parent
        while not self._ended.wait(BEAT):
            # a fork of the parent may keep stdin open
            if parent and os.getppid() != parent:
                self._end(1)
            try:
                self._link.send(encode(Beat(self._handled, *self._times())))
            except LinkLost:
                return

    def _watch(self) -> None:
        """End this process with rank 0, also during a step, which would otherwise wait in vain."""
        poll = select.poll()
        poll.register(self._link.fileno(), _HUNG_UP & ~select.POLLIN)
        while not self._ended.is_set():
            try:
                if poll.poll(1000):
                    break
            except (OSError, ValueError):
                break
        if not self._ended.wait(LAST_WORDS):  # set on a regular end
            self._end(1)


def _leave(begin: Begin) -> None:
    """Exit after the parent process has ended."""
    kind, _, path = begin.address.partition(":")
    if kind == "unix":  # a killed rank 0 has not removed the folder of its socket
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    _end(1)


if __name__ == "__main__":
    main()
