"""Weight transports: in process and through files, and deadlines that hold for every transport."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

from nano_inference import WeightSyncManager, WeightUpdate, WeightUpdateError
from nano_inference.weights.transports import (
    Deadline,
    Incoming,
    WeightTransport,
    receive_update,
    wire,
)
from nano_inference.weights.transports import files as transport_files
from nano_inference.weights.transports.files import MARKER, WeightFiles, WeightFolder, write_folder
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.safetensors_bytes import SafetensorsBytes
from tests.depth import at_depth
from tests.models.tiny import Weights
from tests.weights.in_process import InProcess
from tests.weights.weight_cases import EMBEDDING, HEAD, NEW, NEWER, NORM, OLD, UP, decoder, synced

PATIENCE = 30.0  # seconds; a hanging test fails
SUM_OF_NEW = synced(WeightSyncManager(decoder()), NEW)


@pytest.fixture
def manager() -> WeightSyncManager:
    manager = WeightSyncManager(decoder(), lambda update: manager.finish() and None)
    synced(manager, OLD)
    return manager


def refused(update: WeightUpdate, message: str, within: float = PATIENCE) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        update.result(within)


def settled_threads() -> None:
    """Wait until no transport thread is left."""
    until = time.monotonic() + PATIENCE
    while any(thread.name.startswith("weight-") for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread remains"
        time.sleep(0.01)


@pytest.mark.parametrize("version", [None, 6])
def test_weights_arrive_in_process(manager: WeightSyncManager, version: int | None) -> None:
    update = receive_update(manager, InProcess(NEW, version=version), complete=True)
    assert update.result(PATIENCE) == manager.version == (version or 2)
    assert manager.checksum() == SUM_OF_NEW


def test_unexpected_version_is_rejected(manager: WeightSyncManager) -> None:
    refused(
        receive_update(manager, InProcess(NEW, version=6), version=5),
        "sent weight version 6, expected 5",
    )
    refused(receive_update(manager, InProcess(NEW, version=1)), "version=1 must be higher than 1")
    assert receive_update(manager, InProcess(NEW), version=5).result(PATIENCE) == 5


def test_second_session_is_rejected_while_one_receives(manager: WeightSyncManager) -> None:
    go_on = threading.Event()

    def slowly() -> Iterator[Weights]:
        go_on.wait(PATIENCE)
        yield NEW

    update = receive_update(manager, InProcess(slowly()))
    with pytest.raises(WeightUpdateError, match="already open"):
        receive_update(manager, InProcess(NEWER))
    go_on.set()
    assert update.result(PATIENCE) == 2
    assert manager.checksum() == SUM_OF_NEW


class Stuck:
    """A transport whose wait ignores the deadline and blocks until it is released."""

    def __init__(self, buckets: int) -> None:
        self.buckets, self.closed = buckets, threading.Event()

    def receive(self, shapes: Any, deadline: Deadline) -> Incoming:
        if not self.buckets:
            self.closed.wait(PATIENCE)
        return Incoming(None, self._some())

    def _some(self) -> Iterator[Weights]:
        yield from [{name: NEW[name]} for name in list(NEW)[: self.buckets]]
        self.closed.wait(PATIENCE)

    def close(self) -> None:
        self.closed.set()


@pytest.mark.thorough(but=["0"])
@pytest.mark.parametrize("buckets", [0, 1, 7])
def test_deadline_is_enforced_on_a_stuck_transport(
    manager: WeightSyncManager, buckets: int
) -> None:
    before, stuck, began = manager.checksum(), Stuck(buckets), time.monotonic()
    update = receive_update(manager, stuck, timeout=1.0)
    refused(update, f"received only {buckets} buckets of the weights within 1 s")
    assert time.monotonic() - began < 10
    assert stuck.closed.wait(PATIENCE), "the transport was not closed"
    settled_threads()
    assert manager.checksum() == before
    assert receive_update(manager, InProcess(NEW)).result(PATIENCE) == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([{UP: NEW[UP]}, {NORM: torch.full((64,), torch.nan)}], "'model.norm.weight' holds NaN"),
        ([{UP: NEW[UP]}], "is missing"),
        ([], "non-empty"),
        ([{UP: NEW[UP]}, {"x": NEW[UP]}] + [{NORM: NEW[NORM]}] * 9, "'x' is not a tensor"),
        ([{UP: NEW[UP]}, 3], "a bucket must be"),
    ],
)
def test_received_tensors_are_checked(
    manager: WeightSyncManager, weights: list[Any], message: str
) -> None:
    before = manager.checksum()
    refused(
        receive_update(manager, InProcess(iter(weights)), complete=True, check_finite=True), message
    )
    settled_threads()
    assert manager.checksum() == before
    assert receive_update(manager, InProcess(NEW)).result(PATIENCE) == 2


def test_cancelled_session_rejects_buckets(manager: WeightSyncManager) -> None:
    go_on = threading.Event()

    def slowly() -> Iterator[Weights]:
        go_on.wait(PATIENCE)
        yield NEW

    update = receive_update(manager, InProcess(slowly()))
    manager.cancel()
    other = manager.begin()
    go_on.set()
    refused(update, "was cancelled")
    settled_threads()
    assert not other.done()
    manager.receive(NEWER)
    manager.end()
    assert manager.checksum() == synced(WeightSyncManager(decoder()), NEWER)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_deadline_must_be_in_the_future(manager: WeightSyncManager, timeout: float) -> None:
    with pytest.raises(WeightUpdateError, match="timeout"):
        receive_update(manager, InProcess(NEW), timeout=timeout)
    assert receive_update(manager, InProcess(NEW)).result(PATIENCE) == 2


# -- files -----------------------------------------------------------------------------------------


def test_folder_is_read_once_it_is_complete(manager: WeightSyncManager, tmp_path: Path) -> None:
    folder = tmp_path / "update"
    update = receive_update(manager, WeightFolder(folder), complete=True, timeout=PATIENCE)
    time.sleep(0.05)
    assert not update.done()
    write_folder(folder, NEW, version=4, max_file_bytes=50_000)
    assert update.result(PATIENCE) == 4
    assert manager.checksum() == SUM_OF_NEW
    assert len(list(folder.glob("*.safetensors"))) > 1
    write_folder(folder, {NORM: NEWER[NORM], UP: NEWER[UP]}, version=5)
    assert len(list(folder.iterdir())) == 2
    assert receive_update(manager, WeightFolder(folder)).result(PATIENCE) == 5


def test_folder_is_incomplete_while_it_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader at this moment would mix old files into the new update."""
    write_folder(tmp_path, NEW, version=1)
    seen = list[bool]()

    def save_file(tensors: Weights, path: Path) -> None:
        seen.append((tmp_path / MARKER).exists())
        safetensors_numpy.save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(transport_files, "save_file", save_file)
        write_folder(tmp_path, NEW, version=2, max_file_bytes=50_000)
    assert len(seen) > 1
    assert not any(seen)
    assert (tmp_path / MARKER).exists()


@pytest.mark.parametrize("kind", [WeightFolder, WeightFiles])
def test_folder_rewritten_while_being_read_is_rejected(tmp_path: Path, kind: Any) -> None:
    write_folder(tmp_path, NEW, version=1, max_file_bytes=50_000)
    buckets = kind(tmp_path).receive({}, Deadline(PATIENCE)).buckets
    next(buckets)
    write_folder(tmp_path, NEWER, version=2, max_file_bytes=50_000)  # files of the same sizes
    with pytest.raises(WeightUpdateError, match="was rewritten while being read"):
        list(buckets)


def test_tensors_that_share_memory_can_be_written(tmp_path: Path) -> None:
    tied = WeightSyncManager(decoder(tie=True), lambda update: tied.finish() and None)
    write_folder(tmp_path, {EMBEDDING: NEW[EMBEDDING], HEAD: NEW[EMBEDDING]})
    assert receive_update(tied, WeightFolder(tmp_path)).result(PATIENCE) == 1


def cut_short(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-7])


def cut_short_and_say_so(folder: Path) -> None:
    cut_short(folder)
    marker = json.loads((folder / MARKER).read_text())
    marker["files"] = {name: (folder / name).stat().st_size for name in marker["files"]}
    (folder / MARKER).write_text(json.dumps(marker))


