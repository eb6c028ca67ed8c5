"""Weights by gloo from a trainer in another process: received tensors, and cleanup after trainer
failures.
"""

import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from nano_inference import (
    InferenceEngine,
    TrainingSample,
    WeightSyncManager,
    WeightUpdate,
    WeightUpdateError,
)
from nano_inference.weights.transports import Deadline, receive_update, wire
from nano_inference.weights.transports.broadcast import BroadcastReceiver
from nano_inference.weights.transports.rendezvous import serve_store
from nano_inference.weights.transports.sender import WeightSender
from tests.ports import free_port
from tests.weights.weight_cases import (
    EMBEDDING,
    NEW,
    NEWER,
    NORM,
    OLD,
    PROMPT,
    Build,
    bits,
    decoder,
    drain,
    drawn,
    synced,
)

PATIENCE = 30.0  # seconds; a hanging test fails
Start = Callable[..., tuple["subprocess.Popen[str]", str]]


def checksum(weights: Any, *more: Any) -> dict[str, str]:
    manager = WeightSyncManager(decoder())
    synced(manager, weights)
    for update in more:
        synced(manager, update)
    return manager.checksum()


@pytest.fixture
def start() -> Iterator[Start]:
    """Start trainer processes. Yield each process and its address."""
    children: list[subprocess.Popen[str]] = []

    def run(*actions: str) -> tuple["subprocess.Popen[str]", str]:
        command = [sys.executable, "-m", "tests.weights.trainer", "0", *actions]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        children.append(child)
        return child, said(child)

    yield run
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def manager() -> WeightSyncManager:
    manager = WeightSyncManager(decoder(), lambda update: manager.finish() and None)
    synced(manager, OLD)
    return manager


