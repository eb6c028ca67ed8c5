"""Only ranks that prove their identity join an engine, once each. Other connections do not delay
it.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")

from nano_inference.errors import ConfigError  # noqa: E402
from nano_inference.ranks import rendezvous as rendezvous_module  # noqa: E402
from nano_inference.ranks.launcher import Handle  # noqa: E402
from nano_inference.ranks.link import FRAME_BYTES, Link, LinkLost, connect  # noqa: E402
from nano_inference.ranks.messages import Begin  # noqa: E402
from nano_inference.ranks.rendezvous import (  # noqa: E402
    Identity,
    NotOurs,
    Rendezvous,
    greet_rank_0,
)


class Nobody:
    """Launcher that starts nothing."""

    host: str | None = None
    port = 0

    def ranks_here(self, world_size: int) -> int:
        return world_size

    def start(self, begins: Sequence[Begin]) -> list[Handle]:
        return []


PATIENCE = 30.0  # seconds; a hanging test fails


class Gone:
    def __init__(self, is_gone: Callable[[], bool] = lambda: True) -> None:
        self.is_gone = is_gone

    def alive(self) -> bool:
        return not self.is_gone()

    def ended(self) -> str:
        return "ended with exit code 3"

    def kill(self) -> None:
        pass


@pytest.fixture(params=["unix", "tcp"])
def rendezvous(request: pytest.FixtureRequest) -> Any:
    launcher = Nobody()
    launcher.host = None if request.param == "unix" else "127.0.0.1"
    rendezvous = Rendezvous(launcher, 3, "1.0.0")
    yield rendezvous
    rendezvous.close()


def identity(rendezvous: Rendezvous, rank: int, **changes: Any) -> Identity:
    return Identity(
        **({"token": rendezvous.token, "version": "1.0.0", "world_size": 3, "rank": rank} | changes)  # pyright: ignore
    )


def join(rendezvous: Rendezvous, me: Identity) -> Link:
    link = connect(rendezvous.begins()[0].address, PATIENCE)
    try:
        greet_rank_0(link, me, PATIENCE)
    except NotOurs:
        link.close()
        raise
    return link


def test_ranks_may_connect_before_rank_0_listens(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread accepts and greets them before `collect` continues."""
    start = threading.Thread.start

    def start_and_lose_the_core(self: threading.Thread) -> None:
        start(self)
        if self.name == "meet ranks":
            assert all(came.wait(PATIENCE) for came in here)

    def come(rank: int) -> None:
        links.append(join(rendezvous, identity(rendezvous, rank)))
        here[rank - 1].set()

    here, links = [threading.Event(), threading.Event()], list[Link]()
    for rank in (1, 2):
        threading.Thread(target=come, args=(rank,), daemon=True).start()
    monkeypatch.setattr(threading.Thread, "start", start_and_lose_the_core)
    met = rendezvous.collect([], PATIENCE)
    assert sorted(met) == [1, 2]
    for link in (*met.values(), *links):
        link.close()


def test_ranks_join_despite_foreign_connections(rendezvous: Rendezvous) -> None:
    joined: dict[int, Link] = {}
    collecting = threading.Thread(target=lambda: joined.update(rendezvous.collect([], PATIENCE)))
    collecting.start()
    silent = connect(rendezvous.begins()[0].address, PATIENCE)  # sends nothing and delays no rank
    loud = connect(rendezvous.begins()[0].address, PATIENCE)
    loud.send(b"GET / HTTP/1.1\r\n\r\n")
    huge = connect(rendezvous.begins()[0].address, PATIENCE)
    huge._socket.sendall(struct.pack(">I", 2**31))
    with pytest.raises(NotOurs, match="another token"):
        join(rendezvous, identity(rendezvous, 1, token=b"x" * 32))
    first = join(rendezvous, identity(rendezvous, 2))
    with pytest.raises(NotOurs, match="rank 2 is already connected"):
        join(rendezvous, identity(rendezvous, 2))
    with pytest.raises(NotOurs, match=r"rank 1 runs nano-inference 0\.9\.9 .*rank 0 1\.0\.0"):
        join(rendezvous, identity(rendezvous, 1, version="0.9.9"))
    with pytest.raises(
        NotOurs, match=r"\(protocol 7\), rank 0 .*\(protocol 2\); install the same version"
    ):
        join(rendezvous, identity(rendezvous, 1, protocol=7))
    with pytest.raises(NotOurs, match="one of 4 ranks, but rank 0 as one of 3"):
        join(rendezvous, identity(rendezvous, 1, world_size=4))
    with pytest.raises(NotOurs, match="rank 3 does not exist"):
        join(rendezvous, identity(rendezvous, 3))
    second = join(rendezvous, identity(rendezvous, 1))
    collecting.join(PATIENCE)
    assert sorted(joined) == [1, 2]
    for there, here in ((first, joined[2]), (second, joined[1])):
        for peer in (there, here):
            peer.settle(PATIENCE)
        frames = [b"", b"x", bytes(1000), bytes(range(256)) * 2**13]
        sending = threading.Thread(
            target=lambda end=there, all_of=frames: [end.send(frame) for frame in all_of]
        )
        sending.start()
        assert [bytes(here.receive()) for _ in frames] == frames
        sending.join()
        there.close()
        with pytest.raises(LinkLost, match="hung up"):
            here.receive()
        here.close()
    for peer in (silent, loud, huge):
        peer.close()


