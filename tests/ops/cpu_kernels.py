"""The built kernels for tests: one library for each instruction set that this machine has."""

import ctypes
import functools

import pytest
from torch import Tensor

from nano_inference.ops.cpu import build
from nano_inference.ops.cpu.library import load
from nano_inference.ops.cpu.weights import PackedWeight
from tests import depth


@functools.cache
def available(law: build.Law = "pairs") -> tuple[str, ...]:
    """The builds that keep this law of sums and run here, best first; without AMX the law of tiles
    has two of them, the best and the portable one. The tier `quick` has those that the engine
    chooses, and the portable one of pairs: each takes a minute to compile. Tests of modules that
    import this run in `rest` too.
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
    """The library for an instruction set; None: the best. The test is skipped where nothing can be
    built.
    """
    try:
        return load(name)
    except build.KernelsUnavailable as problem:
        pytest.skip(str(problem))


def as_packed(weight: Tensor) -> PackedWeight:
    """A weight [rows, columns] as the kernels read it."""
    rows, columns = weight.shape
    packed = PackedWeight(rows, columns, weight.dtype, num_threads=1)
    packed.write(0, weight)
    return packed
