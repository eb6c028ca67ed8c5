"""Rendezvous of an engine's ranks: rank 0 listens, greets each connection, and accepts workers that
authenticate.

Workers and rank 0 prove to each other that they know the engine's token, which is never sent.
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

PROTOCOL = 2  # increased whenever messages between ranks change
GREETING_BYTES = 4096  # maximum of a frame before authentication
ACCEPT_SECONDS = 10.0  # timeout of a greeting
MOST_STRANGERS = 64  # concurrent greetings, beyond which the oldest is closed
MOST_REASONS = 3  # rejection reasons in an error
PREFIX = "nano-inference-ranks-"

_LENGTH = struct.Struct(">I")
_MAGIC = b"nano-inference rank\0"


class NotOurs(NanoInferenceError):
    """Other end that is not part of this engine, or runs another version."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of one end, and properties that both ends must share.

    Attributes:
        token: Secret of the engine.
        version: Version of the package.
        world_size: Number of ranks of the engine.
        rank: Rank of a worker, or 0.
        protocol: Version of the protocol.
    """

    token: bytes
    version: str
    world_size: int
    rank: int = 0
    protocol: int = PROTOCOL

    def proof(self, who: bytes, *parts: bytes) -> bytes:
        """Return a proof that the sender of `parts` knows the token."""
        said = b"".join(_LENGTH.pack(len(part)) + part for part in (_MAGIC, who, *parts))
        return hmac.new(self.token, said, "sha256").digest()


# A greeting: rank 0 sends a nonce. The worker sends a nonce, its identity and a proof. Rank 0 sends
# its proof, or a reason for rejection. A worker without a valid proof learns only that it failed.


class Challenge(msgspec.Struct, array_like=True):
    """First message of rank 0."""

    magic: bytes
    nonce: bytes


class Introduction(msgspec.Struct, array_like=True):
    """Message of a worker. `said` encodes protocol, version, rank and world size."""

    magic: bytes
    nonce: bytes
    said: bytes
    proof: bytes


class Verdict(msgspec.Struct, array_like=True):
    """Second message of rank 0. `reason` explains a rejection, and is empty on acceptance."""

    magic: bytes
    proof: bytes
    reason: str = ""


def greet_rank_0(link: Link, me: Identity, seconds: float) -> None:
    """Authenticate to rank 0, and verify it. Raises `NotOurs` or `LinkLost`."""
    link.set_deadline(seconds)
    hello = _heard(link, Challenge, "the listener is not a nano-inference engine.")
    mine = secrets.token_bytes(32)
    said = msgspec.msgpack.encode((me.protocol, me.version, me.rank, me.world_size))
    proof = me.proof(b"worker", hello.nonce, mine, said)
    link.send(msgspec.msgpack.encode(Introduction(_MAGIC, mine, said, proof)))
    answer = _heard(link, Verdict, "the listener is not a nano-inference engine.")
    expected = me.proof(b"rank 0", mine, hello.nonce, answer.reason.encode())
    if not hmac.compare_digest(answer.proof, expected):
        raise NotOurs("rank 0 has another token: it belongs to another engine.")
    if answer.reason:
        raise NotOurs(answer.reason)
    link.set_deadline(None)


def greet_worker(
    link: Link, me: Identity, claim: Callable[[int], bool], seconds: float = ACCEPT_SECONDS
) -> int:
    """Verify the rank of a new connection and authenticate to it. Return the rank.

    A verified worker that is rejected receives the reason. Raises `NotOurs` or `LinkLost`.

    Args:
        link: Link to the connection.
        me: Identity of rank 0.
        claim: Function that returns True if a rank is still missing, called after all other checks.
        seconds: Timeout of the whole greeting.
    """
    link.set_deadline(seconds)
    mine = secrets.token_bytes(32)
    link.send(msgspec.msgpack.encode(Challenge(_MAGIC, mine)))
    theirs = _heard(link, Introduction, "a connection used an unknown protocol.")
    if not hmac.compare_digest(theirs.proof, me.proof(b"worker", mine, theirs.nonce, theirs.said)):
        link.send(msgspec.msgpack.encode(Verdict(_MAGIC, bytes(32))))
        raise NotOurs("a connection used another engine's token.")
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
            f"{who} was started as one of {world_size} ranks, but rank 0 as one of {me.world_size}."
        )
    elif not 1 <= rank < me.world_size:
        reason = (
            f"{who} does not exist in an engine of {me.world_size}; workers have ranks 1 to "
            f"{me.world_size - 1}."
        )
    elif not claim(rank):
        reason = f"{who} is already connected; a second process of that rank was rejected."
    proof = me.proof(b"rank 0", theirs.nonce, mine, reason.encode())
    link.send(msgspec.msgpack.encode(Verdict(_MAGIC, proof, reason)))
    if reason:
        raise NotOurs(reason)
    link.set_deadline(None)
    return rank


def _heard(link: Link, kind: Any, otherwise: str) -> Any:
    """Return the next message of the other end. Raise `NotOurs` if it is not a greeting."""
    try:
        said = msgspec.msgpack.decode(link.receive(GREETING_BYTES), type=kind)
    except msgspec.MsgspecError:
        raise NotOurs(otherwise) from None
    if said.magic != _MAGIC:
        raise NotOurs(otherwise)
    return said


class Rendezvous:
    """Rank 0's side of the rendezvous, which listens until all ranks are connected.

    Raises `ConfigError` if rank 0 cannot listen.
    """

    def __init__(self, launcher: Launcher, world_size: int, version: str) -> None:
        self.launcher, self.world_size = launcher, world_size
        self.token = secrets.token_bytes(32)
        self.folder: Path | None = None
        self._identity = Identity(self.token, version, world_size)
        self._changed = threading.Condition()
        self._missing = set(range(1, world_size))
        self._links: dict[int, Link] = {}  # connected ranks
        self._is_open = False  # True while ranks are collected
        self._strangers: dict[Link, None] = {}  # unauthenticated connections, the oldest first
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
        """Return the `Begin` of each other rank."""
        level = logger.getEffectiveLevel()
        address = self._listener.address
        return [
            Begin(rank, self.world_size, address, self.token, log_level=level)
            for rank in range(1, self.world_size)
        ]

    def collect(self, handles: Sequence[Handle], seconds: float) -> dict[int, Link]:
        """Return the links to all ranks, by rank. `handles` begin with rank 1.

        Raises `ConfigError` if a rank has ended or does not connect in time. Other connections are
        rejected.
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
                        f"rank {absent} of {self.world_size} did not connect within {seconds:g} "
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
        """Stop listening, and remove the folder."""
        if hasattr(self, "_listener"):
            self._listener.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ranks(self) -> range:
        return range(1, self.world_size)

    def _all_here(self, seconds: float) -> bool:
        """Wait for at most `seconds`. Return True if all ranks are connected."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._links) == len(self._ranks()), seconds)

    def _require_alive(self, handles: Sequence[Handle]) -> None:
        for rank, handle in enumerate(handles, start=1):
            if rank not in self._links and not handle.alive():
                raise ConfigError(
                    f"rank {rank} of {self.world_size} {handle.ended()} before it "
                    f"connected{self._others()}."
                )

    def _give_up(self) -> None:
        """Close all connections and greetings, so that no worker waits in vain."""
        with self._changed:
            self._is_open = False
        for link in self._links.values():
            link.close()

    def _others(self) -> str:
        return "".join(f"; {reason.rstrip('.')}" for reason in tuple(self._refused))

    def _accept(self, stop: threading.Event) -> None:
        """Greet each connection on a separate thread, so that a silent one blocks no other."""
        while not stop.is_set():
            try:
                link = self._listener.accept(0.1)
            except OSError:
                return
            if link is None:
                continue
            with self._changed:
                # genuine ranks authenticate immediately, so close the oldest stranger
                oldest = list(self._strangers)[:1] if len(self._strangers) >= MOST_STRANGERS else []
                for stranger in oldest:
                    del self._strangers[stranger]
                self._strangers[link] = None
            for stranger in oldest:
                stranger.close()
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
            logger.warning("rank 0 rejected a connection: %s", problem)
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
    if len(str(folder)) > 90:  # the system limits a socket's path to little more than 100
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder
