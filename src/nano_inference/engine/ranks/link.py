"""Links between rank 0 and the others: length-prefixed frames over a socket that both ends have
proved to be theirs.

Whoever connects is asked for a proof that it knows the engine's token, and gives one; the token
itself never travels. What travels afterwards is bytes for msgspec. It is neither encrypted nor
signed, as what gloo and NCCL send is not: between machines a network of one's own is taken for
granted.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from nano_inference.errors import NanoInferenceError

PROTOCOL = 1  # counted up whenever messages between ranks change
GREETING_BYTES = 4096  # of a frame before the other end is known
FRAME_BYTES = 2**29  # of any other: masks of a whole batch over a large vocabulary, say
BUFFER_BYTES = 2**18  # read at once
ACCEPT_SECONDS = 10.0  # for one stranger to say all of who it is
NETWORK_SECONDS = 30  # after which a network that carries nothing is taken for cut

_LENGTH = struct.Struct(">I")
_MAGIC = b"nano-inference rank\0"


class LinkLost(NanoInferenceError):
    """The other end of a link is gone, or does not answer in time."""


class NotOurs(NanoInferenceError):
    """Whoever is at the other end is not part of this engine, or of another version of it."""


class Link:
    """One end of a connection. One thread receives; any may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._first = self._last = 0  # what stands in the buffer unread
        self._closed = False
        self._end: float | None = None  # of all waits together

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def send(self, frame: bytes | bytearray) -> None:
        """Send a frame; returns when the system has it. Raises `LinkLost`."""
        if len(frame) > FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame):,} bytes is larger than {FRAME_BYTES:,}.")
        with self._sending:
            try:
                header = _LENGTH.pack(len(frame))
                sent = self._socket.sendmsg([header, frame])
                # the header is far smaller than what the system takes at once
                if sent < len(header) + len(frame):
                    self._socket.sendall(memoryview(frame)[sent - len(header) :])
            except (TimeoutError, BlockingIOError):
                self.close()  # half a frame was sent, maybe
                raise LinkLost("it takes no message any more") from None
            except OSError as problem:
                raise LinkLost(_said(problem)) from problem

    def receive(self, most: int = FRAME_BYTES) -> bytearray:
        """The next frame, of at most so many bytes. Raises `LinkLost`."""
        header = self._take(_LENGTH.size)
        (length,) = _LENGTH.unpack(header)
        if length > most:
            self.close()
            raise LinkLost(f"it sent a frame of {length:,} bytes, where {most:,} are the most")
        return self._take(length)

    def close(self) -> None:
        """End it, also for a thread that waits here."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def set_deadline(self, seconds: float | None) -> None:
        """All that is waited for from now on has so many seconds together, however it comes; None:
        it has no end but the link's. For greetings.
        """
        self._end = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def settle(self, send_seconds: float) -> None:
        """From now on receiving waits for ever, and sending for so many seconds."""
        self.set_deadline(None)
        whole = int(send_seconds)
        limit = struct.pack("ll", whole, int((send_seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_a_cut(self._socket)

    def _take(self, length: int) -> bytearray:
        """So many bytes."""
        taken = bytearray(length)
        if length <= len(self._buffer):
            while self._last - self._first < length:
                self._fill()
            taken[:] = self._view[self._first : self._first + length]
            self._first += length
            return taken
        there = self._last - self._first
        taken[:there] = self._view[self._first : self._last]
        self._first = self._last = 0
        target = memoryview(taken)
        while there < length:
            there += self._read(target[there:])
        return taken

    def _fill(self) -> None:
        if self._first:
            rest = self._last - self._first
            self._view[:rest] = bytes(self._view[self._first : self._last])
            self._first, self._last = 0, rest
        self._last += self._read(self._view[self._last :])

    def _read(self, target: memoryview) -> int:
        try:
            # one that brings a byte now and then has no longer than one that says nothing
            if self._end is not None:
                self._socket.settimeout(max(self._end - time.monotonic(), 0.001))
            count = self._socket.recv_into(target)
        except TimeoutError:
            raise LinkLost("it does not answer") from None
        except (OSError, ValueError) as problem:  # a closed socket
            raise LinkLost(_said(problem)) from problem
        if not count:
            raise LinkLost("it hung up")
        return count


class Listener:
    """Where rank 0 waits for the others.

    Args:
        path: of a socket in a folder that is ours alone; None: `host`.
        host: the address under which the others reach this machine.
        port: 0: any free one.

    Raises `OSError` where it cannot be had.
    """

    def __init__(self, path: str | None = None, host: str | None = None, port: int = 0) -> None:
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: str | tuple[str, int] = path
        else:
            assert host is not None
            family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            where = str(found[0]), port
        try:
            self._socket.bind(where)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        self.address = (
            f"unix:{path}" if path is not None else f"tcp:{host}:{self._socket.getsockname()[1]}"
        )

    def accept(self, seconds: float) -> Link | None:
        """Who connects next; None: nobody within so many seconds."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            return Link(self._socket.accept()[0])
        except TimeoutError:
            return None

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def connect(address: str, seconds: float) -> Link:
    """A link to where rank 0 listens. Raises `LinkLost`."""
    kind, _, where = address.partition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            if kind == "unix":
                return Link(_connected(where, max(end - time.monotonic(), 0.001)))
            host, _, port = where.rpartition(":")
            return Link(
                socket.create_connection(
                    (host, int(port)), timeout=max(end - time.monotonic(), 0.001)
                )
            )
        except OSError as problem:
            if time.monotonic() > end:
                raise LinkLost(f"rank 0 is not to be reached at {address}: {problem}") from problem
            time.sleep(0.05)


