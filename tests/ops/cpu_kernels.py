"""Compiled kernels for tests: one library per instruction set of this machine."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from nano_inference.ops.cpu import build
from nano_inference.ops.cpu.library import load
from nano_inference.ops.cpu.weights import PackedWeight
from tests import depth


@functools.cache
def available(law: build.Law = "pairs") -> tuple[str, ...]:
    """Return the instruction sets that run here and follow this summation law, best first.

    Without AMX, the tile law has two sets: the best one and the portable one. The `quick` tier
    keeps
    the sets that the engine selects and the portable set of the pair law, because each set takes a
    minute to compile. Test modules that import this also run in `rest`.
    """
    has = build._processor_flags() | {"fast_pairs"}
    names = [name for name, (needs, _) in build.INSTRUCTION_SETS.items() if needs <= has]
    pairs = [name for name in names if name != build.AMX]
    emulated = dict.fromkeys(each + build.TILES for each in (pairs[0], pairs[-1]))
    tiles = (*(name for name in names if name == build.AMX), *emulated)
    chosen = tuple(pairs) if law == "pairs" else tiles
    if depth.tier != "quick":
        return chosen
    best = build.best_instruction_set(law)
    return (best,) if law == "tiles" else tuple(dict.fromkeys((best, chosen[-1])))


def kernels(name: str | None = None) -> ctypes.CDLL:
    """Return the library of an instruction set, by default the best. Skip the test if it cannot be
    built.
    """
    try:
        return load(name)
    except build.KernelsUnavailable as problem:
        pytest.skip(str(problem))


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Make engines use one instruction set."""
    kernels(name)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("ops.cpu.build", "ops.cpu.backend", "ops.cpu.library"):
            patch.setattr(f"nano_inference.{module}.best_instruction_set", lambda *_: name)
        yield


def as_packed(weight: Tensor) -> PackedWeight:
    """Return a weight [rows, columns] in the packed layout of the kernels."""
    rows, columns = weight.shape
    packed = PackedWeight(rows, columns, weight.dtype, num_threads=1)
    packed.write(0, weight)
    return packed
