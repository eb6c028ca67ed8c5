"""The rendezvous of an engine's ranks: rank 0 listens, greets each connection, and takes in the
workers that prove to be its own.

A worker proves that it knows the engine's token, and so does rank 0; the token itself never
travels.
"""

import hmac
import logging
import secrets
import shutil
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nano_inference.errors import ConfigError, NanoInferenceError
from nano_inference.ranks.launcher import Handle, Launcher
from nano_inference.ranks.link import Link, LinkLost, Listener
from nano_inference.ranks.messages import Begin

logger = logging.getLogger("nano_inference")

PROTOCOL = 2  # counted up whenever messages between ranks change
GREETING_BYTES = 4096  # of a frame before the other end is known
ACCEPT_SECONDS = 10.0  # for one stranger to say all of who it is
MOST_STRANGERS = 64  # that are greeted at once; one more, and the oldest has to go
MOST_REASONS = 3  # why a connection was turned away, in an error
PREFIX = "nano-inference-ranks-"

_LENGTH = struct.Struct(">I")
_MAGIC = b"nano-inference rank\0"


class NotOurs(NanoInferenceError):
    """The other end is not part of this engine, or of another version of it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who one end is, and what both must agree on.

    Attributes:
        token: the engine's secret.
        version: of the package.
        world_size: of the engine.
        rank: of a worker; rank 0 meets all of them.
        protocol: that it speaks.
    """

    token: bytes
    version: str
    world_size: int
    rank: int = 0
    protocol: int = PROTOCOL

    def proof(self, who: bytes, *parts: bytes) -> bytes:
        """That the end which says these parts knows the token."""
        said = b"".join(_LENGTH.pack(len(part)) + part for part in (_MAGIC, who, *parts))
        return hmac.new(self.token, said, "sha256").digest()


# A greeting: rank 0 says a nonce; the worker a nonce, who it is and a proof; rank 0 its proof, or
# why not. An end without a proof is told nothing but that.


class Challenge(msgspec.Struct, array_like=True):
    """Of rank 0."""

    magic: bytes
    nonce: bytes


class Introduction(msgspec.Struct, array_like=True):
    """Of a worker. `said`: protocol, version, rank and world size."""

    magic: bytes
    nonce: bytes
    said: bytes
    proof: bytes


class Verdict(msgspec.Struct, array_like=True):
    """Of rank 0. `reason`: why the worker is not taken; empty: it is."""

    magic: bytes
    proof: bytes
    reason: str = ""


def greet_rank_0(link: Link, me: Identity, seconds: float) -> None:
    """Prove to rank 0 who this is, and be sure who that is. Raises `NotOurs` or `LinkLost`."""
    link.set_deadline(seconds)
    hello = _heard(link, Challenge, "what listens there is no engine of nano-inference.")
    mine = secrets.token_bytes(32)
    said = msgspec.msgpack.encode((me.protocol, me.version, me.rank, me.world_size))
    proof = me.proof(b"worker", hello.nonce, mine, said)
    link.send(msgspec.msgpack.encode(Introduction(_MAGIC, mine, said, proof)))
    answer = _heard(link, Verdict, "what listens there is no engine of nano-inference.")
    expected = me.proof(b"rank 0", mine, hello.nonce, answer.reason.encode())
    if not hmac.compare_digest(answer.proof, expected):
        raise NotOurs("rank 0 has another token: it belongs to another engine.")
    if answer.reason:
        raise NotOurs(answer.reason)
    link.set_deadline(None)


def greet_worker(
    link: Link, me: Identity, claim: Callable[[int], bool], seconds: float = ACCEPT_SECONDS
) -> int:
    """Find out which rank has connected, and prove who this is; returns it. Raises `NotOurs` or
    `LinkLost`.

    A worker of ours that cannot be taken is told why.

    Args:
        link: to it.
        me: rank 0.
        claim: whether that rank is still missing; called once all else is in order.
        seconds: for all of the greeting.
    """
    link.set_deadline(seconds)
    mine = secrets.token_bytes(32)
    link.send(msgspec.msgpack.encode(Challenge(_MAGIC, mine)))
    theirs = _heard(link, Introduction, "a stranger connected: it does not speak as a rank does.")
    if not hmac.compare_digest(theirs.proof, me.proof(b"worker", mine, theirs.nonce, theirs.said)):
        link.send(msgspec.msgpack.encode(Verdict(_MAGIC, bytes(32))))
        raise NotOurs("a stranger connected: it does not know this engine's token.")
    spoken, version, rank, world_size = msgspec.msgpack.decode(
        theirs.said, type=tuple[int, str, int, int]
    )
    who, reason = f"rank {rank}", ""
    if (spoken, version) != (me.protocol, me.version):
        reason = (
            f"{who} runs nano-inference {version} (protocol {spoken}), rank 0 {me.version} "
            f"(protocol {me.protocol}); install the same version everywhere."
        )
    elif world_size != me.world_size:
        reason = (
            f"{who} was started as one of {world_size} ranks, rank 0 as one of {me.world_size}."
        )
    elif not 1 <= rank < me.world_size:
        reason = (
            f"{who} is no rank of an engine of {me.world_size}: those of workers are 1 to "
            f"{me.world_size - 1}."
        )
    elif not claim(rank):
        reason = f"{who} is here already; a second process of that rank was refused."
    proof = me.proof(b"rank 0", theirs.nonce, mine, reason.encode())
    link.send(msgspec.msgpack.encode(Verdict(_MAGIC, proof, reason)))
    if reason:
        raise NotOurs(reason)
    link.set_deadline(None)
    return rank