def said(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def refused(
    manager: WeightSyncManager,
    receiver: BroadcastReceiver,
    message: str,
    timeout: float,
    **options: Any,
) -> float:
    """Receive an update that must be rejected. Return the seconds it took."""
    before, began = (manager.version, manager.checksum()), time.monotonic()
    update = receive_update(manager, receiver, timeout=timeout, **options)
    with pytest.raises(WeightUpdateError, match=message):
        update.result(timeout + PATIENCE)
    seconds = time.monotonic() - began
    assert (manager.version, manager.checksum()) == before
    return seconds


@pytest.mark.thorough
def test_group_carries_many_updates_and_survives_rejections(
    start: Start, manager: WeightSyncManager
) -> None:
    actions = [
        "seven",
        "name",
        "shape",
        "extra",
        "part",
        "patch",
        "empty",
        "strided",
        "garbage",
        "nan",
        "newer",
    ]
    child, address = start(*actions)
    receiver = BroadcastReceiver(address)
    assert receive_update(manager, receiver, complete=True, timeout=20).result(20) == 7
    assert said(child) == "sent"
    assert manager.checksum() == checksum(NEW)
    group = receiver._group
    for message in ("'model.other.weight' is not", "up_proj.weight' has shape", "layers.9"):
        refused(manager, receiver, message, 20)
        assert "an engine rejected" in said(child)
    refused(manager, receiver, "is missing", 5, complete=True)
    assert said(child) == "sent"
    assert receive_update(manager, receiver, timeout=20).result(20) == 8
    assert said(child) == "sent"
    patched = NEW[NORM].clone()
    patched[3], patched[1] = 5.0, 6.0
    assert manager.checksum() == checksum(NEW, {NORM: patched})
    assert "the update is empty" in said(child)
    assert receive_update(manager, receiver, timeout=20).result(20) == 9
    rounded = {EMBEDDING: NEW[EMBEDDING].to(torch.bfloat16)}
    assert said(child) == "sent"
    assert manager.checksum() == checksum(NEW, {NORM: patched}, rounded)
    refused(manager, receiver, "description of its weights cannot be read", 20)
    assert receiver._group is group
    assert "an engine rejected" in said(child)
    # Bad values are detected in the middle of the bytes. That ends the group, and the next update
    # makes another.
    refused(manager, receiver, "'model.norm.weight' holds NaN", 20, check_finite=True)
    assert said(child) == "sent" or receiver._group is not group
    assert receive_update(manager, receiver, timeout=20).result(20) == 10
    assert manager.checksum() == checksum(NEWER)
    assert not dist.is_initialized()
    receiver.close()


@pytest.mark.thorough
def test_rejected_update_can_be_followed_immediately(
    start: Start, manager: WeightSyncManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of an update rejected mid-transfer is closed by then, however long that takes."""
    child, address = start("nan", "newer")
    receiver = BroadcastReceiver(address)
    close = receiver.close
    monkeypatch.setattr(receiver, "close", lambda: (time.sleep(0.15), close()))
    refused(manager, receiver, "'model.norm.weight' holds NaN", 20, check_finite=True)
    assert receiver._group is None
    receive_update(manager, receiver, timeout=20).result(20)
    assert manager.checksum() == checksum(NEWER)
    assert said(child)
    close()


class SilentGroup:
    """A group whose transfers complete immediately without data."""

    closed = False

    def begin_broadcast(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_leftover_of_an_update_does_not_end_the_next_group() -> None:
    receiver = BroadcastReceiver("tcp://127.0.0.1:1")
    group, next_group = SilentGroup(), SilentGroup()
    piece = wire.TensorInfo(NORM, "float32", (8,))
    buckets = receiver._buckets(
        cast(Any, group), wire.Description(1, ((piece,), (piece,), (piece,))), Deadline(5)
    )
    next(buckets)
    receiver._group = cast(Any, next_group)
    cast(Any, buckets).close()
    assert group.closed
    assert receiver._group is next_group
    assert not next_group.closed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("action", "message", "at_once"),
    [
        ("kill", "did not arrive, the other side is gone", True),
        ("silent", "did not arrive within 3 s", False),
        ("stopped", "the description of the weights did not arrive within 3 s", False),
        ("long", "a description of 10000000 bytes", True),
    ],
)
def test_trainer_failure_mid_update_is_reported(
    start: Start, manager: WeightSyncManager, action: str, message: str, at_once: bool
) -> None:
    (child, address), (_, other_address) = start(action), start("newer")
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    clock = threading.Thread(target=tick)
    clock.start()
    receiver = BroadcastReceiver(address)
    seconds = refused(manager, receiver, message, 20.0 if at_once else 3.0)
    assert seconds < 15, "still waiting for a lost trainer"
    child.kill()
    receiver = BroadcastReceiver(other_address)  # another trainer, another group
    assert receive_update(manager, receiver, complete=True, timeout=20).result(20) == 2
    assert manager.checksum() == checksum(NEWER)
    receiver.close()
    stop.set()
    clock.join()
    pauses = [after - before for before, after in itertools.pairwise(ticks)]
    assert max(pauses) < 5.0, "a teardown delayed other threads"


@pytest.mark.thorough
def test_engine_rejoins_a_trainer_after_a_timeout(start: Start, manager: WeightSyncManager) -> None:
    child, address = start("new", "newer")
    receiver = BroadcastReceiver(address)

    def fail(*_: Any, **__: Any) -> None:
        raise WeightUpdateError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "receive", fail)
        refused(manager, receiver, "enough", 20)
    until = time.monotonic() + PATIENCE
    while receiver._group is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "the other side is gone" in said(child)
    assert receive_update(manager, receiver, timeout=20).result(20) == 2
    assert manager.checksum() == checksum(NEWER)
    assert said(child) == "sent"
    receiver.close()


@pytest.mark.thorough
def test_missing_trainer_is_an_error_before_the_deadline(manager: WeightSyncManager) -> None:
    store = serve_store(("127.0.0.1", free_port()), 5)
    address = f"tcp://127.0.0.1:{store.port}"
    assert refused(manager, BroadcastReceiver(address), "began no update within 1.5 s", 1.5) < 15
    del store
    assert (
        refused(
            manager,
            BroadcastReceiver(address),
            "no trainer at tcp://127.0.0.1:.* within 0.5 s",
            0.5,
        )
        < 15
    )
    with (
        WeightSender(timeout=0.5) as sender,
        pytest.raises(WeightUpdateError, match=r"engine 1 of 1 did not join"),
    ):
        sender.send(NEW)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://h:99999", "file:///x", 3]
)
def test_address_is_a_host_and_a_port(address: Any) -> None:
    for make in (BroadcastReceiver, WeightSender):
        with pytest.raises(WeightUpdateError, match="must be tcp://host:port"):
            make(address)


@pytest.mark.parametrize(
    ("options", "message"), [({"rank": 0}, "rank=0"), ({"backend": "mpi"}, "'gloo' or 'nccl'")]
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        BroadcastReceiver("tcp://127.0.0.1:80", **options)


@pytest.mark.thorough
def test_trainer_may_pass_its_default_group(manager: WeightSyncManager) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.weights.trainer", address], stderr=subprocess.DEVNULL
    )
    try:
        receiver = BroadcastReceiver(address, default_group=True)
        assert receive_update(manager, receiver, complete=True, timeout=20).result(20) == 2
        assert manager.checksum() == checksum(NEW)
        assert not dist.is_initialized()
        receiver.close()
    finally:
        child.kill()
        child.wait()


def test_store_listens_only_on_loopback() -> None:
    store = serve_store(("127.0.0.1", 0), 5)
    with socket.socket() as other:
        # would be in use if the store listened on every address
        other.bind(("127.0.0.2", store.port))


# -- an engine that samples during updates ---------------------------------------------------------


def step_until(
    engine: InferenceEngine, update: WeightUpdate, seconds: float = 20.0
) -> list[TrainingSample]:
    """Step with constant work until an update has ended."""
    until, samples = time.monotonic() + seconds, list[TrainingSample]()
    while not update.done():
        assert time.monotonic() < until, "the run never ends"
        if not engine.has_pending():
            engine.add_request(PROMPT, drawn(100))
        samples += engine.step()
    return samples


@pytest.mark.thorough
def test_requests_continue_while_trainers_fail(build: Build, start: Start) -> None:
    engine = build()
    (dying, address), (_, other) = start("kill"), start("new")
    old, new = build().generate(PROMPT, drawn(100))[0], build(NEW).generate(PROMPT, drawn(100))[0]
    checksum = engine.weights_checksum()
    failed = engine.receive_weights(BroadcastReceiver(address), timeout=20)
    with pytest.raises(WeightUpdateError, match="session is already open"):
        engine.receive_weights(BroadcastReceiver(other), timeout=20)
    samples = step_until(engine, failed)
    with pytest.raises(WeightUpdateError, match="the other side is gone"):
        failed.result(0)
    assert dying.wait(PATIENCE) == -signal.SIGKILL
    assert engine.weights_checksum() == checksum
    silent = engine.receive_weights(BroadcastReceiver("tcp://127.0.0.1:9"), timeout=0.5)
    samples += step_until(engine, silent)
    with pytest.raises(WeightUpdateError, match="no trainer at"):
        silent.result(0)

    receiver = BroadcastReceiver(other)
    engine.add_request(PROMPT, drawn(100))
    update = engine.receive_weights(receiver, kv_policy="finish_old", complete=True, timeout=20)
    samples += step_until(engine, update)
    assert update.result(0) == engine.get_weight_version() == 1
    assert update.staged_bytes > 0
    later = engine.add_request(PROMPT, drawn(100))
    samples += drain(engine)
    receiver.close()
    assert {bits(s) for s in samples if s.weight_version == 0} == {bits(old)}
    assert {bits(s) for s in samples if s.weight_version == 1} == {bits(new)}
    assert later in {s.request_id for s in samples if s.weight_version == 1}
