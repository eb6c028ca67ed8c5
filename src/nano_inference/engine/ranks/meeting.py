"""Rank 0 waits for the others: listens, starts them, and takes in those that prove to be meant."""

import contextlib
import logging
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from nano_inference.engine.ranks.launcher import Handle, Launcher
from nano_inference.engine.ranks.link import (
    Identity,
    Link,
    LinkLost,
    Listener,
    NotOurs,
    greet_worker,
)
from nano_inference.engine.ranks.messages import Begin
from nano_inference.errors import ConfigError

logger = logging.getLogger("nano_inference")

MOST_STRANGERS = 64  # that are greeted at once; one more, and the oldest has to go
MOST_REASONS = 3  # why somebody was turned away, in an error
PREFIX = "nano-inference-ranks-"


class Meeting:
    """A place where ranks meet, for as long as they are being collected.

    Raises `ConfigError` where rank 0 cannot listen.
    """

    def __init__(self, launcher: Launcher, world_size: int, version: str) -> None:
        self.launcher, self.world_size = launcher, world_size
        self.token = secrets.token_bytes(32)
        self.folder: Path | None = None
        self._identity = Identity(self.token, version, world_size)
        self._missing = set(range(1, world_size))
        self._claiming = threading.Lock()
        self._arrived: queue.SimpleQueue[tuple[int, Link]] = queue.SimpleQueue()
        self._waiting = False  # for those who arrive
        self._strangers: dict[Link, None] = {}  # that have not said who they are; the oldest first
        self._refused: deque[str] = deque(maxlen=MOST_REASONS)
        try:
            if launcher.host is None:
                self.folder = _private_folder()
                self._listener = Listener(path=f"{self.folder}/rank0")
            else:
                self._listener = Listener(host=launcher.host, port=launcher.port)
        except OSError as problem:
            self.close()
            where = (
                f"{launcher.host}:{launcher.port}"
                if launcher.host is not None
                else str(self.folder)
            )
            raise ConfigError(
                f"rank 0 cannot listen at {where} for the other ranks: {problem}."
            ) from problem

    def begins(self) -> list[Begin]:
        """What each of the others must know."""
        level = logger.getEffectiveLevel()
        address = self._listener.address
        return [
            Begin(rank, self.world_size, address, self.token, log_level=level)
            for rank in range(1, self.world_size)
        ]

    def collect(self, handles: Sequence[Handle], seconds: float) -> dict[int, Link]:
        """The links to all ranks, by rank. `handles` are of rank 1 and on.

        Raises `ConfigError` if not all are here in time, or one has ended. Whoever else connects is
        turned away.
        """
        links: dict[int, Link] = {}
        end = time.monotonic() + seconds
        stop = threading.Event()
        accepting = threading.Thread(
            target=self._accept, args=(stop,), name="meet ranks", daemon=True
        )
        self._waiting = True  # before anybody can arrive
        accepting.start()
        try:
            while len(links) < self.world_size - 1:
                with contextlib.suppress(queue.Empty):
                    rank, link = self._arrived.get(timeout=0.1)
                    links[rank] = link
                    continue
                for rank, handle in enumerate(handles, start=1):
                    if rank not in links and not handle.alive():
                        raise ConfigError(
                            f"rank {rank} of {self.world_size} {handle.ended()} before it "
                            f"came{self._others()}."
                        )
                if time.monotonic() > end:
                    absent = ", ".join(
                        str(rank) for rank in range(1, self.world_size) if rank not in links
                    )
                    raise ConfigError(
                        f"rank {absent} of {self.world_size} did not come within {seconds:g} "
                        f"s{self._others()}."
                    )
        except BaseException:
            self._give_up(list(links.values()))
            raise
        finally:
            stop.set()
            accepting.join()
        return links

    def close(self) -> None:
        """Listen no more; the folder goes."""
        if hasattr(self, "_listener"):
            self._listener.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _give_up(self, links: list[Link]) -> None:
        """Hang up on all who came, and on who is being greeted: they would wait for an engine that
        will not be.
        """
        with self._claiming:
            self._waiting = False
        with contextlib.suppress(queue.Empty):
            while True:
                links.append(self._arrived.get_nowait()[1])
        for link in links:
            link.close()

    def _others(self) -> str:
        return "".join(f"; {reason.rstrip('.')}" for reason in tuple(self._refused))

    def _accept(self, stop: threading.Event) -> None:
        """Greet each who connects on a thread of its own: one that says nothing holds up nobody."""
        while not stop.is_set():
            try:
                link = self._listener.accept(0.1)
            except OSError:
                return
            if link is None:
                continue
            with self._claiming:
                self._strangers[link] = None
                oldest = (
                    next(iter(self._strangers)) if len(self._strangers) > MOST_STRANGERS else None
                )
                # a rank of ours says who it is at once; it is not to wait behind these
                if oldest is not None:
                    del self._strangers[oldest]
            if oldest is not None:
                oldest.close()
            threading.Thread(
                target=self._greet, args=(link,), name="greet a rank", daemon=True
            ).start()

    def _greet(self, link: Link) -> None:
        try:
            rank = greet_worker(link, self._identity, lambda rank: self._claim(rank, link))
            with self._claiming:
                if self._waiting:
                    self._arrived.put((rank, link))
                else:
                    link.close()
        except (NotOurs, LinkLost, ValueError) as problem:
            logger.warning("rank 0 turned a connection away: %s", problem)
            self._refused.append(str(problem))
            link.close()
        finally:
            with self._claiming:
                self._strangers.pop(link, None)

    def _claim(self, rank: int, link: Link) -> bool:
        with self._claiming:
            if rank not in self._missing or link not in self._strangers:
                return False
            del self._strangers[link]
            self._missing.remove(rank)
            return True


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    if len(str(folder)) > 90:  # the system's limit for a socket's path is a little more than 100
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder
