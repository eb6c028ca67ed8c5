"""A card with virtual memory, made by a stand-in for the CUDA driver over this process's memory."""

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.device import pools
from nano_inference.device.driver import CudaDriver
from nano_inference.device.pools import EnginePools

SOURCE = Path(__file__).with_name("stand_in_driver.c")
CPU = torch.device("cpu")
GRANULE = 2**16
TOTAL = 2**28  # bytes of the card
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700  # errors in cuda.h


def header() -> Path | None:
    """Return the folder of cuda.h, which Triton brings along."""
    triton = pytest.importorskip("triton")
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return folder if (folder / "cuda.h").exists() else None


class VirtualCard:
    """Controls of the stand-in."""

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._library: Any = ctypes.CDLL(self.path)
        for name in ("used", "pinned"):
            getattr(self._library, f"stand_in_{name}").restype = ctypes.c_size_t
        self._library.stand_in_calls.restype = ctypes.c_long
        self._library.stand_in_fail.argtypes = [ctypes.c_long, ctypes.c_int]
        self._library.stand_in_card.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        self._library.stand_in_host.argtypes = [ctypes.c_size_t]

    def reset(self) -> None:
        """Restore a card that no other program uses and that never fails."""
        self.succeed()
        self.share(0)
        self.limit_host(2**40)

    def driver(self) -> CudaDriver:
        """Return the driver of this card."""
        return CudaDriver(0, self.path)

    def share(self, others: int, *, supported: bool = True) -> None:
        """Let other programs use this many bytes."""
        self._library.stand_in_card(TOTAL, others, supported)

    def limit_host(self, most: int) -> None:
        """Limit the bytes of pinned memory."""
        self._library.stand_in_host(most)

    def fail(self, after: int, code: int) -> None:
        """Let one call fail, after this many calls that succeed."""
        self._library.stand_in_fail(after, code)

    def succeed(self) -> None:
        """Let no call fail any more."""
        self._library.stand_in_fail(-1, 0)

    @property
    def calls(self) -> int:
        """Number of calls that may fail."""
        return self._library.stand_in_calls()

    @property
    def used(self) -> int:
        """Bytes of the card that this process uses."""
        return self._library.stand_in_used()

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory."""
        return self._library.stand_in_pinned()

    @property
    def kept(self) -> tuple[int, int, int]:
        """Bytes of the card, pinned bytes, and reserved ranges, after unreachable ones are freed."""
        gc.collect()
        return self.used, self.pinned, self._library.stand_in_ranges()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stand-in. Return its path."""
    include, compiler = header(), shutil.which("cc")
    if include is None or compiler is None:
        pytest.skip("there is no cc, or no cuda.h")
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    options = ["-O1", "-Wall", "-shared", "-fPIC", "-I", include]
    subprocess.run([compiler, *options, "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def card(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualCard]:
    """Let engines on the CUDA backend live on a virtual card, in many small pieces."""
    virtual = VirtualCard(library)
    virtual.reset()
    gc.collect()  # pools of earlier tests
    monkeypatch.setattr(pools, "PIECE", 2 * GRANULE)
    monkeypatch.setattr(pools, "pools_of", lambda device: EnginePools(virtual.driver(), device))
    yield virtual
    virtual.reset()