FAULTS: list[tuple[Any, str]] = [
    (lambda folder: (folder / MARKER).unlink(), "was not written within 0.2 s"),
    (
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
        "is listed in complete.json but missing",
    ),
    (cut_short, "the file is truncated"),
    (cut_short_and_say_so, "cannot be read as safetensors"),
    (lambda folder: (folder / MARKER).write_text("{"), "complete.json cannot be read"),
    (lambda folder: (folder / MARKER).write_text('{"files": {}}'), "must list files"),
    (
        lambda folder: (folder / MARKER).write_text('{"files": {"../x": 3}}'),
        "is listed in complete.json but missing",
    ),
    (
        lambda folder: (folder / MARKER).write_text('{"version": "1", "files": {"x": 3}}'),
        "must be an integer",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_incomplete_folder_is_rejected(
    manager: WeightSyncManager, tmp_path: Path, spoil: Any, message: str
) -> None:
    before = manager.checksum()
    spoil(write_folder(tmp_path / "update", NEW))
    (tmp_path / "x").write_bytes(b"abc")
    refused(receive_update(manager, WeightFolder(tmp_path / "update"), timeout=0.2), message)
    assert manager.checksum() == before
    write_folder(tmp_path / "update", NEW)
    assert (
        receive_update(manager, WeightFolder(tmp_path / "update"), timeout=PATIENCE).result(
            PATIENCE
        )
        == 2
    )


def test_missing_folder_and_missing_weights_are_rejected(
    manager: WeightSyncManager, tmp_path: Path
) -> None:
    with pytest.raises(WeightUpdateError, match="does not exist"):
        manager.stage(tmp_path / "none")
    with pytest.raises(
        WeightUpdateError, match=r"is empty; a model folder holds .* \.safetensors files"
    ):
        manager.stage(tmp_path)
    with pytest.raises(WeightUpdateError, match="the state dict is empty"):
        write_folder(tmp_path, {})


def test_header_offsets_must_be_integers() -> None:
    """JSON's 0.0 equals 0, and would fail when the update is staged."""
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    file = SafetensorsBytes(len(content), {"a": (4,)}, set(), ReusedMemory())
    with pytest.raises(
        WeightUpdateError, match=r"gives 'a' bytes 0\.0 to 16\.0, which do not match its size"
    ):
        file.add(content)


# -- the header before the bytes -------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KEYS = "model.layers.0.self_attn.k_proj.weight"
SHAPES = WeightSyncManager(decoder()).shapes


@pytest.mark.parametrize("run_bytes", [48, 1000, 2**23])
@settings(max_examples=at_depth(15), deadline=None)
@given(st.integers(1, 100_000), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_unpack_inverts_layout(run_bytes: int, bucket_bytes: int, dtype: torch.dtype) -> None:
    weights = {
        name: NEW[name].to(dtype) for name in (NORM, KEYS, "model.layers.0.input_layernorm.weight")
    }
    buckets = wire.cut(wire.sendable(weights), bucket_bytes)
    plan = wire.Description(3, tuple(tuple(piece for piece, _ in bucket) for bucket in buckets))
    assert wire.decode(wire.encode(plan), SHAPES) == plan
    assert len(wire.encode(plan)) <= wire.most_bytes(SHAPES)
    arrived: Weights = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "RUN_BYTES", run_bytes)
        for bucket, pieces in zip(buckets, plan.buckets, strict=True):
            flat = torch.empty(wire.num_bytes(pieces), dtype=torch.uint8)
            for start, stop in wire.runs(len(flat)):
                flat[start:stop] = wire.laid_out(
                    bucket, start, stop, torch.empty(run_bytes, dtype=torch.uint8)
                )
            unpacked = wire.unpack(pieces, flat)
            assert isinstance(unpacked, dict)
            arrived |= unpacked
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in weights.items())


@settings(max_examples=at_depth(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([16, 48, 64]),
    st.booleans(),
)
def test_tensors_of_any_length_are_packed_contiguously(
    description: list[tuple[int, torch.dtype]], run_bytes: int, patched: bool
) -> None:
    """Each tensor begins at a multiple of 16, and few end at one."""
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(length, generator=random).to(dtype) for length, dtype in description]
    if patched:
        weights: Any = [
            (str(at), 3 * torch.arange(len(each)), each) for at, each in enumerate(values)
        ]
    else:
        weights = {str(at): each for at, each in enumerate(values)}
    bucket = wire.sendable(weights)
    pieces = [piece for piece, _ in bucket]
    flat = torch.full((wire.num_bytes(pieces),), 255, dtype=torch.uint8)
    for start in range(0, len(flat), run_bytes):
        stop = min(start + run_bytes, len(flat))
        flat[start:stop] = wire.laid_out(
            bucket, start, stop, torch.empty(run_bytes, dtype=torch.uint8)
        )
    unpacked: Any = wire.unpack(pieces, flat)
    if patched:
        for (name, indices, sent), patch in zip(weights, unpacked, strict=True):
            assert patch.name == name
            assert torch.equal(patch.indices, indices)
            assert torch.equal(patch.values, sent)
    else:
        assert list(unpacked) == list(weights)
        assert all(torch.equal(unpacked[name], sent) for name, sent in weights.items())


PIECE = [NORM, "float32", [64], None]
LIES: list[tuple[Any, str]] = [
    ({"format": 2, "version": 1, "buckets": []}, "format 2"),
    ({"format": 1, "version": 1, "buckets": []}, "an empty update"),
    ({"format": 1, "version": 1, "buckets": [[]]}, "an empty update"),
    ({"format": 1, "version": 1, "buckets": [[PIECE], []]}, "empty"),
    (
        {"format": 1, "version": 1, "buckets": [[PIECE, [UP, "float32", None, 3]]]},
        "mixes tensors and patches",
    ),
    ({"format": 1, "version": 1, "buckets": [[PIECE], [PIECE]]}, "occurs twice"),
    ({"format": 1, "version": "1", "buckets": [[PIECE]]}, "must be an integer"),
    ({"format": 1, "version": 1, "buckets": [[[NORM, "float32", [2**40], None]]]}, "has shape"),
    (
        {"format": 1, "version": 1, "buckets": [[[NORM, "float32", [64], 2**40]]]},
        "1099511627776 elements",
    ),
    ({"format": 1, "version": 1, "buckets": [[[NORM, "float32", [64], -1]]]}, "-1 elements"),
    ({"format": 1, "version": 1, "buckets": [[[NORM, "int64", [64], None]]]}, "dtype 'int64'"),
    ({"format": 1, "version": 1, "buckets": [[[NORM, ["x"], [64], None]]]}, "dtype"),
    (
        {"format": 1, "version": 1, "buckets": [[["x", "float32", [64], None]]]},
        "'x' is not a tensor",
    ),
    ({"format": 1, "version": 1, "buckets": 3}, "cannot be read"),
    ({"format": 1, "version": 1, "buckets": [[[NORM]]]}, "cannot be read"),
    ([], "cannot be read"),
]


@pytest.mark.parametrize(("description", "match"), LIES)
def test_description_must_match_the_model(description: Any, match: str) -> None:
    with pytest.raises(WeightUpdateError, match=match):
        wire.decode(json.dumps(description).encode(), SHAPES)


def test_transports_implement_the_protocol(tmp_path: Path) -> None:
    transports: list[WeightTransport] = [InProcess(NEW), WeightFolder(tmp_path), Stuck(0)]
    for transport in transports:
        transport.close()


def test_timeout_of_zero_is_an_error() -> None:
    from nano_inference.weights.transports.sender import WeightSender

    with (
        WeightSender() as sender,
        pytest.raises(WeightUpdateError, match="timeout=0 must be more than 0"),
    ):
        sender.send({NORM: NEW[NORM]}, timeout=0)
