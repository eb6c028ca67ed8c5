"""The kernels of the head, built for tests: one library for each instruction set that this machine has."""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import nano_inference.ops.cpu
from nano_inference.ops.cpu import head

KERNELS = Path(next(iter(nano_inference.ops.cpu.__path__))) / "kernels"
SOURCES = ("pool", "head", "plan", "filters", "linear_bf16", "linear_float", "pack", "rows")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-pthread", "-shared", "-w")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DNANO_AVX512")
# Instruction set -> (what the processor must have, flags of the compiler); best first.
INSTRUCTION_SETS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "avx512_bf16": ({"avx512dq", "avx512vl", "avx512_bf16"}, (*_AVX512, "-mavx512bf16", "-DNANO_BF16")),
    "avx512": ({"avx512dq", "avx512vl"}, _AVX512),
    "avx2": ({"avx2", "fma"}, ("-mavx2", "-mfma", "-DNANO_AVX2")),
    "portable": (set(), ()),
}


@functools.cache
def available() -> tuple[str, ...]:
    """The instruction sets that run here, best first; none where there is no compiler."""
    if shutil.which("g++") is None:
        return ()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    has = set(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())
    return tuple(name for name, (needs, _) in INSTRUCTION_SETS.items() if needs <= has)


@functools.cache
def build(name: str) -> ctypes.CDLL:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libhead.so"
    sources = [str(KERNELS / f"{source}.cpp") for source in SOURCES]
    subprocess.run(["g++", *FLAGS, *INSTRUCTION_SETS[name][1], *sources, "-o", str(library)], check=True)
    kernels = ctypes.CDLL(str(library))
    head.declare(kernels)
    return kernels


def best() -> ctypes.CDLL:
    if not available():
        pytest.skip("there is no g++ to build the kernels with")
    return build(available()[0])


@dataclass(frozen=True)
class Packed:
    """A weight laid out as linear.h says."""

    data: Tensor
    rows: int
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def data_ptr(self) -> int:
        return self.data.data_ptr()


def packed(weight: Tensor) -> Packed:
    rows, columns = weight.shape
    if weight.dtype == torch.bfloat16:
        padded = functional.pad(weight, (0, columns % 2, 0, -rows % 16))
        data = padded.view(-1, 16, padded.shape[1] // 2, 2).transpose(1, 2)
    else:
        data = functional.pad(weight, (0, 0, 0, -rows % 16)).view(-1, 16, columns).transpose(1, 2)
    return Packed(data.contiguous(), rows, columns)