def _heard(link: Link, kind: Any, otherwise: str) -> Any:
    """What the other end says next. Raises `NotOurs` where they are not those of a rank."""
    try:
        said = msgspec.msgpack.decode(link.receive(GREETING_BYTES), type=kind)
    except msgspec.MsgspecError:
        raise NotOurs(otherwise) from None
    if said.magic != _MAGIC:
        raise NotOurs(otherwise)
    return said


class Rendezvous:
    """Where ranks meet, for as long as they are being collected.

    Raises `ConfigError` where rank 0 cannot listen.
    """

    def __init__(self, launcher: Launcher, world_size: int, version: str) -> None:
        self.launcher, self.world_size = launcher, world_size
        self.token = secrets.token_bytes(32)
        self.folder: Path | None = None
        self._identity = Identity(self.token, version, world_size)
        self._changed = threading.Condition()
        self._missing = set(range(1, world_size))
        self._links: dict[int, Link] = {}  # to the ranks that are here
        self._is_open = False  # ranks are being collected
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
            where = self.folder if launcher.host is None else f"{launcher.host}:{launcher.port}"
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

        Raises `ConfigError` if not all are here in time, or one has ended. All others that connect
        are turned away.
        """
        end = time.monotonic() + seconds
        stop = threading.Event()
        accepting = threading.Thread(
            target=self._accept, args=(stop,), name="meet ranks", daemon=True
        )
        self._is_open = True  # before a rank can be greeted
        accepting.start()
        try:
            while not self._all_here(0.1):
                self._require_alive(handles)
                if time.monotonic() > end:
                    absent = ", ".join(map(str, sorted(set(self._ranks()) - self._links.keys())))
                    raise ConfigError(
                        f"rank {absent} of {self.world_size} did not come within {seconds:g} "
                        f"s{self._others()}."
                    )
        except BaseException:
            self._give_up()
            raise
        finally:
            stop.set()
            accepting.join()
        return self._links

    def close(self) -> None:
        """Listen no more; the folder goes."""
        if hasattr(self, "_listener"):
            self._listener.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ranks(self) -> range:
        return range(1, self.world_size)

    def _all_here(self, seconds: float) -> bool:
        """Wait for so long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._links) == len(self._ranks()), seconds)

    def _require_alive(self, handles: Sequence[Handle]) -> None:
        for rank, handle in enumerate(handles, start=1):
            if rank not in self._links and not handle.alive():
                raise ConfigError(
                    f"rank {rank} of {self.world_size} {handle.ended()} before it "
                    f"came{self._others()}."
                )

    def _give_up(self) -> None:
        """Hang up on all who came, and on who is being greeted: they would wait for an engine that
        will not be.
        """
        with self._changed:
            self._is_open = False
        for link in self._links.values():
            link.close()

    def _others(self) -> str:
        return "".join(f"; {reason.rstrip('.')}" for reason in tuple(self._refused))

    def _accept(self, stop: threading.Event) -> None:
        """Greet each who connects on a thread of its own: a silent one holds up no other."""
        while not stop.is_set():
            try:
                link = self._listener.accept(0.1)
            except OSError:
                return
            if link is None:
                continue
            with self._changed:
                # a rank of ours says who it is at once; it is not to wait behind the oldest
                oldest = list(self._strangers)[:1] if len(self._strangers) >= MOST_STRANGERS else []
                for each in oldest:
                    del self._strangers[each]
                self._strangers[link] = None
            for each in oldest:
                each.close()
            threading.Thread(
                target=self._greet, args=(link,), name="greet a rank", daemon=True
            ).start()

    def _greet(self, link: Link) -> None:
        try:
            rank = greet_worker(link, self._identity, lambda rank: self._claim(rank, link))
            with self._changed:
                if self._is_open:
                    self._links[rank] = link
                    self._changed.notify_all()
                else:
                    link.close()
        except (NotOurs, LinkLost, ValueError, msgspec.MsgspecError) as problem:
            logger.warning("rank 0 turned a connection away: %s", problem)
            self._refused.append(str(problem))
            link.close()
        finally:
            with self._changed:
                self._strangers.pop(link, None)

    def _claim(self, rank: int, link: Link) -> bool:
        with self._changed:
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