@pytest.mark.thorough(cases=["tcp"])
def test_ranks_join_after_a_hundred_silent_connections(rendezvous: Rendezvous) -> None:
    joined: dict[int, Link] = {}
    collecting = threading.Thread(target=lambda: joined.update(rendezvous.collect([], PATIENCE)))
    collecting.start()
    silent = [connect(rendezvous.begins()[0].address, PATIENCE) for _ in range(100)]
    links = [join(rendezvous, identity(rendezvous, rank)) for rank in (1, 2)]
    collecting.join(PATIENCE)
    assert sorted(joined) == [1, 2]
    for peer in (*silent, *links, *joined.values()):
        peer.close()


def test_greeting_has_one_deadline_for_all_its_bytes() -> None:
    here, there = (Link(end) for end in socket.socketpair())
    there.set_deadline(0.3)
    began = time.monotonic()
    ended = threading.Event()

    def drip() -> None:
        with contextlib.suppress(BrokenPipeError):  # the peer may close between two bytes
            here._socket.sendall(struct.pack(">I", 4096))
            while not ended.wait(0.05) and time.monotonic() < began + 30:
                here._socket.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(LinkLost, match="does not answer"):
        there.receive()
    assert time.monotonic() - began < 20
    ended.set()
    dripping.join()
    for peer in (here, there):
        peer.close()


@pytest.mark.thorough
def test_joined_rank_waits_longer_than_the_greeting_deadline(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = rendezvous_module.greet_worker
    monkeypatch.setattr(
        rendezvous_module, "greet_worker", lambda link, me, claim: greet(link, me, claim, 2.0)
    )
    joined: dict[int, Link] = {}
    collecting = threading.Thread(target=lambda: joined.update(rendezvous.collect([], PATIENCE)))
    collecting.start()
    first = join(rendezvous, identity(rendezvous, 1))
    time.sleep(2.3)
    second = join(rendezvous, identity(rendezvous, 2))
    collecting.join(PATIENCE)
    joined[1].send(b"here")
    assert bytes(first.receive()) == b"here"
    for peer in (first, second, *joined.values()):
        peer.close()


def test_missing_ranks_are_named(rendezvous: Rendezvous) -> None:
    with pytest.raises(ConfigError, match=r"rank 1, 2 of 3 did not connect within 0\.2 s"):
        rendezvous.collect([], 0.2)
    with pytest.raises(ConfigError, match="rank 1 of 3 ended with exit code 3 before it connected"):
        rendezvous.collect([Gone(), Gone()], PATIENCE)


def test_late_rank_is_disconnected(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait for an engine that never starts: some launchers cannot kill."""
    greeted, given_up = threading.Event(), threading.Event()
    greet = rendezvous_module.greet_worker

    def slow(*arguments: Any) -> int:
        rank = greet(*arguments)
        greeted.set()
        assert given_up.wait(PATIENCE)
        return rank

    monkeypatch.setattr(rendezvous_module, "greet_worker", slow)
    links: list[Link] = []

    def come() -> None:
        links.append(join(rendezvous, identity(rendezvous, 2)))

    coming = threading.Thread(target=come)
    coming.start()
    with pytest.raises(ConfigError, match="rank 1 of 3 ended"):
        rendezvous.collect([Gone(greeted.is_set)], PATIENCE)
    coming.join()
    given_up.set()
    links[0].set_deadline(PATIENCE)
    with pytest.raises(LinkLost, match="hung up"):
        links[0].receive()
    links[0].close()


def test_occupied_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launcher = Nobody()
        launcher.host, launcher.port = "127.0.0.1", taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"rank 0 cannot listen at 127.0.0.1:{launcher.port}.*in use"
        ):
            Rendezvous(launcher, 2, "1.0.0")


def test_frames_have_bounds() -> None:
    here, there = (Link(end) for end in socket.socketpair())
    with pytest.raises(ValueError, match="exceeds"):
        here.send(bytes(FRAME_BYTES + 1))
    here._socket.sendall(struct.pack(">I", FRAME_BYTES + 1))
    with pytest.raises(LinkLost, match="limit 536,870,912"):
        there.receive()
    here.close()


def send_for_ever(link: Link) -> None:
    while True:
        link.send(bytes(2**20))


@pytest.mark.thorough
def test_unread_link_ends_at_its_deadline() -> None:
    here, there = (Link(end) for end in socket.socketpair())
    here.settle(0.3)
    began = time.monotonic()
    with pytest.raises(LinkLost, match="stopped reading"):
        send_for_ever(here)
    assert 0.2 < time.monotonic() - began < 20
    there.close()