def _connected(path: str, seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class Identity:
    """Who one end is, and what both must agree on.

    Args:
        token: the engine's secret.
        version: of the package.
        world_size: of the engine.
        rank: of a worker; rank 0 meets all of them.
        protocol: that it speaks.
    """

    def __init__(
        self, token: bytes, version: str, world_size: int, rank: int = 0, protocol: int = PROTOCOL
    ) -> None:
        self.token, self.version, self.world_size, self.rank = token, version, world_size, rank
        self.protocol = protocol

    def proof(self, who: bytes, *parts: bytes) -> bytes:
        """That whoever says these parts knows the token."""
        said = b"".join(_LENGTH.pack(len(part)) + part for part in (_MAGIC, who, *parts))
        return hmac.new(self.token, said, "sha256").digest()


# A greeting: rank 0 says its protocol and a nonce; the worker its own protocol, a nonce, who it is
# and a proof; rank 0 its proof, or why not. Who gives no proof is told nothing but that.


def greet_rank_0(link: Link, me: Identity, seconds: float) -> None:
    """Prove to rank 0 who this is, and be sure who that is. Raises `NotOurs` or `LinkLost`."""
    link.set_deadline(seconds)
    hello = bytes(link.receive(GREETING_BYTES))
    if hello[: len(_MAGIC)] != _MAGIC or len(hello) != len(_MAGIC) + 2 + 32:
        raise NotOurs("what listens there is no engine of nano-inference.")
    theirs = hello[-32:]
    mine = secrets.token_bytes(32)
    said = "\n".join([me.version, str(me.rank), str(me.world_size)]).encode()
    protocol = me.protocol.to_bytes(2, "big")
    link.send(_MAGIC + protocol + mine + me.proof(b"worker", theirs, mine, protocol, said) + said)
    answer = bytes(link.receive(GREETING_BYTES))
    if hmac.compare_digest(answer, me.proof(b"rank 0", mine, theirs, said)):
        return
    told, reason = answer[:32], answer[32:]
    if not reason or not hmac.compare_digest(told, me.proof(b"refusal", mine, theirs, reason)):
        raise NotOurs("rank 0 has another token: it belongs to another engine.")
    raise NotOurs(reason.decode(errors="replace"))


def greet_worker(
    link: Link, me: Identity, claim: Callable[[int], bool], seconds: float = ACCEPT_SECONDS
) -> int:
    """Find out which rank has connected, and prove who this is; returns it. Raises `NotOurs` or
    `LinkLost`.

    A worker of ours that cannot be taken is told why.

    Args:
        link: to it.
        me: rank 0.
        claim: whether a rank is still waited for; from now on it is not.
        seconds: for all that it says.
    """
    link.set_deadline(seconds)
    mine = secrets.token_bytes(32)
    link.send(_MAGIC + me.protocol.to_bytes(2, "big") + mine)
    start = len(_MAGIC)
    answer = bytes(link.receive(GREETING_BYTES))
    if answer[:start] != _MAGIC or len(answer) < start + 2 + 64:
        raise NotOurs("a stranger connected: it does not speak as a rank does.")
    protocol = answer[start : start + 2]
    theirs, proof, said = (
        answer[start + 2 : start + 34],
        answer[start + 34 : start + 66],
        answer[start + 66 :],
    )
    if not hmac.compare_digest(proof, me.proof(b"worker", mine, theirs, protocol, said)):
        link.send(b"\0" * 32)
        raise NotOurs("a stranger connected: it does not know this engine's token.")

    def refuse(reason: str) -> NoReturn:
        link.send(me.proof(b"refusal", theirs, mine, reason.encode()) + reason.encode())
        raise NotOurs(reason)

    version, rank, world_size = said.decode().split("\n")
    who = f"rank {rank}"
    spoken = int.from_bytes(protocol, "big")
    if (spoken, version) != (me.protocol, me.version):
        refuse(
            f"{who} runs nano-inference {version} (protocol {spoken}), rank 0 {me.version} "
            f"(protocol {me.protocol}); "
            "install the same version everywhere."
        )
    if int(world_size) != me.world_size:
        refuse(f"{who} was started as one of {world_size} ranks, rank 0 as one of {me.world_size}.")
    if not 1 <= int(rank) < me.world_size:
        refuse(
            f"{who} is no rank of an engine of {me.world_size}: those of workers are 1 to "
            f"{me.world_size - 1}."
        )
    if not claim(int(rank)):
        refuse(f"{who} is here already; a second process of that rank was refused.")
    link.send(me.proof(b"rank 0", theirs, mine, said))
    return int(rank)


def _notice_a_cut(connection: socket.socket) -> None:
    """Let the system find out that a network carries nothing any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(NETWORK_SECONDS // 3, 1)
    for name, value in (
        ("TCP_KEEPIDLE" if sys.platform != "darwin" else "TCP_KEEPALIVE", third),
        ("TCP_KEEPINTVL", third),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", NETWORK_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _said(problem: Exception) -> str:
    if isinstance(problem, ConnectionResetError | BrokenPipeError | ValueError):
        return "it hung up"
    return str(problem)
