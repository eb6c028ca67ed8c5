"""The built kernels as a ctypes library: mirrors of its structures, checked when it is loaded."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from nano_inference.ops.cpu import head, partial
from nano_inference.ops.cpu.build import KernelsUnavailable, best_instruction_set, build
from nano_inference.ops.cpu.memory import Arena


class NormWeight(Structure):
    """`NormWeight` of rows.h."""

    _fields_ = (
        ("data", c_void_p),
        ("size", c_int64),
        ("is_float", c_int),
        ("eps", c_float),
        ("offset", c_float),
    )


class Segments(Structure):
    """`Segments` of linear.h."""

    _fields_ = (("count", c_int64), ("bounds", c_int64 * 9))


class Op(Structure):
    """`Op` of program.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("kind", "finish", "input", "output", "residual", "layer", "plan", "wide")
        ),
        ("scale", c_float),
        ("read_once", c_int32),
        ("first_column", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("norm", NormWeight),
        ("key_norm", NormWeight),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("segments", Segments),
        ("first_token", c_int64),
        ("vocab", c_int64),
    )


class Layer(Structure):
    """`Layer` of program.h."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("units", c_void_p))


class Window(Structure):
    """`Window` of program.h."""

    _fields_ = (("size", c_int64), ("scale", c_float), ("unused", c_int32))


class ProgramSpec(Structure):
    """`ProgramSpec` of program.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_ops", "num_layers", "num_windows")),
        ("ops", POINTER(Op)),
        ("layers", POINTER(Layer)),
        ("windows", POINTER(Window)),
        *(
            (name, c_int64)
            for name in ("is_bf16", "num_heads", "num_kv_heads", "head_dim", "block_size")
        ),
        *((name, c_int64) for name in ("num_units", "num_blocks", "num_positions")),
    )


class Step(Structure):
    """`Step` of program.h, with its `BatchRows` in front."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_chunks", c_int64),
        *(
            (name, c_void_p)
            for name in ("positions", "slots", "row_chunks", "cu_seqlens", "seq_lens", "tables")
        ),
        ("table_stride", c_int64),
        ("input_ids", c_void_p),
        ("buffers", POINTER(c_void_p)),
        ("row_bytes", POINTER(c_int64)),
        ("num_threads", c_int64),
        ("first", c_int64),
        ("last", c_int64),
        ("seconds", c_void_p),
    )


class Library:
    """The kernels of one instruction set."""

    def __init__(self, path: Path, instruction_set: str) -> None:
        self.path, self.instruction_set = path, instruction_set
        try:
            self.c = ctypes.CDLL(str(path))
        except OSError as problem:
            raise KernelsUnavailable(
                f"the CPU kernels cannot be loaded from {path}: {problem}"
            ) from problem
        c = self.c
        sizes = (c_int64 * 3)()
        c.nano_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(each) for each in (Op, ProgramSpec, Step)]:
            raise KernelsUnavailable(f"{path} was built from another source than this package's.")
        c.nano_program_new.restype = c_void_p
        c.nano_program_new.argtypes = [POINTER(ProgramSpec)]
        c.nano_program_free.argtypes = [c_void_p]
        c.nano_program_run.argtypes = [c_void_p, POINTER(Step)]
        c.nano_ping.restype = c_double
        c.nano_ping.argtypes = [c_int64]
        c.nano_read_rate.restype = c_double
        c.nano_read_rate.argtypes = [c_void_p, c_int64, c_int64]
        c.nano_product_rate.restype = c_double
        c.nano_product_rate.argtypes = [c_int64]
        c.nano_pack.argtypes = [c_void_p, c_int64, c_void_p, *[c_int64] * 5]
        c.nano_unpack.argtypes = [c_void_p, c_void_p, *[c_int64] * 4]
        head.declare(c)
        c.nano_moe_route.argtypes = [
            c_void_p,
            c_int64,
            c_int64,
            c_void_p,
            *[c_int64] * 4,
            c_void_p,
            c_void_p,
            c_int64,
        ]
        c.nano_moe_products.argtypes = [
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            *[c_int64] * 4,
            c_void_p,
            c_void_p,
        ]
        c.nano_moe_products.argtypes += [c_int64, c_int64, c_void_p, c_int64]
        c.nano_moe_combine.argtypes = [
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int64,
            c_void_p,
            c_int64,
        ]
        partial.declare(c)

    def ping(self, rounds: int = 20000) -> float:
        """Seconds for one barrier of two threads: how far apart their cores are."""
        return self.c.nano_ping(rounds)

    def read_rate(self, num_bytes: int = 2**28, num_threads: int = 2) -> float:
        """Bytes a second that threads read from memory; the best of three passes."""
        data = Arena().take((num_bytes // 4,), torch.float32)
        data.fill_(1.0)
        return max(
            self.c.nano_read_rate(data.data_ptr(), data.numel(), num_threads) for _ in range(3)
        )

    def product_rate(self, num_threads: int = 2) -> float:
        """Operations a second of bf16 products out of the caches, two for each pair of numbers; the
        best of three.
        """
        return max(self.c.nano_product_rate(num_threads) for _ in range(3))


@functools.cache
def load(instruction_set: str | None = None) -> Library:
    """The kernels, built if need be. Raises `KernelsUnavailable`."""
    name = instruction_set or best_instruction_set()
    return Library(build(name), name)
